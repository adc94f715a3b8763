"""Rows of a gallery's tables as what they mean, each function within one transaction."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nobackfill.errors import NotFoundError
from nobackfill.gallery import reading
from nobackfill.gallery.reading import StoredItem, StoredVectors, item_of
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import SpaceInfo, SpaceSpec, space_of
from nobackfill.server.stores.postgresql.bulk import from_binary
from nobackfill.server.stores.postgresql.database import Connection, run
from nobackfill.server.stores.postgresql.schema import table_of

_ITEM = "i.label, i.id, i.digest, i.metadata"


def label_column(rows: Any) -> Labels:
    """Rows of one integer each as an array."""
    return np.fromiter((row[0] for row in rows), np.int64)


def read_spaces(connection: Connection, schema: str) -> list[SpaceInfo]:
    """All spaces, oldest first."""
    rows = run(
        connection,
        "SELECT space, release, dim, metric, unit, side_space, side_dim, state, number, activated"
        f" FROM {schema}.spaces ORDER BY number",
    )
    return [SpaceInfo(SpaceSpec(*row[:7]), *row[7:]) for row in rows]


def find_space(connection: Connection, schema: str, space: str) -> SpaceInfo:
    """Raises IncompatibleSpaceError if the gallery does not have it."""
    return space_of(read_spaces(connection, schema), space)


def items(
    connection: Connection, schema: str, labels: Sequence[int] | Labels, space: str | None
) -> list[StoredItem | None]:
    """Items in the order of `labels`; None where there is none."""
    wanted = [int(label) for label in labels]
    of_vector, join = "NULL, NULL", ""
    if space is not None:
        table = table_of(schema, find_space(connection, schema, space).number)
        of_vector, join = "v.origin, v.uncertainty", f"LEFT JOIN {table} v USING (label)"
    rows = run(
        connection,
        f"SELECT {_ITEM}, {of_vector} FROM {schema}.items i {join} WHERE i.label = ANY(%s)",
        [wanted],
    )
    found = {item.label: item for item in map(item_of, rows)}
    return [found.get(label) for label in wanted]


def items_where(
    connection: Connection, schema: str, where: str, values: Sequence[Any], limit: int
) -> list[StoredItem]:
    """Items `i` for which `where` holds, by label."""
    rows = run(
        connection,
        f"SELECT {_ITEM}, NULL, NULL FROM {schema}.items i WHERE {where} ORDER BY i.label LIMIT %s",
        [*values, limit],
    )
    return [item_of(row) for row in rows]


def facets_of(connection: Connection, schema: str, labels: Labels) -> Mapping[int, Any]:
    """What is kept for filters (conditions.py) of those of `labels` that are there."""
    query = f"SELECT label, facets FROM {schema}.items WHERE label = ANY(%s)"
    return dict(run(connection, query, [labels.tolist()]).fetchall())


def count(connection: Connection, schema: str, space: str | None) -> int:
    """Number of items, or of vectors in a space."""
    table = f"{schema}.items"
    if space is not None:
        table = table_of(schema, find_space(connection, schema, space).number)
    found: int = run(connection, f"SELECT count(*) FROM {table}").fetchone()[0]
    return found


def stored(connection: Connection, schema: str, labels: Labels, info: SpaceInfo) -> StoredVectors:
    """Rows of those of `labels` that a space has, by label."""
    query = (
        "SELECT label, origin, uncertainty, embedding, side"
        f" FROM {table_of(schema, info.number)} WHERE label = ANY(%s) ORDER BY label"
    )
    found = run(connection, query, [labels.tolist()]).fetchall()
    columns = [[row[place] for row in found] for place in range(5)]
    return StoredVectors(
        np.array(columns[0], np.int64), columns[1], columns[2],
        from_binary(columns[3], info.spec.dim), columns[4],
    )  # fmt: skip


def random_labels(connection: Connection, table: str, count: int) -> Labels:
    """Labels of a table of vectors at random; see drawing.random_labels."""

    def following(drawn: list[int]) -> Labels:
        query = (
            "SELECT DISTINCT near.label FROM unnest(%s::bigint[]) AS drawn, LATERAL (SELECT label"
            f" FROM {table} WHERE label >= drawn ORDER BY label LIMIT 1) near ORDER BY near.label"
        )
        return label_column(run(connection, query, [drawn]))

    def shuffled() -> Labels:
        query = f"SELECT label FROM {table} ORDER BY random() LIMIT %s"
        return label_column(run(connection, query, [count]))

    bounds = run(connection, f"SELECT min(label), max(label) FROM {table}").fetchone()
    return reading.draw_labels(bounds, count, following, shuffled)


def epoch_of(connection: Connection, number: int) -> int:
    """Of a gallery's spaces and state. Raises NotFoundError where it is gone."""
    row = run(
        connection, "SELECT epoch FROM nobackfill.galleries WHERE number = %s", [number]
    ).fetchone()
    if row is None:
        raise NotFoundError("the gallery was deleted")
    return int(row[0])


def states(connection: Connection, schema: str) -> dict[str, Any]:
    """Every value of the state."""
    return {key: json.loads(value) for key, value in run(connection, _STATES.format(schema))}


def set_state(connection: Connection, schema: str, values: Mapping[str, Any]) -> None:
    """Keep JSON values; None removes."""
    for key, value in values.items():
        run(connection, f"DELETE FROM {schema}.state WHERE key = %s", [key])
        if value is not None:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
            run(connection, f"INSERT INTO {schema}.state VALUES (%s, %s)", [key, text])


_STATES = "SELECT key, value FROM {}.state"
