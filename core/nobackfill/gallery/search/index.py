"""What every index is: something immutable that finds the nearest labels.

Distances are smaller for nearer vectors, everywhere: squared L2, or 1 - cosine. Equal distances are
ordered by label. exact.py is the oracle of every other engine.
"""

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nobackfill.gallery.spec import Metric, SpaceSpec
from nobackfill.release.calibration import Scale
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


# How engines hold vectors, and the distances that exact answers carry.
#
# Distances are computed in float64 and rounded once: the same numbers on every machine, and equal
# distances for equal vectors.

# Larger than what rounding leaves of a norm after one scaling.
UNIT_TOLERANCE = 2.5e-7


def prepare(metric: Metric, vectors: Vectors) -> Vectors:
    """Vectors [n, dim] as engines hold them: with the cosine metric at norm 1 (zero stays zero)."""
    if metric == "squared_l2":
        return vectors
    norms = np.sqrt(np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64))
    if (np.abs(norms - 1) <= UNIT_TOLERANCE).all():
        return vectors
    # What was prepared once stays as it is, bit for bit.
    norms[np.abs(norms - 1) <= UNIT_TOLERANCE] = 1
    scaled: Vectors = vectors / np.maximum(norms, 1e-30)[:, None].astype(np.float32)
    return scaled


def between(metric: Metric, queries: Vectors, candidates: Vectors) -> Vectors:
    """Distances float32 [q, c] from queries [q, dim] to candidates [q, c, dim], both prepared."""
    if metric == "squared_l2":
        apart = np.subtract(candidates, queries[:, None, :], dtype=np.float64)
        found = np.vecdot(apart, apart)
    else:
        wide = candidates.astype(np.float64)
        # Norms of 1 are rounded, too: a vector is at distance 0 from itself, not below it.
        found = np.maximum(1 - np.vecdot(wide, queries.astype(np.float64)[:, None, :]), 0)
    rounded: Vectors = found.astype(np.float32)
    return rounded


def to_one(metric: Metric, query: Vectors, vectors: Vectors) -> Vectors:
    """Distances float32 [n] from one query [1, dim] to vectors [n, dim], as they were stored."""
    found: Vectors = between(metric, prepare(metric, query), prepare(metric, vectors)[None])[0]
    return found


# One ranking of the carried and the native vectors of a space, whose distances do not compare.
#
# A new query is nearer to what an upgrade has carried than to what its own model made, on average:
# sorted as they are, distances let a gallery answer worse half-way than at either end. So each
# origin gives its nearest, and a release's scale says where carried ones stand (docs/adr/0024).

# Which of labels (increasing) may be found: bool, one for each.
Allowed = Callable[[Labels], Mask]
# The same of labels that were carried, and of those that were not.
Origins = Callable[[Labels], tuple[Mask, Mask]]


def search_origins(
    nearest: Callable[[Allowed], Neighbours],
    origins: Origins,
    scale: Scale,
    k: int,
    allowed: Allowed | None = None,
) -> Neighbours:
    """The `k` best of those that are `allowed`; `nearest` gives the `k` nearest of some."""
    # Asked once: what is embedded again meanwhile is found once, too.
    known: dict[int, tuple[Mask, Mask]] = {}

    def of(origin: int) -> Neighbours:
        def chosen(labels: Labels) -> Mask:
            mask = known.setdefault(id(labels), origins(labels))[origin]
            return mask if allowed is None else mask & allowed(labels)

        return nearest(chosen)

    return join_origins(of(0), of(1), scale, k)


def join_origins(carried: Neighbours, native: Neighbours, scale: Scale, k: int) -> Neighbours:
    """The `k` best of both, distances as they are."""
    both = Neighbours(
        np.concatenate([carried.labels, native.labels], axis=1),
        np.concatenate([carried.distances, native.distances], axis=1),
    )
    found = rank_origins(both, np.arange(both.labels.shape[1]) < carried.labels.shape[1], scale)
    return Neighbours(found.labels[:, :k], found.distances[:, :k])


def rank_origins(found: Neighbours, carried: Mask, scale: Scale) -> Neighbours:
    """The same in the order of the distances at which native vectors would be as likely; equal ones
    by their own distances, then by label. `carried`: of which labels [q, c] or columns [c]."""
    apart = np.where(carried, scale(found.distances), found.distances)
    order = np.lexsort((found.labels, found.distances, apart), axis=1)
    query = np.arange(len(order))[:, None]
    return Neighbours(found.labels[query, order], found.distances[query, order])


_NICE = 10


def give_way() -> None:
    """Let searches go before this thread, and before the processes that it starts from now on."""
    # Who is nicer already may not take it back.
    nice = max(_NICE, os.getpriority(os.PRIO_PROCESS, 0))
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
