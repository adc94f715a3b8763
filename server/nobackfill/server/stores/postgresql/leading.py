"""The lead of an activation: an advisory lock of a connection held for it, and a term.

The lock ends with its gateway, so that another can take over at once. The term is in the row of the
state: each lead has its own, and a transaction of a lead that is over is rolled back, however late
it comes.
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
    MOST_DEEDS,
    Deed,
    GatewayState,
    Lead,
    LeadLostError,
    State,
    read_state,
)
from nobackfill.server.stores.postgresql.database import Connection, Database, refusal, run

_LEAD = "SELECT pg_try_advisory_lock(hashtext('nobackfill.lead'))"
_RELEASES = "SELECT pg_advisory_lock(hashtext('nobackfill.releases'))"
# A machine that is gone is noticed after so many seconds.
_ALIVE = (
    "SELECT set_config(name, value, false) FROM (VALUES ('tcp_keepalives_idle', '5'),"
    " ('tcp_keepalives_interval', '2'), ('tcp_keepalives_count', '3')) AS s (name, value)"
)
_NEW_TERM = "UPDATE nobackfill.gateway SET term = term + 1 RETURNING term"


class DatabaseLead(Lead):
    """What is said of each method: Lead."""

    def __init__(self, database: Database, connection: Connection, term: int) -> None:
        self._database = database
        self._connection: Connection | None = connection
        self._closed = False
        self._lock = threading.Lock()
        self.term = term

    def lost(self) -> bool:
        with self._lock:
            if self._closed:
                return False
            try:
                if self._connection is None:
                    self._connection = _locked(self._database)
                return self._connection is None or _term(self._connection) != self.term
            except psycopg.Error:
                # The lock went with the connection: it is taken again at the next look.
                self._connection = None
            except UnavailableError:
                # Nobody else can have taken it from a database that is away.
                pass
            return False

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._connection is not None:
                self._connection.close()


def take_lead(database: Database) -> DatabaseLead | None:
    """None where another has it. Raises UnavailableError."""
    connection = _locked(database)
    if connection is None:
        return None
    try:
        return DatabaseLead(database, connection, new_term(database))
    except BaseException:
        connection.close()
        raise


def new_term(database: Database) -> int:
    """From here on nobody leads who led before."""
    return int(database.write(lambda connection: run(connection, _NEW_TERM).fetchone()[0]))


def fence(database: Database, term: int) -> None:
    """At the end of a transaction of the lead. Raises LeadLostError where that is over; while the
    transaction lasts it is not."""
    query = "SELECT term FROM nobackfill.gateway FOR UPDATE"
    if database.read(lambda connection: run(connection, query).fetchone()[0]) != term:
        raise LeadLostError("another gateway leads the activation now")


@contextmanager
def releases_held(database: Database, seconds: float) -> Iterator[None]:
    """No other gateway begins, undoes or retires a release meanwhile, nor makes a gallery. Raises
    BusyError after a while, UnavailableError."""
    with database.connect() as connection:
        run(connection, "SELECT set_config('lock_timeout', %s, false)", [f"{int(1000 * seconds)}"])
        try:
            run(connection, _RELEASES)
        except pg.LockNotAvailable as error:
            raise BusyError(
                "another gateway begins, rolls back or retires a release; try again with a delay"
            ) from error
        yield


def _locked(database: Database) -> Connection | None:
    connection = database.connect()
    try:
        run(connection, _ALIVE)
        if run(connection, _LEAD).fetchone()[0]:
            return connection
    except psycopg.Error as error:
        connection.close()
        raise refusal(error) or error from error
    connection.close()
    return None


def _term(connection: Connection) -> int:
    return int(run(connection, "SELECT term FROM nobackfill.gateway").fetchone()[0])


# Who has a database: gateways that serve from it share an advisory lock, each by a connection held
# for it; who moves galleries there or away has it alone.
#
# A server that is restarted lets go of the lock; it is taken again within a second. Should somebody
# have been quicker who wants it alone, this one refuses to write from then on.

log = structlog.get_logger("server.stores")

_EVERY_S = 0.5
_LOCK = "SELECT pg_try_advisory_lock{}(hashtext('nobackfill.gateway'))"
# The server's processes that hold it, each for a gateway.
HOLDERS = (
    "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    " AND (classid::bigint << 32 | objid::bigint) = hashtext('nobackfill.gateway')"
)


class Tenure:
    """Held from the constructor to `close`."""

    def __init__(self, database: Database, *, alone: bool) -> None:
        """Raises BusyError where another has it who does not share it, UnavailableError."""
        self._database = database
        self._lock = _LOCK.format("" if alone else "_shared")
        self._stopping = threading.Event()
        connection = self._locked()
        if connection is None:
            raise BusyError(
                "another gateway serves from this database; stop it, or give another database"
                if alone
                else "galleries are being moved to or from this database, or a gateway of an older "
                "version serves from it; start when that has ended"
            )
        self._thread = threading.Thread(
            target=self._watch, args=(connection,), name="tenure", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Let others take over."""
        self._stopping.set()
        self._thread.join()

    def _watch(self, connection: Connection) -> None:
        held: Connection | None = connection
        while not self._stopping.wait(_EVERY_S):
            try:
                if held is not None:
                    run(held, "SELECT 1")
                    continue
                held = self._locked()
                if held is None:
                    log.error("somebody else has the database now; this gateway must end")
                    self._database.refuse_writes("another has this database for itself")
                    return
            except psycopg.Error:
                held = None
            except NobackfillError as error:
                log.warning("the database does not answer", error=str(error))
        if held is not None:
            held.close()

    def _locked(self) -> Connection | None:
        connection = self._database.connect()
        if run(connection, self._lock).fetchone()[0]:
            (self._database.holder,) = run(connection, "SELECT pg_backend_pid()").fetchone()
            return connection
        connection.close()
        return None


# News: a notification with each commit that other gateways have to follow. One may be lost, so
# whoever waits for them looks by itself, too.

_CHANNEL = "nobackfill"


def tell(connection: Connection) -> None:
    """With the commit of this transaction."""
    run(connection, f"SELECT pg_notify('{_CHANNEL}', '')")


def gallery_changed(connection: Connection, number: int) -> None:
    """The spaces or the state of a gallery: plans that were made before are outdated."""
    run(
        connection,
        "UPDATE nobackfill.galleries SET epoch = epoch + 1 WHERE number = %s",
        [number],
    )
    tell(connection)


class News:
    """What other gateways, and this one, have committed: from the constructor to `close`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: Connection | None = None

    def wait(self, seconds: float) -> None:
        """Until there is some, or `seconds` are over. Raises UnavailableError."""
        try:
            if self._connection is None:
                self._connection = self._database.connect()
                run(self._connection, f"LISTEN {_CHANNEL}")
                # What came before is looked for at once.
                return
            for _ in self._connection.notifies(timeout=seconds, stop_after=1):
                pass
        except psycopg.Error as error:
            self.close()
            raise UnavailableError("the database does not answer") from error

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


# What gateways remember, in one row of the database, which any of them may change.

Result = TypeVar("Result")


# The version that wrote the row: no key of its value can say it, as older versions refuse keys that
# they do not know.
_WRITER = "(SELECT written_by FROM nobackfill.format)"


class StateRow(GatewayState):
    """What is said of each method: GatewayState. The row's epoch grows with each change."""

    shared = True

    def __init__(self, database: Database) -> None:
        """Raises VerificationError for a damaged row, UnavailableError."""
        self._database = database
        self._seeing = threading.Lock()
        self._epoch = -1
        query = f"SELECT epoch, value, {_WRITER} FROM nobackfill.gateway"
        epoch, value, writer = database.read(lambda c: run(c, query).fetchone())
        super().__init__(_state(value, writer))
        self._epoch = epoch

    def look(self) -> Mapping[str, tuple[int, int]]:
        query = (
            f"SELECT epoch, value, {_WRITER},"
            " (SELECT coalesce(jsonb_object_agg(name, jsonb_build_array(number, epoch)), '{}')"
            " FROM nobackfill.galleries) FROM nobackfill.gateway"
        )
        epoch, value, writer, marks = self._database.read(lambda c: run(c, query).fetchone())
        self._see(epoch, _state(value, writer))
        return {name: (number, mark) for name, (number, mark) in marks.items()}

    def revise(self, values_of: Callable[[State], Mapping[str, object]]) -> State:
        def work(connection: Connection) -> tuple[int, State]:
            query = f"SELECT epoch, value, {_WRITER} FROM nobackfill.gateway FOR UPDATE"
            epoch, value, writer = run(connection, query).fetchone()
            now = _state(value, writer)
            new = State.model_validate({**dict(now), **values_of(now)})
            run(
                connection,
                "UPDATE nobackfill.gateway SET value = %s, epoch = epoch + 1",
                [new.model_dump_json()],
            )
            if writer != (own := version("nobackfill")):
                run(connection, "UPDATE nobackfill.format SET written_by = %s", [own])
            tell(connection)
            return epoch + 1, new

        epoch, new = self._database.write(work)
        self._database.after_commit(lambda: self._see(epoch, new))
        return new

    def _see(self, epoch: int, now: State) -> None:
        """Nothing older is seen after something newer."""
        with self._seeing:
            if epoch > self._epoch:
                self._epoch, self._now = epoch, now

    def together(self, work: Callable[[], Result], lead: Lead | None = None) -> Result:
        def fenced() -> Result:
            result = work()
            if isinstance(lead, DatabaseLead):
                fence(self._database, lead.term)
            return result

        return self._database.together(fenced)

    def lead(self) -> Lead | None:
        return take_lead(self._database)

    def depose(self) -> None:
        def work() -> None:
            new_term(self._database)
            self.revise(lambda _now: {"activation": None})

        self._database.together(work)

    def held(self, seconds: float) -> AbstractContextManager[None]:
        return releases_held(self._database, seconds)

    def job(self, gallery: str) -> str | None:
        query = "SELECT value FROM nobackfill.jobs WHERE gallery = %s"
        row = self._database.read(lambda connection: run(connection, query, [gallery]).fetchone())
        return None if row is None else str(row[0])

    def keep_job(self, gallery: str, job: str | None) -> None:
        statement = (
            "INSERT INTO nobackfill.jobs (gallery, value) VALUES (%s, %s)"
            " ON CONFLICT (gallery) DO UPDATE SET value = excluded.value"
        )
        if job is None:
            remove = "DELETE FROM nobackfill.jobs WHERE gallery = %s"
            self._database.write(lambda connection: run(connection, remove, [gallery]))
        else:
            self._database.write(lambda connection: run(connection, statement, [gallery, job]))

    def _keep_deed(self, deed: Deed) -> None:
        statement = (
            "INSERT INTO nobackfill.audit (at, who, what, of_what)"
            " VALUES (to_timestamp(%s), %s, %s, %s)"
        )
        self._database.write(lambda connection: run(connection, statement, list(deed)))

    def deeds(self) -> list[Deed]:
        query = (
            "SELECT extract(epoch FROM at)::double precision, who, what, of_what"
            " FROM nobackfill.audit ORDER BY number DESC LIMIT %s"
        )
        found = self._database.read(lambda c: run(c, query, [MOST_DEEDS]).fetchall())
        return [Deed(*row) for row in reversed(found)]


def _state(value: str, writer: object) -> State:
    return read_state(value, "nobackfill.gateway of the database", writer)
