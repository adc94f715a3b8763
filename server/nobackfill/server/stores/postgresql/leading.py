"""The lead of an activation: an advisory lock of a connection held for it, and a term.

The lock ends with its gateway, so that another can take over at once. The term is in the row of the
state: each lead has its own, and a transaction of a lead that is over is rolled back, however late
it comes.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import errors as pg

from nobackfill.errors import BusyError, UnavailableError
from nobackfill.server.state import Lead, LeadLostError
from nobackfill.server.stores.postgresql.database import Connection, Database, run
from nobackfill.server.stores.postgresql.failures import refusal

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
