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
from uuid import UUID

import psycopg
from pgvector.psycopg import register_vector
from psycopg.types import TypeInfo
from psycopg.types.string import ByteaBinaryLoader
from psycopg_pool import ConnectionPool, PoolTimeout

from nobackfill.errors import BusyError, NobackfillError, UnavailableError
from nobackfill.server.stores.postgresql.address import bounded, check_url, in_the_clear, is_local
from nobackfill.server.stores.postgresql.commits import Signature, committed, sign
from nobackfill.server.stores.postgresql.failures import COLLISIONS, lost, refusal

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

    def together(self, work: Callable[[], Result]) -> Result:
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
