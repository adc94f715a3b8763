"""What a search sees: an immutable base, an exact delta of what came since, and tombstones.

`LiveView` follows a store's commits; `snapshot` is one reference, held by a search to its end.
"""

from collections.abc import Callable

from gallery.index import Index, Labels, Neighbours
from gallery.spec import SpaceSpec
from gallery.store import Store
from release.vectors import Vectors

# Makes a base of live vectors; gallery.hnsw.build is one, ExactIndex another.
Builder = Callable[[SpaceSpec, Labels, Vectors], Index]


class Snapshot:
    """One state of one space of a gallery."""

    spec: SpaceSpec

    def __len__(self) -> int:
        raise NotImplementedError

    def search(self, queries: Vectors, k: int, allowed: Labels | None = None) -> Neighbours:
        """The `k` nearest live vectors; `allowed`: increasing labels that may be found, None for all.

        Raises InvalidInputError for queries that are not float32 [q, dim] and finite.
        """
        raise NotImplementedError

    def without(self, labels: Labels) -> "Snapshot":
        """The same state less `labels`: in a dual rollout, those that another space answers for."""
        raise NotImplementedError


class LiveView:
    """The current snapshot of one space: exact as soon as it is made, with an index once there is one."""

    def __init__(self, store: Store, space: str) -> None:
        raise NotImplementedError

    def snapshot(self) -> Snapshot:
        """What a search uses to its end."""
        raise NotImplementedError

    def compact(self, build: Builder) -> None:
        """Build a base of all live vectors aside, then swap one reference. Searches and writes go on."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop following the store."""
        raise NotImplementedError
