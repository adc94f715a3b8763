"""An endpoint in the form of OpenAI's, on this machine: busy, slow, broken, changing its model."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from nobackfill.adopt.cli import main
from nobackfill.adopt.embedding import endpoint
from nobackfill.adopt.embedding.endpoint import KEY_VARIABLE, Endpoint
from nobackfill.adopt.embedding.vector_folder import ItemList, embed_into
from nobackfill.adopt.pairs import read_all
from nobackfill.adopt.sources.opening import open_source
from nobackfill.errors import (
    BusyError,
    ConfigurationError,
    InvalidInputError,
    NotPermittedError,
    UnavailableError,
)
from tests.support import hosts
from tests.support.clock import replace_clock
from tests.support.documents import run_command

Answer = tuple[int, dict[str, str], bytes]
Script = Callable[[int, dict[str, Any]], Answer]


def vectors(body: dict[str, Any], dim: int = 3) -> bytes:
    data = [
        {"object": "embedding", "index": n, "embedding": [float(len(text))] * dim}
        for n, text in enumerate(body["input"])
    ]
    # The order of the answers is not promised.
    return json.dumps({"object": "list", "data": data[::-1], "model": body["model"]}).encode()


@contextmanager
def serving(script: Script) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address, and what was asked; `script` answers by the number of the request."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append({**body, "key": self.headers.get("Authorization")})
            status, headers, content = script(len(asked), body)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Nothing on the terminal."""

    with hosts.Host(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/embeddings", asked
        finally:
            server.shutdown()
            thread.join()


def test_texts_are_asked_in_batches_and_answers_put_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    items = ItemList("text", [str(n) for n in range(5)], ["a" * (n + 1) for n in range(5)])
    with serving(lambda _, body: (200, {}, vectors(body))) as (url, asked):
        embed_into(tmp_path / "out", items, Endpoint(url, "small"), batch_size=2)
    rows = read_all(open_source(str(tmp_path / "out")))
    assert rows.vectors[:, 0].tolist() == [1, 2, 3, 4, 5]
    assert [len(one["input"]) for one in asked] == [2, 2, 1]
    assert {one["model"] for one in asked} == {"small"}
    assert {one["key"] for one in asked} == {"Bearer secret"}


def test_dimensions_are_requested_and_checked() -> None:
    with serving(lambda _, body: (200, {}, vectors(body, body.get("dimensions", 3)))) as (
        url,
        bodies,
    ):
        whole, short = Endpoint(url, "small"), Endpoint(f"{url}#dimensions=2", "small")
        assert whole.embed(["a"]).shape == (1, 3)
        assert short.embed(["a", "b"]).shape == (2, 2)
    assert [one.get("dimensions") for one in bodies] == [None, 2]
    assert whole.fingerprint != short.fingerprint
    with serving(lambda _, body: (200, {}, vectors(body))) as (url, _):
        with pytest.raises(InvalidInputError, match="dimension 2 as declared, got 3"):
            Endpoint(f"{url}#dimensions=2", "small").embed(["a"])
        for wrong in ("dimensions=0", "dimensions=x", "dim=2", "dimensions=2\n"):
            with pytest.raises(ConfigurationError, match="dimensions=NUMBER"):
                Endpoint(f"{url}#{wrong}", "small")


def test_a_busy_endpoint_is_waited_for_as_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    replace_clock(monkeypatch, Endpoint.__module__, sleep=waits.append)

    def script(number: int, body: dict[str, Any]) -> Answer:
        if number == 1:
            return 429, {"Retry-After": "7"}, b"slow down"
        return (503, {}, b"") if number == 2 else (200, {}, vectors(body))

    with serving(script) as (url, asked):
        assert Endpoint(url, "small").embed(["abc"]).tolist() == [[3, 3, 3]]
    assert len(asked) == 3
    assert waits[0] == 7
    assert len(waits) == 2


def test_what_was_embedded_before_it_gave_up_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nobackfill.adopt.embedding.vector_folder.PART_ITEMS", 4)
    items = ItemList("text", [str(n) for n in range(10)], ["a"] * 10)
    gives_up = True

    def script(number: int, body: dict[str, Any]) -> Answer:
        busy = number > 4 and gives_up
        return (429, {}, b"") if busy else (200, {}, vectors(body))

    with serving(script) as (url, _):
        with pytest.raises(BusyError, match="still answers 429"):
            embed_into(tmp_path / "out", items, Endpoint(url, "small", patience=0.1), batch_size=2)
        gives_up = False
        assert embed_into(tmp_path / "out", items, Endpoint(url, "small"), batch_size=2) == 2
    assert len(read_all(open_source(str(tmp_path / "out")))) == 10


def test_other_dimensions_than_before_are_refused() -> None:
    def script(number: int, body: dict[str, Any]) -> Answer:
        return 200, {}, vectors(body, dim=3 if number == 1 else 4)

    with serving(script) as (url, _):
        found = Endpoint(url, "small")
        found.embed(["a"])
        with pytest.raises(InvalidInputError, match=r"dimension 3 as before, got 4"):
            found.embed(["a"])


@pytest.mark.parametrize(
    ("status", "content", "error", "words"),
    [
        (401, b"", NotPermittedError, KEY_VARIABLE),
        (400, b"too long", InvalidInputError, "answers 400: too long"),
        (302, b"", InvalidInputError, "answers 302"),
        (200, b"<html>", InvalidInputError, "in the form of OpenAI's"),
        (200, b'{"data": []}', InvalidInputError, "it returned 0 for 2"),
        (500, b"", UnavailableError, "still answers 500"),
    ],
)
def test_what_else_it_may_answer_gets_a_sentence(
    status: int, content: bytes, error: type[Exception], words: str
) -> None:
    with serving(lambda *_: (status, {}, content)) as (url, _), pytest.raises(error, match=words):
        Endpoint(url, "small", patience=0).embed(["a", "b"])


def test_one_that_is_slow_or_not_there_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_FIRST_WAIT", 0.01)
    asleep = threading.Event()

    def script(_: int, body: dict[str, Any]) -> Answer:
        asleep.wait(20)
        return 200, {}, vectors(body)

    with serving(script) as (url, _):
        with pytest.raises(UnavailableError, match="does not answer"):
            Endpoint(url, "small", patience=0.1, timeout=0.1).embed(["a"])
        asleep.set()
    with pytest.raises(UnavailableError, match="does not answer"):
        Endpoint(url, "small", patience=0).embed(["a"])


def test_private_texts_leave_this_machine_by_tls_alone() -> None:
    for url in ("http://embeddings.example/v1", "http://10.0.0.1/v1", "http://127.0.0.1.example/"):
        with pytest.raises(ConfigurationError, match="expected https"):
            Endpoint(url, "small")


def test_two_endpoints_have_each_a_model_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = tmp_path / "asked.jsonl"
    asks.write_text('{"id": "1", "text": "what"}\n')
    with (
        serving(lambda _, body: (200, {}, vectors(body))) as (items, by_items),
        serving(lambda _, body: (200, {}, vectors(body))) as (encoder, by_encoder),
    ):
        words = [
            "embed", str(asks), "--with", items, "--model-name", "large", "--out",
            str(tmp_path / "asked"), "--query-encoder", encoder,
        ]  # fmt: skip
        run_command(main, ["nobackfill", *words, "--query-model-name", "small"], monkeypatch)
        assert [one["model"] for one in by_encoder] == ["small"] and not by_items
