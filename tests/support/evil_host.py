"""An HTTP host that means harm: one behaviour for every connection, below what http.server allows.

A behaviour gets the connection after the request's first bytes, and is ended by its peer's leaving
or by the host's.
"""

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

Behaviour = Callable[[socket.socket, threading.Event], None]

_OK = b"HTTP/1.1 200 OK\r\n"
_PAUSE = 0.02


def _send(first: bytes, pieces: Iterable[bytes] = (), pause: float = 0.0) -> Behaviour:
    """Send `first`, then `pieces` one at a time, then hang up."""

    def behave(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(first)
        for piece in pieces:
            if over.wait(pause):
                return
            connection.sendall(piece)

    return behave


def _drip(first: bytes, piece: bytes) -> Behaviour:
    return _send(first, itertools.repeat(piece), _PAUSE)


def _silent(first: bytes) -> Behaviour:
    def behave(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(first)
        over.wait()

    return behave


def _reset(connection: socket.socket, over: threading.Event) -> None:
    linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


def _redirect(to: str) -> Behaviour:
    return _send(f"HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode())


_CHUNKED = _OK + b"Transfer-Encoding: chunked\r\n\r\n"
BEHAVIOURS: dict[str, Behaviour] = {
    "hangs up": _send(b""),
    "resets": _reset,
    "says nothing": _silent(b""),
    "drips the status line": _drip(b"HTTP/1.1 2", b"0"),
    "drips headers": _drip(_OK, b"X-A: b\r\n"),
    "endless headers": _send(_OK, itertools.repeat(b"X-A: b\r\n" * 100)),
    "one endless header": _send(_OK + b"X-A: ", itertools.repeat(b"a" * 65_536)),
    "100 Continue for ever": _drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "100 Continue, fast": _send(b"", itertools.repeat(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)),
    "drips the body": _drip(_OK + b"Content-Length: 1000000\r\n\r\n", b"x"),
    "silent after headers": _silent(_OK + b"Content-Length: 1000000\r\n\r\n"),
    "drips a chunk extension": _drip(_CHUNKED + b"5;", b"a"),
    "a chunk size that is none": _send(_CHUNKED + b"zz\r\nabc"),
    "a negative chunk size": _send(_CHUNKED + b"-5\r\nabc"),
    "a huge chunk size": _silent(_CHUNKED + b"f" * 15 + b"\r\nabc"),
    "empty chunks for ever": _drip(_CHUNKED, b"1\r\nx\r\n"),
    "endless trailers": _send(_CHUNKED + b"0\r\n", itertools.repeat(b"X-A: b\r\n" * 100)),
    "a negative length": _send(_OK + b"Content-Length: -5\r\n\r\nabc"),
    "two lengths": _send(_OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef"),
    "an endless body": _send(_OK + b"\r\n", itertools.repeat(b"x" * 65_536)),
    "gzip of nothing": _send(_OK + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc"),
    "no HTTP": _send(b"SSH-2.0-OpenSSH_9.2\r\n"),
    "garbage": _send(bytes(range(256)) * 20),
    "Retry-After, 503": _send(
        b"HTTP/1.1 503 No\r\nRetry-After: 86400\r\nContent-Length: 0\r\n\r\n"
    ),
    "Retry-After, 429": _send(
        b"HTTP/1.1 429 No\r\nRetry-After: 86400\r\nContent-Length: 0\r\n\r\n"
    ),
    "redirects to itself": _redirect("/"),
    "redirects to a file": _redirect("file:///etc/passwd"),
    "redirects to nothing": _redirect("http://127.0.0.1:1/"),
    "redirects to a bad address": _redirect("http://[::1"),
    "304": _send(b"HTTP/1.1 304 Not Modified\r\n\r\n"),
    "204": _send(b"HTTP/1.1 204 No Content\r\n\r\n"),
    "206 that nobody asked for": _send(
        b"HTTP/1.1 206 Partial\r\nContent-Range: bytes 5-9/10\r\nContent-Length: 5\r\n\r\nabcde"
    ),
    "500": _send(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"),
}


def every_fifth(behaviours: Mapping[str, object]) -> list[Any]:
    """Their names as parameters of a test: `make test` tries a fifth, `make faults` the others.

    Most of them are waited for, each for a second.
    """
    return [
        name if number % 5 == 0 else pytest.param(name, marks=pytest.mark.faults)
        for number, name in enumerate(behaviours)
    ]


@contextmanager
def evil_host(behaviour: Behaviour) -> Iterator[str]:
    """The address of a host that does this to everybody, for as long as the context lasts."""
    over = threading.Event()
    threads: list[threading.Thread] = []

    def serve_one(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(10)
            connection.recv(65_536)
            behaviour(connection, over)

    def serve(server: socket.socket) -> None:
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                connection, _ = server.accept()
                threads.append(threading.Thread(target=serve_one, args=(connection,)))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0), backlog=50) as server:
        server.settimeout(0.1)
        accepting = threading.Thread(target=serve, args=(server,))
        accepting.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}/"
        finally:
            over.set()
            accepting.join()
            for thread in threads:
                thread.join()
