"""Search exactly with one matrix product; the engine of devices, and the oracle of other
engines."""

import numpy as np
from numpy.typing import NDArray

from nobackfill.gallery.search.index import (
    Content,
    Labels,
    Mask,
    Neighbours,
    Rows,
    concatenate_neighbours,
    merge_neighbours,
    nearest_candidates,
    pair_distances,
    prepare_vectors,
)
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.vectors import Vectors

# Elements of the largest distance matrix (64 MiB).
BLOCK_ELEMENTS = 1 << 24
# Candidates beyond k, so that rounding seldom leaves the k-th in doubt.
SPARE_CANDIDATES = 8
# With more improving rows than this times k for each query, a full search is cheaper.
MOST_IMPROVING = 4
# A filter that passes less than one row in this many is answered from these rows alone.
FEW_ROWS_SHARE = 3
# Elements of such rows that are gathered at a time: 128 KiB fit into the processor's cache.
PICKED_ELEMENTS = 1 << 15
# Smallest spare capacity, in rows, of an index that grows.
LEAST_SPARE_ROWS = 256
# Rows that are converted to float64 at a time.
WIDE_ROWS = 1 << 10


class ExactIndex:
    """An index that holds all vectors of a space in one float32 matrix."""

    def __init__(self, spec: SpaceSpec, labels: Labels, vectors: Content) -> None:
        """Prepare the vectors: scale them for the cosine metric, and compute their norms.

        Nothing is checked. With the squared_l2 metric the array is used, not copied: do not change
        it.

        Args:
            spec: The space.
            labels: int64 [n], strictly increasing; n may be 0.
            vectors: float32 [n, dim], checked.
        """
        prepared = prepare_vectors(spec.metric, np.asarray(vectors))
        self._set(spec, labels, prepared, distance_offsets(spec, prepared))

    def _set(
        self, spec: SpaceSpec, labels: Labels, prepared: Vectors, offsets_: NDArray[np.float32]
    ) -> None:
        self.spec = spec
        self.labels = labels
        self.vectors = prepared
        self._offsets = offsets_
        self._spare: _Spare | None = None

    @classmethod
    def from_prepared(
        cls, spec: SpaceSpec, labels: Labels, vectors: Vectors, offsets: NDArray[np.float32]
    ) -> "ExactIndex":
        """Build an index from prepared vectors and their offsets, without computing anything.

        Nothing is checked or copied: do not change the arrays later.

        Args:
            spec: The space.
            labels: int64 [n]. They need not increase if the index is only searched.
            vectors: float32 [n, dim], as `prepare_vectors` returns them.
            offsets: float32 [n], as `distance_offsets` returns them.
        """
        index = cls.__new__(cls)
        index._set(spec, labels, vectors, offsets)
        return index

    def with_more_rows(self, labels: Labels, vectors: Vectors) -> "ExactIndex":
        """Return an index with more rows; this index stays as it is.

        New rows go into spare capacity of the same arrays, which no older index reads. Only the
        newest index of a chain is extended in place; an older one is copied.

        Args:
            labels: int64 [n], increasing, all larger than the present ones; this is not checked. n
                may be 0.
            vectors: float32 [n, dim], checked; copied. Their number must be that of the labels.

        Returns:
            The new index. Calls for the same index must not overlap; other threads may search it.

        Raises:
            ValueError: Another dimension, or another number of vectors than labels. A single vector
                is not refused: each label gets it.
        """
        prepared = prepare_vectors(self.spec.metric, vectors)
        old, count = len(self.labels), len(self.labels) + len(labels)
        spare = self._spare
        if spare is None or spare.used != old or count > len(spare.labels):
            spare = _Spare(self, room=count + max(count, LEAST_SPARE_ROWS))
        spare.labels[old:count] = labels
        spare.vectors[old:count] = prepared
        spare.offsets[old:count] = distance_offsets(self.spec, prepared)
        spare.used = count
        index = self.from_prepared(
            self.spec, spare.labels[:count], spare.vectors[:count], spare.offsets[:count]
        )
        index._spare = spare
        return index

    def search(
        self,
        queries: Vectors,
        k: int,
        mask: Mask | None = None,
        passing_count: int | None = None,
        ef: int = 0,
    ) -> Neighbours:
        """Return the k nearest rows to each query, with distances in float64 that are rounded once.

        Threads may call it at the same time, also beside `with_more_rows`, which leaves this index
        as it is; no lock is needed.

        Args:
            queries: float32 [q, dim], checked; q may be 0.
            k: At least 1; it may be above n.
            mask: bool [n], the rows that may be found; None for all. Another length is not always
                noticed, and raises IndexError where it is.
            passing_count: Ignored.
            ef: Ignored: every row is compared.

        Returns:
            Neighbours [q, k], nearest first, equal distances by label; padded with label -1 and
            infinity if there are fewer rows.
        """
        if mask is None:
            return self._search(queries, k, None, None)
        rows = np.flatnonzero(mask)
        if len(rows) * FEW_ROWS_SHARE > len(mask):
            return self._search(queries, k, ~mask, None)
        return self._search(queries, k, None, rows)

    def search_rows(self, queries: Vectors, k: int, rows: Rows) -> Neighbours:
        """Return the k nearest of some rows to each query; cheaper than `search` if they are few.

        Args:
            queries: float32 [q, dim], checked.
            k: At least 1.
            rows: int [m], distinct indices of the n rows; m may be 0.

        Returns:
            Neighbours [q, k], nearest first, equal distances by label; padded with label -1 and
            infinity if there are fewer rows.

        Raises:
            IndexError: An index is out of range.
        """
        return self._search(queries, k, None, rows)

    def _search(
        self, queries: Vectors, k: int, barred: Mask | None, among: Rows | None
    ) -> Neighbours:
        queries = prepare_vectors(self.spec.metric, queries)
        block = max(1, BLOCK_ELEMENTS // max(1, len(self.labels if among is None else among)))
        parts = [
            self._search_block(queries[start : start + block], k, barred, among)
            for start in range(0, max(1, len(queries)), block)
        ]
        return concatenate_neighbours(parts)

    def merge_nearer_rows(
        self, queries: Vectors, hits: Neighbours, mask: Mask | None = None
    ) -> Neighbours:
        """Add the rows of this index that are nearer than the last hits of another index.

        This is much cheaper than `search` if few rows are: for a small index next to a large one.
        `hits` is not changed, and threads may call it at the same time.

        Args:
            queries: float32 [q, dim], checked; q may be 0.
            hits: The other index's hits, [q, k] without padding, sorted; it shares no label with
                this one.
            mask: bool [n], the rows that may be found; None for all.

        Returns:
            Neighbours [q, k] of both indexes together, equal distances by label; `hits` itself if
            no row is nearer.
        """
        k = hits.labels.shape[1]
        if len(queries) * len(self.labels) > BLOCK_ELEMENTS:
            return merge_neighbours([hits, self.search(queries, k, mask)], k)
        prepared = prepare_vectors(self.spec.metric, queries)
        rough = self._rough(prepared, None if mask is None else ~mask)
        last = hits.distances[:, -1].astype(np.float64)
        squares = np.vecdot(prepared, prepared, dtype=np.float64)
        limit = (last - squares) / 2 if self.spec.metric == "squared_l2" else last - 1
        query, row = np.nonzero(rough <= (limit + self._error(prepared))[:, None])
        if len(row) > len(queries) * MOST_IMPROVING * k:
            return merge_neighbours([hits, self.search(queries, k, mask)], k)
        if not len(row):
            return hits
        distances = pair_distances(self.spec.metric, prepared[query], self.vectors[row][:, None, :])
        owner = np.concatenate([np.repeat(np.arange(len(queries)), k), query])
        names = np.concatenate([hits.labels.ravel(), self.labels[row]])
        values = np.concatenate([hits.distances.ravel(), distances[:, 0]])
        order = np.lexsort((names, values, owner))
        # Each query has at least k candidates: the other index's hits.
        starts = np.searchsorted(owner[order], np.arange(len(queries)))
        nearest = order[starts[:, None] + np.arange(k)]
        return Neighbours(names[nearest], values[nearest])

    def _rough(self, queries: Vectors, barred: Mask | None) -> Vectors:
        """Return values [q, n] in the order of the distances, except for rounding.

        The value is half the squared distance minus a constant for each query, or the cosine
        distance minus 1.
        """
        rough: Vectors = queries @ self.vectors.T
        np.subtract(self._offsets, rough, out=rough)
        if barred is not None:
            rough[:, barred] = np.inf
        return rough

    def _rows(self, rows: Rows) -> Vectors:
        # As one opaque value for each row, indexing is fastest, and an array that is not contiguous
        # is not copied first.
        dim = self.spec.dim
        selected = self.vectors.view(f"V{4 * dim}")[:, 0][rows]
        return selected.view(np.float32).reshape(*rows.shape, dim)

    def _rough_among(self, queries: Vectors, among: Rows) -> Vectors:
        """Return the values of `_rough` for the rows `among` only, [q, len(among)]."""
        rough = np.empty((len(queries), len(among)), np.float32)
        step = max(1, PICKED_ELEMENTS // self.spec.dim)
        for start in range(0, len(among), step):
            rows = among[start : start + step]
            if len(queries) == 1:
                np.dot(self._rows(rows), queries[0], out=rough[0, start : start + step])
            else:
                rough[:, start : start + step] = queries @ self._rows(rows).T
        return np.subtract(self._offsets[among], rough, out=rough)

    def _error(self, queries: Vectors) -> NDArray[np.float64]:
        """Return an upper bound of the rounding error of each query's rough values, [q]."""
        largest = 1.0
        if self.spec.metric == "squared_l2" and len(self._offsets):
            largest = float(np.sqrt(2 * max(0.0, float(self._offsets.max()))))
        norms = np.sqrt(np.vecdot(queries, queries, dtype=np.float64))
        error: NDArray[np.float64] = 2.0**-21 * (queries.shape[1] * norms + largest) * largest
        return error + 1e-30

    def _search_block(
        self, queries: Vectors, k: int, barred: Mask | None, among: Rows | None
    ) -> Neighbours:
        if among is None:
            rough = self._rough(queries, barred)
            among = np.arange(len(self.labels))
        else:
            rough = self._rough_among(queries, among)
        count = len(among)
        unbarred = count if barred is None else count - int(np.count_nonzero(barred))
        candidates = min(unbarred, k + SPARE_CANDIDATES)
        if candidates < count:
            rows = np.argpartition(rough, candidates - 1, axis=1)[:, :candidates]
        else:
            rows = np.broadcast_to(np.arange(count), (len(queries), count))
        places = among[rows]
        distances = pair_distances(self.spec.metric, queries, self._rows(places))
        hits = nearest_candidates(self.labels[places], distances, k)
        if candidates < unbarred:
            self._settle(queries, k, rough, rows, among, hits)
        return hits

    def _settle(
        self, queries: Vectors, k: int, rough: Vectors, rows: Rows, among: Rows, hits: Neighbours
    ) -> None:
        """Search again the queries whose k-th neighbour is in doubt after rounding; update `hits`.

        Rows of `among` that were not candidates could be as near. Many equal vectors cause this.
        """
        nearest = rough[np.arange(len(rows))[:, None], rows]
        limit = np.partition(nearest, k - 1, axis=1)[:, k - 1] + 2 * self._error(queries)
        for query in np.flatnonzero(nearest.max(axis=1) <= limit):
            doubtful = among[np.flatnonzero(rough[query] <= limit[query])]
            one = queries[query : query + 1]
            pieces = np.split(doubtful, range(WIDE_ROWS, len(doubtful), WIDE_ROWS))
            nearby = [
                pair_distances(self.spec.metric, one, self.vectors[piece][None]) for piece in pieces
            ]
            settled = nearest_candidates(
                self.labels[doubtful][None], np.concatenate(nearby, axis=1), k
            )
            hits.labels[query] = settled.labels[0]
            hits.distances[query] = settled.distances[0]


class _Spare:
    """Arrays with capacity for more rows; the first `used` rows belong to an index."""

    def __init__(self, index: ExactIndex, room: int) -> None:
        self.used = len(index.labels)
        self.labels = np.empty(room, np.int64)
        self.vectors = np.empty((room, index.spec.dim), np.float32)
        self.offsets = np.empty(room, np.float32)
        self.labels[: self.used] = index.labels
        self.vectors[: self.used] = index.vectors
        self.offsets[: self.used] = index._offsets


def distance_offsets(spec: SpaceSpec, prepared: Vectors) -> NDArray[np.float32]:
    """Return the term that, minus the product of row and query, orders the rows by distance.

    Args:
        spec: The space.
        prepared: float32 [n, dim], as `prepare_vectors` returns them; n may be 0.

    Returns:
        float32 [n]: half the squared norm, or 0 with the cosine metric.
    """
    half = np.zeros(len(prepared), np.float32)
    if spec.metric == "squared_l2":
        for start in range(0, len(prepared), WIDE_ROWS):
            piece = prepared[start : start + WIDE_ROWS]
            half[start : start + WIDE_ROWS] = np.vecdot(piece, piece, dtype=np.float64) / 2
    return half
