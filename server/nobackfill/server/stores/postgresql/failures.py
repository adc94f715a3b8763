"""What an error of PostgreSQL means to who asked."""

import psycopg
from psycopg import errors as pg
from psycopg_pool import PoolTimeout, TooManyRequests

from nobackfill.errors import (
    BusyError,
    CannotWriteError,
    ConfigurationError,
    DamagedError,
    NobackfillError,
    OverloadedError,
    UnavailableError,
)
from nobackfill.server.state import GoneError

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
