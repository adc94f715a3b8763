"""Items that a model does not take are named and left out; what was finished is never lost."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from nobackfill.adopt.cli import main
from nobackfill.adopt.embedding import endpoint
from nobackfill.adopt.embedding.embedder import open_embedder
from nobackfill.adopt.embedding.endpoint import Endpoint
from nobackfill.adopt.embedding.vector_folder import ItemList, embed_into
from nobackfill.adopt.pairs import read_all
from nobackfill.adopt.sources.opening import open_source
from nobackfill.errors import BusyError, InvalidInputError, UnavailableError
from tests.adopt.models import image_model
from tests.adopt.test_endpoint import Answer, serving, vectors
from tests.support.clock import replace_clock

Rule = Callable[[int, dict[str, Any]], Answer]
TEXTS = [f"text {number}" for number in range(40)]


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["nobackfill", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def kept(folder: Path) -> set[str]:
    return set(read_all(open_source(str(folder))).ids)


def test_damaged_pictures_are_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    image_model(tmp_path / "model.onnx")
    below = tmp_path / "images" / "below"
    below.mkdir(parents=True)
    for number in range(9):
        Image.new("RGB", (64, 48), (number, 99, 0)).save(below / f"{number}.jpg")
    whole = (below / "3.jpg").read_bytes()
    (below / "3.jpg").write_bytes(whole[: len(whole) // 2])
    (below / "7.jpg").write_bytes(b"")
    # Neither picture is anybody's, and a folder is none.
    (below / "._1.jpg").write_bytes(b"\0\5\26\7Mac OS X")
    (below / "@eaDir").mkdir()
    (below / "@eaDir" / "1.jpg").write_bytes(whole)
    (below / "0.png").mkdir()
    embed = ["embed", "images", "--with", "model.onnx", "--out", "out"]
    assert run(embed, monkeypatch) == 65
    said = capsys.readouterr()
    assert said.out == "7 items embedded now, 2 refused, 7 with a vector in out\n"
    assert "below/3.jpg: image: cannot be decoded" in said.err
    assert "below/7.jpg: image: expected" in said.err
    assert "images: 2 files left out: hidden, or not named as pictures" in said.err
    assert kept(tmp_path / "out") == {f"below/{number}.jpg" for number in (0, 1, 2, 4, 5, 6, 8)}
    # A later run takes them up again, and ends well once they are sound.
    assert run(embed, monkeypatch) == 65
    assert capsys.readouterr().out == "0 items embedded now, 2 refused, 7 with a vector in out\n"
    for number in (3, 7):
        (below / f"{number}.jpg").write_bytes(whole)
    assert run(embed, monkeypatch) == 0
    assert capsys.readouterr().out == "2 items embedded now, 9 with a vector in out\n"


def test_lines_that_are_none_are_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "line_lengths.py").write_text(
        "def embed(texts):\n    return [[len(t), 1.0] for t in texts]\n"
    )
    sound = [json.dumps({"id": number, "text": "x" * (number + 1)}) for number in range(9)]
    odd = [
        "{broken",
        '{"id": "lone"}',
        '{"id": 3, "text": "again"}',
        '{"id": "s", "text": "\\ud800"}',
    ]
    (tmp_path / "items.jsonl").write_text("\n".join([*sound[:4], *odd, *sound[4:]]))
    embed = ["embed", "items.jsonl", "--with", "line_lengths:embed", "--out", "out"]
    # A later run ends alike, and embeds nothing anew: the first line of an id is its text.
    for count in (9, 0):
        assert run(embed, monkeypatch) == 65
        said = capsys.readouterr()
        assert said.out == f"{count} items embedded now, 4 refused, 9 with a vector in out\n"
        for words in (
            "items.jsonl:5: expected a JSON object",
            "items.jsonl:6: expected a JSON object",
            "3: an earlier line has the same id",
            "s: expected an id and a text in valid Unicode",
        ):
            assert words in said.err
    rows = read_all(open_source("out"))
    assert {name: vector[0] for name, vector in zip(rows.ids, rows.vectors, strict=True)} == {
        str(number): number + 1 for number in range(9)
    }
    # Where no line can be read, such as with a wrong --column, the first one is enough.
    assert run([*embed, "--column", "body"], monkeypatch) == 65
    assert capsys.readouterr().err.count("\n") == 1


def empty(_: int, body: dict[str, Any]) -> Answer:
    if "" in body["input"]:
        return 400, {}, b'{"error": {"message": "\'$.input\' is invalid."}}'
    return 200, {}, vectors(body)


def not_a_number(_: int, body: dict[str, Any]) -> Answer:
    if any("bad" in text for text in body["input"]):
        return 500, {}, b'{"error": "unsupported value: NaN"}'
    return 200, {}, vectors(body)


def nan_in_the_answer(_: int, body: dict[str, Any]) -> Answer:
    said = json.loads(vectors(body))
    for one in said["data"]:
        if "bad" in body["input"][one["index"]]:
            one["embedding"][0] = float("nan")
    return 200, {}, json.dumps(said).encode()


def too_long(_: int, body: dict[str, Any]) -> Answer:
    if any(len(text) > 5000 for text in body["input"]):
        return 400, {}, b'{"error": {"message": "maximum context length is 8192 tokens"}}'
    return 200, {}, vectors(body)


@pytest.mark.parametrize(
    ("rule", "bad", "words"),
    [
        (empty, "", "answers 400: '$.input' is invalid."),
        (not_a_number, "a bad one", "answers 500: unsupported value: NaN"),
        (nan_in_the_answer, "a bad one", "expected finite values"),
        (too_long, "x" * 6000, "answers 400: maximum context length"),
    ],
)
def test_a_text_that_an_endpoint_refuses_is_named_and_left_out(
    rule: Rule, bad: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "_FIRST_WAIT", 0.01)
    values = [*TEXTS[:20], bad, *TEXTS[20:], bad]
    items = ItemList("text", [str(number) for number in range(len(values))], values)
    refused: dict[str, str] = {}
    with serving(rule) as (url, asked):
        made = embed_into(
            tmp_path / "out",
            items,
            Endpoint(url, "m"),
            batch_size=8,
            on_failure=refused.__setitem__,
        )
    assert made == 40 and kept(tmp_path / "out") == set(items.ids) - {"20", "41"}
    assert refused.keys() == {"20", "41"}
    assert all(words in why for why in refused.values())
    # Found in halves: not each text by itself.
    assert len(asked) < 30


def test_a_batch_that_is_too_large_is_made_smaller_once(tmp_path: Path) -> None:
    def most(_: int, body: dict[str, Any]) -> Answer:
        if len(body["input"]) > 10:
            return 413, {}, b"batch size is invalid"
        return 200, {}, vectors(body)

    items = ItemList("text", [str(number) for number in range(40)], TEXTS)
    with serving(most) as (url, asked):
        assert embed_into(tmp_path / "out", items, Endpoint(url, "m"), batch_size=32) == 40
    assert [len(one["input"]) for one in asked] == [32, 16, 8, 8, 16, 8, 8, 8]


def test_an_endpoint_that_takes_no_text_at_all_ends_the_run(tmp_path: Path) -> None:
    items = ItemList("text", [str(number) for number in range(40)], TEXTS)
    refuses = b'{"error": {"message": "no such model"}}'
    with (
        serving(lambda *_: (400, {}, refuses)) as (url, asked),
        pytest.raises(
            InvalidInputError, match=r"no such model; the endpoint refuses every other text as well"
        ),
    ):
        embed_into(tmp_path / "out", items, Endpoint(url, "m"), batch_size=8)
    assert len(asked) == 5


def once(status: int, content: bytes) -> Rule:
    def script(number: int, body: dict[str, Any]) -> Answer:
        return (status, {}, content) if number == 1 else (200, {}, vectors(body))

    return script


@pytest.mark.parametrize(
    "rule",
    [
        once(524, b"<html>A timeout occurred</html>"),
        once(200, vectors({"model": "m", "input": ["ab"] * 9})[:150]),
        once(200, b'{"error": {"message": "Provider returned error", "code": 429}}'),
        once(200, b'{"error": "overloaded"}'),
        once(200, vectors({"model": "m", "input": ["ab"]})),
        once(503, b""),
    ],
    ids=["524", "cut off", "error in 200", "words in 200", "too few", "503"],
)
def test_what_may_pass_is_asked_again(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_FIRST_WAIT", 0.01)
    with serving(rule) as (url, asked):
        assert Endpoint(url, "m").embed(["ab", "abc"]).tolist() == [[2] * 3, [3] * 3]
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("status", "content", "kind", "words"),
    [
        (503, b'{"error": {"message": "model is loading"}}', UnavailableError,
         "still answers 503 after 0 s: model is loading"),
        (500, b"out of\n memory", UnavailableError, "still answers 500 after 0 s: out of memory"),
        (429, b"slow down", BusyError, "still answers 429 after 0 s: slow down"),
        (200, b'{"error": {"message": "no credit", "code": "429"}}', BusyError, "no credit"),
        (200, b'{"data": [{"index": 0, "embed', InvalidInputError, "EOF while parsing"),
        (404, b'{"error": "model not found"}', InvalidInputError, "answers 404: model not found"),
    ],
)  # fmt: skip
def test_the_servers_words_are_told(
    status: int, content: bytes, kind: type[Exception], words: str
) -> None:
    with serving(lambda *_: (status, {}, content)) as (url, _), pytest.raises(kind, match=words):
        Endpoint(url, "m", patience=0).embed(["a", "b"])


def test_an_index_that_is_repeated_is_told() -> None:
    def script(_: int, body: dict[str, Any]) -> Answer:
        data = [{"index": 0, "embedding": [1.0, 2.0]} for _ in body["input"]]
        return 200, {}, json.dumps({"data": data}).encode()

    words = "index from 0 to 4 once; it has index 0 5 times"
    with serving(script) as (url, _), pytest.raises(InvalidInputError, match=words):
        Endpoint(url, "m").embed(["a"] * 5)


def test_retry_after_is_kept_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as a date, and beyond the longest wait of our own; past our patience it is told."""
    waits: list[float] = []
    replace_clock(monkeypatch, Endpoint.__module__, sleep=waits.append)
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 50))

    def script(number: int, body: dict[str, Any]) -> Answer:
        after = {1: "40", 2: date}.get(number)
        if after is None:
            return 200, {}, vectors(body)
        return 429, {"Retry-After": after}, b""

    with serving(script) as (url, _):
        Endpoint(url, "m").embed(["a"])
    assert waits[0] == 40 and 40 < waits[1] <= 50
    with (
        serving(lambda *_: (429, {"Retry-After": "3600"}, b"")) as (url, asked),
        pytest.raises(BusyError, match=r"asks to wait 3600 s: .* --patience"),
    ):
        Endpoint(url, "m").embed(["a"])
    assert len(asked) == 1


def test_a_function_that_fails_on_an_item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("failing.py").write_text(
        "def embed(items):\n"
        "    if 'text 7' in items: raise ValueError('seven')\n"
        "    return [[1.0, 2.0]] * len(items)\n"
        "def never(items): return [1 / 0 for _ in items]\n"
    )
    items = ItemList("text", [str(number) for number in range(40)], TEXTS)
    refused: dict[str, str] = {}
    model = open_embedder("failing:embed")
    assert embed_into(tmp_path / "out", items, model, on_failure=refused.__setitem__) == 39
    assert refused == {
        "7": "failing:embed: the function raised ValueError in line 2 of failing.py (seven); "
        "correct the function, or leave the item out"
    }
    many = ItemList("text", [str(number) for number in range(2000)], TEXTS * 50)
    with pytest.raises(InvalidInputError, match=r"none of the first 1000 .*ZeroDivisionError"):
        embed_into(tmp_path / "never", many, open_embedder("failing:never"))


def test_ctrl_c_keeps_each_batch_that_was_finished(tmp_path: Path) -> None:
    """A process of its own, interrupted while it waits for the fourth answer."""
    lines = [json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(TEXTS)]
    (tmp_path / "items.jsonl").write_text("".join(lines))
    child: list[subprocess.Popen[bytes]] = []

    def script(number: int, body: dict[str, Any]) -> Answer:
        if number == 4:
            child[0].send_signal(signal.SIGINT)
            child[0].wait(60)
        return 200, {}, vectors(body)

    with serving(script) as (url, asked):
        words = ["embed", "items.jsonl", "--with", url, "--model-name", "m", "--out", "out"]
        command = [sys.executable, "-m", "nobackfill.adopt.cli", *words, "--batch", "8"]
        environment = dict(os.environ)
        child.append(
            subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE)
        )
        _, error = child[0].communicate(timeout=60)
        assert child[0].returncode == 130
    assert b"to continue, run: nobackfill embed items.jsonl" in error
    assert kept(tmp_path / "out") == {str(number) for number in range(24)}
    assert len(asked) == 4
