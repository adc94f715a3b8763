"""Coordinate gateways that share a database: who leads, who serves, and what has changed.

The lead of an activation is an advisory lock of a connection, and a term. The lock ends with its
gateway, so another can take over at once. The term is in the row of the state. Each lead has its
own term: a transaction of a lead that is over is rolled back, however late it commits.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from typing import TypeVar

import psycopg
import structlog
from psycopg import errors as pg

from nobackfill.errors import BusyError, NobackfillError, UnavailableError
from nobackfill.server.state import (
    MAX_AUDIT_ENTRIES,
    AuditEntry,
    GatewayState,
    Leadership,
    LeadershipLostError,
    State,
    parse_state,
)
from nobackfill.server.stores.postgresql.database import (
    Connection,
    Database,
    execute,
    translate_error,
)

_LEAD = "SELECT pg_try_advisory_lock(hashtext('nobackfill.lead'))"
_RELEASES = "SELECT pg_advisory_lock(hashtext('nobackfill.releases'))"
# TCP keepalive (seconds): the server notices a dead machine within about ten seconds.
_ALIVE = (
    "SELECT set_config(name, value, false) FROM (VALUES ('tcp_keepalives_idle', '5'),"
    " ('tcp_keepalives_interval', '2'), ('tcp_keepalives_count', '3')) AS s (name, value)"
)
_NEW_TERM = "UPDATE nobackfill.gateway SET term = term + 1 RETURNING term"


class DatabaseLeadership(Leadership):
    """Lead an activation by an advisory lock and a term; see Leadership for its methods."""

    def __init__(self, database: Database, connection: Connection, term: int) -> None:
        self._database = database
        self._connection: Connection | None = connection
        self._closed = False
        self._lock = threading.Lock()
        self.term = term

    def is_lost(self) -> bool:
        """Tell whether another gateway has taken the lead, as far as this one can know; see
        Leadership.is_lost.

        If its connection broke, it tries to take the lock again, and says False once meanwhile.
        Without an answer of the database it says False: nobody can take the lead then. After
        `close` it says False.

        Any thread may call it; it waits up to 5 s for a connection. If another gateway has the lock
        by then, it says True.

        Raises:
            BusyError, ConfigurationError, DamagedError: the database refuses the lock.
        """
        with self._lock:
            if self._closed:
                return False
            try:
                if self._connection is None:
                    self._connection = _try_lock(self._database)
                return self._connection is None or _current_term(self._connection) != self.term
            except psycopg.Error:
                # The lock ended with the connection; the next call takes it again.
                self._connection = None
            except UnavailableError:
                # No other gateway can take it from a database that is away.
                pass
            return False

    def close(self) -> None:
        """Give up the lead; a second call does nothing; see Leadership.close.

        The lock ends with the connection, so that another gateway may lead at once. It waits for an
        `is_lost` of another thread.
        """
        with self._lock:
            self._closed = True
            if self._connection is not None:
                self._connection.close()


def begin_term(database: Database) -> int:
    """Begin a new term; every earlier lead is over.

    Within `Database.transact` it begins with the commit.

    Returns:
        The number of the term, larger than all before.

    Raises:
        UnavailableError: the database does not answer.
        CannotWriteError: the database cannot write.
        BusyError: the row is locked for too long, or this gateway may not write.
        GalleryDeletedError: the tables do not exist; `prepare` creates them.
        ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
    """
    return int(database.write(lambda connection: execute(connection, _NEW_TERM).fetchone()[0]))


@contextmanager
def lock_releases(database: Database, seconds: float) -> Iterator[None]:
    """Keep other gateways from activating, rolling back or retiring a release, or creating a
    gallery.

    The lock ends with the block, also if the block raises. It is held by a connection of its own,
    so a second call within the block waits, too. If that connection breaks, the lock ends, and the
    block is not told.

    Args:
        database: the database.
        seconds: longest time to wait for another gateway; at least 1 ms is waited.

    Raises:
        BusyError: another gateway took longer.
        UnavailableError: the database does not answer, or refuses or ends the connection.
        ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
    """
    with database.connect() as connection:
        # With a timeout of 0, PostgreSQL would wait without end.
        wait_ms = f"{max(1, int(1000 * seconds))}"
        try:
            execute(connection, "SELECT set_config('lock_timeout', %s, false)", [wait_ms])
            execute(connection, _RELEASES)
        except pg.LockNotAvailable as error:
            raise BusyError(
                "another gateway activates, rolls back or retires a release; try again in a few "
                "seconds"
            ) from error
        except psycopg.Error as error:
            raise translate_error(error) or error from error
        yield


def _try_lock(database: Database) -> Connection | None:
    connection = database.connect()
    try:
        execute(connection, _ALIVE)
        if execute(connection, _LEAD).fetchone()[0]:
            return connection
    except psycopg.Error as error:
        connection.close()
        raise translate_error(error) or error from error
    connection.close()
    return None


def _current_term(connection: Connection) -> int:
    return int(execute(connection, "SELECT term FROM nobackfill.gateway").fetchone()[0])


# GatewayDatabaseLock: gateways that serve from a database share an advisory lock, each by a
# connection of its own. A process that moves galleries there or away holds the lock exclusively.
# When the server restarts, the lock is lost and taken again within a second. If another process has
# taken it exclusively by then, this gateway refuses to write from then on.

log = structlog.get_logger("server.stores")

_CHECK_SECONDS = 0.5
_LOCK = "SELECT pg_try_advisory_lock{}(hashtext('nobackfill.gateway'))"
# Process ids of the server's backends that hold the lock, one for each gateway.
HOLDERS = (
    "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    " AND (classid::bigint << 32 | objid::bigint) = hashtext('nobackfill.gateway')"
)


class GatewayDatabaseLock:
    """Hold a database from the constructor to `close`."""

    def __init__(self, database: Database, *, exclusive: bool) -> None:
        """Take the lock.

        It does not wait for the lock. A thread then checks every 0.5 s that the lock is held, and
        takes it again after a break. If another process has it by then, that is logged, and the
        database refuses all later writes. `database.leader_pid` is set each time.

        Args:
            database: the database.
            exclusive: take it exclusively.

        Raises:
            BusyError: another process holds the lock in a way that excludes this one.
            UnavailableError: the database does not answer, or refuses the connection.
            psycopg.Error: the connection breaks while the lock is taken.
            RuntimeError: the system has no thread left.
        """
        self._database = database
        self._lock = _LOCK.format("" if exclusive else "_shared")
        self._stopping = threading.Event()
        connection = self._try_lock()
        if connection is None:
            raise BusyError(
                "a gateway serves from this database, but this command needs the database alone; "
                "stop every gateway of this database, or name another database"
                if exclusive
                else "another process has locked this database: `gateway data move` moves its "
                "galleries, or a gateway of an older version serves from it; start this gateway "
                "again when that process has ended"
            )
        self._thread = threading.Thread(
            target=self._watch, args=(connection,), name="tenure", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Release the lock; returns once its thread has ended.

        A second call does nothing more. It may take as long as the database needs to refuse a
        connection.
        """
        self._stopping.set()
        self._thread.join()

    def _watch(self, connection: Connection) -> None:
        lock: Connection | None = connection
        while not self._stopping.wait(_CHECK_SECONDS):
            try:
                if lock is not None:
                    execute(lock, "SELECT 1")
                    continue
                lock = self._try_lock()
                if lock is None:
                    log.error(
                        "another process has locked the database, so this gateway writes nothing "
                        "more; restart it when that process has ended"
                    )
                    self._database.refuse_writes(
                        "this gateway may not write any more: another process has locked the "
                        "database for itself while the connection was lost; restart this gateway "
                        "when that process has ended"
                    )
                    return
            except psycopg.Error:
                lock = None
            except NobackfillError as error:
                log.warning(
                    "the database does not answer; the gateway tries again", error=str(error)
                )
        if lock is not None:
            lock.close()

    def _try_lock(self) -> Connection | None:
        connection = self._database.connect()
        if execute(connection, self._lock).fetchone()[0]:
            (self._database.leader_pid,) = execute(connection, "SELECT pg_backend_pid()").fetchone()
            return connection
        connection.close()
        return None


# News: a notification with each commit that other gateways must follow. One may be lost, so
# listeners also poll.

_CHANNEL = "nobackfill"


def notify_gateways(connection: Connection) -> None:
    """Notify other gateways when this transaction commits.

    Call it within a transaction; without one, others are notified at once. It reads and writes no
    table, and increases no epoch; `record_gallery_change` does both.

    Raises:
        psycopg.Error: the connection or its transaction is broken; the caller translates it.
    """
    execute(connection, f"SELECT pg_notify('{_CHANNEL}', '')")


def record_gallery_change(connection: Connection, gallery_number: int) -> None:
    """Record that a gallery's spaces or state changed: plans that were made before are outdated.

    It increases the gallery's epoch and notifies other gateways at the commit. An unknown number
    changes nothing, and still notifies.

    Raises:
        psycopg.Error: the statement fails, as without the table; the caller translates it.
    """
    update = "UPDATE nobackfill.galleries SET epoch = epoch + 1 WHERE number = %s"
    execute(connection, update, [gallery_number])
    notify_gateways(connection)


class CommitNotifications:
    """Wait for commits of any gateway, from the first `wait` to `close`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: Connection | None = None

    def wait(self, seconds: float) -> None:
        """Wait until there is a commit since the last call, or the time is over.

        The first call, and the first after an error or `close`, only begins to listen. It returns
        at once, because earlier commits were not noticed.

        Several commits may end one wait. After an error the connection is closed. Only one thread
        may use the object.

        Args:
            seconds: the longest wait; 0 only looks.

        Raises:
            UnavailableError: the database does not answer, or refuses or ends the connection.
        """
        try:
            if self._connection is None:
                self._connection = self._database.connect()
                execute(self._connection, f"LISTEN {_CHANNEL}")
                # Return at once: commits before the LISTEN were not notified.
                return
            for _ in self._connection.notifies(timeout=seconds, stop_after=1):
                pass
        except psycopg.Error as error:
            self.close()
            raise UnavailableError(
                "the database does not answer, so changes of other gateways are not noticed; the "
                "gateway tries again"
            ) from error

    def close(self) -> None:
        """Close the connection; a later `wait` opens another.

        A second call does nothing.
        """
        if self._connection is not None:
            self._connection.close()
            self._connection = None


Result = TypeVar("Result")


# The version that wrote the row: no key of its value can say it, as older versions refuse keys that
# they do not know.
_WRITER = "(SELECT written_by FROM nobackfill.format)"


class DatabaseState(GatewayState):
    """Keep the shared state in one row of the database, whose epoch grows with each change."""

    shared = True

    def __init__(self, database: Database) -> None:
        """Read the state.

        Raises:
            VerificationError: the row is damaged, or a newer version wrote it.
            UnavailableError: the database does not answer.
            GalleryDeletedError: the tables do not exist; `prepare` creates them.
            BusyError: no connection is free, or a statement takes too long.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        self._database = database
        self._update_lock = threading.Lock()
        self._epoch = -1
        query = f"SELECT epoch, value, {_WRITER} FROM nobackfill.gateway"
        ((epoch, value, writer),) = database.fetch(query)
        super().__init__(_parse_database_state(value, writer))
        self._epoch = epoch

    def refresh(self) -> Mapping[str, tuple[int, int]]:
        """Read the state again; see GatewayState.refresh.

        `current` then is the state that was read, unless a newer one is known. Do not call it
        within `transact`: a state that is rolled back would stay in `current`.

        Returns:
            Number and epoch of each gallery, by name.

        Raises:
            VerificationError: the row is damaged, or a newer version wrote it.
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
            GalleryDeletedError: the tables do not exist any more.
        """
        query = (
            f"SELECT epoch, value, {_WRITER},"
            " (SELECT coalesce(jsonb_object_agg(name, jsonb_build_array(number, epoch)), '{}')"
            " FROM nobackfill.galleries) FROM nobackfill.gateway"
        )
        ((epoch, value, writer, marks),) = self._database.fetch(query)
        self._update(epoch, _parse_database_state(value, writer))
        return {name: (number, mark) for name, (number, mark) in marks.items()}

    def revise(self, values_of: Callable[[State], Mapping[str, object]]) -> State:
        """Replace fields by values that depend on the present state, atomically and durably; see
        GatewayState.revise.

        It locks the row until the commit, increases its epoch, and notifies other gateways, even if
        nothing differs. `current` changes after the commit: within `transact`, at its end.

        Args:
            values_of: returns new values by the name of a field of State; it may be called more
                than once. Its errors pass through, and nothing has changed then.

        Returns:
            The new state.

        Raises:
            pydantic.ValidationError: a value is invalid; nothing has changed.
            VerificationError: the row is damaged, or a newer version wrote it.
            BusyError: a lock is held for too long, or other calls change the same rows.
            UnavailableError: the database does not answer, or the outcome of the commit is unknown;
                repeating the call is safe.
            CannotWriteError: the database is full or read-only.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
            GalleryDeletedError: the tables do not exist any more.
        """

        def work(connection: Connection) -> tuple[int, State]:
            query = f"SELECT epoch, value, {_WRITER} FROM nobackfill.gateway FOR UPDATE"
            epoch, value, writer = execute(connection, query).fetchone()
            state = _parse_database_state(value, writer)
            new = State.model_validate({**dict(state), **values_of(state)})
            update = "UPDATE nobackfill.gateway SET value = %s, epoch = epoch + 1"
            execute(connection, update, [new.model_dump_json()])
            if writer != (own := version("nobackfill")):
                execute(connection, "UPDATE nobackfill.format SET written_by = %s", [own])
            notify_gateways(connection)
            return epoch + 1, new

        epoch, new = self._database.write(work)
        self._database.after_commit(lambda: self._update(epoch, new))
        return new

    def _update(self, epoch: int, state: State) -> None:
        """Take a state unless a newer one is known."""
        with self._update_lock:
            if epoch > self._epoch:
                self._epoch, self.current = epoch, state

    def transact(self, work: Callable[[], Result], lead: Leadership | None = None) -> Result:
        """Run work whose changes other gateways see all at once, or not at all; see
        GatewayState.transact.

        Within another `transact` of this thread, `work` joins that transaction.

        Args:
            work: changes galleries and the state; it may be called more than once.
            lead: the lead that must still hold at the commit; None checks none.

        Returns:
            The result of `work`.

        Raises:
            LeadershipLostError: another gateway leads; nothing has changed.
            BusyError: a lock is held for too long, or other calls change the same rows.
            UnavailableError: the database does not answer, or the outcome of the commit is unknown;
                repeating the call is safe.
            CannotWriteError: the database is full or read-only.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
            Exception: any error of `work`; then nothing has changed. Or the first error of a
                function for `after_commit`, such as a gallery's listener; the change is committed.
        """

        def fenced() -> Result:
            result = work()
            if isinstance(lead, DatabaseLeadership):
                # The row stays locked until the commit, so no new term begins before it.
                query = "SELECT term FROM nobackfill.gateway FOR UPDATE"
                if self._database.fetch(query) != [(lead.term,)]:
                    raise LeadershipLostError(
                        "another gateway leads the activation now, so this one changed nothing; "
                        "follow it with `gateway watch`"
                    )
            return result

        return self._database.transact(fenced)

    def take_leadership(self) -> Leadership | None:
        """Take the lead of an activation; see GatewayState.take_leadership.

        It begins a new term, by which transactions of earlier leads fail. It does not wait for
        another gateway. A second call in this process gives None, too, while the first lead is
        open.

        Returns:
            The lead, which the caller closes; None if another gateway has it.

        Raises:
            UnavailableError: the database does not answer, or refuses the connection.
            BusyError: the row of the term is locked for too long, or this gateway may not write.
            CannotWriteError: the database cannot write.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        connection = _try_lock(self._database)
        if connection is None:
            return None
        try:
            return DatabaseLeadership(self._database, connection, begin_term(self._database))
        except BaseException:
            connection.close()
            raise

    def end_leadership(self) -> None:
        """Forget the activation under way, and end the lead of the gateway that runs it; see
        GatewayState.end_leadership.

        It begins a new term, so that the lead's next transaction fails. It does so also without an
        activation.

        Raises:
            BusyError: a lock is held for too long, or other calls change the same rows.
            UnavailableError: the database does not answer, or the outcome of the commit is unknown;
                repeating the call is safe.
            CannotWriteError: the database is full or read-only.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
            VerificationError: the row is damaged, or a newer version wrote it.
        """

        def work() -> None:
            begin_term(self._database)
            self.revise(lambda _now: {"activation": None})

        self._database.transact(work)

    def block_other_gateways(self, seconds: float) -> AbstractContextManager[None]:
        """Keep other gateways from activating, rolling back or retiring a release, or creating a
        gallery, during a block; see GatewayState.block_other_gateways.

        If the connection that holds the lock breaks, the lock ends, and the block is not told.

        Args:
            seconds: longest wait for another gateway, which begins with the block; at least 1 ms.

        Raises:
            BusyError: another gateway took longer.
            UnavailableError: the database does not answer, or refuses or ends the connection.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        return lock_releases(self._database, seconds)

    def last_upgrade_record(self, gallery: str) -> str | None:
        """Return the record of a last upgrade; see GatewayState.last_upgrade_record.

        Returns:
            The record as JSON, unchecked; None without one.

        Raises:
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        query = "SELECT value FROM nobackfill.jobs WHERE gallery = %s"
        rows = self._database.fetch(query, [gallery])
        return str(rows[0][0]) if rows else None

    def save_upgrade_record(self, gallery: str, job: str | None) -> None:
        """Save the record of a gallery's upgrade for other gateways; None deletes it; see
        GatewayState.save_upgrade_record.

        A record replaces the former one. The gallery need not exist, and the text is not checked.

        Raises:
            BusyError: a lock is held for too long, or other calls change the same rows.
            UnavailableError: the database does not answer, or the outcome of the commit is unknown;
                repeating the call is safe.
            CannotWriteError: the database is full or read-only.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        statement = (
            "INSERT INTO nobackfill.jobs (gallery, value) VALUES (%s, %s)"
            " ON CONFLICT (gallery) DO UPDATE SET value = excluded.value"
        )
        if job is None:
            remove = "DELETE FROM nobackfill.jobs WHERE gallery = %s"
            self._database.write(lambda connection: execute(connection, remove, [gallery]))
        else:
            self._database.write(lambda connection: execute(connection, statement, [gallery, job]))

    def _keep_deed(self, deed: AuditEntry) -> None:
        statement = (
            "INSERT INTO nobackfill.audit (at, who, what, of_what)"
            " VALUES (to_timestamp(%s), %s, %s, %s)"
        )
        self._database.write(lambda connection: execute(connection, statement, list(deed)))

    def audit_entries(self) -> list[AuditEntry]:
        """Return the latest entries of the audit, at most MAX_AUDIT_ENTRIES, latest last; empty
        without any; see GatewayState.audit_entries.

        Raises:
            BusyError, UnavailableError: the database is busy, or does not answer, or the caller is
                gone.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        query = (
            "SELECT extract(epoch FROM at)::double precision, who, what, of_what"
            " FROM nobackfill.audit ORDER BY number DESC LIMIT %s"
        )
        rows = self._database.fetch(query, [MAX_AUDIT_ENTRIES])
        return [AuditEntry(*row) for row in reversed(rows)]


def _parse_database_state(value: str, writer: object) -> State:
    return parse_state(value, "nobackfill.gateway of the database", writer)
