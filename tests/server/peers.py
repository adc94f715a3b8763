"""Peers that keep to HTTP/2 and to nothing else: they stop half-way, or never read."""

import socket
import struct
from collections.abc import Iterable

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_INITIAL_WINDOW_SIZE = 4


class Peer:
    """One connection to a gateway without TLS. `window`: bytes that it takes of each call's
    answers; None: HTTP/2's default."""

    def __init__(self, address: str, window: int | None = None) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=30)
        self._stream = -1
        settings = b"" if window is None else struct.pack(">HI", _INITIAL_WINDOW_SIZE, window)
        self.socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, settings))

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_error: object) -> None:
        self.socket.close()

    def begin(self, method: str, token: str | None = None) -> int:
        """Send a call's headers; its stream."""
        self._stream += 2
        fields = [
            (":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "x"),
            ("content-type", "application/grpc"), ("te", "trailers"),
        ]  # fmt: skip
        if token is not None:
            fields.append(("authorization", f"Bearer {token}"))
        self.socket.sendall(_frame(_HEADERS, 4, self._stream, _literals(fields)))
        return self._stream

    def send(self, stream: int, data: bytes) -> None:
        """Some bytes of a message, its length prefix included."""
        self.socket.sendall(_frame(_DATA, 0, stream, data))


def prefixed(message: bytes) -> bytes:
    """A message as gRPC sends it."""
    return struct.pack(">BI", 0, len(message)) + message


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _literals(fields: Iterable[tuple[str, str]]) -> bytes:
    """HPACK without an index: each field a literal, shorter than 127 bytes."""
    return b"".join(
        b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields
    )
