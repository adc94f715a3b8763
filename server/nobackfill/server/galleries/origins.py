"""Which spaces of a gallery hold carried and native vectors that are ranked along a scale."""

import threading
from collections.abc import Collection, Mapping

from nobackfill.gallery.carried import Carried
from nobackfill.gallery.gallery_store import GalleryStore
from nobackfill.gallery.store import Store
from nobackfill.server.galleries.plan import Part


class Origins:
    """Of one gallery in a file."""

    def __init__(self, store: GalleryStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._carried: Mapping[str, Carried] = {}

    def known(self, part: Part) -> bool:
        """Whether `mixed` answers without reading the file."""
        return part.scale is None or part.space in self._carried

    def mixed(self, part: Part, vectors: int) -> Carried | None:
        """What tells the origins of the `vectors` of a part; None where their distances rank them:
        without a scale, and while they are all of one origin."""
        if part.scale is None:
            return None
        carried = self._carried.get(part.space)
        if carried is None:
            carried = self._read(part.space)
        return carried if 0 < len(carried) < vectors else None

    def _read(self, space: str) -> Carried:
        with self._lock:
            carried = self._carried.get(space)
            if carried is None:
                assert isinstance(self._store, Store), "a database is asked for origins"
                carried = Carried(self._store, space)
                try:
                    carried.load()
                except BaseException:
                    carried.close()
                    raise
                self._carried = {**self._carried, space: carried}
            return carried

    def keep(self, spaces: Collection[str]) -> None:
        """Let go of all other spaces."""
        with self._lock:
            gone = [one for space, one in self._carried.items() if space not in spaces]
            self._carried = {s: one for s, one in self._carried.items() if s in spaces}
        for one in gone:
            one.close()
