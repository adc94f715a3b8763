"""Define an index: an immutable search structure over the vectors of one space.

A smaller distance is always nearer: squared L2, or 1 - cosine. Equal distances are ordered by
label. exact.py is the oracle of every other engine.
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nobackfill.gallery.spec import Metric, SpaceSpec
from nobackfill.release.calibration import DistanceScale
from nobackfill.vectors import Vectors

Labels = NDArray[np.int64]
Rows = NDArray[np.intp]
Mask = NDArray[np.bool_]
# The `ef` of an exact search.
EXACT_EF = sys.maxsize


class Content(Protocol):
    """Vectors float32 [n, dim] by row: an array, or an object that reads them on access."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> Vectors:
        """Return the rows of a slice or of an array of row numbers, float32 [m, dim]."""

    def __array__(self, dtype: Any = None, /) -> NDArray[Any]:
        """Return all rows, float32 [n, dim] unless another dtype is asked for."""


class SelectedRows:
    """Some rows of another content, in another order, read on access."""

    def __init__(self, content: Content, rows: Rows) -> None:
        self._content = content
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: Any, /) -> Vectors:
        return self._content[self._rows[rows]]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)


class ConcatenatedContent:
    """Two contents, one after the other."""

    def __init__(self, first: Content, second: Content) -> None:
        self._first = first
        self._second = second

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    def __getitem__(self, rows: Any, /) -> Vectors:
        numbers, border = np.arange(len(self))[rows], len(self._first)
        later = numbers >= border
        if later.all():
            return self._second[numbers - border]
        first = self._first[numbers[~later]]
        if not later.any():
            return first
        joined = np.empty((len(numbers), first.shape[1]), np.float32)
        joined[~later] = first
        joined[later] = self._second[numbers[later] - border]
        return joined

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)


@dataclass(frozen=True)
class Neighbours:
    """The nearest labels of each query, nearest first.

    Attributes:
        labels: int64 [q, k], padded with -1.
        distances: float32 [q, k], padded with infinity.
    """

    labels: Labels
    distances: Vectors


class Index(Protocol):
    """Vectors of one space; immutable, so that many threads can search it."""

    @property
    def spec(self) -> SpaceSpec:
        """Return the space of the vectors."""

    @property
    def labels(self) -> Labels:
        """Return the labels of the rows, int64 [n], strictly increasing."""

    @property
    def vectors(self) -> Content:
        """Return the rows, float32 [n, dim], as `prepare_vectors` leaves them."""

    def search(
        self,
        queries: Vectors,
        k: int,
        mask: Mask | None = None,
        passing_count: int | None = None,
        ef: int = 0,
    ) -> Neighbours:
        """Return the k nearest rows to each query.

        Args:
            queries: float32 [q, dim], checked; q may be 0.
            k: At least 1; it may be above n.
            mask: bool [n], the rows that may be found; None for all. It is not changed.
            passing_count: Number of these rows; None to count them, which takes longer than a
                search.
            ef: Minimum number of candidates; EXACT_EF or at least n for an exact search. An exact
                index ignores it.

        Returns:
            Neighbours [q, k], nearest first, equal distances by label; padded with label -1 and
            infinity if there are fewer rows.
        """


def find_label_rows(labels: Labels, targets: Labels) -> Rows:
    """Return the rows of the labels that exist, in the order of `targets`; other targets are
    skipped.

    Args:
        labels: int64 [n], increasing.
        targets: int64 [m], in any order; a repeated one gives its row each time.

    Returns:
        int [at most m], indices into `labels`.
    """
    if not len(labels):
        return np.empty(0, np.intp)
    rows = np.minimum(np.searchsorted(labels, targets), len(labels) - 1)
    matches: Rows = rows[labels[rows] == targets]
    return matches


def membership_mask(labels: Labels, subset: Labels) -> Mask:
    """Return which of `labels` (int64 [n], increasing) are in `subset` (int64 [m], in any order),
    as bool [n].

    Labels of `subset` that `labels` lacks are ignored.
    """
    mask = np.zeros(len(labels), np.bool_)
    mask[find_label_rows(labels, subset)] = True
    return mask


def nearest_candidates(labels: Labels, distances: Vectors, k: int) -> Neighbours:
    """Return the k nearest of candidates [q, c], padded to k.

    Args:
        labels: int64 [q, c], -1 for none.
        distances: float32 [q, c], infinity for none.
        k: At least 1.

    Returns:
        Neighbours [q, k], nearest first, equal distances by label. A label that occurs twice is not
        merged. A candidate with NaN comes last, after the padding; with c at most k it is always in
        the result.
    """
    short = k - labels.shape[1]
    if short > 0:
        labels = np.pad(labels, ((0, 0), (0, short)), constant_values=-1)
        distances = np.pad(distances, ((0, 0), (0, short)), constant_values=np.inf)
    order = np.lexsort((labels, distances), axis=1)[:, :k]
    query = np.arange(len(order))[:, None]
    return Neighbours(labels[query, order], distances[query, order])


def concatenate_neighbours(parts: Sequence[Neighbours], axis: int = 0) -> Neighbours:
    """Concatenate answers: of further queries along axis 0, of further candidates along axis 1.

    Raises:
        ValueError: There is no part, or the parts differ in the other axis.
    """
    return Neighbours(
        np.concatenate([part.labels for part in parts], axis),
        np.concatenate([part.distances for part in parts], axis),
    )


def merge_neighbours(parts: list[Neighbours], k: int) -> Neighbours:
    """Merge the answers [q, any] of indexes that share no label into one ranking [q, k].

    Args:
        parts: At least one.
        k: At least 1.

    Returns:
        Neighbours [q, k], nearest first, equal distances by label, padded to k.

    Raises:
        ValueError: There is no part, or the parts have different numbers of queries.
    """
    both = concatenate_neighbours(parts, axis=1)
    return nearest_candidates(both.labels, both.distances, k)


# How engines store vectors, and how exact distances are computed: in float64, rounded once. They
# are the same on every machine, and equal for equal vectors.

# More than the rounding error of a norm after one scaling.
UNIT_TOLERANCE = 2.5e-7


def prepare_vectors(metric: Metric, vectors: Vectors) -> Vectors:
    """Return vectors as engines store them: with the cosine metric scaled to norm 1.

    Zero stays zero. Vectors that were prepared before stay the same, bit for bit. If none changes,
    the same array is returned, not a copy.

    Args:
        metric: squared_l2, which returns the vectors as they are, or cosine, for which any other
            text counts.
        vectors: float32 [n, dim]; not changed, and not checked. Vectors of a norm below 1e-30 do
            not reach norm 1.
    """
    if metric == "squared_l2":
        return vectors
    norms = np.sqrt(np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64))
    if (np.abs(norms - 1) <= UNIT_TOLERANCE).all():
        return vectors
    norms[np.abs(norms - 1) <= UNIT_TOLERANCE] = 1
    scaled: Vectors = vectors / np.maximum(norms, 1e-30)[:, None].astype(np.float32)
    return scaled


def pair_distances(metric: Metric, queries: Vectors, candidates: Vectors) -> Vectors:
    """Compute distances from queries to their candidates, both prepared.

    Args:
        metric: squared_l2 or cosine.
        queries: [q, dim]; q may be 0.
        candidates: [q, c, dim]; c may be 0.

    Returns:
        float32 [q, c], 0 or more; the cosine distance to a zero vector is 1.

    Raises:
        ValueError: The dimensions differ.
    """
    if metric == "squared_l2":
        differences = np.subtract(candidates, queries[:, None, :], dtype=np.float64)
        distances = np.vecdot(differences, differences)
    else:
        wide = candidates.astype(np.float64)
        # Norms of 1 are rounded, too: a vector must be at distance 0 from itself, not below.
        distances = np.maximum(1 - np.vecdot(wide, queries.astype(np.float64)[:, None, :]), 0)
    rounded: Vectors = distances.astype(np.float32)
    return rounded


def distances_to_query(metric: Metric, query: Vectors, vectors: Vectors) -> Vectors:
    """Compute distances float32 [n] from one query float32 [1, dim] to vectors float32 [n, dim],
    neither of them prepared.

    Args:
        metric: squared_l2 or cosine.
        query: float32 [1, dim].
        vectors: float32 [n, dim]; n may be 0. The cosine distance from or to a zero vector is 1.

    Raises:
        ValueError: The dimensions differ.
    """
    distances: Vectors = pair_distances(
        metric, prepare_vectors(metric, query), prepare_vectors(metric, vectors)[None]
    )[0]
    return distances


# One ranking of migrated and native vectors of a space, whose distances cannot be compared. On
# average, a new query is nearer to migrated vectors than to those of its own model. Sorted by
# distance, a half-migrated gallery would answer worse than at either end. So each origin returns
# its nearest, and a release's scale places the migrated ones (docs/adr/0024).

# Returns which of labels (increasing) may be found: bool of the same length.
LabelFilter = Callable[[Labels], Mask]
# Returns which of labels (increasing) are migrated, and which are not.
OriginMasks = Callable[[Labels], tuple[Mask, Mask]]


def search_by_origin(
    nearest: Callable[[LabelFilter], Neighbours],
    origins: OriginMasks,
    scale: DistanceScale,
    k: int,
    label_filter: LabelFilter | None = None,
) -> Neighbours:
    """Search migrated and native vectors separately, and rank both on one scale.

    Args:
        nearest: Returns the k nearest of the labels that pass a filter, as Neighbours [q, k];
            called twice, once for each origin. Each array that it passes to the filter must live
            until the end.
        origins: Returns which labels are migrated, and which are not; its first answer for an array
            of labels counts.
        scale: Converts distances of migrated vectors.
        k: Number of hits, at least 1.
        label_filter: Returns which labels may be found; None for all.

    Returns:
        Neighbours [q, k] by the distance of an equally likely native vector; the distances are the
        items' own.

    Raises:
        Exception: An error of a callback.
    """
    # Read once: an item that is re-embedded meanwhile must be found only once.
    cached: dict[int, tuple[Mask, Mask]] = {}

    def of(origin: int) -> Neighbours:
        def select(labels: Labels) -> Mask:
            mask = cached.setdefault(id(labels), origins(labels))[origin]
            return mask if label_filter is None else mask & label_filter(labels)

        return nearest(select)

    return merge_on_native_scale(of(0), of(1), scale, k)


def merge_on_native_scale(
    migrated: Neighbours, native: Neighbours, scale: DistanceScale, k: int
) -> Neighbours:
    """Return the k best of migrated and native hits on one scale; the distances stay as they are.

    Args:
        migrated: Migrated hits [q, a]; padding stays last.
        native: Native hits [q, b].
        scale: Converts distances of migrated vectors.
        k: Number of hits, at least 1; with more than a + b, there are a + b.

    Returns:
        Neighbours [q, k] by the distance of an equally likely native vector; equal ones by their
        own distance, then by label.

    Raises:
        ValueError: The hits have different numbers of queries.
    """
    both = concatenate_neighbours([migrated, native], axis=1)
    joined = rank_on_native_scale(
        both, np.arange(both.labels.shape[1]) < migrated.labels.shape[1], scale
    )
    return Neighbours(joined.labels[:, :k], joined.distances[:, :k])


def rank_on_native_scale(hits: Neighbours, migrated_mask: Mask, scale: DistanceScale) -> Neighbours:
    """Sort hits by the distance of an equally likely native vector.

    Equal ones are sorted by their own distance, then by label.

    Args:
        hits: Hits [q, c].
        migrated_mask: Which labels [q, c] or columns [c] are migrated.
        scale: Converts distances of migrated vectors.

    Returns:
        Neighbours [q, c], with the items' own distances.
    """
    scaled = np.where(migrated_mask, scale(hits.distances), hits.distances)
    order = np.lexsort((hits.labels, hits.distances, scaled), axis=1)
    query = np.arange(len(order))[:, None]
    return Neighbours(hits.labels[query, order], hits.distances[query, order])


_NICE = 10


def lower_thread_priority() -> None:
    """Lower the priority of this thread below that of searches (nice 10); processes that it starts
    inherit it.

    A process that runs at a lower priority already keeps it. The thread cannot undo it without
    privileges.

    Raises:
        OSError: The system refuses it.
    """
    # A process with a lower priority may not raise it again.
    nice = max(_NICE, os.getpriority(os.PRIO_PROCESS, 0))
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
