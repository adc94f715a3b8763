"""Who embeds which item, what is still wanted, and what a day has cost: tables of an SQLite file.

Any number of processes share the file. What is written is in the transaction of the caller.
"""

import os
import sqlite3
import time
from collections.abc import Collection, Sequence
from pathlib import Path

# A claim is another's after this many seconds, or when its process has ended.
CLAIM_SECONDS = 600.0
SCHEMA = """
CREATE TABLE IF NOT EXISTS claim (
    id TEXT PRIMARY KEY, process INTEGER NOT NULL, until REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS wanted (id TEXT PRIMARY KEY, times INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spent (day TEXT PRIMARY KEY, items INTEGER NOT NULL) WITHOUT ROWID;
"""


def claim(connection: sqlite3.Connection, names: Sequence[str], day: str, budget: int) -> list[str]:
    """Those of `names`, in their order, that nobody embeds at present and that the day's budget has
    room for; the others are noted as wanted."""
    now = time.time()
    _free(connection, now)
    room, mine = budget - spent(connection, day), list[str]()
    for name in names:
        if room > len(mine):
            done = connection.execute(
                "INSERT OR IGNORE INTO claim VALUES (?, ?, ?)",
                (name, os.getpid(), now + CLAIM_SECONDS),
            )
            if done.rowcount:
                mine.append(name)
                continue
        connection.execute(
            "INSERT INTO wanted VALUES (?, 1) ON CONFLICT (id) DO UPDATE SET times = times + 1",
            (name,),
        )
    connection.execute(
        "INSERT INTO spent VALUES (?, ?) "
        "ON CONFLICT (day) DO UPDATE SET items = items + excluded.items",
        (day, len(mine)),
    )
    return mine


def settle(connection: sqlite3.Connection, names: Collection[str]) -> None:
    """They are embedded, or gone: nobody claims or wants them any more."""
    rows = [(name,) for name in names]
    connection.executemany("DELETE FROM claim WHERE id = ?", rows)
    connection.executemany("DELETE FROM wanted WHERE id = ?", rows)


def release(connection: sqlite3.Connection, names: Collection[str]) -> None:
    """They were not embedded: what they cost their day is given back, and they are wanted last."""
    rows = [(name,) for name in names]
    # A claim says when it was made. One that is another's by now was paid by that one.
    connection.executemany(
        "UPDATE spent SET items = items - 1 WHERE items > 0 AND day = "
        "(SELECT date(until - ?, 'unixepoch') FROM claim WHERE id = ? AND process = ?)",
        [(CLAIM_SECONDS, name, os.getpid()) for name in names],
    )
    connection.executemany("DELETE FROM claim WHERE id = ?", rows)
    connection.executemany(
        "INSERT INTO wanted VALUES (?, 0) ON CONFLICT (id) DO UPDATE SET times = 0", rows
    )


def wanted(connection: sqlite3.Connection, count: int, where: str = "TRUE") -> list[str]:
    """Names that were asked for in vain and for which `where` holds, most often first."""
    found = connection.execute(
        f"SELECT id FROM wanted WHERE {where} ORDER BY times DESC, id LIMIT ?",  # noqa: S608
        (count,),
    )
    return [name for (name,) in found]


def spent(connection: sqlite3.Connection, day: str) -> int:
    """Items that were claimed on a day, without those that were given up."""
    row = connection.execute("SELECT items FROM spent WHERE day = ?", (day,)).fetchone()
    return int(row[0]) if row else 0


def _free(connection: sqlite3.Connection, now: float) -> None:
    """Claims that are too old, and those of processes that were killed."""
    connection.execute("DELETE FROM claim WHERE until < ?", (now,))
    holders = connection.execute("SELECT DISTINCT process FROM claim").fetchall()
    for (process,) in holders:
        if process != os.getpid() and not Path(f"/proc/{process}").exists():
            connection.execute("DELETE FROM claim WHERE process = ?", (process,))
