"""Connections to PostgreSQL: a pool, reads that are asked again when one breaks, and transactions
that have happened once, whatever breaks.

Locks are taken in one order, so that no two transactions wait for each other: the gallery's gate (a
table lock, first come, first served: puts share it, a change of spaces has it alone), then rows of
`items` by rising label, then new ids in order, then rows of vectors.
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
from nobackfill.server.state import GoneError

# Addresses of databases: what is taken, and what may not travel in the clear.

_ENCRYPTED = ("require", "verify-ca", "verify-full")


def check_url(url: str, setting: str = "store") -> None:
    """Raises ConfigurationError for what is no address, or one over the network in the clear. The
    sentence names the setting and does not repeat the address: it may hold a password."""
    try:
        given = conninfo_to_dict(url)
    except (psycopg.Error, UnicodeEncodeError) as error:
        raise ConfigurationError(
            f"{setting}: expected postgresql://USER@HOST/DATABASE?sslmode=verify-full, or a "
            "socket's folder as host"
        ) from error
    hosts = [*str(given.get("host") or "").split(","), str(given.get("hostaddr") or "")]
    if not all(map(is_local, hosts)) and given.get("sslmode") not in _ENCRYPTED:
        raise in_the_clear(setting)


def bounded(url: str, seconds: float) -> str:
    """A server that does not take a connection in some seconds is away."""
    return make_conninfo(url, **({"connect_timeout": int(seconds)} | conninfo_to_dict(url)))


def is_local(host: str) -> bool:
    """Whether a host, or a socket's folder, is on this machine."""
    return not host or is_loopback(host) or host.startswith(("/", "@"))


def in_the_clear(setting: str = "store") -> ConfigurationError:
    """What is said of an address on another machine without TLS."""
    return ConfigurationError(
        f"{setting}: a database on another machine demands TLS; add sslmode=verify-full (and "
        "sslrootcert) to its address"
    )


# What an error of PostgreSQL means to who asked.

# The transaction was rolled back because of another; the same again may go through.
COLLISIONS = (pg.DeadlockDetected, pg.SerializationFailure, pg.UniqueViolation)
# The server ends, or has just started.
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


def lost(error: Exception) -> bool:
    """Whether the connection is gone, or the server ends it: another one may be had soon."""
    if isinstance(error, _ENDING):
        return True
    # Errors without a code come from the connection, not from the server.
    return isinstance(error, psycopg.OperationalError) and error.sqlstate is None


def refusal(error: Exception) -> NobackfillError | None:
    """What an error means; None where it is a mistake of ours. Sentences hold neither a password
    nor a value: PostgreSQL tells those in the details of an error."""
    if isinstance(error, PoolTimeout | TooManyRequests):
        return OverloadedError(
            "every connection to the database is in use, or none could be made; try again with a "
            "delay, and see that PostgreSQL answers"
        )
    if not isinstance(error, psycopg.Error):
        return None
    said = error.diag.message_primary or type(error).__name__
    if lost(error):
        # What the connection says of itself: where it leads, and why it failed.
        said = (str(error).splitlines() or [said])[0]
    kinds: tuple[tuple[tuple[type[Exception], ...], NobackfillError], ...] = (
        (
            (pg.ReadOnlySqlTransaction,),
            CannotWriteError(
                "the database is read-only, a standby perhaps; name the one that takes writes, or "
                "all of them as postgresql://USER@HOST1,HOST2/DATABASE?target_session_attrs="
                "read-write"
            ),
        ),
        (_BUSY, BusyError(f"the database is busy ({said}); try again")),
        (_UNWRITABLE, CannotWriteError(f"the database cannot write ({said}); free some space")),
        (_REFUSED, ConfigurationError(f"the database refuses: {said}; check user and rights")),
        (_GONE, GoneError("the gallery was closed or deleted")),
        (
            (pg.DataCorrupted, pg.IndexCorrupted),
            DamagedError("the database", said),
        ),
        (
            (pg.OutOfMemory, pg.InsufficientResources),
            UnavailableError(f"the database has no resources left ({said})"),
        ),
    )
    for classes, meant in kinds:
        if isinstance(error, classes):
            return meant
    if lost(error) or isinstance(error, psycopg.OperationalError):
        return UnavailableError(
            f"the database does not answer ({said}); try again with a delay, and see that its "
            "server runs and can be reached from here"
        )
    return None


# Whether a transaction was committed whose connection broke while it was.
#
# Its number alone does not tell: numbers of which a crash left nothing on the disk are given out
# again, and then the server speaks of another transaction. So each transaction that writes leaves a
# mark of its own, and takes away the one that its thread left before. (A row that each of them
# updates would gather versions while a backup holds a snapshot, and every write would go through
# them: three times as slow after 20,000.)

_Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]

TABLE = """
CREATE TABLE IF NOT EXISTS nobackfill.commits (
    mark uuid PRIMARY KEY, at timestamptz NOT NULL DEFAULT now()
)
"""
DROP = "DROP TABLE IF EXISTS nobackfill.commits"
# The number is read before the mark takes one: a transaction that wrote nothing leaves none.
_SIGN = b"""
WITH own AS MATERIALIZED (SELECT pg_current_xact_id_if_assigned() AS number),
former AS (DELETE FROM nobackfill.commits USING own WHERE mark = %s AND number IS NOT NULL),
signed AS (INSERT INTO nobackfill.commits (mark) SELECT %s FROM own WHERE number IS NOT NULL)
SELECT number::text FROM own
"""
_STATUS = b"SELECT pg_xact_status(%s::xid8)"
_FOUND = b"SELECT EXISTS (SELECT FROM nobackfill.commits WHERE mark = %s)"
# No transaction is asked for so long after its end.
_FORGET = b"DELETE FROM nobackfill.commits WHERE at < now() - interval '1 day'"


@dataclass(frozen=True)
class Signature:
    """A transaction by its number on a server that has not crashed since, and by its mark."""

    number: str
    mark: UUID


def sign(connection: _Connection, former: UUID | None) -> Signature | None:
    """The last statement of a transaction; None where it wrote nothing. `former`: the mark of one
    that is known to be committed, which goes."""
    mark = uuid4()
    row = connection.execute(_SIGN, [former, mark], binary=True).fetchone()
    assert row is not None, "a SELECT without a condition"
    return None if row[0] is None else Signature(row[0], mark)


def committed(connection: _Connection, signature: Signature) -> bool | None:
    """Whether it was, on a connection that commits each statement; None while it is under way."""
    try:
        row = connection.execute(_STATUS, [signature.number], binary=True).fetchone()
    except psycopg.errors.InvalidParameterValue:
        # "In the future": the server crashed before anything of it was on its disk.
        return False
    if row is not None and row[0] == "in progress":
        return None
    # Asked only now: what was under way when a statement began is not seen by it.
    found = connection.execute(_FOUND, [signature.mark]).fetchone()
    assert found is not None, "a SELECT without a condition"
    return bool(found[0])


def forget(connection: _Connection) -> None:
    """Drop the marks of threads that are gone."""
    connection.execute(_FORGET)


Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]
Result = TypeVar("Result")

# How long a call waits for a connection of the pool, for a lock, and for a server that is restarted
# while broken connections are replaced.
_WAIT_S = 5.0
_STATEMENT_S = 60
# How soon a statement ends that nobody waits for.
_LOOK_S = 0.1
# A transaction that met another, or a connection that breaks, is tried again so often.
_TRIES = 8
# Candidates of a graph that are looked at, unless a search asks for more.
EF = 100


def run(
    connection: Connection, statement: str, values: Sequence[Any] = (), *, filters: bool = False
) -> Any:
    """Execute a statement whose names were made by us; values are bound. One that `filters` is
    planned for its values each time: many are then compared by a table of hashes."""
    prepare = False if filters else None
    return connection.execute(statement.encode(), values or None, binary=True, prepare=prepare)


class Reader(Protocol):
    """The caller that waits for a read."""

    @property
    def name(self) -> str:
        """All that has one name is one reader; without a name nothing is bounded."""
        ...

    def check(self) -> None:
        """Raises DeadlineError or CancelledError once nobody waits any more."""
        ...


class Database:
    """One database, from many threads."""

    def __init__(
        self, url: str, most: int = 16, wait_s: float = _WAIT_S,
        reader: Callable[[], Reader | None] = lambda: None,
    ) -> None:  # fmt: skip
        """`most`: connections at once. `reader`: for whom the present thread reads: what nobody
        waits for is cancelled at the server, and one reader has half of the connections at most.
        Raises ConfigurationError."""
        check_url(url)
        self.url = url = bounded(url, _WAIT_S)
        self._pool = ConnectionPool(
            url, min_size=1, max_size=most, open=False, timeout=wait_s, configure=self._configure,
            kwargs={"autocommit": True, "application_name": "nobackfill"}, reconnect_timeout=0,
        )  # fmt: skip
        self._wait_s = wait_s
        self._refused: str | None = None
        # Of tenure.HOLDERS, the one that holds the lock for this gateway.
        self.holder: int | None = None
        self._own = _Own()
        self._reader = reader
        self._reads = _Reads(max(1, most // 2))

    def open(self, prepare: Callable[[Connection], None]) -> None:
        """`prepare` makes what is missing in the database. Raises UnavailableError,
        ConfigurationError where no connection can be made, and what `prepare` raises."""
        try:
            # Not of the pool, which would tell only that time has passed.
            with self.connect() as connection:
                if not (is_local(connection.info.host) or connection.pgconn.ssl_in_use):
                    raise in_the_clear()
                prepare(connection)
            self._pool.open(wait=True, timeout=self._wait_s)
        except (psycopg.Error, PoolTimeout) as error:
            self.close()
            raise refusal(error) or error from error

    def close(self) -> None:
        """End every connection; twice is harmless."""
        self._reads.close()
        self._pool.close()

    def refuse_writes(self, why: str) -> None:
        """From now on, with BusyError."""
        self._refused = why

    def connect(self) -> Connection:
        """A connection beside the pool, which the caller closes. Raises UnavailableError."""
        try:
            return psycopg.connect(self.url, autocommit=True)
        except psycopg.Error as error:
            raise refusal(error) or error from error

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """A connection beside the pool that sees one state of the database, however long the block
        takes; what is deleted meanwhile is not vacuumed before it ends. Raises UnavailableError."""
        with closing(self.connect()) as connection:
            try:
                self._configure(connection)
                run(connection, "SET idle_in_transaction_session_timeout = 0")
                run(connection, "SET default_transaction_isolation = 'repeatable read'")
                with connection.transaction():
                    yield connection
            except psycopg.Error as error:
                raise refusal(error) or error from error

    def read(self, work: Callable[[Connection], Result], *, snapshot: bool = False) -> Result:
        """What `work` reads, in one snapshot if it has several statements. It is called again on
        another connection where one breaks. Raises DeadlineError and CancelledError where nobody
        waits for it any more."""
        if self._own.connection is not None:
            return work(self._own.connection)
        reader = self._reader()

        def reading(connection: Connection) -> Result:
            with self._reads.watched(connection, reader):
                if not snapshot:
                    return work(connection)
                with connection.transaction():
                    run(connection, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
                    return work(connection)

        if self._own.reading:
            # Its place is taken; waiting for a second one, readers could wait for each other.
            return self._persistent(reading)
        with self._reads.counted(reader):
            self._own.reading = True
            try:
                return self._persistent(reading)
            finally:
                self._own.reading = False

    def write(self, work: Callable[[Connection], Result]) -> Result:
        """The result of `work` in a transaction that is durable and has happened once.

        `work` is called again where it met another transaction or the connection broke before it
        was committed; where it broke after, the server is asked what became of it. Raises
        UnavailableError where that cannot be found out.
        """
        if self._own.connection is not None:
            return work(self._own.connection)
        if self._refused is not None:
            raise BusyError(self._refused)
        for attempt in range(_TRIES):
            try:
                return self._persistent(lambda connection: self._commit(connection, work))
            except _MetAnotherError as error:
                if attempt + 1 == _TRIES:
                    raise BusyError("others change the same items; try again") from error
                time.sleep(random.uniform(0, 0.01 * 2**attempt))  # noqa: S311 - no secret
        raise AssertionError("returned or raised")

    def apart(self, work: Callable[[Connection], object]) -> None:
        """Transactions that `work` begins and ends itself, all of one connection; it is called
        again on another where one breaks. Not within `together`: nothing is done there. Raises as
        `write`."""
        if self._own.connection is None:
            if self._refused is not None:
                raise BusyError(self._refused)
            self._persistent(work)

    def transact(self, work: Callable[[], Result]) -> Result:
        """All that `work` writes and reads through this database, in this thread, as one
        transaction; it is called again as `write` says. Raises as `write`."""

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
        """Do this once what this thread writes is durable: now, or at the end of `together`."""
        if self._own.connection is None:
            ending()
        else:
            self._own.endings.append(ending)

    def _commit(self, connection: Connection, work: Callable[[Connection], Result]) -> Result:
        run(connection, "BEGIN")
        try:
            result = work(connection)
            signature = sign(connection, self._own.mark)
        except COLLISIONS as error:
            run(connection, "ROLLBACK")
            raise _MetAnotherError from error
        except BaseException:
            if connection.closed:
                # The server may hold the row of the mark before for a while.
                self._own.mark = None
            else:
                with suppress(psycopg.Error):
                    run(connection, "ROLLBACK")
            raise
        try:
            run(connection, "COMMIT")
        except COLLISIONS as error:
            raise _MetAnotherError from error
        except psycopg.Error as error:
            if not lost(error):
                raise
            self._own.mark = None
            if signature is not None and not self._happened(signature):
                raise
        if signature is not None:
            self._own.mark = signature.mark
        return result

    def _happened(self, signature: Signature) -> bool:
        """Whether a transaction was committed whose connection broke. Raises UnavailableError."""
        end = time.monotonic() + self._wait_s
        while time.monotonic() < end:
            with suppress(psycopg.Error, UnavailableError), self.connect() as connection:
                found = committed(connection, signature)
                if found is not None:
                    return found
            time.sleep(0.05)
        raise UnavailableError(
            "the database ended the connection while it was told to keep this; whether it did is "
            "not known, and doing it again is right"
        )

    def _persistent(self, work: Callable[[Connection], Result]) -> Result:
        end = time.monotonic() + self._wait_s
        for attempt in count(1):
            try:
                # The pool's own context would end a transaction; each ends its own here.
                connection = self._pool.getconn()
                try:
                    return work(connection)
                finally:
                    self._pool.putconn(connection)
            except _MetAnotherError:
                raise
            except PoolTimeout as error:
                # Nobody gave one back, or none could be made: the server says which.
                self.connect().close()
                raise refusal(error) or error from error
            except Exception as error:
                if not lost(error) or attempt == _TRIES:
                    raise refusal(error) or error from error
                self._wait_for_server(end)
                # What else lies in the pool broke with it.
                self._pool.check()
        raise AssertionError("returned or raised")

    def _configure(self, connection: Connection) -> None:
        for name, value in (
            ("lock_timeout", f"{int(1000 * self._wait_s)}"),
            ("statement_timeout", f"{_STATEMENT_S}s"),
            ("idle_in_transaction_session_timeout", f"{_STATEMENT_S}s"),
            # A gateway that is gone waits for nothing.
            ("client_connection_check_interval", "1s"),
            # What a filter or a deletion leaves out of a graph's answer is looked for further on.
            ("hnsw.iterative_scan", "relaxed_order"), ("hnsw.ef_search", str(EF)),
            ("search_path", "public"),
        ):  # fmt: skip
            run(connection, "SELECT set_config(%s, %s, false)", [name, value])
        # Found by the path that was set, not by the role's own.
        register_vector(connection)
        # As bytes: many of them become one array (bulk.from_binary).
        vector = TypeInfo.fetch(connection, "vector")
        assert vector is not None, "register_vector looked for it"
        connection.adapters.register_loader(vector.oid, ByteaBinaryLoader)

    def _wait_for_server(self, end: float) -> None:
        """Until it takes connections. Raises UnavailableError when it does not before `end`."""
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
    """A statement that somebody waits for; `lock` is held while it is cancelled or ends."""

    connection: Connection
    reader: Reader
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: bool = False
    cancelled: bool = False


class _Reads:
    """The reads under way."""

    def __init__(self, most: int) -> None:
        """`most`: of one reader at once."""
        self._most = most
        self._changed = threading.Condition()
        self._counts: Counter[str] = Counter()
        self._under_way: set[_PendingRead] = set()
        self._closed = False
        self._thread: threading.Thread | None = None

    def close(self) -> None:
        """Watch no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @contextmanager
    def counted(self, reader: Reader | None) -> Iterator[None]:
        """Wait for a place. Raises DeadlineError, CancelledError."""
        if reader is None or not reader.name:
            yield
            return
        with self._changed:
            while self._counts[reader.name] >= self._most:
                reader.check()
                self._changed.wait(_LOOK_S)
            self._counts[reader.name] += 1
        try:
            yield
        finally:
            with self._changed:
                self._counts[reader.name] -= 1
                self._changed.notify_all()

    @contextmanager
    def watched(self, connection: Connection, reader: Reader | None) -> Iterator[None]:
        """Cancel what runs in the block once nobody waits for it."""
        if reader is None:
            yield
            return
        read = _PendingRead(connection, reader)
        with self._changed:
            self._under_way.add(read)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="reads", daemon=True)
                self._thread.start()
        try:
            yield
        except psycopg.Error:
            if read.cancelled:
                reader.check()
            raise
        finally:
            with self._changed:
                self._under_way.discard(read)
            with read.lock:
                read.ended = True
            if read.cancelled:
                # Nothing else shall meet a cancellation that comes late.
                connection.close()

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed, _LOOK_S)
                if self._closed:
                    return
                under_way = list(self._under_way)
            for read in under_way:
                try:
                    read.reader.check()
                except NobackfillError:
                    self._cancel(read)

    def _cancel(self, read: _PendingRead) -> None:
        with read.lock, suppress(psycopg.Error):
            if not read.ended and not read.cancelled:
                read.cancelled = True
                read.connection.cancel_safe(timeout=_WAIT_S)


class _Own(threading.local):
    """The transaction of a thread that is in `together`, and what is done after its commit; the
    mark that its last transaction left; whether it is in `read`."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.mark: UUID | None = None
        self.reading = False
        self.endings: list[Callable[[], None]] = []


class _MetAnotherError(Exception):
    """Rolled back because of another transaction."""
