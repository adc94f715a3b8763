"""`python training/compare.py --data digits --seeds 3`: every method on the same splits and
metrics.
"""

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated

import torch
import typer

from release.digests import sha256_file
from release.durable import write_file
from release.errors import ConfigurationError
from training.command import command_app
from training.comparison.catalogue import rows_of
from training.comparison.cells import Cells, evaluation, measure, read_cells, write_cells
from training.comparison.claims import CLAIMS, judge
from training.comparison.data import check_classes, train_and_test, write_digits
from training.comparison.presets import DIGITS, Preset, Split, Values, folder_preset, preset_named
from training.comparison.recipe import Place, ensure
from training.comparison.results import MAIN, Comparison, as_json, as_markdown
from training.comparison.rows import Row
from training.comparison.settings import prepare
from training.data import list_images
from training.run import CHECKPOINT

_EPILOG = """
Trains and measures the rows of the table one after the other, each seed and split in a process of
its own (--jobs). What is done is kept below OUT and not done again, so an interrupted comparison
goes on where it stopped; remove a folder to train it anew.

Writes OUT/NAME.json and OUT/NAME.md. Groups of --methods: core, bct_family, dmu_family, variants,
transforms, chains, noise, allocations.

Exit codes: 0 done, 1 a training diverged, 65 refused data, 73 cannot write, 78 wrong configuration.
"""


def main(
    data: Annotated[
        str, typer.Option(help="digits, cifar100-cpu, cifar100, or a folder of class folders")
    ] = "digits",
    seeds: Annotated[int, typer.Option(min=1, help="number of seeds, from 0")] = 3,
    methods: Annotated[
        str | None, typer.Option(help="groups and methods, with commas; the preset's own if absent")
    ] = None,
    images: Annotated[
        Path | None, typer.Option(help="folder with train and test, for cifar100 and cifar100-cpu")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder of the results")] = Path("build/compare"),
    jobs: Annotated[int, typer.Option(min=1, help="processes")] = min(2, os.cpu_count() or 1),
) -> None:
    """Train and evaluate the methods on the same splits; print the table and the claims."""
    folder = Path(data)
    if data != DIGITS.name and folder.is_dir():
        preset, images = folder_preset(len(list_images(folder).class_names)), folder
    else:
        preset = preset_named(data)
    wanted = tuple(methods.split(",")) if methods else preset.groups
    comparison = compare(preset, images, out, range(seeds), wanted, jobs)
    text = as_markdown(comparison)
    told = json.dumps(as_json(comparison), indent=1)
    write_file(out / f"{preset.name}.json", told.encode(), 0o644)
    write_file(out / f"{preset.name}.md", text.encode(), 0o644)
    print(text)


def compare(
    preset: Preset,
    images: Path | None,
    out: Path,
    seeds: Sequence[int],
    wanted: Sequence[str],
    jobs: int,
    changes: Mapping[str, Values] | None = None,
) -> Comparison:
    """Train and measure; `changes` replace keys of the preset's configurations, by kind."""
    root = out / preset.name
    root.mkdir(parents=True, exist_ok=True)
    source = _source(preset, images, root)
    places = [
        _place(preset, split, seed, root, source, changes or {})
        for seed in seeds
        for split in preset.splits
    ]
    for place in places:
        rows_of(place, wanted)
    started = time.monotonic()
    if jobs == 1:
        for place in places:
            run_place(place, tuple(wanted))
    else:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            tasks = [pool.submit(run_place, place, tuple(wanted)) for place in places]
            for task in tasks:
                task.result()
    print(f"compare.py: {time.monotonic() - started:.0f} s", file=sys.stderr)
    return _collect(preset, tuple(seeds), places, wanted)


def run_place(place: Place, wanted: tuple[str, ...]) -> None:
    """Train and measure every wanted row of one seed and split."""
    torch.set_num_threads(1)
    rows = rows_of(place, wanted)
    prepare(place, rows)
    listing = list_images(place.images / "test")
    split = place.split
    picked = (listing.labels >= split.tested_first) & (listing.labels < split.tested_end)
    test = evaluation(
        listing.select(picked.nonzero()[0]), place.preset.metric, place.runs / "features"
    )
    done: set[Path] = set()
    for row in rows:
        started = time.monotonic()
        for run in row.runs:
            ensure(run, done)
        path, key = cells_path(place, row), _key(row)
        if read_cells(path, key) is None:
            write_cells(path, measure(row, test), key)
            seconds = time.monotonic() - started
            print(f"seed {place.seed} {split.name}: {row.name} {seconds:.1f} s", file=sys.stderr)


def cells_path(place: Place, row: Row) -> Path:
    """Where a row's cells are kept."""
    return place.runs / "cells" / f"{row.name.replace(':', '-')}.npz"


def _key(row: Row) -> str:
    digests = [sha256_file(run.folder / CHECKPOINT)[:16] for run in row.runs]
    return " ".join([*digests, f"int8={row.int8}"])


def _source(preset: Preset, images: Path | None, root: Path) -> Path:
    if preset.name == DIGITS.name:
        write_digits(root / "digits")
        return root / "digits"
    if images is None:
        raise ConfigurationError(
            f"--data {preset.name} needs --images, a folder with train and test in it"
        )
    needed = max(split.new for split in preset.splits)
    check_classes(images if preset.test_share is not None else images / "train", needed)
    return images


def _place(
    preset: Preset,
    split: Split,
    seed: int,
    root: Path,
    source: Path,
    changes: Mapping[str, Values],
) -> Place:
    partition = seed if preset.partition_by_seed else 0
    images = root / f"data-{partition}"
    train_and_test(source, images, preset.test_share, partition)
    return Place(preset, split, seed, images, root / f"seed-{seed}" / split.name, changes)


def _collect(
    preset: Preset, seeds: tuple[int, ...], places: Sequence[Place], wanted: Sequence[str]
) -> Comparison:
    rows: dict[str, dict[str, list[Cells]]] = {split.name: {} for split in preset.splits}
    for place in places:
        for row in rows_of(place, wanted):
            cells = read_cells(cells_path(place, row))
            assert cells is not None
            rows[place.split.name].setdefault(row.name, []).append(cells)
    claims = {
        name: {text: difference for text, (_, difference) in judge(CLAIMS, by_row).items()}
        for name, by_row in rows.items()
    }
    assert MAIN in rows
    return Comparison(preset.name, seeds, preset.metric, rows, claims)


app = command_app("compare.py", main, _EPILOG)

if __name__ == "__main__":
    app()
