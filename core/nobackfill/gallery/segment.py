"""Some items of a gallery, with their metadata as columns that are read when they are asked for."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from nobackfill.gallery import columns, reading, stored_columns
from nobackfill.gallery.columns import Column, column_of
from nobackfill.gallery.filters import Filter, Scalar
from nobackfill.gallery.search.index import Labels, Mask
from nobackfill.gallery.spec import Metadata
from nobackfill.gallery.store import Store
from nobackfill.gallery.writing import storable


class Segment:
    """Metadata of `labels` (int64 [n], increasing), at hand."""

    def __init__(self, labels: Labels, metadata: Sequence[Metadata]) -> None:
        self.labels = labels
        self._metadata = metadata
        self._columns: dict[str, Column] = {}

    def passing(self, filtered: Filter) -> Mask:
        """Which of the labels pass, bool [n]; the filter is a checked one."""
        return columns.mask(filtered, self._column, len(self.labels))

    def _column(self, key: str) -> Column:
        if key not in self._columns:
            self._columns[key] = column_of(self._values(key))
        return self._columns[key]

    def _values(self, key: str) -> Iterator[tuple[Scalar, int]]:
        for row, metadata in enumerate(self._metadata):
            if key not in metadata:
                continue
            value = metadata[key]
            if isinstance(value, str | int | float):
                yield value, row
            else:
                yield from ((text, row) for text in value)


def segment_of(items: Mapping[int, Metadata]) -> Segment:
    """Of metadata by label."""
    labels = sorted(items)
    return Segment(np.array(labels, np.int64), [items[label] for label in labels])


def read_metadata(store: Store, labels: Sequence[int]) -> dict[int, Metadata]:
    """What the file says of those items that exist."""
    with store.reading() as connection:
        found = reading.items(connection, labels)
    return {item.label: item.metadata for item in found if item is not None}


class StoredSegment:
    """Every item of a gallery at one moment, from any thread; columns are read from the file, and
    forgotten, the longest unused first, beyond `most_bytes`.

    Who asks for a column that another thread reads waits for that one alone. An item that was
    changed since is as it was, or as it is now.
    """

    def __init__(self, store: Store, most_bytes: int) -> None:
        self._store = store
        self._most = most_bytes
        # Of _columns. Nothing is read while it is held.
        self._lock = threading.Lock()
        # The last was used last.
        self._columns: dict[str, Future[Column]] = {}
        with store.reading() as connection:
            self.labels = stored_columns.labels(connection)

    def passing(self, filtered: Filter, keys: Iterable[str]) -> Mask:
        """Which of the labels pass, bool [n]; `keys` are those that the checked filter asks for."""
        found = {key: self.column(key) for key in sorted(keys)}
        return columns.mask(filtered, found.__getitem__, len(self.labels))

    def held(self) -> list[str]:
        """Keys whose columns are in memory."""
        with self._lock:
            return [*self._columns]

    def column(self, key: str) -> Column:
        """That of one key."""
        with self._lock:
            column = self._columns.pop(key, None)
            first = column is None
            if column is None:
                column = Future()
            self._columns[key] = column
        if first:
            self._read(key, column)
        return column.result()

    def _read(self, key: str, column: "Future[Column]") -> None:
        try:
            with self._store.reading() as connection:
                # No item has a key that cannot be stored, and no statement can ask for it.
                found = (
                    stored_columns.read(connection, key, self.labels)
                    if storable(key)
                    else column_of(())
                )
        except BaseException as error:
            with self._lock:
                if self._columns.get(key) is column:
                    del self._columns[key]
            # Told to all who wait for it; the next one tries again.
            column.set_exception(error)
            raise
        column.set_result(found)
        with self._lock:
            done = {key: one.result().bytes for key, one in self._columns.items() if one.done()}
            held = sum(done.values())
            for oldest, size in done.items():
                if held <= self._most:
                    break
                del self._columns[oldest]
                held -= size
