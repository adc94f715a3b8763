"""What the gateways of one database know together of a gallery that heals: claims, what is wanted,
and what a day has cost. Tables of the gallery's schema, made at the first use."""

import time
from collections.abc import Collection, Sequence

from nobackfill.gallery.filters import Matches
from nobackfill.server.stores.postgresql.database import Connection, run
from nobackfill.server.stores.postgresql.gallery import PostgresqlGallery
from nobackfill.server.stores.postgresql.leading import HOLDERS
from nobackfill.server.stores.postgresql.schema import table_of

# A claim is another's when its gateway has ended, and after so long where that cannot be told: its
# machine is gone, or it is of an older version.
_CLAIM_S = 300
# What a day has cost is forgotten after so many.
_DAYS = 7
# A count of the carried ones reads them all: again after so long, and so many times what it took.
_COUNTED_S, _COUNTED_SHARE = 1.0, 50.0
_TABLES = """
CREATE TABLE IF NOT EXISTS {schema}.healing_claims (
    label bigint PRIMARY KEY, until timestamptz NOT NULL);
ALTER TABLE {schema}.healing_claims ADD COLUMN IF NOT EXISTS holder integer;
CREATE TABLE IF NOT EXISTS {schema}.healing_wanted (
    label bigint PRIMARY KEY, times integer NOT NULL);
CREATE TABLE IF NOT EXISTS {schema}.healing_spent (day text PRIMARY KEY, items bigint NOT NULL)
"""


class DatabaseLedger:
    """A HealingLedger in tables of the gallery's schema."""

    def __init__(self, gallery: PostgresqlGallery, space: str) -> None:
        self._database, self._schema = gallery.database, gallery.schema
        self._table = table_of(gallery.schema, gallery.space(space).number)
        self._counted_anew, self._count = 0.0, -1

        def work(connection: Connection) -> None:
            # Made twice at once, the second would fail.
            run(connection, "SELECT pg_advisory_xact_lock(hashtext('nobackfill.healing'))")
            for statement in _TABLES.format(schema=self._schema).split(";"):
                run(connection, statement)

        self._database.write(work)

    def load(self) -> None:
        began = time.monotonic()
        if began >= self._counted_anew:
            statement = f"SELECT count(*) FROM {self._table} WHERE origin = 'upgraded'"
            self._count = self._database.read(
                lambda connection: int(run(connection, statement).fetchone()[0])
            )
            ended = time.monotonic()
            self._counted_anew = ended + max(_COUNTED_S, _COUNTED_SHARE * (ended - began))

    def carried(self) -> int | None:
        return None if self._count < 0 else self._count

    def native(self, allowed: Matches | None) -> Matches | None:
        """Not told: where few are native, a graph would be left and every row compared."""
        return None

    def claim(self, labels: Sequence[int], day: str, budget: int) -> list[int]:
        def work(connection: Connection) -> list[int]:
            began = run(
                connection,
                f"INSERT INTO {self._schema}.healing_spent VALUES (%s, 0) ON CONFLICT DO NOTHING",
                [day],
            )
            if began.rowcount:
                # Not the day before: clocks of gateways differ.
                run(
                    connection,
                    f"DELETE FROM {self._schema}.healing_spent"
                    f" WHERE day < to_char(%s::date - {_DAYS}, 'YYYY-MM-DD')",
                    [day],
                )
            # Who claims next waits here.
            (spent,) = run(
                connection,
                f"SELECT items FROM {self._schema}.healing_spent WHERE day = %s FOR UPDATE",
                [day],
            ).fetchone()
            run(
                connection,
                f"DELETE FROM {self._schema}.healing_claims WHERE until < clock_timestamp()"
                f" OR holder IS NOT NULL AND holder NOT IN ({HOLDERS})",
            )
            rows = run(
                connection,
                f"INSERT INTO {self._schema}.healing_claims"
                f" SELECT label, clock_timestamp() + interval '{_CLAIM_S} seconds', %s"
                " FROM unnest(%s::bigint[]) AS label ON CONFLICT DO NOTHING RETURNING label",
                [self._database.holder, list(labels)[: max(0, budget - spent)]],
            )
            mine = {int(label) for (label,) in rows}
            self._want(connection, [label for label in labels if label not in mine])
            run(
                connection,
                f"UPDATE {self._schema}.healing_spent SET items = items + %s WHERE day = %s",
                [len(mine), day],
            )
            return [label for label in labels if label in mine]

        return self._database.write(work)

    def _want(self, connection: Connection, labels: Sequence[int]) -> None:
        run(
            connection,
            f"INSERT INTO {self._schema}.healing_wanted SELECT label, 1"
            " FROM unnest(%s::bigint[]) AS label ORDER BY label"
            " ON CONFLICT (label) DO UPDATE SET times = healing_wanted.times + 1",
            [list(labels)],
        )

    def settle(self, labels: Collection[int]) -> None:
        self._end(labels, "DELETE FROM {schema}.healing_wanted WHERE label = ANY(%s)")

    def release(self, labels: Collection[int]) -> None:
        self._end(
            labels,
            "INSERT INTO {schema}.healing_wanted SELECT label, 0"
            " FROM unnest(%s::bigint[]) AS label ORDER BY label"
            " ON CONFLICT (label) DO UPDATE SET times = 0",
            given_back=True,
        )

    def _end(self, labels: Collection[int], then: str, *, given_back: bool = False) -> None:
        def work(connection: Connection) -> None:
            some = sorted(labels)
            if given_back:
                self._give_back(connection, some)
            run(
                connection,
                f"DELETE FROM {self._schema}.healing_claims WHERE label = ANY(%s)",
                [some],
            )
            run(connection, then.format(schema=self._schema), [some])

        self._database.write(work)

    def _give_back(self, connection: Connection, labels: Sequence[int]) -> None:
        """What claims of this gateway have cost the days that they are of."""
        # Before the claims, as who claims locks them: in the other order each waits for the other.
        run(connection, f"SELECT 1 FROM {self._schema}.healing_spent ORDER BY day FOR UPDATE")
        run(
            connection,
            f"UPDATE {self._schema}.healing_spent AS spent"
            " SET items = greatest(0, items - claimed.count) FROM ("
            f"SELECT to_char((until - interval '{_CLAIM_S} seconds') AT TIME ZONE 'UTC',"
            f" 'YYYY-MM-DD') AS day, count(*) FROM {self._schema}.healing_claims"
            " WHERE label = ANY(%s) AND holder IS NOT DISTINCT FROM %s GROUP BY 1"
            ") AS claimed WHERE spent.day = claimed.day",
            [list(labels), self._database.holder],
        )

    def wanted(self, count: int) -> list[int]:
        def work(connection: Connection) -> list[int]:
            rows = run(
                connection,
                f"SELECT label FROM {self._schema}.healing_wanted WHERE times > 0"
                " ORDER BY times DESC, label LIMIT %s",
                [count],
            )
            return [int(label) for (label,) in rows]

        return self._database.read(work)

    def spent(self, day: str) -> int:
        def work(connection: Connection) -> int:
            row = run(
                connection,
                f"SELECT items FROM {self._schema}.healing_spent WHERE day = %s",
                [day],
            ).fetchone()
            return int(row[0]) if row else 0

        return self._database.read(work)

    def close(self) -> None:
        """The connections are the database's."""
