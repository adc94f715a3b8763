"""Listen for gRPC calls: services behind the interceptor, health, reflection, and an
orderly stop.
"""

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from nobackfill.errors import BusyError, ConfigurationError
from nobackfill.loopback import is_loopback
from nobackfill.server.grpc.access import Certificates
from nobackfill.server.grpc.admission import GrpcConnections
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.grpc.rpc import Interceptor
from nobackfill.server.process_limits import open_connections
from nobackfill.server.settings import Settings, split_address
from nobackfill.v1 import gallery_pb2, release_pb2, search_pb2, upgrade_pb2, vault_pb2
from nobackfill.wire.limits import LARGEST_REQUEST

if TYPE_CHECKING:
    from nobackfill.server.grpc.loop import Server

log = structlog.get_logger("server.listener")

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
    """Tell whether a plain `grpc.server` must serve, because loop.py cannot; the log has the
    reason.

    Raises:
        ConfigurationError: other machines could reach it. It takes a thread before a call's message
            arrives, so anybody who connects can hold all threads.
    """
    try:
        if settings.plain_grpc:
            raise ImportError("plain_grpc is set")
        from nobackfill.server.grpc.loop import Server  # noqa: F401
    except ImportError as error:
        reason = str(error)
    else:
        return False
    host, _ = split_address(settings.address, "address")
    if not is_loopback(host) and not settings.plain_grpc_open:
        raise ConfigurationError(
            f"address {settings.address} can be reached from other machines, and callers that send "
            f"nothing can block a plain grpc.server ({reason}). Install the grpcio of "
            "constraints.txt, listen on 127.0.0.1, or set plain_grpc_open"
        )
    log.warning("serving with a plain grpc.server, more slowly", reason=reason)
    return True


class PlainServer:
    """Serve with a plain `grpc.server` if loop.py does not work with this grpcio.

    Each call takes a thread as it arrives; gRPC refuses calls above the number of threads.
    """

    def __init__(self, interceptor: Interceptor, options: Sequence[tuple[str, Any]]) -> None:
        places = sum(lane.size.places for lane in interceptor.lanes.all.values())
        threads = min(_PLAIN_THREADS, places)
        self._working = interceptor.admission.working
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="grpc")
        self.server = grpc.server(
            self._pool, None, [interceptor], options, maximum_concurrent_rpcs=threads
        )

    def finish(self, end: float) -> None:
        """Wait until the calls that are being answered now have ended.

        Args:
            end: latest time on the monotonic clock.
        """
        open_calls = set(self._working)
        while open_calls and time.monotonic() < end:
            time.sleep(_DRAIN_CHECK_SECONDS)
            open_calls &= self._working

    def give_up(self) -> None:
        """Do nothing: the interceptor has ended the calls without a message."""

    def close(self) -> None:
        """Stop the threads, once the server has stopped."""
        self._pool.shutdown(wait=False)


def check_free(address: str, option: str) -> None:
    """Check that this process could listen at an address now, without listening there.

    Args:
        address: HOST:PORT; an unknown host passes, and fails later.
        option: the command's option, for the error.

    Raises:
        BusyError: no address of HOST:PORT can be bound.
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
        f"address {address} cannot be used, another program may have it; set another with {option}"
    )


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # untyped
    """Answer grpc.health.v1: whether each service is served."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {"": health_pb2.HealthCheckResponse.SERVING}
        self._is_ending = False

    def set(self, service: str, status: int) -> None:
        """Set the status of a service, unless the gateway is stopping."""
        if not self._is_ending:
            self._statuses[service] = status

    def end(self) -> None:
        """Report every service as not serving from now on."""
        self._is_ending = True
        for service in tuple(self._statuses):
            self._statuses[service] = health_pb2.HealthCheckResponse.NOT_SERVING

    def Check(  # noqa: N802 - the contract's name
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            context.set_code(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=status)

    def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> Iterator[health_pb2.HealthCheckResponse | None]:
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
    """Answer calls from `start` to `stop`."""

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
            ("grpc.max_allowed_incoming_connections", open_connections()),
        ]
        self._calls = server_of(interceptor, options)
        server = self._server = self._calls.server
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        add_services(server)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)

    def start(self, file: str | None = None) -> str:
        """Listen for calls.

        Args:
            file: also listen, without TLS, on this socket that nobody else can open; None means no
                socket.

        Returns:
            HOST:PORT with the port that is used.

        Raises:
            BusyError: the address is in use.
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
        self._connections = GrpcConnections(port, self._metrics)
        host, _ = split_address(address, "address")
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def set_health(self, *, embedding: bool, set_aside: Iterable[str]) -> None:
        """Set the health of all services; "" is the gateway's own.

        Args:
            embedding: models can embed; services that embed are not serving otherwise.
            set_aside: galleries that are set aside; each is reported as gallery/NAME until it is
                deleted.
        """
        status = health_pb2.HealthCheckResponse
        for name in ("", *SERVICES):
            is_serving = embedding or name not in EMBEDDING_SERVICES
            self._health.set(name, status.SERVING if is_serving else status.NOT_SERVING)
        for name in self._set_aside:
            self._health.set(f"gallery/{name}", status.SERVICE_UNKNOWN)
        self._set_aside = frozenset(set_aside)
        for name in self._set_aside:
            self._health.set(f"gallery/{name}", status.NOT_SERVING)

    def stop(self, drain_s: float) -> None:
        """Stop: let calls end, then cancel them; new ones are refused.

        Args:
            drain_s: longest time for calls to end, in seconds.
        """
        end = time.monotonic() + drain_s
        self._health.end()
        # gRPC would cut calls that have arrived but were not taken yet.
        time.sleep(min(_LAME_DUCK_SECONDS, drain_s))
        self._interceptor.drain()
        self._calls.give_up()
        self._calls.finish(end)
        # gRPC ends calls that arrive while its server stops with CANCELLED, as if their callers had
        # asked for it (grpc/grpc#41785). So connections are closed first.
        self._connections.end()
        self._server.stop(max(0.0, end - time.monotonic())).wait()
        self._connections.close()
        self._calls.close()
        self._interceptor.close()


def server_of(
    interceptor: Interceptor, options: Sequence[tuple[str, Any]]
) -> "PlainServer | Server":
    """Make the server for calls: that of loop.py, or a plain one if the interceptor is plain."""
    if interceptor.plain:
        return PlainServer(interceptor, options)
    from nobackfill.server.grpc.loop import Server

    return Server(interceptor, options)


def socket_in(folder: Path, closing: ExitStack) -> str:
    """Return gRPC's name for a socket in a folder, for parts of this process next to the gRPC
    server.

    It goes through a descriptor of the folder, open until `closing`, because a socket's path has at
    most 107 bytes.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    closing.callback(os.close, descriptor)
    return f"unix:/proc/{os.getpid()}/fd/{descriptor}/console.sock"
