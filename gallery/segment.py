"""Some items of a gallery, with their metadata as columns that are read when they are asked for."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gallery import columns, reading
from gallery.columns import Column
from gallery.filters import Filter, Scalar
from gallery.index import Labels, Mask
from gallery.put import Metadata
from gallery.store import Store
from gallery.tables import label_column


def find(labels: Labels, wanted: Labels) -> tuple[NDArray[np.intp], Mask]:
    """For each of `wanted` its row in `labels` (increasing), and whether it is there at all."""
    rows = np.searchsorted(labels, wanted)
    there = rows < len(labels)
    rows[~there] = 0
    there[there] = labels[rows[there]] == wanted[there]
    return rows, there


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
            self._columns[key] = Column(self._values(key))
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
    """Every item of a gallery at one moment; columns are read from the file, and forgotten, the
    longest unused first, beyond `most_bytes`.

    Not for several threads at once. An item that was changed since is as it was, or as it is now.
    """

    def __init__(self, store: Store, most_bytes: int) -> None:
        self._store = store
        self._most = most_bytes
        self._columns: dict[str, Column] = {}
        with store.reading() as connection:
            self.labels = label_column(connection.execute("SELECT label FROM items ORDER BY label"))

    def passing(self, filtered: Filter, keys: frozenset[str]) -> Mask:
        """Which of the labels pass, bool [n]; `keys` are those that the checked filter asks for."""
        for key in sorted(keys):
            # The last of the dict is what was used last.
            known = self._columns.pop(key, None)
            self._columns[key] = Column(self._read(key)) if known is None else known
        mask = columns.mask(filtered, self._columns.__getitem__, len(self.labels))
        held = sum(column.bytes for column in self._columns.values())
        while held > self._most and self._columns:
            held -= self._columns.pop(next(iter(self._columns))).bytes
        return mask

    def _read(self, key: str) -> Iterator[tuple[Scalar, int]]:
        with self._store.reading() as connection:
            found = connection.execute(
                "SELECT kind, value, label FROM attributes WHERE key = ?", (key,)
            ).fetchall()
        kinds, values, labels = zip(*found, strict=True) if found else ((), (), ())
        rows, there = find(self.labels, np.array(labels, np.int64))
        # What came after the labels were read is another segment's.
        for i in np.flatnonzero(there).tolist():
            yield bool(values[i]) if kinds[i] == "flag" else values[i], int(rows[i])
