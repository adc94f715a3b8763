"""A graph by the public API of the package hnswlib, where `_native.Hnsw` was not compiled.

The package gives and takes what a graph holds as one dict, which it would pickle. A graph whose
state was read costs a copy of its vectors, and each search takes more time. Answers are as good.
"""

import logging
from typing import Any

import hnswlib
import numpy as np
from numpy.typing import NDArray

from nobackfill.gallery.search.index import Labels, Mask
from nobackfill.vectors import Vectors

logging.getLogger(__name__).warning(
    "the compiled search is missing: searches take several times longer, and graphs more memory. "
    "Install a C++ compiler, then install nobackfill again (in a checkout: make setup)"
)
_SEED = 1
_MARK_BYTE, _LABEL_BYTES = 2, 8


class PackageGraph:
    """Has the members of `_native.Hnsw`, which its declarations describe."""

    def __init__(self, space: str, dim: int, capacity: int, m: int, ef_construction: int) -> None:
        self.space, self.dim, self.m, self.ef_construction = space, dim, m, ef_construction
        self._index = hnswlib.Index(space, dim)
        self._index.init_index(capacity, M=m, ef_construction=ef_construction, random_seed=_SEED)
        # What the package told last; None: something was added since.
        self._known: dict[str, Any] | None = None

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
        """Make a graph that `mark` completes: the package takes the vectors with the links."""
        graph = cls(space, dim, 0, m, ef_construction)
        count, links = ground.shape
        size = links + 4 * dim + _LABEL_BYTES
        records = np.zeros((count, size), np.uint8)
        records[:, :links] = ground
        records[:, -_LABEL_BYTES:] = np.arange(count)[:, None].view(np.uint8)
        # The package makes a table of the names, a second for a million. Only a change of an
        # element looks there, so all get the first one's.
        names = np.zeros(count, np.uint64)
        graph._known = graph._index.__getstate__()[0] | {
            "ep_added": True, "num_threads": 1, "max_elements": count, "cur_element_count": count,
            "size_data_per_element": size, "label_offset": size - _LABEL_BYTES,
            "offset_data": links, "max_level": max_level, "enterpoint_node": entry,
            "label_lookup_external": names, "label_lookup_internal": names.astype(np.uint32),
            "element_levels": levels, "data_level0": records.reshape(-1).view(np.int8),
            "link_lists": upper,
        }  # fmt: skip
        return graph

    def _state(self) -> dict[str, Any]:
        if self._known is None:
            self._known = self._index.__getstate__()[0]
        return self._known

    @property
    def capacity(self) -> int:
        return int(self._index.max_elements)

    @property
    def max_level(self) -> int:
        return int(self._state()["max_level"])

    @property
    def entry(self) -> int:
        return int(self._state()["enterpoint_node"])

    @property
    def mult(self) -> float:
        return float(self._state()["mult"])

    @property
    def ef(self) -> int:
        return int(self._index.ef)

    @ef.setter
    def ef(self, ef: int) -> None:
        self._index.set_ef(ef)

    @property
    def records(self) -> NDArray[np.uint8]:
        state = self._state()
        records: NDArray[np.uint8] = state["data_level0"].view(np.uint8)
        return records.reshape(-1, state["size_data_per_element"])

    @property
    def levels(self) -> NDArray[np.int32]:
        levels: NDArray[np.int32] = self._state()["element_levels"][: len(self)]
        return levels

    @property
    def upper(self) -> NDArray[np.int8]:
        upper: NDArray[np.int8] = self._state()["link_lists"]
        return upper

    def __len__(self) -> int:
        return int(self._index.element_count)

    def add(self, vectors: Vectors, names: Labels, threads: int) -> None:
        self._known = None
        self._index.add_items(vectors, names, num_threads=threads)

    def search(self, queries: Vectors, k: int) -> tuple[Labels, Vectors] | None:
        try:
            names, distances = self._index.knn_query(queries, k=k, num_threads=1)
        except RuntimeError:
            return None
        return names.view(np.int64), distances

    def resize(self, capacity: int) -> None:
        self._known = None
        self._index.resize_index(capacity)

    def mark(self, dead: Mask) -> None:
        self.records[:, _MARK_BYTE] = dead
        self._index = hnswlib.Index(self._state() | {"has_deletions": bool(dead.any())})

    def advise(self, advice: int) -> bool:
        """Do nothing: the package's memory is its own."""
        return True
