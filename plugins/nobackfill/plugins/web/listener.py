"""Serving pages: uvicorn on a thread of its own, on a socket whose port is known before."""

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from nobackfill.errors import ConfigurationError
from nobackfill.loopback import is_loopback

# Connections at once of one peer, of this machine, and of all others. Of more, the one goes that
# has asked nothing for longest: each bound is above that on requests, so that there is one.
_MOST_OF_PEER, _MOST_HERE, _MOST_CONNECTIONS = 64, 256, 512
# Requests under way: of those who are known, of this machine's others, and of strangers, all
# together and of one peer.
_MOST_KNOWN, _MOST_LOCAL, _MOST_STRANGE, _MOST_OF_STRANGER = 100, 100, 50, 16
# Within which a connection has to say what it asks for, TLS included; looked at so often.
_HEAD_SECONDS, _LOOK_SECONDS = 4.0, 0.5
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


class _Guest(socket.socket):
    """A connection that was let in."""

    def let_in(self, door: "_Door", peer: str) -> None:
        """`peer`: whose it is."""
        self._door, self.peer = door, peer
        self.protocol: H11Protocol | None = None
        # Since when it asks nothing, and its request at the last look.
        self.since = time.monotonic()
        self._cycle: RequestResponseCycle | None = None

    def asks(self) -> bool:
        """Whether a request of it is under way; notes when the last one was."""
        cycle = None if self.protocol is None else self.protocol.cycle
        if cycle is not self._cycle:
            self._cycle, self.since = cycle, time.monotonic()
        under_way = cycle is not None and not cycle.response_complete
        if under_way:
            self.since = time.monotonic()
        return under_way

    def show_out(self) -> None:
        """End it, as if its peer had left."""
        self._door.guests.pop(self.fileno(), None)
        with contextlib.suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._door.guests.get(self.fileno()) is self:
            del self._door.guests[self.fileno()]
        super().close()


class _Door(socket.socket):
    """Accepts connections for one event loop, which alone uses it: of one peer so many, and shows
    out whoever asks nothing."""

    def __init__(self, family: socket.AddressFamily) -> None:
        # By the protocol's number asyncio knows sockets whose data it sends at once: without it,
        # each answer waits 40 ms for the browser's acknowledgement of its head.
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.guests: dict[int, _Guest] = {}
        self._looks = False

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises ConnectionAbortedError for whom there is no room: asyncio goes on."""
        connection, address = super().accept()
        guest = _Guest(fileno=connection.detach())
        guest.let_in(self, _peer(address[0]))
        if not self._make_room(guest.peer):
            guest.close()
            raise ConnectionAbortedError("too many connections")
        self.guests[guest.fileno()] = guest
        if not self._looks:
            self._looks = True
            asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)
        return guest, address

    def _make_room(self, peer: str) -> bool:
        """For one more of a peer, by showing out another; whether there is some."""
        own = [one for one in self.guests.values() if one.peer == peer]
        strangers = [one for one in self.guests.values() if one.peer != _LOCAL]
        if len(own) >= (_MOST_HERE if peer == _LOCAL else _MOST_OF_PEER):
            crowd = own
        elif peer != _LOCAL and len(strangers) >= _MOST_CONNECTIONS:
            crowd = strangers
        else:
            return True
        silent = [one for one in crowd if not one.asks()]
        if silent:
            min(silent, key=lambda one: one.since).show_out()
        return bool(silent)

    def _look(self) -> None:
        limit = time.monotonic() - _HEAD_SECONDS
        for guest in list(self.guests.values()):
            if not guest.asks() and guest.since < limit:
                guest.show_out()
        self._looks = bool(self.guests)
        if self._looks:
            asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)


class _Places:
    """Requests under way, by whose they are; one event loop alone uses it."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()

    @contextlib.contextmanager
    def taken(self, whose: str) -> Iterator[bool]:
        """A place for one of `whose`, _KNOWN, _LOCAL or a peer, where there is one."""
        strangers = sum(self._held.values()) - self._held[_KNOWN] - self._held[_LOCAL]
        most = _OWN.get(whose, _MOST_OF_STRANGER)
        if self._held[whose] >= most or (whose not in _OWN and strangers >= _MOST_STRANGE):
            yield False
            return
        self._held[whose] += 1
        try:
            yield True
        finally:
            self._held[whose] -= 1
            if not self._held[whose]:
                del self._held[whose]


# All requests of those who are known; all connections and other requests of this machine.
_KNOWN, _LOCAL = "known", "local"
_OWN = {_KNOWN: _MOST_KNOWN, _LOCAL: _MOST_LOCAL}
_CROWDED = PlainTextResponse("too many requests at once; come again\n", 503)


def _peer(address: str) -> str:
    """Whose a connection is: IPv6 gives everybody a whole /64."""
    if is_loopback(address):
        return _LOCAL
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if parsed.version == 6 and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return address


class Listener:
    """Listens from the start, so that an app can know its address; `serve` answers."""

    def __init__(self, host: str, port: int, tls: Tls | None = None) -> None:
        """`port` 0: any that is free. Raises
        ConfigurationError where nobody can listen there."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = _Door(family)
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

    def serve(
        self, app: ASGIApp, known: Callable[[Scope], bool] = lambda _scope: False
    ) -> Self:  # fmt: skip
        """Answer with `app` until `close`. `known`: whether a request is of somebody who has
        shown who he is, and does not wait behind strangers."""
        certificate, key, client_ca = self._tls or (None, None, None)
        guests = self._socket.guests

        class Known(H11Protocol):
            """A connection whose door knows what it asks."""

            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
                super().connection_made(transport)
                guest = guests.get(transport.get_extra_info("socket").fileno())
                if guest is not None:
                    guest.protocol = self

        places = _Places()

        async def told(scope: Scope, receive: Receive, send: Send) -> None:
            peer = _peer(scope["client"][0])
            with places.taken(_KNOWN if known(scope) else peer) as taken:
                answer = app if taken else _CROWDED
                await answer({**scope, ENDING: self._ending}, receive, send)

        config = uvicorn.Config(
            told,
            log_level="error",
            access_log=False,
            server_header=False,
            # Whoever asks is whom the connection comes from.
            proxy_headers=False,
            lifespan="off",
            ws="none",
            # Others accept by themselves.
            loop="asyncio",
            http=Known,
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
