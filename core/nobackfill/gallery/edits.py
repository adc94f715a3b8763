"""Changes to many items at once: by a filter, a piece a transaction."""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from sqlite3 import Connection

import numpy as np

from nobackfill.errors import InvalidInputError
from nobackfill.gallery import attributes, reading
from nobackfill.gallery.filter_engine import FilterEngine
from nobackfill.gallery.filters import Filter
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.segment import Segment
from nobackfill.gallery.store import Change, Store
from nobackfill.gallery.writing import Metadata, labels_of, metadata_text

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


def chosen_by_ids(store: Store, ids: Sequence[str]) -> Chosen:
    """Those that exist."""
    with store.reading() as connection:
        return Chosen(labels_of(connection, ids))


def chosen_by_filter(filtering: FilterEngine, filtered: Filter) -> Chosen:
    """Those that pass. Raises InvalidInputError for a filter that `filters.check` refuses."""
    return Chosen(filtering.passing(filtered).labels(), filtered)


def delete(store: Store, chosen: Chosen, between: Callable[[], None] = lambda: None) -> int:
    """Remove items; returns how many. `between` is called after each piece, and may raise to give
    up: what is gone until then stays gone. Raises BusyError, CannotWriteError."""
    count = 0
    for piece in chosen.pieces():

        def choose(connection: Connection, piece: Chosen = piece) -> Labels:
            return np.array([*piece.now(connection)], np.int64)

        count += store.delete_chosen(choose)
        between()
    return count


def describe(
    store: Store,
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
        with store.changing() as (connection, changes):
            now = piece.now(connection)
            texts = []
            for label, (name, metadata) in now.items():
                kept = {key: value for key, value in metadata.items() if key not in remove}
                try:
                    texts.append((label, metadata_text({**kept, **values})))
                except InvalidInputError as error:
                    raise InvalidInputError(f"item {json.dumps(name)}: {error}") from error
            attributes.describe(connection, texts)
            described = np.array([*now], np.int64)
            changes.append(Change({}, np.empty(0, np.int64), described=described))
        count += len(now)
        between()
    return count
