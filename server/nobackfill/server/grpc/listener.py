"""The gRPC server: services behind the interceptor, health, reflection, a bounded drain."""

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

# The services that embed images; the others, and queries by embedding, do without a model server.
EMBEDDING_SERVICES = ("nobackfill.v1.SearchService", "nobackfill.v1.GalleryService")
SERVICES = tuple(
    service.full_name
    for file in (search_pb2, gallery_pb2, release_pb2, upgrade_pb2, vault_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
)

# After the signal, for so long everything that comes is still answered.
_LAME_DUCK_S = 0.5

# Threads of a plain server at most: they take memory, and fight for the interpreter.
_PLAIN_THREADS = 1024
# How often it is looked whether all is answered.
_DRAINED_S = 0.01

_OPTIONS = [
    # More is refused before it is read.
    ("grpc.max_receive_message_length", LARGEST_REQUEST),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 3),
    ("grpc.max_connection_idle_ms", 5 * 60_000),
    # Who connects has so long for TLS, and then for HTTP/2's first frame.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.http2.settings_timeout", 10_000),
    ("grpc.max_metadata_size", 16 * 1024),
]


def serves_plainly(settings: Settings) -> bool:
    """Whether a plain `grpc.server` has to serve, because loop.py cannot; logs why.

    Raises ConfigurationError where others could reach it: it takes a thread before a call's message
    has come, so that anybody who connects can hold all of them.
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
            f"address {settings.address} can be reached from other machines, and a plain "
            f"grpc.server holds no callers off who send nothing ({reason}). Install the grpcio "
            "that constraints.txt names, listen on 127.0.0.1, or set plain_grpc_open"
        )
    log.warning("serving with a plain grpc.server, more slowly", reason=reason)
    return True


class PlainServer:
    """A plain `grpc.server`, for where loop.py does not hold.

    Each call takes a thread as it arrives. More calls than threads are refused by gRPC itself.
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
        """Wait until what is being answered now has ended, at most until `end` on the monotonic
        clock."""
        left = set(self._working)
        while left and time.monotonic() < end:
            time.sleep(_DRAINED_S)
            left &= self._working

    def give_up(self) -> None:
        """Do nothing: the interceptor has ended the calls whose message has not come."""

    def close(self) -> None:
        """End the threads, once the server has stopped."""
        self._pool.shutdown(wait=False)


def check_free(address: str, option: str) -> None:
    """Look whether this process could listen at `address` now, without listening there.

    Raises BusyError where nothing that HOST:PORT stands for can be bound. An unknown host is left
    to whoever listens there.
    """
    host, port = split_address(address, "address")
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return
    for family, *_, place in places:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As gRPC does: a connection that ended a moment ago holds no port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(place)
            except OSError:
                continue
            return
    raise _busy(address, option)


def _busy(address: str, option: str) -> BusyError:
    return BusyError(
        f"address {address} cannot be used, another program may have it; give another with {option}"
    )


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # untyped
    """grpc.health.v1: what is served, by name."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {"": health_pb2.HealthCheckResponse.SERVING}
        self._is_ending = False

    def set(self, service: str, status: int) -> None:
        """Set a status, unless the gateway ends."""
        if not self._is_ending:
            self._statuses[service] = status

    def end(self) -> None:
        """Say of everything that it does not serve, from now on."""
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
    """Answers calls from `start` to `stop`."""

    def __init__(
        self, add_services: Callable[[grpc.Server], None], interceptor: Interceptor,
        settings: Settings, certificates: Certificates | None, metrics: Metrics,
    ) -> None:  # fmt: skip
        self._metrics = metrics
        self._settings = settings
        self._certificates = certificates
        self._interceptor = interceptor
        self._health = HealthService()
        self._aside: frozenset[str] = frozenset()
        # Above the bound on calls, so that those too many get RESOURCE_EXHAUSTED.
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
        """Listen; the address, with the port that was chosen for port 0. `file`: also there, in
        the clear, a socket that nobody else can open.

        Raises BusyError for an address in use.
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

    def set_health(self, *, embedding: bool, aside: Iterable[str]) -> None:
        """ "" says that the gateway answers; the services that embed follow the model server,
        and a gallery that is set `aside` has a name of its own, until it is deleted."""
        status = health_pb2.HealthCheckResponse
        for name in ("", *SERVICES):
            good = embedding or name not in EMBEDDING_SERVICES
            self._health.set(name, status.SERVING if good else status.NOT_SERVING)
        for name in self._aside:
            self._health.set(f"gallery/{name}", status.SERVICE_UNKNOWN)
        self._aside = frozenset(aside)
        for name in self._aside:
            self._health.set(f"gallery/{name}", status.NOT_SERVING)

    def stop(self, drain_s: float) -> None:
        """Let calls under way end within `drain_s` seconds, then cut them; refuse new ones."""
        end = time.monotonic() + drain_s
        self._health.end()
        # gRPC would cut calls that have arrived but not been looked at yet.
        time.sleep(min(_LAME_DUCK_S, drain_s))
        self._interceptor.drain()
        self._calls.give_up()
        self._calls.finish(end)
        # What comes to a connection once its server stops, gRPC ends with CANCELLED, as if its
        # caller had asked for it (grpc/grpc#41785): callers in a loop lose the connection first.
        self._connections.end()
        self._server.stop(max(0.0, end - time.monotonic())).wait()
        self._connections.close()
        self._calls.close()
        self._interceptor.close()


def server_of(
    interceptor: Interceptor, options: Sequence[tuple[str, Any]]
) -> "PlainServer | Server":
    """The server that calls come to: of loop.py, or plain where `interceptor` is."""
    if interceptor.plain:
        return PlainServer(interceptor, options)
    from nobackfill.server.grpc.loop import Server

    return Server(interceptor, options)


# A socket file in the data folder, for what runs in this process beside the gRPC server.


def socket_in(folder: Path, closing: ExitStack) -> str:
    """Its name for gRPC: by way of a descriptor of `folder`, open until `closing`, for a socket's
    path may have 107 bytes only."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    closing.callback(os.close, descriptor)
    return f"unix:/proc/{os.getpid()}/fd/{descriptor}/console.sock"
