"""Create the tables of a gallery file by migrations.

Import it only where a file is created or migrated: importing sqlite_utils takes a large part of the
time of a search on a device.

    items(label, id, digest, metadata)         metadata is a JSON object
    attributes(key, kind, value, label)        an index of the metadata (sqlite_file.py)
    spaces(number, space, release, …, state)   one row for each vector space
    vectors_<number>(label, origin, uncertainty, embedding, side)
    state(key, value)                          small JSON values
    commits(count)                             transactions so far
"""

import sqlite3

from sqlite_utils import Database, Migrations

migrations = Migrations("gallery")

_FIRST = """
CREATE TABLE items (
    label INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    digest TEXT,
    metadata TEXT NOT NULL DEFAULT '{}'
);
CREATE TABLE attributes (
    key TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('text', 'number', 'flag')),
    value NOT NULL,
    label INTEGER NOT NULL,
    PRIMARY KEY (key, kind, value, label)
) WITHOUT ROWID;
CREATE TABLE spaces (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    space TEXT NOT NULL UNIQUE,
    release INTEGER NOT NULL,
    dim INTEGER NOT NULL,
    metric TEXT NOT NULL,
    unit INTEGER NOT NULL,
    side_space TEXT,
    side_dim INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('active', 'staging', 'previous')),
    activated INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX one_space_is_active ON spaces (state) WHERE state = 'active';
CREATE TABLE state (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE commits (count INTEGER NOT NULL);
INSERT INTO commits VALUES (0);
"""


@migrations()
def create_format_1(database: Database) -> None:
    """Create the tables of format 1 in an empty file, and record the format in `user_version`.

    The caller's transaction holds them.

    Raises:
        sqlite3.OperationalError: A table exists already.
    """
    # executescript would commit the transaction that holds both the migration and its record.
    for statement in filter(str.strip, _FIRST.split(";")):
        database.execute(statement)
    database.execute("PRAGMA user_version = 1")


def create_tables(connection: sqlite3.Connection) -> None:
    """Apply the migrations that a file lacks; each step and its record are one transaction.

    Does nothing to a file of the newest format.

    Args:
        connection: The file, outside of a transaction.

    Raises:
        sqlite3.Error: The file cannot be written, or its tables differ from those of its format.
            Steps before it stay applied.
    """
    migrations.apply(Database(connection))
