"""The tables: a schema `nobackfill` of the database, and one schema for each gallery.

    nobackfill.format(version, written_by)     what this code reads and writes; the version that did
    nobackfill.gateway(value, epoch, term)     one row: what gateways remember, and who leads
    nobackfill.galleries(number, name, epoch)
    nobackfill.jobs(gallery, value)            the last upgrade of each gallery
    nobackfill.commits(mark, at)               the last transaction of each thread that writes
    nobackfill_<number>.items(label, id, digest, metadata, facets)
    nobackfill_<number>.spaces(number, space, release, …, state)
    nobackfill_<number>.vectors_<number>(label, origin, uncertainty, embedding, side)
    nobackfill_<number>.state(key, value)      small JSON values
    nobackfill_<number>.gate()                 no rows: its lock is the put gate

`metadata` is JSON as it was put, `facets` the same for filters (conditions.py). One of its indexes
finds a key, the other a key's value: by the first, which knows both apart, an equality meets every
item that has the value in whatever key. No foreign keys: to make or drop one locks `items`, and
searches with it. Vectors go with their items because every statement that removes items removes
theirs, with the rows locked.
"""

from dataclasses import dataclass
from importlib.metadata import version

from nobackfill.errors import BusyError, ConfigurationError, InvalidInputError, describe_writer
from nobackfill.gallery.spec import SpaceSpec, State
from nobackfill.server.stores.postgresql import database
from nobackfill.server.stores.postgresql.database import Connection, execute, scalar

# The format of a database, made step by step, and taken back the same way.
#
# Each version of this code reads one format, and goes from the one before to it and back.

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
    """Hold the statements that convert to a format from the one before it, and back."""

    forward: tuple[str, ...]
    backward: tuple[str, ...]


# The record of what Milvus knows is made again when a gallery is opened with a Milvus.
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


def migrate(connection: Connection, to_format: int = FORMAT) -> int:
    """Bring the database to a format, in the caller's transaction, and return the format that it
    had.

    Missing tables of the first format are created first. Others that migrate wait until the
    transaction ends. After a conversion, no gateway can begin to serve before that. A database that
    has the format already only gets what that format may lack.

    Args:
        connection: a connection inside a transaction.
        to_format: the format, 1 to FORMAT. Going back deletes what older formats lack, such as the
            audit and the records of upgrades.

    Returns:
        The former format; 0 if the database had none.

    Raises:
        ConfigurationError: `to_format` or the database's format is not one of 1 to FORMAT.
        BusyError: the database must be converted, and a gateway serves from it.
        psycopg.Error: a statement fails, as without rights.
    """
    execute(connection, "SELECT pg_advisory_xact_lock(hashtext('nobackfill'))")
    for statement in _FIRST.split(";"):
        execute(connection, statement)
    # This table belongs to no format: a version without it is not disturbed, and does not keep it.
    if to_format == FORMAT:
        execute(connection, database.TABLE)
    # As JSON: versions before this one made no column of the writer.
    query = "SELECT version, to_jsonb(f) ->> 'written_by' FROM nobackfill.format f"
    row = execute(connection, query).fetchone()
    if row is None:
        execute(connection, "INSERT INTO nobackfill.format VALUES (1)")
    found = 1 if row is None else int(row[0])
    if not 1 <= to_format <= FORMAT or not 1 <= found <= FORMAT:
        raise ConfigurationError(
            f"the database is of format {found}, and nobackfill {version('nobackfill')} knows "
            f"formats 1 to {FORMAT}; use {describe_writer(None if row is None else row[1])}: its "
            f"`gateway data migrate --to {FORMAT}` converts the database back to a format that "
            "this version knows"
        )
    noted = (
        "SELECT count(*) FROM pg_attribute WHERE attname = 'written_by' AND NOT attisdropped"
        " AND attrelid = 'nobackfill.format'::regclass"
    )
    # Looked at first: the lock of a change that changes nothing makes all gateways wait.
    if to_format == FORMAT and not scalar(connection, noted):
        execute(connection, "ALTER TABLE nobackfill.format ADD COLUMN written_by text")
    if found == to_format:
        return found
    lock = "SELECT pg_try_advisory_xact_lock(hashtext('nobackfill.gateway'))"
    if not scalar(connection, lock):
        raise BusyError(
            "this database must be converted to another format, but a gateway serves from it; stop "
            "every gateway of this database, then run the command again"
        )
    steps = [_STEPS[step].forward for step in range(found + 1, to_format + 1)]
    steps += [_STEPS[step].backward for step in range(found, to_format, -1)]
    for statements in steps:
        for statement in statements:
            execute(connection, statement)
    if to_format < FORMAT:
        execute(connection, database.DROP)
        execute(connection, "ALTER TABLE nobackfill.format DROP COLUMN IF EXISTS written_by")
    execute(connection, "UPDATE nobackfill.format SET version = %s", [to_format])
    return 0 if row is None else found


# Oldest version of pgvector: filters next to an index need its iterative scans.
_LEAST_PGVECTOR = (0, 8)
# Dimensions of a `vector`, and of an HNSW index on it and on a `halfvec`.
MOST_DIM, MOST_INDEXED, MOST_HALF = 16_000, 2_000, 4_000
M, EF_CONSTRUCTION = 16, 64

_GALLERY = """
CREATE SCHEMA {schema};
CREATE TABLE {schema}.items (
    label bigint PRIMARY KEY GENERATED BY DEFAULT AS IDENTITY,
    id text NOT NULL UNIQUE COLLATE "C",
    digest text,
    metadata text NOT NULL DEFAULT '{{}}',
    facets jsonb NOT NULL DEFAULT '{{}}'
);
CREATE INDEX ON {schema}.items USING gin (facets);
CREATE INDEX ON {schema}.items USING gin (facets jsonb_path_ops);
CREATE TABLE {schema}.spaces (
    number integer PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    space text NOT NULL UNIQUE COLLATE "C",
    release integer NOT NULL,
    dim integer NOT NULL,
    metric text NOT NULL,
    unit boolean NOT NULL,
    side_space text,
    side_dim integer NOT NULL,
    state text NOT NULL CHECK (state IN ('active', 'staging', 'previous')),
    activated integer NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX one_space_is_active ON {schema}.spaces (state) WHERE state = 'active';
CREATE TABLE {schema}.state (key text PRIMARY KEY, value text NOT NULL);
CREATE TABLE {schema}.gate ()
"""


def prepare(connection: Connection) -> None:
    """Create what a database lacks, and convert it to this version's format.

    It does nothing more in a database that is complete, except that it forgets old commits. Several
    gateways may call it at once; they wait for each other, without a limit of time. It works in one
    transaction.

    Args:
        connection: a connection outside a transaction.

    Raises:
        ConfigurationError: the database has no UTF8, an old pgvector, pgvector in another schema,
            or a format that a newer version wrote.
        BusyError: a gateway of an older version serves from it.
        psycopg.Error: a statement fails, as without pgvector or the right to create things;
            `Database.open` translates it.
    """
    encoding = connection.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise ConfigurationError(
            f"expected a database that stores texts as UTF8, found {encoding}, which cannot store "
            "every id and metadata text; create another database with CREATE DATABASE NAME "
            "ENCODING 'UTF8' TEMPLATE template0, and name it with --store"
        )
    with connection.transaction():
        execute(connection, "SELECT pg_advisory_xact_lock(hashtext('nobackfill'))")
        execute(connection, "CREATE EXTENSION IF NOT EXISTS vector SCHEMA public")
        version, place = execute(
            connection,
            "SELECT extversion, extnamespace::regnamespace::text FROM pg_extension"
            " WHERE extname = 'vector'",
        ).fetchone()
        if place != "public":
            raise ConfigurationError(
                f"expected pgvector in the schema public of the database, found it in {place}; run "
                "ALTER EXTENSION vector SET SCHEMA public"
            )
        if tuple(int(part) for part in version.split(".")[:2]) < _LEAST_PGVECTOR:
            raise ConfigurationError(
                f"expected pgvector 0.8 or newer in the database, got {version}; install a newer "
                "pgvector on its server, and run ALTER EXTENSION vector UPDATE in the database"
            )
        migrate(connection)
        database.delete_old_marks(connection)


def schema_name(gallery_number: int) -> str:
    """Return the name of a gallery's schema.

    The gallery need not exist.
    """
    return f"nobackfill_{gallery_number:d}"


def create_gallery(connection: Connection, gallery_number: int, spec: SpaceSpec) -> None:
    """Create the tables of a gallery with one active space.

    The caller inserts the gallery's row and commits. The space has no graph yet.

    Raises:
        InvalidInputError: the space has no dimension, or more than MOST_DIM.
        psycopg.Error: a statement fails, as if the schema exists; the caller translates it.
    """
    schema = schema_name(gallery_number)
    for statement in _GALLERY.format(schema=schema).split(";"):
        execute(connection, statement)
    add_space(connection, schema, spec, "active")


def drop_gallery(connection: Connection, gallery_number: int) -> None:
    """Delete a gallery's schema with all its tables.

    A schema that does not exist is ignored. Call it within the transaction that deletes the
    gallery's row.

    Raises:
        psycopg.Error: the statement fails, as without the table; the caller translates it.
    """
    execute(connection, f"DROP SCHEMA IF EXISTS {schema_name(gallery_number)} CASCADE")


def table_name(schema: str, space_number: int) -> str:
    """Return the name of a space's table.

    The table need not exist. The name needs no quotes.
    """
    return f"{schema}.vectors_{space_number:d}"


def add_space(connection: Connection, schema: str, spec: SpaceSpec, state: State) -> None:
    """Record a space and create its table, without a graph; the caller commits.

    Args:
        connection: a connection inside a transaction.
        schema: schema of the gallery.
        spec: the space.
        state: active, staging or previous.

    Raises:
        InvalidInputError: the space has no dimension, or more than MOST_DIM.
        psycopg.Error: a statement fails, as for a second active space or an id that exists.
    """
    if not 1 <= spec.dim <= MOST_DIM:
        raise InvalidInputError(
            f"release {spec.release}: pgvector stores vectors of up to {MOST_DIM} dimensions, but "
            f"this release has {spec.dim}; store the galleries in files with --store sqlite:FOLDER"
        )
    number = execute(
        connection,
        f"INSERT INTO {schema}.spaces (space, release, dim, metric, unit, side_space, side_dim,"
        " state, activated) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s) RETURNING number",
        [
            spec.space, spec.release, spec.dim, spec.metric, spec.unit_norm, spec.side_space,
            spec.side_dim, state, int(state == "active"),
        ],
    ).fetchone()[0]  # fmt: skip
    execute(
        connection,
        f"CREATE TABLE {table_name(schema, number)} (label bigint PRIMARY KEY,"
        " origin text NOT NULL, uncertainty double precision,"
        f" embedding vector({spec.dim:d}) NOT NULL, side bytea)",
    )


def index_statements(
    schema: str, space_number: int, spec: SpaceSpec, concurrently: str = ""
) -> list[str]:
    """Return the statements that create a space's graph; none if it has too many dimensions.

    A space of more than MOST_INDEXED dimensions gets a graph of 16-bit floats. The statement fails
    if the graph exists.

    Args:
        schema: schema of the gallery.
        space_number: number of the space.
        spec: the space.
        concurrently: "CONCURRENTLY" to build while others write; "" keeps them waiting. PostgreSQL
            refuses CONCURRENTLY within a transaction.

    Returns:
        One statement; none for more than MOST_HALF dimensions.
    """
    if spec.dim > MOST_HALF:
        return []
    half = spec.dim > MOST_INDEXED
    kind = "halfvec" if half else "vector"
    column = f"(embedding::halfvec({spec.dim:d}))" if half else "embedding"
    operators = f"{kind}_{'l2' if spec.metric == 'squared_l2' else 'cosine'}_ops"
    return [
        f"CREATE INDEX {concurrently} vectors_{space_number:d}_graph ON "
        f"{table_name(schema, space_number)} USING hnsw (({column}) {operators})"
        f" WITH (m = {M}, ef_construction = {EF_CONSTRUCTION})"
    ]
