"""How long a source may take: one rule for every transport, so that no host holds who reads.

A host can drip headers, chunk extensions or `100 Continue` for ever while a socket's own timeout is
never met, since each wait is short. So the source is read in a thread of its own, and who waits for
it looks at the clock alone.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator

from tuf.api.exceptions import SlowRetrievalError

# Slower than this over PATIENCE_SECONDS is no download but somebody who holds the reader up.
SLOWEST_BYTES_A_SECOND = 1024
PATIENCE_SECONDS = 15.0
# Pieces that wait to be read; a fast host does not fill the memory.
_AHEAD = 2


def paced(fetch: Callable[[], Iterator[bytes]], end: float = float("inf")) -> Iterator[bytes]:
    """The pieces of `fetch()`, for as long as they come fast enough.

    `end`, on the monotonic clock: nothing is waited for after it. Raises SlowRetrievalError, and
    whatever the source raises. A source that was given up ends in its thread at its own next
    time-out, or with the process.
    """
    source = _Source(fetch)
    threading.Thread(target=source.read, name="fetch", daemon=True).start()
    try:
        start, count = time.monotonic(), 0
        while True:
            piece = source.next(min(start + PATIENCE_SECONDS, end))
            now = time.monotonic()
            if piece is None and (now >= end or count < SLOWEST_BYTES_A_SECOND * (now - start)):
                raise SlowRetrievalError(
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

    def read(self) -> None:
        """Read to the end, an error, or until nobody wants more; all the thread does."""
        last: bytes | BaseException = b""
        try:
            for piece in self._fetch():
                if piece:
                    self._pieces.put(piece)
                if self._given_up.is_set():
                    return
        except BaseException as error:  # noqa: BLE001 - raised again where the pieces are read
            last = error
        self._pieces.put(last)

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
        self._given_up.set()
        while True:
            try:
                self._pieces.get_nowait()
            except queue.Empty:
                return
