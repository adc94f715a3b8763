"""The life's gateways: one with a folder, or two that share a PostgreSQL and a Ray cluster."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from demo import cluster, database, gateway, serve
from demo.children import Child, Children
from nobackfill.errors import PreconditionError, UnavailableError
from nobackfill.v1 import release_pb2

Store = Literal["sqlite", "postgresql"]


class Gateways:
    """They are started when they are first needed."""

    def __init__(self, children: Children, out: Path, store: Store) -> None:
        self._children = children
        self._out = out
        self.count = 2 if store == "postgresql" else 1
        # Other ones in each run: nobody else may have taken them meanwhile.
        free = serve.free_addresses(2 * self.count)
        self._addresses = list(zip(free[::2], free[1::2], strict=True))
        self._shared: list[str] = []
        self._running: list[Child] = []
        self.killed = 0

    def address(self) -> str:
        """Of all of them, as clients take it."""
        while len(self._running) < self.count:
            self._running.append(self.start(len(self._running)))
        return ",".join(address for address, _ in self._addresses)

    def start(self, number: int, *further: str) -> Child:
        """One of them, with `further` arguments."""
        if self.count > 1 and not self._shared:
            store = database.start_database(self._children, self._out / "postgresql")
            self._shared = ["--store", store, *cluster.start_cluster(self._children)]
        name = f"gateway-{number + 1}" if number else "gateway"
        return serve.start_gateway(
            self._children, self._out / "model_repo", self._out / name, self._addresses[number],
            *self._shared, *further, name=f"{name}-again" if self.killed else name,
        )  # fmt: skip

    def activate(self, release: int, rollout: str) -> serve.ActivationTiming:
        """Activate a release and time it. Where there are two, the one that leads is killed once it
        carries items; the other leads on, and the first is started again. Raises PreconditionError
        where the release failed."""
        self.address()
        first, _ = self._addresses[0]
        with gateway.connect(first) as connection:
            if self.count == 1:
                return serve.activate_release(connection, release, rollout)
            reports = connection.activate(release, rollout=rollout)
            activation = serve.time_activation(self._deposed(reports, release))
        if self.killed:
            self._running[0] = self.start(0)
        return activation

    def _deposed(
        self, reports: Iterator[release_pb2.ActivateReleaseResponse], release: int
    ) -> Iterator[release_pb2.ActivateReleaseResponse]:
        try:
            for report in reports:
                yield report
                if report.phase == release_pb2.PHASE_UPGRADING and not self.killed:
                    self.killed += 1
                    self._children.kill(self._running[0])
        except UnavailableError:
            if not self.killed:
                raise
        if not self.killed:
            return
        with gateway.connect(self.address()) as connection:
            if gateway.wait_for_settled_release(connection) != release:
                raise PreconditionError(
                    f"release {release} was not activated after its gateway was killed; see the "
                    "other's log"
                )
        yield release_pb2.ActivateReleaseResponse(phase=release_pb2.PHASE_DONE)
