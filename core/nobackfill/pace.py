"""How long a source may take: one rule for every transport, so that no host holds who reads.

A host can drip headers, chunk extensions or `100 Continue` for ever while a socket's own timeout is
never met, since each wait is short. So the source is read in a thread of its own, and who waits for
it looks at the clock alone.
"""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextvars import ContextVar
from typing import Any

import urllib3

# Slower than this over PATIENCE_SECONDS is no download but somebody who holds the reader up.
SLOWEST_BYTES_A_SECOND = 1024
PATIENCE_SECONDS = 15.0
# Pieces that wait to be read; a fast host does not fill the memory.
_AHEAD = 2


def paced(
    fetch: Callable[[], Iterator[bytes]], end: float = float("inf"), *,
    slow: type[Exception] = TimeoutError,
) -> Generator[bytes]:  # fmt: skip
    """The pieces of `fetch()`, for as long as they come fast enough.

    `end`, on the monotonic clock: nothing is waited for after it. Raises `slow`, and whatever the
    source raises. A source that is given up loses the connection of a `pool_manager` that it reads
    from; another ends in its thread at its own next time-out, or with the process.
    """
    source = _Source(fetch)
    threading.Thread(target=source.read, name="fetch", daemon=True).start()
    try:
        start, count = time.monotonic(), 0
        while True:
            piece = source.next(min(start + PATIENCE_SECONDS, end))
            now = time.monotonic()
            if piece is None and (now >= end or count < SLOWEST_BYTES_A_SECOND * (now - start)):
                raise slow(
                    f"less than {SLOWEST_BYTES_A_SECOND} bytes a second came, or nothing whole in "
                    "the time that it may take"
                )
            if piece is None:
                start, count = now, 0
            elif not piece:
                return
            else:
                count += len(piece)
                yield piece
    finally:
        source.give_up()


class _Source:
    """An iterator that is read in another thread."""

    def __init__(self, fetch: Callable[[], Iterator[bytes]]) -> None:
        self._fetch = fetch
        self._pieces: queue.Queue[bytes | BaseException] = queue.Queue(_AHEAD)
        self._given_up = threading.Event()
        self._lock = threading.Lock()
        # The stream that it reads now, until its end.
        self._socket: socket.socket | None = None

    def read(self) -> None:
        """Read to the end, an error, or until nobody wants more; all the thread does."""
        last: bytes | BaseException = b""
        _reading.set(self)
        try:
            for piece in self._fetch():
                if piece:
                    self._pieces.put(piece)
                if self._given_up.is_set():
                    return
        except BaseException as error:  # noqa: BLE001 - raised again where the pieces are read
            last = error
        finally:
            self.reads_from(None)
        self._pieces.put(last)

    def reads_from(self, connection: socket.socket | None) -> None:
        """From here on it is answered there."""
        with self._lock:
            self._socket = connection
            self._cut()

    def next(self, until: float) -> bytes | None:
        """A piece, b"" at the end, None if none came until then. Raises what the source raised."""
        try:
            piece = self._pieces.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return None
        if isinstance(piece, BaseException):
            raise piece
        return piece

    def give_up(self) -> None:
        """Let the thread end: it puts one more piece at most, and there is room for it."""
        with self._lock:
            self._given_up.set()
            self._cut()
        while True:
            try:
                self._pieces.get_nowait()
            except queue.Empty:
                return

    def _cut(self) -> None:
        """Under the lock."""
        if self._given_up.is_set() and self._socket is not None:
            # Not that of TLS, which would say goodbye and wait.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


# The stream that the present thread reads.
_reading: ContextVar[_Source | None] = ContextVar("source", default=None)


class _Cuttable:
    """A connection that ends with who reads from it."""

    sock: socket.socket | None

    def getresponse(self) -> Any:
        source = _reading.get()
        if source is not None:
            source.reads_from(self.sock)
        return super().getresponse()  # type: ignore[misc]


class _Http(_Cuttable, urllib3.connection.HTTPConnection):
    pass


class _Https(_Cuttable, urllib3.connection.HTTPSConnection):
    pass


class _HttpPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Http


class _HttpsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _Https


def pool_manager(**settings: Any) -> urllib3.PoolManager:
    """Connections for what is `paced`: one whose reader is given up is cut."""
    manager = urllib3.PoolManager(**settings)
    manager.pool_classes_by_scheme = {"http": _HttpPool, "https": _HttpsPool}
    return manager
