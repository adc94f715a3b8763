"""How long searches of a gallery take: slow ones keep to a lane of their kind."""

from collections.abc import Iterable

from nobackfill.gallery.search.view import LiveView, Snapshot

# Slower than this, in the mean of the last few searches.
_SLOW_S = 0.02
_SMOOTHING = 0.2
# Settles where two searches of five take longer.
_LONGER, _SHORTER = 1.06, 0.96
# Searches are answered where they arrive while they usually take less: meanwhile nothing else that
# arrives is looked at.
_QUICK_S = 0.001
# Where fewer answers than this share have all their items in memory, one query in so many is
# searched where it arrives: the others would be searched there for nothing.
_MOSTLY, _TRIED = 0.5, 16
_MEMORY = 0.1
# So many numbers compared take as long.
_QUICK_ELEMENTS = 1 << 20
# So many numbers compared by each search take as long: known before the first is asked.
_SLOW_ELEMENTS = 1 << 24


class Speed:
    """Of the searches of one gallery."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._usual = _QUICK_S / 4
        self._whole = 1.0
        self._queries = 0

    def took(self, seconds: float, queries: int = 1) -> None:
        """Count one search, of so many queries at once."""
        self._mean += _SMOOTHING * (seconds - self._mean)
        # However long one waits for its turn, it is one of many: the share of longer ones counts.
        self._usual *= _LONGER if seconds > queries * self._usual else _SHORTER

    def took_whole(self, seconds: float, queries: int) -> None:
        """Count searches where they arrived, all their items in memory."""
        self.took(seconds, queries)
        self._queries += queries
        self._whole = 1 - (1 - self._whole) * (1 - _MEMORY) ** queries

    @property
    def at_its_best(self) -> bool:
        """Whether searches are quick, and mostly find their items in memory."""
        return self._usual < _QUICK_S and self._whole > _MOSTLY

    def quick(self, snapshot: Snapshot) -> bool:
        """Whether a search of the snapshot takes hardly longer than handing it on."""
        return self._usual < _QUICK_S and light(snapshot)

    def tried(self, *, whole: bool) -> None:
        """Count a search where it arrived. `whole`: all its items were in memory."""
        self._whole += _MEMORY * (whole - self._whole)

    def worth_a_try(self) -> bool:
        """Whether to search where a query arrives: not where items mostly have to be read."""
        self._queries += 1
        return self._whole > _MOSTLY or self._queries % _TRIED == 0

    def slow(self, views: Iterable[LiveView]) -> bool:
        """Whether searches of these views take long at present: most galleries where they do have
        no graph yet."""
        compared = sum(view.snapshot().compared for view in views)
        return self._mean > _SLOW_S or compared > _SLOW_ELEMENTS


def light(snapshot: Snapshot) -> bool:
    """Whether a search of the snapshot compares little, whatever else the machine does."""
    return snapshot.compared < _QUICK_ELEMENTS
