"""Names of collections: a space's digest is never in an alias, a plan names its own collection."""

import hashlib

from nobackfill.server.stores.postgresql.database import Database, run

_OURS = "nobackfill_"
# Of a collection's columns: one of an older layout has another name, so that it is dropped, and
# what it held is told to a new one.
_LAYOUT = 2


def database_id(database: Database) -> str:
    """What tells a database from all others, a copy that was restored on another server too."""
    query = (
        "SELECT system_identifier || '/' || (SELECT oid FROM pg_database WHERE datname ="
        " current_database()) FROM pg_control_system()"
    )
    told = database.read(lambda connection: run(connection, query).fetchone()[0])
    return hashlib.sha256(str(told).encode()).hexdigest()[:12]


def prefix_of(database: str) -> str:
    """Of every collection that belongs to a database."""
    return f"{_OURS}{database}_"


def name_of(database: str, schema: str, number: int) -> str:
    """Of the collection of one space. `schema` is nobackfill_<number>, numbers of spaces in it are
    never used twice."""
    return f"{prefix_of(database)}{schema.removeprefix(_OURS)}_{number:d}_{_LAYOUT}"
