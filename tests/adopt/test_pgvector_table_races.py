"""Who writes to a table that is being carried into one beside is neither stopped nor overtaken."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import psycopg
import pytest

from nobackfill.adopt.carrying import carry
from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.source import Rows, Window
from nobackfill.errors import BusyError, VerificationError
from tests.adopt.racing import Racing
from tests.adopt.table_beside import MAP, TARGET, Connection, carried, drawn, put, stale


@pytest.mark.long
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
        carry(Racing(source, between), TARGET, MAP, rows_per_window=500)  # type: ignore[arg-type]
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
    assert carry(source, TARGET, MAP, rows_per_window=500).new_vector_count == 5  # type: ignore[arg-type]
    assert stale(connection) == 0
    connection.execute("TRUNCATE t")
    assert carried(address) == 0


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
    assert carry(overtaken, TARGET, MAP, rows_per_window=400).new_vector_count == 300  # type: ignore[arg-type]
    # It seemed wrong, and was looked at again.
    assert overtaken.readings == 2
    connection.execute("UPDATE beside SET v = %s WHERE id = 9", (str([0.5] * TARGET.dim),))
    with pytest.raises(VerificationError, match=r"1 of 300 .* '9'"):
        carry(overtaken, TARGET, MAP, rows_per_window=400)  # type: ignore[arg-type]


@pytest.mark.long
def test_at_no_moment_is_a_vector_stale(table: tuple[str, Connection]) -> None:
    """Four writers of several keys a transaction, in any order, some of which are taken back, and
    two carryings at once, while somebody looks."""
    address, connection = table
    rng = np.random.default_rng(5)
    stop = threading.Event()
    open_source(f"{address}#t").open_target(TARGET)

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
