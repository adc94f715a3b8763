"""Items by label, kept in memory: what a hit says of an item, read from SQLite once."""

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from nobackfill.gallery.store import Change, Item
from nobackfill.gallery.upgrade import Carrying
from nobackfill.server.galleries.hit_bytes import HitBytes

# Of the items of one gallery in one space, in memory.
MOST_BYTES = 64 << 20
# An Item, its id and an empty dict, and the bytes of its hit.
_ITEM_BYTES = 900


class ItemCache:
    """Items as one space shows them. A label's id never changes; its metadata and origin may.

    An entry is dropped after the commit that changed it, and one that was read while any commit
    went by is used but not kept, so that nothing stale stays.
    """

    def __init__(self, store: Carrying, space: str) -> None:
        self._store = store
        self._space = space
        self._lock = threading.Lock()
        self._commits = 0
        self._items: OrderedDict[int, Item] = OrderedDict()
        # Of those items, as far as they were asked for.
        self._shown: dict[int, HitBytes] = {}
        self._bytes = 0

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
                self._keep([item for item in read if item is not None])
        rest = iter(read)
        return [next(rest) if item is None else item for item in found]

    @property
    def known(self) -> Mapping[int, HitBytes]:
        """What `shown` has made of items that are in memory."""
        return self._shown

    def shown(
        self, labels: Sequence[int], make: Callable[[Item], HitBytes | None]
    ) -> list[HitBytes] | None:
        """Hits of `labels`, in order; None if one is of an item that is not in memory. `make` is
        the same at each call."""
        known = self._shown
        found: list[HitBytes] = []
        for label in labels:
            hit = known.get(label)
            if hit is None:
                item = self._items.get(label)
                hit = None if item is None else make(item)
                if hit is None:
                    return None
                with self._lock:
                    if self._items.get(label) is item:
                        known[label] = hit
            found.append(hit)
        return found

    def _keep(self, items: Sequence[Item]) -> None:
        """Under the lock. The oldest make room."""
        for item in items:
            if item.label not in self._items:
                self._bytes += size_of(item)
                self._items[item.label] = item
        while self._bytes > MOST_BYTES:
            self._drop(next(iter(self._items)))

    def _drop(self, label: int) -> None:
        self._shown.pop(label, None)
        item = self._items.pop(label, None)
        if item is not None:
            self._bytes -= size_of(item)

    def forget(self, labels: Sequence[int]) -> None:
        """Drop items that a commit has just changed."""
        with self._lock:
            self._commits += 1
            for label in labels:
                self._drop(label)

    def on_change(self, change: Change) -> None:
        """A listener for Store.subscribe."""
        labels = change.deleted.tolist() + change.described.tolist()
        if self._space in change.added:
            labels += change.added[self._space][0].tolist()
        self.forget(labels)


def size_of(item: Item) -> int:
    """About how much memory an item and its hit take, in bytes."""
    size = 0
    for key, value in item.metadata.items():
        size += sys.getsizeof(key) + sys.getsizeof(value)
        if not isinstance(value, str | int | float):
            size += sum(map(sys.getsizeof, value))
    return _ITEM_BYTES + 2 * size
