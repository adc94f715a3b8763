"""Sessions of the console: a cookie stands for a token, which stays in this process.

Browsers send cookies to every port of a host. Each session therefore has its own secret path, and
its cookie is sent only to addresses below that path. No picture host and no other server of this
machine gets it.
"""

import re
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from nobackfill.errors import UnauthenticatedError
from nobackfill.wire import Gateway
from nobackfill.wire.limits import LARGEST_ANSWER, LARGEST_REQUEST

# Deadline of one call of a page: an estimate tries the release's models first.
_CALL_SECONDS = 60.0


class ConsoleCaller(Gateway):
    """A client of the gateway that calls with the token of the person who looks at a page.

    The console therefore decides nothing about rights. It uses the gateway's socket file, which no
    other user of this machine can open. Each call has a deadline of 60 s.
    """

    def __init__(self, socket_address: str, token: str | None) -> None:
        """Make a channel to the gateway; nothing is sent yet.

        Unlike a Gateway, it reads no environment and repeats no call. The caller closes it.

        Args:
            socket_address: the gateway's socket, unix:PATH.
            token: the token of the calls; None: the gateway has no tokens.
        """
        # Connection's own constructor would read tokens and authorities from the environment, which
        # is the gateway's here.
        self.address = "the gateway"
        self.seconds = _CALL_SECONDS
        self._retries = False
        channel = grpc.insecure_channel(
            socket_address,
            [
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.max_receive_message_length", LARGEST_ANSWER),
                ("grpc.max_send_message_length", LARGEST_REQUEST),
            ],
        )
        self._channel = channel if token is None else _channel_with_token(channel, token)


class _Bearer(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Sends a token with each call; gRPC's own credentials require TLS even on a socket file."""

    def __init__(self, token: str) -> None:
        self._metadata = (("authorization", f"Bearer {token}"),)

    def _send(self, call: Callable[..., Any], details: Any, request: Any) -> Any:
        return call(details._replace(metadata=self._metadata), request)

    def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        return self._send(continuation, client_call_details, request)

    def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        return self._send(continuation, client_call_details, request)


def _channel_with_token(channel: grpc.Channel, token: str) -> grpc.Channel:
    return grpc.intercept_channel(channel, _Bearer(token))


COOKIE = "nobackfill-console"
_SECONDS = 12 * 3600.0
_BYTES = 32
# A session's path, longer than the name of any page. With other characters it could become another
# site's address in the links of a page: browsers read \ as /.
_PATH = re.compile(r"[A-Za-z0-9_-]{43}")
# Most sessions in all, most sessions of one token (the oldest ends), most live pages of one token.
_MOST, _MOST_OF_ONE, _MOST_LIVE = 1000, 20, 10


@dataclass(frozen=True)
class _ConsoleSession:
    cookie: str
    token: str
    end: float


class ConsoleSessions:
    """The sessions of people who logged in, by path, each with its token; threads may share it.

    A session ends after 12 hours, with the process, or when 20 newer ones of its token exist. A
    revoked token is refused at its next call.

    Attributes:
        guarded: whether the gateway has tokens. Without tokens every request passes.
    """

    def __init__(self, socket_address: str, *, guarded: bool, secure: bool) -> None:
        """Make an empty set of sessions.

        Args:
            socket_address: the gateway's socket, unix:PATH.
            guarded: the gateway has tokens.
            secure: the pages are served with TLS, so browsers send the cookie only by TLS.
        """
        self._socket = socket_address
        self.guarded = guarded
        self._secure = secure
        self._lock = threading.Lock()
        self._by_path: dict[str, _ConsoleSession] = {}
        self._live: Counter[str | None] = Counter()

    def begin(self, token: str, answer: Callable[[str], Response]) -> Response:
        """Start a session for a token that the gateway accepts.

        Sessions that have ended are forgotten. The 20th older one of this token ends, and the
        oldest of all beyond 1,000. The new one ends after 12 hours.

        Args:
            token: the token that somebody entered.
            answer: makes the response from the path of the new session.

        Returns:
            The response, with the session's cookie.

        Raises:
            UnauthenticatedError: the token is malformed or empty, or the gateway does not know it.
            UnavailableError: the gateway does not answer within a minute.
            BusyError: the gateway answers too many calls now.
            Exception: any error of `answer`; the session exists then without a reader.
        """
        if not (token.isascii() and token.isprintable() and 0 < len(token) <= 4096):
            raise UnauthenticatedError(
                "expected a token of this gateway, of at most 4096 printable ASCII characters; ask "
                "its operator for one"
            )
        with ConsoleCaller(self._socket, token) as caller:
            # A call that every role may make.
            caller.list_releases()
        path, cookie = f"/{secrets.token_urlsafe(_BYTES)}", secrets.token_urlsafe(_BYTES)
        start = time.monotonic()
        with self._lock:
            self._by_path = {at: one for at, one in self._by_path.items() if one.end > start}
            own = [at for at, one in self._by_path.items() if one.token == token]
            for at in (*own[: 1 - _MOST_OF_ONE], *list(self._by_path)[: 1 - _MOST]):
                self._by_path.pop(at, None)
            self._by_path[path] = _ConsoleSession(cookie, token, start + _SECONDS)
        response = answer(path)
        response.set_cookie(
            COOKIE, cookie, max_age=int(_SECONDS), path=f"{path}/", httponly=True,
            samesite="strict", secure=self._secure,
        )  # fmt: skip
        return response

    def end(self, request: Request, response: Response) -> None:
        """End the session of a request, and delete its cookie by the response.

        Without tokens, nothing ends, and the cookie is deleted all the same. Functions of
        `caller_factory` go on working.

        Raises:
            UnauthenticatedError: the request belongs to no session.
        """
        self.check(request)
        path = request.scope["root_path"]
        with self._lock:
            self._by_path.pop(path, None)
        response.delete_cookie(COOKIE, path=f"{path}/")

    def has_session(self, scope: Scope) -> bool:
        """Return whether a request belongs to a session, before the application sees it.

        False if the gateway has no tokens.

        Args:
            scope: an HTTP request's scope, whose path begins with the session's.

        Raises:
            KeyError: the scope has no path, as that of a lifespan.
        """
        path = f"/{scope['path'].removeprefix('/').split('/', 1)[0]}"
        try:
            self._token(Request({**scope, "root_path": path}))
        except UnauthenticatedError:
            return False
        return self.guarded

    def check(self, request: Request) -> None:
        """Check that a request belongs to a session; without tokens every request passes.

        The path and the cookie must belong together. Whether the gateway still accepts the token is
        not checked.

        Raises:
            UnauthenticatedError: it belongs to none.
        """
        self._token(request)

    @contextmanager
    def open_caller(self, request: Request) -> Iterator[ConsoleCaller]:
        """Open a client of the gateway with the session's token, for the block.

        If the gateway has no tokens, every request gets a client without one.

        Yields:
            The client, which is closed at the end of the block.

        Raises:
            UnauthenticatedError: the gateway has tokens, and the request belongs to no session.
        """
        with ConsoleCaller(self._socket, self._token(request)) as caller:
            yield caller

    def caller_factory(self, request: Request) -> Callable[[], ConsoleCaller]:
        """Return a function that opens a client with the session's token, for later use.

        The request need not exist any more when the function is called. The caller of the function
        closes the client. If the gateway has no tokens, the client sends none. The function does
        not check whether the session still exists.

        Raises:
            UnauthenticatedError: the gateway has tokens, and the request belongs to no session.
        """
        token = self._token(request)
        return lambda: ConsoleCaller(self._socket, token)

    @contextmanager
    def count_live_page(self, request: Request) -> Iterator[bool]:
        """Count a live page of the session's token, for the block.

        If the gateway has no tokens, all live pages count together. It is no limit by itself: the
        caller ends a page without a place.

        Yields:
            Whether the token has at most ten live pages, this one included.

        Raises:
            UnauthenticatedError: the gateway has tokens, and the request belongs to no session.
        """
        token = self._token(request)
        with self._lock:
            self._live[token] += 1
            place = self._live[token] <= _MOST_LIVE
        try:
            yield place
        finally:
            with self._lock:
                self._live[token] -= 1
                if not self._live[token]:
                    del self._live[token]

    def _token(self, request: Request) -> str | None:
        if not self.guarded:
            return None
        cookie = request.cookies.get(COOKIE, "")
        with self._lock:
            session = self._by_path.get(request.scope.get("root_path", ""))
        if (
            session is None
            or time.monotonic() >= session.end
            or not secrets.compare_digest(cookie.encode(), session.cookie.encode())
        ):
            raise UnauthenticatedError(
                "no session, or it has ended: log in with a token of this gateway"
            )
        return session.token


class SessionPaths:
    """Serve an application at the root, for the login, and below the path of each session.

    Any first part of a path that looks like a session's becomes the `root_path` of the request.
    Whether that session exists is checked later.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            first = scope["path"].removeprefix("/").split("/", 1)[0]
            if _PATH.fullmatch(first):
                scope = {**scope, "root_path": f"/{first}"}
        await self._app(scope, receive, send)


# Length of the window that a load is computed over.
_WINDOW_SECONDS = 10.0
# Samples come about once a second, so the oldest may be this much older.
_LATE_SECONDS = 1.0
_SEARCHES = ("Search", "SearchBatch")
# Status codes that are the caller's fault.
_CALLERS = ("INVALID_ARGUMENT", "NOT_FOUND", "UNAUTHENTICATED", "PERMISSION_DENIED", "CANCELLED")


@dataclass(frozen=True)
class GatewayLoad:
    """The load of a gateway during the last seconds.

    Attributes:
        searches_per_second: searches per second.
        failed_searches: searches that failed by a fault of the server.
        p50_ms: median latency of searches in ms; None without any.
        p99_ms: 99th percentile of the latency in ms; None without any.
        upgrade_share: share of the running upgrade that is complete, 0 to 1.
        release: the active release; 0 without one.
    """

    searches_per_second: float
    failed_searches: int
    p50_ms: float | None
    p99_ms: float | None
    upgrade_share: float
    release: int


@dataclass(frozen=True)
class _Sample:
    at: float
    # Cumulative counts of searches, by the upper bound of their duration in seconds.
    buckets: Mapping[float, float]
    failed: float
    ratio: float
    release: int


class LoadMeter:
    """Computes the load of the last ten seconds from the gateway's metrics; threads may share it.

    Args:
        registry: the metrics that Prometheus also reads.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._samples: deque[_Sample] = deque()

    def measure(self) -> GatewayLoad:
        """Take a sample, and return the load since the oldest sample of the last ten seconds.

        The rate is 0 at the first call, and after a pause of eleven seconds without calls. Metrics
        that do not exist count as 0. Latencies are interpolated within the buckets of the metrics'
        histogram. All methods of Search and SearchBatch count. A batch counts as one search.

        Raises:
            Exception: any error of a collector of the metrics; no sample is taken.
        """
        sample = self._take_sample()
        with self._lock:
            # After a pause without samples, the window starts again.
            while (
                self._samples and sample.at - self._samples[0].at > _WINDOW_SECONDS + _LATE_SECONDS
            ):
                self._samples.popleft()
            self._samples.append(sample)
            first = self._samples[0]
        counts = {end: sample.buckets[end] - first.buckets.get(end, 0.0) for end in sample.buckets}
        total = max(counts.values(), default=0.0)
        seconds = max(sample.at - first.at, 1e-9)
        return GatewayLoad(
            searches_per_second=total / seconds if sample.at > first.at else 0.0,
            failed_searches=round(sample.failed - first.failed),
            p50_ms=_quantile_ms(sorted(counts.items()), 0.5),
            p99_ms=_quantile_ms(sorted(counts.items()), 0.99),
            upgrade_share=sample.ratio,
            release=sample.release,
        )

    def _take_sample(self) -> _Sample:
        buckets: dict[float, float] = {}
        failed = ratio = release = 0.0
        for family in self._registry.collect():
            for one in family.samples:
                if one.name == "nobackfill_upgrade_ratio":
                    ratio = one.value
                elif one.name == "nobackfill_active_release":
                    release = one.value
                elif one.labels.get("grpc_method") not in _SEARCHES:
                    continue
                elif one.name == "grpc_server_handling_seconds_bucket":
                    end = float(one.labels["le"])
                    buckets[end] = buckets.get(end, 0.0) + one.value
                elif one.name == "grpc_server_handled_total":
                    ours = one.labels["grpc_code"] not in ("OK", *_CALLERS)
                    failed += one.value if ours else 0.0
        return _Sample(time.monotonic(), buckets, failed, ratio, int(release))


def _quantile_ms(counts: Sequence[tuple[float, float]], share: float) -> float | None:
    """Return a quantile in ms, as Prometheus' histogram_quantile: linear within a bucket."""
    total = counts[-1][1] if counts else 0.0
    if total <= 0:
        return None
    lower_count, start = 0.0, 0.0
    for end, count in counts:
        if count >= share * total:
            if end == float("inf"):
                return 1000 * start
            inside = (share * total - lower_count) / max(count - lower_count, 1e-9)
            return 1000 * (start + (end - start) * inside)
        lower_count, start = count, end
    return None
