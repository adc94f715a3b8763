"""Pictures that two sets share, known by their content, whatever they are named."""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nobackfill.class_folders import Listing, digest, digests, list_images
from nobackfill.errors import ConfigurationError, InvalidInputError, few
from nobackfill.training.data.folders import hold_out
from nobackfill.training.loop.run import read_finished

# Of the images to measure on: so few are chance copies and left out, more are a wrong folder.
_CHANCE = 0.01


def unseen(listing: Listing, runs: Sequence[Path], *, force: bool) -> tuple[Listing, int]:
    """Of the images to measure on those that no run was trained on, and how many were and stay.

    A few are left out, and said; more than 1 % are refused, or with `force` kept and counted.
    Raises InvalidInputError, ConfigurationError.
    """
    rows, example = _trained_on(listing, runs)
    if not len(rows):
        return listing, 0
    found = f"{len(rows)} of the {len(listing)} images of {listing.root} were trained on"
    if len(rows) <= _CHANCE * len(listing):
        print(f"{found} (the same content: {few(example)}); they are left out", file=sys.stderr)
        return listing.select(np.setdiff1d(np.arange(len(listing)), rows)), 0
    if force:
        print(f"{found}: the gate measures what was learnt by heart", file=sys.stderr)
        return listing, len(rows)
    raise InvalidInputError(
        f"{found} (the same content: {few(example)}); measuring on them says nothing about others. "
        "Give --eval a folder of images that nothing was trained on, or publish with --force"
    )


def _trained_on(listing: Listing, runs: Sequence[Path]) -> tuple[NDArray[np.int64], list[str]]:
    """Rows of `listing` whose content a run was trained on, and their paths."""
    sizes = {(listing.root / path).stat().st_size for path in listing.paths}
    trained: dict[Path, str] = {}
    for run in runs:
        for path in _training_files(run):
            # Only what is as long as one of them can be one of them.
            if path not in trained and path.stat().st_size in sizes:
                trained[path] = digest(path)
    known = set(trained.values())
    shared = [row for row, own in enumerate(digests(listing)) if own in known]
    return np.array(shared, np.int64), [listing.paths[row] for row in shared]


def _training_files(run: Path) -> list[Path]:
    config = read_finished(run).config
    try:
        listing = list_images(config.images, config.classes, config.class_list)
    except (ConfigurationError, InvalidInputError) as error:
        print(f"{run}: its training images are not compared with --eval: {error}", file=sys.stderr)
        return []
    rows, _ = hold_out(listing, config.held_out, config.split_seed)
    return [listing.root / listing.paths[row] for row in rows]
