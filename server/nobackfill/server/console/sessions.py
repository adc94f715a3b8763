"""Who is logged in at the console: a cookie stands for a token, which stays in this process.

Cookies go to every port of a host. So each session has a path of its own that nobody else knows,
and its cookie goes to addresses below it alone: no picture of a hit and no other server of this
host gets it.
"""

import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from nobackfill.errors import UnauthenticatedError
from nobackfill.server.console.caller import Caller

COOKIE = "nobackfill-console"
_SECONDS = 12 * 3600.0
_BYTES = 32
# A session's path, as long as no page's name of ours is. Of other characters it would be an address
# of somebody else's in the links of a page: browsers take \ for /.
_PATH = re.compile(r"[A-Za-z0-9_-]{43}")
# Sessions at once, and of one token; the oldest goes. Live pages of one token.
_MOST, _MOST_OF_ONE, _MOST_LIVE = 1000, 20, 10


@dataclass(frozen=True)
class _Session:
    cookie: str
    token: str
    end: float


class Sessions:
    """Sessions by path, each with its token. A token that is revoked is refused at its next
    call."""

    def __init__(self, socket: str, *, guarded: bool, secure: bool) -> None:
        """`guarded`: the gateway has tokens. `secure`: the pages are served with TLS."""
        self._socket = socket
        self.guarded = guarded
        self._secure = secure
        self._lock = threading.Lock()
        self._known: dict[str, _Session] = {}
        self._live: Counter[str | None] = Counter()

    def begin(self, token: str, answer: Callable[[str], Response]) -> Response:
        """Log in whoever gets `answer` of the session's path. Raises UnauthenticatedError for what
        is no token."""
        if not (token.isascii() and token.isprintable() and 0 < len(token) <= 4096):
            raise UnauthenticatedError("expected a token as the gateway's operator gave it")
        with Caller(self._socket, token) as caller:
            # Every role may.
            caller.list_releases()
        path, cookie = f"/{secrets.token_urlsafe(_BYTES)}", secrets.token_urlsafe(_BYTES)
        now = time.monotonic()
        with self._lock:
            self._known = {at: one for at, one in self._known.items() if one.end > now}
            own = [at for at, one in self._known.items() if one.token == token]
            for at in (*own[: 1 - _MOST_OF_ONE], *list(self._known)[: 1 - _MOST]):
                self._known.pop(at, None)
            self._known[path] = _Session(cookie, token, now + _SECONDS)
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
    def calling(self, request: Request) -> Iterator[Caller]:
        """The gateway's calls for whoever asks. Raises UnauthenticatedError for nobody."""
        with Caller(self._socket, self._token(request)) as caller:
            yield caller

    def caller(self, request: Request) -> Callable[[], Caller]:
        """The same for what goes on after the answer."""
        token = self._token(request)
        return lambda: Caller(self._socket, token)

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
