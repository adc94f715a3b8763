"""Streams end that stand still because of their client, are too old, or whose token is no longer
good, so that they hold no thread and nobody who was shut out goes on."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import structlog

from nobackfill.errors import NobackfillError
from nobackfill.server.grpc.error_boundary import error_boundary
from nobackfill.server.grpc.metrics import Metrics

log = structlog.get_logger("server.stalls")

# A client that neither sends nor reads for so long has gone, or means harm.
PATIENCE_S = 60.0
_EVERY_S = 0.5
# A stream that was asked to end is cut off after so long.
_GRACE_S = 1.0


class OpenStream:
    """One stream, from its first step to its end."""

    def __init__(
        self, context: grpc.ServicerContext, confirm: Callable[[], None], longest_s: float, *,
        hears: bool, drained: bool,
    ) -> None:  # fmt: skip
        """`confirm` raises once the caller may not go on. `longest_s`: its age at most. `hears`:
        its work looks whether it is `active`. `drained`: the gateway's end waits for it."""
        self.context = context
        self.confirm = confirm
        self.ends = time.monotonic() + longest_s
        self.drained = drained
        # Why it was ended, if its caller is to hear that; whether it was because of its age.
        self.reason: NobackfillError | None = None
        self.is_old = False
        # Since when it waits for its client.
        self.waiting: float | None = None
        self._grace_s = _GRACE_S if hears else 0.0
        self._stopped: float | None = None

    def active(self) -> bool:
        """Whether its work goes on."""
        return self._stopped is None and self.context.is_active()

    def check(self) -> None:
        """Raises UnauthenticatedError for a message of a caller who may not go on."""
        self.confirm()
        if self.reason is not None:
            raise self.reason

    def stop(self, reason: NobackfillError | None = None) -> None:
        """Ask it to end, and cut it off where it does not."""
        now = time.monotonic()
        if self._stopped is None:
            self.reason, self._stopped = reason, now
        if now - self._stopped >= self._grace_s:
            self.context.cancel()

    def look(self) -> None:
        """End it where it has to end by now."""
        try:
            self.confirm()
        except NobackfillError as error:
            self.stop(error)
        if self._stopped is None and time.monotonic() > self.ends:
            self.is_old = True
            self.stop()
        elif self._stopped is not None:
            # It may not have heard.
            self.stop()


class Stalls:
    """Watches streams from one thread. Time that the gateway itself takes does not count as
    standing still."""

    def __init__(self, metrics: Metrics, patience_s: float = PATIENCE_S) -> None:
        self._metrics = metrics
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._streams: set[OpenStream] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stalls", daemon=True)
        self._thread.start()

    def watch(self, stream: OpenStream) -> Callable[[], None]:
        """Watch a stream from now on; returns what to call once it has ended."""
        with self._lock:
            self._streams.add(stream)
        return lambda: self._forget(stream)

    def requests(self, requests: Iterator[Any], stream: OpenStream) -> Iterator[Any]:
        """The client's messages, each of a caller who may still send them; waiting for each is
        watched."""
        while True:
            stream.waiting = time.monotonic()
            try:
                request = next(requests)
            except StopIteration:
                return
            finally:
                stream.waiting = None
            stream.check()
            yield request

    def responses(self, responses: Iterator[Any], stream: OpenStream) -> Iterator[Any]:
        """Our messages, each to a caller who may still read them; until the client takes each is
        watched."""
        for response in responses:
            stream.check()
            stream.waiting = time.monotonic()
            try:
                yield response
            finally:
                stream.waiting = None

    def end_all(self) -> None:
        """End the streams that nobody waits for at the gateway's end, now."""
        for stream in self._all():
            if not stream.drained:
                stream.stop()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _all(self) -> list[OpenStream]:
        with self._lock:
            return list(self._streams)

    def _forget(self, stream: OpenStream) -> None:
        with self._lock:
            self._streams.discard(stream)

    def _watch(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            with error_boundary(self._metrics, "stalls"):
                for stream in self._all():
                    stream.look()
                    since = stream.waiting
                    if since is not None and time.monotonic() - since > self._patience_s:
                        log.warning("transfer ended, its client stands still")
                        stream.context.cancel()
