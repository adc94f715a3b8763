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
from nobackfill.gallery.search.index import Labels, Neighbours
from nobackfill.gallery.spec import Metadata, SpaceInfo, SpaceSpec
from nobackfill.gallery.sqlite_file import StoredItem, StoredVectors, StoredWindow
from nobackfill.gallery.staging import Carrying, Estimate, Runner
from nobackfill.gallery.store import Change, NewVectors, PutResult
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
            condition: Only items that pass this filter; None for all.
            ef: Minimum number of candidates; index.EVERY for an exact search.

        Raises:
            InvalidInputError: Queries of another shape or not finite, or a filter with too many
                tests, values or levels.
        """
        ...


class GalleryStore(Carrying, Editing, Protocol):
    """A gallery."""

    def close(self) -> None:
        """Close files and connections for good; later calls raise NotFoundError."""
        ...

    def suspend(self) -> bool:
        """Close files and connections until they are needed; return False if they are in use."""
        ...

    def subscribe(self, listener: Callable[[Change], None]) -> None:
        """Call `listener` with the change after each commit of this process, in order."""
        ...

    def unsubscribe(self, listener: Callable[[Change], None]) -> None:
        """Stop calling a listener.

        Raises:
            ValueError: It is not subscribed.
        """
        ...

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
        """Store items durably, all or none.

        An item with the same digest as the stored one keeps its label and vectors; vectors of
        spaces that it lacks are added. Any other existing item is replaced and gets a new label.

        Args:
            ids: n different ids of 1 to 256 characters.
            vectors: For each space, vectors of all items, in order.
            digests: n digests of the items' content; None for none, which replaces every existing
                item.
            metadata: For each item, values by key. {} removes an unchanged item's metadata, None
                leaves it.

        Raises:
            InvalidInputError: Invalid vectors, ids or metadata, or an id twice.
            IncompatibleSpaceError: The gallery lacks a space.
        """
        ...

    def delete(self, ids: Sequence[str]) -> int:
        """Delete items from every space; return how many existed. Unknown ids are skipped."""
        ...

    def get(self, item_id: str) -> StoredItem | None:
        """Return an item by its id, without origin and uncertainty; None if it does not exist."""
        ...

    def page(
        self,
        space: str,
        limit: int,
        *,
        start_after: ListingPlace | None = None,
        matches: Matches | None = None,
        least_certain: bool = False,
    ) -> tuple[list[tuple[StoredItem, ListingPlace]], ListingPlace | None]:
        """Return a page of items.

        Args:
            space: Origin and uncertainty of the items are those of this space.
            limit: Largest number of items.
            start_after: Position of the last item of the previous page; None for the first page.
            matches: Only items that passed a filter; None for all.
            least_certain: Only items with an uncertainty in the space, the largest first, then by
                label. Otherwise by label.

        Returns:
            The items with their positions, and the position for the next page; None at the end.

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
        """
        ...

    def load(self, space: str) -> tuple[Labels, Vectors]:
        """Return all vectors of a space in one snapshot: labels int64 [n], increasing, and float32
        [n, dim].

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
        """
        ...

    def vector(self, label: int, space: str) -> Vectors | None:
        """Return an item's vector in a space, float32 [1, dim]; None if it has none there.

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
        """
        ...

    def stored_vectors(self, labels: Labels, space: str) -> StoredVectors:
        """Return the rows that a space has for some items, by increasing label.

        Args:
            labels: int64 [n]; items without a vector in the space are skipped.
            space: Id of the space.

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
        """
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
        """Group the items by the value of a metadata key.

        Args:
            key: The key; items without it are in no group.
            space: Id of the space of the groups' labels.

        Returns:
            The groups, by kind and value.

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Return all small JSON values that are stored with the gallery."""
        ...

    def state_set(self, values: Mapping[str, Any]) -> None:
        """Store small JSON values in one transaction; None removes a value."""
        ...

    def left_behind_items(self, space: str, limit: int = 1000) -> list[StoredItem]:
        """Return the first items without a vector in a space, by increasing label.

        Args:
            space: The space.
            limit: Largest number of items.

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
        """
        ...

    def flip(
        self, space: str, *, leave_behind: bool = False, state: Mapping[str, Any] | None = None
    ) -> None:
        """Make a space the active one; the active one becomes previous.

        Args:
            space: Id of the space.
            leave_behind: Allow items without a vector in it; searches no longer find them.
            state: JSON values to store in the same transaction; None as a value removes it.

        Raises:
            PreconditionError: Items lack a vector there, and `leave_behind` is False.
            IncompatibleSpaceError: The gallery does not have the space.
        """
        ...

    def rollback(
        self, *, leave_behind: bool = False, state: Mapping[str, Any] | None = None
    ) -> str:
        """Return to the previous space; the present one becomes staging and keeps its vectors.

        Args:
            leave_behind: Allow items without a vector in the earlier space; searches no longer find
                them.
            state: JSON values to store in the same transaction; None as a value removes it.

        Returns:
            The id of the active space.

        Raises:
            NotFoundError: No previous space.
            PreconditionError: Items lack a vector there, and `leave_behind` is False.
        """
        ...

    def drop(self, space: str) -> None:
        """Remove a space with all its vectors.

        Raises:
            PreconditionError: It is the active one.
            IncompatibleSpaceError: The gallery does not have it.
        """
        ...

    def upgraded(self, space: str, ids: Sequence[str]) -> list[StoredItem]:
        """Return the items of `ids` whose vector in a space was migrated.

        Args:
            space: Id of the space.
            ids: Ids of items; ids that do not exist are skipped.

        Returns:
            Items by falling uncertainty; an unknown uncertainty comes last.

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
        """
        ...

    def sample(self, space: str, other: str, count: int) -> tuple[Labels, Vectors, Vectors]:
        """Draw about `count` items that have a vector in both spaces, at random.

        Args:
            space: Id of the first space.
            other: Id of the second space.
            count: Largest number of items.

        Returns:
            Labels int64 [n], increasing, and their vectors float32 [n, dim] in each space.

        Raises:
            IncompatibleSpaceError: The gallery lacks a space.
        """
        ...

    def estimate(self, runner: Runner, target: SpaceSpec) -> Estimate:
        """Estimate the cost of an upgrade from the active space on a few items; change nothing in
        the gallery.

        Args:
            runner: The transform.
            target: The space to write; it need not exist.

        Raises:
            InvalidInputError: The runner's output is invalid.
        """
        ...
