"""A space of a gallery file, as a Searcher: a live view, and the file's filters."""

from nobackfill.gallery.filters import Filter
from nobackfill.gallery.matches import Filtering
from nobackfill.gallery.search.index import Neighbours
from nobackfill.gallery.search.view import LiveView
from nobackfill.vectors import Vectors


class SqliteSearcher:
    """What is said of its method: Searcher."""

    def __init__(self, view: LiveView, filtering: Filtering) -> None:
        self._view = view
        self._filtering = filtering

    def search(
        self, queries: Vectors, k: int, filtered: Filter | None = None, ef: int = 0
    ) -> Neighbours:
        allowed = None if filtered is None else self._filtering.passing(filtered).mask
        return self._view.snapshot().search(queries, k, allowed, ef)
