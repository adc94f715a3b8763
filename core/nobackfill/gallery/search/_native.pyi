from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nobackfill.vectors import Vectors

_Labels = NDArray[np.int64]
_Mask = NDArray[np.bool_]

def parse(message: bytes) -> tuple[str, str | None, bytes, int, float] | None: ...
def ranked(
    cosine: bool, query: Vectors, rows: list[tuple[int, bytes]], k: int
) -> tuple[_Labels, Vectors] | None: ...

class Graph:
    def __init__(
        self,
        owner: Any,
        cosine: bool,
        dim: int,
        m: int,
        count: int,
        words: Mapping[str, int],
        held: _Labels,
        labels: _Labels,
        elements: _Labels | None,
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
        self, query: Vectors, k: int, asked: int, base: _Mask | None, beside: _Mask | None
    ) -> tuple[_Labels, Vectors] | None: ...
    def answers(
        self,
        queries: list[tuple[bytes, int, int, float]],
        exact: bool,
        known: Mapping[int, tuple[bytes, bytes, bytes, int, bytes]],
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
        walked: Mapping[int, int | None],
        known: Mapping[int, tuple[bytes, bytes, bytes, int, bytes]],
        curves: Curves,
        end: bytes,
    ) -> None: ...
    def answers(self, messages: list[bytes]) -> list[bytes | None]: ...
