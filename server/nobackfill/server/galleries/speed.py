"""How long searches of a gallery take: slow ones keep to a lane of their kind."""

from collections.abc import Callable, Mapping

from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.view import LiveView

# Slower than this, in the mean of the last few searches.
_SLOW_S = 0.02
_SMOOTHING = 0.2
# So many numbers compared by each search take as long: known before the first is asked.
_SLOW_ELEMENTS = 1 << 24


class Speed:
    """Of the searches of one gallery."""

    def __init__(self, views: Callable[[], Mapping[str, LiveView]]) -> None:
        self._views = views
        self._mean = 0.0

    def took(self, seconds: float) -> None:
        """Count one search."""
        self._mean += _SMOOTHING * (seconds - self._mean)

    @property
    def slow(self) -> bool:
        """Whether searches take long at present: most galleries where they do have no graph yet."""
        return self._mean > _SLOW_S or self._compared() > _SLOW_ELEMENTS

    def _compared(self) -> int:
        """Numbers that a search compares one by one: without a graph, and beside one."""
        numbers = 0
        for view in self._views().values():
            snapshot = view.snapshot()
            alone = isinstance(snapshot.base.index, ExactIndex)
            rows = len(snapshot.delta) + alone * len(snapshot.base)
            numbers += rows * snapshot.spec.dim
        return numbers
