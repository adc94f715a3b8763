"""What only a database server can do to a store: break, end, be full of others."""

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psycopg
import pytest

from nobackfill.errors import (
    BusyError,
    ConfigurationError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from nobackfill.gallery.filters import Exists, Filter, OneOf
from nobackfill.gallery.store import NewVectors
from nobackfill.server.stores.postgresql import database as database_module
from nobackfill.server.stores.postgresql import schema
from nobackfill.server.stores.postgresql.conditions import sql_condition
from nobackfill.server.stores.postgresql.database import Connection, Database, check_url, execute
from nobackfill.server.stores.postgresql.gallery import PostgresqlGalleries, PostgresqlGallery
from nobackfill.server.stores.postgresql.leading import lock_releases
from tests.gallery.making import ids, spec, vectors
from tests.support.postgres import Server
from tests.support.waiting import wait_until

ONE = spec().space


@pytest.fixture
def database(postgres: Server) -> Iterator[Database]:
    with postgres.database() as url:
        made = Database(url, most_connections=4, wait_s=1.0)
        made.open(schema.prepare)
        yield made
        made.close()


@pytest.fixture
def store(database: Database) -> PostgresqlGallery:
    return PostgresqlGalleries(database).create("g", [spec()], {})


def put(store: PostgresqlGallery, name: str, seed: int = 1) -> int:
    return int(store.put([name], [NewVectors(ONE, vectors(1, seed))]).labels[0])


def backend(connection: Connection) -> int:
    return int(execute(connection, "SELECT pg_backend_pid()").fetchone()[0])


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_connection_that_breaks_at_the_commit_leaves_one_put(
    store: PostgresqlGallery, postgres: Server, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Before it: done again. After it: the server says that it happened."""
    broken: list[int] = []

    def breaking(
        connection: Connection, statement: str, values: Sequence[Any] = (), **options: bool
    ) -> Any:
        if statement != "COMMIT" or broken:
            return execute(connection, statement, values, **options)
        broken.append(backend(connection))
        if when == "after":
            execute(connection, "COMMIT")
        postgres.sql(f"SELECT pg_terminate_backend({broken[0]})")
        time.sleep(0.05)
        # What is read now is the end of the connection.
        return execute(connection, "SELECT 1")

    monkeypatch.setattr(database_module, "execute", breaking)
    label = put(store, "a")
    assert broken
    assert [(item.id, item.label) for item, _ in store.list_page(ONE, 9)[0]] == [("a", label)]
    assert store.load_vectors(ONE)[0].tolist() == [label]


def test_every_idle_connection_may_break(store: PostgresqlGallery, postgres: Server) -> None:
    put(store, "a")
    postgres.sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name ="
        " 'nobackfill' AND pid <> pg_backend_pid()"
    )
    assert store.count() == 1
    put(store, "b")
    assert store.count(ONE) == 2


def test_what_was_acknowledged_outlives_a_server_that_crashes() -> None:
    """Under puts, killed and started again: every one that returned is there, none twice."""
    from tests.support.postgres import running

    with running() as server, server.database() as url:
        database = Database(url, wait_s=20.0)
        database.open(schema.prepare)
        store = PostgresqlGalleries(database).create("g", [spec()], {})
        acknowledged: list[str] = []
        stopping = threading.Event()

        def work() -> None:
            while not stopping.is_set():
                name = f"item-{len(acknowledged)}"
                put(store, name)
                acknowledged.append(name)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            for how in (signal.SIGQUIT, signal.SIGINT):
                before = len(acknowledged)
                while len(acknowledged) < before + 10:
                    assert thread.is_alive()
                    time.sleep(0.01)
                server.stop(how)
                server.start()
        finally:
            stopping.set()
            thread.join()
        assert len(acknowledged) >= 20
        assert store.count() == store.count(ONE) == len(acknowledged)
        assert store.labels_of(acknowledged).size == len(acknowledged)
        server.stop()
        quick = Database(url, wait_s=0.2)
        with pytest.raises(UnavailableError):
            quick.open(schema.prepare)
        server.start()
        database.close()


@pytest.mark.long
@pytest.mark.parametrize("others", [0, 3], ids=["forgotten", "number given to another"])
def test_what_a_server_forgot_in_a_crash_is_written_again(others: int) -> None:
    """Killed during a commit of which nothing is on its disk: it knows the transaction no more, or
    takes another for it."""
    from tests.support.postgres import running

    with running({"wal_writer_delay": "10s"}) as server, server.database() as url:
        database = Database(url, wait_s=20.0)
        database.open(schema.prepare)
        with database.connect() as connection:
            connection.execute(_SLOW_COMMIT)
        tries: list[int] = []

        def work(connection: Connection) -> None:
            tries.append(len(tries))
            execute(connection, "INSERT INTO kept VALUES (1)")

        writing = threading.Thread(target=database.write, args=(work,))
        writing.start()
        try:
            with database.connect() as other:
                wait_until(
                    lambda: execute(other, _COMMITTING).fetchone()[0] == 1, what="it commits"
                )
                server.stop(signal.SIGQUIT)
            server.alone(*["SELECT pg_current_xact_id()"] * others)
        finally:
            server.start()
            writing.join()
        assert tries == [0, 1]
        assert database.read(lambda c: execute(c, "SELECT count(*) FROM kept").fetchone()) == (1,)
        database.close()


_SLOW_COMMIT = """
CREATE TABLE IF NOT EXISTS kept (number int);
CREATE OR REPLACE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS
'BEGIN PERFORM pg_sleep(1); RETURN NULL; END';
CREATE CONSTRAINT TRIGGER slowly AFTER INSERT ON kept DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION slowly()
"""
_COMMITTING = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query = 'COMMIT'"


def test_calls_that_find_no_connection_say_so(database: Database, store: PostgresqlGallery) -> None:
    release = threading.Event()

    def hold() -> None:
        # A busy machine makes the fourth connection later than this pool waits.
        while not release.is_set():
            with suppress(OverloadedError):
                database.read(lambda _: release.wait(30))

    holders = [threading.Thread(target=hold) for _ in range(4)]
    for holder in holders:
        holder.start()
    try:
        with pytest.raises(OverloadedError, match="connection"):
            while True:
                store.count()
    finally:
        release.set()
        for holder in holders:
            holder.join()
    assert store.count() == 0


def test_a_put_that_waits_too_long_is_busy(database: Database, store: PostgresqlGallery) -> None:
    with database.connect() as other, other.transaction():
        execute(other, f"LOCK TABLE {store.schema}.gate IN EXCLUSIVE MODE")
        with pytest.raises(BusyError, match="lock timeout"):
            put(store, "a")
        assert store.count() == 0
    put(store, "a")


def test_a_gallery_that_is_gone_is_not_found(database: Database, store: PostgresqlGallery) -> None:
    galleries = PostgresqlGalleries(database)
    put(store, "a")
    galleries.delete("g")
    galleries.delete("g")
    assert galleries.names() == []
    for call in (store.count, lambda: put(store, "b"), lambda: galleries.open("g")):
        with pytest.raises(NotFoundError):
            call()


@pytest.mark.parametrize(
    ("filtered", "passing"),
    [(OneOf("n", (7,)), 30), (OneOf("even", (True,)), 1500), (Exists("rare"), 3)],
)
def test_a_filter_meets_in_its_index_what_passes_alone(
    filtered: Filter, passing: int, database: Database, store: PostgresqlGallery
) -> None:
    """Whatever other keys have the same value."""
    metadata = [
        {"n": n % 100, "m": 7, "even": bool(n % 2), "other": True} | ({"rare": 1} if n < 3 else {})
        for n in range(3000)
    ]
    store.put(ids(3000), [NewVectors(ONE, vectors(3000, 1))], metadata=metadata)
    condition = sql_condition(filtered)
    with database.connect() as connection:
        execute(connection, f"VACUUM ANALYZE {store.schema}.items")
        # Of a table as small as this one PostgreSQL would rather read every row.
        execute(connection, "SET enable_seqscan = off")
        (plan,) = execute(
            connection,
            "EXPLAIN (ANALYZE, FORMAT JSON) "
            f"SELECT label FROM {store.schema}.items i WHERE {condition.sql}",
            condition.parameters,
        ).fetchone()
    looked = plan[0]["Plan"]
    assert looked["Node Type"] == "Bitmap Heap Scan", plan
    assert looked["Actual Rows"] == passing
    assert looked["Rows Removed by Index Recheck"] == 0


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:secret@db.example/x",
        "postgresql://u:secret@db.example/x?sslmode=prefer",
        "postgresql://u:secret@127.0.0.1,db.example/x",
        "postgresql://u:secret@/x?hostaddr=10.0.0.1",
        "postgresql://u:secret@127.0.0.1/x?nonsense=1",
        "no address: secret",
    ],
)
def test_addresses_in_the_clear_are_refused_without_their_password(url: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        check_url(url)
    assert "secret" not in str(refused.value)


def test_addresses_on_this_machine_or_by_tls_are_taken() -> None:
    for url in (
        "postgresql:///x", "postgresql://u@/x?host=/run/postgresql", "postgresql://localhost/x",
        "postgresql://u:p@db.example/x?sslmode=verify-full",
    ):  # fmt: skip
        check_url(url)


def test_a_wrong_password_is_not_repeated(postgres: Server) -> None:
    with postgres.database() as url:
        database = Database(url.replace("postgres@", "nobody:secret@"), wait_s=0.5)
        with pytest.raises((ConfigurationError, UnavailableError)) as refused:
            database.open(schema.prepare)
    assert "secret" not in str(refused.value)


def test_a_database_of_another_format_is_refused(postgres: Server) -> None:
    with postgres.database() as url:
        first = Database(url)
        first.open(schema.prepare)
        first.close()
        with psycopg.connect(url) as connection:
            connection.execute("UPDATE nobackfill.format SET version = 99")
        with pytest.raises(ConfigurationError, match="format 99"):
            Database(url).open(schema.prepare)


def test_a_wait_of_zero_seconds_for_releases_ends(database: Database) -> None:
    """PostgreSQL takes a timeout of 0 for none."""

    def wait(seconds: float) -> None:
        with lock_releases(database, seconds):
            raise AssertionError("the lock was free")

    with ThreadPoolExecutor(2) as pool, lock_releases(database, 5):
        for waiting in [pool.submit(wait, seconds) for seconds in (0.0, 0.0004)]:
            assert isinstance(waiting.exception(30), BusyError)


def test_a_connection_that_breaks_while_it_waits_for_releases_is_unavailable(
    database: Database,
) -> None:
    def wait() -> None:
        with lock_releases(database, 30):
            raise AssertionError("the lock was free")

    end_waiting = (
        "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    with ThreadPoolExecutor(1) as pool, lock_releases(database, 5):
        waiting = pool.submit(wait)
        wait_until(
            lambda: database.read(lambda one: execute(one, end_waiting).fetchall()) != [],
            "the wait for the lock",
        )
        with pytest.raises(UnavailableError):
            waiting.result(30)
