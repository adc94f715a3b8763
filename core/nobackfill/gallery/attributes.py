"""The index of metadata: table `attributes` holds what the JSON in `items` says, a row a key.

Kept by statements here rather than by triggers, which make every insert of an item five times
slower. Each is called in the transaction that changes the items.
"""

import sqlite3

from nobackfill.gallery.search.index import Labels

# Each key with its value, or with each text of a list: of items for which `where` holds.
_OF_ITEMS = """
    SELECT a.key,
           CASE a.type WHEN 'text' THEN 'text' WHEN 'true' THEN 'flag' WHEN 'false' THEN 'flag'
                       ELSE 'number' END,
           a.atom, i.label
    FROM items i, json_each(i.metadata) a
    WHERE {where} AND i.metadata <> '{{}}' AND a.type <> 'array'
    UNION ALL
    SELECT DISTINCT a.key, 'text', e.atom, i.label
    FROM items i, json_each(i.metadata) a,
         json_each(CASE a.type WHEN 'array' THEN a.value ELSE '[]' END) e
    WHERE {where} AND instr(i.metadata, '[')"""

_FORGET = (
    "DELETE FROM attributes WHERE (key, kind, value, label) IN"
    f" ({_OF_ITEMS.format(where='i.label = :label')})"
)


def add(connection: sqlite3.Connection, first: int, last: int) -> None:
    """Index the items with labels from `first` to `last`."""
    connection.execute(
        f"INSERT INTO attributes {_OF_ITEMS.format(where='i.label BETWEEN :first AND :last')}",
        {"first": first, "last": last},
    )


def remove(connection: sqlite3.Connection, labels: Labels) -> None:
    """Forget items, before they are deleted or described anew."""
    connection.executemany(_FORGET, ({"label": label} for label in labels.tolist()))


def describe(connection: sqlite3.Connection, described: list[tuple[int, str]]) -> None:
    """Give items, by label, other metadata as JSON texts; what is the same is not written."""
    for label, metadata in described:
        row = connection.execute("SELECT metadata FROM items WHERE label = ?", (label,)).fetchone()
        if row[0] == metadata:
            continue
        connection.execute(_FORGET, {"label": label})
        connection.execute("UPDATE items SET metadata = ? WHERE label = ?", (metadata, label))
        add(connection, label, label)
