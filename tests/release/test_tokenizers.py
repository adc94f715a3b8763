"""Tokenizers that fail by defects of their own: as errors of ours, and never published."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from nobackfill.errors import DefectiveTokenizerError, InvalidInputError, VerificationError
from nobackfill.release.publishing.declaration import Declaration, read_tokenizer
from nobackfill.release.trial import try_release
from nobackfill.text import BatchTokenizer
from tests.support import text_releases

# It goes back and forth over a's that something else follows, until the engine gives up.
ENDLESS = "(a|aa)+$"
HARD = "a" * 40 + "b"


def made(change: Callable[[dict[str, Any]], None]) -> bytes:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "w1": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    said = json.loads(tokenizer.to_str())
    change(said)
    return json.dumps(said).encode()


def no_charsmap(said: dict[str, Any]) -> None:
    said["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}


def endless(said: dict[str, Any]) -> None:
    pattern = {"Regex": ENDLESS}
    said["pre_tokenizer"] = {
        "type": "Split", "pattern": pattern, "behavior": "Removed", "invert": False,
    }  # fmt: skip


def test_a_crash_in_compiled_code_is_an_error_of_ours() -> None:
    with pytest.raises(DefectiveTokenizerError, match=r"t: .* load .* crashed \(Precompiled"):
        BatchTokenizer(made(no_charsmap), 9, "t")
    reader = BatchTokenizer(made(endless), 9, "t")
    for _ in range(2):
        with pytest.raises(
            DefectiveTokenizerError, match=r"t: .* a text, .* crashed .*retry-limit"
        ):
            reader.tokenize(["w1", HARD])
        # It goes on with others.
        assert reader.tokenize(["w1"])["input_ids"].tolist() == [[1]]


def test_nothing_else_is_taken_for_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped:
        def encode_batch(self, _: object) -> None:
            raise KeyboardInterrupt

    reader = BatchTokenizer(made(lambda said: None), 9, "t")
    monkeypatch.setattr(reader, "_tokenizer", Stopped())
    with pytest.raises(KeyboardInterrupt):
        reader.tokenize(["w1"])


def test_a_text_is_cut_beside_what_the_tokenizer_adds() -> None:
    def around(said: dict[str, Any]) -> None:
        token, text = (
            {"SpecialToken": {"id": "w1", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        )
        said["post_processor"] = {
            "type": "TemplateProcessing", "single": [token, text, token], "pair": [text, text],
            "special_tokens": {"w1": {"id": "w1", "ids": [1], "tokens": ["w1"]}},
        }  # fmt: skip

    assert BatchTokenizer(made(around), 3, "t").tokenize(["w1 " * 9])["input_ids"].shape == (1, 3)
    # It would not cut at all.
    with pytest.raises(InvalidInputError, match="adds 2 tokens of its own to each text"):
        BatchTokenizer(made(around), 2, "t")


def test_a_tokenizer_that_takes_the_probes_alone_is_refused_in_the_trial(tmp_path: Path) -> None:
    sound = text_releases.draft(tmp_path / "sound", 1)
    try_release(sound.local_files, sound.manifest)
    bad = text_releases.draft(tmp_path / "bad", 1, splits=ENDLESS)
    with pytest.raises(VerificationError, match=r"retry-limit.*a sound tokenizer\.json"):
        try_release(bad.local_files, bad.manifest)


@pytest.mark.long
def test_a_tokenizer_that_takes_any_memory_is_refused_in_the_trial(tmp_path: Path) -> None:
    draft = text_releases.draft(tmp_path / "bad", 1, grows="q")
    with pytest.raises(VerificationError, match="crash the process that loads them"):
        try_release(draft.local_files, draft.manifest)


@pytest.mark.parametrize("content", ["[]", "{", r'{"a": "\ud800"}'])
def test_a_broken_tokenizer_cannot_read_lower_case(tmp_path: Path, content: str) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(content)
    with pytest.raises(InvalidInputError, match=r"be read as a tokenizer\.json"):
        read_tokenizer(file, Declaration(lower_case=True))
    assert read_tokenizer(file, Declaration()) == content.encode()
