"""The index that searches an hnswlib graph, which is never changed once it is made."""

import copy
from pathlib import Path
from typing import Any

import numpy as np

from nobackfill.gallery.search import compiled_search, distances, graph_memory, graph_state
from nobackfill.gallery.search.exact import PICKED_SHARE, ExactIndex, offsets
from nobackfill.gallery.search.index import Content, Labels, Mask, Neighbours, Picked, Rows, best
from nobackfill.gallery.search.skeleton import Skeleton, sums_of
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.vectors import Vectors

# Microseconds, measured at 200,000 x 128 with filters that pass .1 % to 95 %: which of two ways is
# taken. Exact: for each row that passes, once and for each query. Graph: for each query, and for
# each candidate it is asked for.
_EXACT_ROW, _EXACT_ROW_QUERY = 0.08, 0.01
_GRAPH_QUERY, _GRAPH_CANDIDATE = 80.0, 0.6
# The share of the candidates among which enough have to pass: at the far end a graph finds less.
_NEAR_END = 0.75


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
        self._least = 0
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
        graph_memory.move_to_large_pages(graph)
        self._exact = ExactIndex.of_prepared(spec, known, memory, offsets(spec, memory))
        self.compiled = compiled_search.graph_of(spec, graph, self._held, labels, self._elements)

    @property
    def ef(self) -> int:
        """Candidates of a search."""
        return max(self._least, int(self.graph.ef))

    def exact(self, queries: Vectors, k: int, allowed: Mask | None = None) -> Neighbours:
        """The same search, comparing every row."""
        if self._elements is None:
            return self._exact.search(queries, k, allowed)
        if allowed is not None:
            rows = np.flatnonzero(allowed)
            if len(rows) * PICKED_SHARE <= len(allowed):
                return self._exact.search_rows(queries, k, self._elements[rows])
        mask = np.zeros(len(self._held), np.bool_)
        mask[self._elements if allowed is None else self._elements[allowed]] = True
        return self._exact.search(queries, k, mask)

    def seeking(self, ef: int) -> "HnswIndex":
        """The same index with at least `ef` candidates a search. The graph stays as it is: it may
        be searched at this moment, and its own ef is every search's."""
        index = copy.copy(self)
        index._least = ef
        return index

    def search(
        self,
        queries: Vectors,
        k: int,
        allowed: Mask | None = None,
        passing: int | None = None,
        ef: int = 0,
    ) -> Neighbours:
        """See Index.search. Distances are the graph's own, float32."""
        asked = self._asked(k, ef)
        if asked is None:
            return self.exact(queries, k, allowed)
        if allowed is None:
            found = None
            if not _exact_is_cheaper(len(self.labels), len(queries), asked):
                found = self._near(distances.prepare(self.spec.metric, queries), asked)
            if found is None:
                return self.exact(queries, k)
            return _answer(self.labels[found[0][:, :k]], found[1][:, :k], k)
        if passing is None:
            passing = int(np.count_nonzero(allowed))
        answer = Neighbours(
            np.full((len(queries), k), -1, np.int64), np.full((len(queries), k), np.inf, np.float32)
        )
        wide = asked if asked > max(k, self.graph.ef) else 0
        left = self._filtered(queries, k, allowed, passing, wide, answer)
        if len(left):
            exact = self.exact(queries[left], k, allowed)
            answer.labels[left], answer.distances[left] = exact.labels, exact.distances
        return answer

    def walked(self, k: int, ef: int) -> int | None:
        """Candidates that one query asks the graph for; None: every row is compared with it."""
        asked = self._asked(k, ef)
        exact = asked is None or _exact_is_cheaper(len(self.labels), 1, asked)
        return None if exact else asked

    def _asked(self, k: int, ef: int) -> int | None:
        count = len(self.labels)
        # A graph that is asked for more neighbours looks at as many candidates.
        wide = max(ef, self._least)
        return None if ef >= count else min(max(k, wide if wide > self.graph.ef else 0), count)

    def _filtered(
        self,
        queries: Vectors,
        k: int,
        allowed: Mask,
        passing: int,
        wide: int,
        answer: Neighbours,
    ) -> Rows:
        """Fill the answers that the graph gives cheaper than comparing every row that passes, with
        `wide` candidates at least; returns the queries without one.

        Rows met on the way that may not be found make the search wider: so wide that, where the
        filter has nothing to do with what is near, one query in two hundred finds too few. Where it
        has, what passes lies at the far end or beyond, and the graph is not trusted with it.
        """
        count, wanted = len(self.labels), min(k, passing)
        some = (wanted + 2.5 * wanted**0.5 + 2) / _NEAR_END
        asked = min(count, max(wide, int(some * count / max(1, passing))))
        every = np.arange(len(queries))
        if _exact_is_cheaper(passing, len(queries), asked):
            return every
        found = self._near(distances.prepare(self.spec.metric, queries), asked)
        if found is None:
            return every
        rows, apart = found
        passed = allowed[rows]
        near = asked if asked == count else int(_NEAR_END * asked)
        full = np.count_nonzero(passed[:, :near], axis=1) >= wanted
        # Rows that passed first, still by distance.
        order = np.argsort(~passed[full], axis=1, kind="stable")[:, :wanted]
        rows = np.take_along_axis(rows[full], order, axis=1)
        fuller = _answer(self.labels[rows], np.take_along_axis(apart[full], order, axis=1), k)
        answer.labels[full], answer.distances[full] = fuller.labels, fuller.distances
        left: Rows = np.flatnonzero(~full)
        return left

    def _near(self, prepared: Vectors, asked: int) -> tuple[Rows, Vectors] | None:
        """Rows and distances [q, asked], nearest first; None if so many were not reached: parts of
        the graph hang apart."""
        try:
            names, apart = self.graph.knn_query(prepared, k=asked, num_threads=1)
        except RuntimeError:
            return None
        found: Rows = names.view(np.int64)
        rows = found if self._rows is None else self._rows[found]
        # The inner product of a vector with itself can be rounded to above 1.
        np.maximum(apart, 0, out=apart)
        return rows, apart

    def skeleton(self, *, sums: bool = True) -> Skeleton:
        """What is left of it without its vectors."""
        links = graph_state.links_of(self.graph)
        kept = sums_of(graph_state.vectors_of(self.graph)) if sums else None
        ef = int(self.graph.ef)
        return Skeleton(self.spec, self.labels, self._held, links, kept, self.fresh, ef)

    def save(self, path: Path) -> None:
        """Write a checked file, without the vectors. Raises CannotWriteError."""
        self.skeleton().write(path)


def _exact_is_cheaper(passing: int, queries: int, asked: int) -> bool:
    exact = passing * (_EXACT_ROW + _EXACT_ROW_QUERY * queries)
    return exact <= queries * (_GRAPH_QUERY + _GRAPH_CANDIDATE * asked)


def _answer(labels: Labels, apart: Vectors, k: int) -> Neighbours:
    """Sorted candidates as an answer: equal distances by label, padded to k."""
    if labels.shape[1] < k or (apart[:, 1:] == apart[:, :-1]).any():
        return best(labels, apart, k)
    return Neighbours(labels, apart)
