"""Who is logged in at the console: a cookie stands for a token, which stays in this process."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.requests import Request
from starlette.responses import Response

from nobackfill.errors import UnauthenticatedError
from nobackfill.server.console.caller import Caller

COOKIE = "nobackfill-console"
_SECONDS = 12 * 3600.0
# At once; the oldest goes.
_MOST = 1000


class Sessions:
    """Cookies, each with its token. A token that is revoked is refused at its next call."""

    def __init__(self, socket: str, *, guarded: bool, secure: bool) -> None:
        """`guarded`: the gateway has tokens. `secure`: the pages are served with TLS."""
        self._socket = socket
        self.guarded = guarded
        self._secure = secure
        self._lock = threading.Lock()
        self._known: dict[str, tuple[str, float]] = {}

    def begin(self, token: str, response: Response) -> None:
        """Log in whoever gets `response`. Raises UnauthenticatedError for what is no token."""
        if not (token.isascii() and token.isprintable() and 0 < len(token) <= 4096):
            raise UnauthenticatedError("expected a token as the gateway's operator gave it")
        with Caller(self._socket, token) as caller:
            # Every role may.
            caller.list_releases()
        cookie = secrets.token_urlsafe(32)
        with self._lock:
            while len(self._known) >= _MOST:
                del self._known[next(iter(self._known))]
            self._known[cookie] = token, time.monotonic() + _SECONDS
        response.set_cookie(
            COOKIE, cookie, max_age=int(_SECONDS), httponly=True, samesite="strict",
            secure=self._secure,
        )  # fmt: skip

    def end(self, request: Request, response: Response) -> None:
        """Log out."""
        with self._lock:
            self._known.pop(request.cookies.get(COOKIE, ""), None)
        response.delete_cookie(COOKIE)

    @contextmanager
    def calling(self, request: Request) -> Iterator[Caller]:
        """The gateway's calls for whoever asks. Raises UnauthenticatedError for nobody."""
        with Caller(self._socket, self._token(request)) as caller:
            yield caller

    def caller(self, request: Request) -> Callable[[], Caller]:
        """The same for what goes on after the answer."""
        token = self._token(request)
        return lambda: Caller(self._socket, token)

    def _token(self, request: Request) -> str | None:
        if not self.guarded:
            return None
        with self._lock:
            token, end = self._known.get(request.cookies.get(COOKIE, ""), ("", 0.0))
        if time.monotonic() >= end:
            raise UnauthenticatedError("log in with a token of this gateway")
        return token
