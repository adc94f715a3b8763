"""Read a table of PostgreSQL with pgvector, and add new vectors to it.

New vectors go into a new column of the same rows, or into a table of their own. Triggers clear a
new vector when its old vector changes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import Literal, LiteralString

import numpy as np

from nobackfill.adopt.sources.postgres_rows import decode_vector_rows
from nobackfill.adopt.sources.source import (
    LOCK_WAIT_SECONDS,
    LONGEST_NAME_BYTES,
    OTHER_MIGRATION_MESSAGE,
    ColumnValues,
    Facts,
    MigrationCosts,
    MigrationTrial,
    Rows,
    SearchMetric,
    Target,
    TargetVectors,
    Window,
    old_name_after_flip,
    stack_vectors,
    time_reading,
)
from nobackfill.errors import AlreadyExistsError, InvalidInputError, NotFoundError, join_few
from nobackfill.extras import require_extra
from nobackfill.vectors import Vectors

with require_extra("adopt"):
    from psycopg import sql

    from nobackfill.adopt.sources import pgvector_target
    from nobackfill.adopt.sources.pgvector_target import (
        METRIC_BY_OPERATOR_CLASS,
        PgvectorColumn,
        PgvectorTable,
        column_flip_obstacles,
        table_flip_obstacles,
    )
    from nobackfill.adopt.sources.postgres_dependents import (
        column_properties,
        dependent_moves,
        to_one_line,
    )
    from nobackfill.adopt.sources.postgres_table import (
        Changes,
        SourceTable,
        Triggers,
        comment_with_facts,
        stale_sentence,
    )

# Seconds to read, write and check an item, in multiples of reading it.
_COST_FACTOR = 5.0
# New vectors whose index is built to estimate that of all.
_INDEXED_VECTORS = 2000
_SIGNS: Mapping[SearchMetric, LiteralString] = {
    "cosine": "<=>", "squared_l2": "<->", "inner_product": "<#>", "l1": "<+>",
}  # fmt: skip
# The condition that clears a new vector. Its first two parts exclude the UPDATEs of `carry` without
# reading an old vector. It has no IS DISTINCT FROM: a dump does not name the schema of its
# operator, so a restored table would lack the triggers.
_CHANGED: LiteralString = (
    " UPDATE ON {table} FOR EACH ROW WHEN (NEW.{new} IS NOT NULL AND NEW.{new} {same} OLD.{new} "
    "AND ((OLD.{old} IS NULL) <> (NEW.{old} IS NULL) OR NOT OLD.{old} {same} NEW.{old}{content}))"
)
_BEFORE: LiteralString = "BEFORE" + _CHANGED
_AFTER: LiteralString = "AFTER" + _CHANGED
# A row that an update moves to another partition is inserted there.
_MOVED: LiteralString = "AFTER INSERT ON {table} FOR EACH ROW WHEN (NEW.{new} IS NOT NULL)"
# The AFTER trigger sees changes by the owner's triggers and by generated columns. It writes NULL,
# which fires neither trigger again.
_BODY: LiteralString = """
  IF TG_WHEN = 'BEFORE' THEN
    NEW.{new} := NULL;
    RETURN NEW;
  END IF;
  EXECUTE 'UPDATE ' || TG_RELID::regclass || {emptying} USING NEW.{key};
  RETURN NULL;
END"""


class PgvectorSource:
    """A table with vectors.

    The constructor connects and reads the catalogue. Every method that reads the database may raise
    UnavailableError (the server does not answer), NotPermittedError (rights are missing) and the
    other errors of `translate_errors`. Columns are those at the opening, or at the last change
    through this object.

    Args:
        address: Address of the database (see `SourceTable`).
        table: Name of the table, with or without its schema.
        key: Column of the keys; None for the primary key.
        vector: Column of the old vectors; None for the only one.
        where: Condition of the rows, in SQL, over the columns of the table; None for all rows (see
            `PgvectorSelection`).

    Raises:
        NotFoundError: There is no such table.
        UnavailableError: The server does not answer.
        InvalidInputError: The table has no such key or column, or PostgreSQL refuses the condition.
            `vector` is None, and the table has no or several columns of vectors; new vectors and
            those of an earlier flip do not count.
        NotPermittedError: The password is wrong, or rights are missing.
    """

    flip_renames = True

    def __init__(
        self,
        address: str,
        table: str,
        key: str | None = None,
        vector: str | None = None,
        *,
        where: str | None = None,
    ) -> None:
        self._table = SourceTable(address, table, key, where)
        vectors = [name for name in self._table.columns if self._table.vector_type(name)]
        if vector is None:
            # New vectors, and the old ones of a flip, are a choice only by their name.
            facts = {name: self._table.comment_facts(name) for name in vectors}
            before = {old_name_after_flip(name) for name in vectors if "carried" in facts[name]}
            vectors = [
                name for name in vectors if "nobackfill" not in facts[name] and name not in before
            ]
        if (vector is None and len(vectors) != 1) or (vector is not None and vector not in vectors):
            others = {name: kind for name, kind in self._table.columns.items() if _other(kind)}
            what_next = "name one with --vector"
            if others:
                what_next = (
                    f"vectors of type {join_few(sorted(set(others.values())))} (in "
                    f"{join_few(others)}) cannot be migrated; convert the column to vector or "
                    "halfvec"
                )
            elif not vectors:
                what_next = (
                    "to convert a column of numbers, run ALTER TABLE … ALTER COLUMN … TYPE "
                    "vector(N)"
                )
            raise InvalidInputError(
                f"{table}: expected {'one column' if vector is None else repr(vector)} of type "
                f"vector or halfvec, found {join_few(vectors) or 'none'}; {what_next}"
            )
        self.vector = vector or vectors[0]
        self._expressions: dict[str, tuple[str, sql.Composable]] = {}

    @property
    def flip_name(self) -> str:
        """Return the name of the column that a flip renames."""
        return self.vector

    def facts(self) -> Facts:
        """Return name, dimension, metric, recorded model and other columns of the table.

        The dimension is None for a column without a declared one.

        The model is the fingerprint in the column's comment, or None. The metric is read once.

        Raises:
            InvalidInputError: The column has indexes of several metrics.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query of the catalogue: BusyError,
                NotPermittedError, NotFoundError, CannotWriteError or InvalidInputError.
        """
        table, vector = self._table, self.vector
        others = tuple(name for name in table.columns if name not in (table.key, vector))
        model = table.comment_facts(vector).get("model")
        return Facts(
            f"{table.name}.{vector}", table.declared_dim(vector), self.metric, model, others
        )

    @cached_property
    def metric(self) -> SearchMetric | None:
        """Return the metric of the old column's indexes; None without an index. It is read once.

        With a condition of the rows, indexes of the same condition count first, then those of all
        rows, then others. Without a condition all indexes count alike, also partial ones. Invalid
        indexes count, and operator classes of unsupported metrics are ignored.

        Raises:
            InvalidInputError: The indexes are of several metrics.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query of the catalogue: BusyError,
                NotPermittedError, NotFoundError, CannotWriteError or InvalidInputError.
        """
        names = [name for name, _ in self._table.indexes(self.vector)]
        # Without an index of the same rows, that of others tells how the vectors are searched.
        names = names or [name for name, _, _ in self._table.indexes_with_condition(self.vector)]
        metrics = {
            METRIC_BY_OPERATOR_CLASS[name] for name in names if name in METRIC_BY_OPERATOR_CLASS
        }
        if len(metrics) > 1:
            what_next = "drop the indexes that no query uses"
            if self._table.where is not None:
                what_next = f"build one for the same rows, with WHERE {self._table.where}"
            raise InvalidInputError(
                f"{self._table.name}.{self.vector}: expected indexes of one metric, found "
                f"{join_few(sorted(metrics))}; {what_next}"
            )
        return next(iter(metrics), None)

    @cached_property
    def uses_halfvec(self) -> bool:
        """Tell whether the old column, or an index of it, has the type halfvec. It is read once.

        With a condition of the rows, indexes with another condition do not count.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query of the catalogue: BusyError,
                NotPermittedError, NotFoundError, CannotWriteError or InvalidInputError.
        """
        classes = [name for name, _ in self._table.indexes(self.vector)]
        return self._table.vector_type(self.vector) == "halfvec" or any(
            name.startswith("halfvec") for name in classes
        )

    def count(self) -> int:
        """Count the rows that have an old vector.

        Only rows of the condition count.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        return self.count_vectors(self.vector)

    def count_by_dim(self) -> dict[int, int]:
        """Count the rows by the dimension of their old vector.

        Only rows of the condition count. A declared dimension is an entry even without rows.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        dim = self._table.declared_dim(self.vector)
        return self._table.count_by_dim(self.vector) if dim is None else {dim: self.count()}

    def windows(self, rows_per_window: int) -> Iterator[Window]:
        """Divide all keys into windows of `rows_per_window` rows; the last one is open upwards.

        An empty table gives one window.

        Each window is read when it is requested. The errors come at the first one, too. The `lower`
        of a window is outside it, and None in the first; its `upper` is inside.

        Args:
            rows_per_window: At least 1. Rows of the condition count, also those without a vector.

        Raises:
            NotPermittedError: Row-level security may hide rows from this role.
            NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
            UnavailableError: The server does not answer.
        """
        self._table.every_row_is_seen()
        lower: object = None
        while True:
            last = self._table.query_one(
                "SELECT {key} FROM {table} t WHERE {above} AND {chosen} "
                "ORDER BY {key} OFFSET {skipped} LIMIT 1",
                above=self._table.window_condition(Window(lower), "t"),
                skipped=rows_per_window - 1,
            )
            # The last window is open: it includes rows that are inserted meanwhile.
            yield Window(lower, last)
            if last is None:
                return
            lower = last

    def read(self, window: Window) -> Rows:
        """Read the old vectors of a window; rows without one are left out.

        They are sorted by key, and only rows of the condition count.

        Raises:
            InvalidInputError: The vectors have several dimensions.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        return self.rows(self.vector, window)

    def read_column(self, window: Window, name: str) -> ColumnValues:
        """Read another column of a window as text; rows where it is NULL are left out.

        They are sorted by key. An empty text stays. Only rows of the condition count.

        Raises:
            InvalidInputError: There is no such column.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        if name not in self._table.columns:
            raise InvalidInputError(
                f"{self._table.name}: this table has no column {name!r}; correct the name. The "
                f"columns are {join_few(self._table.columns)}"
            )
        found = self._table.query_all(
            "SELECT {key}::text, {name}::text FROM {table} t WHERE {name} IS NOT NULL AND {chosen} "
            "AND {within} ORDER BY t.{key}",
            name=sql.Identifier(name),
            within=self._table.window_condition(window, "t"),
        )
        return ColumnValues([key for key, _ in found], [value for _, value in found])

    def nearest(self, vector: Vectors, count: int, new_name: str | None = None) -> list[str]:
        """Search for the items nearest to a vector, by an HNSW index if there is one.

        The index searches with `count` candidates, but at least 40 and at most 1,000, so that more
        than 1,000 hits may be incomplete. Without a metric, it is cosine. Rows without a vector, or
        outside the condition, are never hits.

        Args:
            vector: The query, float32 [dim].
            count: Largest number of hits; 0 gives none.
            new_name: Column of new vectors, or `table:NAME`; None for the old ones.

        Returns:
            Keys, nearest first; equally near ones in any order.

        Raises:
            NotFoundError: There are no new vectors of this name.
            InvalidInputError: The query has another dimension than the column. The query holds NaN
                or infinity, or `count` is below 0.
            UnavailableError: The server does not answer, also at a second attempt.
            NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        column, of = new_name or self.vector, None
        if column.startswith(pgvector_target.TABLE_PREFIX):
            of = pgvector_target.table_names(self._table, self.vector, column)["new_table"]
            column = self.vector
        elif column not in self._table.columns:
            raise NotFoundError(
                f"{self._table.name}: this table has no column {column!r}; correct the name. The "
                f"columns are {join_few(self._table.columns)}"
            )
        kind, expression = self._searched(column, of)
        # A table of new vectors holds no rows but those of the condition.
        found = self._table.query_after_setting(
            "SELECT {key}::text FROM {relation} t WHERE {column} IS NOT NULL AND {which} "
            "ORDER BY {expression} {sign} {value}::{kind} LIMIT {count}",
            self._search_settings,
            relation=of or self._table.compose("{table}"),
            which=self._table.compose("{chosen}" if of is None else "true"),
            column=sql.Identifier(column),
            expression=expression,
            sign=self._table.pgvector_operator(_SIGNS[self.metric or "cosine"]),
            kind=self._table.pgvector_name(kind),
            value=str(np.asarray(vector, np.float32).tolist()),
            count=count,
            candidates=min(1000, max(40, count)),
        )
        return [name for (name,) in found]

    def estimate_costs(self, trial: MigrationTrial) -> MigrationCosts:
        """Estimate the seconds of a migration. Nothing is written to the table.

        An item takes a multiple of reading it. The time of the index is that of a small one on a
        temporary table.

        Returns:
            Unknown seconds of the index where `pgvector_target.estimate_index_seconds` says so.

        Raises:
            InvalidInputError: The vectors have several dimensions.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the user, or may hide rows from this role.
            NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        index = pgvector_target.estimate_index_seconds(
            self._table, self, trial.new[:_INDEXED_VECTORS], trial.item_count
        )
        return MigrationCosts(_COST_FACTOR * time_reading(self) + trial.map_seconds, index)

    @cached_property
    def _search_settings(self) -> LiteralString:
        """The settings of a search. An index that has rows of other conditions would find too few
        hits: from 0.8 on, pgvector then reads on."""
        settings: LiteralString = "SET LOCAL hnsw.ef_search = {candidates}"
        if self._table.where is None or not self._table.query_one(
            "SELECT string_to_array(extversion, '.')::int[] >= '{{0,8}}' "
            "FROM pg_extension WHERE extname = 'vector'"
        ):
            return settings
        return settings + "; SET LOCAL hnsw.iterative_scan = strict_order"

    def _searched(self, column: str, of: sql.Identifier | None) -> tuple[str, sql.Composable]:
        """Return the type and the expression by which an index searches a column."""
        place = column if of is None else of.as_string()
        if place not in self._expressions:
            metric = self.metric or "cosine"
            found = [
                one
                for one in self._table.indexes(column, of)
                if METRIC_BY_OPERATOR_CLASS.get(one[0]) == metric
            ]
            kind, expression = (
                self._table.vector_type(self.vector),
                sql.Identifier(column).as_string(),
            )
            if found:
                kind, expression = found[0][0].partition("_")[0], found[0][1]
            # The catalogue wrote the expression, so it is safe in a statement.
            self._expressions[place] = kind, sql.SQL(expression)
        return self._expressions[place]

    def lookup(self, ids: Sequence[str]) -> Rows:
        """Read old vectors by key, in any order; unknown keys are left out.

        Rows without an old vector are left out, too.

        A repeated id comes once. Without ids there are no rows. The result has PostgreSQL's own
        text of a key: `007` of an integer key comes back as `7`. Only rows of the condition count.

        Raises:
            InvalidInputError: The vectors have several dimensions. An id is no value of the key's
                type.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        found = self._table.query_after_setting(
            "SELECT {key}::text, {vector_send}({column}::{vector}) FROM {table} t "
            "WHERE {column} IS NOT NULL AND {chosen} AND {key} = ANY({ids}::{kind}[])",
            column=sql.Identifier(self.vector),
            kind=sql.SQL(self._table.key_type),
            ids=list(ids),
        )
        vectors = [np.frombuffer(value[4:], ">f4") for _, value in found]
        names = [name for name, _ in found]
        return Rows(names, stack_vectors(vectors, names, self._table.name))

    def texts(self, ids: Sequence[str], column: str) -> dict[str, str]:
        """Read another column of rows as text, by key; rows where it is NULL are left out.

        Unknown keys are left out. The result has PostgreSQL's own text of a key: `007` of an
        integer key comes back as `7`. Only rows of the condition count.

        Raises:
            InvalidInputError: There is no such column. An id is no value of the key's type.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        if column not in self._table.columns:
            raise InvalidInputError(
                f"{self._table.name}: this table has no column {column!r}; correct the name. The "
                f"columns are {join_few(self._table.columns)}"
            )
        found = self._table.query_after_setting(
            "SELECT {key}::text, {column}::text FROM {table} t "
            "WHERE {column} IS NOT NULL AND {chosen} AND {key} = ANY({ids}::{kind}[])",
            column=sql.Identifier(column),
            kind=sql.SQL(self._table.key_type),
            ids=list(ids),
        )
        return dict(found)

    def close(self) -> None:
        """Close this process's connections, of all threads; a later search connects again."""
        self._table.close()

    def warnings(self, new_name: str) -> list[str]:
        """Name UPDATE triggers that a new column fires for every row, in one sentence.

        Empty if there are none, or for a table of its own (`table:NAME`).

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query of the catalogue: BusyError,
                NotPermittedError, NotFoundError, CannotWriteError or InvalidInputError.
        """
        triggers = (
            []
            if new_name.startswith(pgvector_target.TABLE_PREFIX)
            else self._table.update_triggers()
        )
        if not triggers:
            return []
        return [
            f"{self._table.name}: writing {new_name} updates every row, which fires the triggers "
            f"{', '.join(triggers)}; --to {pgvector_target.TABLE_PREFIX}NAME updates no row"
        ]

    def flip_obstacles(self, target: Target) -> list[str]:
        """Return sentences about obstacles to a flip to `target`; empty if there are none.

        It changes no row or object, and the target need not exist. After its flip, a column has no
        obstacles; a table of its own is checked all the same.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query of the catalogue: BusyError,
                NotPermittedError, NotFoundError, CannotWriteError or InvalidInputError.
        """
        if target.name.startswith(pgvector_target.TABLE_PREFIX):
            return table_flip_obstacles(self._table)
        if self._flipped(target):
            return []
        return column_flip_obstacles(self._table, self.vector, target)

    def _flipped(self, target: Target) -> bool:
        """Tell whether a flip gave the target's name to vectors of its map."""
        name = target.name
        return (
            self.vector == old_name_after_flip(name)
            and self._table.comment_facts(name).get("carried") == target.computer_digest
        )

    def open_target(self, target: Target) -> TargetVectors:
        """Create the column or the table of new vectors with its triggers, or open it again. The
        change is one transaction. A missing or disabled trigger is made again. Invalid indexes of a
        killed build are dropped.

        Raises:
            AlreadyExistsError: The name has other data, or vectors with another digest or
                condition. Or the triggers of native vectors were off, so that some may be stale.
            InvalidInputError: The name has more than 63 bytes, PostgreSQL refuses the dimension, or
                `target.content_column` is no column.
            NotPermittedError: The role may not change the table, or may not see all rows.
            BusyError: Others hold the table for more than 5 seconds.
            NotFoundError: The table of new vectors was renamed.
            CannotWriteError: The disk is full, or the server is read-only.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses another statement: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        self._table.every_row_is_seen()
        name = target.name.removeprefix(pgvector_target.TABLE_PREFIX)
        if len(name.encode("utf-8", "surrogateescape")) > LONGEST_NAME_BYTES:
            raise InvalidInputError(
                f"--to: expected at most {LONGEST_NAME_BYTES} bytes, which is what PostgreSQL "
                f"keeps of a name, got {name!r}; choose a shorter one"
            )
        if name != target.name:
            names, digest = pgvector_target.create_or_find_table(self._table, self.vector, target)
            place_in_table = PgvectorTable(self, self._table, target, names, digest)
            place_in_table.drop_unfinished_indexes()
            return place_in_table
        with self._table.open_changes() as changes:
            made = self._table.read_computer_digest(target.name)
            triggers = self._table.triggers(self._names(target.name)["function"])
            # Also a column that was added since the table was opened.
            there = made is not None or target.name in self._table.columns
            # After a flip, carry fills the rows without a new vector.
            flipped = self._flipped(target)
            if there and made != target.computer_digest and not flipped:
                # A column of somebody else is not removed.
                removal = (
                    ", or remove the column with `nobackfill carry --rollback`" if made else ""
                )
                raise AlreadyExistsError(
                    f"{self._table.name}: column {target.name!r} exists already and was not made "
                    f"by this map; choose another --to{removal}"
                )
            if not there:
                names = self._names(target.name)
                dim = sql.SQL(str(int(target.dim)))
                changes.run("ALTER TABLE {table} ADD COLUMN {new} {type}({dim})", dim=dim, **names)
                mark = comment_with_facts(nobackfill=target.computer_digest, model=target.model)
                changes.run("COMMENT ON COLUMN {table}.{new} IS {mark}", mark=mark, **names)
                dims = self._table.declared_dim(self.vector), target.dim
                here = self._table.text("{here}")
                for step in column_properties(self._table, self.vector, here, target.name, dims):
                    changes.run_text(step)
            digest = None if flipped else self.watch(changes, target)
            if target.is_native and not flipped:
                self._check_watched(changes, target, triggers, digest, there)
        place = PgvectorColumn(self, self._table, self._names(target.name), target, flipped, digest)
        place.drop_unfinished_indexes()
        return place

    def _check_watched(
        self,
        changes: Changes,
        target: Target,
        triggers: Triggers,
        digest: str | None,
        existed: bool,
    ) -> None:
        """Record the digest of the triggers in the comment of the new column.

        Raises:
            AlreadyExistsError: Another digest was recorded, so that some native vectors may be
                stale. No map can find them.
        """
        noted = self._table.comment_facts(target.name).get("triggers")
        if existed and noted != triggers.states_digest and self.count_vectors(target.name):
            sentence = stale_sentence(
                f"column {target.name!r}",
                self._confirmation(target.name, triggers),
                "remove the column with `nobackfill carry --rollback` or `nobackfill migrate "
                "back`, and start again",
            )
            raise AlreadyExistsError(f"{self._table.name}: {sentence}")
        if noted != digest:
            changes.run(
                "COMMENT ON COLUMN {table}.{new} IS {mark}",
                mark=comment_with_facts(
                    nobackfill=target.computer_digest, model=target.model, triggers=digest
                ),
                **self._names(target.name),
            )

    def _confirmation(self, column: str, triggers: Triggers) -> str | None:
        """Write a statement that records the digest of triggers in a column's comment.

        Returns:
            The statement on one line; None where a trigger is missing or disabled.
        """
        if set(triggers.trigger_states + triggers.partition_states) != {"A"}:
            return None
        facts = self._table.comment_facts(column) | {"triggers": str(triggers.states_digest)}
        comment = comment_with_facts(self._table.comment(column), **facts)
        names = {"column": sql.Identifier(column), "comment": comment}
        return to_one_line(
            self._table.text("COMMENT ON COLUMN {here}.{column} IS {comment}", **names)
        )

    def watch(self, changes: Changes, target: Target) -> str | None:
        """Make or mend the triggers that clear a new vector whose old one, or whose content,
        changes.

        A writer that does not know the new column would leave a stale vector there. Triggers of
        earlier names are dropped. It runs in the caller's transaction.

        Args:
            changes: The transaction.
            target: The new vectors.

        Returns:
            The digest of the triggers (see `Triggers`).

        Raises:
            InvalidInputError: `target.content_column` is no column of the table.
            psycopg.Error: PostgreSQL refuses a statement; the connection's block translates it.
            NobackfillError: PostgreSQL refuses a query of the catalogue: BusyError,
                NotPermittedError, NotFoundError, CannotWriteError or InvalidInputError.
            UnavailableError: The server does not answer.
        """
        table, names = self._table, self._names(target.name)
        emptying = table.text(" AS t SET {new} = NULL WHERE t.{key} {equals} $1", **names)
        body = table.trigger_body(_BODY, emptying=emptying, **names)
        name = table.trigger_name(self.vector, target.name)
        triggers = {f"{name}_changed": _AFTER}
        watched = filter(None, (self.vector, target.content_column))
        if not any(table.is_generated(column) for column in watched):
            # The BEFORE trigger handles most changes, so that a row is written once.
            triggers[name] = _BEFORE
        if table.partitioned:
            triggers[f"{name}_moved"] = _MOVED
        changes.drop_other_triggers(**names)
        content = table.changed_condition(target.content_column)
        return changes.create_triggers(body, triggers, content=content, **names)

    def drop_new_vectors(self, name: str) -> bool:
        """Remove the column or the table of new vectors, with its triggers and indexes.

        Returns:
            False, and nothing changes, if nobackfill created none of this name, or a flip gave it
            the name of the old vectors.

        Raises:
            BusyError: Others hold the table for more than 5 seconds.
            InvalidInputError: Another object, such as a view, depends on the vectors.
            NotFoundError: The table of new vectors was renamed.
            NotPermittedError: The role does not own the table.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses another statement: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        if name.startswith(pgvector_target.TABLE_PREFIX):
            return pgvector_target.remove_table(self._table, self.vector, name)
        names = self._names(name)
        with self._table.open_changes() as changes:
            if self._table.read_computer_digest(name) is None:
                return False
            changes.drop_other_triggers(**names)
            changes.run("DROP FUNCTION IF EXISTS {function}() CASCADE", **names)
            changes.run("ALTER TABLE {table} DROP COLUMN {new}", **names)
        return True

    def record_model(self, model: str) -> None:
        """Write the fingerprint of the model whose space the vectors are in into the column's
        comment.

        The owner's part of the comment stays. An earlier fingerprint is replaced.

        Raises:
            BusyError: Others hold the table for more than 5 seconds.
            NotPermittedError: The role does not own the table.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses another statement: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        said = self._table.comment_facts(self.vector) | {"model": model}
        with self._table.open_changes() as changes:
            changes.run(
                "COMMENT ON COLUMN {table}.{old} IS {said}",
                said=comment_with_facts(self._table.comment(self.vector), **said),
                old=sql.Identifier(self.vector),
            )

    def migration_lock(self) -> AbstractContextManager[Callable[[], None]]:
        """Keep other migrations of the table out for the block, by an advisory lock on a connection
        of its own; readers and writers do not notice it.

        It waits up to 3 s. The block gets a function that raises UnavailableError where the server
        has ended the lock's session.

        Raises:
            BusyError: Another migration holds the lock.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the user of the lock's own connection.
            NotFoundError: There is no such database any more.
        """
        return self._table.lock("migrate", OTHER_MIGRATION_MESSAGE, wait_seconds=LOCK_WAIT_SECONDS)

    def read_migration_digest(self, column: str) -> str | None:
        """Return the digest of new vectors, from their column's comment (see `Target`).

        None for a column that nobackfill did not make, for one that a flip has renamed, and for an
        unknown one.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query of the catalogue: BusyError,
                NotPermittedError, NotFoundError, CannotWriteError or InvalidInputError.
        """
        return self._table.read_computer_digest(column)

    def flip_digest(self) -> str | None:
        """Return the digest of the map or model that computed the vectors, from the column's
        comment.

        None if no flip put them there.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query of the catalogue: BusyError,
                NotPermittedError, NotFoundError, CannotWriteError or InvalidInputError.
        """
        return self._table.comment_facts(self.vector).get("carried")

    def flip_state(self, computer_digest: str) -> Literal["old", "flipped", "finished", "unknown"]:
        """Return whose vectors have the source's name; the states are those of Reversible.

        Whether the old vectors exist is known from the columns at the opening, or at the last
        change through this object.

        Args:
            computer_digest: Digest of the new vectors.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query of the catalogue: BusyError,
                NotPermittedError, NotFoundError, CannotWriteError or InvalidInputError.
        """
        kept = old_name_after_flip(self.vector) in self._table.columns
        if self.flip_digest() != computer_digest:
            return "unknown" if kept else "old"
        return "flipped" if kept else "finished"

    def flip_back(self, new_name: str, *, allow_loss: bool = False) -> int:
        """Give the old vectors their name back and drop the new ones, in one transaction that locks
        the table. Objects that depend on the new vectors move to the old ones.

        `metric` and `uses_halfvec` keep what this object has read before.

        Args:
            new_name: The name that the new vectors had before the flip.
            allow_loss: Go on where rows have only a new vector: they lose it.

        Returns:
            The number of rows that lost their only vector.

        Raises:
            NotFoundError: There are no old vectors.
            InvalidInputError: Rows would lose their only vector, and `allow_loss` is False or the
                column is NOT NULL. Or an object cannot be moved. Or the old vectors may be stale,
                because the flip was not reversible or triggers were off. Nothing is changed.
            NotPermittedError: Row-level security may hide rows from this role, or it does not own
                the table.
            BusyError: Others hold the table for more than 5 seconds.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses another statement: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        table, old = self._table, old_name_after_flip(self.vector)
        names = self._names(old) | {"name": sql.Identifier(new_name)}
        if old not in table.columns:
            raise NotFoundError(
                f"{table.name}: this table has no column {old!r}, where a flip leaves the old "
                "vectors, so there is no flip to undo"
            )
        # A row that is hidden would lose its only vector, uncounted.
        table.every_row_is_seen()
        triggers = table.triggers(names["function"])
        recorded = table.comment_facts(old).get("triggers")
        if not triggers.trigger_states or recorded is None:
            raise InvalidInputError(
                f"{table.name}: column {old!r} may hold stale vectors, because no trigger has "
                "cleared them since the flip; only a flip of `nobackfill migrate` can be undone"
            )
        if triggers.states_digest != recorded:
            confirmation = self._confirmation(old, triggers)
            remedy = (
                None if confirmation else "to go back, embed the items with the old model again"
            )
            sentence = stale_sentence(f"column {old!r}", confirmation, remedy)
            raise InvalidInputError(f"{table.name}: {sentence}")

        def steps() -> list[str]:
            moved = dependent_moves(
                table, self.vector, (table.declared_dim(self.vector), table.declared_dim(old) or 0)
            )
            if moved.immovable_objects:
                raise InvalidInputError(
                    f"{table.name}: these objects of the database depend on the new vectors, and "
                    f"cannot be changed to the old ones: {join_few(moved.immovable_objects)}; "
                    "drop them and run the command again"
                )
            rename = "ALTER TABLE {table} RENAME COLUMN {old} TO {name}"
            return [
                *table.search_path_statement(),
                table.text("DROP FUNCTION {function}() CASCADE", **names),
                *moved.drop_statements,
                table.text(rename, **names),
                table.text("ALTER TABLE {table} RENAME COLUMN {new} TO {old}", **names),
                *moved.create_statements,
                table.text("ALTER TABLE {table} DROP COLUMN {name}", **names),
            ]

        demanded = table.query_one(
            "SELECT attnotnull FROM pg_attribute WHERE attrelid = {oid} AND attname = {column}",
            oid=table.oid,
            column=self.vector,
        )
        with table.run_flip(steps):
            lost = int(
                table.query_one(
                    "SELECT count(*) FROM {table} WHERE {old} IS NOT NULL AND {new} IS NULL",
                    **names,
                )
            )
            if lost and (demanded or not allow_loss):
                ending = (
                    f"{self.vector!r} is NOT NULL: delete these rows, or fill {old!r} with the "
                    "old model"
                    if demanded
                    else "to lose them, run `nobackfill migrate back --yes`"
                )
                raise InvalidInputError(
                    f"{table.name}: {lost} rows were written since the flip and have no old "
                    f"vector; {ending}"
                )
        return lost

    def drop_old(self) -> None:
        """Drop the old vectors after a flip, with their triggers and indexes. They cannot be
        restored.

        Raises:
            NotFoundError: There are no old vectors, as at a second call.
            InvalidInputError: An object of the database still depends on them.
            BusyError: Others hold the table for more than 5 seconds.
            NotPermittedError: The role does not own the table.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses another statement: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        old = old_name_after_flip(self.vector)
        if old not in self._table.columns:
            raise NotFoundError(
                f"{self._table.name}: this table has no column {old!r}, where a flip leaves the "
                "old vectors, so there are no old vectors to drop"
            )
        with self._table.open_changes() as changes:
            names = self._names(old)
            changes.run("DROP FUNCTION IF EXISTS {function}() CASCADE", **names)
            changes.run("ALTER TABLE {table} DROP COLUMN {new}", **names)

    def _names(self, new: str) -> dict[str, sql.Identifier]:
        """Return quoted names: both columns, their type, and the trigger function. The function is
        in the schema of the table, where the table's owner may create objects."""
        return {
            "old": sql.Identifier(self.vector),
            "new": sql.Identifier(new),
            "type": self._table.pgvector_name(self._table.vector_type(self.vector)),
            "function": sql.Identifier(
                self._table.schema, self._table.trigger_name(self.vector, new)
            ),
        }

    def count_vectors(self, column: str) -> int:
        """Count the rows with a vector in a column; 0 if there is no such column. Only rows of the
        condition count.

        A column that others added since the opening counts as missing.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        if column not in self._table.columns:
            return 0
        return int(
            self._table.query_one(
                "SELECT count(*) FROM {table} WHERE {column} IS NOT NULL AND {chosen}",
                column=sql.Identifier(column),
            )
        )

    def rows(
        self,
        column: str,
        window: Window,
        missing_column: str | None = None,
        ids: Sequence[str] | None = None,
    ) -> Rows:
        """Read the rows of a window that have a vector in `column` and none in `missing_column`.

        Args:
            column: Column of vectors.
            window: A range of keys.
            missing_column: A column that must be NULL; None for all rows.
            ids: Keys of the rows as text; None for all rows.

        Returns:
            The rows of the condition, sorted by key, with the place and the writer of each row as
            its version. Unknown ids are left out.

        Raises:
            InvalidInputError: The vectors have several dimensions. There is no such column, or an
                id is no value of the key's type.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        found = self._table.copy_out(
            "SELECT t.{key}::text, {column}::{vector}, t.ctid, t.xmin, t.tableoid "
            "FROM {table} t WHERE {column} IS NOT NULL AND {chosen} AND {condition} AND {within} "
            "AND {which} ORDER BY t.{key}",
            column=sql.Identifier(column),
            which=sql.SQL("true")
            if ids is None
            else self._table.compose(
                "t.{key} = ANY({ids}::{kind}[])",
                ids=list(ids),
                kind=sql.SQL(self._table.key_type),
            ),
            condition=sql.SQL("true")
            if missing_column is None
            else sql.SQL("{} IS NULL").format(sql.Identifier(missing_column)),
            within=self._table.window_condition(window, "t"),
        )
        return decode_vector_rows(found, self._table.name)


class PgvectorSelection(PgvectorSource):
    """The rows of a table that fulfil a condition, because the table holds vectors of several
    models.

    Their new vectors go into a table of their own, because other rows share the column. A flip adds
    the foreign key of that table; the old vectors stay in the column. The condition is an
    expression that PostgreSQL accepts in an index: over the table's own columns, and immutable.

    Every method may also raise the errors of PgvectorSource.

    Args:
        address, table, key, vector, where: As for `PgvectorSource`.
    """

    @property
    def flip_name(self) -> str:
        """Return the beginning of the name of the table of new vectors, `table:NAME`, as `carry
        --to` takes it.

        Nothing is read.
        """
        return f"{pgvector_target.TABLE_PREFIX}{self._table.relation}"

    def facts(self) -> Facts:
        # The comment of the column would name one model for the rows of all.
        """Return the facts of PgvectorSource without a model: the column's comment would name one
        model for the rows of all.

        Raises:
            InvalidInputError: The column has indexes of several metrics.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query of the catalogue: BusyError,
                NotPermittedError, NotFoundError, CannotWriteError or InvalidInputError.
        """
        return replace(super().facts(), model=None)

    def record_model(self, model: str) -> None:
        """Do nothing: other rows of the column have another model."""

    def flip_obstacles(self, target: Target) -> list[str]:
        """Return sentences about obstacles to a flip to `target`: a name that is no `table:NAME`,
        or a key that no foreign key may reference.

        Empty if the store can flip. Nothing is changed.

        Raises:
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query of the catalogue: BusyError,
                NotPermittedError, NotFoundError, CannotWriteError or InvalidInputError.
        """
        return self._column_refusal(target) or super().flip_obstacles(target)

    def open_target(self, target: Target) -> TargetVectors:
        """Create the table of new vectors with its triggers, or open it again. The change is one
        transaction. A missing or disabled trigger is made again.

        Raises:
            InvalidInputError: The name is no `table:NAME` or too long, PostgreSQL refuses the
                dimension, or `target.content_column` is no column.
            AlreadyExistsError: The name has other data, or vectors with another digest or
                condition; or some native vectors may be stale.
            NotPermittedError: The role may not change the table, or may not see all rows.
            BusyError: Others hold the table for more than 5 seconds.
            NotFoundError: The table of new vectors was renamed.
            CannotWriteError: The disk is full, or the server is read-only.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses another statement: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        if refusal := self._column_refusal(target):
            raise InvalidInputError(f"{self._table.name}: {refusal[0]}")
        return super().open_target(target)

    @staticmethod
    def _column_refusal(target: Target) -> list[str]:
        if target.name.startswith(pgvector_target.TABLE_PREFIX):
            return []
        return [
            f"expected --to {pgvector_target.TABLE_PREFIX}NAME with --where, got {target.name!r}; "
            "a new column would belong to all rows, not only to those of --where"
        ]

    def _place(self, name: str) -> pgvector_target.NewVectorTable | None:
        """Find a table of new vectors; None where there is none of this table."""
        place = pgvector_target.find_table(self._table, self.vector, name)
        return place if place.belongs_to_source else None

    def count_vectors(self, column: str) -> int:
        """Count the vectors in a table of new vectors (`table:NAME`), or the rows of the condition
        with a vector in a column.

        0 if there is no such table of this source, or no such column.

        Raises:
            NotFoundError: The table was renamed.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        if not column.startswith(pgvector_target.TABLE_PREFIX):
            return super().count_vectors(column)
        place = self._place(column)
        if place is None:
            return 0
        query: LiteralString = "SELECT count(*) FROM {new_table} WHERE {old} IS NOT NULL"
        return int(self._table.query_one(query, **place.sql_names))

    def read_migration_digest(self, column: str) -> str | None:
        """Return the digest of the vectors in a table of new vectors (see `Target`).

        None if there is no such table of this source, or a flip has taken place.

        Raises:
            NotFoundError: The table was renamed.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query of the catalogue: BusyError,
                NotPermittedError, NotFoundError, CannotWriteError or InvalidInputError.
        """
        place = self._place(column)
        return None if place is None else place.comment_facts.get("nobackfill")

    def flip_state(self, computer_digest: str) -> Literal["old", "flipped", "finished", "unknown"]:
        """Return whether a flip to the table of new vectors that `migrate` names has taken place;
        the states are those of Reversible.

        "finished" also after a flip by `carry`, which cannot be undone.

        Raises:
            NotFoundError: The table was renamed.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses a query of the catalogue: BusyError,
                NotPermittedError, NotFoundError, CannotWriteError or InvalidInputError.
        """
        place = self._place(f"{self.flip_name}_new")
        if place is None or "nobackfill" in place.comment_facts:
            return "old"
        if place.comment_facts.get("carried") != computer_digest:
            return "unknown"
        return "flipped" if "flipped" in place.comment_facts else "finished"

    def flip_back(self, new_name: str, *, allow_loss: bool = False) -> int:
        """Drop the table of new vectors, in one transaction that locks it.

        Args:
            new_name: Its name, as `carry --to` takes it.
            allow_loss: Go on where rows of it were written since the flip. Their old vectors,
                which may be stale, are cleared.

        Returns:
            The number of these rows.

        Raises:
            NotFoundError: There is no such table, or no flip by `nobackfill migrate`. A second call
                raises it, too.
            InvalidInputError: Rows were written and `allow_loss` is False, or the old vectors
                cannot be NULL; or the table was restored from a dump, so that this cannot be known.
            NotPermittedError: Row-level security may hide rows from this role, or it does not own
                the table.
            BusyError: Others hold the table for more than 5 seconds.
            UnavailableError: The server does not answer.
            NobackfillError: PostgreSQL refuses another statement: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        table, place = self._table, self._place(new_name)
        if place is None or "flipped" not in place.comment_facts:
            raise NotFoundError(
                f"{table.name}: there is no table {new_name!r} of new vectors, so there is no "
                "flip to undo"
            )
        table.every_row_is_seen()
        names, new_table = place.sql_names, place.sql_names["new_table"].as_string()
        relation, _, writer = place.comment_facts["flipped"].partition(" ")
        if relation != str(table.query_one("SELECT to_regclass({name})::oid", name=new_table)):
            raise InvalidInputError(
                f"{table.name}: {new_table} was restored from a dump since the flip, so the rows "
                "that were written since then are not known; if there are none, run DROP TABLE "
                f"{new_table}"
            )
        demanded = table.query_one(
            "SELECT attnotnull FROM pg_attribute WHERE attrelid = {oid} AND attname = {column}",
            oid=table.oid,
            column=self.vector,
        )
        with table.open_changes() as changes:
            changes.run("LOCK TABLE {new_table} IN ACCESS EXCLUSIVE MODE", **names)
            changes.run(
                "CREATE TEMPORARY TABLE nobackfill_lost ON COMMIT DROP AS SELECT {key} AS key "
                "FROM {new_table} WHERE age(xmin) < age({writer}::xid)",
                writer=writer,
                **names,
            )
            ((lost,),) = changes.query_all("SELECT count(*) FROM nobackfill_lost")
            if lost and (demanded or not allow_loss):
                ending = (
                    f"{self.vector!r} is NOT NULL: write these vectors again by the old model, "
                    f"then run DROP TABLE {new_table}"
                    if demanded
                    else "to clear their old vectors, run `nobackfill migrate back --yes`"
                )
                raise InvalidInputError(
                    f"{table.name}: {lost} rows were written since the flip, so their old vectors "
                    f"may be stale; {ending}"
                )
            if lost:
                changes.run(
                    # A row that has left the condition has a vector of another model by now.
                    "UPDATE {table} SET {old} = NULL WHERE {chosen} "
                    "AND {key} IN (SELECT l.key FROM nobackfill_lost l)",
                    **names,
                )
            changes.run("DROP TABLE {new_table}", **names)
        return int(lost)

    def drop_old(self) -> None:
        """Record that the flip cannot be undone any more. The old vectors stay, because other rows
        share their column. A second call changes nothing. Before a flip, it changes nothing either.

        Raises:
            NotFoundError: There is no table of new vectors. The table was renamed.
            BusyError: Others hold the table for more than 5 seconds.
            UnavailableError: The server does not answer.
            NotPermittedError: The role does not own the table of new vectors.
            NobackfillError: PostgreSQL refuses another statement: BusyError, NotPermittedError,
                NotFoundError, CannotWriteError or InvalidInputError.
        """
        place = self._place(f"{self.flip_name}_new")
        if place is None:
            raise NotFoundError(
                f"{self._table.name}: this table has no second table of new vectors, so there is "
                "no migration to finish"
            )
        facts = {name: fact for name, fact in place.comment_facts.items() if name != "flipped"}
        with self._table.open_changes() as changes:
            changes.run(
                "COMMENT ON TABLE {new_table} IS {comment}",
                comment=comment_with_facts(**facts),
                **place.sql_names,
            )


def _other(kind: str) -> bool:
    """Return whether a type of pgvector cannot be migrated."""
    return kind.rpartition(".")[2].startswith(("bit", "sparsevec"))
