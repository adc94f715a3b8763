"""Who has a database: gateways that serve from it share an advisory lock, each by a connection held
for it; who moves galleries there or away has it alone.

A server that is restarted lets go of the lock; it is taken again within a second. Should somebody
have been quicker who wants it alone, this one refuses to write from then on.
"""

import threading

import psycopg
import structlog

from nobackfill.errors import BusyError, NobackfillError
from nobackfill.server.stores.postgresql.database import Connection, Database, run

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
