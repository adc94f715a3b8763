"""Listen for gRPC calls: certificates, connections, health, reflection, and an orderly stop."""

import contextlib
import os
import socket
import ssl
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import structlog
from cryptography import x509
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from nobackfill.errors import BusyError, ConfigurationError
from nobackfill.loopback import is_loopback
from nobackfill.server.grpc.context import error_boundary
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.grpc.rpc import Interceptor
from nobackfill.server.process_limits import max_open_connections
from nobackfill.server.settings import Settings, split_address
from nobackfill.v1 import gallery_pb2, release_pb2, search_pb2, upgrade_pb2, vault_pb2
from nobackfill.wire.limits import LARGEST_REQUEST

if TYPE_CHECKING:
    from nobackfill.server.grpc.loop import LoopServer

log = structlog.get_logger("server.listener")
lanes_log = structlog.get_logger("server.lanes")
access_log = structlog.get_logger("server.interceptor")

# Services that embed images. The others, and queries by embedding, need no model server.
EMBEDDING_SERVICES = ("nobackfill.v1.SearchService", "nobackfill.v1.GalleryService")
SERVICES = tuple(
    service.full_name
    for file in (search_pb2, gallery_pb2, release_pb2, upgrade_pb2, vault_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
)

# After the signal to stop, new calls are still answered for so long (seconds).
_LAME_DUCK_SECONDS = 0.5

# Most threads of a plain server: they need memory, and compete for the interpreter.
_PLAIN_THREADS = 1024
# Pause (seconds) between two checks whether all calls are answered.
_DRAIN_CHECK_SECONDS = 0.01

_OPTIONS = [
    # A larger message is refused before it is read.
    ("grpc.max_receive_message_length", LARGEST_REQUEST),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 3),
    ("grpc.max_connection_idle_ms", 5 * 60_000),
    # Time for a new connection's TLS handshake, and then for HTTP/2's first frame.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.http2.settings_timeout", 10_000),
    ("grpc.max_metadata_size", 16 * 1024),
]


def needs_plain_server(settings: Settings) -> bool:
    """Tell whether a plain `grpc.server` must serve: `plain_grpc` is set, or loop.py cannot be
    imported. Then a warning with the reason is logged.

    Raises:
        ConfigurationError: other machines could reach it, and `plain_grpc_open` is not set. It
            takes a thread before a call's message arrives, so anybody who connects can hold all
            threads.
    """
    try:
        if settings.plain_grpc:
            raise ImportError("the setting plain_grpc is true")
        from nobackfill.server.grpc.loop import LoopServer  # noqa: F401
    except ImportError as error:
        reason = str(error)
    else:
        return False
    host, _ = split_address(settings.address, "address")
    if not is_loopback(host) and not settings.plain_grpc_open:
        raise ConfigurationError(
            f"address {settings.address} can be reached from other machines, but only a plain "
            f"grpc.server can serve ({reason}), and callers that send nothing can block it. "
            "Install the grpcio of constraints.txt, listen on 127.0.0.1, or set plain_grpc_open = "
            "true in the settings file"
        )
    log.warning(
        "serving with a plain grpc.server, more slowly; to change that, install the grpcio of "
        "constraints.txt",
        reason=reason,
    )
    return True


class PlainServer:
    """Serve with a plain `grpc.server` if loop.py does not work with this grpcio.

    Each call takes a thread as it arrives; gRPC refuses calls above the number of threads.
    """

    def __init__(self, interceptor: Interceptor, options: Sequence[tuple[str, Any]]) -> None:
        places = sum(lane.size.capacity for lane in interceptor.lanes.by_name.values())
        threads = min(_PLAIN_THREADS, places)
        self._working = interceptor.admission.working_calls
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="grpc")
        self.grpc_server = grpc.server(
            self._pool, None, [interceptor], options, maximum_concurrent_rpcs=threads
        )

    def wait_for_calls(self, end_time: float) -> None:
        """Wait until the calls that have a thread now have ended; later calls are not waited for,
        and none is ended.

        Args:
            end_time: latest time on the monotonic clock; one in the past returns at once.
        """
        open_calls = set(self._working)
        while open_calls and time.monotonic() < end_time:
            time.sleep(_DRAIN_CHECK_SECONDS)
            open_calls &= self._working

    def end_unread_calls(self) -> None:
        """Do nothing: the interceptor has ended the calls without a message."""

    def close(self) -> None:
        """Stop the threads, once the server has stopped; does not wait for them."""
        self._pool.shutdown(wait=False)


def check_port_free(address: str, option: str) -> None:
    """Check that this process could listen at an address now, without listening there afterwards.

    Args:
        address: HOST:PORT; an unknown host passes, and fails later. Port 0 passes for a host of
            this machine. If the host has several addresses, one that is free suffices.
        option: the command's option, for the error.

    Raises:
        BusyError: no address of HOST:PORT can be bound, also for lack of a permission.
        ValueError: the address has another form, or a part of the host is too long.
    """
    host, port = split_address(address, "address")
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return
    for family, *_, address_tuple in addresses:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As gRPC does it: a connection that has just ended does not hold the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address_tuple)
            except OSError:
                continue
            return
    raise _busy(address, option)


def _busy(address: str, option: str) -> BusyError:
    return BusyError(
        f"address {address} cannot be used: another program may listen there, or this machine does "
        f"not have that host; set another address with {option}"
    )


# Transport credentials: TLS, and client certificates if an authority is set. The files are checked
# at each handshake, so a renewed certificate needs no restart.

_CERTIFICATE_SECONDS = 1.0

_Stamp = tuple[tuple[int, int, int], ...]


class Certificates:
    """Hold a certificate with its key, and the authority of client certificates if there is one.

    The files are read again when they change. If they do not fit together, as while they are being
    replaced, the last good ones stay in use.
    """

    def __init__(self, cert_file: Path, key_file: Path, client_ca_file: Path | None) -> None:
        """Read the files.

        Args:
            cert_file: the certificate, with those that it needs (PEM).
            key_file: its private key (PEM), not encrypted.
            client_ca_file: authority of client certificates (PEM); None requires none of clients.

        Raises:
            ConfigurationError: a file cannot be read, is not valid, or changes meanwhile, or the
                key is encrypted or does not belong to the certificate.
        """
        self._cert, self._key, self._client_ca = cert_file, key_file, client_ca_file
        self._lock = threading.Lock()
        self._trouble = ""
        self._stamp, self._configuration = self._read()
        self._checked = time.monotonic()

    def credentials(self) -> grpc.ServerCredentials:
        """Return credentials for a port, which follow the files: at a handshake, at most once a
        second, changed ones are read again.

        Files that cannot be used then are logged as an error, and the old ones stay. With an
        authority, clients must have a certificate. Call it for one port: a second one would miss
        changes.
        """
        return grpc.dynamic_ssl_server_credentials(
            self._configuration,
            self._changed,  # type: ignore[arg-type]
            require_client_authentication=bool(self._client_ca),
        )

    def expiries(self) -> Mapping[str, datetime]:
        """Return when the files' certificates expire, under `server` and `client_ca`, as far as
        they can be read now.

        If a file has several certificates, the first to expire counts. A file that cannot be read
        is left out. They may differ from the certificates in use.
        """
        files = {"server": self._cert, "client_ca": self._client_ca}
        expiries = {}
        for name, path in files.items():
            try:
                chain = x509.load_pem_x509_certificates(path.read_bytes()) if path else []
            except (OSError, ValueError):
                continue
            if chain:
                expiries[name] = min(certificate.not_valid_after_utc for certificate in chain)
        return expiries

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return a new configuration for gRPC, which asks at each handshake; None if nothing has
        changed.
        """
        with self._lock:
            time_now = time.monotonic()
            if time_now - self._checked < _CERTIFICATE_SECONDS:
                return None
            self._checked = time_now
            try:
                if self._stamps() == self._stamp:
                    return None
                self._stamp, self._configuration = self._read()
            except (OSError, ConfigurationError) as error:
                if str(error) != self._trouble:
                    access_log.error(
                        "cannot read the changed certificates; the old ones stay in use",
                        error=str(error),
                    )
                self._trouble = str(error)
                return None
            self._trouble = ""
            access_log.info("certificates read again")
            return self._configuration

    def _read(self) -> tuple[_Stamp, grpc.ServerCertificateConfiguration]:
        try:
            stamp = self._stamps()
            # Checked here: gRPC accepts any bytes, and then fails every handshake.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._cert, self._key, password=_no_password)
            self._check_client_ca(context)
            pair = self._key.read_bytes(), self._cert.read_bytes()
            authority = self._client_ca.read_bytes() if self._client_ca else None
            if self._stamps() != stamp:
                raise ConfigurationError(
                    f"--tls-cert: {self._cert} changed while it was read; start the gateway again "
                    "when its replacement is complete"
                )
        except ssl.SSLError as error:
            raise ConfigurationError(
                f"--tls-cert {self._cert}, --tls-key {self._key}: expected a certificate and its "
                f"own private key in PEM ({error}); name files that belong together"
            ) from error
        except OSError as error:
            raise ConfigurationError(
                f"{error.filename}: this file of --tls-cert, --tls-key or --tls-client-ca cannot "
                f"be read ({error.strerror}); check its name and permissions"
            ) from error
        return stamp, grpc.ssl_server_certificate_configuration([pair], authority)

    def _check_client_ca(self, context: ssl.SSLContext) -> None:
        if self._client_ca is None:
            return
        try:
            context.load_verify_locations(self._client_ca)
        except ssl.SSLError as error:
            raise ConfigurationError(
                f"--tls-client-ca {self._client_ca}: expected the certificate of an authority in "
                f"PEM ({error}); name its file"
            ) from error

    def _stamps(self) -> _Stamp:
        paths = (self._cert, self._key, self._client_ca)
        statuses = [path.stat() for path in paths if path is not None]
        return tuple((status.st_mtime_ns, status.st_size, status.st_ino) for status in statuses)


def _no_password() -> bytes:
    """Return an empty password: an encrypted key is refused, where OpenSSL would ask on the
    terminal.
    """
    return b""


def read_certificates(settings: Settings) -> Certificates | None:
    """Read the certificates of the settings; None if tls_cert or tls_key is not set.

    The result reads changed files again by itself, so one call is enough for the life of a server.

    Raises:
        ConfigurationError: a file cannot be read, is not valid, or does not fit the others.
    """
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return Certificates(settings.tls_cert, settings.tls_key, settings.tls_client_ca)


# Most connections of one address. A client needs one for all its calls; a proxy needs some for each
# of its clients.
LARGEST_PEER = 512
_PEERS_SECONDS = 0.5
_DESCRIPTORS = Path("/proc/self/fd")
# In the kernel's struct tcp_info: milliseconds since the last data arrived.
_SILENCE = struct.Struct("52xI")


class ConnectionLimiter:
    """Limit the connections of each peer to one port; a thread closes those that were silent
    longest, from the construction to `close`.

    gRPC's core limits all connections together and ends silent ones, but counts none by peer.
    Sockets are found through /proc; on a system without it this does nothing.
    """

    def __init__(self, port: int, metrics: Metrics) -> None:
        self._port = port
        self._metrics = metrics
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="connections", daemon=True)
        self._thread.start()

    def close_all(self) -> None:
        """Accept no more connections, and close the open ones; their calls are lost. Without /proc
        it does nothing, and it raises nothing.
        """
        with contextlib.suppress(OSError):
            for descriptor in [int(path.name) for path in _DESCRIPTORS.iterdir()]:
                with contextlib.suppress(OSError), _duplicate(descriptor) as connection:
                    if not _is_tcp(connection) or connection.getsockname()[1] != self._port:
                        continue
                    if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        # gRPC keeps the descriptor's number, and does not notice the replacement.
                        with socket.socket(connection.family) as replacement:
                            os.dup2(replacement.fileno(), descriptor, inheritable=False)
                    else:
                        connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop the thread, and wait for it; connections stay open."""
        self._stopping.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopping.wait(_PEERS_SECONDS):
            try:
                descriptors = [int(path.name) for path in _DESCRIPTORS.iterdir()]
            except FileNotFoundError:
                lanes_log.warning(
                    "the connections of one client are not limited, because this system has no "
                    "/proc"
                )
                return
            except OSError:
                # No descriptor is free for the look; gRPC ends silent connections.
                continue
            if len(descriptors) > LARGEST_PEER:
                with error_boundary(self._metrics, "connections"):
                    self._limit_peers(descriptors)

    def _limit_peers(self, descriptors: list[int]) -> None:
        """Close the connections that a peer has too many of."""
        peers: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for descriptor in descriptors:
            connection = self._connection(descriptor)
            if connection is not None:
                peer, silent_ms = connection
                peers[peer].append((silent_ms, descriptor))
        for peer, connections in peers.items():
            excess = len(connections) - LARGEST_PEER
            if excess > 0:
                for _, descriptor in sorted(connections, reverse=True)[:excess]:
                    self._shut(descriptor, peer)
                lanes_log.warning(
                    "closed connections of a client that had too many of them",
                    client=peer,
                    limit=LARGEST_PEER,
                    connections=excess,
                )

    def _connection(self, descriptor: int) -> tuple[str, int] | None:
        """Return the peer of a connection to our port, and the milliseconds of its silence; None
        for another descriptor.
        """
        with contextlib.suppress(OSError), _duplicate(descriptor) as connection:
            if _is_tcp(connection) and connection.getsockname()[1] == self._port:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SILENCE.size)
                return str(connection.getpeername()[0]), _SILENCE.unpack(info)[0]
        return None

    def _shut(self, descriptor: int, peer: str) -> None:
        # Check again: gRPC may have closed it, and another file may have its number.
        peer_now = self._connection(descriptor)
        if peer_now is None or peer_now[0] != peer:
            return
        with contextlib.suppress(OSError), _duplicate(descriptor) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def _is_tcp(connection: socket.socket) -> bool:
    return connection.family in (socket.AF_INET, socket.AF_INET6)


def _duplicate(descriptor: int) -> socket.socket:
    """Duplicate a descriptor as a socket.

    Raises:
        OSError: the descriptor is not a socket.
    """
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        # Also for EBADF, which a folder that was opened with O_PATH gives.
        os.close(copy)
        raise


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # untyped
    """Answer grpc.health.v1: whether each service is served."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {"": health_pb2.HealthCheckResponse.SERVING}
        self._is_ending = False

    def set(self, service: str, status: int) -> None:
        """Set the status of a service, known or not, unless `end` was called. Watches see it at
        their next look.

        Args:
            service: name of the service; empty means the gateway's own.
            status: value of HealthCheckResponse.ServingStatus.
        """
        if not self._is_ending:
            self._statuses[service] = status

    def end(self) -> None:
        """Report every service as not serving from now on; cannot be undone."""
        self._is_ending = True
        for service in tuple(self._statuses):
            self._statuses[service] = health_pb2.HealthCheckResponse.NOT_SERVING

    def Check(  # noqa: N802 - the contract's name
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """Return a service's status; for an unknown service the call ends with NOT_FOUND."""
        status = self._statuses.get(request.service)
        if status is None:
            context.set_code(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=status)

    def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> Iterator[health_pb2.HealthCheckResponse | None]:
        """Yield a service's status at once, and again after each change; None means that nothing is
        new.

        An unknown service has the status SERVICE_UNKNOWN until it is set. It ends only when the
        caller, or the gateway, ends the call. Statuses between two looks are not seen.
        """
        last = None
        while True:
            status = self._statuses.get(
                request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            )
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            yield None


class GrpcListener:
    """Answer calls from `start` to `stop`.

    The construction makes gRPC's server by `make_grpc_server`, with its threads and its errors.
    """

    def __init__(
        self, add_services: Callable[[grpc.Server], None], interceptor: Interceptor,
        settings: Settings, certificates: Certificates | None, metrics: Metrics,
    ) -> None:  # fmt: skip
        self._metrics = metrics
        self._settings = settings
        self._certificates = certificates
        self._interceptor = interceptor
        self._health = HealthService()
        self._set_aside: frozenset[str] = frozenset()
        # Above the limit of calls, so that calls above that get RESOURCE_EXHAUSTED.
        options = [
            *_OPTIONS,
            ("grpc.max_concurrent_streams", 1024 + settings.max_calls),
            ("grpc.max_allowed_incoming_connections", max_open_connections()),
        ]
        self._calls = make_grpc_server(interceptor, options)
        server = self._server = self._calls.grpc_server
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        add_services(server)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)

    def start(self, file: str | None = None) -> str:
        """Listen for calls, and start the threads that answer them; call it once.

        Args:
            file: also listen, without TLS, on this socket that nobody else can open; None means no
                socket.

        Returns:
            HOST:PORT with the port that is used.

        Raises:
            BusyError: the address is in use, or is none of this machine.
            RuntimeError: gRPC cannot listen on the socket `file`, or the system has no thread left.
        """
        address = self._settings.address
        certificates = self._certificates
        try:
            if certificates is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, certificates.credentials())
        except RuntimeError as error:
            raise _busy(address, "--address") from error
        if file is not None:
            self._server.add_insecure_port(file)
        self._server.start()
        self._connections = ConnectionLimiter(port, self._metrics)
        host, _ = split_address(address, "address")
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def set_health(self, *, can_embed: bool, set_aside: Iterable[str]) -> None:
        """Set the health of all services; "" is the gateway's own. Does nothing once `stop` has
        begun. Call it from one thread at a time.

        Args:
            can_embed: models can embed; services that embed are not serving otherwise. The
                gateway's own health does not depend on it.
            set_aside: galleries that are set aside; each is reported as gallery/NAME until a call
                leaves it out, then as unknown.
        """
        status = health_pb2.HealthCheckResponse
        for name in ("", *SERVICES):
            is_serving = can_embed or name not in EMBEDDING_SERVICES
            self._health.set(name, status.SERVING if is_serving else status.NOT_SERVING)
        for name in self._set_aside:
            self._health.set(f"gallery/{name}", status.SERVICE_UNKNOWN)
        self._set_aside = frozenset(set_aside)
        for name in self._set_aside:
            self._health.set(f"gallery/{name}", status.NOT_SERVING)

    def stop(self, drain_s: float) -> None:
        """Stop: let calls end, then cancel them; new ones are refused. Only after `start`, and
        once.

        New calls are still answered for 0.5 s. Then calls without a message end with UNAVAILABLE,
        and watches are asked to end. Connections are closed once the other calls have ended or the
        time is over; calls that still run are lost. At last all threads are stopped. This blocks
        for about `drain_s` at most.

        Args:
            drain_s: longest time for calls to end, in seconds; 0 or more.
        """
        end = time.monotonic() + drain_s
        self._health.end()
        # gRPC would cut calls that have arrived but were not taken yet.
        time.sleep(min(_LAME_DUCK_SECONDS, drain_s))
        self._interceptor.drain()
        self._calls.end_unread_calls()
        self._calls.wait_for_calls(end)
        # gRPC ends calls that arrive while its server stops with CANCELLED, as if their callers had
        # asked for it (grpc/grpc#41785). So connections are closed first.
        self._connections.close_all()
        self._server.stop(max(0.0, end - time.monotonic())).wait()
        self._connections.close()
        self._calls.close()
        self._interceptor.close()


def make_grpc_server(
    interceptor: Interceptor, options: Sequence[tuple[str, Any]]
) -> "PlainServer | LoopServer":
    """Make the server for calls: that of loop.py, or a plain one if the interceptor is plain; it
    does not listen yet.

    That of loop.py starts threads of its own, which its `close` stops.

    Raises:
        ImportError: the interceptor is not plain, and loop.py does not work with this grpcio; see
            needs_plain_server.
    """
    if interceptor.is_plain_server:
        return PlainServer(interceptor, options)
    from nobackfill.server.grpc.loop import LoopServer

    return LoopServer(interceptor, options)


def socket_address_in(folder: Path, exit_stack: ExitStack) -> str:
    """Return gRPC's name for a socket in a folder, for parts of this process next to the gRPC
    server; it makes no socket.

    It goes through a descriptor of the folder, open until `exit_stack` ends, because a socket's
    path has at most 107 bytes.

    Raises:
        OSError: the folder cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    exit_stack.callback(os.close, descriptor)
    return f"unix:/proc/{os.getpid()}/fd/{descriptor}/console.sock"
