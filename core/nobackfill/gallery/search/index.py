"""What every index is: something immutable that finds the nearest labels.

Distances are smaller for nearer vectors, everywhere: squared L2, or 1 - cosine. Equal distances are
ordered by label. exact.py is the oracle of every other engine.
"""

import sys
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nobackfill.gallery.spec import SpaceSpec
from nobackfill.vectors import Vectors

Labels = NDArray[np.int64]
Rows = NDArray[np.intp]
Mask = NDArray[np.bool_]
# An `ef` that asks for an exact search.
EVERY = sys.maxsize


class Content(Protocol):
    """Vectors float32 [n, dim] by row: an array, or what reads them when they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> Vectors:
        """Those of a slice or of an array of rows."""
        ...

    def __array__(self, dtype: Any = None, /) -> NDArray[Any]:
        """All of them."""
        ...


class Picked:
    """Rows of another content, in another order, read when they are asked for."""

    def __init__(self, content: Content, rows: Rows) -> None:
        self._content = content
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: Any, /) -> Vectors:
        return self._content[self._rows[rows]]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)


class Joined:
    """One content after another."""

    def __init__(self, first: Content, second: Content) -> None:
        self._first = first
        self._second = second

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    def __getitem__(self, rows: Any, /) -> Vectors:
        asked, border = np.arange(len(self))[rows], len(self._first)
        later = asked >= border
        if later.all():
            return self._second[asked - border]
        first = self._first[asked[~later]]
        if not later.any():
            return first
        found = np.empty((len(asked), first.shape[1]), np.float32)
        found[~later] = first
        found[later] = self._second[asked[later] - border]
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)


@dataclass(frozen=True)
class Neighbours:
    """Nearest labels of each query, nearest first.

    `labels` int64 [q, k] padded with -1, `distances` float32 [q, k] padded with infinity.
    """

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
    def vectors(self) -> Content:
        """The rows themselves, float32 [n, dim], as distances.prepare leaves them."""
        ...

    def search(
        self,
        queries: Vectors,
        k: int,
        allowed: Mask | None = None,
        passing: int | None = None,
        ef: int = 0,
    ) -> Neighbours:
        """The `k` nearest rows to each of `queries` (checked float32 [q, dim]), k >= 1.

        `allowed` bool [n], one for each of `labels`: rows that may be found; None means all.
        `passing`: how many that are, where it is known: counting them takes longer than a search.
        `ef`: candidates that are looked at, at least; EVERY, or as many as there are: an exact
        search. An index that is exact anyway takes no notice.
        """
        ...


def rows_of(labels: Labels, wanted: Labels) -> Rows:
    """Rows in `labels` (increasing) of those of `wanted` that are there, in their order."""
    if not len(labels):
        return np.empty(0, np.intp)
    rows = np.minimum(np.searchsorted(labels, wanted), len(labels) - 1)
    found: Rows = rows[labels[rows] == wanted]
    return found


def mask_of(labels: Labels, allowed: Labels) -> Mask:
    """Which of `labels` (increasing) are in `allowed`: bool [n], as Index.search takes it."""
    mask = np.zeros(len(labels), np.bool_)
    mask[rows_of(labels, allowed)] = True
    return mask


def best(labels: Labels, distances: Vectors, k: int) -> Neighbours:
    """The `k` nearest of candidates [q, c] (label -1 at distance infinity: none), padded to k."""
    short = k - labels.shape[1]
    if short > 0:
        labels = np.pad(labels, ((0, 0), (0, short)), constant_values=-1)
        distances = np.pad(distances, ((0, 0), (0, short)), constant_values=np.inf)
    order = np.lexsort((labels, distances), axis=1)[:, :k]
    query = np.arange(len(order))[:, None]
    return Neighbours(labels[query, order], distances[query, order])


def merge(parts: list[Neighbours], k: int) -> Neighbours:
    """One ranking of the answers of indexes that share no label."""
    if len(parts) == 1:
        return parts[0]
    return best(
        np.concatenate([part.labels for part in parts], axis=1),
        np.concatenate([part.distances for part in parts], axis=1),
        k,
    )
