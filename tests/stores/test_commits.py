"""What a broken connection's transaction came to, asked of a real server."""

import threading

import psycopg
import pytest

from nobackfill.server.stores.postgresql import schema
from nobackfill.server.stores.postgresql.database import (
    Database,
    execute,
    is_committed,
    mark_transaction,
)
from tests.support.postgres import Server


def test_a_transaction_is_under_way_then_committed_or_not(postgres: Server) -> None:
    with postgres.database() as url:
        database = Database(url)
        database.open(schema.prepare)
        with database.connect() as one, database.connect() as other:
            for ending, expected in (("COMMIT", True), ("ROLLBACK", False), ("COMMIT", True)):
                execute(one, "BEGIN")
                execute(one, "SELECT pg_current_xact_id()")
                signature = mark_transaction(one, None)
                assert signature is not None
                assert is_committed(other, signature) is None
                execute(one, ending)
                assert is_committed(other, signature) is expected
        database.close()


def test_what_wrote_nothing_leaves_no_mark_and_old_marks_go(postgres: Server) -> None:
    with postgres.database() as url:
        database = Database(url)
        database.open(schema.prepare)
        with database.connect() as connection:
            execute(connection, "DELETE FROM nobackfill.commits")
            execute(connection, "BEGIN")
            assert mark_transaction(connection, None) is None
            execute(connection, "SELECT pg_current_xact_id()")
            first = mark_transaction(connection, None)
            execute(connection, "COMMIT")
            assert first is not None and is_committed(connection, first) is True
            execute(connection, "BEGIN")
            assert mark_transaction(connection, first.mark) is None
            execute(connection, "SELECT pg_current_xact_id()")
            second = mark_transaction(connection, first.mark)
            execute(connection, "COMMIT")
            assert second is not None and is_committed(connection, second) is True
            assert is_committed(connection, first) is False
            execute(connection, "UPDATE nobackfill.commits SET at = at - interval '23 hours'")
            schema.prepare(connection)
            assert is_committed(connection, second) is True
            execute(connection, "UPDATE nobackfill.commits SET at = at - interval '2 hours'")
            schema.prepare(connection)
            assert is_committed(connection, second) is False
        database.close()


def test_a_thread_that_writes_leaves_one_mark(postgres: Server) -> None:
    """However often; another thread, another one; one that fails or
    writes nothing leaves the mark before."""
    with postgres.database() as url:
        database = Database(url, most_connections=2)
        database.open(schema.prepare)
        database.write(lambda c: execute(c, "CREATE TABLE kept (number int CHECK (number < 9))"))

        def write(number: int = 1) -> None:
            database.write(lambda c: execute(c, f"INSERT INTO kept VALUES ({number})"))

        def marks() -> int:
            found = database.read(lambda c: execute(c, "SELECT count(*) FROM nobackfill.commits"))
            return int(found.fetchone()[0])

        for _ in range(3):
            write()
        assert marks() == 1
        other = threading.Thread(target=write)
        other.start()
        other.join()
        assert marks() == 2
        with pytest.raises(psycopg.errors.CheckViolation):
            write(9)
        database.write(lambda c: execute(c, "SELECT 1"))
        write()
        assert marks() == 2
        database.close()


def test_a_nested_transaction_is_part_of_the_outer_one(postgres: Server) -> None:
    with postgres.database() as url:
        database = Database(url)
        database.open(schema.prepare)
        ends: list[str] = []

        def insert(value: int) -> None:
            database.write(lambda one: execute(one, "INSERT INTO numbers VALUES (%s)", [value]))
            database.after_commit(lambda: ends.append(f"{value} is durable"))

        def nested(error: Exception | None) -> None:
            insert(1)
            database.transact(lambda: insert(2))
            insert(3)
            assert ends == []
            if error is not None:
                raise error

        database.write(lambda one: execute(one, "CREATE TABLE numbers (number integer)"))
        with pytest.raises(ZeroDivisionError):
            database.transact(lambda: nested(ZeroDivisionError()))
        query = "SELECT count(*) FROM numbers"
        assert database.read(lambda one: execute(one, query).fetchone()) == (0,)
        database.transact(lambda: nested(None))
        assert database.read(lambda one: execute(one, query).fetchone()) == (3,)
        assert ends == ["1 is durable", "2 is durable", "3 is durable"]
        database.close()
