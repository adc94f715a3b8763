"""A connection to one gateway: what the calls of every service share."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Self, TypeVar

from nobackfill.wire import calls
from nobackfill.wire.channel import open_channel

T = TypeVar("T")
# The trailer of a watch that the gateway ended because of its age: its caller watches again.
WATCH_AGAIN = "x-watch-again"


class Connection:
    """A channel, and how calls go through it; usable from several threads.

    `address` is HOST:PORT, grpc://HOST:PORT or grpcs://HOST:PORT, or several gateways with the same
    galleries, as HOST:PORT,HOST:PORT: what one does not answer, the next is asked. With TLS (`tls`,
    or grpcs), certificates and a bearer token come from the variables that
    `nobackfill.wire.channel` names.
    `seconds` bounds each call with all its retries; with `retries` False nothing is asked twice.
    Methods raise the errors of nobackfill.errors.
    """

    def __init__(
        self, address: str, *, tls: bool = False, seconds: float = 30.0, retries: bool = True
    ) -> None:
        self.address = address
        self.seconds = seconds
        self._retries = retries
        self._channel = open_channel(address, tls=tls)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls that run end with UnavailableError."""
        self._channel.close()

    def _again(self, attempt: Callable[[float], T], *, each: float = 10.0) -> T:
        """The answer of an idempotent call, that `attempt(timeout)` makes."""
        if not self._retries:
            return self._once(attempt)
        return calls.retried(attempt, self.address, seconds=self.seconds, each=each)

    def _once(self, attempt: Callable[[float], T], *, seconds: float | None = None) -> T:
        """The answer of a call that must not be made twice."""
        with calls.translated(self.address):
            return attempt(self.seconds if seconds is None else seconds)

    def _followed(self, stream: Any, first: Sequence[Any] = ()) -> Iterator[Any]:
        """Messages of a stream that has begun, after the `first` that were read; leaving off ends
        it."""
        try:
            with calls.translated(self.address):
                yield from first
                yield from stream
        finally:
            stream.cancel()

    def _watched(self, begin: Callable[[], Any]) -> Iterator[Any]:
        """Messages of a watch, which `begin` begins. One that the gateway ends because of its age
        is begun again, and its first message is passed over where it says nothing new."""
        stream, first, last = begin(), list[Any](), None
        while True:
            for last in self._followed(stream, first):
                yield last
            if WATCH_AGAIN not in dict(stream.trailing_metadata()):
                return
            # Others may have taken its place at the gateway.
            stream, first = self._again(lambda _seconds: _begun(begin()))
            if first == [last]:
                first = []


def _begun(stream: Any) -> tuple[Any, list[Any]]:
    """A stream with its first message. Raises grpc.RpcError."""
    return stream, list(islice(stream, 1))
