"""Keep the ledger of re-embedding in tables of a gallery's schema, which all its gateways share.

It has the claims, the items that queries requested, and the cost of each day. The tables are
created at the first use.
"""

import time
from collections.abc import Collection, Sequence
from typing import Any

from nobackfill.gallery.filters import Matches
from nobackfill.server.stores.postgresql.database import Connection, execute
from nobackfill.server.stores.postgresql.gallery import PostgresqlGallery
from nobackfill.server.stores.postgresql.leading import HOLDERS
from nobackfill.server.stores.postgresql.schema import table_name

# A claim is free again once its gateway has ended, or after so many seconds if that is unknown: its
# machine is gone, or it has an older version.
_CLAIM_S = 300
# The cost of a day is deleted after so many days.
_DAYS = 7
# Counting migrated items reads all of them: it is repeated after so long (seconds), and at least so
# many times its duration.
_COUNTED_S, _COUNTED_SHARE = 1.0, 50.0
_TABLES = """
CREATE TABLE IF NOT EXISTS {schema}.healing_claims (
    label bigint PRIMARY KEY, until timestamptz NOT NULL);
ALTER TABLE {schema}.healing_claims ADD COLUMN IF NOT EXISTS holder integer;
CREATE TABLE IF NOT EXISTS {schema}.healing_wanted (
    label bigint PRIMARY KEY, times integer NOT NULL);
CREATE TABLE IF NOT EXISTS {schema}.healing_spent (day text PRIMARY KEY, items bigint NOT NULL)
"""
# Days of a week ago. The previous day stays, because clocks of gateways differ.
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
# The cost of this gateway's claims, by day.
_GIVE_BACK = (
    "UPDATE {schema}.healing_spent AS spent SET items = greatest(0, items - claimed.count) FROM ("
    f"SELECT to_char((until - interval '{_CLAIM_S} seconds') AT TIME ZONE 'UTC', 'YYYY-MM-DD')"
    " AS day, count(*) FROM {schema}.healing_claims"
    " WHERE label = ANY(%s) AND holder IS NOT DISTINCT FROM %s GROUP BY 1"
    ") AS claimed WHERE spent.day = claimed.day"
)


class DatabaseLedger:
    """Keep the ledger of one space of a gallery; implements HealingLedger."""

    def __init__(self, gallery: PostgresqlGallery, space: str) -> None:
        self._database, self._schema = gallery.database, gallery.schema
        self._table = table_name(gallery.schema, gallery.space(space).table_number)
        self._next_count, self._count = 0.0, -1

        def work(connection: Connection) -> None:
            # Two creations at the same time would make the second one fail.
            execute(connection, "SELECT pg_advisory_xact_lock(hashtext('nobackfill.healing'))")
            for statement in _TABLES.split(";"):
                self._run(connection, statement)

        self._database.write(work)

    def _run(self, connection: Connection, statement: str, *values: object) -> Any:
        return execute(connection, statement.replace("{schema}", self._schema), values)

    def load_origins(self) -> None:
        """Count the migrated items of the space, if that is due, however long it takes; see
        HealingLedger.load_origins.

        Until both 1 s and 50 times the duration of the last count have passed, it does nothing.
        After an error the earlier number stays, and the next call counts again.

        Raises:
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        began = time.monotonic()
        if began >= self._next_count:
            statement = f"SELECT count(*) FROM {self._table} WHERE origin = 'upgraded'"
            ((self._count,),) = self._database.fetch(statement)
            ended = time.monotonic()
            self._next_count = ended + max(_COUNTED_S, _COUNTED_SHARE * (ended - began))

    def count_migrated(self) -> int | None:
        """Return the number of migrated items that were not re-embedded; None if it is not known
        yet; see HealingLedger.count_migrated.

        It is the number of the last `load_origins`, and not changed by claims. It reads memory
        only.
        """
        return None if self._count < 0 else self._count

    def native_matches(self, matches: Matches | None) -> Matches | None:
        """Return None: with few native items a graph search would end early, and every row be
        compared.
        """
        return None

    def claim(self, labels: Sequence[int], day: str, budget: int) -> list[int]:
        """Claim items that no process embeds at present, within the day's budget.

        See HealingLedger.claim.

        In one transaction: claims that are older than 300 s, or whose gateway has ended, become
        free. Each claimed item costs one of the budget. Labels that are not claimed are counted as
        requested in vain. The first claim of a day deletes costs of more than 7 days ago. Claims of
        all gateways wait for each other.

        Args:
            labels: labels of items, distinct; the first ones are claimed if the budget is short.
                Labels are not looked up: one without an item is claimed, too.
            day: the day in UTC, YYYY-MM-DD.
            budget: most items of that day, for all gateways together; 0 claims none.

        Returns:
            The claimed labels in the order of `labels`; the caller ends each by `finish_claims` or
            `return_claims`.

        Raises:
            GalleryDeletedError: the gallery was deleted; nothing has changed.
            BusyError: a lock is held for too long, or other calls change the same items.
            UnavailableError: the database does not answer, or the outcome of the commit is unknown;
                repeating the call is safe.
            CannotWriteError: the database is full or read-only.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """

        def work(connection: Connection) -> list[int]:
            begin = "INSERT INTO {schema}.healing_spent VALUES (%s, 0) ON CONFLICT DO NOTHING"
            if self._run(connection, begin, day).rowcount:
                self._run(connection, _FORGET, day)
            # The next claim waits here.
            lock = "SELECT items FROM {schema}.healing_spent WHERE day = %s FOR UPDATE"
            (spent,) = self._run(connection, lock, day).fetchone()
            self._run(connection, _FREE)
            allowed_labels = list(labels)[: max(0, budget - spent)]
            rows = self._run(connection, _CLAIM, self._database.leader_pid, allowed_labels)
            mine = {int(label) for (label,) in rows}
            others = [label for label in labels if label not in mine]
            self._run(connection, f"{_WANT} healing_wanted.times + 1", 1, others)
            pay = "UPDATE {schema}.healing_spent SET items = items + %s WHERE day = %s"
            self._run(connection, pay, len(mine), day)
            return [label for label in labels if label in mine]

        return self._database.write(work)

    def finish_claims(self, labels: Collection[int]) -> None:
        """End claims of items that are embedded or deleted, and remove their requests; see
        Ledger.finish_claims.

        Labels without a claim are ignored. The cost stays counted. Claims of other gateways end,
        too.

        Raises:
            GalleryDeletedError: the gallery was deleted; nothing has changed.
            BusyError: a lock is held for too long, or other calls change the same items.
            UnavailableError: the database does not answer, or the outcome of the commit is unknown;
                repeating the call is safe.
            CannotWriteError: the database is full or read-only.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """

        def work(connection: Connection) -> None:
            for table in ("healing_claims", "healing_wanted"):
                delete = f"DELETE FROM {{schema}}.{table} WHERE label = ANY(%s)"
                self._run(connection, delete, sorted(labels))

        self._database.write(work)

    def return_claims(self, labels: Collection[int]) -> None:
        """Give up claims of items that failed, and return their cost to the budget; see
        Ledger.return_claims.

        The cost returns to the day of each claim. Only claims of this gateway return their cost,
        but claims of others are deleted, too. All labels stay known with no requests, until they
        are finished. A second call returns no cost, because the claims are gone.

        Raises:
            GalleryDeletedError: the gallery was deleted; nothing has changed.
            BusyError: a lock is held for too long, or other calls change the same items.
            UnavailableError: the database does not answer, or the outcome of the commit is unknown;
                repeating the call is safe.
            CannotWriteError: the database is full or read-only.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """

        def work(connection: Connection) -> None:
            released = sorted(labels)
            # Locked before the claims, as in `claim`: in the other order two transactions could
            # wait for each other.
            self._run(connection, "SELECT 1 FROM {schema}.healing_spent ORDER BY day FOR UPDATE")
            self._run(connection, _GIVE_BACK, released, self._database.leader_pid)
            self._run(
                connection, "DELETE FROM {schema}.healing_claims WHERE label = ANY(%s)", released
            )
            self._run(connection, f"{_WANT} 0", 0, released)

        self._database.write(work)

    def requested_labels(self, count: int) -> list[int]:
        """Return labels that queries requested in vain, most often first; see
        HealingLedger.requested_labels.

        Args:
            count: most labels; 0 gives none.

        Returns:
            The labels; equal numbers of requests by label. A label may be claimed or deleted by
            now.

        Raises:
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        select = (
            "SELECT label FROM {schema}.healing_wanted WHERE times > 0"
            " ORDER BY times DESC, label LIMIT %s"
        )
        rows = self._database.read(lambda one: self._run(one, select, count).fetchall())
        return [int(label) for (label,) in rows]

    def count_claimed(self, day: str) -> int:
        """Return how many items were claimed on a day, without those that were given up; see
        Ledger.count_claimed.

        Args:
            day: the day in UTC, YYYY-MM-DD; 0 for an unknown one.

        Raises:
            GalleryDeletedError: the gallery was deleted.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        select = "SELECT items FROM {schema}.healing_spent WHERE day = %s"
        row = self._database.read(lambda one: self._run(one, select, day).fetchone())
        return int(row[0]) if row else 0

    def close(self) -> None:
        """Do nothing: the connections belong to the database. Claims that are open end with the
        gateway.
        """
