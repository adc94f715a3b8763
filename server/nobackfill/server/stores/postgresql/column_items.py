"""Images or texts in a column of a table that the operator's settings name: read, never written."""

import threading
import weakref
from typing import Any

import psycopg
from psycopg import sql

from nobackfill.errors import ConfigurationError, InvalidInputError, UnavailableError
from nobackfill.server.stores.postgresql.database import check_url, lost, refusal
from nobackfill.serving.sources import check_size
from nobackfill.vectors import Kind

_SECONDS = 10


class DatabaseColumnItems:
    """`address`: postgresql://USER@HOST/DATABASE#TABLE.KEY.COLUMN, TABLE with its schema or without
    one, COLUMN of bytes or of texts. See Items. One connection, made when it is needed, that ends
    with this.

    Raises ConfigurationError; read raises UnavailableError for what takes longer than 10 s, too.
    """

    kind: Kind | None = None

    def __init__(self, address: str) -> None:
        self._server, _, place = address.partition("#")
        parts = place.split(".")
        known = self._server.startswith(("postgresql://", "postgres://"))
        if not known or not 3 <= len(parts) <= 4 or not all(parts):
            # Not the address itself: it may hold a password.
            raise ConfigurationError(
                "item_columns: expected postgresql://USER@HOST/DATABASE#TABLE.KEY.COLUMN"
            )
        check_url(self._server, "item_columns")
        *table, key, column = parts
        self._parts = {
            "column": sql.Identifier(column),
            "table": sql.Identifier(*table),
            "key": sql.Identifier(key),
        }
        self._lock = threading.Lock()
        self._kept: list[Any] = []
        weakref.finalize(self, _close, self._kept)

    def read(self, name: str, most_bytes: int) -> str | bytes | None:
        with self._lock:
            try:
                row = self._asked(name, most_bytes)
            except psycopg.Error as error:
                if lost(error):
                    _close(self._kept)
                raise _meant(error, name) from error
        if row is None or row[0] is None:
            return None
        value: str | bytes = row[0]
        check_size(value.encode() if isinstance(value, str) else value, name, most_bytes)
        return value

    def _asked(self, name: str, most_bytes: int) -> Any:
        if not self._kept or self._kept[0].closed:
            self._kept[:] = [self._connected()]
        # No more of a value than is taken: what is larger stays with the server.
        query = sql.SQL(
            "SELECT substring({column} FROM 1 FOR {most}) FROM {table} WHERE {key} = {name}"
        ).format(most=most_bytes + 1, name=name, **self._parts)
        return self._kept[0].execute(query, binary=True).fetchone()

    def _connected(self) -> Any:
        made = psycopg.connect(
            self._server, autocommit=True, connect_timeout=_SECONDS,
            # Of a machine that has vanished no statement's own limit is heard.
            tcp_user_timeout=1000 * _SECONDS, keepalives_idle=5, keepalives_interval=2,
            keepalives_count=3,
        )  # fmt: skip
        try:
            made.execute("SET default_transaction_read_only = on")
            made.execute(f"SET statement_timeout = '{_SECONDS}s'".encode())
        except BaseException:
            made.close()
            raise
        return made


def _close(kept: list[Any]) -> None:
    for connection in kept:
        connection.close()
    kept.clear()


def _meant(error: psycopg.Error, name: str) -> Exception:
    if isinstance(error, psycopg.errors.QueryCanceled):
        return UnavailableError(f"{name!r}: its database answers nothing within {_SECONDS} s")
    return refusal(error) or InvalidInputError(
        f"{name!r}: PostgreSQL says: {error.diag.message_primary or type(error).__name__}"
    )
