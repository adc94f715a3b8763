"""What gateways know together of a gallery that heals, without a gateway."""

from contextlib import ExitStack
from pathlib import Path

from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.store import NewVectors
from nobackfill.server.healing.ledger import FileLedger
from nobackfill.server.stores.postgresql import schema
from nobackfill.server.stores.postgresql.database import Database, execute
from nobackfill.server.stores.postgresql.gallery import PostgresqlGalleries
from nobackfill.server.stores.postgresql.leading import GatewayDatabaseLock
from nobackfill.server.stores.postgresql.ledger import DatabaseLedger
from nobackfill.serving.ledger import today_utc
from tests.gallery.making import ids, spec, vectors
from tests.support.postgres import Server
from tests.support.waiting import wait_until


def test_a_day_has_its_budget_and_is_forgotten_after_a_week(postgres: Server) -> None:
    with postgres.database() as url:
        database = Database(url, most_connections=2)
        database.open(schema.prepare)
        gallery = PostgresqlGalleries(database).create("g", [spec()], {})
        labels = gallery.put(ids(5), [NewVectors(spec().space, vectors(5, 1))]).labels.tolist()
        one, two = (DatabaseLedger(gallery, spec().space) for _ in range(2))
        assert one.claim(labels[:2], "2026-02-27", 3) == labels[:2]
        assert two.claim(labels, "2026-02-27", 3) == [], "two are another's, one is over"
        one.finish_claims(labels[:2])
        assert (
            two.claim(labels, "2026-02-27", 3) == labels[:1]
            and two.count_claimed("2026-02-27") == 3
        )
        two.return_claims(labels[:1])
        assert one.claim(labels[:1], "2026-02-28", 3) == labels[:1]
        # A gateway whose clock is behind still counts on the day before.
        assert two.count_claimed("2026-02-27") == 3
        assert two.claim(labels[1:], "2026-03-07", 9) == labels[1:]
        query = f"SELECT day FROM {gallery.schema}.healing_spent ORDER BY day"
        assert database.read(lambda c: execute(c, query).fetchall()) == [
            ("2026-02-28",),
            ("2026-03-07",),
        ]
        database.close()


def test_what_was_not_embedded_is_given_back(postgres: Server) -> None:
    with postgres.database() as url:
        database = Database(url, most_connections=2)
        database.open(schema.prepare)
        gallery = PostgresqlGalleries(database).create("g", [spec()], {})
        labels = gallery.put(ids(5), [NewVectors(spec().space, vectors(5, 1))]).labels.tolist()
        ledger, day = DatabaseLedger(gallery, spec().space), today_utc()
        assert ledger.claim(labels[:4], day, 4) == labels[:4]
        ledger.finish_claims(labels[:1])
        ledger.return_claims(labels[1:3])
        ledger.return_claims(labels[1:3])
        assert ledger.count_claimed(day) == 2
        assert ledger.requested_labels(9) == []
        # Of the two that are over, one is claimed; the others stay wanted.
        assert ledger.claim(labels[1:], day, 3) == labels[1:2]
        assert ledger.requested_labels(9) == labels[2:]
        database.close()


def test_two_threads_may_end_it_at_a_stop(tmp_path: Path) -> None:
    with SqliteGallery.create(tmp_path / "g.sqlite", spec()) as store:
        ledger = FileLedger(tmp_path, store, spec().space)
        ledger.close()
        ledger.close()


def test_claims_of_a_gateway_that_ended_are_free(postgres: Server) -> None:
    with postgres.database() as url, ExitStack() as closing:

        def gateway() -> tuple[GatewayDatabaseLock, DatabaseLedger]:
            database = Database(url, most_connections=2)
            closing.callback(database.close)
            database.open(schema.prepare)
            tenure = GatewayDatabaseLock(database, exclusive=False)
            closing.callback(tenure.close)
            store = PostgresqlGalleries(database).open("g")
            return tenure, DatabaseLedger(store, spec().space)

        database = Database(url, most_connections=2)
        closing.callback(database.close)
        database.open(schema.prepare)
        gallery = PostgresqlGalleries(database).create("g", [spec()], {})
        labels = gallery.put(ids(3), [NewVectors(spec().space, vectors(3, 1))]).labels.tolist()
        # Of an older version, which tells nothing of who claims.
        DatabaseLedger(gallery, spec().space).claim(labels[2:], "2026-02-27", 9)
        (ending, one), (_, two) = gateway(), gateway()
        assert one.claim(labels[:2], "2026-02-27", 9) == labels[:2]
        one.finish_claims(labels[:1])
        assert two.claim(labels, "2026-02-27", 9) == labels[:1]
        ending.close()
        # The database hears of the end a moment later.
        found: list[int] = []

        def claims() -> list[int]:
            found.extend(two.claim(labels, "2026-02-27", 9))
            return found

        wait_until(claims, "a claim")
        assert found == labels[1:2]
