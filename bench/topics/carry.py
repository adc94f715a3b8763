"""`nobackfill carry` in a table of PostgreSQL against its parts alone, without any check: into a
fresh table, and in place."""

from collections.abc import Callable, Iterator
from typing import LiteralString

import numpy as np
import psycopg
from numpy.typing import NDArray

from bench.harness import Bench, Contender, Table, comparison_table, run_interleaved, time_call
from nobackfill.adopt.carrying import carry
from nobackfill.adopt.maps import Map
from nobackfill.adopt.pairs import WINDOW_ITEMS
from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.source import Target
from nobackfill.vectors import Vectors, normalise
from tests.support.postgres import running

DIM = 384
NOTE = (
    "Rows a second, {dim} to {dim} dims, a table (id bigint PRIMARY KEY, body text, embedding), "
    "windows of {window:,}. `COPY` reads by COPY, maps, and copies into a fresh "
    "table without a key: no old row is written, and no one else may write. `UPDATE` does the same "
    "by way of a temporary table into a new column: PostgreSQL writes a whole new row for each, "
    "which is what a column in place costs. `carry` also tells rows that others wrote meanwhile, "
    "compares what each new vector gives there with what was written, and sweeps once more; two "
    "windows at a time. `beside`: into a table of their own. The server is that of the tests "
    "(fsync off), with 1 GB of shared buffers."
)
_MEMORY = {"shared_buffers": "1GB", "maintenance_work_mem": "1GB", "max_wal_size": "8GB"}
# A row of COPY's binary form: its fields' number, and each field after its length.
_ROW = np.dtype([
    ("fields", ">i2"), ("id_bytes", ">i4"), ("id", ">i8"),
    ("bytes", ">i4"), ("dim", ">i2"), ("unused", ">i2"), ("vector", ">f4", DIM),
])  # fmt: skip
_HEAD = b"PGCOPY\n\xff\r\n\0" + bytes(8)

Rows = NDArray[np.void]
Connection = psycopg.Connection[tuple[object, ...]]
Way = Callable[[str, Connection, int, int, Map], None]


def run(bench: Bench) -> list[Table]:
    """Each way in turn, each round in a fresh copy of the table."""
    size, window = bench.size(300, 100_000, 1_000_000), bench.size(100, WINDOW_ITEMS, WINDOW_ITEMS)
    rng = np.random.default_rng(0)
    weight = np.linalg.qr(rng.standard_normal((DIM, DIM)))[0].astype(np.float32)
    mapping = Map("procrustes", weight, np.zeros(DIM, np.float32), unit_norm=True)
    ways: dict[str, Way] = {
        "COPY": _copied,
        "UPDATE": _updated,
        "carry": _carried,
        "carry, beside": _carried_beside,
    }
    with (
        running(_MEMORY) as server,
        server.database() as address,
        psycopg.connect(address, autocommit=True) as connection,
    ):
        _fill(connection, size, rng)

        def one(way: Way) -> float:
            _fresh(connection)
            return size / time_call(lambda: way(address, connection, size, window, mapping))

        contenders = [
            Contender(name, lambda way=way: one(way))  # type: ignore[misc]
            for name, way in ways.items()
        ]
        measured = run_interleaved(contenders, bench.size(1, 3, 3), warm=False)
    title = f"Carrying {size:,} rows of {DIM} dims"
    return [
        comparison_table(title, "rows/s", measured, "COPY", NOTE.format(dim=DIM, window=window))
    ]


def _fill(connection: Connection, size: int, rng: np.random.Generator) -> None:
    connection.execute("CREATE EXTENSION vector")
    _run(connection, "CREATE TABLE original (id bigint, embedding vector(384))")
    for first in range(0, size, WINDOW_ITEMS):
        count = min(WINDOW_ITEMS, size - first)
        vectors = normalise(rng.standard_normal((count, DIM)).astype(np.float32))
        _write(connection, "COPY original FROM STDIN (FORMAT BINARY)",
               _rows(np.arange(first, first + count), vectors))  # fmt: skip


def _fresh(connection: Connection) -> None:
    for statement in (
        "DROP TABLE IF EXISTS items, fresh, beside CASCADE",
        "CREATE TABLE items (id bigint PRIMARY KEY, body text, embedding vector(384))",
        "INSERT INTO items SELECT id, 'a text of some words', embedding FROM original",
        "VACUUM ANALYZE items",
        "CHECKPOINT",
    ):
        connection.execute(statement.encode())


def _copied(address: str, connection: Connection, size: int, window: int, mapping: Map) -> None:
    _run(connection, "CREATE TABLE fresh (id bigint, embedding vector(384))")
    for rows in _mapped(connection, size, window, mapping):
        _write(connection, "COPY fresh FROM STDIN (FORMAT BINARY)", rows)


def _updated(address: str, connection: Connection, size: int, window: int, mapping: Map) -> None:
    _run(connection, "ALTER TABLE items ADD COLUMN new vector(384)")
    for rows in _mapped(connection, size, window, mapping):
        with connection.transaction():
            _run(connection, "CREATE TEMPORARY TABLE w (id bigint, new vector) ON COMMIT DROP")
            _write(connection, "COPY w FROM STDIN (FORMAT BINARY)", rows)
            _run(connection, "UPDATE items t SET new = w.new FROM w WHERE t.id = w.id")


def _carried(
    address: str, connection: Connection, size: int, window: int, mapping: Map, to: str = "new"
) -> None:
    source = open_source(f"{address}#items")
    done = carry(source, Target(to, DIM, mapping.digest), mapping, rows_per_window=window)
    if done.new_vector_count != size:
        raise RuntimeError(f"{done.new_vector_count} of {size} are carried")


def _carried_beside(
    address: str, connection: Connection, size: int, window: int, mapping: Map
) -> None:
    _carried(address, connection, size, window, mapping, "table:beside")


def _mapped(connection: Connection, size: int, window: int, mapping: Map) -> Iterator[Rows]:
    for first in range(0, size, window):
        query = (
            f"COPY (SELECT id, embedding FROM items WHERE id >= {first} AND id < {first + window}) "  # noqa: S608
            "TO STDOUT (FORMAT BINARY)"
        )
        with connection.cursor() as cursor, cursor.copy(query.encode()) as copy:
            data = b"".join(bytes(piece) for piece in copy)
        rows = np.frombuffer(data[len(_HEAD) : -2], _ROW)
        yield _rows(rows["id"], mapping(rows["vector"].astype(np.float32)))


def _rows(ids: NDArray[np.int64], vectors: Vectors) -> Rows:
    made = np.zeros(len(ids), _ROW)
    made["fields"], made["id_bytes"], made["bytes"] = 2, 8, 4 + 4 * DIM
    made["id"], made["dim"], made["vector"] = ids, DIM, vectors
    return made


def _write(connection: Connection, statement: str, rows: Rows) -> None:
    with connection.cursor() as cursor, cursor.copy(statement.encode()) as copy:
        copy.write(_HEAD + rows.tobytes() + b"\xff\xff")


def _run(connection: Connection, statement: LiteralString) -> None:
    connection.execute(statement)
