"""`python training/compare.py --data digits --seeds 3`: every method on the same splits and
metrics.
"""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from nobackfill.class_folders import list_images
from nobackfill.durable import write_file
from nobackfill.errors import ConfigurationError
from nobackfill.training.cli.command import command_app
from nobackfill.training.comparison.catalogue import rows_of
from nobackfill.training.comparison.cells import Cells, read_cells
from nobackfill.training.comparison.claims import CLAIMS, judge
from nobackfill.training.comparison.cost import costs
from nobackfill.training.comparison.curve import draw
from nobackfill.training.comparison.data import check_classes, write_digits
from nobackfill.training.comparison.development import development_of, place_images, seeds_of
from nobackfill.training.comparison.presets import (
    DIGITS,
    Preset,
    Split,
    Values,
    folder_preset,
    preset_named,
)
from nobackfill.training.comparison.ranges import by_range, known_to_old
from nobackfill.training.comparison.recipe import Place
from nobackfill.training.comparison.results import MAIN, Comparison, as_json, as_markdown, points
from nobackfill.training.comparison.rows import independent_of
from nobackfill.training.comparison.scheduler import Planned, cells_path, do, images_of

_EPILOG = """
Trains every model and measures every row of the table, --jobs of them at a time. What is done is
kept below OUT and not done again, so an interrupted comparison goes on where it stopped; remove a
folder to train it anew.

--development leaves the tables' test images and unseen classes alone: choose there, and fill a
table with what was chosen. Its seeds are not the table's.

Writes OUT/NAME.json, OUT/NAME.md and OUT/NAME.svg. Groups of --methods: core, core_unseen,
core_unseen_compatible, bct_family, dmu_family, variants, maps, transforms, chains, noise,
allocations, long_chain, foreign, disjoint, sizes, parts.

Exit codes: 0 done, 1 a training diverged, 65 refused data, 73 cannot write, 78 wrong configuration.
"""


def main(
    data: Annotated[
        str, typer.Option(help="digits, cifar100-cpu, cifar100, or a folder of class folders")
    ] = "digits",
    seeds: Annotated[int, typer.Option(min=1, help="number of seeds")] = 3,
    methods: Annotated[
        str | None, typer.Option(help="groups and methods, with commas; the preset's own if absent")
    ] = None,
    images: Annotated[
        Path | None, typer.Option(help="folder with train and test, for cifar100 and cifar100-cpu")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder of the results")] = Path("build/compare"),
    jobs: Annotated[int, typer.Option(min=1, help="processes")] = min(2, os.cpu_count() or 1),
    development: Annotated[
        bool, typer.Option("--development", help="the images and classes to choose by")
    ] = False,
) -> None:
    """Train and evaluate the methods on the same splits; print the table and the claims."""
    folder = Path(data)
    if data != DIGITS.name and folder.is_dir():
        preset, images = folder_preset(len(list_images(folder).class_names)), folder
    else:
        preset = preset_named(data)
    wanted = tuple(methods.split(",")) if methods else None
    if development:
        preset = development_of(preset)
    comparison = compare(preset, images, out, seeds_of(preset, seeds), wanted, jobs)
    text = as_markdown(comparison)
    told = json.dumps(as_json(comparison), indent=1)
    write_file(out / f"{preset.title}.json", told.encode(), 0o644)
    write_file(out / f"{preset.title}.md", text.encode(), 0o644)
    drawing = draw(points(comparison), f"Quality and cost on {preset.title}")
    write_file(out / f"{preset.title}.svg", drawing, 0o644)
    print(text)


def compare(
    preset: Preset,
    images: Path | None,
    out: Path,
    seeds: Sequence[int],
    wanted: Sequence[str] | None,
    jobs: int,
    changes: Mapping[str, Values] | None = None,
) -> Comparison:
    """Train and measure the wanted groups and methods, the preset's own where None.

    `changes` replace keys of the preset's configurations, by kind.
    """
    root = out / preset.title
    source = _source(preset, images, root)
    planned = []
    for seed in seeds:
        for split in preset.splits:
            place = _place(preset, split, seed, root, source, changes or {})
            own = preset.groups if split.name == MAIN else preset.unseen_groups
            planned.append((place, rows_of(place, wanted or own)))
    started = time.monotonic()
    do(planned, jobs)
    print(f"compare.py: {time.monotonic() - started:.0f} s", file=sys.stderr)
    return _collect(preset, tuple(seeds), planned)


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
    images = place_images(preset, source, root, seed)
    return Place(preset, split, seed, images, root / f"seed-{seed}" / split.name, changes)


def _collect(preset: Preset, seeds: tuple[int, ...], planned: Planned) -> Comparison:
    rows: dict[str, dict[str, list[Cells]]] = {split.name: {} for split in preset.splits}
    for place, of_place in planned:
        # Rows share their old models and tests: each folder is read once.
        known: dict[tuple[Path, str], NDArray[np.bool_]] = {}
        for row in of_place:
            cells = read_cells(cells_path(place, row))
            assert cells is not None
            ends = (row.old.folder, row.tested)
            if ends not in known:
                known[ends] = known_to_old(row, images_of(place, row))
            cells = by_range(cells, known[ends])
            rows[place.split.name].setdefault(row.name, []).append(cells)
    claims = {name: judge(CLAIMS, by_row) for name, by_row in rows.items()}
    # Of the first place: seeds and splits differ in weights, not in cost.
    first = planned[0][1]
    held_to = {row.name: independent_of(row, first) for row in first}
    return Comparison(preset.title, seeds, preset.metric, rows, claims, costs(first), held_to)


app = command_app("compare.py", main, _EPILOG)

if __name__ == "__main__":
    app()
