"""What a Milvus has still to be told, which PostgreSQL notes by itself; no Milvus is asked."""

import pytest

from nobackfill.gallery import edits
from nobackfill.gallery.store import NewVectors
from nobackfill.plugins.milvus import journal
from nobackfill.server.stores.postgresql.database import TABLE, Connection, execute
from nobackfill.server.stores.postgresql.gallery import PostgresqlGallery
from nobackfill.server.stores.postgresql.schema import migrate
from tests.gallery.making import ids, spec, vectors

ONE, TWO = spec(1).space, spec(2).space
TRIGGERS = "SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'pending%'"


@pytest.fixture
def store(empty: PostgresqlGallery) -> PostgresqlGallery:
    """Three items in a space, none in another."""
    empty.put(ids(3), [NewVectors(ONE, vectors(3, 1))], digests=["a"] * 3)
    empty.add_staging_space(spec(2))
    return empty


def noted(store: PostgresqlGallery) -> dict[int, list[int]]:
    """Labels by number of their space, which are forgotten."""
    taken = store.database.write(
        lambda connection: journal.take_pending(connection, store.schema, 100)
    )
    return {number: labels.tolist() for number, labels in taken}


def pending(store: PostgresqlGallery, *, described: bool) -> list[int]:
    number = store.space(ONE).table_number
    return store.database.read(
        lambda connection: journal.pending_labels(
            connection, store.schema, number, 100, described=described
        ).tolist()
    )


def begin(store: PostgresqlGallery) -> None:
    store.database.write(lambda connection: journal.begin_journal(connection, store.schema))


def test_every_change_that_a_filter_may_see_is_noted(store: PostgresqlGallery) -> None:
    begin(store)
    one, two = (store.space(space).table_number for space in (ONE, TWO))
    assert noted(store) == {one: [1, 2, 3]}
    begin(store)
    assert noted(store) == {}
    edits.change_metadata(store, edits.select_ids(store, ["item-1"]), {"n": 1}, ())
    # A search without a filter has no use for that.
    assert (pending(store, described=False), pending(store, described=True)) == ([], [2])
    assert noted(store) == {one: [2], two: [2]}
    # What is as it was is not written.
    edits.change_metadata(store, edits.select_ids(store, ["item-1"]), {"n": 1}, ())
    assert noted(store) == {}
    # The same content with other metadata keeps its vector and its label.
    put = NewVectors(ONE, vectors(3, 1)[:1])
    store.put(["item-0"], [put], digests=["a"], metadata=[{"n": 2}])
    assert noted(store) == {one: [1], two: [1]}
    store.put(["item-0"], [put], digests=["b"], metadata=[{"n": 2}])
    assert noted(store) == {one: [1, 4]}
    store.delete(["item-2"])
    assert noted(store) == {one: [3]}


def test_what_is_told_anew_is_pending_for_every_search(store: PostgresqlGallery) -> None:
    """Though its metadata is to be told, too: its collection has nothing."""
    begin(store)
    noted(store)
    edits.change_metadata(store, edits.select_ids(store, ["item-1"]), {"n": 1}, ())
    info = store.space(ONE)
    store.database.write(
        lambda connection: journal.mark_all_pending(connection, store.schema, info)
    )
    assert sorted(pending(store, described=False)) == [1, 2, 3]


def test_when_milvus_was_told_is_kept_until_all_is_told_again(store: PostgresqlGallery) -> None:
    begin(store)
    info, database = store.space(ONE), store.database

    def told() -> int | None:
        return database.read(
            lambda connection: journal.fed_until(connection, store.schema, info.table_number)
        )

    assert told() is None
    for moment in (7, 2**62):

        def tell(connection: Connection, at: int = moment) -> None:
            journal.set_fed_until(connection, store.schema, info.table_number, at)

        database.write(tell)
        assert told() == moment
    database.write(lambda connection: journal.mark_all_pending(connection, store.schema, info))
    assert told() is None


def test_a_journal_that_does_not_know_when_goes_on(store: PostgresqlGallery) -> None:
    """One that was begun before moments were kept: what it notes stays, and nothing else is."""
    begin(store)
    noted(store)
    store.delete(["item-2"])
    store.database.write(lambda connection: execute(connection, f"DROP TABLE {store.schema}.told"))
    assert not store.database.read(lambda connection: journal.has_journal(connection, store.schema))
    begin(store)
    assert noted(store) == {store.space(ONE).table_number: [3]}


def test_another_format_begins_the_journal_anew(store: PostgresqlGallery) -> None:
    """A version that tells Milvus of vectors alone must not take notes of metadata."""
    database = store.database
    for to in (2, 3):
        begin(store)
        noted(store)
        with database.connect() as other, other.transaction():
            migrate(other, to)
            # This version's code goes on here, beside either format.
            execute(other, TABLE)
        assert not database.read(lambda connection: journal.has_journal(connection, store.schema))
        assert database.read(lambda connection: execute(connection, TRIGGERS).fetchone()) == (0,)
        assert store.delete(["item-0"]) == (to == 2)
    begin(store)
    assert noted(store) == {store.space(ONE).table_number: [2, 3]}


def test_a_space_that_a_gateway_without_milvus_began_joins_the_journal(
    store: PostgresqlGallery,
) -> None:
    def complete() -> bool:
        return store.database.read(lambda one: journal.covers_all_spaces(one, store.schema))

    assert not complete()
    begin(store)
    noted(store)
    assert complete()
    store.add_staging_space(spec(3))
    assert not complete()
    begin(store)
    assert complete()
    assert noted(store) == {}
