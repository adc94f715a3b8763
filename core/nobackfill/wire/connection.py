"""The one way to a gateway: its address, TLS and token, deadlines and retries of its calls.

Retries live here and not in a service config: each attempt has a deadline of its own, so a call
that stalls is dropped and tried again within the caller's overall deadline.
"""

import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc

from nobackfill.errors import ConfigurationError
from nobackfill.wire.limits import LARGEST_ANSWER, LARGEST_REQUEST
from nobackfill.wire.statuses import error_of, transient

T = TypeVar("T")


@contextmanager
def translated(asked: str) -> Iterator[None]:
    """Raise gRPC failures inside as errors of our taxonomy."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_of(error, asked) from error


def retried(
    attempt: Callable[[float], T], asked: str, *, seconds: float = 30.0, each: float = 10.0
) -> T:
    """Call `attempt(timeout)` until it answers; for idempotent calls only.

    An attempt gets at most `each` seconds, all of them together `seconds`; pauses grow from 50 ms
    to 2 s with jitter, so that many clients do not come back at once. Raises the taxonomy's error
    of the last attempt: at once where asking again cannot help, else when the time is used up.
    """
    end = time.monotonic() + seconds
    pause = 0.05
    while True:
        try:
            return attempt(min(each, max(0.001, end - time.monotonic())))
        except grpc.RpcError as error:
            wait = pause * random.uniform(0.5, 1.5)  # noqa: S311
            found = error_of(error, asked)
            if not (transient(found) or _cut(error)) or time.monotonic() + wait >= end:
                raise found from error
        time.sleep(wait)
        pause = min(2 * pause, 2.0)


def _cut(error: grpc.RpcError) -> bool:
    """Whether a gateway that ends has cut the call: who cancels one here is told so in words."""
    said = error.details() or ""
    return error.code() is grpc.StatusCode.CANCELLED and said in ("", "CANCELLED")


# Several gateways as one channel: calls go to one of them, and to the next once that does not
# answer. Whoever makes a call again meets another gateway then.

# What a gateway says that ends or is overrun, and what is said of one that is gone or hangs.
_LEAVE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)


def one_of(channels: Sequence[grpc.Channel]) -> grpc.Channel:
    """A channel to all of them; closing it closes them."""
    return channels[0] if len(channels) == 1 else _Several(channels)


class _Several(grpc.Channel):
    """What is said of each method: grpc.Channel."""

    def __init__(self, channels: Sequence[grpc.Channel]) -> None:
        self._channels = channels
        # Many clients with the same list begin at different gateways.
        self.current = random.randrange(len(channels))  # noqa: S311 - no secret

    def leave(self, number: int) -> None:
        """Ask the next from here on, unless another call has left this one already."""
        if self.current == number:
            self.current = (number + 1) % len(self._channels)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, [one.unary_unary(*args, **kwargs) for one in self._channels])

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, [one.unary_stream(*args, **kwargs) for one in self._channels])

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, [one.stream_unary(*args, **kwargs) for one in self._channels])

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, [one.stream_stream(*args, **kwargs) for one in self._channels])

    def subscribe(self, callback: Callable[..., Any], try_to_connect: bool | None = None) -> None:
        self._channels[self.current].subscribe(callback, bool(try_to_connect))

    def unsubscribe(self, callback: Callable[..., Any]) -> None:
        for channel in self._channels:
            channel.unsubscribe(callback)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> "_Several":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Method:
    """One method of a service, of each gateway."""

    def __init__(self, several: _Several, each: Sequence[Callable[..., Any]]) -> None:
        self._several = several
        self._each = each

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        number = self._several.current
        try:
            answer = self._each[number](*args, **kwargs)
        except grpc.RpcError as error:
            if error.code() in _LEAVE:
                self._several.leave(number)
            raise
        # Whether a stream ends well is known when it has ended, which it may have already.
        if isinstance(answer, grpc.Call) and not answer.add_callback(
            lambda: self._ended(number, answer)
        ):
            self._ended(number, answer)
        return answer

    def _ended(self, number: int, stream: Any) -> None:
        if stream.code() in _LEAVE:
            self._several.leave(number)


# The one way to a gateway: its address, TLS, certificates and a token that never goes without TLS.
#
# An address is HOST:PORT or grpc://HOST:PORT, in the clear, or grpcs://HOST:PORT; several gateways
# that share their galleries are HOST:PORT,HOST:PORT and so on after one scheme. With TLS,
# $NOBACKFILL_CA_FILE may name the authority's certificate (PEM, else the system's),
# $NOBACKFILL_CERT_FILE and $NOBACKFILL_KEY_FILE this client's own, $NOBACKFILL_TOKEN_FILE a bearer
# token.

_SCHEMES = {"": False, "grpc": False, "grpcs": True}
_TOKEN = re.compile(rb"[\x21-\x7e]+")


def open_channel(address: str, *, tls: bool = False) -> grpc.Channel:
    """A channel to `address`; `tls` goes for one without a scheme. Nothing is sent yet. To several
    gateways: to one of them, and to the next when that does not answer.

    Raises ConfigurationError for another scheme, files that cannot be read, a file that holds no
    token, and a token without TLS.
    """
    scheme, _, listed = address.rstrip("/").rpartition("://")
    hosts = [host.strip() for host in listed.split(",")]
    if scheme not in _SCHEMES or (len(hosts) > 1 and "" in hosts):
        raise ConfigurationError(
            "expected HOST:PORT, grpc://HOST:PORT or grpcs://HOST:PORT, several hosts with commas "
            f"between, got {address!r}"
        )
    options = [
        ("grpc.enable_retries", 0),
        # Channels of one process share no connection.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", LARGEST_ANSWER),
        ("grpc.max_send_message_length", LARGEST_REQUEST),
    ]
    token = _read("NOBACKFILL_TOKEN_FILE")
    if not (_SCHEMES[scheme] or tls):
        if token is not None:
            raise ConfigurationError(
                "expected TLS for a bearer token: name the gateway as grpcs://HOST:PORT, "
                "or unset NOBACKFILL_TOKEN_FILE"
            )
        return one_of([grpc.insecure_channel(host, options) for host in hosts])
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_read("NOBACKFILL_CA_FILE"),
        private_key=_read("NOBACKFILL_KEY_FILE"),
        certificate_chain=_read("NOBACKFILL_CERT_FILE"),
    )
    if token is not None:
        if not _TOKEN.fullmatch(token.strip()):
            raise ConfigurationError("NOBACKFILL_TOKEN_FILE: expected one token of plain ASCII")
        bearer = grpc.access_token_call_credentials(token.decode().strip())
        credentials = grpc.composite_channel_credentials(credentials, bearer)
    return one_of([grpc.secure_channel(host, credentials, options) for host in hosts])


def _read(variable: str) -> bytes | None:
    path = os.environ.get(variable)
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{variable}: cannot read {path} ({error.strerror})") from error


# A connection to one gateway: what the calls of every service share.

# The trailer of a watch that the gateway ended because of its age: its caller watches again.
WATCH_AGAIN = "x-watch-again"


class Connection:
    """A channel, and how calls go through it; usable from several threads.

    `address` is HOST:PORT, grpc://HOST:PORT or grpcs://HOST:PORT, or several gateways with the same
    galleries, as HOST:PORT,HOST:PORT: what one does not answer, the next is asked. With TLS (`tls`,
    or grpcs), certificates and a bearer token come from the variables that
    `nobackfill.wire.connection` names.
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
        return retried(attempt, self.address, seconds=self.seconds, each=each)

    def _once(self, attempt: Callable[[float], T], *, seconds: float | None = None) -> T:
        """The answer of a call that must not be made twice."""
        with translated(self.address):
            return attempt(self.seconds if seconds is None else seconds)

    def _followed(self, stream: Any, first: Sequence[Any] = ()) -> Iterator[Any]:
        """Messages of a stream that has begun, after the `first` that were read; leaving off ends
        it."""
        try:
            with translated(self.address):
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
