"""Searching in compiled code, one call that lets go of the interpreter's lock once; see `native/`.

It is an extra: where it was not built, or a graph's memory cannot be seen, `Snapshot.search` does
the same in Python. What a snapshot reads never changes and is held by it; who searches holds the
snapshot.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from nobackfill.gallery.search import graph_memory
from nobackfill.gallery.search.index import Index, Labels, Mask, Neighbours, Rows
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.vectors import Vectors

if TYPE_CHECKING:
    from nobackfill.gallery.search import _native
    from nobackfill.gallery.search._native import Curves
else:
    try:
        from nobackfill.gallery.search import _native
    except ImportError:
        _native = None


# A SearchRequest's bytes to gallery, space, values, k and max_distance (infinity: none); by image,
# the space is None and the values are its bytes. None: it is another than by one of these alone, or
# none. Itself None where nothing was compiled.
parse = None if _native is None else _native.parse
# Labels and vectors in PostgreSQL's binary form, checked as the query is: the nearest to it, as
# distances.py and index.best rank them; None: Python is to. Itself None where nothing was compiled.
ranked = None if _native is None else _native.ranked


def graph_of(
    spec: SpaceSpec, graph: Any, held: Rows, labels: Labels, elements: Rows | None
) -> "_native.Graph | None":
    """A graph as it is searched. `held`: the row in `labels` of each element, -1: nobody's;
    `elements`: the element of each row, None: the same."""
    if _native is None or (found := graph_memory.addresses(graph)) is None:
        return None
    cosine = spec.metric == "cosine"
    count = graph.element_count
    return _native.Graph(graph, cosine, spec.dim, graph.M, count, found, held, labels, elements)


class GraphIndex(Protocol):
    """What is asked of `graph_index.HnswIndex`, which a device cannot load."""

    graph: Any
    compiled: "_native.Graph | None"

    def walked(self, k: int, ef: int) -> int | None: ...


class CompiledSearch:
    """Of one snapshot."""

    def __init__(self, index: GraphIndex, snapshot: "_native.Snapshot") -> None:
        """`snapshot` reads the graph of `index`, among others."""
        self._index = index
        self._snapshot = snapshot
        # The graph's ef does not change while it is searched.
        self._walked: dict[int, int | None] = {}

    @classmethod
    def of(
        cls, spec: SpaceSpec, base: Index, base_live: Mask | None, delta: Index,
        delta_live: Mask | None,
    ) -> "CompiledSearch | None":  # fmt: skip
        """Make one of two indexes and which of their rows are alive (bool [n]; None: all).

        None: they are searched in Python only.
        """
        # Asked for by name: of the class, see GraphIndex.
        graph = getattr(base, "compiled", None)
        if graph is None:
            return None
        graphed = cast(GraphIndex, base)
        made = _native.Snapshot(
            graph, spec.unit, int(graphed.graph.ef), base_live, np.asarray(delta.vectors),
            delta.labels, delta_live,
        )  # fmt: skip
        return cls(graphed, made)

    def search(
        self, query: Vectors, k: int, ef: int, base: Mask | None, beside: Mask | None
    ) -> Neighbours | None:
        """Of one checked query [1, dim]; `base` and `beside`: rows of the graph and of the delta
        that are allowed. None: compare every row."""
        asked = self._index.walked(k, ef)
        found = None if asked is None else self._snapshot.search(query, k, asked, base, beside)
        return None if found is None else Neighbours(*found)

    def answers(
        self,
        queries: Sequence[tuple[bytes, int, float]],
        exact: bool,
        known: Mapping[int, tuple[bytes, bytes, bytes, int, bytes]],
        curves: "Curves",
        end: bytes,
    ) -> list[bytes | None]:
        """A SearchResponse to each of `queries` (values, k, farthest): the hits that are `known` by
        label (server/galleries/hosted_file.py), no farther than `farthest`, then `end`. None: one
        is not known, or it is searched otherwise.
        """
        walks = []
        for values, k, farthest in queries:
            asked = self._walks(k)
            if asked is None:
                return [None] * len(queries)
            walks.append((values, k, asked, farthest))
        return self._snapshot.answers(walks, exact, known, curves, end)

    def route(
        self,
        gallery: str,
        space: str,
        usual_k: int,
        most_k: int,
        exact: bool,
        known: Mapping[int, tuple[bytes, bytes, bytes, int, bytes]],
        curves: "Curves",
        end: bytes,
    ) -> Callable[[list[bytes]], list[bytes | None]]:
        """From SearchRequests to what `answers` answers, in one call: of those by one embedding in
        `space` of `gallery` for at most `most_k` hits (0: `usual_k`), if `answers` was asked for
        as many before. None for all others."""
        return _native.Route(
            self._snapshot, gallery, space, usual_k, most_k, exact, self._walked, known,
            curves, end,
        ).answers  # fmt: skip

    def _walks(self, k: int) -> int | None:
        if k not in self._walked:
            self._walked[k] = self._index.walked(k, 0)
        return self._walked[k]


def curves_of(curves: Mapping[int, tuple[Sequence[float], Sequence[float]]]) -> "Curves | None":
    """Distances and probabilities of calibrations, by origin as the wire names it."""
    return None if _native is None else _native.Curves(curves)
