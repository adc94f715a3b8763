"""What every index is: something immutable that finds the nearest labels.

Distances are smaller for nearer vectors, everywhere: squared L2, or 1 - cosine. Equal distances are
ordered by label. exact.py is the oracle of every other engine.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gallery.spec import SpaceSpec
from release.vectors import Vectors

Labels = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Neighbours:
    """Nearest labels of each query, nearest first: `labels` int64 [q, k] padded with -1, `distances`
    float32 [q, k] padded with infinity."""

    labels: Labels
    distances: Vectors


class Index(Protocol):
    """Vectors of one space, never changed after it was made, safe to search from many threads."""

    @property
    def spec(self) -> SpaceSpec:
        """The space whose vectors it holds."""
        ...

    @property
    def labels(self) -> Labels:
        """Labels of its rows, int64 [n], strictly increasing."""
        ...

    @property
    def vectors(self) -> Vectors:
        """The rows themselves, float32 [n, dim]; with the cosine metric, scaled to norm 1."""
        ...

    def search(self, queries: Vectors, k: int, allowed: Mask | None = None) -> Neighbours:
        """The `k` nearest rows to each of `queries` (checked float32 [q, dim]), k >= 1.

        `allowed` bool [n], one for each of `labels`: rows that may be found; None means all.
        Raises InvalidInputError for queries of another dimension.
        """
        ...


def mask_of(labels: Labels, allowed: Labels) -> Mask:
    """Rows of `labels` (increasing) that are in `allowed` (increasing): bool [n]."""
    raise NotImplementedError
