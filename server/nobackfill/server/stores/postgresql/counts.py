"""How many items several galleries hold together, for who adds some in the same transaction."""

from collections.abc import Collection

from nobackfill.server.stores.postgresql.database import Connection, Database, run
from nobackfill.server.stores.postgresql.schema import schema_of


def count_alone(database: Database, names: Collection[str]) -> int:
    """Items in the galleries of these names that are there. Within Database.together nobody else
    counts one of them here, nor drops one, before the end of the transaction."""

    def work(connection: Connection) -> int:
        # One after the other, in one order. Locks of their own: an upgrade's flip waits for none.
        for name in sorted(names):
            run(
                connection,
                "SELECT pg_advisory_xact_lock(hashtext('nobackfill items'), hashtext(%s))",
                [name],
            )
        rows = run(
            connection,
            "SELECT number FROM nobackfill.galleries WHERE name = ANY(%s) ORDER BY number"
            " FOR KEY SHARE",
            [list(names)],
        ).fetchall()
        counts = " UNION ALL ".join(
            f"SELECT count(*) AS items FROM {schema_of(number)}.items" for (number,) in rows
        )
        if not counts:
            return 0
        return int(run(connection, f"SELECT sum(items) FROM ({counts}) AS counts").fetchone()[0])

    return database.write(work)
