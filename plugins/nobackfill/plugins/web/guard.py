"""Decide whether a request may reach a page, before anything else of it is read.

Every page that the owner's browser opens can send requests to this machine. Therefore the Host must
be ours, which stops DNS rebinding; a request that changes something must come from our own pages
(Origin); and the address holds a secret that no other page knows. Headers tell the browser to load
nothing from elsewhere, and to run only our scripts.
"""

import secrets
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob:{images}; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_READING = ("GET", "HEAD")


def new_token() -> str:
    """Generate a secret for the address of a page: 256 random bits as text for a URL.

    Returns:
        43 characters of A-Z, a-z, 0-9, - and _.
    """
    return secrets.token_urlsafe(32)


class Guard:
    """Passes a request to an application only if its host, secret and origin are right.

    Others get a sentence with the status 403, 404 or 405. Every answer gets headers that tell the
    browser to load nothing from elsewhere.

    Args:
        app: the application behind the guard.
        hosts: HOST:PORT as browsers write them; a first label `*` stands for any one label, as in
            certificates.
        token: the secret of the address; None: any path passes, because the app checks sessions.
        secure: the pages are served with TLS.
        image_sources: further sources of pictures, in the syntax of a content security policy.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: Iterable[str],
        token: str | None,
        *,
        secure: bool = False,
        image_sources: str = "",
    ) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)
        self._token = token
        self._scheme = "https" if secure else "http"
        self._policy = _POLICY.format(images=f" {image_sources}" if image_sources else "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            # A WebSocket, which our pages never open.
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._add_security_headers(MutableHeaders(scope=message))
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send_protected)
            return
        if self._token is not None:
            scope = {**scope, "root_path": f"/{self._token}"}
        await self._app(scope, receive, send_protected)

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        headers = Headers(scope=scope)
        if [host.lower() for host in headers.getlist("host")] != [self._allowed_host(headers)]:
            return PlainTextResponse(
                "this server does not serve the host of this address: use the address that it"
                " printed when it started\n",
                403,
            )
        if not self._may_enter(scope["path"]):
            return PlainTextResponse(
                "no such page: use the complete address, with the secret that the server printed"
                " when it started\n",
                404,
            )
        if scope["method"] not in (*_READING, "POST"):
            return PlainTextResponse("expected the method GET, HEAD or POST\n", 405)
        if self._is_foreign(scope["method"], headers):
            return PlainTextResponse(
                "refused: the request comes from another site's page; open this page by itself\n",
                403,
            )
        return None

    def _allowed_host(self, headers: Headers) -> str | None:
        host = headers.get("host", "").lower()
        any_first = f"*.{host.partition('.')[2]}"
        return host if host in self._hosts or any_first in self._hosts else None

    def has_secret(self, scope: Scope) -> bool:
        """Return whether a request's path begins with the secret; False if there is no secret.

        Args:
            scope: an HTTP request's scope, with its path. Nothing else of the request is checked.

        Raises:
            KeyError: the scope has no path, as that of a lifespan.
        """
        return self._token is not None and self._may_enter(scope["path"])

    def _may_enter(self, path: str) -> bool:
        if self._token is None:
            return True
        first = path.split("/", 2)[1] if path.startswith("/") else ""
        return secrets.compare_digest(first.encode(), self._token.encode())

    def _is_foreign(self, method: str, headers: Headers) -> bool:
        """Return whether another origin sends the request; following a link is always allowed."""
        site = headers.get("sec-fetch-site", "same-origin")
        navigates = method in _READING and headers.get("sec-fetch-mode") == "navigate"
        if site not in ("same-origin", "none") and not navigates:
            return True
        if method in _READING:
            return False
        return (
            headers.get("origin", "").lower() != f"{self._scheme}://{self._allowed_host(headers)}"
        )

    def _add_security_headers(self, headers: MutableHeaders) -> None:
        headers["Content-Security-Policy"] = self._policy
        headers["X-Content-Type-Options"] = "nosniff"
        headers["X-Frame-Options"] = "DENY"
        # Our own pages get the full referrer, so that their forms send an Origin; others get none.
        headers["Referrer-Policy"] = "same-origin"
        headers["Cross-Origin-Opener-Policy"] = "same-origin"
        headers["Cross-Origin-Resource-Policy"] = "same-origin"
        headers["Permissions-Policy"] = "camera=(), microphone=(), geolocation=()"
        headers.setdefault("Cache-Control", "no-store")
        if self._scheme == "https":
            headers["Strict-Transport-Security"] = "max-age=31536000"
