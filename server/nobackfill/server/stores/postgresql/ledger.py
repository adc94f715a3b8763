"""What the gateways of one database know together of a gallery that heals: claims, what is wanted,
and what a day has cost. Tables of the gallery's schema, made at the first use."""

import time
from collections.abc import Collection, Sequence
from typing import Any

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
# Days of a week ago. The day before stays: clocks of gateways differ.
_FORGET = (
    f"DELETE FROM {{schema}}.healing_spent WHERE day < to_char(%s::date - {_DAYS}, 'YYYY-MM-DD')"
)
_FREE = (
    "DELETE FROM {schema}.healing_claims WHERE until < clock_timestamp()"
    f" OR holder IS NOT NULL AND holder NOT IN ({HOLDERS})"
)
_CLAIM = (
    "INSERT INTO {schema}.healing_claims"
    f" SELECT label, clock_timestamp() + interval '{_CLAIM_S} seconds', %s"
    " FROM unnest(%s::bigint[]) AS label ON CONFLICT DO NOTHING RETURNING label"
)
_WANT = (
    "INSERT INTO {schema}.healing_wanted SELECT label, %s"
    " FROM unnest(%s::bigint[]) AS label ORDER BY label"
    " ON CONFLICT (label) DO UPDATE SET times = "
)
# What claims of this gateway have cost the days that they are of.
_GIVE_BACK = (
    "UPDATE {schema}.healing_spent AS spent SET items = greatest(0, items - claimed.count) FROM ("
    f"SELECT to_char((until - interval '{_CLAIM_S} seconds') AT TIME ZONE 'UTC', 'YYYY-MM-DD')"
    " AS day, count(*) FROM {schema}.healing_claims"
    " WHERE label = ANY(%s) AND holder IS NOT DISTINCT FROM %s GROUP BY 1"
    ") AS claimed WHERE spent.day = claimed.day"
)


class DatabaseLedger:
    """A HealingLedger in tables of the gallery's schema."""

    def __init__(self, gallery: PostgresqlGallery, space: str) -> None:
        self._database, self._schema = gallery.database, gallery.schema
        self._table = table_of(gallery.schema, gallery.space(space).number)
        self._counted_anew, self._count = 0.0, -1

        def work(connection: Connection) -> None:
            # Made twice at once, the second would fail.
            run(connection, "SELECT pg_advisory_xact_lock(hashtext('nobackfill.healing'))")
            for statement in _TABLES.split(";"):
                self._run(connection, statement)

        self._database.write(work)

    def _run(self, connection: Connection, statement: str, *values: object) -> Any:
        return run(connection, statement.replace("{schema}", self._schema), values)

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
            begin = "INSERT INTO {schema}.healing_spent VALUES (%s, 0) ON CONFLICT DO NOTHING"
            if self._run(connection, begin, day).rowcount:
                self._run(connection, _FORGET, day)
            # Who claims next waits here.
            lock = "SELECT items FROM {schema}.healing_spent WHERE day = %s FOR UPDATE"
            (spent,) = self._run(connection, lock, day).fetchone()
            self._run(connection, _FREE)
            some = list(labels)[: max(0, budget - spent)]
            rows = self._run(connection, _CLAIM, self._database.holder, some)
            mine = {int(label) for (label,) in rows}
            others = [label for label in labels if label not in mine]
            self._run(connection, f"{_WANT} healing_wanted.times + 1", 1, others)
            pay = "UPDATE {schema}.healing_spent SET items = items + %s WHERE day = %s"
            self._run(connection, pay, len(mine), day)
            return [label for label in labels if label in mine]

        return self._database.write(work)

    def settle(self, labels: Collection[int]) -> None:
        def work(connection: Connection) -> None:
            for table in ("healing_claims", "healing_wanted"):
                delete = f"DELETE FROM {{schema}}.{table} WHERE label = ANY(%s)"
                self._run(connection, delete, sorted(labels))

        self._database.write(work)

    def release(self, labels: Collection[int]) -> None:
        def work(connection: Connection) -> None:
            some = sorted(labels)
            # Before the claims, as who claims locks them: in the other order each waits for the
            # other.
            self._run(connection, "SELECT 1 FROM {schema}.healing_spent ORDER BY day FOR UPDATE")
            self._run(connection, _GIVE_BACK, some, self._database.holder)
            self._run(connection, "DELETE FROM {schema}.healing_claims WHERE label = ANY(%s)", some)
            self._run(connection, f"{_WANT} 0", 0, some)

        self._database.write(work)

    def requested(self, count: int) -> list[int]:
        select = (
            "SELECT label FROM {schema}.healing_wanted WHERE times > 0"
            " ORDER BY times DESC, label LIMIT %s"
        )
        rows = self._database.read(lambda one: self._run(one, select, count).fetchall())
        return [int(label) for (label,) in rows]

    def spent(self, day: str) -> int:
        select = "SELECT items FROM {schema}.healing_spent WHERE day = %s"
        row = self._database.read(lambda one: self._run(one, select, day).fetchone())
        return int(row[0]) if row else 0

    def close(self) -> None:
        """The connections are the database's."""
