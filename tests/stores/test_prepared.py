"""The one call that nearly every search is: what psycopg's own way gives, and what becomes of the
statement's name. The server is real."""

import numpy as np
import psycopg
import pytest
from psycopg import errors

from nobackfill.gallery.store import NewVectors
from nobackfill.server.stores.postgresql import search
from nobackfill.server.stores.postgresql.conditions import ALWAYS_TRUE
from nobackfill.server.stores.postgresql.database import Connection, execute, is_connection_lost
from nobackfill.server.stores.postgresql.gallery import PostgresqlGallery
from nobackfill.server.stores.postgresql.search import (
    SpaceTable,
    execute_nearest,
    is_idle,
)
from tests.gallery.making import ids, spec, vectors
from tests.support.postgresql_searcher import PostgresqlSearcher

QUERIES = vectors(5, 9)


@pytest.fixture
def store(empty: PostgresqlGallery) -> PostgresqlGallery:
    empty.put(ids(60), [NewVectors(spec().space, vectors(60, 1))])
    return empty


def statement(store: PostgresqlGallery, limit: int = 18) -> str:
    return SpaceTable(store.schema, store.active()).statement(ALWAYS_TRUE, False, limit)


def check(connection: Connection, store: PostgresqlGallery, limit: int = 18) -> None:
    """Against the same statement by a cursor."""
    text = statement(store, limit)
    for query in QUERIES:
        true = execute(connection, text, [query]).fetchall()
        assert len(true) == min(limit, 60)
        assert execute_nearest(connection, text, query) == true


def names(connection: Connection) -> list[str]:
    found = execute(connection, "SELECT name FROM pg_prepared_statements WHERE name LIKE 'near%'")
    return [name for (name,) in found]


def test_rows_are_what_a_cursor_gives(store: PostgresqlGallery) -> None:
    def work(connection: Connection) -> None:
        for limit in (1, 18, 70):
            check(connection, store, limit)
        assert len(names(connection)) == 3

    store.database.read(work)


def test_names_that_are_gone_are_made_again(store: PostgresqlGallery) -> None:
    """psycopg drops all after a rollback; so does a pooler that resets."""

    def work(connection: Connection) -> None:
        check(connection, store)
        execute(connection, "DEALLOCATE ALL")
        connection._prepared.clear()
        assert not names(connection)
        check(connection, store)

    store.database.read(work)


def test_a_connection_keeps_so_many(
    store: PostgresqlGallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_MAX_STATEMENTS", 3)

    def work(connection: Connection) -> None:
        for limit in (*range(1, 9), 1):
            check(connection, store, limit)
        assert len(names(connection)) == 3

    store.database.read(work)


def test_refusals_are_psycopgs(store: PostgresqlGallery) -> None:
    def work(connection: Connection) -> None:
        text = statement(store)
        check(connection, store)
        with pytest.raises(errors.UndefinedTable):
            execute_nearest(connection, text.replace(".vectors_1", ".vectors_9"), QUERIES[0])
        with pytest.raises(errors.DataException, match="dimensions"):
            execute_nearest(connection, text, np.ones(3, np.float32))
        check(connection, store)
        with connection.transaction():
            assert not is_idle(connection), "a refusal would end it"
        assert is_idle(connection)

    store.database.read(work)


def test_a_connection_that_breaks_is_seen_and_another_one_asked(store: PostgresqlGallery) -> None:
    def end_all() -> None:
        with store.database.connect() as connection:
            execute(
                connection,
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()",
            )

    def work(connection: Connection) -> None:
        check(connection, store)
        end_all()
        with pytest.raises(psycopg.OperationalError) as seen:
            execute_nearest(connection, statement(store), QUERIES[0])
        assert is_connection_lost(seen.value)

    store.database.read(work)
    searcher = PostgresqlSearcher(store.database, store.schema, store.active())
    true = searcher.search(QUERIES[:1], 5).labels.tolist()
    for _ in range(3):
        end_all()
        assert searcher.search(QUERIES[:1], 5).labels.tolist() == true
