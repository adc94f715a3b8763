"""What a comparison has to do: each training, shared features and each row's measurement, as tasks
that name what they need."""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from nobackfill.class_folders import Listing, list_images
from nobackfill.digests import sha256_file
from nobackfill.metrics.distances import Metric
from nobackfill.training.comparison.cells import (
    Evaluation,
    evaluation,
    read_cells,
    row_cells,
    write_cells,
)
from nobackfill.training.comparison.development import known_names
from nobackfill.training.comparison.presets import Split
from nobackfill.training.comparison.recipe import Place, Run, ensure
from nobackfill.training.comparison.rows import TEST, Row
from nobackfill.training.config import UpgradeConfig, parse_config
from nobackfill.training.loop.loop import keep_freed_memory
from nobackfill.training.loop.run import CHECKPOINT
from nobackfill.training.loop.training import split_images
from nobackfill.training.loop.upgrade import keep_features

Planned = Sequence[tuple[Place, Sequence[Row]]]


@dataclass(frozen=True)
class Views:
    """Features of frozen models over the pictures that upgrades are trained on: `shown` says which,
    `runs` below which folder they are kept."""

    runs: Path
    shown: str


@dataclass(frozen=True)
class Task:
    """`work(*arguments)`, once what `needs` names is there; a training makes its folder, features
    have names of their own."""

    work: Callable[..., None]
    arguments: tuple[object, ...]
    needs: frozenset[Path | Views]
    made: frozenset[Path | Views] = frozenset()


def tasks(planned: Planned) -> list[Task]:
    """Every training once, after those that it reads, and then every row's measurement.

    Features are tasks of their own, between models and upgrades, one for all upgrades that read
    the same pictures: each would compute what they share, and make the pictures.
    """
    depths: dict[Path, tuple[int, Run]] = {}

    def depth(run: Run) -> int:
        if run.folder not in depths:
            depths[run.folder] = (1 + max((depth(n) for n in run.needs), default=-1), run)
        return depths[run.folder][0]

    for _, rows in planned:
        for row in rows:
            for run in row.runs:
                depth(run)
    # Many trainings wait for those of little depth.
    runs = [run for _, run in sorted(depths.values(), key=lambda found: found[0])]
    read = {run.folder: _views(run) for run in runs if run.values["kind"] == "upgrade"}
    networks = [run for run in runs if run.folder not in read]
    upgrades = [run for run in runs if run.folder in read]
    asked: dict[Views, list[Run]] = {}
    for run in upgrades:
        if not (run.folder / CHECKPOINT).is_file():
            asked.setdefault(read[run.folder], []).append(run)
    rows_of_all = [(place, row) for place, rows in planned for row in rows]
    return [
        *(Task(train_run, (run,), _folders(run.needs), _folders([run])) for run in networks),
        *(
            Task(
                make_features,
                (asking,),
                _folders(needed for run in asking for needed in run.needs),
                frozenset([views]),
            )
            for views, asking in asked.items()
        ),
        *(
            Task(
                train_run,
                (run,),
                _folders(run.needs) | ({read[run.folder]} & asked.keys()),
                _folders([run]),
            )
            for run in upgrades
        ),
        *(Task(measure_row, (place, row), _folders(row.runs)) for place, row in rows_of_all),
    ]


def _folders(runs: Iterable[Run]) -> frozenset[Path | Views]:
    return frozenset(run.folder for run in runs)


def _views(run: Run) -> Views:
    """What an upgrade's frozen models look at."""
    config = _upgrade_config(run)
    # Views are made at the largest size that a model reads.
    size = max(int(str(needed.values.get("image_size", 0))) for needed in run.needs)
    shown = " ".join([f"image_size={size}", *(f"{key}={getattr(config, key)}" for key in _VIEWS)])
    return Views(run.folder.parent, shown)


# The keys of an upgrade that decide which pictures its models read.
_VIEWS = (
    "images", "classes", "class_list", "skip_corrupt", "held_out", "split_seed", "views",
    "mixed_views", "augmentation",
)  # fmt: skip


def _upgrade_config(run: Run) -> UpgradeConfig:
    config = parse_config(dict(run.values), str(run.folder))
    assert isinstance(config, UpgradeConfig), "its kind says so"
    return config


def _one_thread() -> None:
    """Of torch and of numpy, in a process a core, of a pool or a cluster's node: with more, those
    of numpy wait by spinning."""
    torch.set_num_threads(1)
    threadpool_limits(1)


def make_features(runs: Sequence[Run]) -> None:
    """What upgrades read of frozen models, all of the same pictures, into the cache."""
    _one_thread()
    keep_freed_memory()
    began = _clocks()
    configs = [_upgrade_config(run) for run in runs]
    keep_features(configs, *split_images(configs[0]))
    _tell(f"made features for {', '.join(str(run.folder) for run in runs)}", began)


def train_run(run: Run) -> None:
    """One training, its needs being there."""
    _one_thread()
    if (run.folder / CHECKPOINT).is_file():
        ensure(run, {needed.folder for needed in run.needs})
        return
    began = _clocks()
    ensure(run, {needed.folder for needed in run.needs})
    _tell(f"trained {run.folder}", began)


def measure_row(place: Place, row: Row) -> None:
    """The cells of one row, unless they are kept from the same models."""
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
    """What a row is measured on: many rows on the same, one after the other."""
    return evaluation(_shown(images, tested, split), metric, cache)


def images_of(place: Place, row: Row) -> Listing:
    """Queries and gallery of a row: the split's classes, or a folder of its own."""
    return _shown(place.images, row.tested, place.split)


def _shown(images: Path, tested: str, split: Split) -> Listing:
    listing = list_images(images / tested)
    if tested != TEST:
        return listing
    shown = (listing.labels >= split.tested_first) & (listing.labels < split.tested_end)
    return listing.select(shown.nonzero()[0])


def cells_path(place: Place, row: Row) -> Path:
    """Where a row's cells are kept."""
    return place.runs / "cells" / f"{row.name.replace(':', '-')}.npz"


def _key(row: Row) -> str:
    digests = [sha256_file(run.folder / CHECKPOINT)[:16] for run in row.runs]
    elsewhere = [] if row.tested == TEST else [f"tested={row.tested}"]
    return " ".join([*digests, f"int8={row.int8}", *elsewhere])


def _clocks() -> tuple[float, float]:
    """Seconds by the clock and of this process' processor: beside other work they part."""
    return time.monotonic(), time.process_time()


def _tell(what: str, began: tuple[float, float]) -> None:
    clock, processor = (now - then for now, then in zip(_clocks(), began, strict=True))
    told = f"{what}: {clock:.1f} s, {processor:.1f} s of a processor"
    print(told, file=sys.stderr, flush=True)
