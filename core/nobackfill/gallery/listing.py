"""Lists of a gallery's items: pages, groups by metadata, and those that were carried."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.reading import StoredItem
from nobackfill.gallery.search.index import Labels, Mask
from nobackfill.gallery.spec import MetadataValue, Origin
from nobackfill.gallery.store import Change, Store, storable
from nobackfill.gallery.tables import find_space, label_column, vector_table

# Rows looked at together for those that pass.
_ROWS = 1000


@dataclass(frozen=True)
class ListingPlace:
    """An item's place in an order; `uncertainty` is None in the order of labels."""

    label: int
    uncertainty: float | None = None

    def token(self) -> str:
        """As a text that `read` reads."""
        return f"{self.label}" if self.uncertainty is None else f"{self.label}:{self.uncertainty!r}"

    @classmethod
    def read(cls, token: str, *, least_certain: bool) -> Self:
        """Raises InvalidInputError for what was no token of that order."""
        label, colon, uncertainty = token.partition(":")
        try:
            if not token.isascii() or bool(colon) is not least_certain:
                raise ValueError(token)
            place = cls(int(label), float(uncertainty) if colon else None)
            if not 0 <= place.label < 2**63:
                raise ValueError(token)
        except ValueError as error:
            raise InvalidInputError(
                "page_token: expected next_page_token of the page before, everything else being "
                "the same; begin again without it"
            ) from error
        return place


def page(
    store: Store,
    space: str,
    limit: int,
    *,
    after: ListingPlace | None = None,
    allowed: Labels | None = None,
    least_certain: bool = False,
) -> tuple[list[tuple[StoredItem, ListingPlace]], ListingPlace | None]:
    """At most `limit` items after a place, as `space` shows them, and the last place looked at,
    where more may come after it.

    `allowed`: increasing labels of which they have to be; None: all. `least_certain`: only items
    with an uncertainty in the space, the largest first, then by label.
    """
    if least_certain:
        places = _least_certain(store, space, limit, after, allowed)
    else:
        places = _by_label(store, limit, 0 if after is None else after.label, allowed)
    items = store.items([place.label for place in places], space)
    found = [(item, place) for item, place in zip(items, places, strict=True) if item is not None]
    return found, places[-1] if len(places) == limit else None


def _by_label(store: Store, limit: int, after: int, allowed: Labels | None) -> list[ListingPlace]:
    if allowed is not None:
        start = int(np.searchsorted(allowed, after, "right"))
        labels = allowed[start : start + limit]
    else:
        with store.reading() as connection:
            labels = label_column(
                connection.execute(
                    "SELECT label FROM items WHERE label > ? ORDER BY label LIMIT ?", (after, limit)
                )
            )
    return [ListingPlace(label) for label in labels.tolist()]


def _least_certain(
    store: Store, space: str, limit: int, after: ListingPlace | None, allowed: Labels | None
) -> list[ListingPlace]:
    found: list[ListingPlace] = []
    # Without a filter the first ones are enough: SQLite then keeps no more while it sorts.
    most = limit if allowed is None else -1
    for labels, uncertainties in _uncertain(store, space, after, most):
        if allowed is None:
            passing = np.ones(len(labels), np.bool_)
        else:
            passing = np.isin(np.array(labels, np.int64), allowed, assume_unique=True)
        for row in np.flatnonzero(passing).tolist():
            found.append(ListingPlace(labels[row], uncertainties[row]))
            if len(found) == limit:
                return found
    return found


def _uncertain(
    store: Store, space: str, after: ListingPlace | None, most: int
) -> Iterator[tuple[tuple[int, ...], tuple[float, ...]]]:
    last = ListingPlace(0, float("inf")) if after is None else after
    with store.reading() as connection:
        table = vector_table(find_space(connection, space).number)
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
    """`items` have `value`. `labels`, int64, increasing: those with a vector in the space; of them
    `re_embedded` were embedded again from their images."""

    value: MetadataValue
    items: int
    labels: Labels
    re_embedded: int


def groups_by_value(store: Store, key: str, space: str) -> list[MetadataGroup]:
    """The groups that metadata `key` makes, by kind and value; items without it are in none.

    Raises IncompatibleSpaceError if the gallery does not have the space.
    """
    with store.reading() as connection:
        table = vector_table(find_space(connection, space).number)
        if not storable(key):
            # No item has it, and no statement can ask for it.
            return []
        rows = connection.execute(
            f"SELECT a.kind, a.value, v.label, v.origin FROM attributes a LEFT JOIN {table} v"
            " ON v.label = a.label WHERE a.key = ? ORDER BY a.kind, a.value, a.label",
            (key,),
        ).fetchall()
    return [
        group_of(kind, value, [row[2:] for row in members])
        for (kind, value), members in groupby(rows, key=lambda row: row[:2])
    ]


def group_of(
    kind: str, value: Any, members: list[tuple[int | None, Origin | None]]
) -> MetadataGroup:
    labels = [label for label, _ in members if label is not None]
    again = sum(origin == "re-embedded" for _, origin in members)
    value = bool(value) if kind == "flag" else value
    return MetadataGroup(value, len(members), np.array(labels, np.int64), again)


# Which items of a space an upgrade has carried there, kept up to date in memory: a byte a label.
#
# The others' vectors were made of their images, by the space's own model.


def carried_labels(store: Store, space: str) -> Labels:
    """Labels of the vectors that an upgrade has carried into a space, increasing. Raises
    IncompatibleSpaceError, BusyError."""
    with store.reading() as connection:
        table = vector_table(find_space(connection, space).number)
        rows = connection.execute(
            f"SELECT label FROM {table} WHERE origin = 'upgraded' ORDER BY label"
        )
        return label_column(rows)


class CarriedLabels:
    """Follows a store from `load` on. Threads may share it."""

    def __init__(self, store: Store, space: str) -> None:
        self._store, self._space = store, space
        self._lock = threading.Lock()
        self._carried: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._count = 0
        # What came or went while the file was read, and whether carried; None: all is read.
        self._meanwhile: list[tuple[Labels, bool]] | None = []
        self._masks: list[tuple[Labels, tuple[Mask, Mask]]] = []
        store.subscribe(self._on_change)

    @property
    def loaded(self) -> bool:
        """Whether it knows."""
        return self._meanwhile is None

    def __len__(self) -> int:
        """Carried items, 0 before they are loaded."""
        return self._count

    def load(self) -> None:
        """Read all origins, once. Raises IncompatibleSpaceError, BusyError."""
        labels = carried_labels(self._store, self._space)
        with self._lock:
            carried = np.zeros(int(labels.max(initial=-1)) + 1, np.bool_)
            carried[labels] = True
            self._carried, self._count = carried, len(labels)
            meanwhile, self._meanwhile = self._meanwhile or [], None
            for some, kept in meanwhile:
                self._mark(some, carried=kept)

    def native(self, labels: Labels) -> Mask:
        """Which of `labels` (increasing) were not carried; not to be written."""
        return self.origins(labels)[1]

    def origins(self, labels: Labels) -> tuple[Mask, Mask]:
        """Which of `labels` (increasing) were carried, and which were not; not to be written."""
        with self._lock:
            for known, masks in self._masks:
                if known is labels:
                    return masks
            carried = np.zeros(len(labels), np.bool_)
            known_here = labels < len(self._carried)
            carried[known_here] = self._carried[labels[known_here]]
            found = carried, ~carried
            # Those of the last two indexes that asked: a graph, and what lies beside it.
            self._masks = [*self._masks[-1:], (labels, found)]
            return found

    def close(self) -> None:
        """Follow no longer."""
        self._store.unsubscribe(self._on_change)

    def _on_change(self, change: Change) -> None:
        told = [(change.deleted, False)]
        if self._space in change.added:
            told.append((change.added[self._space][0], self._space in change.carried))
        with self._lock:
            for labels, carried in told:
                if self._meanwhile is not None:
                    self._meanwhile.append((labels, carried))
                else:
                    self._mark(labels, carried=carried)

    def _mark(self, labels: Labels, *, carried: bool) -> None:
        """Under the lock."""
        last = int(labels.max(initial=-1))
        if carried and last >= len(self._carried):
            room = np.zeros(2 * (last + 1), np.bool_)
            room[: len(self._carried)] = self._carried
            self._carried = room
        known = labels[labels < len(self._carried)]
        other = known[self._carried[known] != carried]
        if len(other):
            self._carried[other] = carried
            self._count += len(other) if carried else -len(other)
            self._masks = []
