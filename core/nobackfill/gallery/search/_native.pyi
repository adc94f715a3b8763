from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from nobackfill.vectors import Vectors

_Labels = NDArray[np.int64]
_Mask = NDArray[np.bool_]

def parse(message: bytes) -> tuple[str, str | None, bytes, int, float] | None: ...
def ranked(
    cosine: bool, query: Vectors, rows: list[tuple[int, bytes]], k: int
) -> tuple[_Labels, Vectors] | None: ...

class Hnsw:
    """hnswlib's graph. Elements are numbered as they came."""

    def __init__(
        self, space: str, dim: int, capacity: int, m: int, ef_construction: int
    ) -> None: ...
    @staticmethod
    def of_links(
        space: str,
        dim: int,
        m: int,
        ef_construction: int,
        max_level: int,
        entry: int,
        ground: NDArray[np.uint8],
        levels: NDArray[np.int32],
        upper: NDArray[np.int8],
    ) -> Hnsw: ...
    @property
    def space(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def m(self) -> int: ...
    @property
    def ef_construction(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def max_level(self) -> int: ...
    @property
    def entry(self) -> int: ...
    @property
    def mult(self) -> float: ...
    @property
    def ef(self) -> int: ...
    @ef.setter
    def ef(self, ef: int) -> None: ...
    @property
    def records(self) -> NDArray[np.uint8]: ...
    @property
    def levels(self) -> NDArray[np.int32]: ...
    @property
    def upper(self) -> NDArray[np.int8]: ...
    def __len__(self) -> int: ...
    def add(self, vectors: Vectors, names: _Labels, threads: int) -> None: ...
    def search(self, queries: Vectors, k: int) -> tuple[_Labels, Vectors] | None: ...
    def resize(self, capacity: int) -> None: ...
    def mark(self, deleted: _Mask) -> None: ...
    def advise(self, advice: int) -> bool: ...

class Graph:
    def __init__(
        self, owner: Hnsw, rows: _Labels, labels: _Labels, elements: _Labels | None
    ) -> None: ...

class Curves:
    def __init__(self, curves: Mapping[int, tuple[Sequence[float], Sequence[float]]]) -> None: ...

class Snapshot:
    def __init__(
        self,
        graph: Graph,
        unit: bool,
        ef: int,
        live: _Mask | None,
        delta_vectors: Vectors,
        delta_labels: _Labels,
        delta_live: _Mask | None,
    ) -> None: ...
    def search(
        self, query: Vectors, k: int, candidates: int, base: _Mask | None, delta: _Mask | None
    ) -> tuple[_Labels, Vectors] | None: ...
    def answers(
        self,
        queries: list[tuple[bytes, int, int, float]],
        exact: bool,
        items: Mapping[int, tuple[bytes, bytes, bytes, int, bytes]],
        curves: Curves,
        end: bytes,
    ) -> list[bytes | None]: ...

class Route:
    def __init__(
        self,
        snapshot: Snapshot,
        gallery: str,
        space: str,
        usual_k: int,
        most_k: int,
        exact: bool,
        candidates_by_k: Mapping[int, int | None],
        items: Mapping[int, tuple[bytes, bytes, bytes, int, bytes]],
        curves: Curves,
        end: bytes,
    ) -> None: ...
    def answers(self, messages: list[bytes]) -> list[bytes | None]: ...
