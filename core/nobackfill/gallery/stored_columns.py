"""Columns of metadata as the file has them.

Read in a few statements of one row each: SQLite works without the interpreter's lock, which a
statement of many rows takes and gives back for each of them, beside searches that want it too.
"""

import json
import sqlite3

import numpy as np
from numpy.typing import NDArray

from nobackfill.gallery.columns import Column, Rows, Sorted, Texts, in_order
from nobackfill.gallery.search.index import Labels, Mask

_FLOATS = np.dtype([("value", np.float64), ("label", np.int64)])


def labels(connection: sqlite3.Connection) -> Labels:
    """Of all items, increasing."""
    return np.sort(_integers(connection, "SELECT group_concat(label) FROM items")[0])


def read(connection: sqlite3.Connection, key: str, labels: Labels) -> Column:
    """What items of `labels` (increasing) have under `key`, as rows of these; others count not."""
    return Column(
        _texts(connection, key, labels),
        _whole(connection, key, labels),
        _floats(connection, key, labels),
        (_flag(connection, key, 0, labels), _flag(connection, key, 1, labels)),
    )


def find(labels: Labels, wanted: Labels) -> tuple[NDArray[np.intp], Mask]:
    """For each of `wanted` its row in `labels` (increasing), and whether it is there at all."""
    rows = np.searchsorted(labels, wanted)
    there = rows < len(labels)
    rows[~there] = 0
    there[there] = labels[rows[there]] == wanted[there]
    return rows, there


def _texts(connection: sqlite3.Connection, key: str, labels: Labels) -> Texts:
    values, counts = connection.execute(
        "SELECT json_group_array(value), group_concat(times) FROM (SELECT value, count(*) AS times"
        " FROM attributes WHERE key = ? AND kind = 'text' GROUP BY value ORDER BY value)",
        (key,),
    ).fetchone()
    (found,) = _integers(
        connection,
        "SELECT group_concat(label) FROM (SELECT label FROM attributes"
        " WHERE key = ? AND kind = 'text' ORDER BY value, label)",
        key,
    )
    texts: list[str] = json.loads(values)
    rows, there = find(labels, found)
    of_text = np.repeat(np.arange(len(texts)), _numbers(counts))[there]
    starts = np.searchsorted(of_text, np.arange(len(texts) + 1)).astype(np.int64)
    return Texts(texts, starts, rows[there].astype(np.int32))


def _whole(connection: sqlite3.Connection, key: str, labels: Labels) -> Sorted:
    values, found = _integers(
        connection,
        "SELECT group_concat(value), group_concat(label) FROM attributes"
        " WHERE key = ? AND kind = 'number' AND typeof(value) = 'integer'",
        key,
    )
    rows, there = find(labels, found)
    return in_order(values[there], rows[there].astype(np.int32))


def _floats(connection: sqlite3.Connection, key: str, labels: Labels) -> Sorted:
    # Row by row: SQLite's texts of them are not exact.
    found = connection.execute(
        "SELECT value, label FROM attributes"
        " WHERE key = ? AND kind = 'number' AND typeof(value) = 'real'",
        (key,),
    )
    pairs = np.fromiter(found, _FLOATS)
    rows, there = find(labels, pairs["label"])
    return in_order(pairs["value"][there], rows[there].astype(np.int32))


def _flag(connection: sqlite3.Connection, key: str, flag: int, labels: Labels) -> Rows:
    (found,) = _integers(
        connection,
        "SELECT group_concat(label) FROM attributes WHERE key = ? AND kind = 'flag' AND value = ?",
        key,
        flag,
    )
    rows, there = find(labels, found)
    return rows[there].astype(np.int32)


def _integers(
    connection: sqlite3.Connection, statement: str, *parameters: str | int
) -> list[NDArray[np.int64]]:
    return [_numbers(text) for text in connection.execute(statement, parameters).fetchone()]


def _numbers(text: str | None) -> NDArray[np.int64]:
    """What group_concat gives: None for no rows."""
    return np.fromstring(text or "", np.int64, sep=",")
