"""News: a notification with each commit that other gateways have to follow. One may be lost, so
whoever waits for them looks by itself, too."""

import psycopg

from nobackfill.errors import UnavailableError
from nobackfill.server.stores.postgresql.database import Connection, Database, run

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
