"""The development split: what hyper-parameters, weights and defaults are chosen on, and nothing of
what the tables report.

A table tests images that no partition of its seeds trains on, and classes that no model knows. The
development split is made of the tables' training images of the classes that the tables' models
know: divided anew, classes in another order, by each seed. Its seeds are not the tables' either.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nobackfill.class_folders import list_images
from nobackfill.training.comparison.data import link, train_and_test
from nobackfill.training.comparison.presets import Preset, Split
from nobackfill.training.data.folders import hold_out

# Seeds from here on fill tables, those below it choose: results of seeds 0 to 9 were looked at
# while methods were made.
TABLE_SEEDS = 1000
# Chooses the tables' test images where the data has no test folder: one partition for all seeds.
TABLE_PARTITION = 1000
# Share of the tables' training images that the development split tests.
TEST_SHARE = 0.3


def seeds_of(preset: Preset, count: int) -> range:
    """`count` seeds of a table, or of its development split."""
    return range(count) if preset.development else range(TABLE_SEEDS, TABLE_SEEDS + count)


def development_of(preset: Preset) -> Preset:
    """The comparison on which choices for `preset` are made; rows and hyper-parameters as there."""
    # The others are the tables' unseen ones.
    known = min(split.new for split in preset.splits)
    unseen = max(2, known // 5)
    new = known - unseen
    half = known // 2
    splits = (
        Split("main", half, known, 0, known, max(2, known // 4), half),
        Split("unseen", (new + 1) // 2, new, new, known),
    )
    return replace(preset, splits=splits, development=True)


def development_images(train: Path, into: Path, classes: int, seed: int) -> None:
    """Make INTO/train and INTO/test from TRAIN, a table's training images, its first `classes`.

    Classes are named by their place in an order drawn by `seed`, so that each seed has other old,
    new and unseen classes.
    """
    listing = list_images(train, classes)
    order = np.random.default_rng(seed).permutation(classes)
    names = [f"{order[label]:04d}-{name}" for label, name in enumerate(listing.class_names)]
    for part, rows in zip(("train", "test"), hold_out(listing, TEST_SHARE, seed), strict=True):
        chosen = listing.select(rows)
        link(chosen, [names[label] for label in chosen.labels], into / part)


def known_names(classes: NDArray[np.str_]) -> NDArray[np.str_]:
    """The names that the classes of `development_images` have in all seeds: without their place."""
    return np.array([name.partition("-")[2] for name in classes.tolist()])


def place_images(preset: Preset, source: Path, root: Path, seed: int) -> Path:
    """The folder below ROOT with the images of a seed, `train` and `test`, made where it is not.

    Errors are those of `train_and_test`.
    """
    table = root / f"data-{TABLE_PARTITION}"
    train_and_test(source, table, preset.test_share, TABLE_PARTITION)
    if not preset.development:
        return table
    own = root / f"data-{seed}"
    development_images(table / "train", own, max(split.new for split in preset.splits), seed)
    return own
