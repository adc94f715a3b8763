"""Exact search: one matrix, one BLAS call. The edge's engine, and the oracle of the others."""

from gallery.index import Labels, Mask, Neighbours
from gallery.spec import SpaceSpec
from release.vectors import Vectors


class ExactIndex:
    """All vectors of a space in one float32 matrix."""

    def __init__(self, spec: SpaceSpec, labels: Labels, vectors: Vectors) -> None:
        """`labels` int64 [n] strictly increasing, `vectors` float32 [n, dim], checked."""
        raise NotImplementedError

    def search(self, queries: Vectors, k: int, allowed: Mask | None = None) -> Neighbours:
        """See Index.search."""
        raise NotImplementedError
