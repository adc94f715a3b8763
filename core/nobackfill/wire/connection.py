"""Open channels to gateways: address, TLS, token, deadlines and retries.

Retries live here and not in a gRPC service config. Each attempt has a deadline of its own, so that
a stalled call is dropped and retried within the caller's overall deadline.
"""

import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc

from nobackfill.errors import ConfigurationError
from nobackfill.wire.limits import LARGEST_ANSWER, LARGEST_REQUEST
from nobackfill.wire.statuses import error_from_status, is_transient

T = TypeVar("T")


@contextmanager
def translate_errors(error_name: str) -> Iterator[None]:
    """Raise gRPC errors of the block as errors of this project.

    Args:
        error_name: The server or call, for the message.

    Raises:
        NobackfillError: The class follows from the gRPC code and its reason, by
            `statuses.STATUS_TABLE`: CANCELLED gives CancelledError, and a connection that broke
            UnavailableError. Only a code that the table lacks, as of an error inside the gateway,
            gives NobackfillError itself. Other errors of the block pass unchanged.
    """
    try:
        yield
    except grpc.RpcError as error:
        raise error_from_status(error, error_name) from error


def call_until_success(
    attempt: Callable[[float], T],
    error_name: str,
    *,
    seconds: float = 30.0,
    attempt_seconds: float = 10.0,
    gateway_count: int = 1,
) -> T:
    """Call a function until it succeeds; for idempotent calls only.

    Pauses grow from 50 ms to 2 s, with jitter, so that many clients do not return at the same
    moment. They do not grow before each gateway has been tried once.

    A retry helps where another process is busy, overloaded or unavailable, where a deadline passed,
    or where a stopping gateway cut the call.

    Args:
        attempt: Makes the call with a timeout in seconds, at least 0.001. Only its grpc.RpcError is
            caught.
        error_name: The server or call, for the message.
        seconds: Longest time of all attempts together; at least one attempt is made, also with 0 or
            less.
        attempt_seconds: Longest time of one attempt, above 0.
        gateway_count: How many gateways the attempts go to in turn, at least 1.

    Returns:
        The result of the first attempt that succeeds.

    Raises:
        NobackfillError: The error of the last attempt: at once if a retry cannot help, otherwise
            when the time is over.
    """
    deadline = time.monotonic() + seconds
    pause = 0.05
    failures = 0
    while True:
        try:
            return attempt(min(attempt_seconds, max(0.001, deadline - time.monotonic())))
        except grpc.RpcError as error:
            wait = pause * random.uniform(0.5, 1.5)  # noqa: S311
            failure = error_from_status(error, error_name)
            if not (is_transient(failure) or _cut(error)) or time.monotonic() + wait >= deadline:
                raise failure from error
        time.sleep(wait)
        failures += 1
        if failures >= gateway_count:
            pause = min(2 * pause, 2.0)


def _cut(error: grpc.RpcError) -> bool:
    """Tell whether a stopping gateway cut the call; a deliberate cancellation has a message."""
    details = error.details() or ""
    return error.code() is grpc.StatusCode.CANCELLED and details in ("", "CANCELLED")


# Several gateways as one channel: calls go to one of them, and to the next one after it failed. A
# retry therefore reaches another gateway.

# Statuses of a gateway that stops or is overloaded, and of one that is gone or hangs.
_LEAVE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


def combine_channels(channels: Sequence[grpc.Channel]) -> grpc.Channel:
    """Combine several channels into one that fails over; closing it closes all.

    Args:
        channels: At least one; one channel is returned as it is.

    Returns:
        The channel. A call that finds its gateway gone fails; the next call goes to the next
        gateway.

    Raises:
        ValueError: There is no channel.
    """
    return channels[0] if len(channels) == 1 else _Several(channels)


class _Several(grpc.Channel):
    """A channel that fails over between several; its methods are those of grpc.Channel."""

    def __init__(self, channels: Sequence[grpc.Channel]) -> None:
        self._channels = channels
        # Clients with the same list start at different gateways.
        self.current = random.randrange(len(channels))  # noqa: S311 - no secret

    def leave(self, number: int) -> None:
        """Use the next gateway from now on, unless another call has left this one already."""
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
    """One method of a service, for each gateway."""

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
        # The status of a stream is known when it ends, which may have happened already.
        if isinstance(answer, grpc.Call) and not answer.add_callback(
            lambda: self._ended(number, answer)
        ):
            self._ended(number, answer)
        return answer

    def _ended(self, number: int, stream: Any) -> None:
        if stream.code() in _LEAVE:
            self._several.leave(number)


# Addresses. HOST:PORT or grpc://HOST:PORT is not encrypted, grpcs://HOST:PORT is. Several gateways
# that share their galleries are HOST:PORT,HOST:PORT and so on after one scheme. With TLS,
# $NOBACKFILL_CA_FILE may name the authority's certificate (PEM, by default the system's),
# $NOBACKFILL_CERT_FILE and $NOBACKFILL_KEY_FILE the client's own, and $NOBACKFILL_TOKEN_FILE a
# bearer token. A token is never sent without TLS.

_SCHEMES = {"": False, "grpc": False, "grpcs": True}
_TOKEN = re.compile(rb"[\x21-\x7e]+")


def open_channel(address: str, *, tls: bool = False) -> grpc.Channel:
    """Open a channel to one or several gateways; nothing is sent yet, so that a wrong host is only
    noticed at the first call.

    With TLS, it reads the files that NOBACKFILL_CA_FILE, NOBACKFILL_KEY_FILE, NOBACKFILL_CERT_FILE
    and NOBACKFILL_TOKEN_FILE name. Unset ones are skipped; without an authority, the system's are
    trusted.

    Args:
        address: HOST:PORT, grpc://HOST:PORT or grpcs://HOST:PORT; several hosts are separated by
            commas, and calls fail over between them.
        tls: Whether an address without a scheme uses TLS.

    Returns:
        The channel; the caller closes it. Environment variables and their files are read now, not
        later.

    Raises:
        ConfigurationError: Another scheme, an empty host among several, a file that cannot be read,
            an authority without a certificate, a client's certificate without its key or with
            another one, an invalid token, or a token without TLS.
    """
    scheme, _, host_list = address.rstrip("/").rpartition("://")
    hosts = [host.strip() for host in host_list.split(",")]
    if scheme not in _SCHEMES or (len(hosts) > 1 and "" in hosts):
        raise ConfigurationError(
            "the gateway's address: expected HOST:PORT, grpc://HOST:PORT or grpcs://HOST:PORT, "
            f"several hosts separated by commas, got {address!r}; correct the address"
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
                "the token of NOBACKFILL_TOKEN_FILE is sent over TLS only: write the gateway's "
                "address as grpcs://HOST:PORT, or unset the variable"
            )
        return combine_channels([grpc.insecure_channel(host, options) for host in hosts])
    authority = _read("NOBACKFILL_CA_FILE")
    if authority is not None and b"CERTIFICATE-----" not in authority:
        raise ConfigurationError(
            "NOBACKFILL_CA_FILE: expected a certificate (PEM), found none in "
            f"{os.environ['NOBACKFILL_CA_FILE']}; name the file of the authority that signed the "
            "gateway's certificate"
        )
    certificate, key = _client_certificate()
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    if token is not None:
        if not _TOKEN.fullmatch(token.strip()):
            raise ConfigurationError(
                "NOBACKFILL_TOKEN_FILE: expected a file with one token of printable ASCII, found "
                "other content; store the token alone in the file"
            )
        _hold_event_engine()
        bearer = grpc.access_token_call_credentials(token.decode().strip())
        credentials = grpc.composite_channel_credentials(credentials, bearer)
    return combine_channels([grpc.secure_channel(host, credentials, options) for host in hosts])


@cache
def _hold_event_engine() -> grpc.Channel:
    """Return an idle channel that keeps gRPC's event engine until the process ends.

    Closing the last channel waits for the engine's threads while it holds Python's lock. A thread
    that forgets a token waits for that lock, so that the process would hang for ever
    (https://github.com/grpc/grpc/pull/42247).
    """
    return grpc.insecure_channel("127.0.0.1:1")


def _client_certificate() -> tuple[bytes | None, bytes | None]:
    """Read the client's certificate and its key; None for both if neither is set."""
    names = "NOBACKFILL_CERT_FILE", "NOBACKFILL_KEY_FILE"
    certificate, key = map(_read, names)
    if certificate is None and key is None:
        return None, None
    # Checked here: gRPC ends the process if one is missing, and fails every handshake if they do
    # not belong together.
    if certificate is None or key is None:
        missing, present = names if certificate is None else names[::-1]
        raise ConfigurationError(
            f"{present} is set without {missing}: TLS needs the client's certificate and its "
            f"private key; set both variables, or unset {present}"
        )
    import ssl

    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_cert_chain(os.environ[names[0]], os.environ[names[1]], lambda: b"")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            "NOBACKFILL_CERT_FILE, NOBACKFILL_KEY_FILE: expected a certificate and its own private "
            "key in PEM, without a password; name files that belong together"
        ) from error
    return certificate, key


def _read(variable: str) -> bytes | None:
    path = os.environ.get(variable)
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"{variable}: the file {path} cannot be read ({error.strerror}); check its name and "
            "permissions"
        ) from error


# The base of every service's calls.

# Trailer of a watch that the gateway ended because of its age: the client watches again.
WATCH_AGAIN_TRAILER = "x-watch-again"


class Connection:
    """A connection to a gateway; usable from several threads.

    Methods raise the errors of nobackfill.errors.

    Args:
        address: HOST:PORT, grpc://HOST:PORT or grpcs://HOST:PORT. Several gateways with the same
            galleries are separated by commas; calls fail over between them.
        tls: Whether an address without a scheme uses TLS. Certificates and a bearer token come from
            the environment variables that nobackfill.wire.connection names.
        seconds: Longest time of each call, including its retries.
        retries: Whether idempotent calls are retried.

    Raises:
        ConfigurationError: As `open_channel`: the address is wrong, or a file of the environment
            variables is. A host that does not answer is noticed at the first call.
    """

    _is_closed = False

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
        """Close the connection; calls in progress end with an error of nobackfill.errors.

        Later calls raise ValueError. A second `close` does nothing. Iterators that are being read
        raise CancelledError.
        """
        self._is_closed = True
        self._channel.close()

    def _make_stub(self, stub_type: Callable[[grpc.Channel], T]) -> T:
        """Return the stub of a service.

        Raises:
            ValueError: The connection is closed; grpcio would crash the process.
        """
        if self._is_closed:
            raise ValueError("the connection to the gateway is closed; open a new one")
        return stub_type(self._channel)

    def _retry(
        self, method: Callable[..., T], request: object, *, each: float = 10.0, **options: Any
    ) -> T:
        """Make an idempotent call, with retries if they are on.

        Args:
            method: It is called with the request, `timeout` in seconds, and the options.
            request: The request.
            each: Longest time of one attempt in seconds, if there are retries.
            options: Further options of the method.
        """
        if not self._retries:
            return self._call_once(method, request, **options)
        return call_until_success(
            lambda timeout: method(request, timeout=timeout, **options),
            self.address,
            seconds=self.seconds,
            attempt_seconds=each,
            gateway_count=self.address.count(",") + 1,
        )

    def _call_once(
        self, method: Callable[..., T], request: object, *, seconds: float | None = None,
        **options: Any,
    ) -> T:  # fmt: skip
        """Make a call that must not be made twice."""
        with translate_errors(self.address):
            seconds = self.seconds if seconds is None else seconds
            return method(request, timeout=seconds, **options)

    def _read_stream(self, stream: Any, first: Sequence[Any] = ()) -> Iterator[Any]:
        """Yield the messages of a stream, after `first`; cancel the stream when the caller
        stops."""
        try:
            with translate_errors(self.address):
                yield from first
                yield from stream
        finally:
            stream.cancel()

    def _watch(self, begin: Callable[[], Any]) -> Iterator[Any]:
        """Yield the messages of a watch; watch again when the gateway ended it because of its age.

        The first message after that is skipped if it repeats the last one.
        """
        stream, first, last = begin(), list[Any](), None
        while True:
            for last in self._read_stream(stream, first):
                yield last
            if WATCH_AGAIN_TRAILER not in dict(stream.trailing_metadata()):
                return
            # Retry: another watcher may have taken the free place at the gateway.
            stream, first = self._retry(lambda _, timeout: _begin(begin()), None)
            if first == [last]:
                first = []


def _begin(stream: Any) -> tuple[Any, list[Any]]:
    """Return a stream and its first message, if it has any. Raises grpc.RpcError."""
    return stream, list(islice(stream, 1))
