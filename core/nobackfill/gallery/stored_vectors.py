"""Items, and vectors of a space with all that is kept beside them, as one store gives them to
another."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import Metadata, Origin
from nobackfill.vectors import Vectors


@dataclass(frozen=True)
class Item:
    """`origin` and `uncertainty` are those of its vector in the space asked for, if any."""

    label: int
    id: str
    digest: str | None
    metadata: Metadata
    origin: Origin | None = None
    uncertainty: float | None = None


@dataclass(frozen=True)
class StoredVectors:
    """Rows by increasing label: `embedding` [n, dim]; None where there is no side-information, or
    no uncertainty."""

    labels: Labels
    origins: list[Origin]
    uncertainties: list[float | None]
    embedding: Vectors
    sides: list[bytes | None]

    def alike(self, rows: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
        """Those of `rows` that can be written together: of one origin, all or none of them with
        side-information, and so with uncertainty."""
        kinds = [
            (self.origins[row], self.sides[row] is None, self.uncertainties[row] is None)
            for row in rows.tolist()
        ]
        for kind in sorted(set(kinds)):
            yield rows[[place for place, one in enumerate(kinds) if one == kind]]

    def row(self, row: int) -> tuple[object, ...]:
        """One of them, to be compared bit for bit."""
        return (
            self.origins[row], self.uncertainties[row], self.embedding[row].tobytes(),
            self.sides[row],
        )  # fmt: skip


@dataclass(frozen=True)
class Window:
    """Items by increasing label, and for each space asked for the rows of those that have one."""

    items: list[Item]
    stored: list[StoredVectors]
