"""Items by the values of one metadata key."""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import MetadataValue, Origin
from nobackfill.gallery.store import Store
from nobackfill.gallery.tables import find_space, vector_table
from nobackfill.gallery.writing import storable


@dataclass(frozen=True)
class Group:
    """`items` have `value`. `labels`, int64, increasing: those with a vector in the space; of them
    `re_embedded` were embedded again from their images."""

    value: MetadataValue
    items: int
    labels: Labels
    re_embedded: int


def by_value(store: Store, key: str, space: str) -> list[Group]:
    """The groups that metadata `key` makes, by kind and value; items without it are in none.

    Raises IncompatibleSpaceError if the gallery does not have the space.
    """
    with store.reading() as connection:
        table = vector_table(find_space(connection, space).number)
        if not storable(key):
            # No item has it, and no statement can ask for it.
            return []
        rows = connection.execute(
            f"SELECT a.kind, a.value, v.label, v.origin FROM attributes a LEFT JOIN {table} v"
            " ON v.label = a.label WHERE a.key = ? ORDER BY a.kind, a.value, a.label",
            (key,),
        ).fetchall()
    return [
        group_of(kind, value, [row[2:] for row in members])
        for (kind, value), members in groupby(rows, key=lambda row: row[:2])
    ]


def group_of(kind: str, value: Any, members: list[tuple[int | None, Origin | None]]) -> Group:
    labels = [label for label, _ in members if label is not None]
    again = sum(origin == "re-embedded" for _, origin in members)
    value = bool(value) if kind == "flag" else value
    return Group(value, len(members), np.array(labels, np.int64), again)
