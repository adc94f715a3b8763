"""The tasks of a comparison: trainings, shared features, and measurements of rows.

Tasks name what they need. They run in processes of this machine or of a Ray cluster; each starts
when its needs are complete.
"""

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from nobackfill.class_folders import ImageListing, list_images
from nobackfill.digests import sha256_file
from nobackfill.errors import NobackfillError
from nobackfill.extras import require_extra
from nobackfill.metrics.distances import Metric
from nobackfill.plugins.ray.cluster import join_cluster
from nobackfill.processes import end_with_parent
from nobackfill.research.cells import (
    Evaluation,
    evaluation,
    read_cells,
    row_cells,
    write_cells,
)
from nobackfill.research.images import known_names
from nobackfill.research.presets import Split
from nobackfill.research.rows import TEST, ComparisonPlace, MethodRow, TrainingRun, ensure
from nobackfill.research.settings import prepare
from nobackfill.training.config import UpgradeConfig, parse_config
from nobackfill.training.loop.loop import keep_freed_memory
from nobackfill.training.loop.run import CHECKPOINT
from nobackfill.training.loop.training import split_images
from nobackfill.training.loop.upgrade import keep_features

Planned = Sequence[tuple[ComparisonPlace, Sequence[MethodRow]]]


@dataclass(frozen=True)
class Views:
    """Features of frozen models over the pictures that upgrades are trained on: `shown` identifies
    the pictures, `runs` is the folder whose cache has the features."""

    runs: Path
    shown: str


@dataclass(frozen=True)
class ComparisonTask:
    """A call `work(*arguments)` that can start once everything in `needs` is made.

    `made` is what it makes: a training's folder, or features."""

    work: Callable[..., None]
    arguments: tuple[object, ...]
    needs: frozenset[Path | Views]
    made: frozenset[Path | Views] = frozenset()


def tasks(planned: Planned) -> list[ComparisonTask]:
    """List every training once, after those that it reads, and then every row's measurement.

    Features are separate tasks between models and upgrades, one for all upgrades that read the same
    pictures, so that the pictures and features are computed once.
    """
    depths: dict[Path, tuple[int, TrainingRun]] = {}

    def depth(run: TrainingRun) -> int:
        if run.folder not in depths:
            depths[run.folder] = (1 + max((depth(n) for n in run.needs), default=-1), run)
        return depths[run.folder][0]

    for _, rows in planned:
        for row in rows:
            for run in row.runs:
                depth(run)
    # Trainings of little depth come first, because many others wait for them.
    runs = [run for _, run in sorted(depths.values(), key=lambda found: found[0])]
    read = {run.folder: _views(run) for run in runs if run.values["kind"] == "upgrade"}
    networks = [run for run in runs if run.folder not in read]
    upgrades = [run for run in runs if run.folder in read]
    asked: dict[Views, list[TrainingRun]] = {}
    for run in upgrades:
        if not (run.folder / CHECKPOINT).is_file():
            asked.setdefault(read[run.folder], []).append(run)
    rows_of_all = [(place, row) for place, rows in planned for row in rows]
    return [
        *(
            ComparisonTask(train_run, (run,), _folders(run.needs), _folders([run]))
            for run in networks
        ),
        *(
            ComparisonTask(
                make_features,
                (asking,),
                _folders(needed for run in asking for needed in run.needs),
                frozenset([views]),
            )
            for views, asking in asked.items()
        ),
        *(
            ComparisonTask(
                train_run,
                (run,),
                _folders(run.needs) | ({read[run.folder]} & asked.keys()),
                _folders([run]),
            )
            for run in upgrades
        ),
        *(
            ComparisonTask(measure_row, (place, row), _folders(row.runs))
            for place, row in rows_of_all
        ),
    ]


def _folders(runs: Iterable[TrainingRun]) -> frozenset[Path | Views]:
    return frozenset(run.folder for run in runs)


def _views(run: TrainingRun) -> Views:
    """Return the pictures that an upgrade's frozen models read."""
    config = _upgrade_config(run)
    # Views are made at the largest image size of the models.
    size = max(int(str(needed.values.get("image_size", 0))) for needed in run.needs)
    shown = " ".join([f"image_size={size}", *(f"{key}={getattr(config, key)}" for key in _VIEWS)])
    return Views(run.folder.parent, shown)


# The keys of an upgrade that decide which pictures its models read.
_VIEWS = (
    "images", "classes", "class_list", "skip_corrupt", "held_out", "split_seed", "views",
    "mixed_views", "augmentation",
)  # fmt: skip


def _upgrade_config(run: TrainingRun) -> UpgradeConfig:
    config = parse_config(dict(run.values), str(run.folder))
    assert isinstance(config, UpgradeConfig), "its kind says so"
    return config


def _one_thread() -> None:
    """Use one thread of torch and numpy per process; more threads would wait by spinning."""
    torch.set_num_threads(1)
    threadpool_limits(1)


def make_features(runs: Sequence[TrainingRun]) -> None:
    """Compute the features of upgrades that read the same pictures, into the cache."""
    _one_thread()
    keep_freed_memory()
    began = _clocks()
    configs = [_upgrade_config(run) for run in runs]
    keep_features(configs, *split_images(configs[0]))
    _tell(f"made features for {', '.join(str(run.folder) for run in runs)}", began)


def train_run(run: TrainingRun) -> None:
    """Run one training whose needs are complete."""
    _one_thread()
    if (run.folder / CHECKPOINT).is_file():
        ensure(run, {needed.folder for needed in run.needs})
        return
    began = _clocks()
    ensure(run, {needed.folder for needed in run.needs})
    _tell(f"trained {run.folder}", began)


def measure_row(place: ComparisonPlace, row: MethodRow) -> None:
    """Measure the cells of one row, unless they are stored for the same models."""
    _one_thread()
    path, key = cells_path(place, row), _key(row)
    if read_cells(path, key) is not None:
        return
    began = _clocks()
    test = _test(
        place.images, row.tested, place.split, place.preset.metric, place.runs / "features"
    )
    cells = row_cells(row, test)
    if place.preset.development:
        cells = replace(cells, classes=known_names(cells.classes))
    write_cells(path, cells, key)
    _tell(f"measured {row.name}, {place.split.name}, seed {place.seed}", began)


@lru_cache(maxsize=2)
def _test(images: Path, tested: str, split: Split, metric: Metric, cache: Path) -> Evaluation:
    """Return the test images of rows, cached because consecutive rows share them."""
    return evaluation(_listing(images, tested, split), metric, cache)


def images_of(place: ComparisonPlace, row: MethodRow) -> ImageListing:
    """Return queries and gallery of a row: the split's classes, or the row's own folder."""
    return _listing(place.images, row.tested, place.split)


def _listing(images: Path, tested: str, split: Split) -> ImageListing:
    listing = list_images(images / tested)
    if tested != TEST:
        return listing
    shown = (listing.labels >= split.tested_first) & (listing.labels < split.tested_end)
    return listing.select(shown.nonzero()[0])


def cells_path(place: ComparisonPlace, row: MethodRow) -> Path:
    """Return the file of a row's cells."""
    return place.runs / "cells" / f"{row.name.replace(':', '-')}.npz"


def _key(row: MethodRow) -> str:
    digests = [sha256_file(run.folder / CHECKPOINT)[:16] for run in row.runs]
    elsewhere = [] if row.tested == TEST else [f"tested={row.tested}"]
    return " ".join([*digests, f"int8={row.int8}", *elsewhere])


def _clocks() -> tuple[float, float]:
    """Return wall-clock seconds and processor seconds of this process."""
    return time.monotonic(), time.process_time()


def _tell(what: str, began: tuple[float, float]) -> None:
    clock, processor = (now - then for now, then in zip(_clocks(), began, strict=True))
    told = f"{what}: {clock:.1f} s, {processor:.1f} s of a processor"
    print(told, file=sys.stderr, flush=True)


# Seconds between lines of progress.
_LINE_EVERY = 10.0

# Hands a task to a process.
Submit = Callable[..., Future[None]]


def do(planned: Planned, jobs: int, cluster: str | None = None) -> None:
    """Make the images, train every run, and measure every row; finished work is skipped.

    Args:
        planned: the rows by place.
        jobs: the number of processes.
        cluster: the address of a Ray cluster whose nodes run the tasks instead; they must have the
            folders under the same paths.

    Raises:
        UnavailableError: no cluster answers.
        NobackfillError: a process was killed.
    """
    for place, rows in planned:
        prepare(place, list(rows))
    waiting = tasks(planned)
    progress = _Progress(len(waiting))
    if cluster is not None:
        with _nodes(cluster) as (submit, processors):
            _share(waiting, processors, submit, progress)
    elif jobs == 1:
        for task in waiting:
            task.work(*task.arguments)
            progress.finish_one()
    else:
        spawned = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, spawned, initializer=end_with_parent) as pool:
            try:
                _share(waiting, jobs, pool.submit, progress)
            except BrokenProcessPool as error:
                raise NobackfillError(
                    "a process of the comparison was killed: give the machine or its container "
                    "more memory, or use fewer --jobs; run it again to resume"
                ) from error


class _Progress:
    """Prints the number of tasks and of finished tasks on stderr."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._began = self._printed = time.monotonic()
        self._print("trainings and measurements to do; finished ones are kept and skipped")

    def finish_one(self) -> None:
        """Count a finished task, and print a line if the last one is old enough."""
        self._done += 1
        now = time.monotonic()
        if now - self._printed >= _LINE_EVERY and self._done < self._total:
            self._printed = now
            self._print(f"done after {now - self._began:.0f} s")

    def _print(self, text: str) -> None:
        count = f"{self._done} of {self._total}" if self._done else str(self._total)
        print(f"compare.py: {count} {text}", file=sys.stderr, flush=True)


@contextmanager
def _nodes(address: str) -> Iterator[tuple[Submit, int]]:
    """Yield a function that submits tasks to a cluster, and its number of processors.

    Ray runs a task again if its node dies; the task then resumes."""
    with require_extra("ray"):
        import ray
    join_cluster(address)

    def submit(work: Callable[..., None], *arguments: object) -> Future[None]:
        task: Future[None] = ray.remote(num_cpus=1)(work).remote(*arguments).future()
        return task

    try:
        yield submit, max(1, int(ray.cluster_resources().get("CPU", 1)))
    finally:
        ray.shutdown()


def _share(waiting: list[ComparisonTask], jobs: int, submit: Submit, progress: _Progress) -> None:
    """Run tasks in `jobs` processes, in their order as far as their needs allow.

    No more tasks are submitted than there are processes, so that a failure is raised as soon as the
    running tasks end.
    """
    made: set[Path | Views] = set()
    running: dict[Future[None], ComparisonTask] = {}
    while waiting or running:
        ready = [task for task in waiting if task.needs <= made][: jobs - len(running)]
        for task in ready:
            waiting.remove(task)
            running[submit(task.work, *task.arguments)] = task
        ended, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in ended:
            future.result()
            made |= running.pop(future).made
            progress.finish_one()
