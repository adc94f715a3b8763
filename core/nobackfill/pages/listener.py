"""Serving pages: uvicorn on a thread of its own, on a socket whose port is known before."""

import asyncio
import contextlib
import socket
import ssl
import threading
from pathlib import Path
from typing import Self

import uvicorn
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from nobackfill.errors import ConfigurationError
from nobackfill.loopback import is_loopback

# Connections at once; beyond, a browser is told to come again.
_MOST_CONNECTIONS = 100
# Within which a request's head has to come; looked at so often.
_HEAD_SECONDS = 10.0
# Until streams that a browser keeps open are cut off at the end.
_GRACE_SECONDS = 3
# In the scope of each request: an event, set once no more is to be answered.
ENDING = "nobackfill.ending"


# Certificate chain, key and the authority that clients need a certificate of, in PEM.
Tls = tuple[Path, Path, Path | None]


def ending(request: Request) -> bool:
    """Whether a stream has to end, for the server does."""
    event = request.scope.get(ENDING)
    return event is not None and event.is_set()


class _Impatient(H11Protocol):
    """Closes connections that begin no request, or do not end its head: uvicorn waits for ever."""

    # At the last look: the latest request, None before the first, and whether it was under way.
    _seen: tuple[RequestResponseCycle | None, bool] = (None, False)
    _next: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._next = self.loop.call_later(_HEAD_SECONDS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._next is not None:
            self._next.cancel()

    def _look(self) -> None:
        under_way = self.cycle is not None and not self.cycle.response_complete
        if self._seen == (self.cycle, False):
            # No head has come since.
            self.transport.close()
            return
        self._seen = self.cycle, under_way
        self._next = self.loop.call_later(_HEAD_SECONDS, self._look)


class Listener:
    """Listens from the start, so that an app can know its address; `serve` answers."""

    def __init__(self, host: str, port: int, tls: Tls | None = None) -> None:
        """`port` 0: any that is free. Raises
        ConfigurationError where nobody can listen there."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # By the protocol's number asyncio knows sockets whose data it sends at once: without it,
        # each answer waits 40 ms for the browser's acknowledgement of its head.
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
            self._socket.listen(128)
        except (OSError, OverflowError) as error:
            self._socket.close()
            why = getattr(error, "strerror", None) or error
            raise ConfigurationError(
                f"pages: nobody can listen at {host}:{port} ({why})"
            ) from error
        self.host, self.port = host, int(self._socket.getsockname()[1])
        self._tls = tls
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()

    @property
    def hosts(self) -> tuple[str, ...]:
        """How a browser on this machine may call it; beyond loopback by the name of its choice."""
        named = f"[{self.host}]" if ":" in self.host else self.host
        names = (named, "localhost") if is_loopback(self.host) else (named,)
        default = 443 if self._tls else 80
        with_port = tuple(f"{name}:{self.port}" for name in names)
        return (*names, *with_port) if self.port == default else with_port

    @property
    def address(self) -> str:
        """The address of the whole site, without a final slash."""
        return f"{'https' if self._tls else 'http'}://{self.hosts[0]}"

    def serve(self, app: ASGIApp) -> Self:
        """Answer with `app` until `close`."""
        certificate, key, client_ca = self._tls or (None, None, None)

        async def told(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, ENDING: self._ending}, receive, send)

        config = uvicorn.Config(
            told,
            log_level="error",
            access_log=False,
            server_header=False,
            # Whoever asks is whom the connection comes from.
            proxy_headers=False,
            lifespan="off",
            ws="none",
            http=_Impatient,
            limit_concurrency=_MOST_CONNECTIONS,
            timeout_graceful_shutdown=_GRACE_SECONDS,
            ssl_certfile=certificate,
            ssl_keyfile=key,
            ssl_ca_certs=None if client_ca is None else str(client_ca),
            ssl_cert_reqs=ssl.CERT_NONE if client_ca is None else ssl.CERT_REQUIRED,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="pages", daemon=True
        )
        self._thread.start()
        return self

    def close(self) -> None:
        """Answer no more."""
        if self._server is not None and self._thread is not None:
            self._ending.set()
            self._server.should_exit = True
            self._thread.join()
        with contextlib.suppress(OSError):
            self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
