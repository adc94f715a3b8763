"""Items by label, kept in memory: what a hit says of an item, read from SQLite once."""

import threading
from collections.abc import Sequence

from gallery.store import Change, Item, Store

_LARGEST = 500_000


class ItemCache:
    """Items as one space shows them. A label's id never changes; its metadata and origin may.

    An entry is dropped after the commit that changed it, and one that was read while any commit
    went by is used but not kept, so that nothing stale stays.
    """

    def __init__(self, store: Store, space: str) -> None:
        self._store = store
        self._space = space
        self._lock = threading.Lock()
        self._commits = 0
        self._items: dict[int, Item] = {}

    def get(self, labels: Sequence[int]) -> list[Item | None]:
        """Items in the order of `labels`; None for those deleted meanwhile."""
        known = self._items
        found = [known.get(label) for label in labels]
        missing = [label for label, item in zip(labels, found, strict=True) if item is None]
        if not missing:
            return found
        commits = self._commits
        read = self._store.items(missing, self._space)
        with self._lock:
            if commits == self._commits:
                if len(known) > _LARGEST:
                    known.clear()
                known.update({item.label: item for item in read if item is not None})
        rest = iter(read)
        return [next(rest) if item is None else item for item in found]

    def forget(self, labels: Sequence[int]) -> None:
        """Drop items that a commit has just changed."""
        with self._lock:
            self._commits += 1
            for label in labels:
                self._items.pop(label, None)

    def on_change(self, change: Change) -> None:
        """A listener for Store.subscribe."""
        labels = change.deleted.tolist() + change.described.tolist()
        if self._space in change.added:
            labels += change.added[self._space][0].tolist()
        self.forget(labels)
