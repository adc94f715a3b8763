"""Who is logged in at the console: a cookie stands for a token, which stays in this process.

Cookies go to every port of a host. So each session has a path of its own that nobody else knows,
and its cookie goes to addresses below it alone: no picture of a hit and no other server of this
host gets it.
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

# The gateway's public calls, made for whoever looks at a page, with that person's token.
#
# So the console decides nothing about rights: what a token may not call, its page may not show.

# For one call of a page: an estimate tries the release's models first.
_CALL_SECONDS = 60.0


class ConsoleCaller(Gateway):
    """Calls through the gateway's socket file, which no other user of this machine can open."""

    def __init__(self, socket: str, token: str | None) -> None:
        """`socket`: as gRPC names one, unix:PATH. `token` None: a gateway without tokens."""
        # Not Connection's own: that one reads tokens and authorities from the environment, which
        # is the gateway's here.
        self.address = "the gateway"
        self.seconds = _CALL_SECONDS
        self._retries = False
        channel = grpc.insecure_channel(
            socket,
            [
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.max_receive_message_length", LARGEST_ANSWER),
                ("grpc.max_send_message_length", LARGEST_REQUEST),
            ],
        )
        self._channel = channel if token is None else _bearing(channel, token)


class _Bearer(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Sends a token with each call: gRPC's own credentials demand TLS, also in a socket file."""

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


def _bearing(channel: grpc.Channel, token: str) -> grpc.Channel:
    return grpc.intercept_channel(channel, _Bearer(token))


COOKIE = "nobackfill-console"
_SECONDS = 12 * 3600.0
_BYTES = 32
# A session's path, as long as no page's name of ours is. Of other characters it would be an address
# of somebody else's in the links of a page: browsers take \ for /.
_PATH = re.compile(r"[A-Za-z0-9_-]{43}")
# Sessions at once, and of one token; the oldest goes. Live pages of one token.
_MOST, _MOST_OF_ONE, _MOST_LIVE = 1000, 20, 10


@dataclass(frozen=True)
class _ConsoleSession:
    cookie: str
    token: str
    end: float


class ConsoleSessions:
    """Sessions by path, each with its token. A token that is revoked is refused at its next
    call."""

    def __init__(self, socket: str, *, guarded: bool, secure: bool) -> None:
        """`guarded`: the gateway has tokens. `secure`: the pages are served with TLS."""
        self._socket = socket
        self.guarded = guarded
        self._secure = secure
        self._lock = threading.Lock()
        self._known: dict[str, _ConsoleSession] = {}
        self._live: Counter[str | None] = Counter()

    def begin(self, token: str, answer: Callable[[str], Response]) -> Response:
        """Log in whoever gets `answer` of the session's path. Raises UnauthenticatedError for what
        is no token."""
        if not (token.isascii() and token.isprintable() and 0 < len(token) <= 4096):
            raise UnauthenticatedError("expected a token as the gateway's operator gave it")
        with ConsoleCaller(self._socket, token) as caller:
            # Every role may.
            caller.list_releases()
        path, cookie = f"/{secrets.token_urlsafe(_BYTES)}", secrets.token_urlsafe(_BYTES)
        now = time.monotonic()
        with self._lock:
            self._known = {at: one for at, one in self._known.items() if one.end > now}
            own = [at for at, one in self._known.items() if one.token == token]
            for at in (*own[: 1 - _MOST_OF_ONE], *list(self._known)[: 1 - _MOST]):
                self._known.pop(at, None)
            self._known[path] = _ConsoleSession(cookie, token, now + _SECONDS)
        response = answer(path)
        response.set_cookie(
            COOKIE, cookie, max_age=int(_SECONDS), path=f"{path}/", httponly=True,
            samesite="strict", secure=self._secure,
        )  # fmt: skip
        return response

    def end(self, request: Request, response: Response) -> None:
        """Log out."""
        self.check(request)
        path = request.scope["root_path"]
        with self._lock:
            self._known.pop(path, None)
        response.delete_cookie(COOKIE, path=f"{path}/")

    def knows(self, scope: Scope) -> bool:
        """Whether a request is of a session, before anything of the app has seen it."""
        path = f"/{scope['path'].removeprefix('/').split('/', 1)[0]}"
        try:
            self._token(Request({**scope, "root_path": path}))
        except UnauthenticatedError:
            return False
        return self.guarded

    def check(self, request: Request) -> None:
        """Raises UnauthenticatedError for nobody."""
        self._token(request)

    @contextmanager
    def calling(self, request: Request) -> Iterator[ConsoleCaller]:
        """The gateway's calls for whoever asks. Raises UnauthenticatedError for nobody."""
        with ConsoleCaller(self._socket, self._token(request)) as caller:
            yield caller

    def caller(self, request: Request) -> Callable[[], ConsoleCaller]:
        """The same for what goes on after the answer."""
        token = self._token(request)
        return lambda: ConsoleCaller(self._socket, token)

    @contextmanager
    def watching(self, request: Request) -> Iterator[bool]:
        """A page that stays live: whether its token has a place for it, given back at the end.
        Raises UnauthenticatedError for nobody."""
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
        given = request.cookies.get(COOKIE, "")
        with self._lock:
            found = self._known.get(request.scope.get("root_path", ""))
        if (
            found is None
            or time.monotonic() >= found.end
            or not secrets.compare_digest(given.encode(), found.cookie.encode())
        ):
            raise UnauthenticatedError("log in with a token of this gateway")
        return found.token


class BelowSessions:
    """The app below each session's path, as at the root, where one logs in."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            first = scope["path"].removeprefix("/").split("/", 1)[0]
            if _PATH.fullmatch(first):
                scope = {**scope, "root_path": f"/{first}"}
        await self._app(scope, receive, send)


# How searches fare, read from what Prometheus reads: between two looks, not since the start.

# What is looked back on.
_WINDOW_SECONDS = 10.0
# As looks come about once a second, the oldest may be so much older.
_LATE_SECONDS = 1.0
_SEARCHES = ("Search", "SearchBatch")
# Answers to mistakes of the caller.
_CALLERS = ("INVALID_ARGUMENT", "NOT_FOUND", "UNAUTHENTICATED", "PERMISSION_DENIED", "CANCELLED")


@dataclass(frozen=True)
class Load:
    """Of the last seconds: searches a second, those that failed, milliseconds; None without any."""

    rate: float
    failed: int
    p50_ms: float | None
    p99_ms: float | None
    # Share of the running upgrade that is done, 0 to 1.
    ratio: float
    # That answers; 0 without one.
    release: int


@dataclass(frozen=True)
class _Look:
    at: float
    # Searches by the upper end of their time in seconds, cumulative.
    buckets: Mapping[float, float]
    failed: float
    ratio: float
    release: int


class LoadMeter:
    """Looks when it is asked, and remembers the looks of the last seconds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._looks: deque[_Look] = deque()

    def now(self) -> Load:
        """The load between the oldest look of the window and now."""
        look = self._look()
        with self._lock:
            # When nobody looked for a while, it begins anew.
            while self._looks and look.at - self._looks[0].at > _WINDOW_SECONDS + _LATE_SECONDS:
                self._looks.popleft()
            self._looks.append(look)
            first = self._looks[0]
        counts = {end: look.buckets[end] - first.buckets.get(end, 0.0) for end in look.buckets}
        total = max(counts.values(), default=0.0)
        seconds = max(look.at - first.at, 1e-9)
        return Load(
            rate=total / seconds if look.at > first.at else 0.0,
            failed=round(look.failed - first.failed),
            p50_ms=_quantile(sorted(counts.items()), 0.5),
            p99_ms=_quantile(sorted(counts.items()), 0.99),
            ratio=look.ratio,
            release=look.release,
        )

    def _look(self) -> _Look:
        buckets: dict[float, float] = {}
        failed = ratio = release = 0.0
        for family in self._registry.collect():
            for sample in family.samples:
                if sample.name == "nobackfill_upgrade_ratio":
                    ratio = sample.value
                elif sample.name == "nobackfill_active_release":
                    release = sample.value
                elif sample.labels.get("grpc_method") not in _SEARCHES:
                    continue
                elif sample.name == "grpc_server_handling_seconds_bucket":
                    end = float(sample.labels["le"])
                    buckets[end] = buckets.get(end, 0.0) + sample.value
                elif sample.name == "grpc_server_handled_total":
                    ours = sample.labels["grpc_code"] not in ("OK", *_CALLERS)
                    failed += sample.value if ours else 0.0
        return _Look(time.monotonic(), buckets, failed, ratio, int(release))


def _quantile(counts: Sequence[tuple[float, float]], share: float) -> float | None:
    """Milliseconds, as Prometheus's histogram_quantile has them: linear within a bucket."""
    total = counts[-1][1] if counts else 0.0
    if total <= 0:
        return None
    below, start = 0.0, 0.0
    for end, count in counts:
        if count >= share * total:
            if end == float("inf"):
                return 1000 * start
            inside = (share * total - below) / max(count - below, 1e-9)
            return 1000 * (start + (end - start) * inside)
        below, start = count, end
    return None
