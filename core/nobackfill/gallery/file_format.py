"""What marks a gallery file as ours, and of which format."""

import re
import sqlite3
from pathlib import Path

from nobackfill.errors import DamagedError, VerificationError

# Of the file: "nobf".
APPLICATION = 0x6E6F6266
# Of the tables; PRAGMA user_version of every gallery file. schema.py leads there.
FORMAT = 1


def format_of(connection: sqlite3.Connection, path: Path) -> int:
    """The format of the tables. Raises VerificationError for another program's, or a newer one."""
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
        raise not_a_gallery(path, "a database of another program")
    found: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if found > FORMAT:
        raise VerificationError(
            f"{path}: expected a gallery of format {FORMAT} or older, got format {found}; use a "
            "newer nobackfill"
        )
    return found


_COLUMNS = {
    "items": ["label", "id", "digest", "metadata"],
    "attributes": ["key", "kind", "value", "label"],
    "spaces": [
        "number", "space", "release", "dim", "metric", "unit", "side_space", "side_dim", "state",
        "activated",
    ],
    "state": ["key", "value"],
    "commits": ["count"],
}  # fmt: skip
_VECTORS = re.compile(r"vectors_\d+")
_VECTOR_COLUMNS = ["label", "origin", "uncertainty", "embedding", "side"]
# Made by a device's first push.
_OTHERS = frozenset({"vault"})


def check_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a file in which other things stand where a gallery's tables belong.

    A view can be endless, a trigger runs at each write, and a generated column computes whatever
    its author wrote. Raises DamagedError.
    """
    rows = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    tables = set()
    for kind, name, statement in rows:
        if not isinstance(name, str):
            raise DamagedError(path, "its schema is not as it was written")
        ours = name.casefold()
        if kind == "trigger":
            raise DamagedError(path, f"it has a trigger, {name[:64]!r}, and a gallery has none")
        if not (ours in _COLUMNS or ours in _OTHERS or _VECTORS.fullmatch(ours)):
            continue
        if kind != "table" or not str(statement).upper().startswith("CREATE TABLE"):
            raise DamagedError(path, f"{name[:64]!r} is no table, and a gallery needs it as one")
        tables.add(ours)
    for table in sorted(tables | _COLUMNS.keys()):
        expected = _VECTOR_COLUMNS if _VECTORS.fullmatch(table) else _COLUMNS.get(table)
        # `hidden` is not 0 for columns that are generated.
        query = "SELECT name, hidden, type, pk FROM pragma_table_xinfo(?)"
        columns = connection.execute(query, (table,)).fetchall()
        if any(hidden for _, hidden, _, _ in columns) or (
            expected is not None and [name for name, *_ in columns] != expected
        ):
            found = ", ".join(str(name)[:64] for name, *_ in columns) or "none"
            raise DamagedError(path, f"its table {table!r} has other columns: {found}")
        keyed = expected is not None and expected[0] == "label"
        if keyed and tuple(columns[0][2:]) != ("INTEGER", 1):
            raise DamagedError(path, f"its table {table!r} has no number as its key")


def not_a_gallery(path: Path, kind: str) -> VerificationError:
    return VerificationError(f"{path}: expected a gallery, got {kind}; name the gallery's file")
