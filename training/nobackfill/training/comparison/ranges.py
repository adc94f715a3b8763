"""Figures by class range (FCT appendix C): classes that the old model trained on, and new ones."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nobackfill.class_folders import Listing, list_images
from nobackfill.training.comparison.cells import Cells
from nobackfill.training.comparison.rows import Row

KNOWN, NEW = "known classes", "new classes"
RANGED = ("new/new", "new/served")


def known_to_old(row: Row, tested: Listing) -> NDArray[np.bool_]:
    """Of each tested image [n], whether the row's old model trained on its class."""
    images, classes = row.old.values["images"], row.old.values["classes"]
    assert isinstance(images, Path) and (classes is None or isinstance(classes, int))
    names = set(list_images(images, classes).class_names)
    return np.array([name in names for name in tested.class_names])[tested.labels]


def by_range(cells: Cells, known: NDArray[np.bool_]) -> Cells:
    """The cells and, where both ranges are tested, `new/new, known classes` and so on.

    A range's figures are NaN for queries of the other range, which leaves them out of means and
    keeps them paired.
    """
    if known.all() or not known.any():
        return cells
    ranged = {
        f"{cell}, {name}": {
            figure: np.where(inside, values, np.nan)
            for figure, values in cells.by_query[cell].items()
        }
        for cell in RANGED
        for name, inside in ((KNOWN, known), (NEW, ~known))
    }
    return replace(cells, by_query={**cells.by_query, **ranged})
