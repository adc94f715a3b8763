"""Connections of one peer are bounded: those that were silent for longest are closed. At the end
all are.

gRPC's core bounds all connections together and ends silent ones, but counts none by peer. Sockets
are found through /proc, so this does nothing where there is none.
"""

import contextlib
import os
import socket
import struct
import threading
from collections import defaultdict
from pathlib import Path

import structlog

from nobackfill.server.grpc.error_boundary import error_boundary
from nobackfill.server.grpc.metrics import Metrics

log = structlog.get_logger("server.connections")

# Of one address. A client needs one, for all its calls; a proxy some for each that it serves.
LARGEST_PEER = 512
_EVERY_S = 0.5
_DESCRIPTORS = Path("/proc/self/fd")
# In the kernel's struct tcp_info: milliseconds since data came.
_LAST_DATA = struct.Struct("52xI")


class Connections:
    """Watches the connections to one port, from a thread of its own."""

    def __init__(self, port: int, metrics: Metrics) -> None:
        self._port = port
        self._metrics = metrics
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="connections", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Take no more of them, and close those that there are: calls on them are lost."""
        with contextlib.suppress(OSError):
            for descriptor in [int(path.name) for path in _DESCRIPTORS.iterdir()]:
                with contextlib.suppress(OSError), _borrowed(descriptor) as found:
                    if not _is_tcp(found) or found.getsockname()[1] != self._port:
                        continue
                    if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        # gRPC, which still has its number, hears nothing of it.
                        with socket.socket(found.family) as deaf:
                            os.dup2(deaf.fileno(), descriptor, inheritable=False)
                    else:
                        found.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            try:
                descriptors = [int(path.name) for path in _DESCRIPTORS.iterdir()]
            except FileNotFoundError:
                log.warning("connections are not bounded by peer: there is no /proc here")
                return
            except OSError:
                # No descriptor is left to look with; silent connections are ended by gRPC.
                continue
            if len(descriptors) > LARGEST_PEER:
                with error_boundary(self._metrics, "connections"):
                    self._bound(descriptors)

    def _bound(self, descriptors: list[int]) -> None:
        """Close what one peer has too many of."""
        peers: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for descriptor in descriptors:
            found = self._connection(descriptor)
            if found is not None:
                peer, silent_ms = found
                peers[peer].append((silent_ms, descriptor))
        for peer, connections in peers.items():
            excess = len(connections) - LARGEST_PEER
            if excess > 0:
                for _, descriptor in sorted(connections, reverse=True)[:excess]:
                    self._shut(descriptor, peer)
                log.warning("connections closed, one peer had too many", connections=excess)

    def _connection(self, descriptor: int) -> tuple[str, int] | None:
        """The peer of a connection to our port, and for how long it was silent."""
        with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
            if _is_tcp(connection) and connection.getsockname()[1] == self._port:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA.size)
                return str(connection.getpeername()[0]), _LAST_DATA.unpack(info)[0]
        return None

    def _shut(self, descriptor: int, peer: str) -> None:
        # Asked again: gRPC may have closed it meanwhile, and another file got its number.
        found = self._connection(descriptor)
        if found is None or found[0] != peer:
            return
        with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def _is_tcp(connection: socket.socket) -> bool:
    return connection.family in (socket.AF_INET, socket.AF_INET6)


def _borrowed(descriptor: int) -> socket.socket:
    """A descriptor of our own for the same socket. Raises OSError for anything but a socket."""
    own = os.dup(descriptor)
    try:
        return socket.socket(fileno=own)
    except OSError:
        # Also where it says EBADF: so it does of a folder that was opened by its path alone.
        os.close(own)
        raise
