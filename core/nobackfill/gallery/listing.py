"""Items by page, in the order they were put, or the least certain first."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.store import Item, Store
from nobackfill.gallery.tables import find_space, label_column, vector_table

# Rows looked at together for those that pass.
_ROWS = 1000


@dataclass(frozen=True)
class Place:
    """An item's place in an order; `uncertainty` is None in the order of labels."""

    label: int
    uncertainty: float | None = None

    def token(self) -> str:
        """As a text that `read` reads."""
        return f"{self.label}" if self.uncertainty is None else f"{self.label}:{self.uncertainty!r}"

    @classmethod
    def read(cls, token: str, *, least_certain: bool) -> Self:
        """Raises InvalidInputError for what was no token of that order."""
        label, colon, uncertainty = token.partition(":")
        try:
            if not token.isascii() or bool(colon) is not least_certain:
                raise ValueError(token)
            place = cls(int(label), float(uncertainty) if colon else None)
            if not 0 <= place.label < 2**63:
                raise ValueError(token)
        except ValueError as error:
            raise InvalidInputError(
                "page_token: expected next_page_token of the page before, everything else being "
                "the same; begin again without it"
            ) from error
        return place


def page(
    store: Store,
    space: str,
    limit: int,
    *,
    after: Place | None = None,
    allowed: Labels | None = None,
    least_certain: bool = False,
) -> tuple[list[tuple[Item, Place]], Place | None]:
    """At most `limit` items after a place, as `space` shows them, and the last place looked at,
    where more may come after it.

    `allowed`: increasing labels of which they have to be; None: all. `least_certain`: only items
    with an uncertainty in the space, the largest first, then by label.
    """
    if least_certain:
        places = _least_certain(store, space, limit, after, allowed)
    else:
        places = _by_label(store, limit, 0 if after is None else after.label, allowed)
    items = store.items([place.label for place in places], space)
    found = [(item, place) for item, place in zip(items, places, strict=True) if item is not None]
    return found, places[-1] if len(places) == limit else None


def _by_label(store: Store, limit: int, after: int, allowed: Labels | None) -> list[Place]:
    if allowed is not None:
        start = int(np.searchsorted(allowed, after, "right"))
        labels = allowed[start : start + limit]
    else:
        with store.reading() as connection:
            labels = label_column(
                connection.execute(
                    "SELECT label FROM items WHERE label > ? ORDER BY label LIMIT ?", (after, limit)
                )
            )
    return [Place(label) for label in labels.tolist()]


def _least_certain(
    store: Store, space: str, limit: int, after: Place | None, allowed: Labels | None
) -> list[Place]:
    found: list[Place] = []
    # Without a filter the first ones are enough: SQLite then keeps no more while it sorts.
    most = limit if allowed is None else -1
    for labels, uncertainties in _uncertain(store, space, after, most):
        if allowed is None:
            passing = np.ones(len(labels), np.bool_)
        else:
            passing = np.isin(np.array(labels, np.int64), allowed, assume_unique=True)
        for row in np.flatnonzero(passing).tolist():
            found.append(Place(labels[row], uncertainties[row]))
            if len(found) == limit:
                return found
    return found


def _uncertain(
    store: Store, space: str, after: Place | None, most: int
) -> Iterator[tuple[tuple[int, ...], tuple[float, ...]]]:
    last = Place(0, float("inf")) if after is None else after
    with store.reading() as connection:
        table = vector_table(find_space(connection, space).number)
        rows = connection.execute(
            f"SELECT label, uncertainty FROM {table} WHERE uncertainty IS NOT NULL"
            " AND (uncertainty < :uncertainty OR uncertainty = :uncertainty AND label > :label)"
            " ORDER BY uncertainty DESC, label LIMIT :most",
            {"uncertainty": last.uncertainty, "label": last.label, "most": most},
        )
        while chunk := rows.fetchmany(_ROWS):
            labels, uncertainties = zip(*chunk, strict=True)
            yield labels, uncertainties
