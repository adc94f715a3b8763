"""A gateway that shares its galleries with others follows them: what one commits, all of them plan
by, each a moment later, and at the latest when a put or a search finds its plan outdated."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import structlog

from nobackfill.errors import NobackfillError, UnavailableError
from nobackfill.server.catalog import Catalog
from nobackfill.server.galleries.galleries import GalleryRegistry
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.galleries.plan import Plan
from nobackfill.server.grpc.context import error_boundary
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.rollout.activation import Activations
from nobackfill.server.rollout.rollout import check_models
from nobackfill.server.serving import Serving
from nobackfill.server.state import GatewayState, State

log = structlog.get_logger("server.following")

# A notification may be lost: so often one looks without. And so often one looks for an activation
# that nobody leads.
_LOOK_S, _EVERY_S = 0.5, 1.0


class Waiting(Protocol):
    """Where news come from; News is one."""

    def wait(self, seconds: float) -> None:
        """Until there are some, or the time is over. Raises UnavailableError."""
        ...


class Following:
    """Follows from `start` to `close`, and leads on what a gateway that is gone has led."""

    def __init__(
        self, state: GatewayState, galleries: GalleryRegistry, serving: Serving, catalog: Catalog,
        activations: Activations, metrics: Metrics,
    ) -> None:  # fmt: skip
        self._state = state
        self._galleries = galleries
        self._serving = serving
        self._catalog = catalog
        self._activations = activations
        self._metrics = metrics
        self._lock = threading.Lock()
        self._planned: tuple[object, ...] = ()
        self._told = state.now
        self._trouble = ""
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._letting_go = ThreadPoolExecutor(1, "settling")

    def start(self, news: Waiting) -> None:
        """From now on plans follow the store, also where they are asked for."""
        self._state.follow = self.catch_up
        self._threads = [
            threading.Thread(target=self._listen, args=(news,), name="following", daemon=True),
            threading.Thread(target=self._succeed, name="succession", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Follow no more."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self._letting_go.shutdown(wait=False, cancel_futures=True)

    def catch_up(self) -> None:
        """Plan as the store says now. What this gateway cannot follow yet keeps its plan: see the
        log. Raises UnavailableError where the store does not answer."""
        with self._lock:
            self._catch_up()

    def _catch_up(self) -> None:
        outdated = self._galleries.follow(
            lambda plan: self._serving.load_for(plan.models(), check_models)
        )
        now = self._state.now
        planned = _planned_by(now)
        if planned != self._planned:
            outdated = list(self._galleries.all())
        old, trouble = list[Plan](), ""
        for hosted in outdated:
            try:
                old.append(self._replan(hosted))
            except NobackfillError as error:
                trouble = f"{hosted.name}: {error}"
        if trouble and trouble != self._trouble:
            log.error("cannot follow the other gateways", error=trouble)
        self._trouble = trouble
        # What could not follow is tried again.
        self._planned = () if trouble else planned
        if now is not self._told:
            self._told = now
            self._serving.tell()
        if old and not self._stopping.is_set():
            self._letting_go.submit(self._serving.let_go, old)

    def _replan(self, hosted: Hosted) -> Plan:
        try:
            return self._serving.follow(hosted, check_models)
        except NobackfillError:
            # Perhaps of a release that was published a moment ago.
            self._catalog.refresh()
            return self._serving.follow(hosted, check_models)

    def _listen(self, news: Waiting) -> None:
        while not self._stopping.is_set():
            with error_boundary(self._metrics, "following"):
                try:
                    news.wait(_LOOK_S)
                    self.catch_up()
                except UnavailableError as error:
                    log.warning("the store does not answer", error=str(error))
                    self._stopping.wait(_EVERY_S)

    def _succeed(self) -> None:
        """Of an activation that nobody leads any more, take the lead."""
        while not self._stopping.wait(_EVERY_S):
            with error_boundary(self._metrics, "succession"):
                try:
                    run = self._activations.running()
                    if run is not None and run.lead.lost():
                        run.cancelled.set()
                    elif run is None and self._can_lead():
                        self._activations.resume()
                except NobackfillError as error:
                    log.warning("no lead taken", error=str(error))

    def _can_lead(self) -> bool:
        """Whether a release is being activated, and it is published here."""
        coming = self._state.now.activation
        if coming is None:
            return False
        if coming.release not in self._catalog.manifests:
            self._catalog.refresh()
        return coming.release in self._catalog.manifests


def _planned_by(now: State) -> tuple[object, ...]:
    """What plans follow from."""
    coming = now.activation.release if now.activation is not None else None
    return now.active, coming, now.retired
