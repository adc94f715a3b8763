"""Delete or describe many items, in pieces of one transaction each."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from sqlite3 import Connection
from typing import Protocol

import numpy as np

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.filter_engine import Segment
from nobackfill.gallery.filters import Filter, StoreFilter
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import Metadata
from nobackfill.gallery.sqlite_file import read_items_by_label, set_metadata
from nobackfill.gallery.store import Change, Store, metadata_json

# Items of a transaction; other writers may commit between two.
PIECE_ITEMS = 1000


@dataclass(frozen=True)
class Selection:
    """Items that were chosen at one moment, by their labels.

    Attributes:
        labels: The items.
        condition: Items that no longer pass it are skipped; None for no filter.
    """

    labels: Labels
    condition: Filter | None = None

    def pieces(self) -> Sequence["Selection"]:
        """Split the selection into selections of at most PIECE_ITEMS items; an empty one stays one
        empty piece."""
        cuts = range(PIECE_ITEMS, len(self.labels), PIECE_ITEMS)
        return [Selection(labels, self.condition) for labels in np.split(self.labels, cuts)]

    def read_metadata(self, connection: Connection) -> dict[int, tuple[str, Metadata]]:
        """Return id and metadata, by label, of the items that exist and pass the filter now.

        A label that repeats counts once. Labels of deleted items are skipped. The filter must be
        one that `filters.check_filter` accepts.

        Args:
            connection: The gallery's file.

        Returns:
            Empty if none of the items is left.

        Raises:
            DamagedError: A row is invalid.
            sqlite3.Error: SQLite fails; `Store.read_snapshot` translates it.
        """
        items = [item for item in read_items_by_label(connection, self.labels) if item is not None]
        if self.condition is not None:
            labels = np.array([item.label for item in items], np.int64)
            mask = Segment(labels, [item.metadata for item in items]).passing_mask(self.condition)
            items = [items[row] for row in np.flatnonzero(mask).tolist()]
        return {item.label: (item.id, item.metadata) for item in items}


class EditableStore(Protocol):
    """The operations of a store that these changes need; each is one transaction."""

    def labels_of(self, ids: Sequence[str]) -> Labels:
        """Return the labels of the ids that exist, int64, increasing; others are skipped.

        An id that is given twice counts once.

        Raises:
            BusyError, CannotWriteError, UnavailableError, VerificationError, NotFoundError: The
                store is locked, cannot be opened, does not answer, is damaged, or was closed.
        """

    def delete_passing(self, labels: Labels, condition: Filter | None) -> int:
        """Delete items that exist and pass the filter now; others are skipped.

        Args:
            labels: int64 [n], the items; n may be 0.
            condition: The filter; None deletes all of `labels`.

        Returns:
            Number of deleted items.

        Raises:
            BusyError: Another writer holds the gallery; nothing is deleted, as after each other
                error of the store.
            CannotWriteError: The store cannot be written.
            VerificationError: The gallery is damaged.
            NotFoundError: The gallery was closed or deleted.
            UnavailableError: The database does not answer.
            Exception: An error of a listener; the items stay deleted.
        """

    def change_some_metadata(
        self,
        labels: Labels,
        condition: Filter | None,
        values_to_set: Metadata,
        keys_to_remove: Collection[str],
    ) -> int:
        """Change the metadata of items that exist and pass the filter now; others are skipped.

        Args:
            labels: int64 [n], the items; n may be 0.
            condition: The filter; None changes all of `labels`.
            values_to_set: Values to set, by key, as `metadata_json` accepts them.
            keys_to_remove: Keys to remove first; unknown ones are ignored.

        Returns:
            Number of these items, whether their metadata differs or not.

        Raises:
            InvalidInputError: The metadata of an item would become too large; nothing is changed.
            BusyError: Another writer holds the gallery; nothing is changed, as after each other
                error of the store.
            CannotWriteError: The store cannot be written.
            VerificationError: The gallery is damaged.
            NotFoundError: The gallery was closed or deleted.
            UnavailableError: The database does not answer.
            Exception: An error of a listener; the change stays committed.
        """


def select_ids(store: EditableStore, ids: Sequence[str]) -> Selection:
    """Select the items that have one of these ids; unknown ids are skipped.

    Args:
        store: The gallery.
        ids: The ids; one that is given twice counts once. Without any, the selection is empty.

    Raises:
        BusyError, CannotWriteError, UnavailableError, VerificationError, NotFoundError: The store
            is locked, cannot be opened, does not answer, is damaged, or was closed.
    """
    return Selection(store.labels_of(ids))


def select_matches(filtering: StoreFilter, condition: Filter) -> Selection:
    """Select the items that pass a filter now; a change to them later is checked against it again.

    Args:
        filtering: The gallery's filters.
        condition: The filter.

    Raises:
        InvalidInputError: The filter has too many tests, values or levels, a NaN, or an integer of
            more than 64 bits.
        TypeError: The condition is no filter, a value of a OneOf is None or a list, or a bound of a
            Range is no number.
        BusyError, CannotWriteError, UnavailableError, VerificationError, NotFoundError: The store
            is locked, cannot be opened, does not answer, is damaged, or was closed.
    """
    return Selection(filtering.find_matches(condition).labels(), condition)


def delete_selected(
    store: EditableStore, selection: Selection, after_piece: Callable[[], None] = lambda: None
) -> int:
    """Delete the selected items, in pieces of PIECE_ITEMS items with a transaction each.

    After an error, the pieces before it stay deleted. An empty selection is one empty piece. The
    same call then deletes the others.

    Args:
        store: The gallery.
        selection: The items; those that are gone or no longer pass its filter are skipped.
        after_piece: Called after each piece; its error ends the deletion.

    Returns:
        Number of deleted items.

    Raises:
        BusyError: Another writer holds the gallery.
        CannotWriteError: The disk fails.
        VerificationError: The gallery is damaged.
        NotFoundError: The gallery was closed or deleted.
        UnavailableError: The database does not answer.
        ConfigurationError: The database refuses the statement.
        Exception: An error of a listener of the store, or of `after_piece`; the piece stays
            deleted.
    """
    count = 0
    for piece in selection.pieces():
        count += store.delete_passing(piece.labels, piece.condition)
        after_piece()
    return count


def change_metadata(
    store: EditableStore,
    selection: Selection,
    values: Metadata,
    remove: Collection[str],
    after_piece: Callable[[], None] = lambda: None,
) -> int:
    """Change the metadata of the selected items, in pieces of PIECE_ITEMS items with a transaction
    each.

    After an error, the pieces before it stay changed. Other keys of an item keep their values.

    Args:
        store: The gallery.
        selection: The items; those that are gone or no longer pass its filter are skipped.
        values: Values to set, by key.
        remove: Keys to remove first; unknown ones are ignored, and a key that is also in `values`
            is set.
        after_piece: Called after each piece; its error ends the change.

    Returns:
        Number of these items, whether their metadata differs or not.

    Raises:
        InvalidInputError: Invalid `values`: nothing is changed. Or the metadata of an item would
            become too large: its piece is unchanged.
        AttributeError, TypeError: A key of `values` is no text, or `values` is no dict; nothing is
            changed.
        BusyError: Another writer holds the gallery.
        CannotWriteError: The disk fails.
        VerificationError: The gallery is damaged.
        NotFoundError: The gallery was closed or deleted.
        UnavailableError: The database does not answer.
        ConfigurationError: The database refuses the statement.
        Exception: An error of a listener of the store, or of `after_piece`; the piece stays
            changed.
    """
    metadata_json(values)
    count = 0
    for piece in selection.pieces():
        count += store.change_some_metadata(piece.labels, piece.condition, values, remove)
        after_piece()
    return count


def merge_metadata(
    items: Mapping[int, tuple[str, Metadata]], values: Metadata, remove: Collection[str]
) -> list[tuple[int, str]]:
    """Compute the new metadata of items, as pairs of label and JSON text; nothing is written.

    Args:
        items: Id and metadata of each item, by label. They are not changed.
        values: Values to set, by key.
        remove: Keys to remove first; unknown ones are ignored, and a key that is also in `values`
            is set.

    Returns:
        One pair for each item, in the order of `items`, also where nothing changes.

    Raises:
        InvalidInputError: Invalid `values`, or the metadata of an item would become too large; the
            message names the item. Without items, `values` are not checked.
        AttributeError: A key of `values` is no text.
    """
    texts = []
    for label, (name, metadata) in items.items():
        others = {key: value for key, value in metadata.items() if key not in remove}
        try:
            texts.append((label, metadata_json({**others, **values})))
        except InvalidInputError as error:
            raise InvalidInputError(f"item {json.dumps(name)}: {error}") from error
    return texts


def delete_in_file(store: Store, piece: Selection) -> int:
    """Delete one piece of a selection in a gallery file, in one transaction.

    Listeners of the store get the change.

    Args:
        store: The gallery.
        piece: The items; those that are gone or no longer pass its filter are skipped. Their bytes
            are removed from file and log.

    Returns:
        Number of deleted items.

    Raises:
        BusyError: Another process still writes the gallery after 5 s; nothing is changed.
        CannotWriteError: The disk fails.
        VerificationError: The file is damaged.
        NotFoundError: The gallery was closed, or its file is gone.
        Exception: An error of a listener; the change stays committed, and later listeners are not
            called.
    """
    return store.delete_chosen(
        lambda connection: np.array([*piece.read_metadata(connection)], np.int64)
    )


def change_metadata_in_file(
    store: Store, piece: Selection, values: Metadata, remove: Collection[str]
) -> int:
    """Change the metadata of one piece of a selection in a gallery file, in one transaction.

    Listeners of the store get the change.

    Args:
        store: The gallery.
        piece: The items; those that are gone or no longer pass its filter are skipped.
        values: Values to set, by key.
        remove: Keys to remove first; unknown ones are ignored, and a key that is also in `values`
            is set.

    Returns:
        Number of items that exist and pass the filter.

    Raises:
        InvalidInputError: Invalid `values`, or the metadata of an item would become too large;
            nothing is changed. Without items that pass, `values` are not checked.
        AttributeError: A key of `values` is no text; nothing is changed.
        BusyError: Another process still writes the gallery after 5 s; nothing is changed.
        CannotWriteError: The disk fails.
        VerificationError: The file is damaged.
        NotFoundError: The gallery was closed, or its file is gone.
        Exception: An error of a listener; the change stays committed, and later listeners are not
            called.
    """
    with store.change_transaction() as (connection, changes):
        items = piece.read_metadata(connection)
        set_metadata(connection, merge_metadata(items, values, remove))
        labels = np.array([*items], np.int64)
        changes.append(Change({}, np.empty(0, np.int64), metadata_labels=labels))
    return len(items)
