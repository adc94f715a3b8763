"""The flip to new vectors loses nothing that others write meanwhile."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import psycopg
import pytest

from nobackfill.adopt.carrying import CarryResult, carry
from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.source import Flippable
from nobackfill.errors import AlreadyExistsError, InvalidInputError, VerificationError
from tests.adopt.table_beside import MADE, MAP, TARGET, Connection, drawn, put
from tests.support.waiting import wait_until

COLUMN = replace(TARGET, name="n")
both = pytest.mark.parametrize("target", [COLUMN, TARGET], ids=["column", "table"])
# Key, old and new vector of each row, after the flip.
FLIPPED = {
    "n": "SELECT id, v_before::real[], v::real[] FROM t",
    "table:beside": "SELECT t.id, t.v::real[], b.v::real[] FROM t LEFT JOIN beside b USING (id)",
}
# Whether the flip was: it reads the table first, and so waits for whoever flips.
HAPPENED = """
SELECT count(*) FROM (SELECT count(*) FROM t WHERE id < 10) t, pg_description
WHERE description LIKE '{%carried%'"""


def carried(address: str, target: Any, **options: Any) -> CarryResult:
    return carry(open_source(f"{address}#t", vector="v"), target, MAP, **options)


class Writers:
    """Threads that put, change and delete rows by the old model's vectors, each in a transaction
    that reads first, up to the flip."""

    def __init__(self, address: str) -> None:
        self._address, self._stop = address, threading.Event()
        self.keys: set[int] = set(range(300))
        self._pool = ThreadPoolExecutor(3)

    def __enter__(self) -> "Writers":
        self._writing = [self._pool.submit(self._write, number) for number in range(3)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        for one in self._writing:
            one.result()

    def _write(self, number: int) -> None:
        """Keys of its own: 1000 * number and on, beside those that are there of its remainder."""
        rng = np.random.default_rng(number)
        new = 1000 * (number + 1)
        with psycopg.connect(self._address) as connection:
            while not self._stop.wait(0.002):
                if connection.execute(HAPPENED).fetchone() != (0,):
                    return
                old, gone = (int(one) * 3 + number for one in rng.integers(100, size=2))
                put(connection, [new, old], drawn(new, 2))
                connection.execute("DELETE FROM t WHERE id = %s AND id <> %s", (gone, old))
                connection.commit()
                self.keys |= {new, old}
                self.keys -= {gone} - {old}
                new += 1


def check(connection: Connection, target: Any, keys: set[int]) -> None:
    rows = connection.execute(FLIPPED[target.name].encode()).fetchall()
    assert {key for key, _, _ in rows} == keys
    assert [key for key, old, new in rows if old is not None and new is None] == []
    old, new = (np.array(part, np.float32) for part in list(zip(*rows, strict=True))[1:])
    np.testing.assert_allclose(MAP(old), new, atol=1e-4)


@both
def test_nothing_is_lost_while_others_write(table: tuple[str, Connection], target: Any) -> None:
    address, connection = table
    with Writers(address) as writers:
        # A fast machine flips before they have written much.
        wait_until(lambda: len(writers.keys) > 310, "others write")
        done = carried(address, target, flip=True)
    assert done.next_steps == []
    check(connection, target, writers.keys)
    indexed = connection.execute("SELECT indexdef FROM pg_indexes WHERE indexdef LIKE '%hnsw%'")
    assert len(indexed.fetchall()) == 2


@both
def test_the_printed_flip_refuses_to_lose_a_row(table: tuple[str, Connection], target: Any) -> None:
    address, connection = table
    *_, flip = carried(address, target).next_steps
    put(connection, [7, 5000], drawn(1, 2))
    with pytest.raises(psycopg.errors.RaiseException, match="t: rows have no new vector yet"):
        connection.execute(flip.encode())
    connection.rollback()
    assert carried(address, target).write_count == 2
    connection.execute(flip.encode())
    check(connection, target, {*range(300), 5000})


@both
def test_rows_without_a_vector_are_filled_after_the_flip(
    table: tuple[str, Connection], target: Any
) -> None:
    address, connection = table
    carried(address, target, flip=True)
    old, native = (str(one.tolist()) for one in (drawn(2, 1)[0], MADE.new[0]))
    again = target
    if target is COLUMN:
        connection.execute("INSERT INTO t (id, v_before) VALUES (6000, %s)", [old])
        connection.execute("UPDATE t SET v = %s WHERE id = 3", [native])
        again = replace(COLUMN, name="v")
    else:
        connection.execute("INSERT INTO t (id, v) VALUES (6000, %s)", [old])
        connection.execute("UPDATE beside SET v = %s WHERE id = 3", [native])
    vector = "v_before" if target is COLUMN else "v"
    source = open_source(f"{address}#t", vector=vector)
    done = carry(source, again, MAP)
    assert (done.write_count, done.new_vector_count, done.next_steps) == (1, 301, [])
    # Vectors that a writer has made since stay.
    found = connection.execute(f"{FLIPPED[target.name]} WHERE id IN (3, 6000)".encode()).fetchall()
    new = {key: np.array(vector, np.float32) for key, _, vector in found}
    np.testing.assert_allclose(new[3], MADE.new[0], atol=1e-5)
    np.testing.assert_allclose(new[6000], MAP(drawn(2, 1))[0], atol=1e-4)
    # Nor is it taken back, or filled by another map.
    assert not source.drop_new_vectors(again.name)


# Ways to write to a table, or to a partition of it, without firing its triggers.
UNWATCHED = {
    "table": (
        "ALTER TABLE t DISABLE TRIGGER ALL",
        "t",
        "ALTER TABLE t ENABLE TRIGGER ALL",
    ),
    "enabled always": (
        "ALTER TABLE t DISABLE TRIGGER ALL",
        "t",
        "DO $$DECLARE name text; BEGIN FOR name IN SELECT tgname FROM pg_trigger "
        "WHERE NOT tgisinternal AND tgparentid = 0 LOOP "
        "EXECUTE 'ALTER TABLE t ENABLE ALWAYS TRIGGER ' || name; END LOOP; END$$",
    ),
    "partition": (
        "ALTER TABLE t1 DISABLE TRIGGER ALL",
        "t1",
        "ALTER TABLE t1 ENABLE TRIGGER ALL",
    ),
    "detached": (
        "ALTER TABLE t DETACH PARTITION t1",
        "t1",
        "ALTER TABLE t ATTACH PARTITION t1 FOR VALUES FROM (100) TO (1000)",
    ),
}


def partition(connection: Connection) -> None:
    """Replace `t` by a table of two partitions with the same rows."""
    connection.execute(
        "ALTER TABLE t RENAME TO plain;"
        "CREATE TABLE t (id int PRIMARY KEY, v vector(24), body text) PARTITION BY RANGE (id);"
        "CREATE TABLE t0 PARTITION OF t FOR VALUES FROM (0) TO (100);"
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (100) TO (1000);"
        "INSERT INTO t SELECT * FROM plain; DROP TABLE plain"
    )


@both
@pytest.mark.parametrize("way", UNWATCHED)
def test_the_printed_flip_refuses_vectors_that_went_stale_without_triggers(
    table: tuple[str, Connection], target: Any, way: str
) -> None:
    address, connection = table
    off, relation, on = UNWATCHED[way]
    if relation != "t":
        partition(connection)
    *_, flip = carried(address, target).next_steps
    connection.execute(off.encode())
    vector = str(drawn(1, 1)[0].tolist())
    connection.execute(f"UPDATE {relation} SET v = '{vector}' WHERE id = 150".encode())
    connection.execute(on.encode())
    with pytest.raises(psycopg.errors.RaiseException, match=r"triggers .* carry again"):
        connection.execute(flip.encode())
    connection.rollback()
    # By carrying again it is found, and after a rollback all is as it should be.
    source = open_source(f"{address}#t", vector="v")
    with pytest.raises(VerificationError, match="'150'"):
        carry(source, target, MAP)
    assert source.drop_new_vectors(target.name)
    *_, flip = carried(address, target).next_steps
    connection.execute(flip.encode())
    check(connection, target, set(range(300)))


@both
def test_a_partition_without_triggers_is_watched_again(
    table: tuple[str, Connection], target: Any
) -> None:
    """Its triggers alone may be off; those of the whole table are on."""
    address, connection = table
    partition(connection)
    carried(address, target)
    connection.execute("ALTER TABLE t1 DISABLE TRIGGER ALL")
    if target is TARGET:
        with pytest.raises(AlreadyExistsError, match="triggers"):
            carried(address, target)
        return
    carried(address, target)
    put(connection, [150], drawn(1, 1))
    assert carried(address, target).write_count == 1


@both
def test_a_flip_refuses_what_was_not_watched_since_it_was_checked(
    table: tuple[str, Connection], target: Any
) -> None:
    address, connection = table
    carried(address, target)
    place = open_source(f"{address}#t", vector="v").open_target(target)
    assert isinstance(place, Flippable)
    connection.execute("ALTER TABLE t DISABLE TRIGGER ALL; ALTER TABLE t ENABLE TRIGGER ALL")
    with pytest.raises(InvalidInputError, match=r"triggers .* carry again"), place.open_flip():
        pass
