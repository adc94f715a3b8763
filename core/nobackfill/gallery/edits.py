"""Changes to many items at once: by a filter, a piece a transaction."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from sqlite3 import Connection
from typing import Protocol

import numpy as np

from nobackfill.errors import InvalidInputError
from nobackfill.gallery import reading, tables
from nobackfill.gallery.filter_engine import Segment
from nobackfill.gallery.filters import Filter, Filtering
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import Metadata
from nobackfill.gallery.store import Change, Store, metadata_text

# Items a transaction: other writers come in between.
PIECE = 1000


@dataclass(frozen=True)
class Chosen:
    """Items of a gallery at one moment. What ceases to pass before its turn is left alone."""

    labels: Labels
    filtered: Filter | None = None

    def pieces(self) -> Sequence["Chosen"]:
        """The same, PIECE items each."""
        cuts = range(PIECE, len(self.labels), PIECE)
        return [Chosen(labels, self.filtered) for labels in np.split(self.labels, cuts)]

    def now(self, connection: Connection) -> dict[int, tuple[str, Metadata]]:
        """Ids and metadata, by label, of those that are still there and pass."""
        items = [item for item in reading.items(connection, self.labels) if item is not None]
        if self.filtered is not None:
            labels = np.array([item.label for item in items], np.int64)
            mask = Segment(labels, [item.metadata for item in items]).passing(self.filtered)
            items = [items[row] for row in np.flatnonzero(mask).tolist()]
        return {item.label: (item.id, item.metadata) for item in items}


class Editing(Protocol):
    """What these changes need of a store; each is one transaction."""

    def labels_of(self, ids: Sequence[str]) -> Labels:
        """Labels of those ids that exist, increasing."""
        ...

    def delete_some(self, labels: Labels, filtered: Filter | None) -> int:
        """Remove those of `labels` that are there and pass now."""
        ...

    def describe_some(
        self, labels: Labels, filtered: Filter | None, values: Metadata, remove: Collection[str]
    ) -> int:
        """Remove keys from the metadata of those of `labels` that are there and pass now, then set
        `values`. Raises InvalidInputError where an item's would become too large."""
        ...


def chosen_by_ids(store: Editing, ids: Sequence[str]) -> Chosen:
    """Those that exist."""
    return Chosen(store.labels_of(ids))


def chosen_by_filter(filtering: Filtering, filtered: Filter) -> Chosen:
    """Those that pass. Raises InvalidInputError for a filter that `filters.check` refuses."""
    return Chosen(filtering.passing(filtered).labels(), filtered)


def delete(store: Editing, chosen: Chosen, between: Callable[[], None] = lambda: None) -> int:
    """Remove items; returns how many. `between` is called after each piece, and may raise to give
    up: what is gone until then stays gone. Raises BusyError, CannotWriteError."""
    count = 0
    for piece in chosen.pieces():
        count += store.delete_some(piece.labels, piece.filtered)
        between()
    return count


def describe(
    store: Editing,
    chosen: Chosen,
    values: Metadata,
    remove: Collection[str],
    between: Callable[[], None] = lambda: None,
) -> int:
    """Remove keys from items' metadata, then set `values`; returns of how many. `between` as in
    `delete`. Raises InvalidInputError for what is no metadata, or where an item's would become too
    large: its piece is then left as it is. BusyError, CannotWriteError."""
    metadata_text(values)
    count = 0
    for piece in chosen.pieces():
        count += store.describe_some(piece.labels, piece.filtered, values, remove)
        between()
    return count


def described(
    now: Mapping[int, tuple[str, Metadata]], values: Metadata, remove: Collection[str]
) -> list[tuple[int, str]]:
    """The metadata, as JSON texts by label, that items with these ids and metadata have then.
    Raises InvalidInputError."""
    texts = []
    for label, (name, metadata) in now.items():
        kept = {key: value for key, value in metadata.items() if key not in remove}
        try:
            texts.append((label, metadata_text({**kept, **values})))
        except InvalidInputError as error:
            raise InvalidInputError(f"item {json.dumps(name)}: {error}") from error
    return texts


def delete_in_file(store: Store, piece: Chosen) -> int:
    """One piece of `delete`."""
    return store.delete_chosen(lambda connection: np.array([*piece.now(connection)], np.int64))


def describe_in_file(store: Store, piece: Chosen, values: Metadata, remove: Collection[str]) -> int:
    """One piece of `describe`."""
    with store.changing() as (connection, changes):
        now = piece.now(connection)
        tables.describe(connection, described(now, values, remove))
        labels = np.array([*now], np.int64)
        changes.append(Change({}, np.empty(0, np.int64), described=labels))
    return len(now)
