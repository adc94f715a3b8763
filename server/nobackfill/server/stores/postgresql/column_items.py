"""Read images or texts from a column of a table that the operator's settings name."""

import threading
import weakref
from typing import Any

import psycopg
from psycopg import sql

from nobackfill.errors import ConfigurationError, InvalidInputError, NotFoundError, UnavailableError
from nobackfill.server.stores.postgresql.database import (
    check_url,
    is_connection_lost,
    translate_error,
)
from nobackfill.serving.sources import check_item_size
from nobackfill.vectors import InputKind

_TIMEOUT_SECONDS = 10


class DatabaseColumnItems:
    """Read items from a column; see Items. It opens one connection when it is first needed."""

    kind: InputKind | None = None

    def __init__(self, address: str) -> None:
        """Parse the address; connect to nothing yet.

        Args:
            address: postgresql://USER@HOST/DATABASE#TABLE.KEY.COLUMN; TABLE may have its schema,
                COLUMN has bytes or texts. Names are taken literally, with their case.

        Raises:
            ConfigurationError: the address has another form, or leads to another machine without
                TLS.
        """
        self._server, _, place = address.partition("#")
        parts = place.split(".")
        is_database = self._server.startswith(("postgresql://", "postgres://"))
        if not is_database or not 3 <= len(parts) <= 4 or not all(parts):
            # Without the address, which may have a password.
            raise ConfigurationError(
                "item_columns: expected postgresql://USER@HOST/DATABASE#TABLE.KEY.COLUMN, got "
                "another form; correct it in the file of `gateway serve --settings FILE`"
            )
        check_url(self._server, "item_columns")
        *table, key, column = parts
        self._parts = {
            "column": sql.Identifier(column),
            "table": sql.Identifier(*table),
            "key": sql.Identifier(key),
        }
        self._lock = threading.Lock()
        self._connections: list[Any] = []
        weakref.finalize(self, _close, self._connections)

    def read(self, name: str, most_bytes: int) -> str | bytes | None:
        """Read the original of an item, in a read-only statement of at most 10 seconds.

        Calls wait for each other, because they share one connection. A broken connection is closed,
        and the next call opens another, which may take 10 s more. If several rows have the key, any
        one is read.

        Args:
            name: id of the item, the value of the key column.
            most_bytes: largest size of the original in bytes; a text counts in UTF-8.

        Returns:
            Its text or bytes; None if no row has the key, or the column is NULL.

        Raises:
            InvalidInputError: the original is larger, or PostgreSQL refuses the statement.
            UnavailableError: the database does not answer in time, or refuses the connection.
            ConfigurationError: the user may not read the table.
            NotFoundError: the table or its schema does not exist.
            BusyError, DamagedError: a lock is held for too long, or the database is damaged.
        """
        with self._lock:
            try:
                row = self._fetch_value(name, most_bytes)
            except psycopg.Error as error:
                if is_connection_lost(error):
                    _close(self._connections)
                raise _translate_error(error, name) from error
        if row is None or row[0] is None:
            return None
        value: str | bytes = row[0]
        check_item_size(value.encode() if isinstance(value, str) else value, name, most_bytes)
        return value

    def _fetch_value(self, name: str, most_bytes: int) -> Any:
        if not self._connections or self._connections[0].closed:
            self._connections[:] = [self._connect()]
        # Fetch no more of a value than is accepted.
        query = sql.SQL(
            "SELECT substring({column} FROM 1 FOR {most}) FROM {table} WHERE {key} = {name}"
        ).format(most=most_bytes + 1, name=name, **self._parts)
        return self._connections[0].execute(query, binary=True).fetchone()

    def _connect(self) -> Any:
        connection = psycopg.connect(
            self._server, autocommit=True, connect_timeout=_TIMEOUT_SECONDS,
            # The statement timeout does not help if the machine is gone.
            tcp_user_timeout=1000 * _TIMEOUT_SECONDS, keepalives_idle=5, keepalives_interval=2,
            keepalives_count=3,
        )  # fmt: skip
        try:
            connection.execute("SET default_transaction_read_only = on")
            connection.execute(f"SET statement_timeout = '{_TIMEOUT_SECONDS}s'".encode())
        except BaseException:
            connection.close()
            raise
        return connection


def _close(connections: list[Any]) -> None:
    for connection in connections:
        connection.close()
    connections.clear()


def _translate_error(error: psycopg.Error, name: str) -> Exception:
    if isinstance(error, psycopg.errors.QueryCanceled):
        return UnavailableError(
            f"item {name!r}: the database of the setting item_columns did not answer within "
            f"{_TIMEOUT_SECONDS} s; the gateway tries again later"
        )
    if isinstance(error, psycopg.errors.UndefinedTable | psycopg.errors.InvalidSchemaName):
        return NotFoundError(
            f"item {name!r}: the table of the setting item_columns does not exist; create it, or "
            "correct its name in the file of `gateway serve --settings FILE`"
        )
    return translate_error(error) or InvalidInputError(
        f"item {name!r}: the table or column of the setting item_columns cannot be read: "
        f"{error.diag.message_primary or type(error).__name__}. Correct the setting in the "
        "file of `gateway serve --settings FILE`, or the rights of the user in its address"
    )
