"""Tiny models that sentence-transformers itself saves.

`python -m tests.adopt.library_models` writes the folder `library`: a model with a Dense module, as
the library saves it, with its ONNX file; and `old.json`, folders in the layout of before 5.4 with
what the library encodes by them.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn

from nobackfill.training.export.onnx_export import strip_model

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

LIBRARY = Path(__file__).parent / "library"
GRAPH = LIBRARY / "onnx" / "model.onnx"
DIM = 8
LENGTH = 24
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*_SPECIAL, *(f"w{number}" for number in range(30))]
# Of other lengths, one longer than the model reads, one with capitals.
TEXTS = ["w1 w2 w3", "w7", " ".join(f"w{n % 30}" for n in range(40)), "W9 w9 w1 w29"]


def dense() -> list[Any]:
    """Modules behind the Transformer, of the same weights each time."""
    torch.manual_seed(1)
    return [Pooling(DIM, "mean"), Dense(DIM, 5), Normalize()]


def save(folder: Path, modules: list[Any], **settings: Any) -> Any:
    """The model of LIBRARY's Transformer and `modules`, saved by the library and read by it."""
    return _save(folder, LIBRARY, modules, **settings)


def static(dim: int = 6, seed: int = 0) -> StaticEmbedding:
    """A table of vectors of WORDS by the tokenizer of LIBRARY."""
    torch.manual_seed(seed)
    tokenizer = Tokenizer.from_file(str(LIBRARY / "tokenizer.json"))
    return StaticEmbedding(tokenizer, embedding_weights=torch.randn(len(WORDS), dim))


def save_modules(folder: Path, modules: list[Any], **settings: Any) -> Any:
    """The library's model, as it reads the folder that it saved."""
    made = SentenceTransformer(modules=modules, device="cpu", **settings)
    made.save_pretrained(str(folder), create_model_card=False)
    return SentenceTransformer(str(folder), device="cpu")


def _write_base(folder: Path) -> Path:
    """A BERT of one layer and its tokenizer, as transformers saves them."""
    numbers = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]", model_max_length=LENGTH,
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(0)
    sizes = {"hidden_size": DIM, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = BertConfig(
        vocab_size=len(WORDS), intermediate_size=DIM, max_position_embeddings=LENGTH + 8, **sizes
    )
    BertModel(config).save_pretrained(folder)
    return folder


def _save(folder: Path, base: Path, modules: list[Any], **settings: Any) -> Any:
    """The model of a Transformer and `modules`, saved by the library, and read again by it."""
    first = Transformer(str(base), **settings.pop("transformer", {}))
    made = SentenceTransformer(modules=[first, *modules], device="cpu", **settings)
    made.save_pretrained(str(folder), create_model_card=False)
    return SentenceTransformer(str(folder), device="cpu")


def _export(model: Any, path: Path) -> None:
    """An ONNX file with the tokens' vectors and, behind all modules, `sentence_embedding`."""
    encoder, rest = model[0].auto_model.eval(), list(model)[1:]
    encoder.config._attn_implementation = "eager"

    class _Whole(nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
            run: Callable[..., Any] = encoder
            tokens = run(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            features = {"token_embeddings": tokens, "attention_mask": attention_mask}
            for module in rest:
                features = module(features)
            return tokens, features["sentence_embedding"]

    ids = torch.tensor([[2, 5, 6, 3, 0], [2, 7, 8, 9, 3]])
    free = {0: torch.export.Dim("n"), 1: torch.export.Dim("t", max=LENGTH)}
    path.parent.mkdir(parents=True)
    torch.onnx.export(
        _Whole().eval(), (ids, torch.ones_like(ids)), str(path), verbose=False, dynamo=True,
        input_names=["input_ids", "attention_mask"], external_data=False,
        output_names=["token_embeddings", "sentence_embedding"], dynamic_shapes=(free, free),
    )  # fmt: skip
    graph = onnx.load(path)
    strip_model(graph)
    onnx.save(graph, path)


def _old_cases() -> dict[str, dict[str, Any]]:
    """Files of a folder in the old layout by name, and why it is refused; None where it is not."""
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")

    def folder(on: str, bert: dict[str, object] | None, *more: str, **prompts: str) -> Any:
        names = ["Transformer", "Pooling", *more]
        paths = ["", *(f"{number}_{name}" for number, name in enumerate(names) if number)]
        kinds = [f"sentence_transformers.models.{name}" for name in names]
        flags = {f"pooling_mode_{mode}": mode in on.split() for mode in modes}
        files: dict[str, object] = {
            "modules.json": [
                {"idx": number, "name": str(number), "path": path, "type": kind}
                for number, (path, kind) in enumerate(zip(paths, kinds, strict=True))
            ],
            "1_Pooling/config.json": {"word_embedding_dimension": DIM, **flags},
        }
        for number, name in enumerate(more, 2):
            files[f"{number}_{name}/config.json"] = {}
        if bert is not None:
            files["sentence_bert_config.json"] = bert
        if prompts:
            files["config_sentence_transformers.json"] = {
                "__version__": {"sentence_transformers": "3.0.1"}, "prompts": prompts,
                "default_prompt_name": None,
            }  # fmt: skip
        return files

    usual: dict[str, object] = {"max_seq_length": 16, "do_lower_case": False}
    lower = usual | {"do_lower_case": True}
    open_length: dict[str, object] = {"max_seq_length": None, "do_lower_case": False}
    projection: dict[str, object] = {
        "2_Dense/config.json": {
            "in_features": DIM, "out_features": 5, "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
        }
    }  # fmt: skip
    roberta = folder("mean_tokens", None, "Normalize") | {"sentence_roberta_config.json": usual}
    cases: dict[str, tuple[Any, str | None]] = {
        "mean": (folder("mean_tokens", usual, "Normalize"), None),
        "cls": (folder("cls_token", usual), None),
        "no flag is mean": (folder("", usual), None),
        "no sizes": (folder("mean_tokens", None), None),
        "sizes by another name": (roberta, None),
        "an open size": (folder("mean_tokens", open_length), None),
        "prompts": (folder("mean_tokens", usual, query="w20 "), None),
        "small letters": (folder("mean_tokens", lower), None),
        "two modes": (folder("cls_token mean_tokens", usual), None),
        "max": (folder("max_tokens", usual), None),
        "dense": (
            folder("mean_tokens", usual, "Dense") | {"2_Dense/config.json": projection},
            None,
        ),
        "layer norm": (folder("mean_tokens", usual, "LayerNorm"), "2_LayerNorm"),
    }
    return {name: {"files": files, "refused": why} for name, (files, why) in cases.items()}


def lay_out(folder: Path, files: dict[str, object]) -> Path:
    """LIBRARY's folder with these files for its own; its ONNX file."""
    shutil.copytree(LIBRARY, folder, dirs_exist_ok=True)
    for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
        (folder / name).unlink(missing_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder / "onnx" / "model.onnx"


def _write() -> None:
    shutil.rmtree(LIBRARY, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        base = _write_base(Path(name) / "base")
        _export(_save(LIBRARY, base, dense()), GRAPH)
        cases = _old_cases()
        for number, case in enumerate(cases.values()):
            if case["refused"] is None:
                lay_out(Path(name) / str(number), case["files"])
                model = SentenceTransformer(str(Path(name) / str(number)), device="cpu")
                case["encoded"] = model.encode(TEXTS).tolist()
    (LIBRARY / "old.json").write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    _write()
