"""The gateway as the demo's child, and the load of clients that it is watched under."""

import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from demo import gateway
from demo.children import Child, Children
from demo.latency import ActivationWindow
from demo.load import SEARCH, Load, Run, write_requests
from nobackfill.errors import UnavailableError
from nobackfill.v1 import release_pb2, search_pb2
from nobackfill.wire import Gateway

COMMAND = Path(sys.executable).with_name("gateway")
# Seconds until the gateway and its Triton have loaded a release, on a busy machine.
START_SECONDS = 120
# Asked for by each search under load.
HITS = 10


def free_addresses(count: int) -> list[str]:
    """Addresses of this machine that nobody listens at now."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    return addresses


def start_gateway(
    children: Children, model_repo: Path, data: Path, addresses: Sequence[str], *further: str,
    name: str = "gateway",
) -> Child:  # fmt: skip
    """Start `gateway serve`, with `further` arguments, and wait until a release answers. Its log is
    `name`.log. Raises UnavailableError."""
    address, metrics = addresses
    child = children.start(
        name,
        [
            *(COMMAND, "serve", "--model-repo", model_repo, "--data", data),
            *("--address", address, "--metrics-address", metrics, *further),
        ],
    )
    deadline = time.monotonic() + START_SECONDS
    with gateway.connect(address) as connection:
        while time.monotonic() < deadline:
            if child.process.poll() is not None:
                raise child.failure()
            try:
                if gateway.active_release(connection) is not None:
                    return child
            except UnavailableError:
                pass  # not listening yet
            time.sleep(0.2)
    raise UnavailableError(
        f"the gateway answers nothing after {START_SECONDS} s; its log: {child.log}",
    )


@contextmanager
def run_load(address: str, name: str, queries: Path, clients: int) -> Iterator[Run]:
    """Clients at work inside the context, from their first answers on; what they met is there
    after it."""
    messages = [
        search_pb2.SearchRequest(
            gallery=name, query=search_pb2.Query(image=path.read_bytes()), k=HITS
        ).SerializeToString()
        for path in gateway.list_images(queries).values()
    ]
    met = Run()
    with tempfile.TemporaryDirectory() as folder, Load() as load:
        requests = write_requests(Path(folder, "requests"), messages)
        load.begin(address, SEARCH, requests, clients, judged=True)
        yield met
        vars(met).update(vars(load.end()))


@dataclass(frozen=True)
class ActivationTiming:
    """How a release came into use."""

    window: ActivationWindow
    # Items carried over, and the seconds between the first and the last report of it.
    items: int
    upgrade_seconds: float
    phases: list[str]


def activate_release(connection: Gateway, release: int, rollout: str) -> ActivationTiming:
    """Activate a release and time it. Raises PreconditionError where the release failed."""
    return time_activation(connection.activate(release, rollout=rollout))


def time_activation(reports: Iterator[release_pb2.ActivateReleaseResponse]) -> ActivationTiming:
    """What the reports of an activation tell, read to its end."""
    phases: list[str] = []
    upgrading: list[float] = []
    items = 0
    start = time.monotonic()
    for report in reports:
        name = release_pb2.Phase.Name(report.phase).removeprefix("PHASE_").lower()
        if name not in phases:
            phases.append(name)
        if report.phase == release_pb2.PHASE_UPGRADING:
            upgrading.append(time.monotonic())
            items = max(items, report.total)
        elif upgrading and len(upgrading) == 1:
            upgrading.append(time.monotonic())
    end = time.monotonic()
    seconds = upgrading[-1] - upgrading[0] if len(upgrading) > 1 else end - start
    return ActivationTiming(ActivationWindow(start, end), items, seconds, phases)
