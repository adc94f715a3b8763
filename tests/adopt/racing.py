"""A source that others write to while it is carried."""

from collections.abc import Callable, Iterator

from nobackfill.adopt.sources.source import Rows, Source, Target, TargetVectors, Window
from nobackfill.vectors import Vectors


class Racing:
    """`before` runs between reading a window and writing it, `after` then."""

    def __init__(
        self, source: Source, before: Callable[[], None], after: Callable[[], None] = lambda: None
    ) -> None:
        self._source, self._before, self._after = source, before, after

    def __getattr__(self, name: str) -> object:
        return getattr(self._source, name)

    def windows(self, rows_per_window: int) -> Iterator[Window]:
        return self._source.windows(rows_per_window)

    def open_target(self, target: Target) -> TargetVectors:
        beside = self._source.open_target(target)
        write = beside.write

        def racing(rows: Rows, vectors: Vectors) -> None:
            self._before()
            write(rows, vectors)
            self._after()

        beside.write = racing  # type: ignore[method-assign]
        return beside
