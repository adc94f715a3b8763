"""The index that searches an hnswlib graph, which is never changed once it is made."""

from pathlib import Path
from typing import Any

import numpy as np

from gallery import distances, graph_state
from gallery.exact import ExactIndex, offsets
from gallery.index import Content, Labels, Mask, Neighbours, Picked, Rows, best
from gallery.skeleton import Skeleton, sums_of
from gallery.spec import SpaceSpec
from release.vectors import Vectors

# Microseconds, measured at 100,000 x 128 with filters that pass .5 % to 50 %: which of the two ways
# is taken. Exact: for each row that passes, once and for each query. Graph: for each query, and for
# each candidate it is asked for.
_EXACT_ROW, _EXACT_ROW_QUERY = 0.2, 0.02
_GRAPH_QUERY, _GRAPH_CANDIDATE = 150.0, 1.2


class HnswIndex:
    """A graph and the labels of its vectors, which are held once: in the graph's own memory. A
    larger `ef` finds more, and takes longer."""

    def __init__(
        self,
        spec: SpaceSpec,
        labels: Labels,
        graph: Any,
        rows: Rows | None = None,
        *,
        fresh: bool = True,
    ) -> None:
        """`graph` knows row rows[i] of `labels` as i; -1 is nobody's, and marked deleted. None: row
        i as i. Nobody else changes it.

        `fresh`: its links were made for these vectors, not for those of a space before an upgrade.
        """
        self.fresh = fresh
        self.spec = spec
        self.labels = labels
        self.graph = graph
        self._rows = rows
        names = graph_state.names_of(graph)
        # Row of each element, in the order of the graph's memory, and element of each row.
        self._held = names if rows is None else rows[names]
        memory = graph_state.vectors_of(graph)
        self.vectors: Content = memory
        self._elements: Rows | None = None
        known = labels
        if not np.array_equal(self._held, np.arange(len(labels))):
            alive = np.flatnonzero(self._held >= 0)
            self._elements = np.empty(len(labels), np.intp)
            self._elements[self._held[alive]] = alive
            self.vectors = Picked(memory, self._elements)
            known = np.append(labels, -1)[self._held]
        self._exact = ExactIndex.of_prepared(spec, known, memory, offsets(spec, memory))

    @property
    def ef(self) -> int:
        """Candidates of a search."""
        return int(self.graph.ef)

    def exact(self, queries: Vectors, k: int, allowed: Mask | None = None) -> Neighbours:
        """The same search, comparing every row."""
        if self._elements is None:
            return self._exact.search(queries, k, allowed)
        mask = np.zeros(len(self._held), np.bool_)
        mask[self._elements if allowed is None else self._elements[allowed]] = True
        return self._exact.search(queries, k, mask)

    def search(
        self, queries: Vectors, k: int, allowed: Mask | None = None, passing: int | None = None
    ) -> Neighbours:
        """See Index.search. Distances are the graph's own, float32."""
        count = len(self.labels)
        if passing is None:
            passing = count if allowed is None else int(np.count_nonzero(allowed))
        asked = wanted = min(k, passing)
        if allowed is not None:
            # Rows met on the way that may not be found make the search wider.
            asked = min(count, 8 + int(1.2 * wanted * count / max(1, passing)))
        exact_cost = passing * (_EXACT_ROW + _EXACT_ROW_QUERY * len(queries))
        if exact_cost <= len(queries) * (_GRAPH_QUERY + _GRAPH_CANDIDATE * asked):
            return self.exact(queries, k, allowed)
        prepared = distances.prepare(self.spec.metric, queries)
        try:
            names, apart = self.graph.knn_query(prepared, k=asked, num_threads=1)
        except RuntimeError:
            # Its word for fewer rows reached than asked for: parts of the graph hang apart.
            return self.exact(queries, k, allowed)
        rows = names.view(np.int64) if self._rows is None else self._rows[names.view(np.int64)]
        # The inner product of a vector with itself can be rounded to above 1.
        np.maximum(apart, 0, out=apart)
        if allowed is None:
            return _answer(self.labels[rows], apart, k)
        found = allowed[rows]
        # Allowed rows first, still by distance.
        order = np.argsort(~found, axis=1, kind="stable")[:, :wanted]
        rows = np.take_along_axis(rows, order, axis=1)
        answer = _answer(self.labels[rows], np.take_along_axis(apart, order, axis=1), k)
        short = found.sum(axis=1) < wanted
        if short.any():
            exact = self.exact(queries[short], k, allowed)
            answer.labels[short] = exact.labels
            answer.distances[short] = exact.distances
        return answer

    def skeleton(self, *, sums: bool = True) -> Skeleton:
        """What is left of it without its vectors."""
        links = graph_state.links_of(self.graph)
        told = sums_of(graph_state.vectors_of(self.graph)) if sums else None
        return Skeleton(self.spec, self.labels, self._held, links, told, self.fresh)

    def save(self, path: Path) -> None:
        """Write a checked file, without the vectors. Raises CannotWriteError."""
        self.skeleton().write(path)


def _answer(labels: Labels, apart: Vectors, k: int) -> Neighbours:
    """Sorted candidates as an answer: equal distances by label, padded to k."""
    if labels.shape[1] < k or (apart[:, 1:] == apart[:, :-1]).any():
        return best(labels, apart, k)
    return Neighbours(labels, apart)
