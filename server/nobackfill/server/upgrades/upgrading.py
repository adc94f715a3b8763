"""Upgrade galleries into a release's space: one job for each gallery, throttled, stoppable."""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import structlog

from nobackfill.errors import PreconditionError, VerificationError
from nobackfill.gallery.search import hnsw
from nobackfill.gallery.search.hnsw import HnswIndex
from nobackfill.gallery.search.index import lower_thread_priority
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.staging import (
    Runner,
    UpgradeOutcome,
    UpgradeProgress,
    neighbour_overlap,
    run_upgrade,
)
from nobackfill.release.manifest import Manifest, Upgrade
from nobackfill.release.models import CHUNK_ROWS
from nobackfill.release.routes import Route, RouteRunner, open_route, plan_route
from nobackfill.release.trial import try_release
from nobackfill.server.catalog import Catalog, ChangeCounter
from nobackfill.server.galleries.hosted import HostedGallery
from nobackfill.server.galleries.hosted_file import SMALL_GALLERY, HostedInFile
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.state import GatewayState

if TYPE_CHECKING:
    from nobackfill.server.upgrades.workers.workers import WorkerUpgrades


# Times that the kept neighbours are measured during an upgrade, at equal distances.
MEASUREMENTS = 10


class JobState(StrEnum):
    """Name the state of a gallery's upgrade."""

    RUNNING = "running"
    PAUSED = "paused"
    INDEXING = "indexing"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class Job:
    """Describe the last upgrade of one gallery.

    Attributes:
        gallery: its name.
        from_release: release of its old space.
        to_release: release of its new space.
        state: the state.
        complete: items upgraded.
        total: items to upgrade.
        items_per_second: present rate; 0 if unknown.
        re_embedded: items that were re-embedded from images afterwards.
        neighbours_kept: share of nearest neighbours that the upgrade kept, 0 to 1; None if not
            measured.
        message: a sentence for operators; may be empty.
    """

    gallery: str
    from_release: int
    to_release: int
    state: JobState = JobState.RUNNING
    complete: int = 0
    total: int = 0
    items_per_second: float = 0.0
    re_embedded: int = 0
    neighbours_kept: float | None = None
    message: str = ""

    @property
    def is_over(self) -> bool:
        """Tell whether the job was done or failed when it was read.

        The object never changes, so read the job again to poll.
        """
        return self.state in (JobState.DONE, JobState.FAILED)

    @property
    def remaining_s(self) -> float:
        """Return the seconds left at the present rate; 0 if it is unknown, or nothing is left.

        It is negative if more items are complete than there were to upgrade.
        """
        remaining = self.total - self.complete
        return remaining / self.items_per_second if self.items_per_second > 0 else 0.0

    def to_json(self) -> str:
        """Encode the job for `job_from_json`.

        The key `done` holds `complete`.
        """
        values = asdict(self)
        values["done"] = values.pop("complete")
        return json.dumps(values)


def job_from_json(text: str) -> Job:
    """Read a job that `Job.to_json` encoded, of this gateway or of one that shares its database.

    Raises:
        VerificationError: the text is no JSON, its state is unknown, or a key is missing or
            unknown, as from a newer version.
    """
    try:
        values = json.loads(text)
        state, complete = JobState(values.pop("state")), values.pop("done")
        return Job(**values, state=state, complete=complete)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise VerificationError(
            "the progress of this gallery's upgrade was stored by a newer nobackfill, and this one "
            "cannot read the progress; update this gateway"
        ) from error


DEFAULT_SPARE_CORES = 0.5


class Throttle:
    """Leave a share of the cores to searches: use fewer threads, and pause between chunks."""

    def __init__(self, spare_cores: float) -> None:
        """Compute threads and pauses.

        At least one thread is used, on the cores that this process may use. Pauses make up for a
        whole number of threads.

        Args:
            spare_cores: share of cores to leave, from 0 to 1; above 0.95 counts as that.
        """
        self.cores = len(os.sched_getaffinity(0))
        share = max(0.05, 1 - spare_cores) * self.cores
        self.threads = max(1, int(share))
        self.pause_per_second = max(0.0, self.threads / share - 1)
        self._last = time.monotonic()

    def pause(self) -> None:
        """Pause in proportion to the work since the last call; called after each chunk.

        It sleeps at most 2 s. The time of the first call counts from the constructor.
        """
        seconds = time.monotonic() - self._last
        time.sleep(min(2.0, seconds * self.pause_per_second))
        self._last = time.monotonic()


# Items of the graph that is built to estimate larger ones.
_SAMPLE = 1_500
# How many times faster a graph is inherited than built.
_INHERIT_SPEEDUP = 20
# Bytes of a graph's element besides its vector: links, labels, levels.
_ELEMENT_BYTES = 8 * hnsw.LINKS_PER_ROW + 32


Result = TypeVar("Result")


@dataclass(frozen=True)
class UpgradeCost:
    """Estimate an upgrade.

    Attributes:
        item_count: items to upgrade.
        upgrade_seconds: time until the new space answers.
        index_seconds: further time until it has a graph of its own, built in the background.
        disk_bytes: bytes added on disk, for vectors and index.
        memory_bytes: largest memory beyond the present use.
        left_behind_count: items that the upgrade cannot move.
    """

    item_count: int = 0
    upgrade_seconds: float = 0.0
    index_seconds: float = 0.0
    disk_bytes: int = 0
    memory_bytes: int = 0
    left_behind_count: int = 0


def estimate_cost(
    hosted: HostedGallery, open_runner: Callable[[], Runner], target: SpaceSpec, throttle: Throttle
) -> UpgradeCost:
    """Estimate an upgrade from a few items, on a machine as busy as it is now.

    It runs the models, and builds a small graph, in this thread; it takes seconds. The gallery
    stays unchanged; for a gallery in a file, a temporary file is written beside its folder. Without
    an item to migrate, `item_count` is 0, and the seconds are those of opening and measuring.

    Args:
        hosted: the gallery.
        open_runner: opens the models of the route.
        target: the new space.
        throttle: the pauses.

    Returns:
        The cost, with the pauses that the throttle makes.

    Raises:
        VerificationError: a model fails its trial, or its output is not valid.
        CannotWriteError: the store cannot be written.
        UnavailableError: the database does not answer.
        InvalidInputError: a model's output is invalid.
        IncompatibleSpaceError: the active space was deleted meanwhile.
        NotFoundError: the gallery is closed or deleted.
        BusyError: the store is busy.
        NobackfillError: whatever `open_runner` raises.
        ConfigurationError: the database refuses the statement, as without rights.
        OSError: the temporary file cannot be created.
    """
    runner, opening = _timed(open_runner)
    spec = hosted.active_spec()
    _, measuring = _timed(lambda: neighbour_overlap(hosted.store.sample_pairs, spec, spec))
    estimate = hosted.store.estimate_upgrade(runner, target)
    count = hosted.store.count() - estimate.left_behind_count
    vectors = 4 * target.dim * count
    is_file = isinstance(hosted, HostedInFile)
    links = _ELEMENT_BYTES * count if is_file and count >= SMALL_GALLERY else 0
    chunks = math.ceil(estimate.item_count / CHUNK_ROWS)
    upgrading = estimate.seconds + measuring * min(chunks, MEASUREMENTS)
    inherited, built = _index_seconds(hosted, target, count)
    return UpgradeCost(
        item_count=estimate.item_count,
        upgrade_seconds=opening
        + upgrading * (1 + throttle.pause_per_second)
        + measuring
        + inherited,
        index_seconds=built,
        # An index file has links only.
        disk_bytes=estimate.growth_bytes + links,
        # Graphs hold the vectors: the inherited one, and the next one while it is built.
        memory_bytes=(2 * (vectors + links) if links else vectors) * is_file,
        left_behind_count=estimate.left_behind_count,
    )


def _index_seconds(hosted: HostedGallery, target: SpaceSpec, count: int) -> tuple[float, float]:
    """Return the seconds until the new space has an index, and then until it has one of its own."""
    if count < SMALL_GALLERY or not isinstance(hosted, HostedInFile):
        return 0.0, 0.0
    spec = hosted.active_spec()
    labels, vectors, _ = hosted.store.sample_pairs(spec.space, spec.space, _SAMPLE)
    _, seconds = _timed(lambda: hnsw.build_index(spec, labels, vectors))
    # The depth of a graph grows with the logarithm of its size, and each insertion walks down.
    growth = count / len(labels) * math.log(count) / math.log(len(labels))
    build_seconds = seconds * growth * (1 + target.dim / spec.dim) / 2
    base = hosted.view(spec.space).snapshot().base.index
    if isinstance(base, HnswIndex) and base.spec.metric == target.metric:
        return build_seconds / _INHERIT_SPEEDUP, build_seconds
    return build_seconds, 0.0


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    began = time.perf_counter()
    return work(), time.perf_counter() - began


class ModelTrials:
    """Try models in a child process with limits, each release once, before this process
    loads them.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = threading.Lock()
        # Replaced, never changed: readers do not wait for a running trial.
        self._passed: frozenset[tuple[str, int | None]] = frozenset()

    def try_release_models(
        self,
        manifest: Manifest,
        sources: Collection[int] = (),
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """Try a release's encoders, and its upgrades from other releases; see try_release.

        A trial runs in a child process with limits, and other calls wait for it without a limit;
        meanwhile their `check_stop` is not called. A model that passed is not tried again, also
        with other sources. A failure is not remembered.

        Args:
            manifest: the release.
            sources: releases whose upgrades are tried; one without an upgrade to the release
                passes.
            check_stop: called often during a trial; it may raise to stop.

        Raises:
            VerificationError: a model fails its trial, or a file does not match its signed digest.
            NotFoundError: the release is not published.
            NobackfillError: whatever `check_stop` raises; the child is killed.
            UnavailableError: the publication folder cannot be read.
            CannotWriteError: the publication's verified metadata cannot be stored.
            OSError: the child process of a trial cannot be started, or the folder of the verified
                metadata cannot be read.
        """
        needed = {(manifest.space, source) for source in (None, *sources)}
        if needed <= self._passed:
            return
        with self._lock:
            if needed <= self._passed:
                return
            folder = self._catalog.verify_files(manifest.release)
            try_release(folder, manifest, upgrades=sources, poll=check_stop)
            self._passed |= needed

    def try_route_models(self, steps: Iterable[tuple[Manifest, Upgrade]]) -> None:
        """Try the models of a route, each release once.

        Args:
            steps: manifest and upgrade of each step; without steps nothing happens.

        Raises:
            VerificationError: a model fails its trial, or a file does not match its signed digest.
            NotFoundError: a release is not published.
            UnavailableError: the publication folder cannot be read.
            CannotWriteError: the publication's verified metadata cannot be stored.
            OSError: the child process of a trial cannot be started, or the folder of the verified
                metadata cannot be read.
        """
        for manifest, upgrade in steps:
            self.try_release_models(manifest, (upgrade.from_release,))


log = structlog.get_logger("server.upgrading")

_SAVE_SECONDS = 0.5


class GalleryUpgrades:
    """Run the upgrades of all galleries; `change_counter` is notified at every chunk."""

    def __init__(
        self, publication_folder: Path, catalog: Catalog, state: GatewayState, metrics: Metrics,
        workers: "WorkerUpgrades | None" = None,
    ) -> None:  # fmt: skip
        """Start without jobs.

        Args:
            publication_folder: publication folder.
            catalog: published releases.
            state: the gateway's state.
            metrics: the gateway's metrics.
            workers: computes upgrades in other processes; None means in a thread.
        """
        self._workers = workers
        self._metrics = metrics
        self._files = publication_folder
        self._catalog = catalog
        self._state = state
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._runners: dict[tuple[int, ...], RouteRunner] = {}
        # For each gallery, the state and time that were last saved for other gateways.
        self._saved: dict[str, tuple[JobState, float]] = {}
        self.trials = ModelTrials(catalog)
        self.change_counter = ChangeCounter()

    def best_route(
        self, hosted: HostedGallery, target_release: int, *, is_direct: bool = False
    ) -> Route | None:
        """Return the best route from a gallery's active space to a release; None without one.

        A release that is withdrawn is not used, except the source itself. Nothing is opened. The
        route is empty if the gallery has the release already.

        Args:
            hosted: the gallery.
            target_release: the release.
            is_direct: return an empty route if the target searches the space as it is.

        Raises:
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store is damaged.
            CannotWriteError: the file cannot be opened, or the disk fails.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        spec = hosted.active_spec()
        space = spec.space if is_direct else None
        return self._route(spec.release, target_release, spec.side_space, space)

    def _route(
        self, source: int, target: int, side: str | None, is_direct: str | None = None
    ) -> Route | None:
        usable = self._catalog.manifests_for_routes(source)
        if target not in usable:
            return None
        return plan_route(usable, source, target, side, direct_search_space=is_direct)

    def estimate_upgrade(
        self, hosted: HostedGallery, target: Manifest, spare_cores: float
    ) -> tuple[UpgradeCost, Route]:
        """Estimate an upgrade from a few items.

        It runs in a thread of low priority, which this call waits for. A route without steps costs
        nothing.

        Args:
            hosted: the gallery.
            target: the release.
            spare_cores: share of cores to leave to searches, from 0 to below 1.

        Returns:
            The cost, and the route.

        Raises:
            PreconditionError: no upgrade leads to the release.
            CannotWriteError: the store, or the publication's verified metadata, cannot be written.
            VerificationError: a model fails its trial, its output is not valid, or the store is
                damaged.
            InvalidInputError: a model's output is invalid.
            NotFoundError: a release is not published, or the gallery was deleted.
            BusyError, UnavailableError: the store is busy or does not answer, or the publication
                folder cannot be read.
            IncompatibleSpaceError: the active space was deleted meanwhile.
            OSError: the child process of a trial cannot be started, or the folder of the verified
                metadata cannot be read.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        route = self._need_route(hosted, target.release)
        if not route.steps:
            return UpgradeCost(), route
        throttle = Throttle(spare_cores)

        def open_runner() -> RouteRunner:
            return self._open(route, throttle.threads)

        # The probe has a low priority, as an upgrade has.
        with ThreadPoolExecutor(1, "estimate", initializer=lower_thread_priority) as pool:
            probe = pool.submit(estimate_cost, hosted, open_runner, SpaceSpec.of(target), throttle)
            return probe.result(), route

    def run_upgrade(
        self,
        hosted: HostedGallery,
        target: Manifest,
        spare_cores: float,
        should_stop: Callable[[], bool],
        on_progress: Callable[[int], None] = lambda _done: None,
        *,
        in_this_thread: bool = False,
    ) -> UpgradeOutcome:
        """Fill a release's space, from where an earlier run ended, until it is complete, paused or
        stopped.

        It replaces the gallery's job, and saves its progress for other gateways at most twice a
        second. After each chunk it pauses; workers do not. Written vectors stay, also after an
        error. At the end, and ten times in between, it measures how many neighbours the upgrade
        kept. At the end, also after an error, the job stays RUNNING or PAUSED: the caller records
        the end by `finish_job`.

        Args:
            hosted: the gallery.
            target: the release.
            spare_cores: share of cores to leave to searches, from 0 to below 1.
            should_stop: called before each chunk or piece; True stops the run.
            on_progress: called after each of them with the number of items done.
            in_this_thread: run in this thread, and not by workers.

        Returns:
            The result; its `was_stopped` is True after a pause or a stop.

        Raises:
            PreconditionError: no upgrade leads to the release.
            VerificationError: a model fails its trial, its output is not valid, or the store is
                damaged.
            CannotWriteError: the store, or the publication's verified metadata, cannot be written.
            InvalidInputError: the gallery has the release already, the target exists as another
                space, or has too many dimensions for the database.
            NotFoundError: a release is not published, or the gallery was deleted.
            IncompatibleSpaceError: a space was deleted meanwhile.
            BusyError, UnavailableError: the store is busy or does not answer, workers end again and
                again, or the publication folder cannot be read.
            NobackfillError: whatever `should_stop` or `on_progress` raises.
            OSError: the child process of a trial cannot be started, or the folder of the verified
                metadata cannot be read.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        route = self._need_route(hosted, target.release)
        source, spec = hosted.active_spec(), SpaceSpec.of(target)
        throttle, workers = Throttle(spare_cores), None if in_this_thread else self._workers
        total = hosted.store.count()
        state = self._initial_job_state(hosted.name)
        self._set_job(Job(hosted.name, source.release, target.release, state, total=total))
        # Number of items done when the neighbours were last measured.
        measured_at: int | None = None

        def on_chunk(progress: UpgradeProgress) -> None:
            nonlocal measured_at
            rate = progress.written_count / progress.seconds if progress.seconds > 0 else 0.0
            complete, total = progress.complete_count, progress.item_count
            self._update_job(hosted.name, complete=complete, total=total, items_per_second=rate)
            if measured_at is None or MEASUREMENTS * (complete - measured_at) >= total:
                measured_at = complete
                self._measure_neighbours(hosted, source, spec)
            on_progress(complete)
            if workers is None:
                throttle.pause()

        def stops() -> bool:
            return should_stop() or self.is_paused(hosted.name)

        if workers is None:
            runner = self._open(route, throttle.threads)
            outcome = run_upgrade(
                hosted.store, runner, spec, on_progress=on_chunk, should_stop=stops
            )
        else:
            self.trials.try_route_models(route.steps)
            outcome = workers.run(hosted.store, route, spec, on_chunk, stops)
        log.info("upgraded", gallery=hosted.name, written=outcome.written_count)
        if not outcome.was_stopped:
            self._report_neighbours(hosted, source, spec)
        return outcome

    def open_runner(
        self, source: Manifest, target: Manifest, side: str | None
    ) -> RouteRunner | None:
        """Open the models of the best route for vectors from outside; they stay open.

        The same route opens its models once; nothing closes them before the process ends.

        Args:
            source: release of the vectors.
            target: release to reach.
            side: space of their side-information; None without it.

        Returns:
            The models of the route; None if there is no route.

        Raises:
            VerificationError: a model fails its trial, or a file does not match its signed digest.
            NotFoundError: a release is not published.
            InvalidInputError: `source` is `target`.
            UnavailableError: the publication folder cannot be read.
            CannotWriteError: the publication's verified metadata cannot be stored.
            OSError: the child process of a trial cannot be started, or the folder of the verified
                metadata cannot be read.
        """
        route = self._route(source.release, target.release, side)
        if route is None:
            return None
        # Tried outside of the lock, because that may take a while.
        self.trials.try_route_models(route.steps)
        with self._lock:
            if route.releases not in self._runners:
                self._runners[route.releases] = self._open(route, 1)
            return self._runners[route.releases]

    def _open(self, route: Route, threads: int) -> RouteRunner:
        self.trials.try_route_models(route.steps)
        return open_route(self._files, route, threads, int8=True)

    def pause(self, gallery: str) -> None:
        """Pause a gallery's upgrade after its present chunk, and later ones, until `resume`; also
        over a restart.

        A second call, and a name without a gallery or an upgrade, only record the pause. If only
        the job cannot be saved for other gateways, the pause holds all the same.

        Raises:
            CannotWriteError: the state cannot be written.
            UnavailableError: the database does not answer.
            BusyError: the database is busy.
            VerificationError: the state in the database is damaged, or a newer version wrote it.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        self._state.revise(lambda state: {"paused": tuple({*state.paused, gallery})})
        self._change_state(gallery, JobState.PAUSED)

    def resume(self, gallery: str) -> None:
        """Let a gallery's upgrades continue; do nothing if they are not paused.

        If only the job cannot be saved for other gateways, the upgrades continue all the same.

        Raises:
            CannotWriteError: the state cannot be written.
            UnavailableError: the database does not answer.
            BusyError: the database is busy.
            VerificationError: the state in the database is damaged, or a newer version wrote it.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        if self.is_paused(gallery):
            self._unpause({gallery})
            self._change_state(gallery, JobState.RUNNING)

    def is_paused(self, gallery: str) -> bool:
        """Tell whether a gallery's upgrades are paused; False for an unknown gallery.

        It reads memory only.
        """
        return gallery in self._state.current.paused

    def forget(self, galleries: set[str]) -> None:
        """Forget pauses and jobs of deleted galleries.

        Unknown names are ignored. Jobs that are saved for other gateways are deleted, too. After an
        error the call can be repeated; the jobs here are gone already.

        Raises:
            CannotWriteError: the state cannot be written.
            BusyError, UnavailableError: the database is busy, or does not answer.
            VerificationError: the state in the database is damaged, or a newer version wrote it.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        with self._lock:
            for gallery in galleries:
                self._jobs.pop(gallery, None)
        for gallery in galleries:
            self._state.save_upgrade_record(gallery, None)
        if galleries & set(self._state.current.paused):
            self._unpause(galleries)
        self.change_counter.notify()

    def _unpause(self, galleries: Collection[str]) -> None:
        self._state.revise(
            lambda state: {"paused": tuple(name for name in state.paused if name not in galleries)}
        )

    def wait_while_paused(self, gallery: str, should_stop: Callable[[], bool]) -> None:
        """Wait while a gallery is paused, at most until `should_stop` returns True.

        It asks at least every 0.2 s, and reads the state in memory. An unknown gallery is not
        paused.

        Args:
            gallery: its name.
            should_stop: called between waits; its error passes through.
        """
        version = -1
        while self.is_paused(gallery) and not should_stop():
            version = self.change_counter.wait_for_change(version, 0.2)

    def job(self, gallery: str) -> Job | None:
        """Return the last upgrade job of a gallery; None if no job is known.

        In a shared database, a job of another gateway counts, too. Otherwise jobs from before this
        gateway's start are not known.

        Raises:
            UnavailableError: the database does not answer.
            BusyError: the database is busy.
            VerificationError: the saved job is not valid, or a newer version wrote it.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        if self._state.shared:
            saved = self._state.last_upgrade_record(gallery)
            return None if saved is None else job_from_json(saved)
        return self._jobs.get(gallery)

    def expect_upgrade(self, hosted: HostedGallery, release: int) -> None:
        """Replace a gallery's job, because an activation has begun that will upgrade it.

        It does nothing if the gallery's active space is of the release. The job begins as RUNNING,
        or PAUSED, and is saved for other gateways.

        Raises:
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            CannotWriteError: the store cannot be written.
            VerificationError: the store is damaged.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        source = hosted.active_spec().release
        if source != release:
            self._set_job(Job(hosted.name, source, release, self._initial_job_state(hosted.name)))

    def finish_job(self, gallery: str, state: JobState, message: str = "") -> None:
        """Record how a job ended, or that its index is being built.

        A job that is done counts all its items, also those that an earlier job upgraded. Without a
        job of this gateway it does nothing.

        A job that has ended is changed, too.

        Args:
            gallery: the gallery.
            state: DONE, FAILED or INDEXING.
            message: a sentence for operators; may be empty.

        Raises:
            BusyError, UnavailableError: the database is busy, or does not answer.
            CannotWriteError: the database cannot write.
            VerificationError: the saved job is not valid, or a newer version wrote it.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        values: dict[str, object] = {"state": state, "message": message}
        if state is JobState.DONE and (job := self.job(gallery)) is not None:
            values["complete"] = job.total
        self._update_job(gallery, **values)

    def fail_job(self, gallery: str, message: str) -> None:
        """Record that a job failed, unless it has ended or there is none.

        Args:
            gallery: the gallery.
            message: why, as a sentence for operators.

        Raises:
            BusyError, UnavailableError: the database is busy, or does not answer.
            CannotWriteError: the database cannot write.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        self._change_state(gallery, JobState.FAILED, message)

    def count_re_embedded(self, hosted: HostedGallery, count: int) -> None:
        """Count re-embedded items, and measure the kept neighbours again.

        The job is saved for other gateways. Without a job, one that is done begins. Calls for one
        gallery may not overlap, or counts are lost. Neighbours are compared with the newest
        previous space, and exported as a metric; without such a space they are not measured.

        Args:
            hosted: the gallery.
            count: number of items to add; may be 0.

        Raises:
            CannotWriteError: the database cannot write.
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store is damaged; or the saved job is not valid, or a newer
                version wrote it.
            IncompatibleSpaceError: a space was deleted meanwhile; the items are counted already.
            ConfigurationError: the database refuses the statement.
        """
        spec = hosted.active_spec()
        older = [info for info in hosted.store.spaces() if info.state == "previous"]
        job = self.job(hosted.name) or Job(hosted.name, spec.release, spec.release, JobState.DONE)
        self._set_job(replace(job, re_embedded=job.re_embedded + count))
        if older:
            previous = max(older, key=lambda info: info.activation_rank)
            self._report_neighbours(hosted, previous.spec, spec)

    def _measure_neighbours(
        self, hosted: HostedGallery, source: SpaceSpec, target: SpaceSpec
    ) -> float | None:
        share = neighbour_overlap(hosted.store.sample_pairs, source, target)
        self._update_job(hosted.name, neighbours_kept=share)
        return share

    def _report_neighbours(
        self, hosted: HostedGallery, source: SpaceSpec, target: SpaceSpec
    ) -> None:
        share = self._measure_neighbours(hosted, source, target)
        if share is not None:
            self._metrics.neighbours_kept.labels(str(target.release)).set(share)

    def _need_route(self, hosted: HostedGallery, target: int) -> Route:
        route = self.best_route(hosted, target)
        if route is None:
            raise PreconditionError(
                f"gallery {hosted.name!r}: no upgrade leads from release "
                f"{hosted.active_spec().release} to {target} with the side-information that the "
                "gallery has; publish such an upgrade, or send the images of the items again"
            )
        return route

    def _set_job(self, job: Job) -> None:
        with self._lock:
            self._jobs[job.gallery] = job
        self._publish_job(job)

    def _initial_job_state(self, gallery: str) -> JobState:
        return JobState.PAUSED if self.is_paused(gallery) else JobState.RUNNING

    def _change_state(self, gallery: str, state: JobState, message: str = "") -> None:
        """Change the state of a job unless it has ended."""
        with self._lock:
            job = self._jobs.get(gallery)
            if job is None or job.is_over:
                return
            job = self._jobs[gallery] = replace(job, state=state, message=message)
        self._publish_job(job)

    def _update_job(self, gallery: str, **values: object) -> None:
        with self._lock:
            job = self._jobs.get(gallery)
            if job is None:
                return
            job = self._jobs[gallery] = replace(job, **values)  # type: ignore[arg-type]
        self._publish_job(job)

    def _publish_job(self, job: Job) -> None:
        """Publish a job to watchers here at once, and to other gateways now and then."""
        time_now, last = time.monotonic(), self._saved.get(job.gallery)
        if last is None or last[0] != job.state or time_now - last[1] > _SAVE_SECONDS:
            self._saved[job.gallery] = job.state, time_now
            self._state.save_upgrade_record(job.gallery, job.to_json())
        self.change_counter.notify()
