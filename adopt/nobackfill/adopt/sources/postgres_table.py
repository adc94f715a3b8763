"""A table of PostgreSQL: its connections (one for each thread), columns, key and statements.

Names in statements are quoted; what PostgreSQL refuses becomes one of our errors.
"""

import hashlib
import json
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, LiteralString, TypeVar

from nobackfill import processes
from nobackfill.adopt.sources.source import Window
from nobackfill.errors import (
    BusyError,
    CannotWriteError,
    InvalidInputError,
    NobackfillError,
    NotFoundError,
    NotPermittedError,
    UnavailableError,
    join_few,
)
from nobackfill.extras import require_extra

with require_extra("adopt"):
    import psycopg
    from psycopg import errors as states
    from psycopg import sql


T = TypeVar("T")


class ThreadConnections:
    """Lend each thread a connection of its own, which stays open for the thread's next use.

    Opening one takes the server longer than reading a thousand rows. All close with this object. A
    forked process opens connections of its own: on a shared one, each process would get answers to
    the other's queries.

    Connecting happens at the first use.

    Args:
        address: Address as libpq takes it, without a password.
        name: Name of the table in errors.
    """

    def __init__(self, address: str, name: str) -> None:
        self._address, self._name = address, name
        self._open: dict[threading.Thread, Any] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _end, self._open)
        processes.register_for_forks(self)

    def before_fork(self) -> None:
        """Hold the lock while the process forks, so that the child gets a consistent state.

        It waits until no other thread looks up a connection.

        A second call without `after_fork` between them waits for ever.
        """
        self._lock.acquire()

    def after_fork(self, child: bool) -> None:
        """Release the lock after a fork, and forget the connections in the child without closing
        them.

        Args:
            child: Whether this is the new process.

        Raises:
            RuntimeError: `before_fork` was not called before.
        """
        if child:
            # Not closed, which would end the parent's: psycopg lets go of the socket alone.
            self._open.clear()
        self._lock.release()

    @contextmanager
    def lend(self) -> Iterator[Any]:
        """Lend this thread's connection for the block, and close it if it breaks.

        Blocks of one thread that are nested share the connection. Other errors than
        UnavailableError leave it open. A thread without an open connection connects first, with the
        errors of `connect`. Do not use the connection on another thread.

        Raises:
            NobackfillError: PostgreSQL refuses a statement of the block: BusyError,
                NotPermittedError, NotFoundError, CannotWriteError or InvalidInputError. Other
                errors of the block pass through.
            UnavailableError: The server does not answer, has no connections left, or ended a
                statement (statement_timeout, no memory), or the connection broke; the connection is
                closed.
            NotPermittedError: The password is wrong, or rights are missing.
            NotFoundError: There is no such database.
            InvalidInputError: libpq cannot read the address.
        """
        connection = self._lasting()
        try:
            with translate_errors(self._name):
                yield connection
        except UnavailableError:
            connection.close()
            raise

    def call(self, function: Callable[[Any], T]) -> T:
        """Return the result of `function`, called with this thread's connection.

        It is called a second time, with a new connection, if the first one broke, as after a
        restart of the server. Within a block of `lend` on this thread it uses the same connection,
        and so its open transaction.

        Raises:
            UnavailableError: The server does not answer the second time either.
            NobackfillError: PostgreSQL refuses a statement: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
            Exception: Any other error of `function`.
        """
        try:
            with self.lend() as connection:
                return function(connection)
        except UnavailableError:
            with self.lend() as connection:
                return function(connection)

    def _lasting(self) -> Any:
        """Return this thread's connection. A new one closes those of threads that have ended."""
        thread = threading.current_thread()
        with self._lock:
            kept = self._open.get(thread)
        if kept is None or kept.closed:
            kept = self.connect()
            with self._lock:
                for ended in [one for one in self._open if not one.is_alive()]:
                    self._open.pop(ended).close()
                self._open[thread] = kept
        return kept

    def connect(self) -> Any:
        """Return a new connection, which the caller closes. Each statement commits by itself.

        It waits as long as `connect_timeout` in the address says, or without a limit.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The password is wrong, or rights are missing.
            NotFoundError: There is no such database.
            InvalidInputError: libpq cannot read the address.
        """
        with translate_errors(self._name):
            return psycopg.connect(
                self._address,
                autocommit=True,
                client_encoding="UTF8",
                # A pooler gives each transaction another session, which knows no statement.
                prepare_threshold=None,
            )

    def close(self) -> None:
        """Close the connections of all threads. A later use opens new ones."""
        with self._lock:
            _end(self._open)


def _end(connections: dict[threading.Thread, Any]) -> None:
    for connection in connections.values():
        connection.close()
    connections.clear()


# The error of this project for each class of PostgreSQL's errors; the first match counts.
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

# A refused connection has no SQLSTATE in psycopg, so a missing database is known by its message.
_NO_DATABASE = re.compile(r'FATAL: +database ".*" does not exist')
# Faults of an address, by the start of libpq's message, whose end may hold a password.
_FAULTS = {
    'missing "="': "it does not begin with postgresql://",
    "invalid percent-encoded token": "a % is not followed by two hexadecimal digits (write % as "
    "%25)",
    "unexpected spaces": "it contains a space (write it as %20)",
    "invalid URI query parameter": "a name after ? is no connection parameter of PostgreSQL",
    "missing key/value separator": "a parameter after ? has no =VALUE",
    "extra key/value separator": "a parameter after ? has a second = (write it as %3D)",
}


@contextmanager
def translate_errors(name: str) -> Iterator[None]:
    """Translate PostgreSQL's errors in the block to errors of this project (see `_CLASSES`).

    The message has the first line of PostgreSQL's own, but no part of an address that libpq cannot
    parse: it may hold a password.

    Other errors than psycopg's pass through.

    Args:
        name: Name of the table, at the start of the message.

    Raises:
        BusyError: A lock, a deadlock or a serialisation failure.
        NotPermittedError: Rights are missing, or the password is wrong.
        CannotWriteError: The disk is full, or the transaction is read-only.
        NotFoundError: There is no such table or database.
        UnavailableError: Any other operational error, such as no answer.
        InvalidInputError: Any other error of psycopg.
    """
    try:
        yield
    except psycopg.Error as error:
        ours = next(ours for theirs, ours in _CLASSES if isinstance(error, theirs))
        if isinstance(error, psycopg.ProgrammingError) and error.sqlstate is None:
            # libpq repeats what it cannot read of an address, a password too.
            faults = (fault for start, fault in _FAULTS.items() if str(error).startswith(start))
            raise InvalidInputError(
                f"{name}: the PostgreSQL address cannot be read: "
                f"{next(faults, 'a part of it is malformed')}; expected "
                "postgresql://USER@HOST/DATABASE#TABLE, with the password in ~/.pgpass or "
                "PGPASSWORD"
            ) from None
        said = str(error).strip().splitlines() or [type(error).__name__]
        if _NO_DATABASE.search(said[0]):
            raise NotFoundError(
                f"{name}: PostgreSQL reports: {said[0]}; correct DATABASE of "
                "postgresql://USER@HOST/DATABASE#TABLE"
            ) from error
        # Without a state, libpq says so itself: no server answered, or the connection broke.
        unreached = isinstance(error, psycopg.OperationalError) and error.sqlstate is None
        check = (
            "; check that the server runs, and HOST and PORT of "
            "postgresql://USER@HOST:PORT/DATABASE"
            if unreached and "FATAL" not in said[0]
            else ""
        )
        raise ours(f"{name}: PostgreSQL reports: {said[0]}{check}") from error


# The content of our comment: the digest of the map while its vectors are carried, and after the
# flip; the model's fingerprint; the source that the vectors are of; the digest of the triggers that
# have emptied stale vectors since the first one was written.
# For rows that fulfil a condition: the condition, and after the flip which rows it found.
_SAID = ("nobackfill", "carried", "model", "of", "triggers", "where", "flipped")
# pgvector's types that are carried.
_VECTOR = re.compile(r"(?:.*\.)?(vector|halfvec)(?:\((\d+)\))?")
_OPERATORS: dict[str, LiteralString] = {"product": "<#>", "same": "="}
# Kinds of relations whose rows are another's.
_NO_TABLES = {"v": "view", "m": "materialized view", "f": "foreign table"}
# A table that others use is locked for a moment, or not at all.
_LOCK_WAIT = "5s"
# Timeouts that would end the session of a lock; PostgreSQL 17 has the second one.
_NO_TIMEOUTS: LiteralString = (
    "SELECT set_config(name, '0', true) FROM pg_settings "
    "WHERE name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')"
)
# Seconds between two attempts to take a lock.
_POLL = 0.1
# Every trigger function of ours begins so. It has its owner's rights: attached to somebody else's
# table it would change rows for them. By oid and by name: a table may be renamed, or restored.
_HEAD_OF_TRIGGER: LiteralString = """
#variable_conflict use_column
BEGIN
  IF TG_RELID <> {oid}::oid AND TG_RELID IS DISTINCT FROM to_regclass({name}) AND NOT EXISTS (
    SELECT FROM pg_partition_ancestors(TG_RELID) WHERE relid IN ({oid}::oid, to_regclass({name}))
  ) THEN
    RAISE EXCEPTION 'nobackfill: this trigger function serves % alone', {name};
  END IF;"""
# Around the rows of COPY's binary form.
_HEAD = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_END = b"\xff\xff"


# A digest of the triggers that call a function on a table and its partitions. PostgreSQL writes a
# trigger's row again when it is disabled or enabled, and makes it again when a partition is
# attached: one that is as it was has fired for every write. It is one line, because `carry` prints
# it in a statement, with control characters escaped.
TRIGGERS_DIGEST: LiteralString = (
    " md5(string_agg(concat_ws(' ', oid, xmin, tgenabled), ',' ORDER BY oid)) FROM pg_trigger"
    " WHERE tgfoid = to_regproc({function}) AND (tgrelid = to_regclass({relation})"
    " OR tgrelid IN (SELECT relid FROM pg_partition_tree(to_regclass({relation}))))"
)


@dataclass(frozen=True)
class Triggers:
    """Triggers of a table that call one function of ours.

    Attributes:
        function_source: The function's source; None where there is no such function.
        trigger_states: States of the table's own triggers: "A" is always, "D" is disabled.
        partition_states: States of the partitions' triggers.
        states_digest: Changes whenever one of them is made, dropped, disabled or enabled; None
            without triggers.
    """

    function_source: str | None
    trigger_states: list[str]
    partition_states: list[str]
    states_digest: str | None


@dataclass(frozen=True)
class ColumnIndex:
    """An index that reads a column.

    Attributes:
        name: Its quoted name, with its schema.
        definition: From its access method on, as `hnsw (v public.vector_cosine_ops)`.
        is_valid: False while it is built, and after a concurrent build was ended.
        is_partitioned: Whether it stands for indexes of partitions.
    """

    name: str
    definition: str
    is_valid: bool
    is_partitioned: bool


def definition_of(statement: str) -> str:
    """Return the part of a CREATE INDEX that begins with the access method.

    Returns:
        Empty if the statement has no USING.
    """
    return statement.partition(" USING ")[2]


class SourceTable:
    """A table of PostgreSQL with pgvector, at an address.

    The constructor connects and reads the catalogue; it writes nothing. Statements of its methods
    know {table}, {here} (with its schema), {key}, {equals} (the key's), {same} (a vector's) and
    {chosen} (the condition, in which columns have no table's name before them). Other braces are
    filled from names (sql.Identifier) and values.

    Every method that reads the database may raise UnavailableError (no answer) and the other errors
    of `translate_errors`.

    Args:
        address: Address as libpq takes it. Put passwords in ~/.pgpass or PGPASSWORD.
        name: Name of the table; it may have a schema, as "public.documents".
        key: Column without equal or empty values; None for the primary key.
        where: Condition of the rows to read, in SQL; None for all.

    Raises:
        UnavailableError: The server does not answer.
        NotPermittedError: The password is wrong, or rights are missing.
        NotFoundError: There is no such table or database.
        InvalidInputError: It is no plain or partitioned table, it has no such key, PostgreSQL
            refuses the condition, or libpq cannot read the address.
    """

    def __init__(self, address: str, name: str, key: str | None, where: str | None = None) -> None:
        self.name = name
        self._connections = ThreadConnections(address, name)
        self._known: dict[str, Any] = {"table": sql.Identifier(*name.split("."))}
        self._quoted = self._known["table"].as_string()
        self.pgvector = self._unseen_schema()
        self._known |= {name: self.pgvector_name(name) for name in ("vector", "vector_send")} | {
            name: self.pgvector_operator(sign) for name, sign in _OPERATORS.items()
        }
        self.columns = self._columns()
        # However the table was named.
        self.schema, self.relation, self.oid, kind = self.query_all(
            "SELECT nspname, relname, c.oid, relkind::text FROM pg_class c "
            "JOIN pg_namespace n ON n.oid = relnamespace WHERE c.oid = to_regclass({quoted})",
            quoted=self._quoted,
        )[0]
        self.partitioned = kind == "p"
        self._refuse_others(kind)
        self.key = self._key_column(key)
        self.key_type = self.columns[self.key]
        self._known["key"] = sql.Identifier(self.key)
        self._known["here"] = sql.Identifier(self.schema, self.relation)
        self._known["equals"] = self._equality()
        # In PostgreSQL's words, with the schema before each name of another schema's.
        self.where: str | None = None
        self.where_columns: list[str] = []
        if where is not None:
            self.where, self.where_columns = self._condition(where)
        self._known["chosen"] = sql.SQL(self.where or "true")

    def _condition(self, where: str) -> tuple[str, list[str]]:
        """Have PostgreSQL check a condition, as that of an index of an empty copy of the table.

        An index accepts an immutable expression over the table's own columns, and no subquery: so
        the condition of a row changes only with the row, which triggers see.

        Args:
            where: The condition, as its user wrote it.

        Returns:
            The condition in PostgreSQL's words, and the columns that it reads.

        Raises:
            InvalidInputError: PostgreSQL refuses the condition.
        """
        with self.lend_connection() as changes, changes.attempt():
            with translate_errors(f"{self.name}: --where {where}"):
                changes.run("CREATE TEMPORARY TABLE nobackfill_rows (LIKE {table})")
                # A comment at the end of the condition ends with its line.
                changes.run_single(
                    "CREATE INDEX nobackfill_chosen ON pg_temp.nobackfill_rows ((true)) "
                    f"WHERE ({where}\n)"
                )
            changes.run("SET LOCAL search_path = pg_catalog")
            ((condition, columns),) = changes.query_all(
                "SELECT pg_get_expr(indpred, indrelid), ARRAY(SELECT DISTINCT attname::text "
                "FROM pg_depend JOIN pg_attribute ON attrelid = refobjid AND attnum = refobjsubid "
                "WHERE classid = 'pg_class'::regclass AND objid = indexrelid "
                "AND refobjid = indrelid ORDER BY 1) "
                "FROM pg_index WHERE indexrelid = 'pg_temp.nobackfill_chosen'::regclass"
            )
        # A condition that is always true is stored as none.
        return condition or "true", columns

    def _unseen_schema(self) -> str | None:
        """Return the schema of pgvector if it is not on the search path, else None."""
        found = self.query_one(
            "SELECT nspname FROM pg_extension JOIN pg_namespace n ON n.oid = extnamespace "
            "JOIN pg_type t ON typnamespace = n.oid AND typname = 'vector' "
            "WHERE extname = 'vector' AND NOT pg_type_is_visible(t.oid)"
        )
        return None if found is None else str(found)

    def pgvector_name(self, name: str) -> sql.Identifier:
        """Return the name of a type, function or operator class of pgvector in statements.

        It has a schema only if pgvector's is not on the search path. The name is not checked.
        """
        return sql.Identifier(*filter(None, (self.pgvector, name)))

    def pgvector_operator(self, sign: LiteralString) -> sql.Composable:
        """Return an operator of pgvector in statements.

        It has a schema only if pgvector's is not on the search path.
        """
        if self.pgvector is None:
            return sql.SQL(sign)
        return sql.SQL("OPERATOR({}.{})").format(sql.Identifier(self.pgvector), sql.SQL(sign))

    def search_path_statement(self) -> list[str]:
        """Write a statement that puts the schema of pgvector last on a transaction's search path.

        PostgreSQL names no schema for the operator of IS DISTINCT FROM, NULLIF and CASE.

        Nothing is sent.

        Returns:
            No statement where names without a schema find pgvector.
        """
        if self.pgvector is None:
            return []
        return [
            self.text(
                "SELECT set_config('search_path', concat_ws(', ', "
                "NULLIF(current_setting('search_path'), ''), quote_ident({schema})), true)",
                schema=self.pgvector,
            )
        ]

    def vector_type(self, column: str) -> str:
        """Return the type of a column: vector or halfvec, or "" for another one.

        Raises:
            KeyError: The table has no such column.
        """
        found = _VECTOR.fullmatch(self.columns[column])
        return found[1] if found else ""

    def declared_dim(self, column: str) -> int | None:
        """Return the declared dimension of a column of vectors; None without one.

        Also None for a column of another type.

        Raises:
            KeyError: The table has no such column.
        """
        found = _VECTOR.fullmatch(self.columns[column])
        return int(found[2]) if found and found[2] else None

    def _columns(self) -> dict[str, str]:
        """Return the types of the columns by name; for a domain, its base type."""
        found = self.query_all(
            "SELECT attname, CASE typtype WHEN 'd' THEN format_type(typbasetype, typtypmod) "
            "ELSE format_type(atttypid, atttypmod) END "
            "FROM pg_attribute JOIN pg_type t ON t.oid = atttypid "
            "WHERE attrelid = to_regclass({quoted}) AND attnum > 0 AND NOT attisdropped "
            "ORDER BY attnum",
            quoted=self._quoted,
        )
        if not found:
            others = self.query_all(
                "SELECT DISTINCT c.oid::regclass::text FROM pg_attribute a "
                "JOIN pg_type t ON t.oid = atttypid JOIN pg_class c ON c.oid = attrelid "
                "WHERE typname IN ('vector', 'halfvec') AND NOT attisdropped "
                "AND relkind IN ('r', 'p') AND NOT relispartition ORDER BY 1"
            )
            raise NotFoundError(
                f"{self.name}: the database has no such table; correct the name after # in SOURCE. "
                f"Tables with vectors are {join_few(name for (name,) in others) or 'none'}"
            )
        return dict(found)

    def _refuse_others(self, kind: str) -> None:
        """Raise InvalidInputError for a view, a foreign table or a table with heirs."""
        if kind in _NO_TABLES:
            read = self.query_all(
                "SELECT DISTINCT refobjid::regclass::text FROM pg_rewrite r JOIN pg_depend d "
                "ON classid = 'pg_rewrite'::regclass AND objid = r.oid "
                "WHERE refclassid = 'pg_class'::regclass AND ev_class = {oid} "
                "AND refobjid <> ev_class ORDER BY 1",
                oid=self.oid,
            )
            of = f" (of {join_few(name for (name,) in read)})" if read else ""
            raise InvalidInputError(
                f"{self.name}: expected a table, found a {_NO_TABLES[kind]}{of}, which cannot "
                "store new vectors; name its table after # in SOURCE"
            )
        heirs = self.query_all(
            "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = {oid} ORDER BY 1",
            oid=self.oid,
        )
        if heirs and not self.partitioned:
            raise InvalidInputError(
                f"{self.name}: other tables inherit from this table "
                f"({join_few(name for (name,) in heirs)}), so a key may occur twice; expected "
                "one table with unique keys: migrate each of these tables by itself"
            )

    def _key_column(self, column: str | None) -> str:
        """Return the key: a column that is NOT NULL and has a unique index of its own.

        Args:
            column: The column to use; None for the primary key.

        Raises:
            InvalidInputError: There is no such column.
        """
        if column is not None and column not in self.columns:
            raise InvalidInputError(
                f"{self.name}: this table has no column {column!r}; correct the name. The columns "
                f"are {join_few(self.columns)}"
            )
        found = self.query_all(
            "SELECT a.attname, i.indisprimary FROM pg_index i JOIN pg_attribute a "
            "ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0] "
            "WHERE i.indrelid = to_regclass({quoted}) AND i.indisunique AND i.indnkeyatts = 1 "
            "AND i.indpred IS NULL AND i.indisvalid AND a.attnotnull AND NOT EXISTS "
            "(SELECT FROM pg_constraint WHERE conrelid = a.attrelid AND contype = 'n' "
            "AND conkey = ARRAY[a.attnum] AND NOT convalidated) ORDER BY i.indisprimary DESC",
            quoted=self._quoted,
        )
        keys = [name for name, primary in found if (name == column if column else primary)]
        if not keys:
            what_next = (
                f"name one with --key, or add one: ALTER TABLE {self._quoted} "
                "ADD COLUMN item_key bigserial UNIQUE, then --key item_key"
            )
            if self.partitioned:
                by = self.query_one("SELECT pg_get_partkeydef({oid})", oid=self.oid)
                what_next = (
                    f"a table that is partitioned by {by} can have no other unique key, so it "
                    "cannot be migrated; copy its key and its vectors into a table that is not "
                    "partitioned, and migrate that table"
                )
            raise InvalidInputError(
                f"{self.name}: expected a key of one column, unique and NOT NULL, found none"
                f"{'' if column is None else f' in {column!r}'}; {what_next}"
            )
        return str(keys[0])

    def _equality(self) -> sql.Composable:
        """Return the key's `=` with its schema, as trigger functions have their own search path."""
        schema = self.query_one(
            "SELECT nspname FROM pg_index i JOIN pg_attribute a "
            "ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0] "
            "JOIN pg_opclass c ON c.oid = i.indclass[0] JOIN pg_amop "
            "ON amopfamily = c.opcfamily AND amopstrategy = 3 AND amopmethod = c.opcmethod "
            "AND amoplefttype = c.opcintype AND amoprighttype = c.opcintype "
            "JOIN pg_operator o ON o.oid = amopopr JOIN pg_namespace n ON n.oid = o.oprnamespace "
            "WHERE i.indrelid = to_regclass({quoted}) AND a.attname = {name} AND i.indisunique "
            "AND i.indnkeyatts = 1 AND oprname = '='",
            quoted=self._quoted,
            name=self.key,
        )
        return sql.SQL("OPERATOR({}.=)").format(sql.Identifier(schema))

    def triggers(self, function: sql.Identifier) -> "Triggers":
        """Return what calls a trigger function of ours on this table and its partitions.

        `function_source` is None where the function does not exist; its triggers are then empty.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses the query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        query: LiteralString = (
            "SELECT (SELECT prosrc FROM pg_proc WHERE oid = to_regproc({function})), "
            "array_agg(tgenabled::text) FILTER (WHERE tgrelid = to_regclass({relation})), "
            "array_agg(tgenabled::text) FILTER (WHERE tgrelid <> to_regclass({relation})), "
        )
        found = self.query_all(query + TRIGGERS_DIGEST, **self.trigger_digest_values(function))[0]
        return Triggers(found[0], found[1] or [], found[2] or [], found[3])

    def trigger_digest_values(self, function: sql.Identifier) -> dict[str, Any]:
        """Return the values that TRIGGERS_DIGEST is filled with: `function` and `relation`, as
        quoted texts.

        Nothing is sent.
        """
        return {"function": function.as_string(), "relation": self._known["here"].as_string()}

    def trigger_name(self, old: str, new: str) -> str:
        """Return the name of the triggers for an old and a new column, unique to the pair.

        Returns:
            "nobackfill_" and 16 hexadecimal digits. Another schema or table name gives another
            name.
        """
        pair = f"{self.schema}\0{self.relation}\0{old}\0{new}".encode()
        return f"nobackfill_{hashlib.sha256(pair).hexdigest()[:16]}"

    def trigger_body(self, body: LiteralString, **names: object) -> str:
        """Return the source of a trigger function that fails on any other table.

        Args:
            body: The source's end, after BEGIN and the check of the table, with names in braces.
            names: Identifiers and values for the braces.

        Raises:
            KeyError: A name in braces has no value.
        """
        return self.text(
            _HEAD_OF_TRIGGER + body,
            oid=str(self.oid),
            name=self._known["here"].as_string(),
            **names,
        )

    def owner_of_new_objects(self) -> str | None:
        """Return the owner of the table, if objects that this role creates should be given to the
        owner.

        Then a role that may write to the table does not get this role's rights by a trigger.

        None if this role is the owner, if FORCE ROW LEVEL SECURITY binds the owner (it would not
        see every row), or if the owner may not create objects in the schema and this role is no
        superuser.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses the query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        name: str | None = self.query_one(
            "SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = to_regclass({quoted}) "
            "AND relowner <> current_user::regrole AND NOT relforcerowsecurity "
            "AND (has_schema_privilege(relowner, relnamespace, 'CREATE') "
            "OR (SELECT rolsuper FROM pg_roles WHERE rolname = current_user))",
            quoted=self._quoted,
        )
        return name

    @property
    def is_unlogged(self) -> bool:
        """Tell whether the table's rows are not in the write-ahead log.

        Such a table is empty after a crash of the server. It asks the server at each call.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses the query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        return bool(
            self.query_one(
                "SELECT relpersistence = 'u' FROM pg_class WHERE oid = {oid}", oid=self.oid
            )
        )

    def is_referable(self) -> bool:
        """Tell whether a foreign key may reference the key.

        A foreign key needs a valid unique index of the key alone, without a condition and not
        deferrable.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses the query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        return bool(
            self.query_one(
                "SELECT EXISTS (SELECT FROM pg_index JOIN pg_attribute ON attrelid = indrelid "
                "AND attnum = indkey[0] WHERE indrelid = {oid} AND attname = {column} "
                "AND indisunique AND indnkeyatts = 1 AND indpred IS NULL AND indisvalid "
                "AND indimmediate)",
                oid=self.oid,
                column=self.key,
            )
        )

    def count_by_dim(self, column: str) -> dict[int, int]:
        """Count the rows of the condition by the dimension of their vector, the most frequent
        first; rows without a vector do not count.

        It reads every row. Equal counts come in any order; without vectors it is empty.

        Raises:
            InvalidInputError: There is no such column, or it has no vectors.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses the query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        return dict(
            self.query_all(
                "SELECT {dims}({column}::{vector}), count(*) FROM {table} "
                "WHERE {column} IS NOT NULL AND {chosen} GROUP BY 1 ORDER BY 2 DESC",
                dims=self.pgvector_name("vector_dims"),
                column=sql.Identifier(column),
            )
        )

    def create_index_prefix(self) -> str:
        """Return the beginning of a statement that builds an index, up to USING.

        It is CONCURRENTLY, so that writers continue, except for a partitioned table, where
        PostgreSQL makes writers wait.
        """
        if self.partitioned:
            return self.text("CREATE INDEX ON {here} USING ")
        return self.text("CREATE INDEX CONCURRENTLY ON {here} USING ")

    def is_generated(self, column: str) -> bool:
        """Return whether PostgreSQL computes a column.

        False for an unknown column.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses the query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        return bool(
            self.query_one(
                "SELECT attgenerated <> '' FROM pg_attribute "
                "WHERE attrelid = to_regclass({quoted}) AND attname = {column}",
                quoted=self._quoted,
                column=column,
            )
        )

    def changed_condition(self, column: str | None) -> sql.Composed:
        """Return the rest of a trigger's condition: OR another value in a column, or in one of
        those that the condition of the rows reads, byte by byte.

        Each column is compared once. It is empty if there is no column to compare.

        Args:
            column: Name of the column; None for none beyond those of the condition.

        Raises:
            InvalidInputError: The table had no such column when this object was made or last
                changed it.
        """
        if column is not None and column not in self.columns:
            raise InvalidInputError(
                f"{self.name}: this table has no column {column!r}; correct the name. The columns "
                f"are {join_few(self.columns)}"
            )
        changed = sql.SQL(
            " OR (OLD.{0} IS NULL) <> (NEW.{0} IS NULL) OR NOT "
            'OLD.{0}::text COLLATE "C" OPERATOR(pg_catalog.=) NEW.{0}::text COLLATE "C"'
        )
        watched = dict.fromkeys([*filter(None, [column]), *self.where_columns])
        return sql.Composed([changed.format(sql.Identifier(one)) for one in watched])

    def indexes(
        self, column: str, other_table: sql.Identifier | None = None
    ) -> list[tuple[str, str]]:
        """Return the operator class and the expression of each index that reads a column.

        With a condition of the rows, only those with the same condition; without such an index,
        those of all rows.

        Args:
            column: Name of the column.
            other_table: Another table that has it; None for this table and its partitions.

        Returns:
            Sorted by operator class; invalid indexes count. A pair comes once for each condition of
            its indexes; with a condition of the rows, and without `other_table`, it comes once.
            Empty without an index or for an unknown column.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses the query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        every = self.indexes_with_condition(column, other_table)
        if self.where is not None and other_table is None:
            own = [one for one in every if one[2] == self.where]
            every = own or [one for one in every if one[2] is None]
        return [(name, expression) for name, expression, _ in every]

    def indexes_with_condition(
        self, column: str, other_table: sql.Identifier | None = None
    ) -> list[tuple[str, str, str | None]]:
        """Return operator class, expression and condition of each index that reads a column.

        The condition is None without one. The order is by these three, and equal indexes come once.
        Invalid indexes count. It is empty for an unknown column or a missing table.

        Args:
            column: Name of the column.
            other_table: Another table that has it; None for this table and its partitions.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses the query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        # PostgreSQL writes conditions in the words of `where`.
        read = self.query_all if self.where is None else self.query_catalogue
        return read(
            "SELECT DISTINCT opcname, pg_get_indexdef(indexrelid, 1, true), "
            "pg_get_expr(indpred, indrelid) FROM pg_index "
            "JOIN pg_opclass c ON c.oid = indclass[0] "
            "JOIN pg_depend ON classid = 'pg_class'::regclass AND objid = indexrelid "
            "AND refclassid = 'pg_class'::regclass AND refobjid = indrelid "
            "JOIN pg_attribute ON attrelid = indrelid AND attnum = refobjsubid "
            "WHERE attname = {column} AND (indrelid = to_regclass({relation}) "
            "OR indrelid IN (SELECT relid FROM pg_partition_tree(to_regclass({relation})))) "
            "ORDER BY 1, 2, 3",
            relation=(other_table or self._known["here"]).as_string(),
            column=column,
        )

    def column_indexes(self, relation: sql.Identifier, column: str) -> list["ColumnIndex"]:
        """Return the indexes of a relation that read a column, also in an expression.

        They are sorted by name. Indexes of partitions are not among them. A missing relation has
        none.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses the query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        found = self.query_catalogue(
            "SELECT DISTINCT indexrelid::regclass::text, pg_get_indexdef(indexrelid), indisvalid, "
            "relkind = 'I' FROM pg_index JOIN pg_class c ON c.oid = indexrelid JOIN pg_depend "
            "ON objid = indexrelid AND classid = 'pg_class'::regclass JOIN pg_attribute "
            "ON attrelid = refobjid AND attnum = refobjsubid "
            "WHERE indrelid = to_regclass({relation}) AND refobjid = indrelid "
            "AND attname = {column} ORDER BY 1",
            relation=relation.as_string(),
            column=column,
        )
        return [
            ColumnIndex(name, definition_of(statement), valid, partitioned)
            for name, statement, valid, partitioned in found
        ]

    @contextmanager
    def lock(
        self, purpose: Literal["flip", "migrate"], busy_message: str, *, wait_seconds: float = 0.0
    ) -> Iterator[Callable[[], None]]:
        """Keep other holders of a lock on this table out for the block; readers and writers of the
        table do not notice it. It opens a connection of its own for the block, and the end of the
        process frees the lock.

        A second call for the same purpose meets BusyError, also in this process. A lost session is
        noticed only by the function that is yielded.

        Args:
            purpose: Name of the lock.
            busy_message: The error's sentence where another session holds the lock.
            wait_seconds: Seconds to wait for that session. 0 tries once; attempts are 0.1 s apart.

        Yields:
            A function that raises UnavailableError where the server has ended the lock's session,
            and which keeps the connection in use.

        Raises:
            BusyError: Another session holds the lock.
            UnavailableError: The server does not answer.
            NobackfillError: Connecting fails otherwise, as `connect` says.
            NotPermittedError: The password is wrong, or rights are missing.
            NotFoundError: There is no such database.
        """
        digest = hashlib.sha256(f"nobackfill {purpose} {self.oid}".encode()).digest()
        deadline = time.monotonic() + wait_seconds
        lock = self.text(
            "SELECT pg_try_advisory_xact_lock({lock})",
            lock=int.from_bytes(digest[:8], "big", signed=True),
        )
        # A connection of its own, as a build runs outside of a transaction. The lock is of a
        # transaction: behind a pooler a session's lock would outlive this process.
        with closing(self._connections.connect()) as connection:
            with translate_errors(self.name):
                # It must keep no snapshot, for which a concurrent build would wait: so READ
                # COMMITTED, and a query without parameters, whose portal ends at once.
                connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
                connection.execute(_NO_TIMEOUTS)
                # The server may notice a moment later that the last holder was killed.
                while not (free := connection.execute(lock.encode()).fetchone()[0]):
                    if time.monotonic() >= deadline:
                        break
                    time.sleep(_POLL)
            if not free:
                raise BusyError(f"{self.name}: {busy_message}")

            def check() -> None:
                try:
                    with translate_errors(self.name):
                        connection.execute("SELECT")
                except UnavailableError as error:
                    raise UnavailableError(
                        f"{error}; the session that locked the table is gone, so this run ends. "
                        "Run the same command again"
                    ) from error

            yield check

    def update_triggers(self) -> list[str]:
        """Return the owner's triggers that an update of a new column fires, also of partitions.

        Names are quoted and sorted. Triggers of single columns, disabled ones and those of
        nobackfill are not among them.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses the query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        found = self.query_all(
            "SELECT DISTINCT quote_ident(tgname) FROM pg_trigger JOIN pg_proc p ON p.oid = tgfoid "
            "WHERE (tgrelid = {oid} OR tgrelid IN "
            "(SELECT relid FROM pg_partition_tree({oid}::oid::regclass))) AND NOT tgisinternal "
            # 16: on UPDATE. One of columns does not name a new column.
            "AND tgtype & 16 <> 0 AND tgattr = '' AND tgenabled IN ('O', 'A') "
            "AND NOT starts_with(proname, 'nobackfill_') ORDER BY 1",
            oid=self.oid,
        )
        return [name for (name,) in found]

    def has_column(self, name: str) -> bool:
        """Tell whether the table has a column of this name now.

        It asks the server, so that it also sees what others have changed; `columns` does not.
        System columns, such as ctid, count.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses the query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        query: LiteralString = (
            "SELECT EXISTS (SELECT FROM pg_attribute WHERE attrelid = {oid} AND attname = {name} "
            "AND NOT attisdropped)"
        )
        return bool(self.query_one(query, oid=self.oid, name=name))

    def comment(self, column: str) -> str | None:
        """Read the owner's comment of a column, without the part that carrying wrote. None without
        a comment or without such a column.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses the query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        comment = self._comment(column)
        if comment and parse_comment_facts(comment):
            comment = comment.rpartition("\n")[0]
        return comment or None

    def flip_obstacles(self, column: str) -> list[str]:
        """Name in sentences what keeps another column from taking the place of a column: a domain
        with conditions, or an inherited column.

        Empty if nothing does, or if there is no such column.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses the query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        domains = self.query_all(
            "SELECT t.oid::regtype::text, concat_ws(', ', "
            "CASE WHEN typnotnull THEN 'NOT NULL' END, "
            "CASE WHEN typdefault <> '' THEN 'DEFAULT' END, "
            "(SELECT string_agg(quote_ident(conname), ', ' ORDER BY conname) "
            "FROM pg_constraint WHERE contypid = t.oid AND contype = 'c')) "
            "FROM pg_attribute JOIN pg_type t ON t.oid = atttypid WHERE attrelid = {oid} "
            "AND attname = {column} AND typtype = 'd'",
            oid=self.oid,
            column=column,
        )
        parents = self.query_all(
            "SELECT inhparent::regclass::text, relispartition FROM pg_inherits "
            "JOIN pg_class c ON c.oid = inhrelid JOIN pg_attribute ON attrelid = inhrelid "
            "WHERE inhrelid = {oid} AND attname = {column} AND attinhcount > 0 ORDER BY 1",
            oid=self.oid,
            column=column,
        )
        names = {"one": sql.Identifier(column)}
        to_type = self.text("ALTER TABLE {table} ALTER COLUMN {one} TYPE ", **names)
        alone = self.text("ALTER TABLE {table} NO INHERIT ")
        sentences = [
            f"column {column!r} has the domain {domain}, whose conditions ({parts}) the new "
            "vectors would not have: give the column the domain's own type by "
            f"{to_type}{self.columns[column]}, and add the conditions to the table"
            for domain, parts in domains
            if parts
        ]
        for parent, partition in parents:
            ways = (
                f"end the inheritance by {alone}{parent}, or write the new vectors into a second "
                "table (--to table:NAME)"
            )
            if partition:
                ways = "migrate that table, with all its partitions"
            sentences.append(f"column {column!r} is inherited from {parent}: {ways}")
        return sentences

    def read_computer_digest(self, column: str) -> str | None:
        """Return the digest of a new column's map or model, from its comment; None without one.

        None too for an unknown column.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses the query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        return self.comment_facts(column).get("nobackfill")

    def comment_facts(self, column: str) -> dict[str, str]:
        """Return the facts that `comment_with_facts` wrote into the comment of a column; {} if
        there is none, or no such column.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses the query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        return parse_comment_facts(self._comment(column))

    def _comment(self, column: str) -> str | None:
        comment: str | None = self.query_one(
            "SELECT col_description(attrelid, attnum) FROM pg_attribute "
            "WHERE attrelid = to_regclass({quoted}) AND attname = {column} AND NOT attisdropped",
            quoted=self._quoted,
            column=column,
        )
        return comment

    def window_condition(self, window: Window, alias: str) -> sql.Composable:
        """Return the condition of a window on the key of a table with the alias `alias`.

        The lower bound is exclusive, the upper one inclusive; without bounds it is "true". Nothing
        is sent.
        """
        bounds = [(sql.SQL(">"), window.lower), (sql.SQL("<="), window.upper)]
        key = sql.Identifier(alias, self.key)
        conditions = [
            sql.SQL("{} {} {}").format(key, sign, bound)
            for sign, bound in bounds
            if bound is not None
        ]
        return sql.SQL(" AND ").join([sql.SQL("true"), *conditions])

    def compose(self, query: LiteralString, **parts: object) -> sql.Composed:
        """Compose a statement; a part that is no SQL object becomes a literal.

        Args:
            query: A statement with names in braces.
            parts: Values of these names; one that is no SQL object becomes a literal.

        Raises:
            KeyError: A name in braces has no value.
            TypeError: A part has a name that the table fills in itself, such as `key`.
        """
        return sql.SQL(query).format(**self._known, **parts)

    def text(self, query: LiteralString, **parts: object) -> str:
        """Compose a statement as text, for the owner to run.

        Args:
            query: A statement with names in braces.
            parts: Values of these names; one that is no SQL object becomes a literal.

        Raises:
            KeyError: A name in braces has no value.
            TypeError: A part has a name that the table fills in itself, such as `key`.
        """
        return self.compose(query, **parts).as_string()

    def query_catalogue(self, query: LiteralString, **parts: object) -> list[Any]:
        """Return all rows of a query of the catalogue, with schemas before all names.

        The query runs in a transaction that is rolled back. It is not repeated if the connection
        breaks.

        Args:
            query: A statement with names in braces.
            parts: Values of these names; one that is no SQL object becomes a literal.

        Raises:
            NobackfillError: PostgreSQL refuses the query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
            UnavailableError: The server does not answer.
            KeyError: A name in braces has no value.
        """
        with self.lend_connection() as changes, changes.attempt():
            changes.run("SET LOCAL search_path = pg_catalog")
            return changes.query_all(query, **parts)

    def accepts_statements(self, statements: Sequence[str]) -> bool:
        """Return whether PostgreSQL runs statements. They run in one transaction, which is rolled
        back; locks that they take are held until then. No statements give True.

        It waits for locks without a limit of its own.

        Raises:
            NobackfillError: Another error of `translate_errors`, such as BusyError,
                NotPermittedError or UnavailableError; a statement that PostgreSQL refuses as
                invalid, or whose object is missing, gives False instead.
        """
        try:
            with self.lend_connection() as changes, changes.attempt():
                for statement in [*self.search_path_statement(), *statements]:
                    changes.run_text(statement)
        except (InvalidInputError, NotFoundError):
            return False
        return True

    def every_row_is_seen(self) -> None:
        """Check that row-level security hides no row from this role.

        Raises:
            NotPermittedError: It may hide some. The message names the statement that helps.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses the query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        role = self.query_one(
            "SELECT current_user::text WHERE row_security_active({oid}::oid)", oid=self.oid
        )
        if role is not None:
            raise NotPermittedError(
                f"{self.name}: its row-level security may hide rows from the role {role!r}; "
                "connect as its owner without FORCE ROW LEVEL SECURITY, or as a role with "
                f"BYPASSRLS: ALTER ROLE {sql.Identifier(role).as_string()} BYPASSRLS"
            )

    def query_after_setting(
        self, query: LiteralString, setting: LiteralString | None = None, **parts: object
    ) -> list[Any]:
        """Return all rows of a query, in the same transaction as a statement before it.

        If the connection broke, both run a second time on a new one.

        Args:
            setting: The statement before it, as SET LOCAL; None for none.
            query: A query with names in braces.
            parts: Values of the names of both; one that is no SQL object becomes a literal.

        Raises:
            NobackfillError: PostgreSQL refuses a statement: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
            UnavailableError: The server does not answer.
            KeyError: A name in braces has no value.
        """

        def ask(connection: Any) -> list[Any]:
            with connection.transaction():
                if setting is not None:
                    connection.execute(self.compose(setting, **parts))
                rows: list[Any] = connection.execute(self.compose(query, **parts)).fetchall()
                return rows

        return self._connections.call(ask)

    def close(self) -> None:
        """Close the connections of all threads; a later query opens new ones."""
        self._connections.close()

    def query_all(
        self, query: LiteralString, *, binary: bool = False, **parts: object
    ) -> list[Any]:
        """Return all rows of a query.

        If the connection broke, the query runs a second time on a new one. A statement without
        rows, such as ALTER, runs, and then raises InvalidInputError.

        Args:
            binary: Whether PostgreSQL sends values in its binary form.
            query: A query with names in braces.
            parts: Values of these names; one that is no SQL object becomes a literal.

        Raises:
            NobackfillError: PostgreSQL refuses the query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
            UnavailableError: The server does not answer.
            KeyError: A name in braces has no value.
        """

        def ask(connection: Any) -> list[Any]:
            with connection.cursor(binary=binary) as cursor:
                rows: list[Any] = cursor.execute(self.compose(query, **parts)).fetchall()
                return rows

        return self._connections.call(ask)

    def copy_out(self, query: LiteralString, **parts: object) -> bytes:
        """Return all rows in COPY's binary form, without its header and trailer.

        If the connection broke, the query runs a second time. No rows give b"". All rows are in
        memory at once.

        Args:
            query: A statement with names in braces.
            parts: Values of these names; one that is no SQL object becomes a literal.

        Raises:
            NobackfillError: PostgreSQL refuses the query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
            UnavailableError: The server does not answer.
            KeyError: A name in braces has no value.
        """
        statement = sql.SQL("COPY ({}) TO STDOUT (FORMAT BINARY)").format(
            self.compose(query, **parts)
        )

        def ask(connection: Any) -> bytes:
            with connection.cursor() as cursor, cursor.copy(statement) as copy:
                return b"".join(copy)[len(_HEAD) : -len(_END)]

        return self._connections.call(ask)

    def query_one(self, query: LiteralString, **parts: object) -> Any:
        """Return the first value of the first row; None without rows.

        Args:
            query: A statement with names in braces.
            parts: Values of these names; one that is no SQL object becomes a literal.

        Raises:
            NobackfillError: PostgreSQL refuses the query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
            UnavailableError: The server does not answer.
            KeyError: A name in braces has no value.
        """
        rows = self.query_all(query, binary=False, **parts)
        return rows[0][0] if rows else None

    @contextmanager
    def open_changes(self) -> Iterator["Changes"]:
        """Run the block in one transaction on this thread's connection.

        It commits at the end, and then reads the columns again. An error rolls it back; `columns`
        then stay as they were. Each lock is waited for at most 5 s. An error of the last reading
        comes after the commit.

        Raises:
            BusyError: Others hold the table longer than 5 s, or a deadlock ended the transaction.
            UnavailableError: The server does not answer; it may have committed.
            NobackfillError: PostgreSQL refuses a statement: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        with self.lend_connection() as changes, changes.transaction():
            yield changes
        self.columns = self._columns()

    @contextmanager
    def run_flip(
        self,
        run_steps: Callable[[], list[str]],
        last_step: Callable[["Changes"], object] | None = None,
    ) -> Iterator[None]:
        """Run the block in one transaction in which no other session reads or writes the table.

        It commits after the last step. An error in the block or in a step rolls everything back and
        frees the table. While it waits for the table, later readers and writers wait, too.

        Args:
            run_steps: Called after the block; returns the statements to run, in their order.
            last_step: Called after them, to change more; None for no more changes.

        Raises:
            BusyError: Others hold the table longer than 5 s, or a deadlock ended the transaction.
            UnavailableError: The server does not answer; it may have committed.
            NobackfillError: PostgreSQL refuses a statement: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        with self.open_changes() as changes:
            # At once: a weaker lock that grows would meet readers that are about to write.
            changes.run("LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
            yield
            changes.run("SET LOCAL lock_timeout = {wait}", wait=_LOCK_WAIT)
            for step in run_steps():
                changes.run_text(step)
            if last_step is not None:
                last_step(changes)

    def run_alone(self, statement: str) -> None:
        """Run a statement that PostgreSQL refuses inside a transaction.

        It commits by itself and has no time limit.

        Raises:
            NobackfillError: PostgreSQL refuses it: BusyError, NotPermittedError, NotFoundError,
                CannotWriteError or InvalidInputError.
            UnavailableError: The server does not answer.
        """
        with self.lend_connection() as changes:
            changes.run_text(statement)

    @contextmanager
    def lend_connection(self) -> Iterator["Changes"]:
        """Lend one connection for several transactions, which must not change the columns. It is
        this thread's connection, which stays open.

        Raises:
            UnavailableError: The server does not answer, or the connection broke.
            NobackfillError: PostgreSQL refuses a statement of the block: BusyError,
                NotPermittedError, NotFoundError, CannotWriteError or InvalidInputError.
        """
        with self._connections.lend() as connection:
            yield Changes(self, connection)


class Changes:
    """Statements of one connection.

    Its methods raise psycopg's errors; `SourceTable.lend_connection`, which made it, translates
    them at the end of its block.
    """

    def __init__(self, table: SourceTable, connection: Any) -> None:
        self._table, self._connection = table, connection

    @contextmanager
    def transaction(self, lock_timeout: str = _LOCK_WAIT) -> Iterator[None]:
        """Run the block in a transaction, which commits at its end and rolls back on an error.

        Within another transaction it is a savepoint, whose `lock_timeout` holds until the outer one
        ends.

        Args:
            lock_timeout: Longest time to wait for one lock, as PostgreSQL writes it: "5s".

        Raises:
            psycopg.errors.LockNotAvailable: Others hold a lock for longer; BusyError outside of the
                connection's block.
            psycopg.Error: PostgreSQL refuses a statement of the block, or the connection breaks.
        """
        with self._connection.transaction():
            self.run("SET LOCAL lock_timeout = {wait}", wait=lock_timeout)
            yield

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Run a transaction and roll it back at the end of the block.

        It has no time limit for locks.

        Raises:
            psycopg.Error: PostgreSQL refuses a statement of the block, or the connection breaks.
        """
        with self._connection.transaction(force_rollback=True):
            yield

    def run(self, query: LiteralString, **parts: object) -> int:
        """Run a statement, and return the number of its rows; -1 where the statement has none.

        Args:
            query: A statement with names in braces.
            parts: Values of these names; one that is no SQL object becomes a literal.

        Raises:
            psycopg.Error: PostgreSQL refuses the statement, or the connection breaks.
            KeyError: A name in braces has no value.
        """
        return int(self._connection.execute(self._table.compose(query, **parts)).rowcount)

    def query_all(self, query: LiteralString, **parts: object) -> list[Any]:
        """Return all rows of a query.

        Args:
            query: A statement with names in braces.
            parts: Values of these names; one that is no SQL object becomes a literal.

        Raises:
            psycopg.Error: PostgreSQL refuses the query, or the connection breaks.
            KeyError: A name in braces has no value.
        """
        rows: list[Any] = self._connection.execute(self._table.compose(query, **parts)).fetchall()
        return rows

    def run_single(self, statement: str) -> None:
        """Run a statement that is already text. PostgreSQL refuses a text of several statements.

        Raises:
            psycopg.Error: PostgreSQL refuses the statement, or the connection breaks.
        """
        # The protocol of binary results takes one statement.
        self._connection.cursor(binary=True).execute(statement.encode())

    def run_text(self, statement: str) -> None:
        """Run a statement that is already text.

        It may be several statements.

        Raises:
            psycopg.Error: PostgreSQL refuses a statement, or the connection breaks.
        """
        self._connection.execute(statement.encode())

    def create_triggers(
        self,
        body: str,
        triggers: Mapping[str, LiteralString],
        *,
        content: sql.Composable,
        **names: sql.Identifier,
    ) -> str | None:
        """Make a trigger function and triggers of the table that call it, also in replication.
        Nothing changes if all of them are there and enabled.

        A function of an earlier commit is dropped with its triggers. So is one that somebody else
        has made: replaced, it would stay theirs.

        Call it in a transaction: otherwise each statement commits alone.

        Args:
            body: The function's source.
            triggers: When each trigger fires, by its name.
            names: Identifiers for the statements; `function` is the function.
            content: SQL that each trigger's event may contain as {content}.

        Returns:
            The digest of the triggers (see `Triggers`): a flip needs them to be the same still.

        Raises:
            psycopg.Error: PostgreSQL refuses a statement, or the connection breaks.
            NobackfillError: PostgreSQL refuses a query of the catalogue: BusyError,
                NotPermittedError, NotFoundError, CannotWriteError or InvalidInputError.
            UnavailableError: The server does not answer.
            KeyError: `names` lacks `function`, or a name of an event.
        """
        there = self._table.triggers(names["function"])
        on = ["A"] * len(triggers), ["A"] * len(there.partition_states)
        if there.function_source == body and (there.trigger_states, there.partition_states) == on:
            return there.states_digest
        self.run("DROP FUNCTION IF EXISTS {function}() CASCADE", **names)
        # Where a condition's comparison of vectors is found, once: when the trigger is made.
        for statement in self._table.search_path_statement():
            self.run_text(statement)
        self.run(
            "CREATE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER "
            "SET search_path = pg_catalog, pg_temp SET row_security = off AS {body}",
            body=body,
            **names,
        )
        for name, event in triggers.items():
            trigger = sql.Identifier(name)
            self.run(
                "CREATE TRIGGER {trigger} " + event + " EXECUTE FUNCTION {function}()",
                trigger=trigger,
                content=content,
                **names,
            )
            self.run("ALTER TABLE {table} ENABLE ALWAYS TRIGGER {trigger}", trigger=trigger)
        self.give_to_owner("FUNCTION", sql.SQL("{}()").format(names["function"]))
        return self._table.triggers(names["function"]).states_digest

    def drop_other_triggers(self, **names: sql.Identifier) -> None:
        """Drop trigger functions of nobackfill, with their triggers, that empty the column `new`
        and have another name than `function`: they were made before the table, its schema or the
        old column was renamed.

        It also drops functions that empty no column of the table: the new column was renamed, and
        each change of an old vector fails.

        Args:
            names: Identifiers; `new` is the new column, `function` the present function.

        Raises:
            psycopg.Error: PostgreSQL refuses a statement, or the connection breaks.
            KeyError: `names` lacks `new` or `function`.
        """
        found = self.query_all(
            "SELECT DISTINCT p.oid::regprocedure::text FROM pg_trigger t "
            "JOIN pg_proc p ON p.oid = tgfoid WHERE tgrelid = {oid} "
            "AND starts_with(proname, 'nobackfill_') AND (position({emptied} IN prosrc) > 0 "
            "OR position('NEW.\"' IN prosrc) > 0 AND position('\" := NULL' IN prosrc) > 0 "
            "AND NOT EXISTS (SELECT FROM pg_attribute, replace(attname, '\"', '\"\"') name "
            "WHERE attrelid = {oid} AND position('NEW.\"' || name || '\" := NULL' IN prosrc) > 0)) "
            "AND p.oid IS DISTINCT FROM to_regproc({maker})::oid",
            oid=self._table.oid,
            emptied=self._table.text("NEW.{new} := NULL", **names),
            maker=names["function"].as_string(),
        )
        for (function,) in found:
            self.run("DROP FUNCTION {named} CASCADE", named=sql.SQL(function))

    def give_to_owner(self, kind: LiteralString, name: sql.Composable) -> None:
        """Give a new object to the table's owner (see `SourceTable.owner_of_new_objects`), and
        revoke every other grant that default privileges gave.

        Without an heir only the grants are revoked.

        Args:
            kind: TABLE or FUNCTION.
            name: Name of the object in statements.

        Raises:
            psycopg.Error: PostgreSQL refuses a statement, as where this role may not give the
                object away.
            NobackfillError: PostgreSQL refuses a query of the catalogue: BusyError,
                NotPermittedError, NotFoundError, CannotWriteError or InvalidInputError.
            UnavailableError: The server does not answer.
        """
        names = {"kind": sql.SQL(kind), "name": name}
        heir = self._table.owner_of_new_objects()
        if heir is not None:
            self.run("ALTER {kind} {name} OWNER TO {heir}", heir=sql.Identifier(heir), **names)
        granted = self._table.query_all(
            "SELECT DISTINCT CASE grantee WHEN 0 THEN 'PUBLIC' "
            "ELSE quote_ident(pg_get_userbyid(grantee)) END FROM "
            "(SELECT relowner, relacl FROM pg_class WHERE oid = to_regclass({quoted}) UNION ALL "
            "SELECT proowner, coalesce(proacl, acldefault('f', proowner)) FROM pg_proc "
            "WHERE oid = to_regprocedure({quoted})) o (owner, acl), aclexplode(acl) "
            "WHERE grantee <> owner",
            quoted=name.as_string(),
        )
        for (grantee,) in granted:
            self.run(
                "REVOKE ALL ON {kind} {name} FROM {grantee}", grantee=sql.SQL(grantee), **names
            )

    def copy(self, into: sql.Identifier, rows: bytes) -> None:
        """Insert rows in COPY's binary form into a table.

        The rows have no header or trailer. It returns once the server has them all; the transaction
        decides whether they stay. Their values must be those of all columns, in the table's order.

        Raises:
            psycopg.Error: PostgreSQL refuses the rows, as for a key that exists; none is inserted
                then.
        """
        statement = sql.SQL("COPY {} FROM STDIN (FORMAT BINARY)").format(into)
        with self._connection.cursor() as cursor, cursor.copy(statement) as copy:
            # At once: a call of psycopg's a row takes longer than the server does.
            copy.write(_HEAD + rows + _END)


def stale_sentence(vectors_name: str, confirmation: str | None, remedy: str | None) -> str:
    """Write the sentence of an error: new vectors may be stale, because triggers were off.

    Args:
        vectors_name: The vectors, as `column 'v_new'`.
        confirmation: The statement by which the owner confirms that none is stale; None where the
            triggers are missing or disabled.
        remedy: Advice besides that statement, as a command to the reader; None: no advice.

    Returns:
        Sentences without a full stop at the end: what is wrong, when to run the statement, and the
        remedy.
    """
    sentence = (
        f"{vectors_name} may hold stale vectors: its triggers were dropped, disabled or made again "
        "since they were written"
    )
    if confirmation is None:
        return f"{sentence}; {remedy}" if remedy else sentence
    sentence = (
        f"{sentence}. If the database was restored from a dump, and the triggers were on ever "
        f"since, run this statement, then the command again: {confirmation}"
    )
    return f"{sentence}. Otherwise {remedy}" if remedy else sentence


def comment_with_facts(owner_comment: str | None = None, **facts: str | None) -> str:
    """Write a comment of a column or table that records facts of new vectors, as JSON in its last
    line.

    Args:
        owner_comment: The owner's comment, which precedes it; None or empty for none.
        facts: Values by name; None is left out.
    """
    ours = json.dumps({name: one for name, one in facts.items() if one is not None})
    return f"{owner_comment}\n{ours}" if owner_comment else ours


def parse_comment_facts(comment: object) -> dict[str, str]:
    """Return the facts that `comment_with_facts` wrote into the last line of a comment.

    {} where another program wrote the comment, or where it is None. Unknown names are left out, and
    every value becomes text.
    """
    try:
        found = json.loads(str(comment).rpartition("\n")[2])
        return {name: str(found[name]) for name in _SAID if name in found}
    except (ValueError, TypeError, RecursionError):
        return {}
