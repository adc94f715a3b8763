"""Tiny models that model2vec itself saves.

`python -m tests.adopt.model2vec_models` writes the folder `library_model2vec`: models as the
library saves them, each with texts and what the library encodes by it. It needs the package
model2vec (0.10 wrote what is committed), which no test needs.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

MODEL2VEC = Path(__file__).parent / "library_model2vec"
_DIM = 4
_WORDS = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(12)), "##1", "##s"]
# One longer than the default limit, one of unknown words alone, one empty.
_TEXTS = [
    "w1 w2 w3", "w7s", " ".join(f"w{number % 12}" for number in range(600)), "unheard w3",
    "unheard", "", "w11" * 40,
]  # fmt: skip


def _wordpiece() -> Tokenizer:
    numbers = {word: number for number, word in enumerate(_WORDS)}
    tokenizer = Tokenizer(models.WordPiece(numbers, unk_token="[UNK]", max_input_chars_per_word=20))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_padding(pad_token="[PAD]")
    return tokenizer


def _unigram() -> Tokenizer:
    scores = [(word, -float(number)) for number, word in enumerate(_WORDS)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=1))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def _cases() -> Iterator[tuple[str, Any]]:
    from model2vec import StaticModel

    rng = np.random.default_rng(0)
    table = rng.normal(size=(len(_WORDS), _DIM)).astype(np.float32)
    yield "plain", StaticModel(table, _wordpiece(), normalize=True)
    yield "half", StaticModel(table.astype(np.float16), _wordpiece(), normalize=True)
    whole = np.round(table * 40).astype(np.int8)
    yield "int8", StaticModel(whole, _wordpiece(), normalize=False)
    yield "short", StaticModel(table, _wordpiece(), max_length=5)
    yield "endless", StaticModel(table, _wordpiece(), max_length=None)
    yield "unigram", StaticModel(table, _unigram(), normalize=True)
    weights = rng.uniform(0.1, 2, len(_WORDS)).astype(np.float32)
    mapping = rng.integers(0, 5, len(_WORDS))
    yield (
        "mapped",
        StaticModel(
            table[:5], _wordpiece(), weights=weights, token_mapping=mapping, normalize=True
        ),
    )


def _write() -> None:
    shutil.rmtree(MODEL2VEC, ignore_errors=True)
    for name, model in _cases():
        model.save_pretrained(MODEL2VEC / name)
        (MODEL2VEC / name / "README.md").unlink(missing_ok=True)
        read = type(model).from_pretrained(MODEL2VEC / name)
        encoded = {"texts": _TEXTS, "vectors": read.encode(_TEXTS).astype(float).tolist()}
        (MODEL2VEC / name / "encoded.json").write_text(json.dumps(encoded) + "\n")


if __name__ == "__main__":
    _write()
