"""New vectors in a table beside: whoever writes to the old one meanwhile is neither stopped nor
overtaken, and at no moment is a vector there of what its row no longer holds."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import numpy as np
import psycopg
import pytest

from nobackfill.adopt.carrying import carry
from nobackfill.adopt.closed_form import fit_maps
from nobackfill.adopt.maps import normalised
from nobackfill.adopt.sources.opening import open_searchable, open_source
from nobackfill.adopt.sources.source import Rows, Source, Target, Window
from nobackfill.errors import AlreadyExistsError, BusyError, VerificationError
from nobackfill.vectors import Vectors
from tests.adopt.made import world
from tests.support.postgres import Server

MADE = world(300)
MAPS = fit_maps(MADE.old, MADE.new)
MAP = MAPS["procrustes"]
TARGET = Target("table:beside", MAP.dims[1], MAP.digest)
Connection = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def table(postgres: Server) -> Iterator[tuple[str, Connection]]:
    """A table `t` with an index of its vectors."""
    with postgres.connected() as (address, connection):
        connection.execute("CREATE EXTENSION vector")
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, v vector(24), body text)")
        put(connection, range(300), MADE.old)
        connection.execute("CREATE INDEX ON t USING hnsw (v vector_cosine_ops)")
        yield address, connection


def put(connection: Connection, keys: Sequence[int], vectors: Vectors) -> None:
    rows = [(n, str(v.tolist())) for n, v in zip(keys, vectors, strict=True)]
    connection.cursor().executemany(
        "INSERT INTO t (id, v) VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET v = EXCLUDED.v", rows
    )


def drawn(seed: int, count: int) -> Vectors:
    return normalised(np.random.default_rng(seed).normal(size=(count, 24)).astype(np.float32))


def stale(connection: Connection) -> int:
    """New vectors that are not of what their row holds in the same moment."""
    rows = connection.execute(
        "SELECT t.v::real[], b.v::real[] FROM beside b LEFT JOIN t USING (id) WHERE b.v IS NOT NULL"
    ).fetchall()
    # One without a row is of none.
    kept = [(old, new) for old, new in rows if old is not None]
    if not kept:
        return len(rows)
    old, new = (np.array(part, np.float32) for part in zip(*kept, strict=True))
    return len(rows) - len(kept) + int((np.abs(MAP(old) - new).max(1) > 1e-4).sum())


def carried(address: str, window: int = 50) -> int:
    return carry(open_source(f"{address}#t"), TARGET, MAP, window=window).total


class Racing:
    """A source between whose reading of a window and writing it `between` happens."""

    def __init__(self, source: Source, between: Callable[[], None]) -> None:
        self._source, self._between = source, between

    def __getattr__(self, name: str) -> object:
        return getattr(self._source, name)

    def windows(self, rows: int) -> Iterator[Window]:
        return self._source.windows(rows)

    def beside(self, target: Target) -> object:
        beside = self._source.beside(target)
        write = beside.write

        def racing(rows: Rows, vectors: Vectors) -> None:
            self._between()
            write(rows, vectors)

        beside.write = racing  # type: ignore[method-assign]
        return beside


def test_no_row_of_the_old_table_is_written(table: tuple[str, Connection]) -> None:
    address, connection = table
    written = (
        "SELECT sum(xmin::text::bigint), sum(xmax::text::bigint), pg_relation_size('t') FROM t"
    )
    before = connection.execute(written).fetchone()
    assert carried(address) == 300
    assert connection.execute(written).fetchone() == before
    assert stale(connection) == 0


def test_a_transaction_that_stays_open_is_given_way_to(table: tuple[str, Connection]) -> None:
    address, connection = table
    source = open_source(f"{address}#t")
    with psycopg.connect(address) as other:
        other.execute("UPDATE t SET v = %s WHERE id = 7", (str(drawn(0, 1)[0].tolist()),))
        # The first sweep makes the triggers, which would wait for it.
        with pytest.raises(BusyError):
            carry(source, TARGET, MAP)
        other.rollback()
    opened: list[psycopg.Connection[Any]] = []

    def between() -> None:
        if not opened:
            opened.append(psycopg.connect(address))
            vector = str(drawn(1, 1)[0].tolist())
            opened[0].execute("UPDATE t SET v = %s WHERE id = 7", (vector,))

    with pytest.raises(BusyError, match="quieter hour"):
        carry(Racing(source, between), TARGET, MAP, window=500)  # type: ignore[arg-type]
    # It was never waited for so long that PostgreSQL would have ended it.
    opened[0].execute("SELECT 1")
    opened[0].commit()
    opened[0].close()
    assert carried(address) == 300
    assert stale(connection) == 0


def test_a_key_that_comes_back_after_all_was_emptied_has_its_own_vector(
    table: tuple[str, Connection],
) -> None:
    address, connection = table
    done: list[object] = []

    def between() -> None:
        if not done:
            done.append(connection.execute("TRUNCATE t"))
            put(connection, range(5), drawn(2, 5))

    source = Racing(open_source(f"{address}#t"), between)
    assert carry(source, TARGET, MAP, window=500).total == 5  # type: ignore[arg-type]
    assert stale(connection) == 0
    connection.execute("TRUNCATE t")
    assert carried(address) == 0


def test_a_changed_key_takes_its_vector_along(table: tuple[str, Connection]) -> None:
    address, connection = table
    carried(address)
    connection.execute("UPDATE t SET id = 1000 WHERE id = 4")
    connection.execute("UPDATE t SET v = NULL WHERE id = 5")
    assert stale(connection) == 0
    assert carried(address) == 299
    found = connection.execute("SELECT id FROM beside WHERE v IS NOT NULL AND id IN (4, 5, 1000)")
    assert found.fetchall() == [(1000,)]


def test_who_may_write_to_the_old_table_alone_still_may(table: tuple[str, Connection]) -> None:
    address, connection = table
    carried(address)
    role = f"app_{time.monotonic_ns()}"
    connection.execute(f"CREATE ROLE {role}".encode())
    connection.execute(f"GRANT INSERT, SELECT, UPDATE, DELETE ON t TO {role}".encode())
    connection.execute(f"SET ROLE {role}".encode())
    put(connection, [3, 2000], drawn(3, 2))
    connection.execute("DELETE FROM t WHERE id = 9")
    connection.execute("RESET ROLE")
    connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())
    assert carried(address) == 300
    assert stale(connection) == 0


def test_somebody_elses_table_is_left_alone(table: tuple[str, Connection]) -> None:
    address, connection = table
    connection.execute("CREATE TABLE beside (id int PRIMARY KEY, v text)")
    connection.execute("INSERT INTO beside VALUES (1, 'mine')")
    with pytest.raises(AlreadyExistsError, match="--rollback"):
        carried(address)
    assert not open_source(f"{address}#t").rollback("table:beside")
    assert connection.execute("SELECT v FROM beside").fetchall() == [("mine",)]
    # Nor that of another source, though the map is the same.
    connection.execute("DROP TABLE beside; CREATE TABLE u (id int PRIMARY KEY, v vector(24))")
    assert carry(open_source(f"{address}#u"), TARGET, MAP).total == 0
    with pytest.raises(AlreadyExistsError):
        carried(address)
    assert not open_source(f"{address}#t").rollback("table:beside")


@pytest.mark.parametrize("gone", ["ALTER TABLE t DISABLE TRIGGER ALL", "DROP TABLE t"])
def test_a_table_that_nothing_watches_is_refused(table: tuple[str, Connection], gone: str) -> None:
    address, connection = table
    carried(address)
    connection.execute(gone.encode())
    if gone.startswith("DROP"):
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, v vector(24))")
    put(connection, range(10), drawn(6, 10))
    with pytest.raises(AlreadyExistsError, match="triggers"):
        carried(address)
    assert open_source(f"{address}#t").rollback("table:beside")
    carried(address)
    assert stale(connection) == 0


def test_the_flip_leaves_a_table_that_goes_with_the_old_one(table: tuple[str, Connection]) -> None:
    address, connection = table
    steps = carry(open_source(f"{address}#t"), TARGET, MAP).steps
    # Written since: without a vector there, until its writer brings one.
    put(connection, [8], drawn(4, 1))
    for step in (steps[0], steps[-1]):
        for statement in step.split("; "):
            connection.execute(statement.encode())
    assert connection.execute("SELECT count(*) FROM beside").fetchone() == (299,)
    connection.execute("DELETE FROM t WHERE id = 2")
    connection.execute("INSERT INTO t (id, v) VALUES (4000, %s)", (str(MADE.old[0].tolist()),))
    assert connection.execute("SELECT count(*) FROM beside").fetchone() == (298,)
    with pytest.raises(psycopg.errors.NotNullViolation):
        connection.execute("INSERT INTO beside VALUES (4000, NULL)")
    found = connection.execute("SELECT tgname FROM pg_trigger WHERE NOT tgisinternal").fetchall()
    assert found == []
    indexed = connection.execute("SELECT indexdef FROM pg_indexes WHERE tablename = 'beside'")
    assert sum("hnsw" in text for (text,) in indexed.fetchall()) == 1


def test_searches_meet_the_table_beside(table: tuple[str, Connection]) -> None:
    address, _ = table
    carried(address)
    new = MAP(MADE.old)
    with closing(open_searchable(f"{address}#t")) as source:
        for query in MADE.queries_new[:3]:
            order = np.argsort(-(new @ query), kind="stable")[:20]
            assert source.nearest(query, 20, "table:beside") == [str(row) for row in order]


class Overtaken:
    """A source of which a row is changed, and carried by somebody else, after each reading."""

    def __init__(self, address: str, connection: Connection) -> None:
        self._source = open_source(f"{address}#t")
        self._address, self._connection = address, connection
        self.readings = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._source, name)

    def read(self, window: Window) -> Rows:
        rows = self._source.read(window)
        self.readings += 1
        put(self._connection, [7], drawn(100 + self.readings, 1))
        with suppress(VerificationError):
            carried(self._address)
        return rows


def test_what_another_carries_between_two_readings_is_not_wrong(
    table: tuple[str, Connection],
) -> None:
    address, connection = table
    carried(address)
    overtaken = Overtaken(address, connection)
    assert carry(overtaken, TARGET, MAP, window=400).total == 300  # type: ignore[arg-type]
    # It seemed wrong, and was looked at again.
    assert overtaken.readings == 2
    connection.execute("UPDATE beside SET v = %s WHERE id = 9", (str([0.5] * TARGET.dim),))
    with pytest.raises(VerificationError, match=r"1 of 300 .* '9'"):
        carry(overtaken, TARGET, MAP, window=400)  # type: ignore[arg-type]


def test_at_no_moment_is_a_vector_stale(table: tuple[str, Connection]) -> None:
    """Four writers of several keys a transaction, in any order, some of which are taken back, and
    two carryings at once, while somebody looks."""
    address, connection = table
    rng = np.random.default_rng(5)
    stop = threading.Event()
    open_source(f"{address}#t").beside(TARGET)

    def write(seed: int) -> None:
        own = np.random.default_rng(seed)
        with psycopg.connect(address) as writer:
            while not stop.is_set():
                try:
                    for key in own.integers(0, 320, own.integers(1, 6)).tolist():
                        if own.random() < 0.3:
                            writer.execute("DELETE FROM t WHERE id = %s", (key,))
                        else:
                            put(writer, [key], drawn(int(own.integers(1 << 30)), 1))
                    (writer.commit if own.random() < 0.8 else writer.rollback)()
                except psycopg.errors.DeadlockDetected:
                    # Of two of these writers, who take keys in any order.
                    writer.rollback()
                time.sleep(0.003)

    def follow(window: int) -> None:
        while not stop.is_set():
            with suppress(BusyError):
                carried(address, window)

    threads = [
        threading.Thread(target=write, args=(int(n),)) for n in rng.integers(1 << 30, size=4)
    ]
    followers = ThreadPoolExecutor(2)
    following = [followers.submit(follow, window) for window in (40, 170)]
    for thread in threads:
        thread.start()
    try:
        began = time.monotonic()
        seen = 0
        # Longer where the machine has other work, or there would be nothing to be stale.
        while (took := time.monotonic() - began) < 5 or (seen <= 50 and took < 60):
            assert stale(connection) == 0
            found = connection.execute("SELECT count(*) FROM beside WHERE v IS NOT NULL").fetchone()
            seen = max(seen, found[0] if found else 0)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        followers.shutdown()
    for one in following:
        one.result()
    assert seen > 50
    assert carried(address) == connection.execute("SELECT count(*) FROM t").fetchone()[0]  # type: ignore[index]
    assert stale(connection) == 0
