"""Define the store of a gallery for every engine: SQLite in one file, or PostgreSQL.

Each method that changes something is one durable transaction. A label is never reused. While a
space is staged, puts write to both spaces. An upgrade works in windows, which may be repeated on
any machine. In addition to their own errors, all methods raise BusyError (try again),
UnavailableError (the engine does not answer), CannotWriteError, and NotFoundError after `close`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from nobackfill.gallery.edits import EditableStore
from nobackfill.gallery.filters import Filter, Matches
from nobackfill.gallery.listing import ListingPosition, MetadataGroup
from nobackfill.gallery.search.index import Labels, Neighbours
from nobackfill.gallery.spec import Metadata, SpaceInfo, SpaceSpec
from nobackfill.gallery.sqlite_file import StoredItem, StoredVectors, StoredWindow
from nobackfill.gallery.staging import Estimate, Runner, UpgradableStore
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
            k: Number of items for each query, at least 1.
            condition: Only items that pass this filter; None for all.
            ef: Minimum number of candidates of a graph, 0 for its default; index.EXACT_EF for an
                exact search.

        Returns:
            Neighbours [q, k], nearest first, equal distances by label; padded with label -1 and
            infinity where fewer items pass.

        Raises:
            InvalidInputError: Queries of another shape, not finite, or not of norm 1 where the
                space demands it. A filter with too many tests, values or levels, a NaN, or an
                integer of more than 64 bits.
            TypeError: The condition is no filter.
            BusyError, UnavailableError, CannotWriteError, VerificationError, NotFoundError: The
                store is locked, does not answer, cannot be opened, is damaged, or was closed.
        """


class GalleryStore(UpgradableStore, EditableStore, Protocol):
    """The items, vectors and spaces of one gallery, whatever engine stores them.

    In addition to their own errors, all methods raise BusyError (another writer; try again),
    UnavailableError (the engine does not answer), CannotWriteError (the disk), VerificationError
    (stored data is damaged), ConfigurationError (a database refuses the statement, as without
    rights), and NotFoundError after `close`.
    """

    def close(self) -> None:
        """Close files and connections for good; later calls of other methods raise NotFoundError.

        Waits for running calls. A second `close` does nothing.

        Listeners stay subscribed, but are no longer called.

        Raises:
            BusyError: A call does not end within a minute; nothing is closed.
        """

    def reopen(self) -> None:
        """Let a closed store be used again; files and connections are opened at the next call.

        The next call may raise each error of opening a gallery. An open store stays as it is.
        """

    def subscribe(self, listener: Callable[[Change], None]) -> None:
        """Call `listener` with the change after each commit of this process, in order.

        Commits of other processes are not reported. A listener that is subscribed twice is called
        twice.

        It runs in the writer's thread, once the change is durable. Its error reaches the writer.
        """

    def unsubscribe(self, listener: Callable[[Change], None]) -> None:
        """Stop calling a listener; one of two equal subscriptions stays.

        It may wait for listeners that run in another thread, or let a call under way end after it
        returns, so a listener must not call it.

        Raises:
            ValueError: It is not subscribed.
        """

    def spaces(self) -> list[SpaceInfo]:
        """Return all spaces, oldest first; exactly one is active.

        Raises:
            BusyError, UnavailableError, CannotWriteError, VerificationError, NotFoundError: The
                store is locked, does not answer, cannot be written, is damaged, or was closed.
        """

    def space(self, space: str) -> SpaceInfo:
        """Return a space of the gallery by its id.

        Raises:
            IncompatibleSpaceError: The gallery does not have it.
            BusyError, UnavailableError, CannotWriteError, VerificationError, NotFoundError: The
                store is locked, does not answer, cannot be written, is damaged, or was closed.
        """

    def put(
        self, ids: Sequence[str], vectors: Sequence[NewVectors], *,
        digests: Sequence[str | None] | None = None,
        metadata: Sequence[Metadata | None] | None = None,
    ) -> PutResult:  # fmt: skip
        """Store items durably, all or none.

        An item with the same digest as the stored one keeps its label and vectors; vectors of
        spaces that it lacks are added. Any other existing item is replaced and gets a new label.

        Args:
            ids: n different ids of 1 to 256 characters; n may be 0.
            vectors: For each space, at most once, vectors of all items, in order. Spaces that are
                not listed get none.
            digests: n digests of the items' content; None for none, which replaces every existing
                item.
            metadata: For each item, values by key. {} removes an unchanged item's metadata, None
                leaves it. A replaced item has only the new metadata.

        Returns:
            The label of each item, and whether its content is new or was replaced.

        Raises:
            InvalidInputError: Invalid vectors, ids or metadata, lists of another length, or an id
                twice; nothing is stored.
            IncompatibleSpaceError: The gallery lacks a space.
            BusyError, UnavailableError, CannotWriteError, VerificationError, NotFoundError: The
                store is locked, does not answer, cannot be written, is damaged, or was closed.
            ValueError: Nested lists of unequal lengths.
            TypeError, AttributeError: An id or a key of metadata is no text, or metadata is no
                dict.
            Exception: An error of a listener; the items stay stored.
        """

    def delete(self, ids: Sequence[str]) -> int:
        """Delete items from every space in one transaction; return how many existed.

        Unknown ids are skipped. Their bytes are removed from the files of the store as soon as no
        reader prevents it.

        Raises:
            BusyError, UnavailableError, CannotWriteError, VerificationError, NotFoundError: The
                store is locked, does not answer, cannot be written, is damaged, or was closed.
            Exception: An error of a listener; the items stay deleted.
        """

    def get(self, item_id: str) -> StoredItem | None:
        """Return an item by its id, without origin and uncertainty; None if it does not exist.

        Raises:
            BusyError, UnavailableError, CannotWriteError, VerificationError, NotFoundError: The
                store is locked, does not answer, cannot be written, is damaged, or was closed.
        """

    def list_page(
        self,
        space: str,
        limit: int,
        *,
        start_after: ListingPosition | None = None,
        matches: Matches | None = None,
        least_certain: bool = False,
    ) -> tuple[list[tuple[StoredItem, ListingPosition]], ListingPosition | None]:
        """Return a page of items.

        Args:
            space: Origin and uncertainty of the items are those of this space.
            limit: Largest number of items, at least 1.
            start_after: The position that the previous page returned, in the same order; None for
                the first page.
            matches: Only items that passed a filter; None for all.
            least_certain: Only items with an uncertainty in the space, the largest first, then by
                label. Otherwise by label.

        Returns:
            The items with their positions, and the position for the next page; None at the end. A
            page may be empty, or shorter than `limit`, although another one follows.

        Raises:
            InvalidInputError: `limit` is below 1.
            IncompatibleSpaceError: The gallery does not have the space.
            BusyError, UnavailableError, CannotWriteError, VerificationError, NotFoundError: The
                store is locked, does not answer, cannot be written, is damaged, or was closed.
        """

    def load_vectors(self, space: str) -> tuple[Labels, Vectors]:
        """Return all vectors of a space in one snapshot: labels int64 [n], increasing, and float32
        [n, dim].

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
            BusyError, UnavailableError, CannotWriteError, VerificationError, NotFoundError: The
                store is locked, does not answer, cannot be written, is damaged, or was closed.
            ConfigurationError: A database refuses the statement, as without rights.
        """

    def vector(self, label: int, space: str) -> Vectors | None:
        """Return an item's vector in a space, float32 [1, dim]; None if it has none there, or does
        not exist.

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
            BusyError, UnavailableError, CannotWriteError, VerificationError, NotFoundError: The
                store is locked, does not answer, cannot be written, is damaged, or was closed.
        """

    def stored_vectors(self, labels: Labels, space: str) -> StoredVectors:
        """Return the rows that a space has for some items, by increasing label.

        Args:
            labels: int64 [n], distinct, in any order; items without a vector in the space are
                skipped.
            space: Id of the space.

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
            BusyError, UnavailableError, CannotWriteError, VerificationError, NotFoundError: The
                store is locked, does not answer, cannot be written, is damaged, or was closed.
        """

    def iterate_snapshot(
        self, spaces: Sequence[str], items_per_window: int
    ) -> Iterator[StoredWindow]:
        """Yield every item by increasing label, with its vectors in some spaces, from one snapshot.

        The snapshot is held until the iterator ends or is closed.

        Args:
            spaces: Ids of the spaces.
            items_per_window: Items of a window, at least 1.

        Yields:
            Windows of at most `items_per_window` items; none for an empty gallery. `vectors` has
            the order of `spaces`.

        Raises:
            IncompatibleSpaceError: The gallery lacks a space; raised at the first window.
            BusyError, UnavailableError, CannotWriteError, VerificationError, NotFoundError: The
                store is locked, does not answer, cannot be written, is damaged, or was closed.
        """

    def group_by_value(self, key: str, space: str) -> list[MetadataGroup]:
        """Group the items by the value of a metadata key.

        Args:
            key: The key; items without it are in no group. An item whose value is a list is in the
                group of each of its texts.
            space: Id of the space of the groups' labels.

        Returns:
            The groups: flags, then numbers, then texts, each by increasing value; empty if no item
            has the key.

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
            BusyError, UnavailableError, CannotWriteError, VerificationError, NotFoundError: The
                store is locked, does not answer, cannot be written, is damaged, or was closed.
        """

    def state(self) -> dict[str, Any]:
        """Return all small JSON values that are stored with the gallery.

        Without any, the mapping is empty.

        Raises:
            BusyError, UnavailableError, CannotWriteError, VerificationError, NotFoundError: The
                store is locked, does not answer, cannot be written, is damaged, or was closed.
        """

    def update_state(self, values: Mapping[str, Any]) -> None:
        """Store small JSON values in one transaction; None removes a value.

        Other keys stay. Listeners are not called.

        Raises:
            TypeError: A value cannot be written as JSON.
            ValueError: A value contains NaN or infinity.
            BusyError, UnavailableError, CannotWriteError, VerificationError, NotFoundError: The
                store is locked, does not answer, cannot be written, is damaged, or was closed.
        """

    def items_without_vector(self, space: str, limit: int = 1000) -> list[StoredItem]:
        """Return the first items without a vector in a space, by increasing label.

        Args:
            space: The space.
            limit: Largest number of items, at least 0.

        Returns:
            Items without origin and uncertainty; empty if all have a vector.

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
            BusyError, UnavailableError, CannotWriteError, VerificationError, NotFoundError: The
                store is locked, does not answer, cannot be written, is damaged, or was closed.
        """

    def flip(
        self, space: str, *, leave_behind: bool = False, state: Mapping[str, Any] | None = None
    ) -> None:
        """Make a space the active one; the active one becomes previous. If the space is active
        already, only `state` is stored.

        Args:
            space: Id of the space.
            leave_behind: Allow items without a vector in it; searches no longer find them.
            state: JSON values to store in the same transaction; None as a value removes it.

        Raises:
            PreconditionError: Items lack a vector there, and `leave_behind` is False.
            IncompatibleSpaceError: The gallery does not have the space.
            BusyError, UnavailableError, CannotWriteError, VerificationError, NotFoundError: The
                store is locked, does not answer, cannot be written, is damaged, or was closed.
            TypeError, ValueError: A value of `state` cannot be written as JSON, or contains NaN or
                infinity; nothing is changed.
            Exception: An error of a listener; the change stays committed.
        """

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
            NotFoundError: There is no previous space, because the gallery was never upgraded or the
                space was dropped.
            PreconditionError: Items lack a vector there, and `leave_behind` is False.
            BusyError, UnavailableError, CannotWriteError, VerificationError, NotFoundError: The
                store is locked, does not answer, cannot be written, is damaged, or was closed.
            TypeError, ValueError: A value of `state` cannot be written as JSON, or contains NaN or
                infinity; nothing is changed.
            Exception: An error of a listener; the change stays committed.
        """

    def drop_space(self, space: str) -> None:
        """Remove a space with all its vectors, also one that an upgrade is filling.

        Raises:
            PreconditionError: It is the active one.
            IncompatibleSpaceError: The gallery does not have it.
            BusyError, UnavailableError, CannotWriteError, VerificationError, NotFoundError: The
                store is locked, does not answer, cannot be written, is damaged, or was closed.
            Exception: An error of a listener; the space stays removed.
        """

    def find_migrated(self, space: str, ids: Sequence[str]) -> list[StoredItem]:
        """Return the items of `ids` whose vector in a space was migrated.

        Args:
            space: Id of the space.
            ids: Ids of items; ids that do not exist are skipped.

        Returns:
            Items by falling uncertainty; an unknown uncertainty comes last. Empty if none was
            migrated.

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
            BusyError, UnavailableError, CannotWriteError, VerificationError, NotFoundError: The
                store is locked, does not answer, cannot be written, is damaged, or was closed.
        """

    def sample_pairs(
        self, space: str, other_space: str, count: int
    ) -> tuple[Labels, Vectors, Vectors]:
        """Draw about `count` items that have a vector in both spaces, at random.

        Args:
            space: Id of the first space.
            other_space: Id of the second space.
            count: Largest number of items, at least 1.

        Returns:
            Labels int64 [n], increasing, and their vectors float32 [n, dim] in each space; n is 0
            if no item has both. The draw differs at each call.

        Raises:
            IncompatibleSpaceError: The gallery lacks a space.
            BusyError, UnavailableError, CannotWriteError, VerificationError, NotFoundError: The
                store is locked, does not answer, cannot be written, is damaged, or was closed.
        """

    def estimate_upgrade(self, runner: Runner, target: SpaceSpec) -> Estimate:
        """Estimate the cost of an upgrade from the active space on a few items; change nothing in
        the gallery.

        Args:
            runner: The transform.
            target: The space to write; it need not exist.

        Returns:
            The cost; zeros, except `left_behind_count`, if nothing is to be migrated.

        Raises:
            InvalidInputError: The runner's output is invalid.
            BusyError, UnavailableError, CannotWriteError, VerificationError, NotFoundError: The
                store is locked, does not answer, cannot be written, is damaged, or was closed.
            UnusableOutputError: As a VerificationError: the runner makes no usable vector for some
                rows.
        """
