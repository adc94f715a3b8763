"""Serve pages with uvicorn, on a thread of its own and a socket that listens from the start."""

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

# Most connections of one peer, of this machine, and of all others. Beyond a bound, the connection
# that has been silent for longest is closed. Each bound exceeds that of requests, so there is one.
_MOST_OF_PEER, _MOST_HERE, _MOST_CONNECTIONS = 64, 256, 512
# Most requests at once: of authenticated callers, of others on this machine, of all strangers, and
# of one stranger.
_MOST_AUTHENTICATED, _MOST_LOCAL, _MOST_STRANGE, _MOST_OF_STRANGER = 100, 100, 50, 16
# Time for a connection to complete its request's head, TLS included, and how often that is checked.
_HEAD_SECONDS, _CHECK_SECONDS = 4.0, 0.5
# Time for open streams to end when the server stops.
_GRACE_SECONDS = 3
# Key in each request's scope: an event that is set when the server stops.
ENDING = "nobackfill.ending"


# Certificate chain, key, and the authority of client certificates, as PEM files.
Tls = tuple[Path, Path, Path | None]


def is_ending(request: Request) -> bool:
    """Return whether the server stops, so that a stream must end; False for other servers.

    A request in progress must ask repeatedly: nothing interrupts it.
    """
    event = request.scope.get(ENDING)
    return event is not None and event.is_set()


class _Connection(socket.socket):
    """An accepted connection."""

    def bind_to(self, listening: "_LimitedSocket", peer: str) -> None:
        """Bind the connection to its listening socket; `peer` is its owner in the limits."""
        self._listening, self.peer = listening, peer
        self.protocol: H11Protocol | None = None
        # When it became silent, and the request that it had at the last check.
        self.since = time.monotonic()
        self._cycle: RequestResponseCycle | None = None

    def is_busy(self) -> bool:
        """Return whether a request is in progress; records when the last one was."""
        cycle = None if self.protocol is None else self.protocol.cycle
        if cycle is not self._cycle:
            self._cycle, self.since = cycle, time.monotonic()
        under_way = cycle is not None and not cycle.response_complete
        if under_way:
            self.since = time.monotonic()
        return under_way

    def disconnect(self) -> None:
        """Close it, as if its peer had left."""
        self._listening.connections.pop(self.fileno(), None)
        with contextlib.suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._listening.connections.get(self.fileno()) is self:
            del self._listening.connections[self.fileno()]
        super().close()


class _LimitedSocket(socket.socket):
    """A listening socket for one event loop, with limits per peer; closes silent connections to
    make room."""

    def __init__(self, family: socket.AddressFamily) -> None:
        # With an explicit protocol number, asyncio disables Nagle's algorithm. Without it, each
        # answer would wait 40 ms for the browser's acknowledgement of its head.
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.connections: dict[int, _Connection] = {}
        self._checks = False

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Raises ConnectionAbortedError without room; asyncio continues."""
        connection, address = super().accept()
        accepted = _Connection(fileno=connection.detach())
        accepted.bind_to(self, _connection_owner(address[0]))
        if not self._make_room(accepted.peer):
            accepted.close()
            raise ConnectionAbortedError("too many connections")
        self.connections[accepted.fileno()] = accepted
        if not self._checks:
            self._checks = True
            asyncio.get_running_loop().call_later(_CHECK_SECONDS, self._check_silence)
        return accepted, address

    def _make_room(self, peer: str) -> bool:
        """Make room for one more connection of a peer; return whether there is room."""
        same_peer = [one for one in self.connections.values() if one.peer == peer]
        strangers = [one for one in self.connections.values() if one.peer != _LOCAL]
        if len(same_peer) >= (_MOST_HERE if peer == _LOCAL else _MOST_OF_PEER):
            crowd = same_peer
        elif peer != _LOCAL and len(strangers) >= _MOST_CONNECTIONS:
            crowd = strangers
        else:
            return True
        silent = [one for one in crowd if not one.is_busy()]
        if silent:
            min(silent, key=lambda one: one.since).disconnect()
        return bool(silent)

    def _check_silence(self) -> None:
        limit = time.monotonic() - _HEAD_SECONDS
        for accepted in list(self.connections.values()):
            if not accepted.is_busy() and accepted.since < limit:
                accepted.disconnect()
        self._checks = bool(self.connections)
        if self._checks:
            asyncio.get_running_loop().call_later(_CHECK_SECONDS, self._check_silence)


class _Places:
    """Counts requests in progress by their owner; only for one event loop."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    @contextlib.contextmanager
    def reserve(self, owner: str) -> Iterator[bool]:
        """Reserve a place for _AUTHENTICATED, _LOCAL or a peer; yield whether there is one."""
        strangers = sum(self._counts.values()) - self._counts[_AUTHENTICATED] - self._counts[_LOCAL]
        most = _LIMITS.get(owner, _MOST_OF_STRANGER)
        if self._counts[owner] >= most or (owner not in _LIMITS and strangers >= _MOST_STRANGE):
            yield False
            return
        self._counts[owner] += 1
        try:
            yield True
        finally:
            self._counts[owner] -= 1
            if not self._counts[owner]:
                del self._counts[owner]


# Owners in the limits: all authenticated callers, and all others on this machine.
_AUTHENTICATED, _LOCAL = "known", "local"
_LIMITS = {_AUTHENTICATED: _MOST_AUTHENTICATED, _LOCAL: _MOST_LOCAL}
_CROWDED = PlainTextResponse(
    "this server answers too many requests now; try again in a few seconds\n", 503
)


def _connection_owner(address: str) -> str:
    """Return the owner of an address: a whole /64 in IPv6, because everybody gets one."""
    if is_loopback(address):
        return _LOCAL
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if parsed.version == 6 and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return address


class Listener:
    """A server of pages: it listens from the start, and answers after `serve`.

    So an application can contain its own address. Connections and requests are limited for each
    peer.

    Attributes:
        host: the host that it listens at.
        port: the port that it listens at.
    """

    def __init__(self, host: str, port: int, tls: Tls | None = None) -> None:
        """Listen at an address, and let connections wait.

        The socket is closed by `close`. The files of `tls` are read by `serve`.

        Args:
            host: an IP address or a name; a colon makes it IPv6. An empty text is every IPv4
                address of this machine.
            port: 0 takes any free one.
            tls: PEM files of the certificate chain, its key, and the authority of client
                certificates or None; None: serve without TLS.

        Raises:
            ConfigurationError: the address cannot be used, or the port is in use, below 0 or above
                65535.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = _LimitedSocket(family)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
            self._socket.listen(128)
        except (OSError, OverflowError) as error:
            self._socket.close()
            why = getattr(error, "strerror", None) or error
            raise ConfigurationError(
                f"the server of the web pages cannot listen at {host}:{port} ({why}); choose "
                "another port"
            ) from error
        self.host, self.port = host, int(self._socket.getsockname()[1])
        self._tls = tls
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the Host headers that browsers may send to reach this address.

        Returns:
            The host with the port; on this machine also localhost. Without the port, too, if it is
            the default one of HTTP or HTTPS. A wildcard such as 0.0.0.0 stays as it is.
        """
        host = f"[{self.host}]" if ":" in self.host else self.host
        names = (host, "localhost") if is_loopback(self.host) else (host,)
        default = 443 if self._tls else 80
        with_port = tuple(f"{name}:{self.port}" for name in names)
        return (*names, *with_port) if self.port == default else with_port

    @property
    def address(self) -> str:
        """Return the address of the whole site, without a final slash."""
        return f"{'https' if self._tls else 'http'}://{self.hosts[0]}"

    def serve(
        self, app: ASGIApp, is_authenticated: Callable[[Scope], bool] = lambda _scope: False
    ) -> Self:
        """Answer requests on a thread until `close`; call it once, before `close`.

        Returns before the first answer; connections that waited since the start are answered too.
        If the files of `tls` cannot be read, the thread ends with an error, and nothing is
        answered.

        A request beyond the limits gets the status 503. Open connections that are silent for 4 s
        are closed.

        Args:
            app: the application.
            is_authenticated: tells whether a request comes from an authenticated caller. Such
                requests have a limit of their own, so that strangers cannot crowd them out.

        Returns:
            This listener.
        """
        certificate, key, client_ca = self._tls or (None, None, None)
        connections = self._socket.connections

        class LinkedProtocol(H11Protocol):
            """A connection that its listening socket can ask for its request."""

            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
                super().connection_made(transport)
                accepted = connections.get(transport.get_extra_info("socket").fileno())
                if accepted is not None:
                    accepted.protocol = self

        places = _Places()

        async def limited(scope: Scope, receive: Receive, send: Send) -> None:
            peer = _connection_owner(scope["client"][0])
            with places.reserve(_AUTHENTICATED if is_authenticated(scope) else peer) as reserve:
                answer = app if reserve else _CROWDED
                await answer({**scope, ENDING: self._ending}, receive, send)

        config = uvicorn.Config(
            limited,
            log_level="error",
            access_log=False,
            server_header=False,
            # No proxy: the peer of the connection is the caller.
            proxy_headers=False,
            lifespan="off",
            ws="none",
            # Other loops accept connections without this socket's limits.
            loop="asyncio",
            http=LinkedProtocol,
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
        """Stop answering and close the socket; open streams get 3 s to end.

        A second call, or one without `serve`, only closes the socket. It blocks until the thread
        has ended.
        """
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
