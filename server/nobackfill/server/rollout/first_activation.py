"""The first activation: of the newest release, now or once one is published."""

import threading

import structlog

from nobackfill.errors import BusyError, NobackfillError
from nobackfill.server.catalog import Catalog
from nobackfill.server.embedding.models import Models
from nobackfill.server.grpc.context import error_boundary
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.rollout.activation import Activations
from nobackfill.server.state import GatewayState

log = structlog.get_logger("server.gateway")


class FirstActivation:
    """What a gateway without an active release does by itself."""

    def __init__(
        self, catalog: Catalog, state: GatewayState, models: Models, activations: Activations,
        stopping: threading.Event, metrics: Metrics,
    ) -> None:  # fmt: skip
        self._catalog = catalog
        self._state = state
        self._models = models
        self._activations = activations
        self._stopping = stopping
        self._metrics = metrics

    def begin(self) -> None:
        """Return once a release that is there answers; one that is not, or whose model server is
        not, is waited for in a thread."""
        newest = self._catalog.newest()
        # One that failed is tried again by an operator only.
        tried = newest if newest in self._state.now.failed else None
        if newest is not None and tried is None and self._models.ready():
            tried = newest if self._activate(newest) else None
        if self._state.now.active is None:
            threading.Thread(target=self._wait, args=(tried,), name="first", daemon=True).start()

    def _wait(self, tried: int | None) -> None:
        seen = -1
        while not self._stopping.is_set() and self._state.now.active is None:
            newest = self._catalog.newest()
            if newest is not None and newest != tried:
                # One that fails is not tried over and over; the next one published is.
                with error_boundary(self._metrics, "first"):
                    tried = newest if self._activate(newest) else None
            seen = self._catalog.changed.wait(seen, 0.5)

    def _activate(self, release: int) -> bool:
        """Whether it was tried: another gateway may be doing it."""
        try:
            for event in self._activations.start(release).events():
                log.info("first activation", phase=event.phase, message=event.message)
        except BusyError as error:
            log.info("another activates", release=release, error=str(error))
            return False
        except NobackfillError as error:
            log.error("first activation refused", release=release, error=str(error))
        return True
