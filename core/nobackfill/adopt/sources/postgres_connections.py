"""Connections to a PostgreSQL, one a thread, and what it says of statements, as our errors."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from nobackfill import forks
from nobackfill.errors import (
    BusyError,
    CannotWriteError,
    InvalidInputError,
    NobackfillError,
    NotFoundError,
    NotPermittedError,
    UnavailableError,
)
from nobackfill.extras import extra

with extra("adopt"):
    import psycopg
    from psycopg import errors as states

T = TypeVar("T")


class Connections:
    """Each stays open for its thread's next use: making one takes the server longer than reading a
    thousand rows. All end with this object. A process that is forked makes connections of its own:
    on one that two share, each gets the other's answers.

    `name`: what errors speak of.
    """

    def __init__(self, address: str, name: str) -> None:
        self._address, self._name = address, name
        self._open: dict[threading.Thread, Any] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _end, self._open)
        forks.watch(self)

    def before_fork(self) -> None:
        self._lock.acquire()

    def after_fork(self, child: bool) -> None:
        if child:
            # Not closed, which would end the parent's: psycopg lets go of the socket alone.
            self._open.clear()
        self._lock.release()

    @contextmanager
    def held(self) -> Iterator[Any]:
        """This thread's. Raises our errors for PostgreSQL's; what is broken is let go."""
        connection = self._lasting()
        try:
            with refused(self._name):
                yield connection
        except UnavailableError:
            connection.close()
            raise

    def read(self, ask: Callable[[Any], T]) -> T:
        """What `ask` reads by this thread's connection, or by a new one where the server was
        started again since."""
        try:
            with self.held() as connection:
                return ask(connection)
        except UnavailableError:
            with self.held() as connection:
                return ask(connection)

    def _lasting(self) -> Any:
        """A new one ends those of threads that have ended."""
        thread = threading.current_thread()
        with self._lock:
            kept = self._open.get(thread)
        if kept is None or kept.closed:
            with refused(self._name):
                kept = psycopg.connect(
                    self._address,
                    autocommit=True,
                    client_encoding="UTF8",
                    # A pooler gives each transaction another session, which knows no statement.
                    prepare_threshold=None,
                )
            with self._lock:
                for ended in [one for one in self._open if not one.is_alive()]:
                    self._open.pop(ended).close()
                self._open[thread] = kept
        return kept

    def close(self) -> None:
        """End them."""
        with self._lock:
            _end(self._open)


def _end(connections: dict[threading.Thread, Any]) -> None:
    for connection in connections.values():
        connection.close()
    connections.clear()


# What PostgreSQL says, by its classes of errors, and what that is to us.
_CLASSES: list[tuple[type[Exception], type[NobackfillError]]] = [
    (states.LockNotAvailable, BusyError),
    (states.DeadlockDetected, BusyError),
    (states.SerializationFailure, BusyError),
    (states.InsufficientPrivilege, NotPermittedError),
    (states.InvalidPassword, NotPermittedError),
    (states.DiskFull, CannotWriteError),
    (states.ReadOnlySqlTransaction, CannotWriteError),
    (states.UndefinedTable, NotFoundError),
    (states.InvalidCatalogName, NotFoundError),
    (psycopg.OperationalError, UnavailableError),
    (psycopg.Error, InvalidInputError),
]


@contextmanager
def refused(name: str) -> Iterator[None]:
    """Errors of PostgreSQL in the block become ours, with its own first line."""
    try:
        yield
    except psycopg.Error as error:
        ours = next(ours for theirs, ours in _CLASSES if isinstance(error, theirs))
        if isinstance(error, psycopg.ProgrammingError) and error.sqlstate is None:
            # libpq repeats what it cannot read of an address, a password too.
            raise InvalidInputError(
                f"{name}: expected postgresql://USER@HOST/DATABASE before #TABLE, other signs than "
                "letters and digits as %XX, and the password in ~/.pgpass or PGPASSWORD"
            ) from None
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise ours(f"{name}: PostgreSQL says: {said[0]}") from error
