"""A gateway that means harm: a real gRPC server whose FetchFile does one thing to everybody."""

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc

from nobackfill.v1 import release_pb2 as pb
from nobackfill.v1 import release_pb2_grpc

# (path, offset, context, the host's end) -> chunks.
Behaviour = Callable[[str, int, grpc.ServicerContext, threading.Event], Iterator[bytes]]

ESCAPES = "\x1b[2J\x1b]0;title\x07\rall is well\u202e\n" * 3
_PAUSE = 0.02


def _drip(piece: bytes) -> Behaviour:
    def behave(
        path: str, offset: int, context: grpc.ServicerContext, over: threading.Event
    ) -> Iterator[bytes]:
        while not over.wait(_PAUSE):
            yield piece

    return behave


def _flood(piece: bytes) -> Behaviour:
    def behave(
        path: str, offset: int, context: grpc.ServicerContext, over: threading.Event
    ) -> Iterator[bytes]:
        return itertools.takewhile(lambda _: not over.is_set(), itertools.repeat(piece))

    return behave


def _once(*pieces: bytes) -> Behaviour:
    return lambda path, offset, context, over: iter(pieces)


def _silent(
    path: str, offset: int, context: grpc.ServicerContext, over: threading.Event
) -> Iterator[bytes]:
    over.wait()
    yield from ()


def _silent_after_a_byte(
    path: str, offset: int, context: grpc.ServicerContext, over: threading.Event
) -> Iterator[bytes]:
    yield b"{"
    over.wait()


def _fail(code: grpc.StatusCode, first: bytes = b"") -> Behaviour:
    def behave(
        path: str, offset: int, context: grpc.ServicerContext, over: threading.Event
    ) -> Iterator[bytes]:
        if first:
            yield first
        context.abort(code, f"{path}: {ESCAPES}")

    return behave


def _garbled(
    path: str, offset: int, context: grpc.ServicerContext, over: threading.Event
) -> Iterator[bytes]:
    """An error whose details are no message."""
    context.set_trailing_metadata((("grpc-status-details-bin", b"\xff\xff\xff"),))
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no")
    yield from ()


def _unforeseen(
    path: str, offset: int, context: grpc.ServicerContext, over: threading.Event
) -> Iterator[bytes]:
    yield b"x"
    raise RuntimeError(ESCAPES)


BEHAVIOURS: dict[str, Behaviour] = {
    "nothing": _once(),
    "one empty message": _once(b""),
    "says nothing": _silent,
    "silent after a byte": _silent_after_a_byte,
    "drips": _drip(b"x"),
    "drips nothing": _drip(b""),
    "endless": _flood(b"x" * 65_536),
    "endless empty messages": _flood(b""),
    "other bytes": _once(b"{}"),
    "zeros": _once(bytes(100_000)),
    "nested": _once(b"[" * 200_000),
    "a wrong offset": lambda path, offset, context, over: iter([b"x" * (offset + 5)]),
    "a huge message": _once(bytes(65 * 2**20)),
    "large messages": _flood(bytes(16 * 2**20)),
    "a page of HTML": _once(b"<html>sign in</html>"),
    "garbled details": _garbled,
    "raises": _unforeseen,
    **{f"{c.name}": _fail(c) for c in grpc.StatusCode if c is not grpc.StatusCode.OK},
    "UNAVAILABLE after a byte": _fail(grpc.StatusCode.UNAVAILABLE, b"x"),
    "OUT_OF_RANGE after a byte": _fail(grpc.StatusCode.OUT_OF_RANGE, b"x"),
}


class EvilGateway(release_pb2_grpc.ReleaseServiceServicer):
    """Serves the folder `honest`; files whose path `harmed` accepts get `behaviour` instead."""

    def __init__(self, honest: Path) -> None:
        self._honest = honest
        self.behaviour = BEHAVIOURS["nothing"]
        self.harmed: Callable[[str], bool] = lambda path: True
        self.over = threading.Event()

    def FetchFile(  # noqa: N802
        self, request: pb.FetchFileRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.FetchFileResponse]:
        if self.harmed(request.path):
            for chunk in self.behaviour(request.path, request.offset, context, self.over):
                yield pb.FetchFileResponse(chunk=chunk, size=2**63)
                if not context.is_active():
                    return
            return
        file = self._honest / request.path
        if not file.is_file():
            context.abort(grpc.StatusCode.NOT_FOUND, request.path)
        yield pb.FetchFileResponse(chunk=file.read_bytes()[request.offset :])


@contextmanager
def evil_gateway(honest: Path) -> Iterator[tuple[EvilGateway, str]]:
    """The servicer, to be told what to do, and its address as a source."""
    servicer = EvilGateway(honest)  # type: ignore[abstract] # devices call nothing else
    server = grpc.server(
        futures.ThreadPoolExecutor(16), options=[("grpc.max_send_message_length", -1)]
    )
    release_pb2_grpc.add_ReleaseServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield servicer, f"grpc://127.0.0.1:{port}"
    finally:
        servicer.over.set()
        server.stop(0).wait()
