"""Implement GalleryStore for a gallery in one SQLite file, and Searcher for one of its spaces."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from nobackfill.gallery.filters import Filter, StoreFilter
from nobackfill.gallery.search.index import Labels, Neighbours
from nobackfill.gallery.spec import Metadata, Origin, SpaceSpec
from nobackfill.gallery.sqlite_file import (
    StoredItem,
    StoredVectors,
    StoredWindow,
    find_space,
    items_page,
    stored_vectors,
)
from nobackfill.gallery.store import Store, labels_of
from nobackfill.vectors import Vectors

if TYPE_CHECKING:
    from nobackfill.gallery.filters import Matches
    from nobackfill.gallery.listing import ListingPosition, MetadataGroup
    from nobackfill.gallery.search.view import LiveView
    from nobackfill.gallery.staging import Estimate, RemainingVectors, Runner


class SqliteGallery(Store):
    """Store a gallery in one SQLite file.

    Methods without a docstring are those of GalleryStore. All methods raise NotFoundError after
    `close`, VerificationError if the file is damaged, and BusyError or CannotWriteError as Store
    does. `estimate_upgrade` writes a temporary file next to the gallery's folder.
    """

    def labels_of(self, ids: Sequence[str]) -> Labels:
        """Return the labels of the ids that exist, int64, increasing; unknown ids are skipped, and
        one that is given twice counts once.

        Raises:
            BusyError, CannotWriteError, VerificationError, NotFoundError: The file is locked,
                cannot be opened or written, is damaged, or the gallery was closed.
        """
        with self.read_snapshot() as connection:
            return labels_of(connection, ids)

    def delete_passing(self, labels: Labels, condition: Filter | None) -> int:
        """Delete items that exist and pass the filter now, in one transaction; others are skipped.

        Their bytes are removed from file and log; if a reader prevents that, the next change tries
        again. Listeners are called.

        Args:
            labels: int64 [n], the items; n may be 0.
            condition: The filter, which `check_filter` has accepted; None deletes all of `labels`.

        Returns:
            Number of deleted items.

        Raises:
            BusyError, CannotWriteError, VerificationError, NotFoundError: The file is locked,
                cannot be opened or written, is damaged, or the gallery was closed.
            Exception: An error of a listener; the change stays committed, and later listeners are
                not called.
        """
        from nobackfill.gallery import edits

        return edits.delete_in_file(self, edits.Selection(labels, condition))

    def change_some_metadata(
        self,
        labels: Labels,
        condition: Filter | None,
        values_to_set: Metadata,
        keys_to_remove: Collection[str],
    ) -> int:
        """Change the metadata of items that exist and pass the filter now, in one transaction.

        Keys of `keys_to_remove` are removed first, then `values_to_set` are set. Other keys stay.

        Args:
            labels: int64 [n], the items; n may be 0.
            condition: The filter, which `check_filter` has accepted; None changes all of `labels`.
            values_to_set: Values to set, by key.
            keys_to_remove: Keys to remove; unknown ones are ignored.

        Returns:
            Number of these items, whether their metadata differs or not.

        Raises:
            InvalidInputError: Invalid `values_to_set`, or the metadata of an item would become too
                large; nothing is changed. Without items that pass, `values_to_set` are not
                checked.
            AttributeError: A key of `values_to_set` is no text; nothing is changed.
            BusyError, CannotWriteError, VerificationError, NotFoundError: The file is locked,
                cannot be opened or written, is damaged, or the gallery was closed.
            Exception: An error of a listener; the change stays committed, and later listeners are
                not called.
        """
        from nobackfill.gallery import edits

        return edits.change_metadata_in_file(
            self, edits.Selection(labels, condition), values_to_set, keys_to_remove
        )

    def list_page(
        self, space: str, limit: int, *, start_after: "ListingPosition | None" = None,
        matches: "Matches | None" = None, least_certain: bool = False,
    ) -> "tuple[list[tuple[StoredItem, ListingPosition]], ListingPosition | None]":  # fmt: skip
        """Return a page of items with their positions, by label or the least certain first.

        Each page is read as the gallery is then.

        Args:
            space: Origin and uncertainty of the items are those of this space.
            limit: Largest number of items, at least 1.
            start_after: The position that the previous page returned, in the same order; None for
                the first page.
            matches: Only items that passed a filter; None for all.
            least_certain: Only items with an uncertainty in the space, the largest first, then by
                label.

        Returns:
            At most `limit` items, and the position for the next page; None at the end. A page may
            be empty, or shorter than `limit`, although another one follows.

        Raises:
            InvalidInputError: `limit` is below 1.
            IncompatibleSpaceError: The gallery does not have the space.
            BusyError, CannotWriteError, VerificationError, NotFoundError: The file is locked,
                cannot be opened or written, is damaged, or the gallery was closed.
        """
        from nobackfill.gallery import listing

        labels = None if matches is None else matches.labels()
        return listing.read_items_page(
            self, space, limit, start_after=start_after, matches=labels, least_certain=least_certain
        )

    def stored_vectors(self, labels: Labels, space: str) -> StoredVectors:
        """Return the rows that a space has for some items, by increasing label; others are skipped.

        Args:
            labels: int64 [n], distinct, in any order.
            space: Id of the space.

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
            BusyError, CannotWriteError, VerificationError, NotFoundError: The file is locked,
                cannot be opened or written, is damaged, or the gallery was closed.
        """
        with self.read_snapshot() as connection:
            return stored_vectors(connection, labels, find_space(connection, space))

    def iterate_snapshot(
        self, spaces: Sequence[str], items_per_window: int
    ) -> Iterator[StoredWindow]:
        """Yield every item by increasing label in windows of `items_per_window`, with its vectors
        in `spaces`.

        All windows are of one snapshot, which is held until the iterator ends or is closed.
        Use it on one thread, and do not write there meanwhile: a file with only one connection
        makes writers wait.

        Args:
            spaces: Ids of the spaces; may be empty.
            items_per_window: Largest number of items of a window, at least 1.

        Yields:
            Windows, none for an empty gallery; `vectors` has the order of `spaces`.

        Raises:
            IncompatibleSpaceError: The gallery lacks a space; raised at the first window.
            BusyError, CannotWriteError, VerificationError, NotFoundError: The file is locked,
                cannot be opened or written, is damaged, or the gallery was closed.
        """
        with self.read_snapshot() as connection:
            infos = [find_space(connection, space) for space in spaces]
            last = 0
            while items := items_page(connection, last, items_per_window):
                last = items[-1].label
                labels = np.array([item.label for item in items], np.int64)
                yield StoredWindow(
                    items, [stored_vectors(connection, labels, info) for info in infos]
                )

    def group_by_value(self, key: str, space: str) -> "list[MetadataGroup]":
        """Group the items by the value of a metadata key; items without it are in no group.

        Args:
            key: The key. An item whose value is a list is in the group of each of its texts.
            space: Id of the space of the groups' labels; items without a
                vector there are counted, but have no label.

        Returns:
            The groups: flags, then numbers, then texts, each by increasing value; empty if no item
            has the key.

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
            BusyError, CannotWriteError, VerificationError, NotFoundError: The file is locked,
                cannot be opened or written, is damaged, or the gallery was closed.
        """
        from nobackfill.gallery.listing import group_items_by_value

        return group_items_by_value(self, key, space)

    def add_staging_space(self, spec: SpaceSpec) -> None:
        """Add a staging space, unless the gallery has it already, in any state.

        The values of `spec` are not checked: an impossible one, such as a dimension of 0, makes
        later calls raise DamagedError.

        Raises:
            InvalidInputError: It exists with another release, dimension, metric, norm or side
                space.
            BusyError, CannotWriteError, VerificationError, NotFoundError: The file is locked,
                cannot be opened or written, is damaged, or the gallery was closed.
            Exception: An error of a listener; the change stays committed, and later listeners are
                not called.
        """
        from nobackfill.gallery import staging

        staging.add_staging_space(self, spec)

    def windows_of_missing_vectors(
        self, source: str, target: SpaceSpec, needs_side: bool
    ) -> "RemainingVectors":
        """Return the vectors that `source` has and `target` lacks, to be read in chunks.

        Nothing is read but the list of spaces. If the target is added later, nothing counts as
        migrated.

        Args:
            source: Id of the space to read.
            target: The space to write; while the gallery lacks it, every vector of the source
                counts.
            needs_side: Leave out items without side-information; otherwise they come last.

        Raises:
            IncompatibleSpaceError: The gallery does not have the source.
            BusyError, CannotWriteError, VerificationError, NotFoundError: The file is locked,
                cannot be opened or written, is damaged, or the gallery was closed.
        """
        from nobackfill.gallery.staging import RemainingVectors

        return RemainingVectors(self, source, target, needs_side)

    def write_vectors(
        self, space: str, labels: Labels, embedding: ArrayLike, *, side: ArrayLike | None = None,
        uncertainty: ArrayLike | None = None, origin: Origin = "upgraded", replace: bool = False,
    ) -> Labels:  # fmt: skip
        """Write vectors of existing items into a space, in one durable transaction.

        Deleted items are skipped, and items that have a vector there, unless `replace` is set.

        Args:
            space: Id of the space.
            labels: int64 [n], distinct, in any order.
            embedding: float32 [n, dim], in the order of `labels`.
            side: Side-information, float32 [n, side_dim]; None stores none.
            uncertainty: float32 [n]; None stores none.
            origin: How the vectors were made.
            replace: Replace existing vectors, for re-embedding.

        Returns:
            The labels written, int64, increasing; empty if none was.

        Raises:
            InvalidInputError: Invalid vectors or another number of rows; nothing is written.
            IncompatibleSpaceError: The gallery does not have the space.
            BusyError, CannotWriteError, VerificationError, NotFoundError: The file is locked,
                cannot be opened or written, is damaged, or the gallery was closed.
            ValueError: Nested lists of unequal lengths.
            IndexError: `uncertainty` is a single number.
            Exception: An error of a listener; the change stays committed, and later listeners are
                not called.
        """
        from nobackfill.gallery import staging

        return staging.write_vectors(
            self, space, labels, embedding, side=side, uncertainty=uncertainty, origin=origin,
            replace=replace,
        )  # fmt: skip

    def count_items_without_vector(self, space: str) -> int:
        """Return the number of items without a vector in a space.

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
            BusyError, CannotWriteError, VerificationError, NotFoundError: The file is locked,
                cannot be opened or written, is damaged, or the gallery was closed.
        """
        from nobackfill.gallery import staging

        return staging.count_items_without_vector(self, space)

    def items_without_vector(self, space: str, limit: int = 1000) -> list[StoredItem]:
        """Return the first `limit` items without a vector in a space, by increasing label.

        Args:
            space: Id of the space.
            limit: Largest number of items; 0 gives none, a negative number all.

        Returns:
            Items without origin and uncertainty; empty if all have a vector.

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
            BusyError, CannotWriteError, VerificationError, NotFoundError: The file is locked,
                cannot be opened or written, is damaged, or the gallery was closed.
        """
        from nobackfill.gallery import staging

        return staging.items_without_vector(self, space, limit)

    def flip(
        self, space: str, *, leave_behind: bool = False, state: Mapping[str, Any] | None = None
    ) -> None:
        """Make a space the active one, in one transaction; the active one becomes previous.

        If the space is active already, only `state` is stored. Vectors of all spaces stay.
        Listeners are called.

        Args:
            space: Id of the space.
            leave_behind: Allow items without a vector in it; searches no longer find them.
            state: JSON values to store in the same transaction; None as a value removes it.

        Raises:
            PreconditionError: Items lack a vector there, and `leave_behind` is False.
            IncompatibleSpaceError: The gallery does not have the space.
            BusyError, CannotWriteError, VerificationError, NotFoundError: The file is locked,
                cannot be opened or written, is damaged, or the gallery was closed.
            TypeError, ValueError: A value of `state` cannot be written as JSON, or contains NaN,
                infinity or half a surrogate pair; nothing is changed.
            Exception: An error of a listener; the change stays committed, and later listeners are
                not called.
        """
        from nobackfill.gallery import staging

        staging.flip(self, space, leave_behind=leave_behind, state=state)

    def rollback(
        self, *, leave_behind: bool = False, state: Mapping[str, Any] | None = None
    ) -> str:
        """Return to the previous space; the present one becomes staging and keeps its vectors.

        If there are several previous spaces, the one that was active last becomes active.

        Args:
            leave_behind: Allow items without a vector in the earlier space; searches no longer find
                them.
            state: JSON values to store in the same transaction; None as a value removes it.

        Returns:
            The id of the space that is active then.

        Raises:
            NotFoundError: The gallery has no previous space, or was closed.
            PreconditionError: Items lack a vector there, and `leave_behind` is False.
            BusyError, CannotWriteError, VerificationError: The file is locked, cannot be opened or
                written, or is damaged.
            TypeError, ValueError: A value of `state` cannot be written as JSON, or contains NaN,
                infinity or half a surrogate pair; nothing is changed.
            Exception: An error of a listener; the change stays committed, and later listeners are
                not called.
        """
        from nobackfill.gallery import staging

        return staging.rollback(self, leave_behind=leave_behind, state=state)

    def drop_space(self, space: str) -> None:
        """Remove a space with all its vectors, and scrub them from the file.

        If a reader prevents the scrub, the next change tries again. An upgrade that is filling the
        space fails.

        Listeners are called. If one of them or the scrub fails, the space stays removed. After
        an error of a listener its bytes are not scrubbed: call `scrub`.

        Raises:
            PreconditionError: The space is the active one.
            IncompatibleSpaceError: The gallery does not have it.
            BusyError, CannotWriteError, VerificationError, NotFoundError: The file is locked,
                cannot be opened or written, is damaged, or the gallery was closed.
            Exception: An error of a listener.
        """
        from nobackfill.gallery import staging

        staging.drop_space(self, space)

    def find_migrated(self, space: str, ids: Sequence[str]) -> list[StoredItem]:
        """Return the items of `ids` whose vector in a space was migrated, by falling uncertainty.

        Unknown ids are skipped, and an id that is given twice counts once; an unknown uncertainty
        comes last. Equal ones are by label. Empty if none was migrated.

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
            BusyError, CannotWriteError, VerificationError, NotFoundError: The file is locked,
                cannot be opened or written, is damaged, or the gallery was closed.
        """
        from nobackfill.gallery import staging

        return staging.find_migrated(self, space, ids)

    def sample_pairs(
        self, space: str, other_space: str, count: int
    ) -> tuple[Labels, Vectors, Vectors]:
        """Draw about `count` items that have a vector in both spaces, at random.

        Args:
            space: Id of the first space.
            other_space: Id of the second space.
            count: Largest number of items, at least 1.

        Returns:
            Labels int64 [n], increasing, and their vectors float32 [n, dim] in each space; n may be
            less than `count`, and 0. The draw is not reproducible.

        Raises:
            IncompatibleSpaceError: The gallery lacks a space.
            BusyError, CannotWriteError, VerificationError, NotFoundError: The file is locked,
                cannot be opened or written, is damaged, or the gallery was closed.
            ValueError: `count` is negative, and the second space has vectors.
        """
        from nobackfill.gallery import staging

        return staging.sample_pairs(self, space, other_space, count)

    def estimate_upgrade(self, runner: "Runner", target: SpaceSpec) -> "Estimate":
        """Estimate the cost of an upgrade from the active space; change nothing in the gallery.

        Two chunks of items are migrated into a temporary file next to the gallery's folder.

        Args:
            runner: The transform.
            target: The space to write; it need not exist.

        Returns:
            The cost; zeros, except `left_behind_count`, if nothing is to be migrated.

        Raises:
            InvalidInputError: The runner's output is invalid.
            VerificationError: The runner makes no usable vectors (UnusableOutputError), or the file
                is damaged.
            CannotWriteError: The temporary file cannot be written.
            BusyError, NotFoundError: The file is locked, or the gallery was closed.
            OSError: The folder above the gallery's folder cannot be written.
            sqlite3.Error: SQLite cannot create the temporary file, such as on a full disk.
            Exception: Any other error of the runner.
        """
        from nobackfill.gallery.staging import estimate_upgrade

        # Beside the gallery's folder: the next start removes what a kill leaves there.
        return estimate_upgrade(self, runner, target, self.path.parent.parent)


class SqliteSearcher:
    """A search in one space of a gallery file, with filters; it implements Searcher."""

    def __init__(self, view: "LiveView", filtering: StoreFilter) -> None:
        self._view = view
        self._filtering = filtering

    def search(
        self, queries: Vectors, k: int, condition: Filter | None = None, ef: int = 0
    ) -> Neighbours:
        """Find the nearest items to each query in the current snapshot.

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
            TypeError: The condition is no filter, a value of a OneOf is None or a list, or a bound
                of a Range is no number.
            VerificationError: The gallery's file is damaged.
            BusyError: Another process has the file to itself, or changed it during a read without a
                lock.
            CannotWriteError: The file cannot be opened, or the disk fails.
            NotFoundError: The gallery was closed, or its file is gone. Without a filter, the file
                is not read, and none of these four is raised.
        """
        label_filter = None if condition is None else self._filtering.find_matches(condition).mask
        return self._view.snapshot().search(queries, k, label_filter, ef)
