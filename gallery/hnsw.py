"""Approximate search: an hnswlib graph that is never changed once it is made. Imported by server, training
and report only."""

from pathlib import Path

from gallery.index import Index, Labels, Mask, Neighbours
from gallery.spec import SpaceSpec
from release.vectors import Vectors


class HnswIndex:
    """A graph over the rows of `vectors`; `ef` trades recall for time."""

    def search(self, queries: Vectors, k: int, allowed: Mask | None = None) -> Neighbours:
        """See Index.search."""
        raise NotImplementedError

    def save(self, path: Path) -> None:
        """Write a checked file. Raises CannotWriteError."""
        raise NotImplementedError


def build(spec: SpaceSpec, labels: Labels, vectors: Vectors, *, threads: int = 1) -> HnswIndex:
    """A fresh graph; other threads search on meanwhile."""
    raise NotImplementedError


def load(path: Path, spec: SpaceSpec) -> HnswIndex:
    """Read a checked file. Raises VerificationError before hnswlib sees a byte, NotFoundError."""
    raise NotImplementedError


def inherit(old: HnswIndex, spec: SpaceSpec, labels: Labels, vectors: Vectors) -> HnswIndex:
    """The graph of `old` over new vectors of the same items: searchable at once, with a larger ef."""
    raise NotImplementedError


def recall(index: Index, *, queries: int = 100, k: int = 10) -> float:
    """Share of the true `k` nearest that `index` finds, probed with some of its own vectors."""
    raise NotImplementedError
