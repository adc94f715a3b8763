"""Define the store of a gallery for every engine: SQLite in one file, or PostgreSQL.

Each method that changes something is one durable transaction. A label is never reused. While a
space is staged, puts write to both spaces. An upgrade works in windows, which may be repeated on
any machine. In addition to their own errors, all methods raise BusyError (try again),
UnavailableError (the engine does not answer), CannotWriteError, and NotFoundError after `close`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from nobackfill.gallery.edits import Editing
from nobackfill.gallery.filters import Filter, Matches
from nobackfill.gallery.listing import ListingPlace, MetadataGroup
from nobackfill.gallery.reading import StoredItem, StoredVectors, StoredWindow
from nobackfill.gallery.search.index import Labels, Neighbours
from nobackfill.gallery.spec import Metadata, SpaceInfo, SpaceSpec
from nobackfill.gallery.staging import Estimate
from nobackfill.gallery.store import Change, NewVectors, PutResult
from nobackfill.gallery.upgrade import Carrying, Runner
from nobackfill.vectors import Vectors


class Searcher(Protocol):
    """A search in one space."""

    def search(
        self, queries: Vectors, k: int, condition: Filter | None = None, ef: int = 0
    ) -> Neighbours:
        """Find the nearest items to each query.

        Args:
            queries: float32 [q, dim].
            k: Number of items for each query.
            condition: Only items that pass this filter.
            ef: Minimum number of candidates; index.EVERY for an exact search.

        Raises:
            InvalidInputError: Queries that are not finite, or a filter that filters.check refuses.
        """
        ...


class GalleryStore(Carrying, Editing, Protocol):
    """A gallery."""

    def close(self) -> None: ...

    def suspend(self) -> bool:
        """Close files and connections until they are needed; return False if they are in use."""
        ...

    def subscribe(self, listener: Callable[[Change], None]) -> None:
        """Call `listener` after each commit of this process."""
        ...

    def unsubscribe(self, listener: Callable[[Change], None]) -> None: ...

    def spaces(self) -> list[SpaceInfo]:
        """Return all spaces, oldest first; exactly one is active."""
        ...

    def space(self, space: str) -> SpaceInfo:
        """Return a space.

        Raises:
            IncompatibleSpaceError: The gallery does not have it.
        """
        ...

    def put(
        self, ids: Sequence[str], vectors: Sequence[NewVectors], *,
        digests: Sequence[str | None] | None = None,
        metadata: Sequence[Metadata | None] | None = None,
    ) -> PutResult:  # fmt: skip
        """Store items, all or none; see Store.put."""
        ...

    def delete(self, ids: Sequence[str]) -> int:
        """Remove items from every space; return how many existed."""
        ...

    def get(self, item_id: str) -> StoredItem | None:
        """Return an item; None if it does not exist."""
        ...

    def page(
        self,
        space: str,
        limit: int,
        *,
        after: ListingPlace | None = None,
        allowed: Matches | None = None,
        least_certain: bool = False,
    ) -> tuple[list[tuple[StoredItem, ListingPlace]], ListingPlace | None]:
        """Return a page of items; see listing.page."""
        ...

    def load(self, space: str) -> tuple[Labels, Vectors]:
        """Return all vectors of a space in one snapshot: labels int64 [n] increasing, float32 [n,
        dim]."""
        ...

    def vector(self, label: int, space: str) -> Vectors | None:
        """Return an item's vector in a space, [1, dim]; None if it has none there."""
        ...

    def stored_vectors(self, labels: Labels, space: str) -> StoredVectors:
        """Return the rows of a space for those of `labels` that have one."""
        ...

    def frozen(self, spaces: Sequence[str], size: int) -> Iterator[StoredWindow]:
        """Yield every item by increasing label, with its vectors in some spaces, from one snapshot.

        The snapshot is held until the iterator ends or is closed.

        Args:
            spaces: Ids of the spaces.
            size: Items of a window.

        Raises:
            IncompatibleSpaceError: The gallery lacks a space.
        """
        ...

    def groups(self, key: str, space: str) -> list[MetadataGroup]:
        """Group the items by a metadata key; see listing.groups_by_value."""
        ...

    def state(self) -> dict[str, Any]:
        """Return all small JSON values that are stored with the gallery."""
        ...

    def state_set(self, values: Mapping[str, Any]) -> None:
        """Store small JSON values in one transaction; None removes a value."""
        ...

    def left_behind_items(self, space: str, after: int = 0, limit: int = 1000) -> list[StoredItem]:
        """Return a page of the items without a vector in a space, by increasing label.

        Args:
            space: The space.
            after: The last label of the page before.
            limit: Largest number of items.
        """
        ...

    def flip(
        self, space: str, *, leave_behind: bool = False, state: Mapping[str, Any] | None = None
    ) -> None:
        """Make a space the active one; see staging.flip.

        Raises:
            PreconditionError: Items lack a vector there, and `leave_behind` is False.
        """
        ...

    def rollback(
        self, *, leave_behind: bool = False, state: Mapping[str, Any] | None = None
    ) -> str:
        """Return to the previous space; see staging.rollback.

        Raises:
            NotFoundError: No previous space.
            PreconditionError: Items lack a vector there, and `leave_behind` is False.
        """
        ...

    def drop(self, space: str) -> None:
        """Remove a space that is not active.

        Raises:
            PreconditionError: It is the active one.
        """
        ...

    def upgraded(self, space: str, ids: Sequence[str]) -> list[StoredItem]:
        """Return those of `ids` whose vector in a space was migrated, by falling uncertainty.

        Items of unknown uncertainty come last.
        """
        ...

    def sample(self, space: str, other: str, count: int) -> tuple[Labels, Vectors, Vectors]:
        """Draw about `count` items that have a vector in both spaces, at random.

        Returns:
            Labels [n], increasing, and their vectors [n, dim] in each space.
        """
        ...

    def estimate(self, runner: Runner, target: SpaceSpec) -> Estimate:
        """Estimate the cost of an upgrade from the active space on a few items; change nothing."""
        ...
