"""Follow the other gateways that share the galleries: plan by what any of them commits.

A gateway follows a moment after a commit, and at the latest when a put or a search finds its plan
outdated.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import structlog

from nobackfill.errors import NobackfillError, UnavailableError
from nobackfill.server.catalog import Catalog
from nobackfill.server.galleries.hosted import GalleryRegistry, HostedGallery
from nobackfill.server.galleries.plan import Plan
from nobackfill.server.grpc.context import error_boundary
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.rollout.activation import Activations
from nobackfill.server.rollout.rollout import check_golden_probes
from nobackfill.server.serving import PlanManager
from nobackfill.server.state import GatewayState, State

log = structlog.get_logger("server.following")

# Seconds between two looks at the store, because a notification may be lost; seconds between two
# looks for an activation without a leader.
_POLL_SECONDS, _LEAD_CHECK_SECONDS = 0.5, 1.0


class CommitSource(Protocol):
    """Wait for news of other gateways; CommitNotifications implements it."""

    def wait(self, seconds: float) -> None:
        """Wait until there is news, or the time is over; both return None. News that came since the
        last call ends the wait at once.

        Args:
            seconds: the longest wait.

        Raises:
            UnavailableError: the store does not answer.
        """


class GatewayFollower:
    """Follow other gateways from `start` to `close`, and resume activations whose leader is
    gone.
    """

    def __init__(
        self, state: GatewayState, galleries: GalleryRegistry, serving: PlanManager, catalog:
        Catalog,
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
        self._announced = state.current
        self._trouble = ""
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._cleanup = ThreadPoolExecutor(1, "settling")

    def start(self, commits: CommitSource) -> None:
        """Follow the store from now on, in two threads; call it once.

        From now on GatewayState.catch_up makes this gateway follow at once. Each second it takes
        over an activation without a leader, and stops its own if the lead is lost. A store that
        does not answer is logged, and tried again.

        Args:
            commits: tells when another gateway has committed; one thread waits for it, at most 0.5
                s at a time.

        Raises:
            RuntimeError: the system has no thread left.
        """
        self._state.follow_others = self.catch_up
        self._threads = [
            threading.Thread(target=self._listen, args=(commits,), name="following", daemon=True),
            threading.Thread(target=self._succeed, name="succession", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop following; returns once both threads have ended. Plans that still drain are not
        waited for, and their models stay. The wait has no limit, and a second call does nothing.
        """
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self._cleanup.shutdown(wait=False, cancel_futures=True)

    def catch_up(self) -> None:
        """Open galleries that other gateways created, close those that they deleted, and make plans
        by the store's present state.

        A gallery that this gateway cannot follow yet keeps its plan; the log has the reason, and
        the next call tries again. Calls wait for each other. Models that plans need are loaded and
        checked. Replaced plans are freed later, on another thread.

        Raises:
            UnavailableError: the store does not answer.
            BusyError: the database is busy.
            VerificationError: a new gallery is damaged, or one of its models fails its check.
            CannotWriteError: the publication's verified metadata cannot be stored.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        with self._lock:
            self._catch_up()

    def _catch_up(self) -> None:
        outdated = self._galleries.sync_with_store(self._load_models)
        state = self._state.current
        planned = _planned_by(state)
        if planned != self._planned:
            outdated = list(self._galleries.all())
        old, trouble = list[Plan](), ""
        for hosted in outdated:
            try:
                old.append(self._replan(hosted))
            except NobackfillError as error:
                trouble = f"{hosted.name}: {error}"
        if trouble and trouble != self._trouble:
            log.error(
                "cannot follow the other gateways, so a gallery keeps its present release here; "
                "the gateway tries again",
                error=trouble,
            )
        self._trouble = trouble
        # Galleries that could not follow are tried again next time.
        self._planned = () if trouble else planned
        if state is not self._announced:
            self._announced = state
            self._serving.announce_release()
        if old and not self._stopping.is_set():
            self._cleanup.submit(self._serving.free_views_and_models, old)

    def _load_models(self, plan: Plan) -> None:
        self._serving.load_models(plan.model_manifests(), check_golden_probes)

    def _replan(self, hosted: HostedGallery) -> Plan:
        try:
            return self._serving.replan_gallery(hosted, self._load_models)
        except NobackfillError:
            # The gallery may have moved to a release that was published a moment ago.
            self._catalog.refresh()
            return self._serving.replan_gallery(hosted, self._load_models)

    def _listen(self, news: CommitSource) -> None:
        while not self._stopping.is_set():
            with error_boundary(self._metrics, "following"):
                try:
                    news.wait(_POLL_SECONDS)
                    self.catch_up()
                except UnavailableError as error:
                    log.warning(
                        "the database does not answer, so changes of other gateways are not seen "
                        "yet; the gateway tries again",
                        error=str(error),
                    )
                    self._stopping.wait(_LEAD_CHECK_SECONDS)

    def _succeed(self) -> None:
        """Take over activations that have no leader, and stop one whose lead is lost."""
        while not self._stopping.wait(_LEAD_CHECK_SECONDS):
            with error_boundary(self._metrics, "succession"):
                try:
                    run = self._activations.current_run()
                    if run is not None and run.leadership.is_lost():
                        run.cancel_event.set()
                    elif run is None and self._can_lead():
                        self._activations.resume()
                except NobackfillError as error:
                    log.warning(
                        "cannot take over the activation of a gateway that has stopped; this "
                        "gateway tries again",
                        error=str(error),
                    )

    def _can_lead(self) -> bool:
        """Tell whether an activation is under way whose release is published here."""
        activation = self._state.current.activation
        if activation is None:
            return False
        if activation.release not in self._catalog.manifests:
            self._catalog.refresh()
        return activation.release in self._catalog.manifests


def _planned_by(state: State) -> tuple[object, ...]:
    """Return the parts of the state that plans depend on."""
    next_release = state.activation.release if state.activation is not None else None
    return state.active, next_release, state.retired
