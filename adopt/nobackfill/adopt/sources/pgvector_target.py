"""Write new vectors to PostgreSQL, in a column of the same rows or in a table of their own.

A table of their own leaves the rows of the old one as they are, whatever indexes it has. A writer
to a key of the old table leaves an empty vector for that key in the new one, by a trigger. The
unique key makes the writer and the carrying wait for one another, so that one comes first.
Carrying fills what is not there, and what is empty and has not been emptied again since it was
read.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import LiteralString, Protocol

import numpy as np

from nobackfill.adopt.sources.postgres_rows import (
    FloatRows,
    decode_product_rows,
    decode_vector_rows,
    encode_copy_rows,
    encode_update_passes,
)
from nobackfill.adopt.sources.source import (
    Rows,
    SearchMetric,
    Target,
    Window,
    old_name_after_flip,
)
from nobackfill.errors import (
    AlreadyExistsError,
    BusyError,
    InvalidInputError,
    NobackfillError,
    NotFoundError,
    join_few,
)
from nobackfill.extras import require_extra
from nobackfill.vectors import Vectors

with require_extra("adopt"):
    from psycopg import errors as states
    from psycopg import sql

    from nobackfill.adopt.sources.postgres_dependents import (
        build_indexes,
        cluster_mark,
        column_properties,
        dependent_moves,
        dependents,
        drop_unfinished_indexes,
        grant_statements,
        index_definitions,
        missing_indexes,
        owner_statements,
        row_indexes,
        row_security_statements,
        to_one_line,
    )
    from nobackfill.adopt.sources.postgres_table import (
        TRIGGERS_DIGEST,
        Changes,
        SourceTable,
        Triggers,
        comment_with_facts,
        definition_of,
        parse_comment_facts,
        stale_sentence,
    )


# `--to table:NAME`.
TABLE_PREFIX = "table:"


Names = dict[str, sql.Identifier]


def create_or_find_table(
    table: SourceTable, vector_column: str, target: Target
) -> tuple[Names, str | None]:
    """Make the table of the new vectors and its triggers, or find them again.

    A table follows the names that the source, its column, its key or its schema has now. All
    happens in one transaction, which others may hold up for 5 s.

    Args:
        table: The source.
        vector_column: Its column of old vectors.
        target: The place for new vectors; its name is `table:NAME`.

    Returns:
        The names of its parts, and the digest of the triggers; None if the table was flipped to.

    Raises:
        AlreadyExistsError: Another map or source made the table, or its triggers were off. It is of
            other rows than those of `where`.
        InvalidInputError: A column was renamed after the flip. `target.content_column` is no column
            of the source, or PostgreSQL refuses a statement.
        NotFoundError: The table of this name was itself renamed.
        BusyError: Others hold the source for more than 5 s.
        NotPermittedError: This role may not create tables, functions or triggers there.
        UnavailableError: The server does not answer.
        CannotWriteError: The disk is full, or the server is read-only.
        NobackfillError: PostgreSQL refuses another statement: BusyError, NotPermittedError,
            NotFoundError, CannotWriteError or InvalidInputError.
        KeyError: `vector_column` is no column of the source.
    """
    with table.open_changes() as changes:
        place = find_table(table, vector_column, target.name)
        names, triggers = place.sql_names, table.triggers(place.trigger_function)
        ours = target.computer_digest in (
            place.comment_facts.get("carried"),
            place.comment_facts.get("nobackfill"),
        )
        if place.belongs_to_source and ours and place.comment_facts.get("where") != table.where:
            raise AlreadyExistsError(
                f"{table.name}: table {target.name.removeprefix(TABLE_PREFIX)!r} holds new "
                f"vectors of {_rows_of(place.comment_facts.get('where'))}, but this command reads "
                f"{_rows_of(table.where)}; use the same --where, or choose another --to"
            )
        if place.belongs_to_source and place.comment_facts.get("carried") == target.computer_digest:
            _check_columns(table, vector_column, place)
            return names, None
        if place.relation_exists and not (
            place.belongs_to_source
            and place.comment_facts.get("nobackfill") == target.computer_digest
        ):
            removal = ""
            if place.belongs_to_source:
                # A table of somebody else would not be removed.
                removal = ", or remove the table with `nobackfill carry --rollback`"
            raise AlreadyExistsError(
                f"{table.name}: table {target.name.removeprefix(TABLE_PREFIX)!r} exists already "
                f"and was not made by this map; choose another --to{removal}"
            )
        mark = {"nobackfill": target.computer_digest, "of": names["function"].as_string()}
        if table.where is not None:
            mark["where"] = table.where
        if not place.relation_exists:
            _make(changes, table, vector_column, names, target, mark)
        else:
            _check_triggers(table, place, triggers, target)
            _follow_names(
                changes, table, vector_column, place, comment_with_facts(model=target.model, **mark)
            )
        name = table.trigger_name(vector_column, target.name)
        events = {name + end: event for end, event in _EVENTS.items()}
        body, content = (
            table.trigger_body(_BODY, **names),
            table.changed_condition(target.content_column),
        )
        digest = changes.create_triggers(body, events, content=content, **names)
        if target.is_native:
            comment = comment_with_facts(model=target.model, triggers=digest, **mark)
            changes.run("COMMENT ON TABLE {new_table} IS {comment}", comment=comment, **names)
        return names, digest


def _rows_of(where: str | None) -> str:
    """Name rows by their condition in an error."""
    return "all rows" if where is None else f"the rows with {where}"


def _check_triggers(
    table: SourceTable, place: "NewVectorTable", triggers: Triggers, target: Target
) -> None:
    """Raise AlreadyExistsError where writes may have fired no trigger of a table of new vectors.

    A map finds stale vectors by computing them again, so for its table it is enough that the
    triggers are on. Native vectors need the same triggers as at their last `carry`. A table that an
    earlier version wrote has no record of these.
    """
    on = len(triggers.trigger_states) == len(_EVENTS) and "D" not in (
        triggers.trigger_states + triggers.partition_states
    )
    recorded = place.comment_facts.get("triggers")
    if on and (not target.is_native or recorded in (None, triggers.states_digest)):
        return
    confirmation = None
    if on:
        mark = comment_with_facts(**{**place.comment_facts, "triggers": triggers.states_digest})
        confirmation = table.text(
            "COMMENT ON TABLE {new_table} IS {mark}", mark=mark, **place.sql_names
        )
    sentence = stale_sentence(
        f"table {target.name.removeprefix(TABLE_PREFIX)!r}",
        confirmation,
        "remove the table with `nobackfill carry --rollback`, and start again",
    )
    raise AlreadyExistsError(f"{table.name}: {sentence}")


@dataclass(frozen=True)
class NewVectorTable:
    """The place for new vectors in a table of their own.

    Attributes:
        sql_names: Names of its parts, made of the present names of the source.
        trigger_function: Its trigger function, which may have been made under earlier names.
        relation_exists: Whether a relation has its name.
        belongs_to_source: Whether its vectors are of this source.
        comment_facts: The content of its comment; empty without one of ours.
        columns: Its columns: the key, the vectors, and others that its owner has added.
    """

    sql_names: Names
    trigger_function: sql.Identifier
    relation_exists: bool = False
    belongs_to_source: bool = False
    comment_facts: Mapping[str, str] = field(default_factory=dict)
    columns: Sequence[str] = ()


def find_table(table: SourceTable, vector_column: str, name: str) -> NewVectorTable:
    """Find a table of new vectors, also after a rename of the source, its column or its schema.

    The comment of the table names a trigger function. The source is the table whose triggers call
    this function, however it is called now; after the flip, a foreign key refers to it.

    Args:
        table: The source.
        vector_column: The source's column of old vectors.
        name: `table:NAME`.

    Returns:
        Its place. If there is no such table, `relation_exists` is False. If another program made
        it, or it is of another source, `belongs_to_source` is False.

    Raises:
        NotFoundError: The table of this name was itself renamed.
        UnavailableError: The server does not answer.
        NobackfillError: PostgreSQL refuses a query of the catalogue: BusyError, NotPermittedError,
            NotFoundError, CannotWriteError or InvalidInputError.
        KeyError: `vector_column` is no column of the source.
    """
    wanted, names = name.removeprefix(TABLE_PREFIX), table_names(table, vector_column, name)
    watchers = dict(
        table.query_all(
            "SELECT DISTINCT proname, nspname FROM pg_trigger JOIN pg_proc p ON p.oid = tgfoid "
            "JOIN pg_namespace n ON n.oid = pronamespace "
            "WHERE tgrelid = {oid} AND starts_with(proname, 'nobackfill_')",
            oid=table.oid,
        )
    )
    relations = table.query_all(
        "SELECT nspname, relname, obj_description(c.oid, 'pg_class'), "
        "c.oid IS NOT DISTINCT FROM to_regclass({new_table}), "
        "EXISTS (SELECT FROM pg_constraint WHERE contype = 'f' AND conrelid = c.oid "
        "AND confrelid = {oid}), ARRAY(SELECT attname::text FROM pg_attribute "
        "WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped ORDER BY attnum) "
        "FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace "
        "WHERE c.oid = to_regclass({new_table}) OR c.oid IN (SELECT objoid FROM pg_description, "
        "unnest({watchers}::text[]) w WHERE classoid = 'pg_class'::regclass AND objsubid = 0 "
        "AND position(w IN description) > 0) ORDER BY 4 DESC, 1",
        new_table=names["new_table"].as_string(),
        oid=table.oid,
        watchers=list(watchers),
    )
    places: list[NewVectorTable] = []
    for schema, relation, comment, at_its_name, refers, columns in relations:
        mark = parse_comment_facts(comment)
        watcher = mark.get("of", "").rpartition(".")[2].strip('"')
        if watcher in watchers and relation == wanted:
            names = table_names(table, vector_column, name, schema)
            function = sql.Identifier(watchers[watcher], watcher)
            return NewVectorTable(names, function, True, True, mark, columns)
        if watcher == table.trigger_name(vector_column, name) and watcher in watchers:
            raise NotFoundError(
                f"{table.name}: table {wanted!r} was renamed to {relation!r}; "
                f"use --to {TABLE_PREFIX}{relation}"
            )
        if at_its_name:
            function = names["function"]
            belongs = refers or (
                mark.get("of") == function.as_string() and not _elsewhere(table, function)
            )
            places.append(NewVectorTable(names, function, True, belongs, mark, columns))
    return places[0] if places else NewVectorTable(names, names["function"])


def _elsewhere(table: SourceTable, function: sql.Identifier) -> bool:
    """Return whether another table has triggers that call a function: one that had this table's
    name before."""
    return bool(
        table.query_one(
            "SELECT EXISTS (SELECT FROM pg_trigger WHERE tgfoid = to_regproc({function}) "
            "AND tgrelid <> {oid} AND tgrelid NOT IN "
            "(SELECT relid FROM pg_partition_tree({oid}::oid::regclass)))",
            function=function.as_string(),
            oid=table.oid,
        )
    )


def _renames(table: SourceTable, vector: str, place: NewVectorTable) -> list[str]:
    """Return statements that give the key and the vectors the names that the source has now."""
    return [
        table.text(
            "ALTER TABLE {new_table} RENAME COLUMN {before} TO {now}",
            new_table=place.sql_names["new_table"],
            before=sql.Identifier(before),
            now=sql.Identifier(now),
        )
        for before, now in zip(place.columns, (table.key, vector), strict=False)
        if before != now
    ]


def _check_columns(table: SourceTable, vector: str, place: NewVectorTable) -> None:
    """Raise InvalidInputError where a flipped table lacks a column of the source's names, by which
    statements join both."""
    if not {table.key, vector} <= set(place.columns):
        raise InvalidInputError(
            f"{table.name}: expected the columns {table.key!r} and {vector!r} in the table of the "
            f"new vectors, as in the source, found {join_few(place.columns)}; run "
            f"{'; '.join(_renames(table, vector, place))}"
        )


def _follow_names(
    changes: Changes, table: SourceTable, vector: str, place: NewVectorTable, comment: str
) -> None:
    """Give the parts of a table the names that the source has now."""
    names = place.sql_names
    for statement in _renames(table, vector, place):
        changes.run_text(statement)
    if place.trigger_function == names["function"]:
        return
    changes.run("DROP FUNCTION {function}() CASCADE", function=place.trigger_function)
    indexes = changes.query_all(
        "SELECT indexrelid::regclass::text FROM pg_index WHERE indrelid = {new_table}::regclass "
        "AND indpred IS NOT NULL AND NOT indisunique ORDER BY indexrelid LIMIT 1",
        new_table=names["new_table"].as_string(),
    )
    for (index,) in indexes:
        changes.run("ALTER INDEX {index} RENAME TO {empty_name}", index=sql.SQL(index), **names)
    changes.run("COMMENT ON TABLE {new_table} IS {comment}", comment=comment, **names)


def _make(
    changes: Changes,
    table: SourceTable,
    vector: str,
    names: dict[str, sql.Identifier],
    target: Target,
    mark: dict[str, str],
) -> None:
    dim = sql.SQL(str(int(target.dim)))
    # A logged table cannot have a foreign key to an unlogged one.
    kind = sql.SQL("UNLOGGED TABLE" if table.is_unlogged else "TABLE")
    # A query gives the column of the key the type and the collation of the old one.
    query: LiteralString = "CREATE {kind} {new_table} AS SELECT {key} FROM {table} WITH NO DATA"
    changes.run(query, kind=kind, **names)
    changes.run("ALTER TABLE {new_table} ADD PRIMARY KEY ({key})", **names)
    changes.run("ALTER TABLE {new_table} ADD COLUMN {old} {type}({dim})", dim=dim, **names)
    # A partial index: lets `carry` find cleared vectors without reading the others.
    changes.run("CREATE INDEX {empty_name} ON {new_table} ({key}) WHERE {old} IS NULL", **names)
    mark_and_model = comment_with_facts(model=target.model, **mark)
    changes.run("COMMENT ON TABLE {new_table} IS {mark}", mark=mark_and_model, **names)
    comment = table.comment(vector)
    if target.model or comment:
        comment = comment_with_facts(comment, model=target.model)
        changes.run("COMMENT ON COLUMN {new_table}.{old} IS {comment}", comment=comment, **names)
    dims = table.declared_dim(vector), target.dim
    for step in column_properties(table, vector, names["new_table"].as_string(), vector, dims):
        changes.run_text(step)
    changes.give_to_owner("TABLE", names["new_table"])


_BODY: LiteralString = """
  IF TG_OP = 'TRUNCATE' THEN
    TRUNCATE {new_table};
  END IF;
  IF TG_OP IN ('DELETE', 'UPDATE') THEN
    INSERT INTO {new_table} ({key}, {old}) VALUES (OLD.{key}, NULL)
    ON CONFLICT ({key}) DO UPDATE SET {old} = NULL;
  END IF;
  IF TG_OP = 'INSERT' OR TG_OP = 'UPDATE' AND NOT NEW.{key} {equals} OLD.{key} THEN
    INSERT INTO {new_table} ({key}, {old}) VALUES (NEW.{key}, NULL)
    ON CONFLICT ({key}) DO UPDATE SET {old} = NULL;
  END IF;
  RETURN NULL;
END"""
# As in pgvector.py, no IS DISTINCT FROM: it does not outlive a dump.
_EVENTS: dict[str, LiteralString] = {
    "": "AFTER INSERT OR DELETE ON {table} FOR EACH ROW",
    "_changed": "AFTER UPDATE ON {table} FOR EACH ROW "
    "WHEN ((OLD.{old} IS NULL) <> (NEW.{old} IS NULL) OR NOT OLD.{old} {same} NEW.{old} "
    "OR NOT OLD.{key} {equals} NEW.{key}{content})",
    "_emptied": "AFTER TRUNCATE ON {table} FOR EACH STATEMENT",
}


def remove_table(table: SourceTable, vector_column: str, name: str) -> bool:
    """Remove a table of new vectors and its triggers, in one transaction; an error changes nothing.

    Args:
        table: The source.
        vector_column: Its column of old vectors.
        name: `table:NAME`; the prefix may be missing.

    Returns:
        Whether there was one of this source. One that was flipped to stays: its vectors are
        searched.

    Raises:
        NotFoundError: The table of this name was itself renamed.
        BusyError: Others hold the table for more than 5 s.
        InvalidInputError: Another object, such as a view, depends on the table.
        NotPermittedError: This role does not own it.
        UnavailableError: The server does not answer.
        NobackfillError: PostgreSQL refuses another statement: BusyError, NotPermittedError,
            NotFoundError, CannotWriteError or InvalidInputError.
        KeyError: `vector_column` is no column of the source.
    """
    with table.open_changes() as changes:
        place = find_table(table, vector_column, name)
        if not place.belongs_to_source or "nobackfill" not in place.comment_facts:
            return False
        changes.run("DROP FUNCTION IF EXISTS {function}() CASCADE", function=place.trigger_function)
        changes.run("DROP TABLE {new_table}", **place.sql_names)
    return True


def table_names(
    table: SourceTable, vector_column: str, name: str, schema: str | None = None
) -> Names:
    """Return quoted names: `old` (the column of vectors), `type`, `new_table`, `function` (of the
    triggers), `empty_name` and `empty` (the index of empty vectors, without and with its
    schema).

    Nothing is created. The type is read from the columns that the source had at the last look.

    Args:
        table: The source.
        vector_column: Its column of old vectors.
        name: `table:NAME`; the prefix may be missing.
        schema: Schema of the new table; None for the source's.

    Raises:
        KeyError: `vector_column` is no column of the source.
    """
    new_table = name.removeprefix(TABLE_PREFIX)
    trigger = table.trigger_name(vector_column, TABLE_PREFIX + new_table)
    return {
        "old": sql.Identifier(vector_column),
        "type": table.pgvector_name(table.vector_type(vector_column)),
        "new_table": sql.Identifier(schema or table.schema, new_table),
        "function": sql.Identifier(table.schema, trigger),
        "empty_name": sql.Identifier(f"{trigger}_empty"),
        "empty": sql.Identifier(schema or table.schema, f"{trigger}_empty"),
    }


# pgvector's own bound for its HNSW index on `vector`; halfvec reaches twice as far.
_INDEXED_DIM = 2000
# Up to this many rows are found by their keys, more by a range of keys.
_FEW = 1000
# How long `carry` waits for a lock while it holds rows for which others may wait. After a second of
# waiting, PostgreSQL looks for deadlocks and ends one of both transactions.
WAIT = "50ms"
# The pause in seconds before the next sweep, after such a wait in vain.
LET_GO = 0.5
# The step before the printed flip.
HOW: LiteralString = (
    "in the same moment either `carry` with --flip, or let nobody write, carry once more, and run:"
)
_OTHER_FLIP = (
    "another --flip of this table is under way; wait until it has ended, then run carry again"
)
# The metric of each operator class, without those of sparse and binary vectors.
_NAMES: Mapping[str, SearchMetric] = {
    "cosine": "cosine", "l2": "squared_l2", "ip": "inner_product", "l1": "l1",
}  # fmt: skip
METRIC_BY_OPERATOR_CLASS: Mapping[str, SearchMetric] = {
    f"{kind}_{name}_ops": metric
    for kind in ("vector", "halfvec")
    for name, metric in _NAMES.items()
}


# A row that an UPDATE should have changed, and that is still as it was read.
_AS_READ: LiteralString = (
    "SELECT FROM {table} t JOIN nobackfill_pass p ON t.ctid = p.place AND t.xmin = p.writer "
    "AND t.tableoid = p.relation LIMIT 1"
)


class OldVectorSource(Protocol):
    """The source of the old vectors."""

    vector: str

    @property
    def metric(self) -> SearchMetric | None:
        """Return the metric of the old vectors' indexes; None without an index.

        Raises:
            InvalidInputError: The indexes are of several metrics.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """

    @property
    def uses_halfvec(self) -> bool:
        """Tell whether the old vectors, or their index, have the type halfvec.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """

    def count_vectors(self, column: str) -> int:
        """Count the rows with a vector in a column; 0 if there is no such column.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """

    def rows(
        self,
        column: str,
        window: Window,
        missing_column: str | None = None,
        ids: Sequence[str] | None = None,
    ) -> Rows:
        """Read vectors of a window from a column.

        Args:
            column: Name of the column.
            window: The range of keys.
            missing_column: Only rows where this other column is NULL; None for all rows.
            ids: Keys to read, as text; unknown ones are left out. None for all.

        Raises:
            InvalidInputError: The vectors have several dimensions, there is no such column, or an
                id is no value of the key's type.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """

    def watch(self, changes: Changes, target: Target) -> str | None:
        """Create triggers that clear a new vector whose old one changes, in the caller's
        transaction.

        Args:
            changes: The transaction.
            target: The new vectors.

        Returns:
            The digest of the triggers (see `Triggers`).

        Raises:
            InvalidInputError: `target.content_column` is no column of the table.
            psycopg.Error: PostgreSQL refuses a statement; the connection's block translates it.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """


class PgvectorColumn:
    """New vectors in a column of the same rows.

    Every method may raise UnavailableError (the server does not answer) and the other errors of
    `translate_errors`.
    """

    writers_put_new_vectors = False

    @property
    def concurrent_windows(self) -> int:
        """Return 1 if an index has the old vectors, else 2.

        Two transactions keep each other's dead rows, and updating an index then costs more than the
        second thread gains.

        It asks the server at each call.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        return 1 if self._table.indexes(self._source.vector) else 2

    def __init__(
        self,
        source: OldVectorSource,
        table: SourceTable,
        names: dict[str, sql.Identifier],
        target: Target,
        flipped: bool,
        triggers: str | None,
    ) -> None:
        """Take the parts that the source has made; nothing is read.

        Args:
            source: The source of the old vectors.
            table: Its table.
            names: Identifiers for statements: `old`, `new` and `function`.
            target: The new vectors; their column exists.
            flipped: Whether an earlier flip has given them the old name.
            triggers: Digest of the triggers before anything was checked; None without triggers.
        """
        self._source, self._table, self._names, self._target = source, table, names, target
        self.flipped, self._triggers = flipped, triggers

    def pending(self, window: Window) -> Rows:
        """Read the old vectors of a window's rows whose new vector is NULL.

        Only rows that fulfil the source's condition, by increasing key; none after all are written.

        Raises:
            InvalidInputError: The old vectors have several dimensions.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        return self._source.rows(self._source.vector, window, missing_column=self._target.name)

    def write(self, rows: Rows, vectors: Vectors) -> None:
        """Write new vectors to rows that did not change since they were read, in UPDATE_PASSES
        passes, each a transaction.

        Rows that have changed stay pending. If another session holds one of the rows for 50 ms, the
        rows of this and the later passes stay pending; it then sleeps for 0.5 s and raises nothing.

        Args:
            rows: Rows of `pending`, in its order, at least one.
            vectors: Their new vectors, float32 [n, dim].

        Raises:
            InvalidInputError: The vectors have another dimension than the column, or a trigger or
                rule of the table drops each UPDATE. A vector holds NaN or infinity, or for a
                halfvec more than 65,504.
            CannotWriteError: The disk is full, or the server is read-only.
            NotPermittedError: This role may not update the table.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses another statement: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
            IndexError: There are no rows.
        """
        try:
            self._write(rows, encode_update_passes(rows.versions, vectors))
        except BusyError:
            # An open transaction wrote to one of the rows: the other rows stay pending.
            time.sleep(LET_GO)

    def _write(self, rows: Rows, passes: Iterator[bytes]) -> None:
        ids, kind = rows.ids, sql.SQL(self._table.key_type)
        # The temporary table has no statistics, so the key's range leads the planner to the key's
        # index. A few rows may lie anywhere in the range.
        which = self._table.compose(
            "t.{key} = ANY({ids}::{kind}[])"
            if len(ids) <= _FEW
            else "t.{key} BETWEEN {first}::{kind} AND {last}::{kind}",
            ids=ids,
            first=ids[0],
            last=ids[-1],
            kind=kind,
        )
        with self._table.lend_connection() as changes:
            for rows_of_pass in passes:
                # All in one transaction: behind a pooler, the next one may have another session.
                with changes.transaction(WAIT):
                    changes.run(
                        "CREATE TEMPORARY TABLE nobackfill_pass "
                        "(place tid, writer xid, relation oid, new {vector})"
                    )
                    changes.copy(sql.Identifier("nobackfill_pass"), rows_of_pass)
                    # The key's index is faster: a scan of it removes dead rows from their pages.
                    changes.run("SET LOCAL enable_tidscan = off")
                    done = changes.run(
                        "UPDATE {table} t SET {new} = p.new FROM nobackfill_pass p "
                        "WHERE t.ctid = p.place AND t.xmin = p.writer AND t.tableoid = p.relation "
                        "AND {which}",
                        which=which,
                        **self._names,
                    )
                    if not done and changes.query_all(_AS_READ):
                        raise InvalidInputError(
                            f"{self._table.name}: rows of this table cannot be changed, because a "
                            "trigger or a rule drops each UPDATE; let it pass UPDATEs of the "
                            f"column {self._target.name!r}, or write the new vectors into a "
                            "second table (--to table:NAME)"
                        )
                    changes.run("DROP TABLE pg_temp.nobackfill_pass")

    def read(self, window: Window) -> Rows:
        """Read the new vectors of a window; rows without one are left out.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        return self._source.rows(self._target.name, window)

    def pending_items(self, ids: Sequence[str]) -> Rows:
        """Read the old vectors of rows whose new vector is NULL; unknown keys are left out.

        Raises:
            InvalidInputError: The old vectors have several dimensions, or an id is no value of the
                key's type.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        name = self._target.name
        return self._source.rows(self._source.vector, Window(), missing_column=name, ids=ids)

    def read_items(self, ids: Sequence[str]) -> Rows:
        """Read the new vectors of rows by key; rows without one are left out.

        Raises:
            InvalidInputError: An id is no value of the key's type.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        return self._source.rows(self._target.name, Window(), ids=ids)

    def products(self, window: Window, probe: Vectors) -> tuple[list[str], Vectors]:
        """Compute in the database the inner product of each new vector with `probe` [dim].

        Returns:
            The keys of the window, increasing, and their products, float32 [n]; rows without a new
            vector are left out.

        Raises:
            InvalidInputError: `probe` has another dimension.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        return decode_product_rows(
            self._table.copy_out(
                "SELECT t.{key}::text, t.{new} {product} {probe}::{vector} FROM {table} t "
                "WHERE t.{new} IS NOT NULL AND {within} ORDER BY t.{key}",
                probe=str(probe.tolist()),
                within=self._table.window_condition(window, "t"),
                **self._names,
            )
        )

    def count(self) -> int:
        """Count the rows with a new vector.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        return self._source.count_vectors(self._target.name)

    @contextmanager
    def prepare_flip(self) -> Iterator[None]:
        """Build the new column's indexes, and refuse other flips of the table during the block.

        A build may take hours; writers continue, but those of a partitioned table wait. Indexes
        that it has built stay after an error.

        Raises:
            BusyError: Another flip is under way, or the triggers have changed. Somebody else builds
                an index of the table.
            InvalidInputError: Something depends on the old column and cannot be moved. PostgreSQL
                refuses an index. The old column has indexes of several metrics.
            UnavailableError: The server does not answer.
            CannotWriteError: The disk is full, or the server is read-only.
            NotPermittedError: This role does not own the table, or may not create temporary tables.
            NobackfillError: PostgreSQL refuses another statement: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        refuse_flip(
            self._table, column_flip_obstacles(self._table, self._source.vector, self._target)
        )
        with self._table.lock("flip", _OTHER_FLIP):
            check_triggers_watch(self._table, self._names["function"], self._triggers)
            build_indexes(self._table, *self._place, self._indexes())
            yield

    def drop_unfinished_indexes(self) -> None:
        """Drop INVALID indexes of a killed build, which slow down each write. If others hold the
        table for 5 s, they stay until the flip. After the flip it does nothing.

        Raises:
            UnavailableError: The server does not answer.
            InvalidInputError: The old column has indexes of several metrics.
            NotPermittedError: This role does not own the table, or may not create temporary tables.
            NobackfillError: PostgreSQL refuses another statement: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        if not self.flipped:
            with suppress(BusyError):
                drop_unfinished_indexes(self._table, *self._place, self._indexes())

    @property
    def _place(self) -> tuple[sql.Identifier, str]:
        """The relation and the column of the new vectors."""
        return sql.Identifier(self._table.schema, self._table.relation), self._target.name

    def open_flip(self) -> AbstractContextManager[None]:
        """Lock the table for the block, and rename both columns at its end, in one transaction.
        Neither readers nor writers pass meanwhile. The old vectors get the name COLUMN_before and
        stay. An error in the block rolls the flip back. With `Target.must_be_reversible`, triggers
        then clear an old vector whose new one changes.

        Raises:
            BusyError: Others hold the table for more than 5 seconds.
            InvalidInputError: A row with an old vector has no new one, or the triggers were off;
                nothing changes. PostgreSQL refuses to move an object that depends on the old
                column.
            UnavailableError: The server does not answer; it may have flipped.
            NobackfillError: PostgreSQL refuses another statement: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
            NotPermittedError: This role does not own the table.
        """
        return self._table.run_flip(
            self._flip, self._watch_old if self._target.must_be_reversible else None
        )

    def _watch_old(self, changes: Changes) -> None:
        """Make triggers that clear an old vector whose new one changes after the flip."""
        name = old_name_after_flip(self._source.vector)
        digest = self._source.watch(changes, replace(self._target, name=name, content_column=None))
        facts = self._table.comment_facts(name) | {"triggers": digest}
        changes.run(
            "COMMENT ON COLUMN {table}.{name} IS {comment}",
            name=sql.Identifier(name),
            comment=comment_with_facts(self._table.comment(name), **facts),
        )

    def owner_tasks(self) -> list[str]:
        """Return no tasks: the flip of a column is complete."""
        return []

    def finish(self) -> list[str]:
        """Return what is left to do, in order; nothing after a flip. Nothing is changed.

        First come statements that build missing indexes, then a sentence to switch the queries, and
        last a transaction that flips. If the column cannot be flipped, sentences name the obstacles
        instead of the last two.

        Raises:
            UnavailableError: The server does not answer.
            InvalidInputError: The old column has indexes of several metrics.
            NobackfillError: PostgreSQL refuses a query of the catalogue: BusyError,
                NotPermittedError, NotFoundError, CannotWriteError or InvalidInputError.
            NotPermittedError: This role may not create temporary tables.
        """
        if self.flipped:
            return []
        missing = missing_indexes(self._table, *self._place, self._indexes())
        if obstacles := column_flip_obstacles(self._table, self._source.vector, self._target):
            return [*missing, *obstacles]
        return [
            *missing,
            "switch the queries to the new model; " + HOW,
            f"BEGIN; {'; '.join(self._flip())}; COMMIT",
        ]

    @property
    def _dims(self) -> tuple[int | None, int]:
        return self._table.declared_dim(self._source.vector), self._target.dim

    def _indexes(self) -> list[str]:
        """Return statements that build the indexes of the new column.

        They are those of the old column. One HNSW index takes their place if the old column has
        none, or if pgvector has no index of such long vectors.
        """
        old, new, found = self._source.vector, self._target.name, list[str]()
        if self._target.dim <= _INDEXED_DIM or self._source.uses_halfvec:
            found = index_definitions(self._table, old, new, self._dims)
        index = index_definition(self._table, self._source, self._names["new"], self._target.dim)
        return found or [self._table.create_index_prefix() + index]

    def _flip(self) -> list[str]:
        """Return the statements of the flip, for one transaction."""
        text, names = self._table.text, self._names
        kept = sql.Identifier(old_name_after_flip(self._source.vector))
        old, here = self._source.vector, text("{here}")
        moved = dependent_moves(self._table, old, self._dims)
        return [
            text("LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE"),
            abort_unless_watched(self._table, names["function"], self._triggers),
            *self._table.search_path_statement(),
            failing_statement(
                self._table,
                "EXISTS (SELECT FROM {table} WHERE {old} IS NOT NULL AND {new} IS NULL)",
                "rows have no new vector yet: run nobackfill carry again, or with --flip",
                **names,
            ),
            text("DROP FUNCTION {function}() CASCADE", **names),
            # From now on these are the source's vectors, which the next map reads. This map fills
            # the rows without one.
            to_one_line(
                text(
                    "COMMENT ON COLUMN {table}.{new} IS {comment}",
                    comment=comment_with_facts(
                        self._table.comment(old),
                        model=self._target.model,
                        carried=self._target.computer_digest,
                    ),
                    **names,
                )
            ),
            *column_properties(self._table, old, here, self._target.name, self._dims),
            # A writer sets one of both columns after the flip: NOT NULL moves, too.
            *moved.drop_statements,
            text("ALTER TABLE {table} RENAME COLUMN {old} TO {kept}", kept=kept, **names),
            text("ALTER TABLE {table} RENAME COLUMN {new} TO {old}", **names),
            *moved.create_statements,
            failing_statement(
                self._table,
                "EXISTS (SELECT FROM pg_depend JOIN pg_attribute ON attrelid = refobjid "
                "AND attnum = refobjsubid WHERE refclassid = 'pg_class'::regclass "
                "AND refobjid = {relation}::regclass AND attname = {kept} "
                "AND classid <> 'pg_class'::regclass AND NOT EXISTS (SELECT FROM pg_trigger t "
                "JOIN pg_proc p ON p.oid = tgfoid WHERE t.oid = objid "
                "AND starts_with(proname, 'nobackfill_')))",
                "something new depends on the old vectors: run nobackfill carry again",
                relation=here,
                kept=old_name_after_flip(old),
            ),
            *cluster_mark(self._table, old, self._dims),
        ]


def column_flip_obstacles(table: SourceTable, column: str, target: Target) -> list[str]:
    """Name in sentences what keeps new vectors from taking the place of a column; none if they can.

    The new column need not exist yet: a carry with --flip looks before it writes the first row.
    Only the catalogue is read.

    Args:
        table: The table with the old vectors.
        column: Name of the old column.
        target: The new vectors.

    Raises:
        UnavailableError: The server does not answer.
        NobackfillError: PostgreSQL refuses a query of the catalogue: BusyError, NotPermittedError,
            NotFoundError, CannotWriteError or InvalidInputError.
        KeyError: The table has no such column.
    """
    obstacles = table.flip_obstacles(column)
    if table.has_column(old_name_after_flip(column)):
        obstacles.append(
            f"a flip renames the old vectors to {old_name_after_flip(column)!r}, but the table "
            "has a column of this name already; rename that column, or drop it if an earlier flip "
            "left it and nothing reads it"
        )
    if indexes := row_indexes(table):
        obstacles.append(
            f"these indexes read whole rows, so they would keep the old vectors: "
            f"{join_few(indexes)}; drop them, and build them again after the flip"
        )
    moved = dependent_moves(table, column, (table.declared_dim(column), target.dim))
    if moved.immovable_objects:
        obstacles.append(
            f"these objects of the database would still read the old vectors of {column} after a "
            f"flip: {join_few(moved.immovable_objects)}; drop them, run the command again, and "
            "create them again for the new vectors"
        )
    if moved.hindrances:
        obstacles.append(f"these objects prevent a flip: {join_few(moved.hindrances)}")
    return obstacles


def table_flip_obstacles(table: SourceTable) -> list[str]:
    """Name in sentences what keeps a table of new vectors from a foreign key to `table`.

    Returns:
        One sentence, or none.

    Raises:
        UnavailableError: The server does not answer.
        NobackfillError: PostgreSQL refuses a query of the catalogue: BusyError, NotPermittedError,
            NotFoundError, CannotWriteError or InvalidInputError.
    """
    if table.is_referable():
        return []
    return [
        f"key {table.key!r} is unique by a deferrable constraint alone, which no foreign key may "
        "reference: make the constraint NOT DEFERRABLE, or write the new vectors into a column "
        "(--to NAME)"
    ]


def refuse_flip(table: SourceTable, obstacles: list[str]) -> None:
    """Raise an error that lists obstacles to a flip; without obstacles do nothing.

    Raises:
        InvalidInputError: There are obstacles.
    """
    if obstacles:
        raise InvalidInputError(
            f"{table.name}: searches cannot flip to the new vectors: {'; '.join(obstacles)}"
        )


def failing_statement(
    table: SourceTable, condition: LiteralString, sentence: str, **names: object
) -> str:
    """Write a statement, in one line, that fails with a sentence if a condition holds. Nothing is
    run.

    Args:
        table: The table, whose name begins the sentence.
        condition: The condition in SQL, with names in braces.
        sentence: The sentence.
        names: Identifiers and values for the braces.

    Raises:
        KeyError: A name in braces has no value.
    """
    body = table.text(
        "BEGIN IF " + condition + " THEN RAISE EXCEPTION USING MESSAGE = {sentence}; END IF; END",
        sentence=f"{table.name}: {sentence}",
        **names,
    )
    return to_one_line(table.text("DO {body}", body=to_one_line(body)))


def abort_unless_watched(table: SourceTable, function: sql.Identifier, digest: str | None) -> str:
    """Write a statement that ends a transaction if writes may have fired no trigger of nobackfill
    since a digest was read: such writes leave stale vectors, which only the map can tell.

    Nothing is run.

    Args:
        table: The table with the triggers.
        function: The function that they call.
        digest: The digest (see `Triggers`); None expects no triggers.
    """
    return failing_statement(
        table,
        "{digest} IS DISTINCT FROM (SELECT " + TRIGGERS_DIGEST + ")",
        _UNWATCHED,
        digest=digest,
        **table.trigger_digest_values(function),
    )


def check_triggers_watch(table: SourceTable, function: sql.Identifier, digest: str | None) -> None:
    """Check that a flip would not be refused by the statement of `abort_unless_watched`.

    Args:
        table: The table with the triggers.
        function: The function that they call.
        digest: The digest (see `Triggers`); None expects no triggers.

    Raises:
        BusyError: The triggers have another digest.
        UnavailableError: The server does not answer.
        NobackfillError: PostgreSQL refuses a query of the catalogue: BusyError, NotPermittedError,
            NotFoundError, CannotWriteError or InvalidInputError.
    """
    if table.triggers(function).states_digest != digest:
        raise BusyError(f"{table.name}: {_UNWATCHED}")


_UNWATCHED = (
    "the triggers of nobackfill were disabled or made again since the new vectors were checked, so "
    "some of these vectors may be stale: run nobackfill carry again, which checks all of them"
)


def index_definition(
    table: SourceTable, source: OldVectorSource, column: sql.Identifier, dim: int
) -> str:
    """Return the definition of an HNSW index for new vectors, in PostgreSQL's own words, from the
    access method on.

    It has the old column's metric, or cosine without one. It is of halves where the old index is,
    and for more than 2,000 dimensions. PostgreSQL builds it once on an empty temporary table, which
    is rolled back. A definition that it refuses is returned as it is, and the error comes when it
    is built.

    Args:
        table: The table with the old vectors.
        source: The source of the old vectors.
        column: The column to index.
        dim: Its dimension, at least 1.

    Raises:
        UnavailableError: The server does not answer.
        NotPermittedError: This role may not create temporary tables.
        InvalidInputError: The old column has indexes of several metrics.
        NobackfillError: PostgreSQL refuses another statement: BusyError, NotPermittedError,
            NotFoundError, CannotWriteError or InvalidInputError.
        KeyError: The table lacks the column of the old vectors.
    """
    kind = "halfvec" if source.uses_halfvec or dim > _INDEXED_DIM else "vector"
    metric = source.metric or "cosine"
    name = next(
        name
        for name, one in METRIC_BY_OPERATOR_CLASS.items()
        if one == metric and name.startswith(kind)
    )
    indexed: sql.Composable = column
    if kind != table.vector_type(source.vector):
        indexed = sql.SQL("({}::{}({}))").format(
            column, table.pgvector_name(kind), sql.SQL(str(dim))
        )
    names = {
        "column": column,
        "type": table.pgvector_name(table.vector_type(source.vector)),
        "dim": sql.SQL(str(dim)),
        "index": sql.SQL("hnsw ({} {})").format(indexed, table.pgvector_name(name)),
    }
    with suppress(InvalidInputError), table.lend_connection() as changes, changes.attempt():
        changes.run("CREATE TEMPORARY TABLE nobackfill_shape ({column} {type}({dim}))", **names)
        changes.run("CREATE INDEX ON pg_temp.nobackfill_shape USING {index}", **names)
        changes.run("SET LOCAL search_path = pg_catalog")
        ((statement,),) = changes.query_all(
            "SELECT pg_get_indexdef(indexrelid) FROM pg_index "
            "WHERE indrelid = 'pg_temp.nobackfill_shape'::regclass"
        )
        return definition_of(statement)
    # PostgreSQL refuses it, and says why when it is to be built.
    return names["index"].as_string()


# About the bytes of a node of an HNSW graph during its build, besides its vector.
_NODE_BYTES = 1200


def estimate_index_seconds(
    table: SourceTable, source: OldVectorSource, vectors: Vectors, item_count: int
) -> float | None:
    """Estimate the seconds to build an HNSW index of new vectors, by that of some of them.

    PostgreSQL builds it on a temporary table, which is rolled back, so in one process. The time is
    taken to grow as n log n. That holds while the graph fits into maintenance_work_mem.

    Args:
        table: The table with the old vectors.
        source: The source of the old vectors.
        vectors: New vectors, float32 [n, dim], at least two.
        item_count: Number of vectors of the index, at least 1.

    Returns:
        None where it is unknown: the graph does not fit, the old column has several indexes or one
        that is no HNSW with default settings, or PostgreSQL refuses a statement, as without the
        right to create temporary tables.

    Raises:
        KeyError: The table lacks the column of the old vectors.
    """
    count, dim = vectors.shape
    with suppress(NobackfillError):
        here = sql.Identifier(table.schema, table.relation)
        old = [one.definition for one in table.column_indexes(here, source.vector)]
        if len(old) > 1 or any(not one.startswith("hnsw ") or " WITH (" in one for one in old):
            return None
        column = sql.Identifier("new")
        names = {
            "column": column,
            "type": table.pgvector_name(table.vector_type(source.vector)),
            "dim": sql.SQL(str(dim)),
            "index": sql.SQL(index_definition(table, source, column, dim)),
        }
        if table.vector_type(source.vector) == "halfvec":
            vectors = vectors.astype(np.float16)
        with table.lend_connection() as changes, changes.attempt():
            ((memory,),) = changes.query_all(
                "SELECT pg_size_bytes(current_setting('maintenance_work_mem'))"
            )
            if item_count * (vectors.itemsize * dim + _NODE_BYTES) > memory:
                return None
            changes.run(
                "CREATE TEMPORARY TABLE nobackfill_sample ({column} {type}({dim}))", **names
            )
            changes.copy(sql.Identifier("nobackfill_sample"), encode_copy_rows(vectors))
            started = time.perf_counter()
            changes.run("CREATE INDEX ON pg_temp.nobackfill_sample USING {index}", **names)
            seconds = time.perf_counter() - started
        return float(seconds * item_count * np.log(item_count) / (count * np.log(count)))
    return None


# Bytes of a row's place (tid) and its writer (xid), and their value for a missing row.
_SEEN = 10
_NOWHERE = bytes(_SEEN)


class PgvectorTable:
    """New vectors in a table of their own, whose columns have the names of the old table's.

    Every method may raise UnavailableError (the server does not answer) and the other errors of
    `translate_errors`.
    """

    # A write changes no index of the old table.
    concurrent_windows = 2
    writers_put_new_vectors = False

    def __init__(
        self,
        source: OldVectorSource,
        table: SourceTable,
        target: Target,
        names: Names,
        triggers: str | None,
    ) -> None:
        """Take the parts that `create_or_find_table` has made; nothing is read.

        Args:
            source: The source of the old vectors.
            table: Its table.
            target: The new vectors.
            names: Names of the parts, as `create_or_find_table` returns them.
            triggers: Digest of the triggers before anything was checked; None after the flip.
        """
        self._source, self._table, self._target = source, table, target
        self.flipped, self._triggers = triggers is None, triggers
        self._names = names
        # Windows that this run wrote completely, in which only cleared vectors can be pending; and
        # the last window that each thread read, with the number of its pending rows.
        self._whole: set[str] = set()
        self._own = threading.local()

    def pending(self, window: Window) -> Rows:
        """Read the old vectors of a window's rows whose new vector is missing or cleared.

        They are sorted by key. Rows without an old vector are left out. In a window that this
        object wrote completely, only cleared vectors count. The thread that calls it must also call
        `write` for its rows.

        Raises:
            InvalidInputError: The old vectors have several dimensions.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        self._own.window = repr(window)
        whole = self._own.window in self._whole
        if not whole and not self._any(window):
            # The table was searched before the old vectors are read. Rows that are cleared after
            # that fail in `write`.
            rows = decode_vector_rows(
                self._table.copy_out(
                    "SELECT t.{key}::text, t.{old}::{vector}, t.{key} FROM {table} t "
                    "WHERE t.{old} IS NOT NULL AND {chosen} AND {within} ORDER BY t.{key}",
                    within=self._table.window_condition(window, "t"),
                    **self._names,
                ),
                self._table.name,
            )
            self._own.count = len(rows)
            return replace(rows, versions=[one + _NOWHERE for one in _bytes(rows.versions)])
        found = self._table.copy_out(
            "SELECT t.{key}::text, t.{old}::{vector}, t.{key}, "
            "coalesce(b.place, '(0,0)'), coalesce(b.writer, '0') "
            "FROM (SELECT {key}, {old} FROM {table} WHERE {chosen}) t {join} JOIN "
            "(SELECT {key} AS key, ctid AS place, xmin AS writer, {old} IS NULL AS empty "
            "FROM {new_table} b WHERE {which} AND {within_new}) b ON b.key = t.{key} "
            "WHERE t.{old} IS NOT NULL AND b.empty IS NOT FALSE AND {within} ORDER BY t.{key}",
            # In a window that was written completely, only cleared vectors.
            join=sql.SQL("INNER" if whole else "LEFT"),
            which=sql.SQL("{} IS NULL" if whole else "true").format(self._names["old"]),
            within=self._table.window_condition(window, "t"),
            within_new=self._table.window_condition(window, "b"),
            **self._names,
        )
        rows = decode_vector_rows(found, self._table.name)
        self._own.count = len(rows)
        return rows

    def _any(self, window: Window) -> bool:
        query = "SELECT EXISTS (SELECT FROM {new_table} b WHERE {within})"
        within = self._table.window_condition(window, "b")
        return bool(self._table.query_one(query, within=within, **self._names))

    def write(self, rows: Rows, vectors: Vectors) -> None:
        """Insert or fill the new vectors of rows that have not changed since they were read. Rows
        that have changed, and those that are left out, stay pending.

        If another session holds one of the keys for 50 ms, all rows stay pending; it then sleeps
        for 0.5 s and raises nothing. The vectors become float16 where the old ones are.

        Args:
            rows: Some of the rows that `pending` returned last on this thread, at least one.
            vectors: Their new vectors, float32 [n, dim].

        Raises:
            InvalidInputError: The vectors have another dimension than the table. A vector holds NaN
                or infinity, or for a halfvec more than 65,504.
            CannotWriteError: The disk is full, or the server is read-only.
            NotPermittedError: This role may not write to the table.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses another statement: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
            AttributeError: `pending` was not called on this thread.
        """
        versions = _bytes(rows.versions)
        keys = [one[:-_SEEN] for one in versions]
        places = [one[-_SEEN:] for one in versions]
        if self._table.vector_type(self._source.vector) == "halfvec":
            vectors = vectors.astype(np.float16)
        try:
            absent = all(place == _NOWHERE for place in places)
            if not (absent and self._filled(keys, vectors)):
                self._fill_some(keys, places, vectors)
        except BusyError:
            # An open transaction wrote to one of the rows: all stay pending.
            time.sleep(LET_GO)
            return
        # Rows that the caller leaves out have no row in the new table.
        if len(rows) == self._own.count:
            self._whole.add(self._own.window)

    def _filled(self, keys: list[bytes], vectors: FloatRows) -> bool:
        """Insert all rows by COPY. Returns False if somebody wrote to one of the keys meanwhile."""
        with self._table.lend_connection() as changes:
            try:
                with changes.transaction(WAIT):
                    changes.copy(self._names["new_table"], encode_copy_rows(keys, vectors))
            except states.UniqueViolation:
                return False
        return True

    def _fill_some(self, keys: list[bytes], places: list[bytes], vectors: FloatRows) -> None:
        """Insert or update the rows that did not change since they were read."""
        seen = [place[:6] for place in places], [place[6:] for place in places]
        with self._table.lend_connection() as changes, changes.transaction(WAIT):
            changes.run(
                "CREATE TEMPORARY TABLE nobackfill_window ON COMMIT DROP AS SELECT {key} AS key, "
                "{old} AS new, ctid AS place, xmin AS writer FROM {new_table} WITH NO DATA",
                **self._names,
            )
            changes.copy(
                sql.Identifier("nobackfill_window"), encode_copy_rows(keys, vectors, *seen)
            )
            changes.run(
                "INSERT INTO {new_table} SELECT key, new FROM nobackfill_window "
                "WHERE place = '(0,0)' ORDER BY key ON CONFLICT DO NOTHING",
                **self._names,
            )
            changes.run(
                "UPDATE {new_table} b SET {old} = w.new FROM nobackfill_window w "
                "WHERE b.{key} = w.key AND b.ctid = w.place AND b.xmin = w.writer",
                **self._names,
            )

    def read(self, window: Window) -> Rows:
        """Read the new vectors of a window; cleared ones are left out.

        They are sorted by key.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        found = self._table.copy_out(
            "SELECT b.{key}::text, b.{old}::{vector} FROM {new_table} b "
            "WHERE b.{old} IS NOT NULL AND {within} ORDER BY b.{key}",
            within=self._table.window_condition(window, "b"),
            **self._names,
        )
        return decode_vector_rows(found, self._table.name)

    def products(self, window: Window, probe: Vectors) -> tuple[list[str], Vectors]:
        """Compute in the database the inner product of each new vector with `probe` [dim].

        Returns:
            The keys of the window, increasing, and their products, float32 [n]; cleared vectors are
            left out.

        Raises:
            InvalidInputError: `probe` has another dimension.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        return decode_product_rows(
            self._table.copy_out(
                "SELECT b.{key}::text, b.{old} {product} {probe}::{vector} FROM {new_table} b "
                "WHERE b.{old} IS NOT NULL AND {within} ORDER BY b.{key}",
                probe=str(probe.tolist()),
                within=self._table.window_condition(window, "b"),
                **self._names,
            )
        )

    def count(self) -> int:
        """Count the rows with a new vector that is not cleared.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        query = "SELECT count(*) FROM {new_table} WHERE {old} IS NOT NULL"
        return int(self._table.query_one(query, **self._names))

    @contextmanager
    def prepare_flip(self) -> Iterator[None]:
        """Build the indexes of the new table, and refuse other flips of the table during the block.

        A build may take hours; writers continue. Indexes that it has built stay after an error.

        Raises:
            BusyError: Another flip is under way, or the triggers have changed. Somebody else builds
                an index of the table.
            InvalidInputError: PostgreSQL refuses the index. The old column has indexes of several
                metrics.
            UnavailableError: The server does not answer.
            CannotWriteError: The disk is full, or the server is read-only.
            NotPermittedError: This role does not own the table, or may not create temporary tables.
            NobackfillError: PostgreSQL refuses another statement: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        with self._table.lock("flip", _OTHER_FLIP):
            check_triggers_watch(self._table, self._names["function"], self._triggers)
            build_indexes(self._table, *self._place, [self._index()])
            yield

    def drop_unfinished_indexes(self) -> None:
        """Drop the INVALID indexes that a killed build of this target's index has left.

        They stay until the flip if other sessions hold the table. After the flip, do nothing.

        Raises:
            UnavailableError: The server does not answer.
            InvalidInputError: The old column has indexes of several metrics.
            NotPermittedError: This role does not own the table, or may not create temporary tables.
            NobackfillError: PostgreSQL refuses another statement: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        if not self.flipped:
            with suppress(BusyError):
                drop_unfinished_indexes(self._table, *self._place, [self._index()])

    @property
    def _place(self) -> tuple[sql.Identifier, str]:
        """The relation and the column of the new vectors."""
        return self._names["new_table"], self._source.vector

    def open_flip(self) -> AbstractContextManager[None]:
        """Lock the old table for the block; at its end, give the new one keys, rights and policies.

        Neither readers nor writers pass meanwhile. An error in the block rolls the flip back. The
        old table and its vectors stay as they are; the triggers are dropped, and a foreign key
        joins both tables.

        Raises:
            BusyError: Others hold the old table for more than 5 seconds.
            InvalidInputError: A row has no new vector, or the triggers were off; nothing changes.
                PostgreSQL refuses the foreign key or a policy.
            UnavailableError: The server does not answer; it may have flipped.
            NobackfillError: PostgreSQL refuses another statement: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
            NotPermittedError: This role does not own a table.
        """
        return self._table.run_flip(self._flip)

    def finish(self) -> list[str]:
        """Delete vectors whose row is gone, and return what is left to do, in order.

        First comes a statement that builds a missing index, then tasks for the table's owner, a
        sentence to switch the queries, and last a transaction that flips. After a flip nothing is
        deleted or returned. If the key cannot be referenced, nothing is deleted, and sentences name
        the obstacles after the first statement.

        Raises:
            UnavailableError: The server does not answer.
            InvalidInputError: The old column has indexes of several metrics.
            NobackfillError: PostgreSQL refuses another statement: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
            BusyError: A deadlock ended the deletion.
            NotPermittedError: This role may not delete from the new table. This role may not create
                temporary tables.
        """
        if self.flipped:
            return []
        missing = missing_indexes(self._table, *self._place, [self._index()])
        if obstacles := table_flip_obstacles(self._table):
            return [*missing, *obstacles]
        with self._table.lend_connection() as changes:
            # Vectors of rows that were removed without a trigger, as with a partition.
            changes.run(
                "DELETE FROM {new_table} b WHERE {old} IS NOT NULL "
                "AND NOT EXISTS (SELECT FROM {table} t WHERE t.{key} = b.{key} AND {chosen})",
                **self._names,
            )
        return [
            *missing,
            *self.owner_tasks(),
            self._table.text(
                "switch the queries to the new model, FROM {new_table} JOIN {table} USING ({key}); "
                + HOW,
                **self._names,
            ),
            f"BEGIN; {'; '.join(self._flip())}; COMMIT",
        ]

    def owner_tasks(self) -> list[str]:
        """Name policies that cannot be copied, and objects that still read the old vectors.

        Empty if there are none. Nothing is changed.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query of the catalogue: BusyError,
                NotPermittedError, NotFoundError, CannotWriteError or InvalidInputError.
        """
        old = [name for _, name in dependents(self._table, self._source.vector)]
        return (
            self._security()[1] + [f"the old vectors are still read by {join_few(old)}"][: len(old)]
        )

    def _security(self) -> tuple[list[str], list[str]]:
        both = (self._table.key, self._source.vector)
        return row_security_statements(self._table, self._names["new_table"], both)

    def _index(self) -> str:
        index = index_definition(self._table, self._source, self._names["old"], self._target.dim)
        return (
            self._table.text("CREATE INDEX CONCURRENTLY ON {new_table} USING ", **self._names)
            + index
        )

    def _flip(self) -> list[str]:
        """Return the statements of the flip, for one transaction."""
        text, names = self._table.text, self._names
        new_table, here = names["new_table"].as_string(), text("{here}")
        # After the flip, this map fills the rows without a new vector.
        mark = {"carried": self._target.computer_digest, "of": names["function"].as_string()}
        if self._table.where is not None:
            mark["where"] = self._table.where
        if self._target.must_be_reversible:
            # Later writers of the table have a younger transaction (see `flip_back`).
            mark["flipped"] = self._table.query_one(
                "SELECT to_regclass({name})::oid || ' ' || pg_current_xact_id()::xid",
                name=new_table,
            )
        return [
            text("LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE"),
            abort_unless_watched(self._table, names["function"], self._triggers),
            *self._table.search_path_statement(),
            failing_statement(
                self._table,
                "EXISTS (SELECT FROM (SELECT {key}, {old} FROM {table} WHERE {chosen}) t "
                "LEFT JOIN {new_table} b ON b.{key} = t.{key} "
                "WHERE t.{old} IS NOT NULL AND b.{old} IS NULL)",
                "rows have no new vector yet: run nobackfill carry again, or with --flip",
                **names,
            ),
            text("DROP FUNCTION {function}() CASCADE", **names),
            text("DROP INDEX {empty}", **names),
            text(
                "DELETE FROM {new_table} b WHERE {old} IS NULL "
                "OR NOT EXISTS (SELECT FROM {table} t WHERE t.{key} = b.{key} AND {chosen})",
                **names,
            ),
            text(
                "ALTER TABLE {new_table} ALTER COLUMN {old} SET NOT NULL, "
                "ADD FOREIGN KEY ({key}) REFERENCES {table} ({key}) "
                "ON UPDATE CASCADE ON DELETE CASCADE",
                **names,
            ),
            text(
                "COMMENT ON TABLE {new_table} IS {comment}",
                comment=comment_with_facts(model=self._target.model, **mark),
                **names,
            ),
            # Only its owner could read the table before.
            *owner_statements(self._table, new_table),
            *self._security()[0],
            *grant_statements(self._table, here, new_table, (self._table.key, self._source.vector)),
        ]


def _bytes(versions: Sequence[object]) -> list[bytes]:
    return [one for one in versions if isinstance(one, bytes)]
