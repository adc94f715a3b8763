"""What answers a filter, and the answer; filter_engine.py does it for a file."""

from typing import Protocol

from nobackfill.gallery.filters import Filter
from nobackfill.gallery.search.index import Labels, Mask


class Matches(Protocol):
    """The items that passed a filter."""

    def labels(self) -> Labels:
        """All of them, increasing."""
        ...

    def __len__(self) -> int: ...

    def mask(self, labels: Labels) -> Mask:
        """Which of `labels` (increasing) passed."""
        ...


class Filtering(Protocol):
    """Answers filters on one store."""

    def passing(self, filtered: Filter) -> Matches:
        """Items that pass now. Raises InvalidInputError for what filters.check refuses."""
        ...

    def close(self) -> None: ...
