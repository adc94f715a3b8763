"""The statement that nearly every search is, asked in one call of libpq: psycopg's way around it, a
cursor and each value in its type, took a third of the time that a search takes here.

A connection prepares it once, under a name of its own. psycopg drops all names now and then
(`DEALLOCATE ALL` after a rollback): it is prepared again.
"""

from collections.abc import Sequence
from itertools import count
from weakref import WeakKeyDictionary

import psycopg
from psycopg import errors, pq

from nobackfill.server.stores.postgresql.bulk import to_binary
from nobackfill.server.stores.postgresql.database import Connection
from nobackfill.vectors import Vectors

# Statements that a connection keeps: one for each table and number of hits that are asked for.
_MOST = 100
_BINARY = pq.Format.BINARY
_names: WeakKeyDictionary[Connection, dict[str, bytes]] = WeakKeyDictionary()
_numbers = count()


def usable(connection: Connection) -> bool:
    """Whether a refusal ends no transaction."""
    return connection.pgconn.transaction_status == pq.TransactionStatus.IDLE


def rows_near(connection: Connection, statement: str, query: Vectors) -> list[tuple[int, bytes]]:
    """Rows of a label and a vector, in binary form, of a statement with one place, %s, for a vector
    [dim]. Not within a transaction. Raises psycopg.Error."""
    asked = connection.pgconn
    known = _names.setdefault(connection, {})
    values: Sequence[bytes] = [to_binary(query)]
    for _ in range(2):
        if statement not in known:
            _prepare(asked, known, statement)
        result = asked.exec_prepared(known[statement], values, [_BINARY], _BINARY)
        if result.status == pq.ExecStatus.TUPLES_OK:
            break
        if result.error_field(pq.DiagnosticField.SQLSTATE) != b"26000":
            raise _error(asked, result)
        known.clear()
    else:
        raise _error(asked, result)
    value = result.get_value
    return [
        (int.from_bytes(value(row, 0) or b"", "big"), value(row, 1) or b"")
        for row in range(result.ntuples)
    ]


def _prepare(asked: pq.abc.PGconn, known: dict[str, bytes], statement: str) -> None:
    if len(known) >= _MOST:
        asked.exec_(b"DEALLOCATE " + known.pop(next(iter(known))))
    name = b"near_%d" % next(_numbers)
    result = asked.prepare(name, statement.replace("%s", "$1::vector").encode())
    if result.status != pq.ExecStatus.COMMAND_OK:
        raise _error(asked, result)
    known[statement] = name


def _error(asked: pq.abc.PGconn, result: pq.abc.PGresult) -> psycopg.Error:
    if asked.status == pq.ConnStatus.BAD:
        # As psycopg says it: without a code, for no server does.
        return psycopg.OperationalError(asked.get_error_message())
    return errors.error_from_result(result)
