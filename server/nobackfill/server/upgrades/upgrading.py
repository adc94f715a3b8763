"""Carrying galleries into a release's space: one job a gallery at a time, throttled, stoppable."""

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

from nobackfill.errors import PreconditionError
from nobackfill.gallery.search import hnsw
from nobackfill.gallery.search.hnsw import HnswIndex
from nobackfill.gallery.search.index import give_way
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.staging import neighbours_kept
from nobackfill.gallery.upgrade import (
    Runner,
    UpgradeOutcome,
    UpgradeProgress,
    run_upgrade,
)
from nobackfill.release.manifest import Manifest, Upgrade
from nobackfill.release.models import CHUNK
from nobackfill.release.routes import Route, RouteRunner, open_route, plan_route
from nobackfill.release.trial import try_release
from nobackfill.server.catalog import Catalog, ChangeCounter
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.galleries.hosted_file import SMALL, HostedInFile
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.state import GatewayState

if TYPE_CHECKING:
    from nobackfill.server.upgrades.workers.workers import ByWorkers


# How far the upgrade of one gallery is.

# An upgrade's neighbours are looked at so often while it runs, at equal distances.
LOOKS = 10


class JobState(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    INDEXING = "indexing"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class Job:
    """The last upgrade of one gallery."""

    gallery: str
    from_release: int
    to_release: int
    state: JobState = JobState.RUNNING
    done: int = 0
    total: int = 0
    items_per_second: float = 0.0
    re_embedded: int = 0
    neighbours_kept: float | None = None
    message: str = ""

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen in it."""
        return self.state in (JobState.DONE, JobState.FAILED)

    @property
    def remaining_s(self) -> float:
        """Seconds to go at the present rate; 0 where none is known."""
        left = self.total - self.done
        return left / self.items_per_second if self.items_per_second > 0 else 0.0

    def to_json(self) -> str:
        """For `from_json`."""
        return json.dumps(asdict(self))


def from_json(text: str) -> Job:
    """A job that another gateway runs, or has run."""
    values = json.loads(text)
    return Job(**{**values, "state": JobState(values["state"])})


# How much of the machine an upgrade takes.

DEFAULT_SPARE_CORES = 0.5


class Throttle:
    """Leaves a share of the cores to searches: fewer threads, then pauses between chunks."""

    def __init__(self, spare_cores: float) -> None:
        """`spare_cores`: 0 to just below 1."""
        self.cores = len(os.sched_getaffinity(0))
        share = max(0.05, 1 - spare_cores) * self.cores
        self.threads = max(1, int(share))
        self.pause_per_second = max(0.0, self.threads / share - 1)
        self._last = time.monotonic()

    def rest(self) -> None:
        """Called after each chunk: pause in proportion to the work since the last call."""
        worked = time.monotonic() - self._last
        time.sleep(min(2.0, worked * self.pause_per_second))
        self._last = time.monotonic()


# What an upgrade of one gallery will cost, measured on a few of its items.

# A graph of so many items is built to measure larger ones.
_SAMPLE = 1_500
# How much faster a graph is carried to new vectors than built.
_CARRIED = 20
# What an element of a graph takes beside its vector: links, labels, levels.
_ELEMENT_BYTES = 8 * hnsw.M + 32


Result = TypeVar("Result")


@dataclass(frozen=True)
class UpgradeCost:
    """`seconds` until the new space answers; `index_seconds` more until it has a graph of its own,
    built behind the answers. `bytes` added on the disk, vectors and index; `memory_bytes` taken
    beyond what is used now, at the most."""

    items: int = 0
    seconds: float = 0.0
    index_seconds: float = 0.0
    bytes: int = 0
    memory_bytes: int = 0
    left_behind: int = 0


def cost(
    hosted: Hosted, open_runner: Callable[[], Runner], target: SpaceSpec, throttle: Throttle
) -> UpgradeCost:
    """With the pauses of `throttle`, on a machine as busy as now. Raises CannotWriteError."""
    runner, opening = _timed(open_runner)
    _, looking = _timed(lambda: neighbours_kept(hosted.store.sample, hosted.spec(), hosted.spec()))
    found = hosted.store.estimate(runner, target)
    count = hosted.store.count() - found.left_behind
    vectors = 4 * target.dim * count
    here = isinstance(hosted, HostedInFile)
    links = _ELEMENT_BYTES * count if here and count >= SMALL else 0
    chunks = math.ceil(found.items / CHUNK)
    carrying = found.seconds + looking * min(chunks, LOOKS)
    inherited, built = _index_seconds(hosted, target, count)
    return UpgradeCost(
        items=found.items,
        seconds=opening + carrying * (1 + throttle.pause_per_second) + looking + inherited,
        index_seconds=built,
        # An index file holds links only.
        bytes=found.bytes + links,
        # Graphs hold the vectors: the one that is inherited, and beside it the next one.
        memory_bytes=(2 * (vectors + links) if links else vectors) * here,
        left_behind=found.left_behind,
    )


def _index_seconds(hosted: Hosted, target: SpaceSpec, count: int) -> tuple[float, float]:
    """Until the new space has an index, and then until it has one of its own."""
    if count < SMALL or not isinstance(hosted, HostedInFile):
        return 0.0, 0.0
    spec = hosted.spec()
    labels, vectors, _ = hosted.store.sample(spec.space, spec.space, _SAMPLE)
    _, seconds = _timed(lambda: hnsw.build(spec, labels, vectors))
    # Each insertion walks down a graph whose depth grows with the logarithm of its size.
    growth = count / len(labels) * math.log(count) / math.log(len(labels))
    built = seconds * growth * (1 + target.dim / spec.dim) / 2
    base = hosted.view(spec.space).snapshot().base.index
    if isinstance(base, HnswIndex) and base.spec.metric == target.metric:
        return built / _CARRIED, built
    return built, 0.0


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    began = time.perf_counter()
    return work(), time.perf_counter() - began


# Which models were tried in a child with limits, so that this process may load them.


class Trials:
    """Tries what was not tried since the start, one release at a time."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = threading.Lock()
        # Replaced, never changed: what was tried is known without waiting for a trial that runs.
        self._tried: frozenset[tuple[str, int | None]] = frozenset()

    def release(
        self,
        manifest: Manifest,
        sources: Collection[int] = (),
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Try a release's encoders, and its upgrades from `sources`; see try_release."""
        wanted = {(manifest.space, source) for source in (None, *sources)}
        if wanted <= self._tried:
            return
        with self._lock:
            if wanted <= self._tried:
                return
            folder = self._catalog.verified(manifest.release)
            try_release(folder, manifest, upgrades=sources, meanwhile=meanwhile)
            self._tried |= wanted

    def steps(self, steps: Iterable[tuple[Manifest, Upgrade]]) -> None:
        """Try what a route leads through. Raises VerificationError."""
        for manifest, upgrade in steps:
            self.release(manifest, (upgrade.from_release,))


log = structlog.get_logger("server.upgrading")

_SHOWN_EVERY_S = 0.5


class Upgrading:
    """The jobs of all galleries. `changed` is notified at every chunk."""

    def __init__(
        self, files: Path, catalog: Catalog, state: GatewayState, metrics: Metrics,
        elsewhere: "ByWorkers | None" = None,
    ) -> None:  # fmt: skip
        """`elsewhere`: who carries windows in place of a thread of this process."""
        self._elsewhere = elsewhere
        self._metrics = metrics
        self._files = files
        self._catalog = catalog
        self._state = state
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._runners: dict[tuple[int, ...], RouteRunner] = {}
        # When, and in which state, each was last shown to other gateways.
        self._shown: dict[str, tuple[JobState, float]] = {}
        self.trials = Trials(catalog)
        self.changed = ChangeCounter()

    def route(self, hosted: Hosted, target: int, *, directly: bool = False) -> Route | None:
        """The best way from the gallery's active space to release `target`, or None; with
        `directly`, an empty one where the target searches that space as it is."""
        spec = hosted.spec()
        space = spec.space if directly else None
        return self._route(spec.release, target, spec.side_space, space)

    def _route(
        self, source: int, target: int, side: str | None, directly: str | None = None
    ) -> Route | None:
        usable = self._catalog.usable(source)
        if target not in usable:
            return None
        return plan_route(usable, source, target, side, directly=directly)

    def estimate(
        self, hosted: Hosted, target: Manifest, spare_cores: float
    ) -> tuple[UpgradeCost, Route]:
        """Cost of an upgrade, measured on a few items. Raises PreconditionError without a route,
        CannotWriteError."""
        route = self._need_route(hosted, target.release)
        if not route.steps:
            return UpgradeCost(), route
        throttle = Throttle(spare_cores)

        def open_runner() -> RouteRunner:
            return self._open(route, throttle.threads)

        # As an upgrade's, the probe's thread lets searches go before it.
        with ThreadPoolExecutor(1, "estimate", initializer=give_way) as one:
            probe = one.submit(cost, hosted, open_runner, SpaceSpec.of(target), throttle)
            return probe.result(), route

    def run(
        self,
        hosted: Hosted,
        target: Manifest,
        spare_cores: float,
        should_stop: Callable[[], bool],
        on_progress: Callable[[int], None] = lambda _done: None,
        *,
        here: bool = False,
    ) -> UpgradeOutcome:
        """Fill the target's space, from where an earlier run ended, until it is full, paused or
        stopped; in this thread where there are no workers, or it has to be `here`. `on_progress`
        gets the number of items done.

        Raises PreconditionError without a route, VerificationError for bad outputs,
        CannotWriteError.
        """
        route = self._need_route(hosted, target.release)
        source, spec = hosted.spec(), SpaceSpec.of(target)
        throttle, elsewhere = Throttle(spare_cores), None if here else self._elsewhere
        total = hosted.store.count()
        state = self._first_state(hosted.name)
        self._set(Job(hosted.name, source.release, target.release, state, total=total))
        # How many were done when the neighbours were last looked at.
        looked: int | None = None

        def on_chunk(progress: UpgradeProgress) -> None:
            rate = progress.written / progress.seconds if progress.seconds > 0 else 0.0
            self._update(
                hosted.name, done=progress.done, total=progress.total, items_per_second=rate
            )
            nonlocal looked
            if looked is None or LOOKS * (progress.done - looked) >= progress.total:
                looked = progress.done
                self._look(hosted, source, spec)
            on_progress(progress.done)
            if elsewhere is None:
                throttle.rest()

        def stops() -> bool:
            return should_stop() or self.paused(hosted.name)

        if elsewhere is None:
            runner = self._open(route, throttle.threads)
            outcome = run_upgrade(
                hosted.store, runner, spec, on_progress=on_chunk, should_stop=stops
            )
        else:
            self.trials.steps(route.steps)
            outcome = elsewhere.run(hosted.store, route, spec, on_chunk, stops)
        log.info("carried", gallery=hosted.name, written=outcome.written)
        if not outcome.stopped:
            self._report_kept(hosted, source, spec)
        return outcome

    def runner(self, source: Manifest, target: Manifest, side: str | None) -> RouteRunner | None:
        """The models of the best route for vectors with side-information of the space `side`,
        opened once; None if there is none, or none any more."""
        route = self._route(source.release, target.release, side)
        if route is None:
            return None
        # Not under the lock: it may take a while.
        self.trials.steps(route.steps)
        with self._lock:
            if route.releases not in self._runners:
                self._runners[route.releases] = self._open(route, 1)
            return self._runners[route.releases]

    def _open(self, route: Route, threads: int) -> RouteRunner:
        self.trials.steps(route.steps)
        return open_route(self._files, route, threads, int8=True)

    def pause(self, gallery: str) -> None:
        """Stop the job of a gallery after its present chunk, and those to come, until `resume`;
        remembered over a restart. Raises CannotWriteError."""
        self._state.revise(lambda now: {"paused": tuple({*now.paused, gallery})})
        self._go_on(gallery, JobState.PAUSED)

    def resume(self, gallery: str) -> None:
        """Let the jobs of a gallery go on. Raises CannotWriteError."""
        if self.paused(gallery):
            self._unpause({gallery})
            self._go_on(gallery, JobState.RUNNING)

    def paused(self, gallery: str) -> bool:
        """Whether the upgrades of a gallery are held back."""
        return gallery in self._state.current.paused

    def forget_missing(self, galleries: set[str]) -> None:
        """At the start: forget pauses of galleries whose deletion a kill broke off; `galleries` are
        those that are there. Raises CannotWriteError."""
        self.forget(set(self._state.current.paused) - galleries)

    def forget(self, galleries: set[str]) -> None:
        """Forget pauses and jobs of galleries that are gone. Raises CannotWriteError."""
        with self._lock:
            for gallery in galleries:
                self._jobs.pop(gallery, None)
        for gallery in galleries:
            self._state.keep_job(gallery, None)
        if galleries & set(self._state.current.paused):
            self._unpause(galleries)
        self.changed.notify()

    def _unpause(self, galleries: Collection[str]) -> None:
        self._state.revise(
            lambda now: {"paused": tuple(name for name in now.paused if name not in galleries)}
        )

    def wait_resumed(self, gallery: str, should_stop: Callable[[], bool]) -> None:
        """Wait while a gallery is paused."""
        seen = -1
        while self.paused(gallery) and not should_stop():
            seen = self.changed.wait(seen, 0.2)

    def job(self, gallery: str) -> Job | None:
        """The last job of a gallery, running or ended, whichever gateway's."""
        if self._state.shared:
            kept = self._state.job(gallery)
            return None if kept is None else from_json(kept)
        return self._jobs.get(gallery)

    def expect(self, hosted: Hosted, release: int) -> None:
        """An activation has begun that will carry the gallery: no earlier job is shown any more."""
        source = hosted.spec().release
        if source != release:
            self._set(Job(hosted.name, source, release, self._first_state(hosted.name)))

    def finish(self, gallery: str, state: JobState, message: str = "") -> None:
        """Record how a job ended, or that it is being indexed."""
        self._update(gallery, state=state, message=message)

    def give_up(self, gallery: str, message: str) -> None:
        """The job of a gallery has failed, if it did not end before."""
        self._go_on(gallery, JobState.FAILED, message)

    def count_re_embedded(self, hosted: Hosted, count: int) -> None:
        """Add to the items embedded again from images, which changes whose neighbours they are."""
        spec, older = hosted.spec(), [i for i in hosted.store.spaces() if i.state == "previous"]
        job = self.job(hosted.name) or Job(hosted.name, spec.release, spec.release, JobState.DONE)
        self._set(replace(job, re_embedded=job.re_embedded + count))
        if older:
            before = max(older, key=lambda info: info.activated)
            self._report_kept(hosted, before.spec, spec)

    def _look(self, hosted: Hosted, source: SpaceSpec, target: SpaceSpec) -> float | None:
        kept = neighbours_kept(hosted.store.sample, source, target)
        self._update(hosted.name, neighbours_kept=kept)
        return kept

    def _report_kept(self, hosted: Hosted, source: SpaceSpec, target: SpaceSpec) -> None:
        kept = self._look(hosted, source, target)
        if kept is not None:
            self._metrics.neighbours_kept.labels(str(target.release)).set(kept)

    def _need_route(self, hosted: Hosted, target: int) -> Route:
        route = self.route(hosted, target)
        if route is None:
            raise PreconditionError(
                f"gallery {hosted.name!r}: no upgrade leads from release {hosted.spec().release} "
                f"to {target} with its side-information; publish one, or put its images again"
            )
        return route

    def _set(self, job: Job) -> None:
        with self._lock:
            self._jobs[job.gallery] = job
        self._show(job)

    def _first_state(self, gallery: str) -> JobState:
        return JobState.PAUSED if self.paused(gallery) else JobState.RUNNING

    def _go_on(self, gallery: str, state: JobState, message: str = "") -> None:
        """Change the state of a job that has not ended; one that has stays as it ended."""
        with self._lock:
            job = self._jobs.get(gallery)
            if job is None or job.ended:
                return
            job = self._jobs[gallery] = replace(job, state=state, message=message)
        self._show(job)

    def _update(self, gallery: str, **values: object) -> None:
        with self._lock:
            job = self._jobs.get(gallery)
            if job is None:
                return
            job = self._jobs[gallery] = replace(job, **values)  # type: ignore[arg-type]
        self._show(job)

    def _show(self, job: Job) -> None:
        """To those who watch it here, and at other gateways: there, how far it is now and then."""
        now, last = time.monotonic(), self._shown.get(job.gallery)
        if last is None or last[0] != job.state or now - last[1] > _SHOWN_EVERY_S:
            self._shown[job.gallery] = job.state, now
            self._state.keep_job(job.gallery, job.to_json())
        self.changed.notify()
