"""The tasks of a comparison: trainings, shared features, and measurements of rows.

Each task names its prerequisites. Tasks run in processes of this machine or of a Ray cluster, and
start when their prerequisites are complete.
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
from nobackfill.research.cells import Evaluation, read_cells, row_cells, write_cells
from nobackfill.research.images import remove_name_places
from nobackfill.research.presets import Split
from nobackfill.research.protocols import protocol_cells
from nobackfill.research.rows import TEST, ComparisonPlace, MethodRow, TrainingRun, ensure_trained
from nobackfill.research.settings import prepare_images
from nobackfill.training.config import UpgradeConfig, parse_config
from nobackfill.training.loop.loop import keep_freed_memory
from nobackfill.training.loop.run import CHECKPOINT
from nobackfill.training.loop.training import split_images
from nobackfill.training.loop.upgrade import cache_features

Planned = Sequence[tuple[ComparisonPlace, Sequence[MethodRow]]]


@dataclass(frozen=True)
class FeatureViews:
    """Features of frozen models over the pictures that upgrades are trained on.

    Attributes:
        runs_folder: the folder of run folders whose cache has the features.
        pictures_id: identifies the pictures.
    """

    runs_folder: Path
    pictures_id: str


@dataclass(frozen=True)
class ComparisonTask:
    """A call `work(*arguments)`, which can start when its prerequisites are complete.

    Attributes:
        work: the function.
        arguments: its arguments.
        prerequisites: run folders and features that it reads.
        outputs: the run folder or the features that it writes.
    """

    work: Callable[..., None]
    arguments: tuple[object, ...]
    prerequisites: frozenset[Path | FeatureViews]
    outputs: frozenset[Path | FeatureViews] = frozenset()


def list_tasks(planned: Planned) -> list[ComparisonTask]:
    """List every training once, after those that it reads, and then every row's measurement.

    Features are separate tasks between models and upgrades, one for all upgrades that read the same
    pictures, so that the pictures and features are computed once. Upgrades that are trained already
    need none. Nothing is run.

    Args:
        planned: the rows by place; runs that several rows share become one task.

    Returns:
        The tasks, each after all that it needs: image models, features, upgrades, then
        measurements.

    Raises:
        ConfigurationError: an upgrade's configuration is invalid.
    """
    depths: dict[Path, tuple[int, TrainingRun]] = {}

    def depth(run: TrainingRun) -> int:
        if run.folder not in depths:
            depths[run.folder] = (1 + max((depth(n) for n in run.prerequisites), default=-1), run)
        return depths[run.folder][0]

    for _, rows in planned:
        for row in rows:
            for run in row.runs:
                depth(run)
    # Trainings of little depth come first, because many others wait for them.
    runs = [run for _, run in sorted(depths.values(), key=lambda entry: entry[0])]
    read = {run.folder: _views(run) for run in runs if run.config_values["kind"] == "upgrade"}
    networks = [run for run in runs if run.folder not in read]
    upgrades = [run for run in runs if run.folder in read]
    readers: dict[FeatureViews, list[TrainingRun]] = {}
    for run in upgrades:
        if not (run.folder / CHECKPOINT).is_file():
            readers.setdefault(read[run.folder], []).append(run)
    rows_of_all = [(place, row) for place, rows in planned for row in rows]
    return [
        *(
            ComparisonTask(run_training, (run,), _folders(run.prerequisites), _folders([run]))
            for run in networks
        ),
        *(
            ComparisonTask(
                make_features,
                (group,),
                _folders(model for run in group for model in run.prerequisites),
                frozenset([views]),
            )
            for views, group in readers.items()
        ),
        *(
            ComparisonTask(
                run_training,
                (run,),
                _folders(run.prerequisites) | ({read[run.folder]} & readers.keys()),
                _folders([run]),
            )
            for run in upgrades
        ),
        *(
            ComparisonTask(measure_row, (place, row), _folders(row.runs))
            for place, row in rows_of_all
        ),
    ]


def _folders(runs: Iterable[TrainingRun]) -> frozenset[Path | FeatureViews]:
    return frozenset(run.folder for run in runs)


def _views(run: TrainingRun) -> FeatureViews:
    """Return the pictures that an upgrade's frozen models read."""
    config = _upgrade_config(run)
    # Views are made at the largest image size of the models.
    size = max(model.config_values.get("image_size", 0) for model in run.prerequisites)
    keys = [f"image_size={size}", *(f"{key}={getattr(config, key)}" for key in _VIEWS)]
    return FeatureViews(run.folder.parent, " ".join(keys))


# The keys of an upgrade that decide which pictures its models read.
_VIEWS = (
    "images", "classes", "class_list", "skip_corrupt", "held_out", "split_seed", "views",
    "mixed_views", "augmentation",
)  # fmt: skip


def _upgrade_config(run: TrainingRun) -> UpgradeConfig:
    config = parse_config(dict(run.config_values), str(run.folder))
    assert isinstance(config, UpgradeConfig), "its kind says so"
    return config


def _one_thread() -> None:
    """Use one thread of torch and numpy per process; more threads would wait by spinning."""
    torch.set_num_threads(1)
    threadpool_limits(1)


def make_features(runs: Sequence[TrainingRun]) -> None:
    """Compute the features of upgrades that read the same pictures, into their cache.

    A line on stderr says how long it took. It sets torch and numpy to one thread for the rest of
    the process. Augmented views seed torch's default generator.

    Args:
        runs: at least one upgrade; the models that they read are trained.

    Raises:
        ConfigurationError: images cannot be read, or a model is missing or unfinished.
        InvalidInputError: there are too few images, or one cannot be decoded.
        VerificationError: a checkpoint is damaged.
        CannotWriteError: the cache cannot be written.
        OSError: a checkpoint cannot be opened, or this user may not list a folder of images.
        NoEncoderError: a release that is read embeds no images.
        UnfitError: this program cannot use a published release that is read.
        ValueError: a stored check of images is damaged.
        AssertionError: a run is no upgrade.
        NotFoundError, UnavailableError: a publication or a backbone of local-dir or hf-hub is
            missing or incomplete, or cannot be read or downloaded.
        NobackfillError: a process that reads images was killed.
    """
    _one_thread()
    keep_freed_memory()
    began = _clocks()
    configs = [_upgrade_config(run) for run in runs]
    cache_features(configs, *split_images(configs[0]))
    _tell(f"made features for {', '.join(str(run.folder) for run in runs)}", began)


def run_training(run: TrainingRun) -> None:
    """Run one training whose prerequisites are trained; a finished one is only checked.

    Its prerequisites are taken as trained. A line on stderr says how long it took, unless the run
    is finished. It sets torch and numpy to one thread for the rest of the process.

    Args:
        run: the training.

    Raises:
        CannotWriteError: the run folder cannot be written.
        ConfigurationError: its configuration is invalid, its folder belongs to another one, or
            images cannot be read.
        InvalidInputError: there are too few classes or images, or an image cannot be decoded.
        VerificationError: a checkpoint is damaged.
        DivergedError: a loss is not finite.
        BusyError: another process trains in the folder.
        NotFoundError: pretrained weights do not exist.
        UnavailableError: pretrained weights cannot be downloaded.
        NoEncoderError: a release of an upgrade embeds no images.
        UnfitError: this program cannot use a published release of an upgrade.
        ValueError, RuntimeError: an upgrade is solved from vectors that are not finite.
        ValueError: stats.jsonl or a stored check of images is damaged.
        OSError: a checkpoint, weights or the folder of images cannot be opened.
        NobackfillError: a process that reads images was killed.
    """
    _one_thread()
    trained = {model.folder for model in run.prerequisites}
    if (run.folder / CHECKPOINT).is_file():
        ensure_trained(run, trained)
        return
    began = _clocks()
    ensure_trained(run, trained)
    _tell(f"trained {run.folder}", began)


def measure_row(place: ComparisonPlace, row: MethodRow) -> None:
    """Measure and store the cells of one row, unless they are stored for the same models.

    A line on stderr says how long it took, unless the cells are stored. Lists of test images stay
    in the process, so that later changes of files are not seen. Features are cached below the
    place's runs. It sets torch and numpy to one thread for the rest of the process.

    Args:
        place: the seed and split of the row.
        row: the row; its runs are trained.

    Raises:
        OSError: a run of the row has no checkpoint. PermissionError: this user may not list a
            folder of images.
        CannotWriteError: the features or the .json file of the cells cannot be written; of the .npz
            file it is an OSError.
        ConfigurationError: a run is unfinished or of another kind, or images cannot be read.
        InvalidInputError: an image cannot be decoded.
        VerificationError: a checkpoint is damaged, or an exported file computes other vectors.
        ValueError: no tested image shares its class with another one, or stats.jsonl of the new
            model's run is damaged.
        NotFoundError, UnavailableError: a backbone of local-dir or hf-hub is missing, or its
            description cannot be downloaded.
        NobackfillError: a process that reads images was killed.
    """
    _one_thread()
    path, key = cells_path(place, row), _key(row)
    if read_cells(path, key) is not None:
        return
    began = _clocks()
    published = place.preset.published_set
    if published is not None and published.protocol_folders:
        cells = protocol_cells(place, row)
    else:
        test = _test(
            place.images_folder,
            row.test_folder,
            place.split,
            place.preset.metric,
            place.runs_folder / "features",
        )
        cells = row_cells(row, test)
    if place.preset.is_development:
        cells = replace(cells, query_classes=remove_name_places(cells.query_classes))
    write_cells(path, cells, key)
    _tell(f"measured {row.name}, {place.split.name}, seed {place.seed}", began)


@lru_cache(maxsize=2)
def _test(images: Path, tested: str, split: Split, metric: Metric, cache: Path) -> Evaluation:
    """Return the test images of rows, cached because consecutive rows share them."""
    return Evaluation(_listing(images, tested, split), metric, cache)


def row_images(place: ComparisonPlace, row: MethodRow) -> ImageListing:
    """List the images that are query and gallery of a row.

    They are the tested classes of the split, or all images of the row's own folder.

    Raises:
        ConfigurationError: the folder cannot be read.
        InvalidInputError: the folder has no class folder, or an empty one.
        PermissionError: this user may not list the folder.
    """
    return _listing(place.images_folder, row.test_folder, place.split)


def _listing(images: Path, tested: str, split: Split) -> ImageListing:
    listing = list_images(images / tested)
    if tested != TEST:
        return listing
    is_tested = (listing.labels >= split.first_tested_class) & (
        listing.labels < split.tested_class_end
    )
    return listing.select(is_tested.nonzero()[0])


def cells_path(place: ComparisonPlace, row: MethodRow) -> Path:
    """Return the .npz file of a row's cells, which may not exist yet.

    It depends on the place and the row's name alone, with ":" as "-", so it may hold the cells of
    earlier checkpoints; `read_cells` tells by the row's key.
    """
    return place.runs_folder / "cells" / f"{row.name.replace(':', '-')}.npz"


def _key(row: MethodRow) -> str:
    digests = [sha256_file(run.folder / CHECKPOINT)[:16] for run in row.runs]
    folder = [] if row.test_folder == TEST else [f"tested={row.test_folder}"]
    return " ".join([*digests, f"int8={row.uses_int8}", *folder])


def _clocks() -> tuple[float, float]:
    """Return wall-clock seconds and processor seconds of this process."""
    return time.monotonic(), time.process_time()


def _tell(what: str, began: tuple[float, float]) -> None:
    clock, processor = (end - start for end, start in zip(_clocks(), began, strict=True))
    text = f"compare.py {what} in {clock:.1f} s, {processor:.1f} s of them on a processor"
    print(text, file=sys.stderr, flush=True)


# Seconds between lines of progress.
_LINE_EVERY = 10.0

# Hands a task to a process.
Submit = Callable[..., Future[None]]


def run_tasks(planned: Planned, job_count: int, cluster: str | None = None) -> None:
    """Make the images, train every run, and measure every row; finished work is skipped.

    Progress is printed on stderr. The first error ends the work once the running tasks have ended;
    with a cluster, it is raised at once. Finished work stays, and the next call uses it.

    Args:
        planned: the rows by place.
        job_count: the number of processes, at least 1; 1: this process, whose torch and numpy have
            one thread from then on. It is ignored with a cluster.
        cluster: the address of a Ray cluster whose nodes run the tasks instead; they must have the
            folders under the same paths. None: processes of this machine.

    Raises:
        UnavailableError: pretrained weights cannot be downloaded, or no cluster answers.
        ConfigurationError: a row does not fit the images, a configuration is invalid, or Ray is not
            installed.
        NobackfillError: a process of this machine was killed.
        ray.exceptions.RayError: a worker of the cluster was killed more often than Ray repeats its
            task.
        InvalidInputError: there are too few images, or one cannot be decoded.
        VerificationError: a checkpoint is damaged.
        DivergedError: a loss is not finite.
        BusyError: another process trains in a run's folder.
        CannotWriteError: a run, feature or cell cannot be written.
        NotFoundError: pretrained weights do not exist.
        OSError: images or cells cannot be written. PermissionError: this user may not list a folder
            of images.
        ValueError: no tested image shares its class with another one, or label noise is to be made
            from images of a single class.
        ValueError, RuntimeError: an upgrade is solved from vectors that are not finite.
    """
    for place, rows in planned:
        prepare_images(place, list(rows))
    waiting = list_tasks(planned)
    progress = _Progress(len(waiting))
    if cluster is not None:
        with _nodes(cluster) as (submit, processors):
            _share(waiting, processors, submit, progress)
    elif job_count == 1:
        for task in waiting:
            task.work(*task.arguments)
            progress.finish_one()
    else:
        spawned = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(job_count, spawned, initializer=end_with_parent) as pool:
            try:
                _share(waiting, job_count, pool.submit, progress)
            except BrokenProcessPool as error:
                raise NobackfillError(
                    "a process of compare.py was killed: give the machine or its container more "
                    "memory, or use fewer --jobs; then run the same command again to resume"
                ) from error


class _Progress:
    """Prints the number of tasks and of finished tasks on stderr."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._began = self._printed = time.monotonic()
        self._print("trainings and measurements to do; finished ones are used again")

    def finish_one(self) -> None:
        """Count a finished task, and print a line if the last one is old enough."""
        self._done += 1
        clock = time.monotonic()
        if clock - self._printed >= _LINE_EVERY and self._done < self._total:
            self._printed = clock
            self._print(f"trainings and measurements finished after {clock - self._began:.0f} s")

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
    """Run tasks in `jobs` processes, in their order as far as their prerequisites allow.

    No more tasks are submitted than there are processes, so that a failure is raised as soon as the
    running tasks end.
    """
    outputs: set[Path | FeatureViews] = set()
    running: dict[Future[None], ComparisonTask] = {}
    while waiting or running:
        ready = [task for task in waiting if task.prerequisites <= outputs][: jobs - len(running)]
        for task in ready:
            waiting.remove(task)
            running[submit(task.work, *task.arguments)] = task
        ended, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in ended:
            future.result()
            outputs |= running.pop(future).outputs
            progress.finish_one()
