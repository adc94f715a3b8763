"""What a broken connection's transaction came to, asked of a real server."""

from uuid import uuid4

from nobackfill.server.stores.postgresql import commits, schema
from nobackfill.server.stores.postgresql.database import Database, run
from tests.support.postgres import Server


def test_a_transaction_is_under_way_then_committed_or_not(postgres: Server) -> None:
    with postgres.database() as url:
        database = Database(url)
        database.open(schema.prepare)
        with database.connect() as one, database.connect() as other:
            for ending, expected in (("COMMIT", True), ("ROLLBACK", False), ("COMMIT", True)):
                run(one, "BEGIN")
                run(one, "SELECT pg_current_xact_id()")
                signature = commits.sign(one, uuid4())
                assert signature is not None
                assert commits.committed(other, signature) is None
                run(one, ending)
                assert commits.committed(other, signature) is expected
        database.close()


def test_what_wrote_nothing_leaves_no_mark_and_old_marks_go(postgres: Server) -> None:
    with postgres.database() as url:
        database = Database(url)
        database.open(schema.prepare)
        writer = uuid4()
        with database.connect() as connection:
            run(connection, "DELETE FROM nobackfill.commits")
            run(connection, "BEGIN")
            assert commits.sign(connection, writer) is None
            run(connection, "SELECT pg_current_xact_id()")
            first = commits.sign(connection, writer)
            # Its next transaction takes the row.
            second = commits.sign(connection, writer)
            run(connection, "COMMIT")
            assert first is not None and second is not None
            assert commits.committed(connection, first) is False
            assert commits.committed(connection, second) is True
            commits.forget(connection)
            assert commits.committed(connection, second) is True
            run(connection, "UPDATE nobackfill.commits SET at = at - interval '25 hours'")
            schema.prepare(connection)
            assert commits.committed(connection, second) is False
        database.close()
