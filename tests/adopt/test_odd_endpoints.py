"""Endpoints that send elsewhere, or answer something else, without end or drop by drop."""

import json
import time
from http.server import BaseHTTPRequestHandler
from threading import Thread

import pytest

from nobackfill.adopt.embedding.endpoint import Endpoint
from nobackfill.errors import InvalidInputError, UnavailableError
from tests.support import hosts


class _Odd(BaseHTTPRequestHandler):
    """Answers as the last part of its path says."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        how = self.path.rpartition("/")[2]
        self.send_response(302 if how == "away" else 429 if how == "odd" else 200)
        if how == "away":
            self.send_header("Location", "http://127.0.0.1:1/elsewhere")
        if how == "odd":
            self.send_header("Retry-After", "\xb2")
        self.end_headers()
        try:
            if how == "html":
                self.wfile.write(b"<html>" * 1000)
            if how == "empty":
                answer = {"data": [{"index": 0, "embedding": []}]}
                self.wfile.write(json.dumps(answer).encode())
            while how == "endless":
                self.wfile.write(bytes(1 << 16))
            while how == "drip":
                self.wfile.write(b" ")
                time.sleep(0.01)
        except OSError:
            """The client has had enough."""

    def log_message(self, *_: object) -> None:
        """Nothing on the terminal."""


def test_an_endpoint_that_answers_oddly_is_left() -> None:
    expected: dict[str, tuple[type[Exception], str]] = {
        "away": (InvalidInputError, "answers 302"),
        "html": (InvalidInputError, r"OpenAI's embeddings API, .* \(Invalid JSON"),
        "empty": (InvalidInputError, "at least 1"),
        "endless": (InvalidInputError, "at most 2097152 bytes"),
        "drip": (UnavailableError, "does not end"),
        "odd": (Exception, "still answers 429"),
    }
    with hosts.Host(("127.0.0.1", 0), _Odd) as server:
        server.daemon_threads = True
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            for how, (kind, words) in expected.items():
                url = f"http://127.0.0.1:{server.server_port}/{how}"
                with pytest.raises(kind, match=words) as refused:
                    Endpoint(url, "small", patience=0, timeout=0.3).embed(["abc"])
                assert "\n" not in str(refused.value)
        finally:
            server.shutdown()
            thread.join()
