"""Create the tables of a gallery file by migrations.

Import it only where a file is created or migrated: importing sqlite_utils takes a large part of the
time of a search on a device.

    items(label, id, digest, metadata)         metadata is a JSON object
    attributes(key, kind, value, label)        an index of the metadata (tables.py)
    spaces(number, space, release, …, state)   one row for each vector space
    vectors_<number>(label, origin, uncertainty, embedding, side)
    state(key, value)                          small JSON values
    commits(count)                             transactions so far
"""

import sqlite3
from importlib.metadata import version

from sqlite_utils import Database, Migrations

from nobackfill.gallery.tables import FORMAT, WRITERS

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
def first(database: Database) -> None:
    """Create format 1."""
    # executescript would commit the transaction that holds both the migration and its record.
    statement = ""
    for line in _FIRST.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            database.execute(statement)
            statement = ""
    database.execute("PRAGMA user_version = 1")


def migrate(connection: sqlite3.Connection) -> None:
    """Migrate a file to FORMAT, and record the version of this program.

    Each step and its record are one transaction.

    Raises:
        sqlite3.DatabaseError: The migrations end in another format.
    """
    migrations.apply(Database(connection))
    # In the table of the steps, where older versions ignore it.
    connection.execute(
        "INSERT OR REPLACE INTO _sqlite_migrations (migration_set, name, applied_at) "
        "VALUES (?, ?, datetime())",
        [WRITERS, version("nobackfill")],
    )
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if found != FORMAT:
        raise sqlite3.DatabaseError(f"the migrations lead to format {found}, expected {FORMAT}")
