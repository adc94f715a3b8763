"""A frozen export in memory, to be searched: its files have no search of their own."""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from nobackfill.adopt.maps import normalised
from nobackfill.adopt.pairs import WINDOW, read_all
from nobackfill.adopt.sources.source import Beside, Column, Facts, Rows, Source, Target, Window
from nobackfill.vectors import Vectors


@runtime_checkable
class Frozen(Source, Protocol):
    """Files beside which new vectors are files, too."""

    def carried(self, name: str) -> Source:
        """The vectors that were carried under a name. Raises NotFoundError, InvalidInputError."""


class Loaded:
    """Every vector of `source`, read once; searches are exact, by cosine."""

    def __init__(self, source: Source) -> None:
        self._source = source
        rows = read_all(source)
        self._ids, self._old = rows.ids, rows.vectors
        self._places = {name: row for row, name in enumerate(rows.ids)}
        # Ids and unit vectors, by the name that they were carried under.
        self._searched: dict[str | None, tuple[list[str], Vectors]] = {
            None: (rows.ids, normalised(rows.vectors))
        }

    def facts(self) -> Facts:
        return self._source.facts()

    def count(self) -> int:
        return len(self._ids)

    def windows(self, rows: int) -> Iterator[Window]:
        return self._source.windows(rows)

    def read(self, window: Window) -> Rows:
        return self._source.read(window)

    def column(self, window: Window, name: str) -> Column:
        return self._source.column(window, name)

    def beside(self, target: Target) -> Beside:
        return self._source.beside(target)

    def rollback(self, name: str) -> bool:
        return self._source.rollback(name)

    def nearest(self, vector: Vectors, count: int, beside: str | None = None) -> list[str]:
        if beside is not None and beside not in self._searched:
            assert isinstance(self._source, Frozen)
            rows = read_all(self._source.carried(beside))
            self._searched[beside] = rows.ids, normalised(rows.vectors)
        ids, unit = self._searched[beside]
        if not ids:
            return []
        products = unit @ vector
        most = min(count, len(ids))
        best = np.argpartition(-products, most - 1)[:most]
        ordered = best[np.argsort(-products[best], kind="stable")]
        return [ids[row] for row in ordered.tolist()]

    def lookup(self, ids: Sequence[str]) -> Rows:
        here = [name for name in dict.fromkeys(ids) if name in self._places]
        rows = np.array([self._places[name] for name in here], np.int64)
        return Rows(here, self._old[rows])

    def texts(self, ids: Sequence[str], column: str) -> dict[str, str]:
        wanted, found = set(ids), dict[str, str]()
        for window in self._source.windows(WINDOW):
            one = self._source.column(window, column)
            found |= {n: v for n, v in zip(one.ids, one.values, strict=True) if n in wanted}
        return found

    def close(self) -> None:
        """Nothing is open."""
