"""Exact search: one matrix, one BLAS call. The edge's engine, and the oracle of the others."""

import numpy as np
from numpy.typing import NDArray

from gallery import distances
from gallery.index import Labels, Mask, Neighbours, best
from gallery.spec import SpaceSpec
from release.vectors import Vectors

# Elements of the largest distance matrix made at once (64 MiB).
BLOCK_ELEMENTS = 1 << 24
# Candidates taken beyond k, so that rounding seldom leaves the k-th in doubt.
SPARE_CANDIDATES = 16
# A filter that passes less than one row in this many is answered from a copy of those rows.
COPIED_SHARE = 4
# Rows of spare room at least, in an index that grows.
LEAST_ROOM = 256
# Rows compared at once where rounding did.
DOUBTFUL_ROWS = 1 << 14


class ExactIndex:
    """All vectors of a space in one float32 matrix."""

    def __init__(self, spec: SpaceSpec, labels: Labels, vectors: Vectors) -> None:
        """`labels` int64 [n] strictly increasing, `vectors` float32 [n, dim], checked."""
        prepared = distances.prepare(spec.metric, vectors)
        self._set(spec, labels, prepared, half_squares(prepared))

    def _set(
        self, spec: SpaceSpec, labels: Labels, prepared: Vectors, halves: NDArray[np.float32]
    ) -> None:
        self.spec = spec
        self.labels = labels
        self.vectors = prepared
        self._halves = halves
        self._spare: _Spare | None = None

    @classmethod
    def of_prepared(
        cls, spec: SpaceSpec, labels: Labels, prepared: Vectors, halves: NDArray[np.float32]
    ) -> "ExactIndex":
        """The same from prepared vectors and their `half_squares`, without computing anything."""
        index = cls.__new__(cls)
        index._set(spec, labels, prepared, halves)
        return index

    def extended(self, labels: Labels, vectors: Vectors) -> "ExactIndex":
        """The same with more rows, whose labels are all larger than those here.

        Costs little: new rows go into spare room at the end of the same arrays, which no older
        index reads; only the newest index of a chain is extended in place.
        """
        prepared = distances.prepare(self.spec.metric, vectors)
        old, count = len(self.labels), len(self.labels) + len(labels)
        spare = self._spare
        if spare is None or spare.used != old or count > len(spare.labels):
            spare = _Spare(self, room=count + max(count, LEAST_ROOM))
        spare.labels[old:count] = labels
        spare.vectors[old:count] = prepared
        spare.halves[old:count] = half_squares(prepared)
        spare.used = count
        index = self.of_prepared(
            self.spec, spare.labels[:count], spare.vectors[:count], spare.halves[:count]
        )
        index._spare = spare
        return index

    def search(self, queries: Vectors, k: int, allowed: Mask | None = None) -> Neighbours:
        """See Index.search."""
        queries = distances.prepare(self.spec.metric, queries)
        index, barred = self, None
        if allowed is not None:
            rows = np.flatnonzero(allowed)
            if len(rows) * COPIED_SHARE > len(allowed):
                barred = ~allowed
            else:
                index = self.of_prepared(
                    self.spec, self.labels[rows], self.vectors[rows], self._halves[rows]
                )
        block = max(1, BLOCK_ELEMENTS // max(1, len(index.labels)))
        parts = [
            index._search_block(queries[start : start + block], k, barred)
            for start in range(0, max(1, len(queries)), block)
        ]
        return Neighbours(
            np.concatenate([part.labels for part in parts]),
            np.concatenate([part.distances for part in parts]),
        )

    def _search_block(self, queries: Vectors, k: int, barred: Mask | None) -> Neighbours:
        count = len(self.labels)
        allowed = count if barred is None else count - int(barred.sum())
        taken = min(allowed, k + SPARE_CANDIDATES)
        # Half the squared distance less a constant a query: orders as the distance does, for either
        # metric, because prepared cosine vectors all have the same norm.
        rough = self._halves - queries @ self.vectors.T
        if barred is not None:
            rough[:, barred] = np.inf
        if 0 < taken < count:
            rows = np.argpartition(rough, taken - 1, axis=1)[:, :taken]
        else:
            rows = np.broadcast_to(np.arange(count), (len(queries), count))
        found = best(
            self.labels[rows],
            distances.between(self.spec.metric, queries, self.vectors[rows]),
            k,
        )
        if taken < allowed:
            self._settle(queries, k, rough, rows, found)
        return found

    def _settle(
        self, queries: Vectors, k: int, rough: Vectors, rows: NDArray[np.intp], found: Neighbours
    ) -> None:
        """Search again, in `found`, the queries whose k-th neighbour rounding leaves in doubt: rows
        that were not taken could be as near. Many equal vectors do that."""
        nearest = np.take_along_axis(rough, rows, axis=1)
        kth = np.partition(nearest, k - 1, axis=1)[:, k - 1]
        largest = np.sqrt(2 * max(0.0, float(self._halves.max())))
        norms = np.sqrt(np.einsum("qd,qd->q", queries, queries, dtype=np.float64))
        error = 2.0**-22 * queries.shape[1] * norms * largest + 2.0**-22 * largest**2
        limit = kth + 2 * error
        for query in np.flatnonzero(nearest.max(axis=1) <= limit):
            again = np.flatnonzero(rough[query] <= limit[query])
            one = queries[query : query + 1]
            nearby = [
                distances.between(
                    self.spec.metric, one, self.vectors[again[a : a + DOUBTFUL_ROWS]][None]
                )
                for a in range(0, len(again), DOUBTFUL_ROWS)
            ]
            settled = best(self.labels[again][None], np.concatenate(nearby, axis=1), k)
            found.labels[query] = settled.labels[0]
            found.distances[query] = settled.distances[0]


class _Spare:
    """Arrays with room for more rows; the first `used` are some index's."""

    def __init__(self, index: ExactIndex, room: int) -> None:
        self.used = len(index.labels)
        self.labels = np.empty(room, np.int64)
        self.vectors = np.empty((room, index.spec.dim), np.float32)
        self.halves = np.empty(room, np.float32)
        self.labels[: self.used] = index.labels
        self.vectors[: self.used] = index.vectors
        self.halves[: self.used] = index._halves


def half_squares(prepared: Vectors) -> NDArray[np.float32]:
    """Half the squared norm of each row, [n]."""
    squares = np.einsum("nd,nd->n", prepared, prepared, dtype=np.float64)
    halves: NDArray[np.float32] = (squares / 2).astype(np.float32)
    return halves
