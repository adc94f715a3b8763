"""Build graphs with the public API of the package hnswlib, where `_native.Hnsw` is not compiled.

The package exchanges the content of a graph as one dict, made for pickling. Reading the state of a
graph copies its vectors, and each search takes longer. Answers are as good.
"""

import logging
from typing import Any

import hnswlib
import numpy as np
from numpy.typing import NDArray

from nobackfill.gallery.search.index import Labels, Mask
from nobackfill.vectors import Vectors

logging.getLogger(__name__).warning(
    "the compiled search is missing: searches take several times longer, and graphs need more "
    "memory. Install a C++ compiler, then install nobackfill again (in a checkout: make setup)"
)
_SEED = 1
_MARK_BYTE, _LABEL_BYTES = 2, 8


class PackageGraph:
    """A graph with the members of `_native.Hnsw`; see its declarations."""

    def __init__(self, space: str, dim: int, capacity: int, m: int, ef_construction: int) -> None:
        self.space, self.dim, self.m, self.ef_construction = space, dim, m, ef_construction
        self._index = hnswlib.Index(space, dim)
        self._index.init_index(capacity, M=m, ef_construction=ef_construction, random_seed=_SEED)
        # The last state from the package; None after a change.
        self._cached: dict[str, Any] | None = None

    @classmethod
    def of_links(
        cls,
        space: str,
        dim: int,
        m: int,
        ef_construction: int,
        max_level: int,
        entry: int,
        ground: NDArray[np.uint8],
        levels: NDArray[np.int32],
        upper: NDArray[np.int8],
    ) -> "PackageGraph":
        """Create a graph from its links. Write the vectors into `records`, then call `mark`: the
        package takes vectors and links together.

        Args:
            space: l2 or ip.
            dim: Dimension of the vectors.
            m: Links of an element.
            ef_construction: Candidates while building.
            max_level: The highest level.
            entry: The element where walks begin.
            ground: uint8 [count, bytes], links of each element on the ground level.
            levels: int32 [count], levels of each element above the ground.
            upper: int8 [bytes], the links on these levels.

        Returns:
            The graph; names are the numbers of the elements. Before `mark`, it finds nothing. Do
            not call `add`: it does not know the names, and would add them again.
        """
        graph = cls(space, dim, 0, m, ef_construction)
        count, links = ground.shape
        size = links + 4 * dim + _LABEL_BYTES
        records = np.zeros((count, size), np.uint8)
        records[:, :links] = ground
        records[:, -_LABEL_BYTES:] = np.arange(count)[:, None].view(np.uint8)
        # The package builds a table of the names, which takes a second for a million. Only changes
        # of an element use it, so all elements get the name of the first.
        names = np.zeros(count, np.uint64)
        graph._cached = graph._index.__getstate__()[0] | {
            "ep_added": True, "num_threads": 1, "max_elements": count, "cur_element_count": count,
            "size_data_per_element": size, "label_offset": size - _LABEL_BYTES,
            "offset_data": links, "max_level": max_level, "enterpoint_node": entry,
            "label_lookup_external": names, "label_lookup_internal": names.astype(np.uint32),
            "element_levels": levels, "data_level0": records.reshape(-1).view(np.int8),
            "link_lists": upper,
        }  # fmt: skip
        return graph

    def _state(self) -> dict[str, Any]:
        if self._cached is None:
            self._cached = self._index.__getstate__()[0]
        return self._cached

    @property
    def capacity(self) -> int:
        """Return the number of elements that the graph can hold before `resize`, 0 or more."""
        return int(self._index.max_elements)

    @property
    def max_level(self) -> int:
        """Return the highest level of an element, from 0."""
        return int(self._state()["max_level"])

    @property
    def entry(self) -> int:
        """Return the number of the element where walks begin."""
        return int(self._state()["enterpoint_node"])

    @property
    def mult(self) -> float:
        """Return the factor by which levels are drawn, 1 / ln(M)."""
        return float(self._state()["mult"])

    @property
    def ef(self) -> int:
        """Return the number of candidates of a search."""
        return int(self._index.ef)

    @ef.setter
    def ef(self, ef: int) -> None:
        self._index.set_ef(ef)

    @property
    def records(self) -> NDArray[np.uint8]:
        """Return the records of all elements, uint8 [count, bytes]: links, vector, label.

        The array belongs to the graph: `mark` takes over what is written to it.
        """
        state = self._state()
        records: NDArray[np.uint8] = state["data_level0"].view(np.uint8)
        return records.reshape(-1, state["size_data_per_element"])

    @property
    def levels(self) -> NDArray[np.int32]:
        """Return the number of levels above the ground of each element, int32 [count]."""
        levels: NDArray[np.int32] = self._state()["element_levels"][: len(self)]
        return levels

    @property
    def upper(self) -> NDArray[np.int8]:
        """Return the links above the ground level, element by element, int8 [bytes]."""
        upper: NDArray[np.int8] = self._state()["link_lists"]
        return upper

    def __len__(self) -> int:
        return int(self._index.element_count)

    def add(self, vectors: Vectors, names: Labels, threads: int) -> None:
        """Add vectors under names.

        Args:
            vectors: float32 [n, dim], prepared.
            names: int64 [n], distinct; a known name replaces its vector.
            threads: Threads that add them, at least 1; with one, the same calls give the same
                graph.

        Raises:
            RuntimeError: The capacity does not suffice; some vectors may have been added.
        """
        self._cached = None
        self._index.add_items(vectors, names, num_threads=threads)

    def search(self, queries: Vectors, k: int) -> tuple[Labels, Vectors] | None:
        """Return names int64 [q, k] and distances float32 [q, k] of the nearest, in any order of
        names.

        Args:
            queries: float32 [q, dim], prepared.
            k: Number of elements, at least 1.

        Returns:
            The names and distances, nearest first, not those that are marked. None if the graph
            finds fewer than k elements for a query, or refuses the queries, such as ones of another
            dimension.
        """
        try:
            names, distances = self._index.knn_query(queries, k=k, num_threads=1)
        except RuntimeError:
            return None
        return names.view(np.int64), distances

    def resize(self, capacity: int) -> None:
        """Change the capacity to `capacity` elements, not fewer than there are.

        Raises:
            RuntimeError: The graph has more elements.
        """
        self._cached = None
        self._index.resize_index(capacity)

    def mark(self, deleted: Mask) -> None:
        """Mark elements that must not be found, bool [count]; this replaces all earlier marks.

        It takes over what was written to `records`. Searches of other threads must not run
        meanwhile.
        """
        self.records[:, _MARK_BYTE] = deleted
        self._index = hnswlib.Index(self._state() | {"has_deletions": bool(deleted.any())})

    def advise(self, advice: int) -> bool:
        """Do nothing, and return True: the package manages its memory itself."""
        return True
