"""List a gallery's items: pages, groups by metadata, and migrated items."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.search.index import Labels, Mask
from nobackfill.gallery.spec import MetadataValue, Origin
from nobackfill.gallery.sqlite_file import StoredItem, find_space, rows_to_labels, vector_table_name
from nobackfill.gallery.store import Change, Store, is_storable_text

# Rows that are compared with the labels of a filter at a time.
_ROWS = 1000


@dataclass(frozen=True)
class ListingPosition:
    """An item's position in a listing; `uncertainty` is None in the order of labels."""

    label: int
    uncertainty: float | None = None

    def to_token(self) -> str:
        """Return the position as a text that `from_token` parses exactly: `LABEL`, or
        `LABEL:UNCERTAINTY`."""
        return f"{self.label}" if self.uncertainty is None else f"{self.label}:{self.uncertainty!r}"

    @classmethod
    def from_token(cls, token: str, *, least_certain: bool) -> Self:
        """Parse a text of `to_token`.

        Args:
            token: The text. A label from 0 to 2^63 - 1 is accepted, whether it exists or not.
                Any uncertainty is accepted, even nan. Both are parsed as `int` and `float` do.
            least_certain: Whether the listing is ordered by uncertainty.

        Raises:
            InvalidInputError: The text is empty, or no token of a listing in this order.
        """
        label, colon, uncertainty = token.partition(":")
        try:
            if not token.isascii() or bool(colon) is not least_certain:
                raise ValueError(token)
            place = cls(int(label), float(uncertainty) if colon else None)
            if not 0 <= place.label < 2**63:
                raise ValueError(token)
        except ValueError as error:
            raise InvalidInputError(
                "page_token: expected the next_page_token of the previous page, in a request "
                "whose other fields are the same; leave page_token out to begin with the first page"
            ) from error
        return place


def check_page_limit(limit: int) -> None:
    """Raise InvalidInputError unless the largest number of items of a page is at least 1."""
    if limit < 1:
        raise InvalidInputError(
            f"limit of a page: expected at least 1 item, got {limit}; request more"
        )


def read_items_page(
    store: Store,
    space: str,
    limit: int,
    *,
    start_after: ListingPosition | None = None,
    matches: Labels | None = None,
    least_certain: bool = False,
) -> tuple[list[tuple[StoredItem, ListingPosition]], ListingPosition | None]:
    """Return a page of a gallery's items, by increasing label or by falling uncertainty.

    Each page is read as the gallery is then, and items are read after their labels: an item that is
    deleted in between is left out.

    Args:
        store: The gallery.
        space: Origin and uncertainty of the items are those of this space.
        limit: Largest number of items, at least 1.
        start_after: The position that the previous page returned, in the same order; None for the
            first page. Its item need not exist any more.
        matches: Only items with these labels, int64 [n], increasing; None for all.
        least_certain: Only items with an uncertainty in the space, the largest first, then by
            label.

    Returns:
        The items with their positions, and the position for the next page; None at the end. A page
        may be empty, or shorter than `limit`, although another one follows.

    Raises:
        InvalidInputError: `limit` is below 1.
        IncompatibleSpaceError: The gallery does not have the space.
        VerificationError: The gallery's file is damaged.
        BusyError: Another process has the file to itself, or changed it during a read without a
            lock.
        CannotWriteError: The file cannot be opened, or the disk fails.
        NotFoundError: The gallery was closed, or its file is gone.
    """
    check_page_limit(limit)
    if least_certain:
        places = _least_certain(store, space, limit, start_after, matches)
    else:
        places = _by_label(store, limit, 0 if start_after is None else start_after.label, matches)
    items = store.items([place.label for place in places], space)
    existing = [
        (item, place) for item, place in zip(items, places, strict=True) if item is not None
    ]
    return existing, places[-1] if len(places) == limit else None


def _by_label(
    store: Store, limit: int, start_after: int, matches: Labels | None
) -> list[ListingPosition]:
    if matches is not None:
        start = int(np.searchsorted(matches, start_after, "right"))
        labels = matches[start : start + limit]
    else:
        with store.read_snapshot() as connection:
            labels = rows_to_labels(
                connection.execute(
                    "SELECT label FROM items WHERE label > ? ORDER BY label LIMIT ?",
                    (start_after, limit),
                )
            )
    return [ListingPosition(label) for label in labels.tolist()]


def _least_certain(
    store: Store,
    space: str,
    limit: int,
    start_after: ListingPosition | None,
    matches: Labels | None,
) -> list[ListingPosition]:
    places: list[ListingPosition] = []
    # Without a filter the first ones are enough: SQLite then keeps no more while it sorts.
    most = limit if matches is None else -1
    for labels, uncertainties in _uncertain(store, space, start_after, most):
        if matches is None:
            passing = np.ones(len(labels), np.bool_)
        else:
            passing = np.isin(np.array(labels, np.int64), matches, assume_unique=True)
        for row in np.flatnonzero(passing).tolist():
            places.append(ListingPosition(labels[row], uncertainties[row]))
            if len(places) == limit:
                return places
    return places


def _uncertain(
    store: Store, space: str, start_after: ListingPosition | None, most: int
) -> Iterator[tuple[tuple[int, ...], tuple[float, ...]]]:
    last = ListingPosition(0, float("inf")) if start_after is None else start_after
    with store.read_snapshot() as connection:
        table = vector_table_name(find_space(connection, space).table_number)
        rows = connection.execute(
            f"SELECT label, uncertainty FROM {table} WHERE uncertainty IS NOT NULL"
            " AND (uncertainty < :uncertainty OR uncertainty = :uncertainty AND label > :label)"
            " ORDER BY uncertainty DESC, label LIMIT :most",
            {"uncertainty": last.uncertainty, "label": last.label, "most": most},
        )
        while chunk := rows.fetchmany(_ROWS):
            labels, uncertainties = zip(*chunk, strict=True)
            yield labels, uncertainties


@dataclass(frozen=True)
class MetadataGroup:
    """The items with one value of a metadata key.

    Attributes:
        value: The value.
        item_count: Number of items.
        labels: int64, increasing: the items that have a vector in the space.
        reembedded_count: Number of items whose vector was re-embedded.
    """

    value: MetadataValue
    item_count: int
    labels: Labels
    reembedded_count: int


def group_items_by_value(store: Store, key: str, space: str) -> list[MetadataGroup]:
    """Group the items by the value of a metadata key.

    An item whose value is a list is in the group of each of its texts. 1 and 1.0 are one value;
    true and 1 are two.

    Args:
        store: The gallery.
        key: The key; items without it are in no group.
        space: Id of the space of the groups' labels; items without a vector there are counted, but
            have no label.

    Returns:
        The groups: flags first, then numbers, then texts, each by increasing value. Empty if no
        item has the key.

    Raises:
        IncompatibleSpaceError: The gallery does not have the space.
        VerificationError: The gallery's file is damaged.
        BusyError: Another process has the file to itself, or changed it during a read without a
            lock.
        CannotWriteError: The file cannot be opened, or the disk fails.
        NotFoundError: The gallery was closed, or its file is gone.
    """
    with store.read_snapshot() as connection:
        table = vector_table_name(find_space(connection, space).table_number)
        if not is_storable_text(key):
            # No item can have such a key, and no statement can contain it.
            return []
        rows = connection.execute(
            f"SELECT a.kind, a.value, v.label, v.origin FROM attributes a LEFT JOIN {table} v"
            " ON v.label = a.label WHERE a.key = ? ORDER BY a.kind, a.value, a.label",
            (key,),
        ).fetchall()
    return [
        build_metadata_group(kind, value, [row[2:] for row in members])
        for (kind, value), members in groupby(rows, key=lambda row: row[:2])
    ]


def build_metadata_group(
    value_type: str, value: Any, members: list[tuple[int | None, Origin | None]]
) -> MetadataGroup:
    """Build a group of the items that share a metadata value.

    Args:
        value_type: text, number or flag, as in the table of attributes.
        value: The value; 0 or 1 for a flag.
        members: Label and origin of each item's vector in the space; None where it has none. Labels
            increase; without members, the group is empty.
    """
    labels = [label for label, _ in members if label is not None]
    re_embedded = sum(origin == "re-embedded" for _, origin in members)
    value = bool(value) if value_type == "flag" else value
    return MetadataGroup(value, len(members), np.array(labels, np.int64), re_embedded)


# The migrated items of a space, in memory: a byte for each label. The other vectors were made by
# the space's own model.


def read_migrated_labels(store: Store, space: str) -> Labels:
    """Return the labels of the migrated vectors of a space, int64, increasing.

    Native, direct and re-embedded vectors are not migrated.

    Raises:
        IncompatibleSpaceError: The gallery does not have the space.
        BusyError: Another process has the file to itself, or changed it during a read without a
            lock.
        VerificationError: The gallery's file is damaged.
        NotFoundError: The gallery was closed, or its file is gone.
        CannotWriteError: The file cannot be opened, or the disk fails.
    """
    with store.read_snapshot() as connection:
        table = vector_table_name(find_space(connection, space).table_number)
        rows = connection.execute(
            f"SELECT label FROM {table} WHERE origin = 'upgraded' ORDER BY label"
        )
        return rows_to_labels(rows)


class MigratedItems:
    """The migrated items of a space, kept up to date from `load` on; usable from several
    threads."""

    def __init__(self, store: Store, space: str) -> None:
        """Follow the store's commits from now on; nothing is read before `load`.

        Args:
            store: The gallery.
            space: Id of the space; `load` checks it. Call `close` to stop following.
        """
        self._store, self._space = store, space
        self._lock = threading.Lock()
        self._carried: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._count = 0
        # Changes during `load`: labels, and whether they are migrated; None after it.
        self._pending: list[tuple[Labels, bool]] | None = []
        self._masks: list[tuple[Labels, tuple[Mask, Mask]]] = []
        store.subscribe(self._on_change)

    @property
    def is_loaded(self) -> bool:
        """Tell whether `load` has finished. Before that, no item counts as migrated."""
        return self._pending is None

    def __len__(self) -> int:
        """Return the number of migrated items, 0 before `load`."""
        return self._count

    def load(self) -> None:
        """Read all origins from the file. Call it once; commits during the call are applied, too.

        After an error it may be called again.

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
            BusyError: Another process has the file to itself, or changed it during a read without a
                lock.
            VerificationError: The gallery's file is damaged.
            NotFoundError: The gallery was closed, or its file is gone.
            CannotWriteError: The file cannot be opened, or the disk fails.
        """
        labels = read_migrated_labels(self._store, self._space)
        with self._lock:
            carried = np.zeros(int(labels.max(initial=-1)) + 1, np.bool_)
            carried[labels] = True
            self._carried, self._count, self._masks = carried, len(labels), []
            pending, self._pending = self._pending or [], None
            for labels_of_change, is_carried in pending:
                self._mark(labels_of_change, carried=is_carried)

    def native_mask(self, labels: Labels) -> Mask:
        """Return which items are not migrated.

        Do not write to the mask, and do not change `labels` later: both are cached.

        Args:
            labels: int64 [n], increasing, from 0 on; n may be 0.

        Returns:
            bool [n]; before `load`, all are True. An unknown label counts as not migrated.
        """
        return self.origin_masks(labels)[1]

    def origin_masks(self, labels: Labels) -> tuple[Mask, Mask]:
        """Return which items are migrated, and which are not.

        Do not write to the masks, and do not change `labels` later: they are cached.

        Args:
            labels: int64 [n], increasing, from 0 on; n may be 0.

        Returns:
            Two masks, bool [n], each the opposite of the other; before `load`, no item counts as
            migrated. Neither does an unknown label.
        """
        with self._lock:
            for cached, masks in self._masks:
                if cached is labels:
                    return masks
            carried = np.zeros(len(labels), np.bool_)
            inside = labels < len(self._carried)
            carried[inside] = self._carried[labels[inside]]
            masks_of_labels = carried, ~carried
            # Cached for the last two indexes: a graph, and the exact delta.
            self._masks = [*self._masks[-1:], (labels, masks_of_labels)]
            return masks_of_labels

    def close(self) -> None:
        """Stop following the store; the masks are outdated after the next commit.

        Raises:
            ValueError: It was called before.
        """
        self._store.unsubscribe(self._on_change)

    def _on_change(self, change: Change) -> None:
        changes = [(change.deleted_labels, False)]
        if self._space in change.added_vectors:
            changes.append(
                (change.added_vectors[self._space][0], self._space in change.migrated_spaces)
            )
        with self._lock:
            for labels, carried in changes:
                if self._pending is not None:
                    self._pending.append((labels, carried))
                else:
                    self._mark(labels, carried=carried)

    def _mark(self, labels: Labels, *, carried: bool) -> None:
        """Update the mask. Call it under the lock."""
        last = int(labels.max(initial=-1))
        if carried and last >= len(self._carried):
            room = np.zeros(2 * (last + 1), np.bool_)
            room[: len(self._carried)] = self._carried
            self._carried = room
        inside = labels[labels < len(self._carried)]
        other = inside[self._carried[inside] != carried]
        if len(other):
            self._carried[other] = carried
            self._count += len(other) if carried else -len(other)
            self._masks = []
