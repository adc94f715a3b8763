"""A table of LanceDB in a folder as a source.

New vectors go into a column of the same rows, so a deleted row takes its new vector along. LanceDB
has no triggers. A second column holds, for each row, a digest of what the new vector was computed
from, and of the new vector itself. Each run of `carry` compares these digests and computes changed
rows again. The flip renames both columns in one version of the table.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np

from nobackfill.adopt.sources.source import (
    CONDITION_HINDERS_FLIP,
    ColumnValues,
    Facts,
    MigrationCosts,
    MigrationTrial,
    Rows,
    SearchMetric,
    Target,
    Window,
    lock_by_file,
    old_name_after_flip,
    parse_store_metric,
    refuse_lost_vectors,
    time_reading,
)
from nobackfill.errors import (
    AlreadyExistsError,
    BusyError,
    ConfigurationError,
    InvalidInputError,
    NotFoundError,
    join_few,
)
from nobackfill.extras import require_extra
from nobackfill.vectors import Vectors

with require_extra("lancedb"):
    import lancedb
    import pyarrow as pa
    import pyarrow.compute as pc
    from lancedb import index as indexes

_METRICS: Mapping[str, SearchMetric] = {
    "cosine": "cosine", "l2": "squared_l2", "dot": "inner_product",
}  # fmt: skip
# The metric of a search of LanceDB without an index that names none.
_DEFAULT = "l2"
# Indexes of vectors that a flip builds again, by the name that LanceDB lists.
_INDEXES: Mapping[str, Any] = {
    "IvfFlat": indexes.IvfFlat, "IvfSq": indexes.IvfSq, "IvfPq": indexes.IvfPq,
    "IvfRq": indexes.IvfRq, "IvfHnswPq": indexes.HnswPq, "IvfHnswSq": indexes.HnswSq,
    "IvfHnswFlat": indexes.HnswFlat,
}  # fmt: skip
# The key of a column's metadata with our JSON: "map", "model" and "to" of the Target.
_MARK = "nobackfill"
# Characters of a digest; the column holds two for each row.
_DIGEST = 32
# Rows that are copied to a temporary folder to estimate what a migration takes.
_TRIAL_ROWS = 10_000
# A window is found by a scan of the whole table. To read, write and check it takes so many scans
# as to read it alone, measured with 10,000 to 400,000 rows.
_SCANS = 3
# Keys in one condition.
_PAGE = 1000
# Keys that are compared with their neighbours at once.
_KEYS_AT_ONCE = 100_000
# Words in LanceDB's errors when others wrote at the same time.
_CONFLICTS = ("conflict", "concurrent", "Retryable", "Too many")


class LanceSource:
    """A table with a column of vectors.

    Args:
        folder: Folder of the database.
        table: Name of the table.
        vector: Column of the old vectors; None for the only one that no map made.
        key: Column of unique keys, text or integers; None for `id`.
        where: Condition in SQL of the rows that the source has; None for all. Only these rows are
            read, counted, found and migrated, and the table cannot flip.

    Raises:
        NotFoundError: There is no such folder or table; the error lists tables.
        InvalidInputError: The place is a server or an object store; the table has no such column,
            or one of a type that is not migrated; or LanceDB refuses the folder or the condition.
        BusyError: Others write the table at this moment.
    """

    flip_renames = True

    def __init__(
        self,
        folder: str,
        table: str,
        vector: str | None = None,
        key: str | None = None,
        *,
        where: str | None = None,
    ) -> None:
        if "://" in folder:
            raise InvalidInputError(
                "lancedb: expected a folder of this machine as in lancedb:FOLDER#TABLE; tables in "
                "object stores and on servers cannot be migrated in place, so copy the database to "
                "a folder"
            )
        if not Path(folder).is_dir():
            raise NotFoundError(
                f"{folder}: there is no such folder; name the folder of a LanceDB database"
            )
        self._folder, self._name, self._process = folder, table, os.getpid()
        with _translate_errors(table):
            # Each call sees what others have committed.
            database = lancedb.connect(folder, read_consistency_interval=timedelta(0))
            names = database.list_tables().tables
            if table not in names:
                raise NotFoundError(
                    f"{table}: no such table in {folder}; its tables are "
                    f"{join_few(names) or 'none'}"
                )
            self._opened = database.open_table(table)
        schema = self.schema
        self.key = key or "id"
        if self.key not in schema.names:
            raise InvalidInputError(
                f"{table}: expected a column of keys {self.key!r}, found {join_few(schema.names)}; "
                "name one with --key"
            )
        kind = schema.field(self.key).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)) and not (
            pa.types.is_integer(kind)
        ):
            raise InvalidInputError(
                f"{table}.{self.key}: expected keys of text or integers, got {kind}; name another "
                "column with --key"
            )
        names = [
            name
            for name in schema.names
            if _vector_dim(schema.field(name))
            and (vector is not None or not self._is_new(name, schema))
        ]
        if (vector is None and len(names) != 1) or (vector is not None and vector not in names):
            others = [one.name for one in schema if _is_list(one.type) and not _vector_dim(one)]
            unknown = f" ({join_few(others)} are lists of another kind)" if others else ""
            raise InvalidInputError(
                f"{table}: expected {'one column' if vector is None else repr(vector)} of vectors "
                f"of fixed size and of floats, found {join_few(names) or 'none'}{unknown}; name "
                "one with --vector"
            )
        self.vector = vector or names[0]
        self.where = where
        if where is not None:
            _check_brackets(where)
            with _translate_errors(f"{table}: --where {where}"):
                self.table.count_rows(where)

    def _and_where(self, *conditions: str) -> str | None:
        """Join conditions with that of the source; None if there are none."""
        own = [] if self.where is None else [f"({self.where}\n)"]
        return " AND ".join([*own, *conditions]) or None

    @property
    def table(self) -> Any:
        """Return the table of LanceDB, which sees what others have committed.

        Raises:
            ConfigurationError: The process was forked after the table was opened.
        """
        if os.getpid() != self._process:
            raise ConfigurationError(
                f"{self._name}: LanceDB was opened before this process was forked, and does not "
                "work after a fork; open it after the fork, in each process"
            )
        return self._opened

    @property
    def schema(self) -> Any:
        """Return the present schema of the table.

        Raises:
            InvalidInputError: LanceDB refuses this, also because a file cannot be read.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
        """
        with _translate_errors(self._name):
            return self.table.schema

    @property
    def flip_name(self) -> str:
        """Return the column that a flip renames: that of the source's vectors.

        Raises:
            InvalidInputError: The source has a condition.
        """
        if self.where is not None:
            raise InvalidInputError(f"{self._name}: {CONDITION_HINDERS_FLIP}")
        return self.vector

    def _is_new(self, name: str, schema: Any) -> bool:
        """Return whether a column holds new vectors that were not flipped to."""
        return _column_mark(schema, name).get("to") == name

    def facts(self) -> Facts:
        """Return name, dimension, metric and model of the old vectors, and the names of other
        columns.

        The model is None if nobody recorded it. The other columns include those of new vectors and
        of digests.

        Raises:
            InvalidInputError: The indexes have different metrics, or one that is not supported; or
                LanceDB refuses this.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
        """
        schema = self.schema
        others = tuple(name for name in schema.names if name not in (self.key, self.vector))
        model = _column_mark(schema, self.vector).get("model")
        if self.where is not None and not self._is_new(self.vector, schema):
            # The column's metadata would name one model for the rows of all.
            model = None
        dim = _vector_dim(schema.field(self.vector))
        return Facts(f"{self._name}.{self.vector}", dim, self.metric(), model, others)

    def vector_indexes(self) -> list[tuple[str, str, str]]:
        """Return name, type and metric of each index of the old vectors.

        The metric is empty if LanceDB does not tell it. An index over several columns is not
        listed.

        Raises:
            BusyError: Others write the table at this moment.
            InvalidInputError: LanceDB refuses this, also because a file cannot be read.
            ConfigurationError: The process was forked after the table was opened.
        """
        with _translate_errors(self._name):
            result = [one for one in self.table.list_indices() if one.columns == [self.vector]]
            stats = [self.table.index_stats(one.name) for one in result]
        return [
            (one.name, one.index_type, str((stat and stat.distance_type) or ""))
            for one, stat in zip(result, stats, strict=True)
        ]

    def metric(self) -> SearchMetric | None:
        """Return the metric of the vector column's indexes; None if LanceDB does not tell it.

        Without an index it is squared L2, by which LanceDB then searches unless a query names
        another metric.

        Raises:
            InvalidInputError: its indexes have different metrics, or one that is not supported; or
                LanceDB refuses this.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
        """
        metrics = {metric for _, _, metric in self.vector_indexes()} or {_DEFAULT}
        if len(metrics) > 1:
            raise InvalidInputError(
                f"{self._name}.{self.vector}: expected indexes of one metric, found "
                f"{join_few(sorted(metrics))}; drop the indexes that no query uses"
            )
        return parse_store_metric(next(iter(metrics), ""), _METRICS, self._name)

    def count(self) -> int:
        """Count the rows of the source's condition that have an old vector; 0 if the column is
        gone.

        Raises:
            InvalidInputError: LanceDB refuses this, also because a file cannot be read.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
        """
        return self.count_vectors(self.vector)

    def count_vectors(self, column: str) -> int:
        """Count the rows with a value in a column; 0 if the table has no such column.

        Args:
            column: Any column, also one that holds no vectors.

        Raises:
            InvalidInputError: The name has a backtick, or LanceDB refuses this.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
        """
        if column not in self.schema.names:
            return 0
        with _translate_errors(self._name):
            present = f"{_quoted_column(column)} IS NOT NULL"
            return int(self.table.count_rows(self._and_where(present)))

    def windows(self, rows_per_window: int) -> Iterator[Window]:
        """Divide all keys into windows of `rows_per_window` rows; read all keys at the first one.

        The last window has no upper end, so that it includes later rows. An empty table gives one
        window. Rows that are added before the last window's lower end lie in the earlier windows.
        Rows without a vector count, too.

        Args:
            rows_per_window: The size of a window, at least 1; all but the last have exactly this
                many rows.

        Raises:
            InvalidInputError: A row has no key, or two rows have the same; or LanceDB refuses this,
                also because a file cannot be read.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
        """
        lower = None
        for last in self._bounds(rows_per_window):
            yield Window(lower, last)
            lower = last
        # Open at the end, so that it includes rows that are added meanwhile.
        yield Window(lower)

    def _bounds(self, rows: int) -> list[Any]:
        """Return each key after which a window of `to_rows` rows ends, but for the last window."""
        column = self.select_rows([self.key], self._and_where())[self.key]
        if column.null_count:
            raise InvalidInputError(
                f"{self._name}.{self.key}: expected a key in every row, found rows without one; "
                "fill the column, or name another with --key"
            )
        # As values of Python, 10 million keys would take more than 1 GB.
        keys = column.combine_chunks()
        order = pc.sort_indices(keys).to_numpy()
        duplicates: list[Any] = []
        for first in range(0, len(order), _KEYS_AT_ONCE):
            part = keys.take(pa.array(order[first : first + _KEYS_AT_ONCE + 1]))
            duplicates += part[1:].filter(pc.equal(part[1:], part[:-1])).to_pylist()
        if duplicates:
            raise InvalidInputError(
                f"{self._name}.{self.key}: expected unique keys, found "
                f"{join_few(map(repr, duplicates))} twice; delete one of each, or name another "
                "column with --key"
            )
        bounds: list[Any] = keys.take(pa.array(order[rows - 1 : -1 : rows])).to_pylist()
        return bounds

    def select_rows(self, columns: Sequence[str], where: str | None) -> Any:
        """Read columns of the rows that fulfil a condition, as a table of Arrow.

        Args:
            columns: Names of columns; a repeated one is read once.
            where: A condition of SQL; None for all rows. Never build it from a caller's text.

        Returns:
            The table; its rows are in any order.

        Raises:
            InvalidInputError: LanceDB refuses the columns or the condition, or a file cannot be
                read.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
        """
        with _translate_errors(self._name):
            query = self.table.search().select(list(dict.fromkeys(columns)))
            return (query if where is None else query.where(where)).to_arrow()

    def read_window(
        self, window: Window, column: str, columns: Sequence[str] = (), *, own_rows: bool = True
    ) -> Any:
        """Read the rows of a window with a value in `column`, in the order of their keys.

        Args:
            window: The range of keys, without its lower and with its upper end.
            column: Rows without a value here are left out.
            columns: Further columns to read.
            own_rows: Only rows of the source's condition; False for all rows.

        Returns:
            A table of Arrow with the key, `column` and `columns`.

        Raises:
            InvalidInputError: There is no such column, a name has a backtick, or LanceDB refuses
                this.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
        """
        bounds = [(">", window.lower), ("<=", window.upper)]
        conditions = [f"{_quoted_column(column)} IS NOT NULL"] + [
            f"{_quoted_column(self.key)} {sign} {_sql_literal(bound)}"
            for sign, bound in bounds
            if bound is not None
        ]
        chosen = self._and_where(*conditions) if own_rows else " AND ".join(conditions)
        return self.select_rows([self.key, column, *columns], chosen).sort_by(self.key)

    def read(self, window: Window) -> Rows:
        """Read the old vectors of a window, by increasing key; rows without one are left out.

        Keys are above the window's lower end and up to its upper one. NaN passes.

        Raises:
            InvalidInputError: LanceDB refuses this, also because a file cannot be read.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
        """
        return self.to_rows(self.read_window(window, self.vector), self.vector)

    def to_rows(self, result: Any, column: str) -> Rows:
        """Convert rows of Arrow to Rows, with the vectors of a column, float32 [n, dim].

        Rows without the vector are left out.

        Args:
            result: The rows, with the key and the column.
            column: The column of vectors.

        Raises:
            KeyError: `result` lacks the key or the column.
            ValueError, AttributeError: The column holds no vectors of one dimension.
        """
        # Arrow's flatten drops them, so that later vectors would belong to wrong keys.
        result = result.filter(result[column].is_valid())
        keys = result[self.key].to_pylist()
        dim = _vector_dim(result.schema.field(column)) or 0
        return Rows([str(one) for one in keys], _vectors(result[column], dim), keys)

    def read_column(self, window: Window, name: str) -> ColumnValues:
        """Read another column of a window as text, without the rows where it is empty.

        Texts come by increasing key; an empty text counts as empty. Other values are written as
        Python's `str` does.

        Raises:
            InvalidInputError: There is no such column, its name has a backtick, or LanceDB refuses
                this.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
        """
        self._check_column(name)
        result = self.read_window(window, name)
        return ColumnValues(*_filled_texts(result, self.key, name))

    def _check_column(self, name: str) -> None:
        if name not in self.schema.names:
            raise InvalidInputError(
                f"table {self._name}: no column {name!r}; correct the name. The columns are "
                f"{join_few(self.schema.names)}"
            )

    def nearest(self, vector: Vectors, count: int, new_name: str | None = None) -> list[str]:
        """Search the ids nearest to a vector, nearest first.

        The metric of the old vectors is used (`metric`), or cosine if it is unknown. With an index,
        the search is approximate. Rows without a vector are not found. The order of equal distances
        is arbitrary.

        Args:
            vector: float32 [dim].
            count: The most ids to return, at least 1.
            new_name: Column of new vectors to search; None for the old ones.

        Raises:
            InvalidInputError: There is no such column, `vector` has another dimension, or the
                indexes have different metrics; or LanceDB refuses this.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
        """
        column = new_name or self.vector
        self._check_column(column)
        metric = self.metric() or "cosine"
        theirs = next(name for name, ours in _METRICS.items() if ours == metric)
        with _translate_errors(self._name):
            query = self.table.search(np.asarray(vector, np.float32), vector_column_name=column)
            present = self._and_where(f"{_quoted_column(column)} IS NOT NULL")
            query = query.distance_type(theirs).where(present)
            result = query.limit(count).select([self.key, "_distance"]).to_arrow()
        return [str(one) for one in result[self.key].to_pylist()]

    def _rows_by_id(self, ids: Sequence[str], column: str) -> Any:
        kind = self.schema.field(self.key).type
        literals = [
            _sql_literal(key)
            for one in dict.fromkeys(ids)
            if (key := _parse_key(one, kind)) is not None
        ]
        if not literals:
            return self.select_rows([self.key, column], "false")
        keys = ", ".join(literals)
        condition = self._and_where(
            f"{_quoted_column(self.key)} IN ({keys})", f"{_quoted_column(column)} IS NOT NULL"
        )
        return self.select_rows([self.key, column], condition)

    def lookup(self, ids: Sequence[str]) -> Rows:
        """Read old vectors by id, in any order; unknown ids, and rows without one, are left out.

        Args:
            ids: Keys as text; a repeated one counts once, and a text that is no integer matches no
                integer key.

        Raises:
            InvalidInputError: LanceDB refuses this, also because a file cannot be read.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
        """
        return self.to_rows(self._rows_by_id(ids, self.vector), self.vector)

    def texts(self, ids: Sequence[str], column: str) -> dict[str, str]:
        """Read another column as text by id, without the rows where it is empty.

        Other values are written as Python's `str` does. The order is any.

        Args:
            ids: Keys as text; unknown ones are left out. A repeated one counts once, and a text
                that is no integer matches no integer key.

        Raises:
            InvalidInputError: There is no such column, its name has a backtick, or LanceDB refuses
                this.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
        """
        self._check_column(column)
        result = _filled_texts(self._rows_by_id(ids, column), self.key, column)
        return dict(zip(*result, strict=True))

    def close(self) -> None:
        """Do nothing: LanceDB keeps no lock."""

    def estimate_costs(self, trial: MigrationTrial) -> MigrationCosts:
        """Estimate the seconds of a migration by one of the first rows, in a temporary folder.

        Returns:
            Seconds of an item. The index is unknown if the old vectors have one.

        Raises:
            InvalidInputError: LanceDB refuses this, also because a file cannot be read.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
            OSError: The temporary files cannot be written.
            Exception: Any error of `trial.carry_seconds`.
        """
        # Other columns stay where they are: a migration does not read or write them.
        rows = self.read_window(next(self.windows(_TRIAL_ROWS)), self.vector)
        with TemporaryDirectory(prefix="nobackfill-fit-") as folder:
            with _translate_errors(self._name):
                # The table's metadata may name functions that embed texts.
                plain = rows.replace_schema_metadata(None)
                lancedb.connect(folder).create_table(self._name, plain)
            scratch = LanceSource(folder, self._name, self.vector, self.key)
            seconds = trial.carry_seconds(scratch)
            larger = max(0.0, time_reading(self) - time_reading(scratch))
        seconds += _SCANS * larger
        return MigrationCosts(seconds, None if self.vector_indexes() else 0.0)

    def warnings(self, new_name: str) -> list[str]:
        """Return a warning if the metric is LanceDB's default; writing has no side effects.

        Raises:
            BusyError: Others write the table at this moment.
            InvalidInputError: LanceDB refuses this, also because a file cannot be read.
            ConfigurationError: The process was forked after the table was opened.
        """
        if self.vector_indexes():
            return []
        return [
            f"{self._name}.{self.vector} has no index, so its metric is taken as squared L2, which "
            "LanceDB uses then; if your queries name another metric, first build an index with it, "
            f"such as table.create_index({self.vector!r}, config=IvfFlat(distance_type='cosine')), "
            "and judge again"
        ]

    def flip_obstacles(self, target: Target) -> list[str]:
        """Return sentences about what prevents a flip to `target`; empty if nothing does.

        They are a condition, a column of an earlier flip, embedding functions of the table, and
        indexes that cannot be built again. Rows without a new vector, and a missing column, are no
        obstacle here. Writes nothing. After the flip to `target`, there are none.

        Args:
            target: The column's name and dimension, and the digest of the map.

        Raises:
            InvalidInputError: LanceDB refuses this, also because a file cannot be read.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
        """
        schema, sentences = self.schema, []
        if self.where is not None:
            return [CONDITION_HINDERS_FLIP]
        if self._flipped(target, schema):
            return []
        before = old_name_after_flip(self.vector)
        if before in schema.names:
            sentences.append(
                f"column {before!r} is left over from an earlier flip: drop this column first"
            )
        with _translate_errors(self._name):
            computed = [str(name) for name in self.table.embedding_functions]
        if computed:
            sentences.append(
                f"LanceDB embeds {join_few(computed)} itself, by a function in the table's "
                "metadata: copy the rows into a table without it"
            )
        sentences += [
            f"index {name!r} has the type {kind}, which nobackfill cannot build for the new "
            "vectors: drop it first"
            for name, kind, _ in self.vector_indexes()
            if kind not in _INDEXES
        ]
        return sentences

    def _flipped(self, target: Target, schema: Any) -> bool:
        """Tell whether a flip gave the target's name to vectors of its map."""
        mark = _column_mark(schema, target.name) if target.name in schema.names else {}
        return (
            self.vector == old_name_after_flip(target.name)
            and mark.get("map") == target.computer_digest
            and mark.get("to") != target.name
        )

    def open_target(self, target: Target) -> "NewLanceColumn":
        """Add the columns of the new vectors and their digests, or open those of this map.

        Columns are added in one version of the table, with the values' type of the old column.
        Existing columns of this map are not changed, and their dimension is not checked. Also opens
        the vectors that the table has flipped to, if the source is opened on the old ones.

        Args:
            target: The column's name and dimension, and the digest of the map.

        Raises:
            AlreadyExistsError: Another column has the name, the name is empty, or the column holds
                new vectors of another condition.
            InvalidInputError: The source's column holds the vectors of this map already, or LanceDB
                refuses this. Indexes of the old vectors have different metrics; then the new
                columns stay.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
        """
        schema, name = self.schema, target.name
        flipped = self._flipped(target, schema)
        mark = _column_mark(schema, name) if name in schema.names else {}
        ours = mark.get("map") == target.computer_digest and mark.get("to") == name
        if ours and mark.get("where") != self.where:
            raise AlreadyExistsError(
                f"{self._name}: column {name!r} holds new vectors of other rows; use the same "
                "--where as the command that made it, or choose another --to"
            )
        if not name or (name in schema.names and not ours and not flipped):
            raise AlreadyExistsError(
                f"{self._name}: column {name!r} exists already and was not made by this map; "
                "choose another --to, or remove the column with `nobackfill carry --rollback`"
            )
        if not ours and not flipped:
            if _column_mark(schema, self.vector).get("map") == target.computer_digest:
                raise InvalidInputError(
                    f"{self._name}: column {self.vector!r} holds the vectors of this map already, "
                    "so nothing is left to do"
                )
            kind = pa.list_(schema.field(self.vector).type.value_type, target.dim)
            facts = {"map": target.computer_digest, "model": target.model, "to": name}
            facts["where"] = self.where
            metadata = {_MARK: json.dumps({key: one for key, one in facts.items() if one})}
            columns = [
                pa.field(name, kind, metadata=metadata),
                pa.field(_digest_column(name), pa.string()),
            ]
            with _translate_errors(self._name):
                self.table.add_columns(pa.schema(columns))
        return NewLanceColumn(self, target, flipped)

    def drop_new_vectors(self, name: str) -> bool:
        """Drop the columns of new vectors that were not flipped to.

        Returns:
            False if no map made a column of this name, or the table has flipped to it.

        Raises:
            InvalidInputError: LanceDB refuses this, also because a file cannot be written.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
        """
        schema = self.schema
        if name not in schema.names or not self._is_new(name, schema):
            return False
        with _translate_errors(self._name):
            self.table.drop_columns([name, _digest_column(name)])
        return True

    def record_model(self, model: str) -> None:
        """Record the model of the old vectors in the column's metadata, by its fingerprint.

        An earlier model is replaced; the text is not checked. The other facts in the column's
        metadata stay. A source with a condition does nothing.

        Raises:
            InvalidInputError: LanceDB refuses this, also because a file cannot be written.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
        """
        if self.where is not None:
            return
        mark = _column_mark(self.schema, self.vector) | {"model": model}
        with _translate_errors(self._name):
            update = {"path": self.vector, "metadata": {_MARK: json.dumps(mark)}}
            self.table.update_field_metadata(update)

    def migration_lock(self) -> AbstractContextManager[Callable[[], None]]:
        """Keep other migrations of the table out, by a lock file in the folder of the database.

        Yields a function that does nothing: a lock file is not lost. The lock file lies in the
        folder of the database and is removed at the end. The call waits at most 3 s for it.

        Raises:
            BusyError: Another migration of the table runs.
            CannotWriteError: The lock file cannot be created.
        """
        path = Path(self._folder).resolve() / f".{self._name}-nobackfill.lock"
        return lock_by_file(path, self._name)

    def read_migration_digest(self, column: str) -> str | None:
        """Return the digest of the map whose vectors a column holds; None for any other column, and
        after the flip.

        Raises:
            InvalidInputError: LanceDB refuses this, also because a file cannot be read.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
        """
        schema = self.schema
        if column not in schema.names or not self._is_new(column, schema):
            return None
        return _column_mark(schema, column).get("map")

    def flip_digest(self) -> str | None:
        """Return the digest of the map that computed the source's vectors; None if no flip put them
        there.

        Raises:
            InvalidInputError: LanceDB refuses this, also because a file cannot be read.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
        """
        facts = _column_mark(self.schema, self.vector)
        return None if facts.get("to") == self.vector else facts.get("map")

    def flip_state(self, computer_digest: str) -> Literal["old", "flipped", "finished", "unknown"]:
        """Return whose vectors have the source's name: old, flipped, finished (the old ones are
        dropped) or unknown.

        It is unknown where old vectors stay beside vectors that this map did not compute.

        Args:
            computer_digest: Digest of the map of the new vectors.

        Raises:
            InvalidInputError: LanceDB refuses this, also because a file cannot be read.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
        """
        old_exists = old_name_after_flip(self.vector) in self.schema.names
        if self.flip_digest() != computer_digest:
            return "unknown" if old_exists else "old"
        return "flipped" if old_exists else "finished"

    def flip_back(self, new_name: str, *, allow_loss: bool = False) -> int:
        """Give the old vectors their name back, and drop the new ones.

        A row counts as written if its new vector differs from the one that a migration made, or if
        it has no old vector. Rows without any vector do not count. Names change in one version of
        the table, after written rows lost their old vector; an error in between leaves the names.
        The new columns are dropped last; an error then leaves them under their first name.

        Args:
            new_name: Ignored: the column's metadata has the former name.
            allow_loss: Go on where rows were written since the flip: they lose their only vector.

        Returns:
            The number of rows without a vector then.

        Raises:
            NotFoundError: There are no old vectors.
            InvalidInputError: Rows were written since the flip, and `allow_loss` is False; nothing
                is changed; or LanceDB refuses this.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
        """
        old = old_name_after_flip(self.vector)
        schema = self.schema
        made = _column_mark(schema, self.vector).get("to")
        if old not in schema.names or made is None:
            raise NotFoundError(
                f"table {self._name}: no column {old!r}, which a flip leaves with the old "
                "vectors, so there is no flip to undo"
            )
        result = self.read_window(Window(), self.vector, [old, _digest_column(made)])
        digests = result[_digest_column(made)].to_pylist()
        new = self.to_rows(result, self.vector)
        old_there = result[old].is_valid().to_pylist()
        changed = [
            row
            for row, digest in enumerate(digests)
            if old_there[row] and (digest or "")[_DIGEST:] != _content_digest(new.vectors[row])
        ]
        losses: int = len(changed) + old_there.count(False)
        refuse_lost_vectors(self._name, losses, "rows", allow_loss=allow_loss)
        self.clear_values([new.keys[row] for row in changed], old)
        with _translate_errors(self._name):
            self.table.alter_columns(
                {"path": self.vector, "rename": made}, {"path": old, "rename": self.vector}
            )
            self.table.drop_columns([made, _digest_column(made)])
        return losses

    def drop_old(self) -> None:
        """Drop the old vectors and the digests after a flip; the flip cannot be undone then.

        Raises:
            NotFoundError: There are no old vectors.
            InvalidInputError: LanceDB refuses this, also because a file cannot be written.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
        """
        schema, old = self.schema, old_name_after_flip(self.vector)
        if old not in schema.names:
            raise NotFoundError(
                f"table {self._name}: no column {old!r}, so that there are no old vectors to drop"
            )
        digests = _digest_column(_column_mark(schema, self.vector).get("to") or "")
        with _translate_errors(self._name):
            self.table.drop_columns([one for one in (old, digests) if one in schema.names])

    def clear_values(self, keys: Sequence[Any], *columns: str) -> None:
        """Set columns of rows to null, in statements of 1000 keys each; unknown keys are ignored.

        Args:
            keys: Keys of the column `key`; none: nothing is written.
            columns: Names of columns.

        Raises:
            InvalidInputError: LanceDB refuses this; earlier statements stay.
            BusyError: Others write the table at this moment; earlier statements stay.
            ConfigurationError: The process was forked after the table was opened.
        """
        for first in range(0, len(keys), _PAGE):
            some = ", ".join(map(_sql_literal, keys[first : first + _PAGE]))
            with _translate_errors(self._name):
                self.table.update(
                    where=f"{_quoted_column(self.key)} IN ({some})",
                    values_sql=dict.fromkeys(columns, "NULL"),
                )

    def merge_rows(self, rows: Any) -> None:
        """Write columns of existing rows, found by their keys; LanceDB repeats it in a conflict.

        Args:
            rows: A table of Arrow with the key and the columns; rows with unknown keys are ignored.

        Raises:
            InvalidInputError: LanceDB refuses this; nothing was written.
            BusyError: Others write the table at this moment; nothing was written.
            ConfigurationError: The process was forked after the table was opened.
        """
        with _translate_errors(self._name):
            self.table.merge_insert(self.key).when_matched_update_all().execute(rows)


class NewLanceColumn:
    """The column of the new vectors; implements Flippable."""

    concurrent_windows = 1
    writers_put_new_vectors = False

    def __init__(self, source: LanceSource, target: Target, flipped: bool) -> None:
        self._source, self._target, self.flipped = source, target, flipped
        self._name = source.facts().name

    def pending(self, window: Window) -> Rows:
        """Read the rows without a new vector, and clear new vectors that are stale.

        After the flip, nothing is cleared. Rows come by increasing key. A new vector is stale if
        the old vector or the content column has changed; a row that lost its old vector loses its
        new one. New vectors of writers without a digest are left alone.

        Raises:
            InvalidInputError: LanceDB refuses this, also because a file cannot be written.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
        """
        return self._pending(window, self._source.vector, self._target.name)

    def _pending(self, window: Window, old: str, new: str) -> Rows:
        source, digests = self._source, _digest_column(self._target.name)
        contents = [] if self._target.content_column is None else [self._target.content_column]
        if self.flipped:
            result = source.read_window(window, old, [new])
            return source.to_rows(result.filter(result[new].is_null()), old)
        result = source.read_window(window, old, [new, digests, *contents])
        rows = source.to_rows(result, old)
        values = result[contents[0]].to_pylist() if contents else [None] * len(rows)
        noted = result[digests].to_pylist()
        present = result[new].is_valid().to_pylist()
        current = [
            _content_digest(one, text) for one, text in zip(rows.vectors, values, strict=True)
        ]
        stale = [
            row
            for row, digest in enumerate(noted)
            if digest is not None and digest[:_DIGEST] != current[row]
        ]
        orphans = self._without_old(window, old, digests)
        source.clear_values([rows.keys[row] for row in stale] + orphans, new, digests)
        pending_rows = sorted({row for row, one in enumerate(present) if not one} | set(stale))
        return replace(rows, versions=current).select(pending_rows)

    def _without_old(self, window: Window, old: str, digests: str) -> list[Any]:
        """Return the keys of rows with a new vector of ours that have no old one, or that have left
        the condition."""
        source = self._source
        result = source.read_window(window, digests, [old], own_rows=False)
        keys: list[Any] = result.filter(result[old].is_null())[source.key].to_pylist()
        if source.where is not None:
            own = set(source.read_window(window, digests)[source.key].to_pylist())
            keys += [key for key in result[source.key].to_pylist() if key not in own]
        return keys

    def write(self, rows: Rows, vectors: Vectors) -> None:
        """Write new vectors with their digests. A row that changed since it was read is written
        too: its digest shows that it is pending.

        All are written in one version of the table, or none. A new vector that a writer put
        meanwhile is replaced.

        Args:
            rows: n rows, as `pending` returned them; a deleted one is ignored.
            vectors: float32 [n, dim].

        Raises:
            ValueError: The vectors have another shape; nothing was written.
            InvalidInputError: LanceDB refuses this.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
            KeyError: The column was dropped since it was opened.
        """
        name, schema = self._target.name, self._source.schema
        kind = schema.field(name).type
        values = pa.array(np.ascontiguousarray(vectors).ravel()).cast(kind.value_type)
        new_vectors = _vectors(
            pa.chunked_array([made := _fixed_size_list(values, kind)]), kind.list_size
        )
        key = pa.array(rows.keys, schema.field(self._source.key).type)
        versions = rows.versions or [""] * len(rows)
        digests = [
            f"{one}{_content_digest(new)}" for one, new in zip(versions, new_vectors, strict=True)
        ]
        # After the flip, a row that was filled has the digest of no original.
        self._source.merge_rows(
            pa.table({self._source.key: key, name: made, self._digests: digests})
        )

    @property
    def _digests(self) -> str:
        mark = _column_mark(self._source.schema, self._target.name)
        return _digest_column(mark.get("to") or self._target.name)

    def read(self, window: Window) -> Rows:
        """Read the new vectors that were computed here, not those that a writer put.

        Rows come by increasing key.

        Raises:
            InvalidInputError: LanceDB refuses this, also because a file cannot be read.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
        """
        result = self._source.read_window(window, self._target.name, [self._digests])
        return self._source.to_rows(
            result.filter(result[self._digests].is_valid()), self._target.name
        )

    def count(self) -> int:
        """Count the rows that have a new vector.

        Returns:
            The number of rows, also those that a writer filled.

        Raises:
            InvalidInputError: LanceDB refuses this, also because a file cannot be read.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
        """
        return self._source.count_vectors(self._target.name)

    def prepare_flip(self) -> AbstractContextManager[None]:
        """Build the indexes that the new vectors lack, one for each index of the old ones.

        Indexes are built at the call, not in the block, and it may take long. Others may write
        meanwhile. An index that exists under the name is not built again.

        Returns:
            A context that does nothing: no lock is held until the flip.

        Raises:
            InvalidInputError: An obstacle prevents the flip, or LanceDB refuses an index; earlier
                indexes stay.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
        """
        if obstacles := self._source.flip_obstacles(self._target):
            raise InvalidInputError(
                f"{self._name}: the table cannot flip to the new vectors: {'; '.join(obstacles)}"
            )
        with _translate_errors(self._name):
            present = [one.name for one in self._source.table.list_indices()]
        for name, kind, metric in self._source.vector_indexes():
            new = f"{name}_{self._target.name}"
            if new not in present:
                with _translate_errors(self._name):
                    config = _INDEXES[kind](distance_type=metric)
                    self._source.table.create_index(self._target.name, config=config, name=new)
        return nullcontext()

    @contextmanager
    def open_flip(self) -> Iterator[None]:
        """Flip after the block, in one version of the table.

        The flip is undone if others wrote rows without a new vector meanwhile. New vectors that are
        stale are cleared. The table is not locked during the block. If the block raises, nothing is
        flipped. Afterwards open the source and its target again: this object still uses the former
        names.

        Raises:
            BusyError: Rows have no new vector, because others wrote them, or LanceDB reports a
                conflict; the names stay. If undoing the flip fails, the table stays flipped.
            InvalidInputError: LanceDB refuses the change, or undoing it; then the table stays
                flipped.
            ConfigurationError: The process was forked after the table was opened.
        """
        yield
        source, vector, new = self._source, self._source.vector, self._target.name
        before, table = old_name_after_flip(vector), source.table
        with _translate_errors(self._name):
            version = table.version
        self._refuse_pending(vector, new)
        with _translate_errors(self._name):
            table.alter_columns(
                # A writer that knows the new model alone leaves the old vector out.
                {"path": vector, "rename": before, "nullable": True},
                {"path": new, "rename": vector},
            )
            current = table.version
        if current == version + 1:
            return
        try:
            self._refuse_pending(before, vector)
        except BusyError:
            with _translate_errors(self._name):
                table.alter_columns(
                    {"path": vector, "rename": new}, {"path": before, "rename": vector}
                )
            raise

    def _refuse_pending(self, old: str, new: str) -> None:
        if count := len(self._pending(Window(), old, new)):
            raise BusyError(
                f"{self._name}: other programs wrote {count} rows at the moment of the flip, so "
                "the flip was undone; run the command again"
            )

    def owner_tasks(self) -> list[str]:
        """Return the owner's tasks after the flip, as sentences.

        They are the same for every table; nothing is read.
        """
        return [
            "writers and readers that opened the table before the flip must open it again: they "
            "still write the old vector",
            "table.optimize() removes the versions of the table that `carry` left",
        ]

    def finish(self) -> list[str]:
        """Return the owner's steps to the flip, as sentences and calls; empty after the flip.

        Nothing is written. Indexes that LanceDB cannot build again are left out.

        Raises:
            InvalidInputError: LanceDB refuses this, also because a file cannot be read.
            BusyError: Others write the table at this moment.
            ConfigurationError: The process was forked after the table was opened.
        """
        if self.flipped:
            return []
        vector, new = self._source.vector, self._target.name
        if self._source.where is not None:
            return [
                f"search the column {new!r} with the same condition, by vectors of the new model: "
                f"table.search(vector, vector_column_name={new!r}).where({self._source.where!r})"
            ]
        building = [
            f"table.create_index({new!r}, config={_INDEXES[kind].__name__}"
            f"(distance_type={metric!r}), name={name + '_' + new!r})"
            for name, kind, metric in self._source.vector_indexes()
            if kind in _INDEXES
        ]
        return [
            *building,
            "switch the queries to the new model; in the same moment either `carry` with --flip, "
            "or stop the writers, carry once more, and run:",
            f"table.alter_columns({{'path': {vector!r}, 'rename': {old_name_after_flip(vector)!r}, "
            f"'nullable': True}}, {{'path': {new!r}, 'rename': {vector!r}}})",
        ]


def _check_brackets(where: str) -> None:
    """Refuse a condition with a bracket too many: LanceDB ignores all that comes behind it."""
    bare = re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`|--[^\n]*", "", where)
    depths = [0, *accumulate({"(": 1, ")": -1}.get(one, 0) for one in bare)]
    if min(depths) < 0 or depths[-1]:
        raise InvalidInputError(
            f"--where {where}: expected a closing bracket for each opening one; correct the "
            "condition"
        )


def _digest_column(column: str) -> str:
    """Return the name of the column of digests of new vectors."""
    return f"nobackfill_of_{column}"


def _column_mark(schema: Any, column: str) -> dict[str, str]:
    """Return what our metadata says about a column; {} without it."""
    try:
        result = json.loads((schema.field(column).metadata or {}).get(_MARK.encode(), b"{}"))
        return {str(name): str(value) for name, value in result.items()}
    except (ValueError, AttributeError):
        return {}


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind))


def _vector_dim(field: Any) -> int | None:
    """Return the dimension of a column of vectors of floats; None for another column."""
    kind = field.type
    if not pa.types.is_fixed_size_list(kind) or not pa.types.is_floating(kind.value_type):
        return None
    return int(kind.list_size)


def _vectors(column: Any, dim: int) -> Vectors:
    """Convert a column without nulls to float32 [n, dim]."""
    parts = [part.flatten().to_numpy(zero_copy_only=False) for part in column.chunks if len(part)]
    if not parts:
        return np.empty((0, dim), np.float32)
    return np.concatenate(parts).astype(np.float32).reshape(-1, dim)


def _fixed_size_list(values: Any, kind: Any) -> Any:
    return pa.FixedSizeListArray.from_arrays(values, kind.list_size).cast(kind)


def _filled_texts(result: Any, key: str, column: str) -> tuple[list[str], list[str]]:
    """Return keys and values as text, without the rows where the value is empty."""
    pairs = zip(result[key].to_pylist(), result[column].to_pylist(), strict=True)
    filled = [(str(one), str(value)) for one, value in pairs if value not in (None, "")]
    return [one for one, _ in filled], [value for _, value in filled]


def _content_digest(vector: Vectors, content: object = None) -> str:
    text = b"" if content is None else str(content).encode()
    return hashlib.sha256(vector.tobytes() + text).hexdigest()[:_DIGEST]


def _quoted_column(column: str) -> str:
    if "`" in column:
        raise InvalidInputError(
            f"name of a column: expected one without a backtick, got {column!r}; rename the column"
        )
    return f"`{column}`"


def _sql_literal(value: object) -> str:
    if isinstance(value, int):
        return str(value)
    return "'" + str(value).replace("'", "''") + "'"


def _parse_key(name: str, kind: Any) -> int | str | None:
    """Convert a text to a key of a column's type; None if the type cannot hold it."""
    if not pa.types.is_integer(kind):
        return name
    if re.fullmatch(r"-?[0-9]{1,20}", name) is None:
        return None
    try:
        return int(pa.scalar(int(name), kind).as_py())
    except (OverflowError, pa.ArrowInvalid):
        # LanceDB refuses the whole condition because of one such literal.
        return None


@contextmanager
def _translate_errors(name: str) -> Iterator[None]:
    """Convert errors of LanceDB in the block to errors of nobackfill."""
    try:
        yield
    except (ValueError, RuntimeError, OSError, NotImplementedError) as error:
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        kind = BusyError if any(word in message for word in _CONFLICTS) else InvalidInputError
        raise kind(f"table {name}: LanceDB refuses the request: {message[:300]}") from error
