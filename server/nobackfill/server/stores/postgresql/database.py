"""Connect to PostgreSQL: a pool, reads that survive a broken connection, transactions that happen
once.

Locks are taken in one order, so that no two transactions wait for each other. First comes the
gallery's gate, a table lock in order of arrival: puts share it, a change of spaces holds it
exclusively. Then come rows of `items` by rising label, then new ids in order, then rows of vectors.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol, TypeAlias, TypeVar
from uuid import UUID, uuid4

import psycopg
from pgvector.psycopg import register_vector
from psycopg import errors as pg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types import TypeInfo
from psycopg.types.string import ByteaBinaryLoader
from psycopg_pool import ConnectionPool, PoolTimeout, TooManyRequests

from nobackfill.errors import (
    BusyError,
    CannotWriteError,
    ConfigurationError,
    DamagedError,
    NobackfillError,
    OverloadedError,
    UnavailableError,
)
from nobackfill.loopback import is_loopback
from nobackfill.server.state import GalleryDeletedError

_ENCRYPTED = ("require", "verify-ca", "verify-full")


def check_url(url: str, setting: str = "store") -> None:
    """Check the address of a database.

    An address without a host is local. With several hosts, one that is not local is enough to need
    TLS: sslmode require, verify-ca or verify-full. Nothing is connected, and environment variables
    such as PGHOST are not looked at.

    Args:
        url: the address; errors do not repeat it, because it may have a password.
        setting: name of the setting, for errors.

    Raises:
        ConfigurationError: it is no address, or leads to another machine without TLS.
    """
    try:
        options = conninfo_to_dict(url)
    except (psycopg.Error, UnicodeEncodeError) as error:
        raise ConfigurationError(
            f"{setting}: expected the address of a database, postgresql://USER@HOST/DATABASE"
            "?sslmode=verify-full, or one with a socket's folder as host; got another form"
        ) from error
    hosts = [*str(options.get("host") or "").split(","), str(options.get("hostaddr") or "")]
    if not all(map(is_local, hosts)) and options.get("sslmode") not in _ENCRYPTED:
        raise tls_required(setting)


def with_timeout(url: str, seconds: float) -> str:
    """Add a connection timeout to an address, unless it has one.

    Args:
        url: an address that `check_url` accepts.
        seconds: longest time for a connection, cut to whole seconds; psycopg takes 0 as
            130 s, and 1 as 2 s.

    Returns:
        The address as KEY=VALUE pairs, with the password if it has one.
    """
    return make_conninfo(url, **({"connect_timeout": int(seconds)} | conninfo_to_dict(url)))


def is_local(host: str) -> bool:
    """Tell whether a host, or a socket's folder, is on this machine.

    An empty text counts as local. So does a text that begins with "/" or "@", the folder or the
    abstract name of a socket. No name is looked up, except as `is_loopback` does.
    """
    return not host or is_loopback(host) or host.startswith(("/", "@"))


def tls_required(setting: str = "store") -> ConfigurationError:
    """Return, without raising it, the error for a database on another machine without TLS.

    Args:
        setting: name of the setting that holds the address, for the message.
    """
    return ConfigurationError(
        f"{setting}: a database on another machine needs TLS; add sslmode=verify-full (and "
        "sslrootcert) to its address"
    )


# The transaction was rolled back because of another one; a retry may succeed.
COLLISIONS = (pg.DeadlockDetected, pg.SerializationFailure, pg.UniqueViolation)
# The server is stopping, or has just started.
_ENDING = (pg.AdminShutdown, pg.CrashShutdown, pg.CannotConnectNow, pg.IdleSessionTimeout)
_BUSY = (
    *COLLISIONS, pg.LockNotAvailable, pg.QueryCanceled, pg.TooManyConnections,
    pg.IdleInTransactionSessionTimeout,
)  # fmt: skip
_UNWRITABLE = (pg.DiskFull, pg.IoError)
_REFUSED = (
    pg.InsufficientPrivilege, pg.InvalidAuthorizationSpecification, pg.InvalidPassword,
    pg.InvalidCatalogName, pg.FeatureNotSupported, pg.UndefinedFile,
)  # fmt: skip
_GONE = (pg.UndefinedTable, pg.InvalidSchemaName)


def is_connection_lost(error: Exception) -> bool:
    """Tell whether the connection is broken, or the server is ending it; a new one may work
    soon.

    Returns:
        True for errors of a stopping or starting server, and for an OperationalError without an
        SQLSTATE; False for all others, also those that are not PostgreSQL's.
    """
    if isinstance(error, _ENDING):
        return True
    # An error without a code comes from the connection, not from the server.
    return isinstance(error, psycopg.OperationalError) and error.sqlstate is None


def translate_error(error: Exception) -> NobackfillError | None:
    """Translate an error of PostgreSQL or its pool into an error of this project.

    Sentences have neither a password nor a value: PostgreSQL puts values into an error's details.

    A statement that was cancelled, or took longer than its limit, is a BusyError.

    Returns:
        The error to raise: OverloadedError (no connection is free), BusyError, CannotWriteError
        (read-only or full), ConfigurationError (rights, or a part that is not installed),
        GalleryDeletedError, DamagedError, or UnavailableError, also for a refused connection, which
        has no code. None for an error that only a defect of this program can cause, and for any
        error of other origin.
    """
    if isinstance(error, PoolTimeout | TooManyRequests):
        return OverloadedError(
            "every connection to the database is in use, or none could be made; try again in a "
            "few seconds, and check that PostgreSQL answers"
        )
    if not isinstance(error, psycopg.Error):
        return None
    message = error.diag.message_primary or type(error).__name__
    if is_connection_lost(error):
        # The connection's own message: where it leads, and why it failed.
        message = (str(error).splitlines() or [message])[0]
    kinds: tuple[tuple[tuple[type[Exception], ...], NobackfillError], ...] = (
        (
            (pg.ReadOnlySqlTransaction,),
            CannotWriteError(
                "the database is read-only, perhaps a standby; name the primary server in the "
                "address, or all servers, as in postgresql://USER@HOST1,HOST2/DATABASE?target_session_attrs="
                "read-write"
            ),
        ),
        (_BUSY, BusyError(f"the database is busy ({message}); try again in a few seconds")),
        (
            _UNWRITABLE,
            CannotWriteError(
                f"the database cannot write ({message}); free some space on the disk of its server"
            ),
        ),
        (
            _REFUSED,
            ConfigurationError(
                f"the database refuses the connection or statement ({message}); check the user, "
                "password and database in the address, and the user's rights"
            ),
        ),
        (
            _GONE,
            GalleryDeletedError("the gallery was deleted; `gateway gallery list` shows the others"),
        ),
        ((pg.DataCorrupted, pg.IndexCorrupted), DamagedError("the database", message)),
        (
            (pg.OutOfMemory, pg.InsufficientResources),
            UnavailableError(
                f"the database has no memory or other resources left ({message}); try again later, "
                "or give the database's server more memory and connections"
            ),
        ),
    )
    for classes, translated in kinds:
        if isinstance(error, classes):
            return translated
    if is_connection_lost(error) or isinstance(error, psycopg.OperationalError):
        return UnavailableError(
            f"the database does not answer ({message}); try again in a few seconds, and check that "
            "its server runs and can be reached from here"
        )
    return None


# If a connection breaks during COMMIT, the gateway must find out whether the transaction was
# committed. Its number is not enough: after a crash, numbers that left nothing on disk are used
# again, for other transactions. So each writing transaction inserts a mark of its own, and deletes
# the previous mark of its thread. (One row that every transaction updates would collect versions
# while a backup holds a snapshot, and slow every write: by a factor of 3 after 20,000.)

_Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]

TABLE = """
CREATE TABLE IF NOT EXISTS nobackfill.commits (
    mark uuid PRIMARY KEY, at timestamptz NOT NULL DEFAULT now()
)
"""
DROP = "DROP TABLE IF EXISTS nobackfill.commits"
# The number is read before the mark gets one: a transaction without writes leaves no mark.
_SIGN = b"""
WITH own AS MATERIALIZED (SELECT pg_current_xact_id_if_assigned() AS number),
former AS (DELETE FROM nobackfill.commits USING own WHERE mark = %s AND number IS NOT NULL),
signed AS (INSERT INTO nobackfill.commits (mark) SELECT %s FROM own WHERE number IS NOT NULL)
SELECT number::text FROM own
"""
_STATUS = b"SELECT pg_xact_status(%s::xid8)"
_FOUND = b"SELECT EXISTS (SELECT FROM nobackfill.commits WHERE mark = %s)"
# Nobody asks for a transaction's fate so long after its end.
_FORGET = b"DELETE FROM nobackfill.commits WHERE at < now() - interval '1 day'"


@dataclass(frozen=True)
class TransactionMark:
    """Identify a transaction: by its number, valid until the server crashes, and by its mark."""

    transaction_id: str
    mark: UUID


def mark_transaction(connection: _Connection, former: UUID | None) -> TransactionMark | None:
    """Insert a mark, as the last statement of a transaction.

    If the transaction wrote something, the mark of `former` is deleted in it.

    Args:
        connection: the connection.
        former: mark of the thread's last committed transaction, which is deleted; None without one.

    Returns:
        The transaction's number and its new mark; None if the transaction wrote nothing, so that
        nothing is inserted or deleted either.

    Raises:
        psycopg.Error: the statement fails.
    """
    mark = uuid4()
    row = connection.execute(_SIGN, [former, mark], binary=True).fetchone()
    assert row is not None, "a SELECT without a condition"
    return None if row[0] is None else TransactionMark(row[0], mark)


def is_committed(connection: _Connection, signature: TransactionMark) -> bool | None:
    """Tell whether a transaction was committed; None while it still runs.

    A number that the server does not know yet, because it crashed, counts as not committed. A mark
    that was deleted, by the thread's next transaction or after a day, counts as not committed.

    Args:
        connection: a connection that commits each statement.
        signature: the transaction.

    Raises:
        psycopg.Error: the connection breaks or a statement fails; the outcome stays unknown.
    """
    try:
        row = connection.execute(_STATUS, [signature.transaction_id], binary=True).fetchone()
    except psycopg.errors.InvalidParameterValue:
        # The number is "in the future": the server crashed before the transaction was on its disk.
        return False
    if row is not None and row[0] == "in progress":
        return None
    # A separate statement, because a statement does not see what ran when it began.
    row_found = connection.execute(_FOUND, [signature.mark]).fetchone()
    assert row_found is not None, "a SELECT without a condition"
    return bool(row_found[0])


def delete_old_marks(connection: _Connection) -> None:
    """Delete the marks of commits that are older than a day.

    Raises:
        psycopg.Error: the statement fails.
    """
    connection.execute(_FORGET)


Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]
Result = TypeVar("Result")

# Longest wait (seconds) for a connection of the pool, for a lock, and for a restarting server while
# broken connections are replaced.
_WAIT_SECONDS = 5.0
_STATEMENT_SECONDS = 60
# Seconds after which a statement that nobody waits for is cancelled.
_POLL_SECONDS = 0.1
# Most tries of a transaction that collides with another, or whose connection breaks.
_MAX_TRIES = 8
# Candidates of a graph (hnsw.ef_search) unless a search asks for more.
EF = 100


def execute(
    connection: Connection,
    statement: str,
    values: Sequence[Any] = (),
    *,
    plans_for_values: bool = False,
) -> Any:
    """Execute a statement whose names are ours; values are bound.

    Results are in binary form. Nothing is translated or tried again.

    Args:
        connection: the connection.
        statement: the SQL statement.
        values: values of its placeholders.
        plans_for_values: plan the statement for its values at each call, which lets PostgreSQL
            compare many values by a hash table.

    Returns:
        The cursor, which holds all rows already.

    Raises:
        psycopg.Error: the statement fails, or the connection is broken or closed.
    """
    prepare = False if plans_for_values else None
    return connection.execute(statement.encode(), values or None, binary=True, prepare=prepare)


def scalar(connection: Connection, statement: str, values: Sequence[Any] = ()) -> Any:
    """Return the first value of a statement that gives a row; see `execute`.

    Raises:
        TypeError: the statement gives no row.
        psycopg.Error: the statement fails, or the connection is broken or closed.
    """
    return execute(connection, statement, values).fetchone()[0]


class Reader(Protocol):
    """Describe the caller that waits for a read."""

    @property
    def name(self) -> str:
        """Return the reader's name.

        Readers of one name share a limit of concurrent reads. Callers without tokens all have the
        empty name.
        """

    def check(self) -> None:
        """Check that somebody waits for the read.

        Raises:
            DeadlineError: the call's time is over.
            CancelledError: the caller has cancelled the call.
        """


class Database:
    """Use one database from many threads."""

    def __init__(
        self, url: str, most_connections: int = 16, wait_s: float = _WAIT_SECONDS,
        reader: Callable[[], Reader | None] = lambda: None,
    ) -> None:  # fmt: skip
        """Prepare the pool; `open` connects.

        Args:
            url: address of the database.
            most_connections: most connections of the pool, at least 1; one is always open.
            wait_s: longest wait in seconds for a connection, a lock or a restarting server.
            reader: returns the caller of the present thread, or None. Its reads are cancelled once
                nobody waits for them, and readers of one name get at most half of the connections.

        Raises:
            ValueError: `most_connections` is below 1.
            ConfigurationError: the address is not valid, or leads to another machine without TLS.
        """
        check_url(url)
        self.url = url = with_timeout(url, _WAIT_SECONDS)
        self._pool = ConnectionPool(
            url, min_size=1, max_size=most_connections, open=False, timeout=wait_s,
            configure=self._configure_connection,
            kwargs={"autocommit": True, "application_name": "nobackfill"}, reconnect_timeout=0,
        )  # fmt: skip
        self._wait_s = wait_s
        self._refusal: str | None = None
        # The backend, one of HOLDERS, that holds the lock for this gateway.
        self.leader_pid: int | None = None
        self._own = _Own()
        self._reader = reader
        self._reads = _Reads(max(1, most_connections // 2))

    def open(self, prepare: Callable[[Connection], None]) -> None:
        """Open the pool; call it once, before the first read or write.

        The first connection must be made within 5 s, and the pool's own within `wait_s`. After an
        error of PostgreSQL everything is closed again.

        Args:
            prepare: creates what the database lacks; called with a connection outside the pool.

        Raises:
            UnavailableError: the database does not answer, or refuses the connection.
            ConfigurationError: the connection is not encrypted although the database is on another
                machine, or the database refuses a statement of `prepare`.
            NobackfillError: as `prepare`.
            OverloadedError: the pool's first connection was not ready in time.
            BusyError, CannotWriteError, DamagedError: a statement of `prepare` takes too long or
                collides, cannot write, or meets damage.
            psycopg.Error: any other error of a statement of `prepare`.
        """
        try:
            # A connection outside the pool, whose errors say more than a timeout.
            with self.connect() as connection:
                if not (is_local(connection.info.host) or connection.pgconn.ssl_in_use):
                    raise tls_required()
                prepare(connection)
            self._pool.open(wait=True, timeout=self._wait_s)
        except (psycopg.Error, PoolTimeout) as error:
            self.close()
            raise translate_error(error) or error from error

    def close(self) -> None:
        """Close all connections; a second call does nothing.

        A connection in use is closed when its read or write ends. Later reads and writes raise
        UnavailableError. A closed pool cannot be opened again.
        """
        self._reads.close()
        self._pool.close()

    def refuse_writes(self, reason: str) -> None:
        """Refuse every later write with BusyError; reads go on.

        A transaction under way is not ended. A second call replaces the text. There is no way back.

        Args:
            reason: text of the error.
        """
        self._refusal = reason

    def connect(self) -> Connection:
        """Open a connection outside the pool, which the caller closes; it commits each statement.

        It does not count in the pool, and has none of the pool's settings, such as time limits. It
        waits up to 5 s, or as long as the address says.

        Raises:
            UnavailableError: the database does not answer, or refuses the connection: a wrong user,
                password or name, or no connection left. Only the message tells them apart.
            psycopg.ProgrammingError: the address has a connect_timeout that is no number.
        """
        try:
            return psycopg.connect(self.url, autocommit=True)
        except psycopg.Error as error:
            raise translate_error(error) or error from error

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """Open a connection outside the pool that sees one state of the database during a block.

        Rows that are deleted meanwhile are not vacuumed before the block ends.

        It may last for hours: it has no limit for idle time, but each statement may take only 60 s.

        Yields:
            The connection, with vectors as bytes. It is closed at the end; its writes are committed
            without protection from a break. An error of the block undoes them.

        Raises:
            UnavailableError: the database does not answer, or refuses the connection.
            BusyError: a statement or lock takes too long.
            GalleryDeletedError: a table of the block's statements is missing.
            ConfigurationError, DamagedError: the database refuses a statement, or is damaged.
            CannotWriteError: the block writes, and the database cannot.
            psycopg.Error: any other error of a statement, a defect of this program.
        """
        with closing(self.connect()) as connection:
            try:
                self._configure_connection(connection)
                execute(connection, "SET idle_in_transaction_session_timeout = 0")
                execute(connection, "SET default_transaction_isolation = 'repeatable read'")
                with connection.transaction():
                    yield connection
            except psycopg.Error as error:
                raise translate_error(error) or error from error

    def read(self, work: Callable[[Connection], Result], *, snapshot: bool = False) -> Result:
        """Run a read, again on another connection if one breaks.

        Within `transact` of the same thread it runs in that transaction, and is neither repeated
        nor cancelled. Within the work of a `write` alone it takes another connection, which does
        not see the changes. Otherwise it is tried up to 8 times within about 5 s. If the thread's
        Reader has gone, the server cancels the statement. A Reader's reads use at most half of the
        pool; the next one waits for a place.

        Args:
            work: the read; it may be called more than once.
            snapshot: run all its statements in one read-only snapshot.

        Returns:
            The result of `work`.

        Raises:
            DeadlineError: the caller's time is over.
            CancelledError: the caller has cancelled the call.
            UnavailableError: the database does not answer, refuses the connection, or has no memory
                left.
            OverloadedError: no connection of the pool was free for some seconds.
            BusyError: a statement took longer than 60 s, or waited too long for a lock.
            GalleryDeletedError: the gallery, or one of its tables, was deleted.
            ConfigurationError: the database refuses the statement, as without rights.
            DamagedError: a table or index is damaged.
            psycopg.Error: any other error, a defect of this program.
            NobackfillError: as `work`.
        """
        if self._own.connection is not None:
            return work(self._own.connection)
        reader = self._reader()

        def reading(connection: Connection) -> Result:
            with self._reads.cancellable(connection, reader):
                if not snapshot:
                    return work(connection)
                with connection.transaction():
                    isolation = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"
                    execute(connection, isolation)
                    return work(connection)

        if self._own.reading:
            # A nested read has its place already: readers that waited for a second one could wait
            # for each other.
            return self._retry_on_lost_connection(reading)
        with self._reads.limited(reader):
            self._own.reading = True
            try:
                return self._retry_on_lost_connection(reading)
            finally:
                self._own.reading = False

    def fetch(
        self, statement: str, values: Sequence[Any] = (), *, plans_for_values: bool = False
    ) -> list[Any]:
        """Return the rows of one statement; see `execute` for its arguments.

        Raises:
            NobackfillError, psycopg.Error: as `read`.
        """
        return self.read(
            lambda connection: execute(
                connection, statement, values, plans_for_values=plans_for_values
            ).fetchall()
        )

    def write(self, work: Callable[[Connection], Result]) -> Result:
        """Run a transaction that happens once, durably.

        It runs again if it collides with another transaction, or its connection breaks before the
        commit. If the connection breaks during the commit, the server is asked for the outcome.

        Within `transact` of the same thread it becomes a part of that transaction, which alone
        repeats and commits. Within the work of another `write` it is a transaction of its own.
        Otherwise there are up to 8 tries after collisions, with short random pauses. After a break
        in the commit it asks for up to 5 s.

        Args:
            work: the transaction; it may be called more than once.

        Returns:
            The result of `work`.

        Raises:
            BusyError: it collided too often, waited too long for a lock, or writes are refused.
            OverloadedError: no connection of the pool was free for some seconds.
            UnavailableError: the database does not answer, or the outcome is unknown.
            CannotWriteError: the database cannot write, or is read-only.
            GalleryDeletedError: the gallery was deleted.
            NobackfillError: as `work`; then nothing has changed.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
            psycopg.Error: any other error, a defect of this program; nothing has changed.
        """
        if self._own.connection is not None:
            return work(self._own.connection)
        if self._refusal is not None:
            raise BusyError(self._refusal)
        for attempt in range(_MAX_TRIES):
            try:
                return self._retry_on_lost_connection(
                    lambda connection: self._commit_work(connection, work)
                )
            except _CollisionError as error:
                if attempt + 1 == _MAX_TRIES:
                    raise BusyError(
                        f"other calls change the same items: {_MAX_TRIES} tries of this "
                        "transaction collided with theirs; try again in a few seconds"
                    ) from error
                time.sleep(random.uniform(0, 0.01 * 2**attempt))  # noqa: S311 - no secret
        raise AssertionError("unreachable: the loop returns or raises")

    def run_outside_transaction(self, work: Callable[[Connection], object]) -> None:
        """Run work that begins and ends its own transactions, on one connection; again if that
        breaks.

        It does nothing within `transact`.

        Transactions that `work` has committed before an error stay. Collisions are not repeated.

        Args:
            work: the work; called again from its beginning if a connection breaks.

        Raises:
            BusyError: writes are refused, a lock was held for too long, or the work collided.
            NobackfillError: as `work`.
            OverloadedError: no connection of the pool was free for some seconds.
            UnavailableError: the database does not answer.
            CannotWriteError: the database cannot write, or is read-only.
            GalleryDeletedError: a table of the gallery is missing.
            ConfigurationError, DamagedError: the database refuses a statement, or is damaged.
            psycopg.Error: any other error, a defect of this program.
        """
        if self._own.connection is None:
            if self._refusal is not None:
                raise BusyError(self._refusal)
            self._retry_on_lost_connection(work)

    def transact(self, work: Callable[[], Result]) -> Result:
        """Run all reads and writes of `work`, in this thread, as one transaction.

        Work that other threads do meanwhile is not part of it. Functions for `after_commit` run
        after the commit, in order, in this thread; the first error of one is raised, and later ones
        do not run. Within another `transact` of this thread, `work` joins that transaction.

        Args:
            work: the work; it may be called more than once, as in `write`.

        Returns:
            The result of `work`.

        Raises:
            UnavailableError: the database does not answer, or the outcome of the commit is unknown:
                it may have happened, but no function for `after_commit` was called.
            NobackfillError: as `write` and `work`; then nothing has changed, unless a function for
                `after_commit` raises it.
        """

        if self._own.connection is not None:
            return work()

        def body(connection: Connection) -> Result:
            self._own.connection, self._own.endings = connection, []
            try:
                return work()
            finally:
                self._own.connection = None

        result = self.write(body)
        for ending in self._own.endings:
            ending()
        return result

    def after_commit(self, ending: Callable[[], None]) -> None:
        """Run a function once the thread's writes are durable: now, or at the end of `transact`.

        If the transaction fails, the function is not called. Within `write` without `transact` it
        runs at once, before the commit. Its own error passes through.
        """
        if self._own.connection is None:
            ending()
        else:
            self._own.endings.append(ending)

    def _commit_work(self, connection: Connection, work: Callable[[Connection], Result]) -> Result:
        execute(connection, "BEGIN")
        try:
            result = work(connection)
            signature = mark_transaction(connection, self._own.mark)
        except COLLISIONS as error:
            execute(connection, "ROLLBACK")
            raise _CollisionError from error
        except BaseException:
            if connection.closed:
                # The server may still hold the row of the previous mark.
                self._own.mark = None
            else:
                with suppress(psycopg.Error):
                    execute(connection, "ROLLBACK")
            raise
        try:
            execute(connection, "COMMIT")
        except COLLISIONS as error:
            raise _CollisionError from error
        except psycopg.Error as error:
            if not is_connection_lost(error):
                raise
            self._own.mark = None
            if signature is not None and not self._was_committed(signature):
                raise
        if signature is not None:
            self._own.mark = signature.mark
        return result

    def _was_committed(self, signature: TransactionMark) -> bool:
        """Tell whether a transaction was committed although its connection broke.

        Raises:
            UnavailableError: the outcome is unknown.
        """
        end = time.monotonic() + self._wait_s
        while time.monotonic() < end:
            with suppress(psycopg.Error, UnavailableError), self.connect() as connection:
                outcome = is_committed(connection, signature)
                if outcome is not None:
                    return outcome
            time.sleep(0.05)
        raise UnavailableError(
            "the database closed the connection during a commit, and it is unknown whether the "
            "change was made; repeat the call, which is safe"
        )

    def _retry_on_lost_connection(self, work: Callable[[Connection], Result]) -> Result:
        end = time.monotonic() + self._wait_s
        for attempt in count(1):
            try:
                # The pool's own context manager would end a transaction; here each one ends its
                # own.
                connection = self._pool.getconn()
                try:
                    return work(connection)
                finally:
                    self._pool.putconn(connection)
            except _CollisionError:
                raise
            except PoolTimeout as error:
                # All are in use, or none could be made: the server's own error says which.
                self.connect().close()
                raise translate_error(error) or error from error
            except Exception as error:
                if not is_connection_lost(error) or attempt == _MAX_TRIES:
                    raise translate_error(error) or error from error
                self._wait_for_server(end)
                # The other connections of the pool broke, too.
                self._pool.check()
        raise AssertionError("unreachable: the loop returns or raises")

    def _configure_connection(self, connection: Connection) -> None:
        for name, value in (
            ("lock_timeout", f"{int(1000 * self._wait_s)}"),
            ("statement_timeout", f"{_STATEMENT_SECONDS}s"),
            ("idle_in_transaction_session_timeout", f"{_STATEMENT_SECONDS}s"),
            # The server ends statements of a gateway that is gone.
            ("client_connection_check_interval", "1s"),
            # The scan goes on if a filter or deletions leave too few candidates.
            ("hnsw.iterative_scan", "relaxed_order"), ("hnsw.ef_search", str(EF)),
            ("search_path", "public"),
        ):  # fmt: skip
            execute(connection, "SELECT set_config(%s, %s, false)", [name, value])
        # The search path that was set finds it, whatever the role's own path is.
        register_vector(connection)
        # As bytes, which many rows turn into one array (bulk.from_binary).
        vector = TypeInfo.fetch(connection, "vector")
        assert vector is not None, "register_vector found it"
        connection.adapters.register_loader(vector.oid, ByteaBinaryLoader)

    def _wait_for_server(self, end: float) -> None:
        """Wait until the server accepts connections, at most until `end` on the monotonic clock.

        Raises:
            UnavailableError: it did not accept one.
        """
        while True:
            try:
                self.connect().close()
                return
            except UnavailableError:
                if time.monotonic() >= end:
                    raise
                time.sleep(0.05)


@dataclass(eq=False)
class _PendingRead:
    """Hold a statement that a caller waits for; `lock` is held while it is cancelled or ends."""

    connection: Connection
    reader: Reader
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_ended: bool = False
    is_cancelled: bool = False


class _Reads:
    """Limit and cancel the reads that run."""

    def __init__(self, most: int) -> None:
        """Start without reads.

        Args:
            most: most reads of one reader at once.
        """
        self._limit = most
        self._changed = threading.Condition()
        self._counts: Counter[str] = Counter()
        self._pending: set[_PendingRead] = set()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def close(self) -> None:
        """Stop the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @contextmanager
    def limited(self, reader: Reader | None) -> Iterator[None]:
        """Wait for a place of a reader, and hold it during a block.

        Raises:
            DeadlineError: the reader's time is over.
            CancelledError: the reader has cancelled the call.
        """
        if reader is None:
            yield
            return
        with self._changed:
            while self._counts[reader.name] >= self._limit:
                reader.check()
                self._changed.wait(_POLL_SECONDS)
            self._counts[reader.name] += 1
        try:
            yield
        finally:
            with self._changed:
                self._counts[reader.name] -= 1
                self._changed.notify_all()

    @contextmanager
    def cancellable(self, connection: Connection, reader: Reader | None) -> Iterator[None]:
        """Cancel the statements of a block once nobody waits for them."""
        if reader is None:
            yield
            return
        read = _PendingRead(connection, reader)
        with self._changed:
            self._pending.add(read)
            if self._thread is None:
                thread = threading.Thread(target=self._watch, name="reads", daemon=True)
                # If the system has no thread left, the next read tries again.
                with suppress(RuntimeError):
                    thread.start()
                    self._thread = thread
        try:
            yield
        except psycopg.Error:
            if read.is_cancelled:
                reader.check()
            raise
        finally:
            with self._changed:
                self._pending.discard(read)
            with read.lock:
                read.is_ended = True
            if read.is_cancelled:
                # Closed, because a late cancellation would hit the next statement.
                connection.close()

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, _POLL_SECONDS)
                if self._is_closed:
                    return
                under_way = list(self._pending)
            for read in under_way:
                try:
                    read.reader.check()
                except NobackfillError:
                    self._cancel(read)

    def _cancel(self, read: _PendingRead) -> None:
        with read.lock, suppress(psycopg.Error):
            if not read.is_ended and not read.is_cancelled:
                read.is_cancelled = True
                read.connection.cancel_safe(timeout=_WAIT_SECONDS)


class _Own(threading.local):
    """Hold a thread's transaction within `transact`, its functions after the commit, and its last
    mark.
    """

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.mark: UUID | None = None
        self.reading = False
        self.endings: list[Callable[[], None]] = []


class _CollisionError(Exception):
    """The transaction was rolled back because of another one."""
