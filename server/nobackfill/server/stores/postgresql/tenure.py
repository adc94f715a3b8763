"""One gateway at a time serves from a database: an advisory lock of a connection held for it.

A server that is restarted lets go of the lock; it is taken again within a second. Should another
gateway have been quicker, this one refuses to write from then on.
"""

import threading

import psycopg
import structlog

from nobackfill.errors import BusyError, NobackfillError
from nobackfill.server.stores.postgresql.database import Connection, Database, run

log = structlog.get_logger("server.stores")

_EVERY_S = 0.5
_LOCK = "SELECT pg_try_advisory_lock(hashtext('nobackfill.gateway'))"


class Tenure:
    """Held from the constructor to `close`."""

    def __init__(self, database: Database) -> None:
        """Raises BusyError where another gateway serves from it, UnavailableError."""
        self._database = database
        self._stopping = threading.Event()
        connection = _locked(database)
        if connection is None:
            raise BusyError(
                "another gateway serves from this database; stop it, or give another database"
            )
        self._thread = threading.Thread(
            target=self._watch, args=(connection,), name="tenure", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Let another gateway take over."""
        self._stopping.set()
        self._thread.join()

    def _watch(self, connection: Connection) -> None:
        held: Connection | None = connection
        while not self._stopping.wait(_EVERY_S):
            try:
                if held is not None:
                    run(held, "SELECT 1")
                    continue
                held = _locked(self._database)
                if held is None:
                    log.error("another gateway serves from the database now; this one must end")
                    self._database.refuse_writes("another gateway serves from this database")
                    return
            except psycopg.Error:
                held = None
            except NobackfillError as error:
                log.warning("the database does not answer", error=str(error))
        if held is not None:
            held.close()


def _locked(database: Database) -> Connection | None:
    connection = database.connect()
    if run(connection, _LOCK).fetchone()[0]:
        return connection
    connection.close()
    return None
