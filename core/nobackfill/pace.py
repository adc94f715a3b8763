"""Limit how long a slow source may hold its reader; one rule for every transport.

A host can drip headers, chunk extensions or `100 Continue` for ever without meeting a socket's
timeout, because each wait is short. Therefore a thread of its own reads the source, and the caller
looks only at the clock.
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

# A source that is slower than this over STALL_SECONDS is treated as stalled.
SLOWEST_BYTES_A_SECOND = 1024
STALL_SECONDS = 15.0
# Size of the queue of pieces; a fast host does not fill the memory.
_AHEAD = 2


def read_paced(
    fetch: Callable[[], Iterator[bytes]], deadline: float = float("inf"), *,
    slow_error: type[Exception] = TimeoutError,
) -> Generator[bytes]:  # fmt: skip
    """Yield the pieces of a byte source for as long as they arrive fast enough.

    A thread reads the source, from the first `next` on. Time that the caller takes between two
    pieces counts, too. When the caller stops early, the connection of a `make_http_pool` that the
    source reads from is shut down. Another source ends in its thread at its own next timeout, or
    with the process.

    Args:
        fetch: Opens the source and iterates over its bytes; called in the thread. The thread reads
            at most three pieces ahead.
        deadline: Time on `time.monotonic()` in seconds; no wait goes beyond it. Infinity, the
            default, sets none.
        slow_error: The class of the error for a slow source; it is created with one message.

    Yields:
        Non-empty pieces, in order; none for an empty source. Close the generator to end the reading
        early.

    Raises:
        slow_error: Fewer than SLOWEST_BYTES_A_SECOND arrived over STALL_SECONDS, or the deadline
            passed.
        BaseException: Any error of the source itself.
    """
    source = _Source(fetch)
    threading.Thread(target=source.read, name="fetch", daemon=True).start()
    try:
        begin, count = time.monotonic(), 0
        while True:
            piece = source.wait_piece(min(begin + STALL_SECONDS, deadline))
            clock = time.monotonic()
            if piece is None and (
                clock >= deadline or count < SLOWEST_BYTES_A_SECOND * (clock - begin)
            ):
                raise slow_error(
                    f"the host sends too slowly: expected at least {SLOWEST_BYTES_A_SECOND} bytes "
                    "a second and the whole file before the deadline, got less; try again later"
                )
            if piece is None:
                begin, count = clock, 0
            elif not piece:
                return
            else:
                count += len(piece)
                yield piece
    finally:
        source.give_up()


class _Source:
    """An iterator that another thread reads."""

    def __init__(self, fetch: Callable[[], Iterator[bytes]]) -> None:
        self._fetch = fetch
        self._pieces: queue.Queue[bytes | BaseException] = queue.Queue(_AHEAD)
        self._given_up = threading.Event()
        self._lock = threading.Lock()
        # The connection that the thread reads from, None before and after.
        self._socket: socket.socket | None = None

    def read(self) -> None:
        """Run the thread: read to the end, to an error, or until the caller gives up."""
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
            self.set_socket(None)
        self._pieces.put(last)

    def set_socket(self, connection: socket.socket | None) -> None:
        """Remember the connection that the thread reads from, for `give_up` to shut it down."""
        with self._lock:
            self._socket = connection
            self._cut()

    def wait_piece(self, until: float) -> bytes | None:
        """Return the next piece, b"" at the end, None if none arrived until then.

        Raises:
            BaseException: The error that the source raised.
        """
        try:
            piece = self._pieces.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return None
        if isinstance(piece, BaseException):
            raise piece
        return piece

    def give_up(self) -> None:
        """Let the thread end: it puts at most one more piece, and the queue has room for it."""
        with self._lock:
            self._given_up.set()
            self._cut()
        while True:
            try:
                self._pieces.get_nowait()
            except queue.Empty:
                return

    def _cut(self) -> None:
        """Shut the connection down after `give_up`. Call it under the lock."""
        if self._given_up.is_set() and self._socket is not None:
            # Shut down the plain socket: TLS would send its goodbye and wait.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


# The source that the current thread reads.
_reading: ContextVar[_Source | None] = ContextVar("source", default=None)


class _Cuttable:
    """A connection that tells the source of the current thread its socket."""

    sock: socket.socket | None

    def getresponse(self) -> Any:
        source = _reading.get()
        if source is not None:
            source.set_socket(self.sock)
        return super().getresponse()  # type: ignore[misc]


class _Http(_Cuttable, urllib3.connection.HTTPConnection):
    pass


class _Https(_Cuttable, urllib3.connection.HTTPSConnection):
    pass


class _HttpPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Http


class _HttpsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _Https


def make_http_pool(**settings: Any) -> urllib3.PoolManager:
    """Create a connection pool for `read_paced`: it shuts a connection down when its reader gives
    up.

    Args:
        settings: Arguments of urllib3.PoolManager, which are passed on unchanged.

    Returns:
        The pool; the caller clears it.

    Raises:
        TypeError: urllib3 does not know an argument.
    """
    manager = urllib3.PoolManager(**settings)
    manager.pool_classes_by_scheme = {"http": _HttpPool, "https": _HttpsPool}
    return manager
