"""The format of a database, made step by step, and taken back the same way.

Each version of this code reads one format, and goes from the one before to it and back.
"""

from dataclasses import dataclass
from importlib.metadata import version

from nobackfill.errors import BusyError, ConfigurationError
from nobackfill.server.stores.postgresql import commits
from nobackfill.server.stores.postgresql.database import Connection, run

FORMAT = 3

_FIRST = """
CREATE SCHEMA IF NOT EXISTS nobackfill;
CREATE TABLE IF NOT EXISTS nobackfill.format (version integer NOT NULL);
CREATE TABLE IF NOT EXISTS nobackfill.gateway (
    one boolean PRIMARY KEY DEFAULT true CHECK (one), value text NOT NULL
);
CREATE TABLE IF NOT EXISTS nobackfill.galleries (
    number integer PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    name text NOT NULL UNIQUE COLLATE "C"
)
"""


@dataclass(frozen=True)
class _Step:
    """To a format from the one before, and back: statements."""

    there: tuple[str, ...]
    back: tuple[str, ...]


# What Milvus was told, and is to be told, is begun again when a gallery is opened with one.
_FORGET_MILVUS = """
DO $$
DECLARE gallery text;
BEGIN
    FOR gallery IN SELECT 'nobackfill_' || number FROM nobackfill.galleries LOOP
        EXECUTE 'DROP TABLE IF EXISTS ' || gallery || '.pending';
        EXECUTE 'DROP FUNCTION IF EXISTS ' || gallery || '.note_pending() CASCADE';
        EXECUTE 'DROP FUNCTION IF EXISTS ' || gallery || '.note_described() CASCADE';
    END LOOP;
END $$
"""

_STEPS = {
    # Several gateways: epochs and terms, and jobs that all of them see.
    2: _Step(
        (
            """
ALTER TABLE nobackfill.gateway ADD COLUMN epoch bigint NOT NULL DEFAULT 0,
    ADD COLUMN term bigint NOT NULL DEFAULT 0
""",
            "ALTER TABLE nobackfill.galleries ADD COLUMN epoch bigint NOT NULL DEFAULT 0",
            "CREATE TABLE nobackfill.jobs (gallery text PRIMARY KEY, value text NOT NULL)",
            """
CREATE TABLE nobackfill.audit (
    number bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    who text NOT NULL, what text NOT NULL, of_what text NOT NULL
)
""",
            "INSERT INTO nobackfill.gateway (value) VALUES ('{}') ON CONFLICT DO NOTHING",
        ),
        (
            "DROP TABLE nobackfill.audit",
            "DROP TABLE nobackfill.jobs",
            "ALTER TABLE nobackfill.galleries DROP COLUMN epoch",
            "ALTER TABLE nobackfill.gateway DROP COLUMN epoch, DROP COLUMN term",
        ),
    ),
    # A Milvus is told of metadata: a gateway that does not would take notes that it cannot act on.
    3: _Step((_FORGET_MILVUS,), (_FORGET_MILVUS,)),
}


def migrate(connection: Connection, to: int = FORMAT) -> int:
    """Bring the database to a format, in the caller's transaction; the one that it had, 0 for none.

    Raises ConfigurationError for a format from which no step leads there, BusyError where a gateway
    serves from the database.
    """
    run(connection, "SELECT pg_advisory_xact_lock(hashtext('nobackfill'))")
    for statement in _FIRST.split(";"):
        run(connection, statement)
    # Of no format: a version that does not know it is not disturbed, nor left with it.
    if to == FORMAT:
        run(connection, commits.TABLE)
    row = run(connection, "SELECT version FROM nobackfill.format").fetchone()
    if row is None:
        run(connection, "INSERT INTO nobackfill.format VALUES (1)")
    found = 1 if row is None else int(row[0])
    if not 1 <= to <= FORMAT or not 1 <= found <= FORMAT:
        raise ConfigurationError(
            f"the database is of format {found}, and nobackfill {version('nobackfill')} knows "
            f"formats 1 to {FORMAT}; start the newer version that wrote it, whose `gateway "
            f"migrate --to {FORMAT}` takes it back"
        )
    if found == to:
        return found
    if not run(
        connection, "SELECT pg_try_advisory_xact_lock(hashtext('nobackfill.gateway'))"
    ).fetchone()[0]:
        raise BusyError(
            "a gateway serves from this database, which is to be of another format; stop it first"
        )
    steps = [_STEPS[step].there for step in range(found + 1, to + 1)]
    steps += [_STEPS[step].back for step in range(found, to, -1)]
    for statements in steps:
        for statement in statements:
            run(connection, statement)
    if to < FORMAT:
        run(connection, commits.DROP)
    run(connection, "UPDATE nobackfill.format SET version = %s", [to])
    return 0 if row is None else found
