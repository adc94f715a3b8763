"""The work of a comparison, divided among processes: trainings in order of need, then cells."""

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from release.digests import sha256_file
from training.comparison.cells import evaluation, measure, read_cells, write_cells
from training.comparison.recipe import Place, Run, ensure
from training.comparison.rows import TEST, Row
from training.comparison.settings import prepare
from training.data import Listing, list_images
from training.run import CHECKPOINT

Planned = Sequence[tuple[Place, Sequence[Row]]]
Task = tuple[Callable[..., None], tuple[object, ...]]


def do(planned: Planned, jobs: int) -> None:
    """Make the images, train every run, measure every row. What is done is not done again.

    A run is trained when those that it reads are; runs of one depth share the processes.
    """
    for place, rows in planned:
        prepare(place, list(rows))
    with _pool(jobs) as run_all:
        for level in levels(planned):
            run_all([(train_run, (run,)) for run in level])
        run_all([(measure_row, (place, row)) for place, rows in planned for row in rows])


def levels(planned: Planned) -> Iterator[list[Run]]:
    """Every run once, those that need nothing first, then those that need only these, and so on."""
    depths: dict[Path, tuple[int, Run]] = {}

    def depth(run: Run) -> int:
        if run.folder not in depths:
            depths[run.folder] = (1 + max((depth(n) for n in run.needs), default=-1), run)
        return depths[run.folder][0]

    for _, rows in planned:
        for row in rows:
            for run in row.runs:
                depth(run)
    for wanted in range(1 + max((found for found, _ in depths.values()), default=-1)):
        yield [run for found, run in depths.values() if found == wanted]


def train_run(run: Run) -> None:
    """One training, its needs being there."""
    torch.set_num_threads(1)
    if (run.folder / CHECKPOINT).is_file():
        ensure(run, {needed.folder for needed in run.needs})
        return
    started = time.monotonic()
    ensure(run, {needed.folder for needed in run.needs})
    _tell(f"trained {run.folder}", started)


def measure_row(place: Place, row: Row) -> None:
    """The cells of one row, unless they are kept from the same models."""
    torch.set_num_threads(1)
    path, key = cells_path(place, row), _key(row)
    if read_cells(path, key) is not None:
        return
    started = time.monotonic()
    test = evaluation(images_of(place, row), place.preset.metric, place.runs / "features")
    write_cells(path, measure(row, test), key)
    _tell(f"measured {row.name}, {place.split.name}, seed {place.seed}", started)


def images_of(place: Place, row: Row) -> Listing:
    """Queries and gallery of a row: the split's classes, or a folder of its own."""
    listing = list_images(place.images / row.tested)
    if row.tested != TEST:
        return listing
    split = place.split
    shown = (listing.labels >= split.tested_first) & (listing.labels < split.tested_end)
    return listing.select(shown.nonzero()[0])


def cells_path(place: Place, row: Row) -> Path:
    """Where a row's cells are kept."""
    return place.runs / "cells" / f"{row.name.replace(':', '-')}.npz"


def _key(row: Row) -> str:
    digests = [sha256_file(run.folder / CHECKPOINT)[:16] for run in row.runs]
    elsewhere = [] if row.tested == TEST else [f"tested={row.tested}"]
    return " ".join([*digests, f"int8={row.int8}", *elsewhere])


def _tell(what: str, started: float) -> None:
    print(f"{what}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)


@contextmanager
def _pool(jobs: int) -> Iterator[Callable[[Sequence[Task]], None]]:
    """A function that carries out tasks, in this process for one job; the first failure is
    raised.
    """
    if jobs == 1:
        yield _one_after_the_other
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:

        def run_all(tasks: Sequence[Task]) -> None:
            for future in [pool.submit(function, *arguments) for function, arguments in tasks]:
                future.result()

        yield run_all


def _one_after_the_other(tasks: Sequence[Task]) -> None:
    for function, arguments in tasks:
        function(*arguments)
