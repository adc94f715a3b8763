"""A virtual table `vec0` of sqlite-vec, in a file of SQLite, as a source.

A virtual table takes no further column and no trigger, so new vectors go into a second one with the
same columns. An ordinary table, `nobackfill_items`, holds a digest of what each new vector was
computed from. Each run of `carry` compares these digests, and computes changed rows again. The flip
swaps the names of both tables in one transaction that excludes other writers.

vec0 reads single vectors slowly: for each it walks through a chunk of a thousand. Therefore vectors
are read from the chunks, whose form sqlite-vec documents; its version is checked.
"""

import hashlib
import json
import os
import re
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeVar

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
    refuse_lost_vectors,
    stack_vectors,
)
from nobackfill.errors import (
    AlreadyExistsError,
    BusyError,
    ConfigurationError,
    InvalidInputError,
    NobackfillError,
    NotFoundError,
    join_few,
)
from nobackfill.extras import require_extra
from nobackfill.vectors import Vectors

with require_extra("sqlite-vec"):
    import apsw
    import sqlite_vec

_METRICS: Mapping[str, SearchMetric] = {
    "cosine": "cosine", "l2": "squared_l2", "l1": "l1",
}  # fmt: skip
# Rows whose vectors are in memory at once.
_PAGE = 2000
# Rows that are copied to a temporary file to estimate what a migration takes.
_TRIAL_ROWS = 5000
# The most neighbours that vec0 returns.
_MOST_HITS = 4096
_WAIT_MS = 10_000
# Versions of sqlite-vec whose shadow tables have the known form.
_KNOWN = re.compile(r"v0\.1\..*")
_CREATE = re.compile(
    r"create\s+virtual\s+table\s+(?:if\s+not\s+exists\s+)?.*?\busing\s+vec0\s*\((.*)\)\s*;?\s*",
    re.IGNORECASE | re.DOTALL,
)
_WORD = r"([A-Za-z_][A-Za-z0-9_]*)"
_FORMS: Mapping[str, re.Pattern[str]] = {
    name: re.compile(form, re.IGNORECASE)
    for name, form in {
        "option": r"chunk_size\s*=\s*\d+",
        "key": _WORD + r"\s+(text|integer|int)\s+primary\s+key",
        "partition": _WORD + r"\s+(\w+)\s+partition\s+key",
        "vector": _WORD + r"\s+(\w+)\s*\[(\d+)\](?:\s+distance_metric\s*=\s*(\w+))?",
        "auxiliary": r"\+\s*" + _WORD + r"\s+(\w+)",
        "metadata": _WORD + r"\s+(\w+)",
    }.items()
}
# Tables behind a virtual table, by the end of their names.
_SHADOWS = re.compile(
    r"_(info|chunks|rowids|auxiliary|vector_chunks\d+|metadatachunks\d+|metadatatext\d+)"
)
# A column of the type BLOB stores texts and numbers as they are.
_OURS = """
CREATE TABLE IF NOT EXISTS nobackfill_copies (
  name TEXT PRIMARY KEY, facts TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS nobackfill_items (
  map TEXT, key BLOB, place INTEGER, of TEXT, made TEXT, PRIMARY KEY (map, key)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS nobackfill_items_place ON nobackfill_items (map, place);
"""
# An earlier version declared the key as ANY, which made a number of the text '007'.
_ANY = "key ANY"
_WITH_ANY = f"""
DROP INDEX IF EXISTS nobackfill_items_place;
ALTER TABLE nobackfill_items RENAME TO nobackfill_items_before;
{_OURS}
INSERT INTO nobackfill_items SELECT * FROM nobackfill_items_before;
DROP TABLE nobackfill_items_before;
"""


@dataclass(frozen=True)
class VecColumn:
    """A column of a vec0 table.

    Attributes:
        name: Its name; empty for an option of the table.
        role: Its form: option, key, partition, vector, auxiliary or metadata.
        type: Its declared type in lower case.
        definition: Its definition as it stands in CREATE VIRTUAL TABLE.
        dim: The dimension of a vector; else 0.
        metric: The metric of a vector; empty for vec0's default.
    """

    name: str
    role: str
    type: str
    definition: str
    dim: int = 0
    metric: str = ""

    @property
    def stores_float32(self) -> bool:
        """Return whether vec0 stores float32: it reads no further than `float`, also in float16."""
        return self.role == "vector" and self.type.startswith(("float", "f32"))

    @property
    def vector_bytes(self) -> int:
        """Return the bytes of a vector in its column; 0 for a column of another role."""
        if self.stores_float32:
            return 4 * self.dim
        return self.dim // 8 if self._stores_bits else self.dim

    @property
    def _stores_bits(self) -> bool:
        """Return whether vec0 stores bits: it reads no further than `bit`."""
        return self.type.startswith("bit")

    @property
    def placeholder(self) -> str:
        """Return the SQL expression that inserts a value of this column."""
        if self.role != "vector" or self.stores_float32:
            return "?"
        return "vec_bit(?)" if self._stores_bits else "vec_int8(?)"


@dataclass(frozen=True)
class VecRow:
    """A row: its key, its rowid, its vector, float32 [dim], and its other values by column."""

    key: Any
    rowid: int
    vector: Vectors
    other_values: Mapping[str, Any]

    def digest(self, vector: Vectors | None = None, content: object = None) -> str:
        """Return a digest of the row, with another vector in place of its own.

        Args:
            vector: float32 [dim] in place of the row's own; None: its own.
            content: A further value that the vector is computed from; None or "": none.

        Returns:
            32 hex digits; the key and the rowid do not count.
        """
        values = json.dumps(self.other_values, sort_keys=True, default=repr).encode()
        whole = (self.vector if vector is None else vector).tobytes() + values
        text = b"" if content is None else str(content).encode()
        return hashlib.sha256(whole + text).hexdigest()[:32]


_One = TypeVar("_One")
_INHERITED: list[object] = []


class VecDatabase:
    """A file of SQLite with sqlite-vec. Each thread of each process has its own connection.

    Raises:
        NotFoundError: There is no such file. It is not opened or checked otherwise.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._local = threading.local()
        if not Path(path).is_file():
            raise NotFoundError(f"{path}: there is no such file; name a database file of SQLite")

    @property
    def connection(self) -> Any:
        """Return the connection of this thread and process; open it at the first use.

        A connection of the parent process is kept unused after a fork. Nobody closes it explicitly.
        If the file was removed since, SQLite creates an empty one. After an error, make a new
        object.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            InvalidInputError: SQLite cannot open the file, or cannot load sqlite-vec.
        """
        if getattr(self._local, "process", None) != os.getpid():
            # Closed in a forked process, a connection would end its parent's transaction.
            _INHERITED.append(getattr(self._local, "connection", None))
            self._local.process, self._local.depth = os.getpid(), 0
            with translate_errors(self.path):
                self._local.connection = _connect(self.path)
        return self._local.connection

    def query_all(self, query: str, *values: object) -> list[Any]:
        """Run a statement and return all its rows; empty for one without rows.

        Args:
            query: One statement of SQL; outside a transaction it commits at once.
            values: Its parameters.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            ConfigurationError: The statement writes, and the file is read-only.
            InvalidInputError: Any other error of SQLite.
        """
        with translate_errors(self.path):
            return list(self.connection.execute(query, values).fetchall())

    def run_for_rows(self, statement: str, rows: Iterable[Sequence[object]]) -> None:
        """Run a statement for each row of values; no rows run nothing.

        Outside a transaction each row may commit by itself, and earlier ones stay after an error.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            ConfigurationError: The file is read-only.
            InvalidInputError: Any other error of SQLite.
        """
        with translate_errors(self.path):
            self.connection.executemany(statement, rows)

    @contextmanager
    def transaction(self, kind: str = "IMMEDIATE") -> Iterator[None]:
        """Run one transaction; a block inside another one joins it. Roll back on any error.

        Joined blocks commit with the outer one, whatever `kind` they name. If the outer block
        catches the error of a joined one, the writes of both are committed.

        Args:
            kind: IMMEDIATE excludes other writers; DEFERRED reads one snapshot.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            ConfigurationError: The file is read-only, and `kind` is IMMEDIATE.
            InvalidInputError: Any other error of SQLite.
        """
        connection = self.connection
        if self._local.depth:
            yield
            return
        with translate_errors(self.path):
            connection.execute(f"BEGIN {kind}")
        self._local.depth = 1
        try:
            yield
            with translate_errors(self.path):
                connection.execute("COMMIT")
        except BaseException:
            # A COMMIT that finds readers leaves the transaction open.
            with suppress(sqlite3.Error, apsw.Error):
                connection.execute("ROLLBACK")
            raise
        finally:
            self._local.depth = 0

    @property
    def version(self) -> int:
        """Return a number that changes when another connection commits.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            InvalidInputError: Any other error of SQLite, such as a damaged file or a dropped table.
        """
        return int(self.query_all("PRAGMA data_version")[0][0])

    def tables(self) -> dict[str, str]:
        """Return the definitions of tables by name.

        Returns:
            All tables, also virtual ones and those behind them; the definition of an internal one
            may be None.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            InvalidInputError: Any other error of SQLite, such as a damaged file or a dropped table.
        """
        return dict(self.query_all("SELECT name, sql FROM sqlite_master WHERE type = 'table'"))

    def rename(self, old: str, new: str) -> None:
        """Rename a vec0 table with the tables behind it, which vec0 itself forgets.

        Triggers and views keep the old name. Nothing happens if there is no such table. Call it in
        a transaction, because it runs several statements.

        Args:
            old: The table's name.
            new: The new name; no table may have it.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            ConfigurationError: The file is read-only.
            InvalidInputError: A table has the new name, or SQLite reports another error.
        """
        # Without it, SQLite writes the new name into triggers and views.
        before = self.query_all("PRAGMA legacy_alter_table")[0][0]
        self.query_all("PRAGMA legacy_alter_table = ON")
        try:
            for name in self.tables():
                end = name.removeprefix(old) if name.startswith(old) else ""
                if name == old or _SHADOWS.fullmatch(end):
                    self.query_all(
                        f"ALTER TABLE {_quoted_name(name)} RENAME TO {_quoted_name(new + end)}"
                    )
        finally:
            self.query_all(f"PRAGMA legacy_alter_table = {int(before)}")

    def read_facts(self, name: str) -> dict[str, str]:
        """Return what is noted about a table: `map`, `model`, `of`, `flipped`; {} for nothing.

        Args:
            name: The table's name; it need not exist.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            InvalidInputError: Any other error of SQLite, such as a damaged file or a dropped table.
        """
        if "nobackfill_copies" not in self.tables():
            return {}
        result = self.query_all("SELECT facts FROM nobackfill_copies WHERE name = ?", name)
        return dict(json.loads(result[0][0])) if result else {}

    def record_facts(self, name: str, facts: Mapping[str, str | None]) -> None:
        """Record facts about a table in place of earlier ones; no facts remove the record.

        Facts with the value None or "" are left out. The tables for it are created if they are
        missing, as by `make_bookkeeping_tables`. Call it in a transaction.

        Args:
            name: The table's name; it need not exist.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            ConfigurationError: The file is read-only.
            InvalidInputError: Any other error of SQLite, such as a full disk or a dropped table.
        """
        self.make_bookkeeping_tables()
        self.query_all("DELETE FROM nobackfill_copies WHERE name = ?", name)
        if facts := {key: one for key, one in facts.items() if one}:
            self.query_all("INSERT INTO nobackfill_copies VALUES (?, ?)", name, json.dumps(facts))

    def make_bookkeeping_tables(self) -> None:
        """Create the tables of facts and of digests, or give those of an earlier version their
        present form. Call it in a transaction.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            ConfigurationError: The file is read-only.
            InvalidInputError: Any other error of SQLite, such as a full disk.
        """
        old = _ANY in (self.tables().get("nobackfill_items") or "")
        for statement in filter(None, map(str.strip, (_WITH_ANY if old else _OURS).split(";"))):
            self.query_all(statement)


class VecTable:
    """A vec0 table and its columns.

    Args:
        database: The file.
        name: Name of the table.
        vector: Column of the vectors; None for the only one of floats.
        where: Condition in SQL of the rows that are counted, listed and found; None for all.

    Raises:
        NotFoundError: There is no such table.
        InvalidInputError: The table is no vec0 table, or has a column that is not understood; or
            SQLite reports another error, also of the condition.
        BusyError: Others hold the file for longer than 10 s.
    """

    def __init__(
        self,
        database: VecDatabase,
        name: str,
        vector: str | None = None,
        where: str | None = None,
    ) -> None:
        self.database, self.name, self.where = database, name, where
        tables = database.tables()
        if name not in tables:
            there = join_few(one for one, sql in tables.items() if _CREATE.fullmatch(sql or ""))
            raise NotFoundError(
                f"{name}: the file has no such table; "
                + (
                    f"name one of its vec0 tables after #: {there}"
                    if there
                    else "it has no vec0 table"
                )
            )
        result = _CREATE.fullmatch(tables[name] or "")
        if result is None:
            raise InvalidInputError(
                f"{name}: expected a virtual table of vec0, found another table; copy its vectors "
                "into a vec0 table, or into a Parquet file"
            )
        self.columns = [_parse_column(one, name) for one in result[1].split(",")]
        made_by = dict(database.query_all(f"SELECT key, value FROM {self.shadow_table('info')}"))
        if not _KNOWN.fullmatch(str(made_by.get("CREATE_VERSION"))):
            raise InvalidInputError(
                f"{name}: expected a table of sqlite-vec 0.1, found one of "
                f"{made_by.get('CREATE_VERSION')}; copy its vectors into a table that sqlite-vec "
                "0.1 makes"
            )
        keys = [one for one in self.columns if one.role == "key"]
        self.key = keys[0].name if keys else "rowid"
        self.has_text_key = bool(keys) and keys[0].type == "text"
        vectors = [one for one in self.columns if one.role == "vector"]
        floats = {one.name: one for one in vectors if one.stores_float32}
        if (vector is None and len(floats) != 1) or (vector is not None and vector not in floats):
            others = [f"{one.name} {one.type}" for one in vectors if not one.stores_float32]
            raise InvalidInputError(
                f"{name}: expected {'one column' if vector is None else repr(vector)} of float "
                f"vectors, found {join_few(floats) or 'none'}; name one with --vector"
                + (f" ({join_few(others)} cannot be migrated)" if others else "")
            )
        self.vector = floats[vector or next(iter(floats))]
        self._vectors = vectors
        self.values = [
            one.name for one in self.columns if one.role in ("partition", "auxiliary", "metadata")
        ]
        if where is not None:
            # Brackets would make a condition of "a) OR (b", and none would run "a; b".
            check = f"SELECT CASE WHEN {where}\nTHEN 1 END FROM {self.quoted} LIMIT 0"
            with translate_errors(f"{database.path}: --where {where}"):
                database.connection.execute(check)

    @property
    def rowid_condition(self) -> str:
        """Return the condition of SQL that a row of `rowids` r fulfils `where`.

        vec0 finds a single row by its key, so a window of rows costs the same in a larger table.
        """
        if self.where is None:
            return "true"
        key = f"{_quoted_name(self.key)} = r.{'id' if self.has_text_key else 'rowid'}"
        return f"EXISTS (SELECT 1 FROM {self.quoted} WHERE {key} AND ({self.where}\n))"

    def shadow_table(self, end: str) -> str:
        """Return the quoted name of a table behind this one.

        Args:
            end: The end of its name, such as "rowids"; its existence is not checked.
        """
        return _quoted_name(f"{self.name}_{end}")

    @property
    def quoted(self) -> str:
        """Return the table's name in double quotes, for a statement."""
        return _quoted_name(self.name)

    def count(self) -> int:
        """Count the rows.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            InvalidInputError: Any other error of SQLite, such as a damaged file or a dropped table.
        """
        rowids = self.shadow_table("rowids")
        query = f"SELECT count(*) FROM {rowids} r WHERE {self.rowid_condition}"
        return int(self.database.query_all(query)[0][0])

    def copy_statement(self, name: str, dim: int) -> str:
        """Return the statement that creates a table like this one for other vectors.

        Args:
            name: The new table's name.
            dim: The dimension of the vectors that replace the source's; the metric and other
                columns stay as they are.
        """
        metric = f" distance_metric={self.vector.metric}" if self.vector.metric else ""
        vector = f"{self.vector.name} float[{dim}]{metric}"
        parts = [vector if one == self.vector else one.definition for one in self.columns]
        return f"CREATE VIRTUAL TABLE {_quoted_name(name)} USING vec0({', '.join(parts)})"

    def rowids(self, window: Window) -> list[int]:
        """Return the rowids of a window, in order.

        Args:
            window: The rowids above its lower end and up to its upper one; None: no bound.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            InvalidInputError: Any other error of SQLite, such as a damaged file or a dropped table.
        """
        where, bounds = _window_condition("rowid", window)
        query = (
            f"SELECT rowid FROM {self.shadow_table('rowids')} r "
            f"WHERE {where} AND {self.rowid_condition} ORDER BY rowid"
        )
        return [place for (place,) in self.database.query_all(query, *bounds)]

    def rowid_by_key(self, keys: Sequence[Any]) -> dict[Any, int]:
        """Return the rowids of keys that exist, by key.

        The order is arbitrary.

        Args:
            keys: Keys in the table's own type; unknown ones are left out.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            InvalidInputError: Any other error of SQLite, such as a damaged file or a dropped table.
        """
        column = "id" if self.has_text_key else "rowid"
        query = (
            f"SELECT {column}, rowid FROM {self.shadow_table('rowids')} r "
            f"WHERE {column} IN (SELECT value FROM json_each(?)) AND {self.rowid_condition}"
        )
        return dict(self.database.query_all(query, json.dumps(list(keys))))

    def rowids_of_keys(self, keys: Sequence[Any]) -> list[int]:
        """Return the rowids of keys that exist, in order.

        Args:
            keys: Keys in the table's own type; unknown ones are left out.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            InvalidInputError: Any other error of SQLite, such as a damaged file or a dropped table.
        """
        return sorted(self.rowid_by_key(keys).values())

    def rows(self, rowids: Sequence[int], *, with_other_columns: bool = True) -> list[VecRow]:
        """Read rows by rowid, in their order; those that are gone are left out.

        Rows come by increasing rowid, whatever the order of `rowids`. Vectors are read from vec0's
        chunks. Call it in a transaction: a row that is deleted between the statements gives values
        of other rows, or IndexError.

        Args:
            rowids: The rows to read; one that is given twice counts once.
            with_other_columns: Whether to read the other columns, too.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            InvalidInputError: Any other error of SQLite, such as a damaged file or a dropped table.
        """
        listed = self.database.query_all(
            f"SELECT rowid, id, chunk_id, chunk_offset FROM {self.shadow_table('rowids')} "
            "WHERE rowid IN (SELECT value FROM json_each(?)) ORDER BY rowid",
            json.dumps(list(rowids)),
        )
        blobs = {
            one.name: self._cut_vectors(number, listed)
            for number, one in enumerate(self._vectors)
            if with_other_columns or one == self.vector
        }
        result = []
        others = self._read_other_values(listed) if with_other_columns else [{} for _ in listed]
        for row, (place, name, _, _) in enumerate(listed):
            vectors = {column: blob[row] for column, blob in blobs.items()}
            vector = np.frombuffer(vectors.pop(self.vector.name), "<f4").astype(np.float32)
            key = name if self.has_text_key else place
            result.append(VecRow(key, place, vector, others[row] | vectors))
        return result

    def _cut_vectors(self, number: int, listed: Sequence[Any]) -> list[bytes]:
        """Cut the vectors of the column `number` out of its chunks."""
        size, chunks = self._vectors[number].vector_bytes, dict[int, bytes]()
        table, result = self.shadow_table(f"vector_chunks{number:02}"), []
        for _, _, chunk, offset in listed:
            if chunk not in chunks:
                if len(chunks) > 1:
                    chunks.clear()
                ((chunks[chunk],),) = self.database.query_all(
                    f"SELECT vectors FROM {table} WHERE rowid = ?", chunk
                )
            result.append(chunks[chunk][offset * size : (offset + 1) * size])
        return result

    def _read_other_values(self, listed: Sequence[Any]) -> list[dict[str, Any]]:
        if not self.values:
            return [{} for _ in listed]
        columns = ", ".join(map(_quoted_name, self.values))
        query = f"SELECT {columns} FROM {self.quoted} WHERE {_quoted_name(self.key)} = ?"
        return [
            dict(zip(self.values, result[0], strict=True))
            for place, name, _, _ in listed
            if (result := self.database.query_all(query, name if self.has_text_key else place))
        ]

    def texts(self, places: Sequence[int], column: str) -> dict[Any, str]:
        """Read a column as text by key, without the rows where it is empty.

        Empty texts count as empty. The order is arbitrary.

        Args:
            places: Rowids.
            column: A column of this table but no key or vector, or TABLE.COLUMN of an ordinary
                table. Its key is its rowid, or for text keys its column of the same name as here.

        Raises:
            InvalidInputError: There is no such table or column, or SQLite reports another error.
            BusyError: Others hold the file for longer than 10 s.
        """
        key = "r.id" if self.has_text_key else "r.rowid"
        if column in self.values:
            source, name = self.quoted, column
            on = f"t.{_quoted_name(self.key)} = {key}"
        else:
            table, _, name = column.partition(".")
            if not name or table not in self.database.tables():
                raise InvalidInputError(
                    f"{self.name}: no column {column!r}; correct the name, or write TABLE.COLUMN "
                    "for a column of an ordinary table with the same keys"
                )
            source = _quoted_name(table)
            on = f"t.{_quoted_name(self.key)} = {key}" if self.has_text_key else f"t.rowid = {key}"
        result = self.database.query_all(
            f"SELECT {key}, t.{_quoted_name(name)} FROM {self.shadow_table('rowids')} r "
            f"JOIN {source} t ON {on} WHERE r.rowid IN (SELECT value FROM json_each(?))",
            json.dumps(list(places)),
        )
        return {one: str(value) for one, value in result if value not in (None, "")}

    def delete(self, keys: Iterable[Any]) -> None:
        """Delete rows by key; unknown keys are ignored.

        Outside a transaction, earlier rows stay deleted after an error.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            ConfigurationError: The file is read-only.
            InvalidInputError: Any other error of SQLite, such as a full disk or a dropped table.
        """
        self.database.run_for_rows(
            f"DELETE FROM {self.quoted} WHERE {_quoted_name(self.key)} = ?",
            [(one,) for one in keys],
        )

    def insert(self, rows: Sequence[VecRow], vectors: Vectors) -> None:
        """Insert rows with vectors, float32 [n, dim], in place of their own.

        Outside a transaction, earlier rows stay after an error.

        Raises:
            InvalidInputError: A key exists already, or a vector has another dimension; or SQLite
                reports another error.
            KeyError: A row lacks one of the table's columns; nothing is written.
            ValueError: The numbers of rows and vectors differ; nothing is written.
            BusyError: Others hold the file for longer than 10 s.
            ConfigurationError: The file is read-only.
        """
        others = [one for one in self.columns if one.role not in ("option", "key")]
        names = ", ".join([_quoted_name(self.key), *(_quoted_name(one.name) for one in others)])
        marks = ", ".join(["?", *(one.placeholder for one in others)])

        def values(row: VecRow, vector: Vectors) -> list[object]:
            return [row.key] + [
                vector.astype("<f4").tobytes() if one == self.vector else row.other_values[one.name]
                for one in others
            ]

        self.database.run_for_rows(
            f"INSERT INTO {self.quoted} ({names}) VALUES ({marks})",
            [values(row, vector) for row, vector in zip(rows, vectors, strict=True)],
        )


class SqliteVecSource:
    """A vec0 table whose float vectors can be migrated.

    The constructor takes a file, the name of a table, and a column of vectors; None means the only
    one of floats. With a condition `where` in SQL, only its rows are read, counted, found and
    migrated, and the table cannot flip. Its errors are those of VecTable.

    Raises:
        NotFoundError: There is no such file or table.
        InvalidInputError: The table is no vec0 table, has a column that is not understood, or no
            such column of floats.
        BusyError: Others hold the file for longer than 10 s.
    """

    flip_renames = True

    def __init__(
        self, path: str, table: str, vector: str | None = None, *, where: str | None = None
    ) -> None:
        self._database = VecDatabase(path)
        self._table = VecTable(self._database, table, vector, where)
        self.vector = self._table.vector.name

    @property
    def flip_name(self) -> str:
        """Return the table that a flip renames: the source's own.

        Raises:
            InvalidInputError: The source has a condition.
        """
        if self._table.where is not None:
            raise InvalidInputError(f"{self._table.name}: {CONDITION_HINDERS_FLIP}")
        return self._table.name

    def facts(self) -> Facts:
        """Return name, dimension, metric and model of the old vectors, and the names of other
        columns.

        The metric is squared_l2 unless the column declares one. The model is None if nobody
        recorded it. After a flip all are those of the new vectors.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            InvalidInputError: Any other error of SQLite, such as a damaged file or a dropped table.
        """
        table = self._table
        metric = _METRICS[table.vector.metric or "l2"]
        # The record of the table would name one model for the rows of all.
        facts = {} if table.where is not None else self._database.read_facts(table.name)
        model = facts.get("model")
        columns = tuple(table.values)
        return Facts(f"{table.name}.{self.vector}", table.vector.dim, metric, model, columns)

    def count(self) -> int:
        """Count the rows; each has a vector.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            InvalidInputError: Any other error of SQLite, such as a damaged file or a dropped table.
        """
        return self._table.count()

    def windows(self, rows_per_window: int) -> Iterator[Window]:
        """Divide all rowids into windows of `rows_per_window` rows.

        The last window has no upper end, so that it includes later rows. An empty table gives one
        window.

        Args:
            rows_per_window: The size of a window, at least 1; all but the last have about this many
                rows.

        Yields:
            Windows of rowids, the upper end included. Each is found when it is taken.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            InvalidInputError: Any other error of SQLite, such as a damaged file or a dropped table.
        """
        lower: int | None = None
        while True:
            last = self._database.query_all(
                f"SELECT rowid FROM {self._table.shadow_table('rowids')} WHERE rowid > ? "
                "ORDER BY rowid LIMIT 1 OFFSET ?",
                -(2**63) if lower is None else lower,
                rows_per_window - 1,
            )
            # The last window is open: it includes rows that are inserted meanwhile.
            yield Window(lower, last[0][0] if last else None)
            if not last:
                return
            lower = last[0][0]

    def read(self, window: Window) -> Rows:
        """Read the vectors of a window, by increasing rowid.

        Rowids are above the window's lower end and up to its upper one. All are of one snapshot.
        NaN passes.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            InvalidInputError: Any other error of SQLite, such as a damaged file or a dropped table.
        """
        with self._database.transaction("DEFERRED"):
            rows = self._table.rows(self._table.rowids(window), with_other_columns=False)
        return _rows_with_vectors(rows, self._table.name)

    def read_column(self, window: Window, name: str) -> ColumnValues:
        """Read another column of a window as text, without the rows where it is empty.

        The order is arbitrary. All values are of one snapshot.

        Args:
            window: The range of rowids.
            name: A column of this table, or TABLE.COLUMN of an ordinary table with the same keys.

        Raises:
            InvalidInputError: There is no such column, or SQLite reports another error.
            BusyError: Others hold the file for longer than 10 s.
        """
        with self._database.transaction("DEFERRED"):
            result = self._table.texts(self._table.rowids(window), name)
        return ColumnValues([str(one) for one in result], list(result.values()))

    def nearest(self, vector: Vectors, count: int, new_name: str | None = None) -> list[str]:
        """Search the ids nearest to a vector, nearest first.

        The search is exact, by the column's metric. The order of equal distances is arbitrary. By
        cosine, vectors of zeros are no hits.

        Args:
            vector: float32 [dim].
            count: The most ids to return, at least 0; vec0 returns at most 4096.
            new_name: Table of new vectors to search; None for the old ones.

        Raises:
            NotFoundError: There is no table `new_name`.
            InvalidInputError: `vector` has another dimension, `new_name` is no vec0 table, or
                SQLite reports another error.
            BusyError: Others hold the file for longer than 10 s.
        """
        table = self._table
        if new_name is not None:
            table = VecTable(self._database, new_name, self.vector)
        query, most = np.asarray(vector, "<f4").tobytes(), min(count, _MOST_HITS)
        chosen = ""
        if table.where is not None:
            key = _quoted_name(table.key)
            chosen = f"AND {key} IN (SELECT {key} FROM {table.quoted} WHERE ({table.where}\n))"
        while True:
            result = self._database.query_all(
                f"SELECT {_quoted_name(table.key)}, distance FROM {table.quoted} "
                f"WHERE {_quoted_name(self.vector)} MATCH ? AND k = ? {chosen} ORDER BY distance",
                query,
                most,
            )
            # The cosine distance of zeros is NULL, which vec0 counts as the smallest.
            hits = [str(key) for key, distance in result if distance is not None]
            if len(hits) >= count or len(result) < most or most == _MOST_HITS:
                return hits[:count]
            most = min(2 * most, _MOST_HITS)

    def lookup(self, ids: Sequence[str]) -> Rows:
        """Read old vectors by id, by increasing rowid; unknown ids are left out.

        An id that is given twice counts once. Without any known id, the rows are empty and of
        dimension 0.

        Args:
            ids: Keys as text; a text that is no integer of 64 bits matches no integer key.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            InvalidInputError: Any other error of SQLite, such as a damaged file or a dropped table.
        """
        with self._database.transaction("DEFERRED"):
            rows = self._table.rows(
                self._table.rowids_of_keys(self._keys(ids)), with_other_columns=False
            )
        return _rows_with_vectors(rows, self._table.name)

    def _keys(self, ids: Sequence[str]) -> list[Any]:
        if self._table.has_text_key:
            return list(ids)
        keys = [int(one) for one in ids if re.fullmatch(r"-?[0-9]{1,19}", one)]
        # SQLite has no other rowids.
        return [key for key in keys if -(2**63) <= key < 2**63]

    def texts(self, ids: Sequence[str], column: str) -> dict[str, str]:
        """Read another column as text by id, without the rows where it is empty.

        The order is arbitrary, and an id that is given twice counts once.

        Args:
            ids: Ids; unknown ones are left out.
            column: A column of this table, or TABLE.COLUMN of an ordinary table with the same keys.

        Raises:
            InvalidInputError: There is no such column, or SQLite reports another error.
            BusyError: Others hold the file for longer than 10 s.
        """
        with self._database.transaction("DEFERRED"):
            result = self._table.texts(self._table.rowids_of_keys(self._keys(ids)), column)
        return {str(key): value for key, value in result.items()}

    def close(self) -> None:
        """Do nothing: a connection ends with its thread or with this object."""

    def estimate_costs(self, trial: MigrationTrial) -> MigrationCosts:
        """Estimate the seconds of a migration by one of the first rows, in a temporary file.

        Returns:
            Seconds of an item, and none of an index, because vec0 has none.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            InvalidInputError: Any other error of SQLite, such as a damaged file or a full disk.
            OSError: The temporary files cannot be written.
            Exception: Any error of `trial.carry_seconds`.
        """
        table = self._table
        with TemporaryDirectory(prefix="nobackfill-fit-") as folder:
            path = Path(folder, "trial.db")
            path.touch()
            database = VecDatabase(str(path))
            database.query_all(table.copy_statement(table.name, table.vector.dim))
            with self._database.transaction("DEFERRED"):
                first = filter(None, map(table.rowids, self.windows(_TRIAL_ROWS)))
                rows = table.rows(next(first, []))
            copy = VecTable(database, table.name, self.vector)
            with database.transaction():
                for page in _pages(rows):
                    copy.insert(page, np.stack([row.vector for row in page]))
            scratch = SqliteVecSource(str(path), table.name, self.vector)
            return MigrationCosts(trial.carry_seconds(scratch), 0.0)

    def warnings(self, new_name: str) -> list[str]:
        """Return a sentence about triggers that name this table; empty if there are none.

        Args:
            new_name: Ignored.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            InvalidInputError: Any other error of SQLite, such as a damaged file or a dropped table.
        """
        writers = [
            name
            for name, sql in self._database.query_all(
                "SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"
            )
            if re.search(rf"\b{re.escape(self._table.name)}\b", sql)
        ]
        if not writers:
            return []
        return [
            f"{self._table.name}: the triggers {join_few(writers)} name this table; after the flip "
            "they work on the new vectors, so a trigger that inserts a vector must take the new "
            "model's"
        ]

    def flip_obstacles(self, target: Target) -> list[str]:
        """Return a sentence about a condition, or a table that an earlier flip left; empty if
        nothing prevents a flip.

        Writes nothing.

        Args:
            target: Ignored.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            InvalidInputError: Any other error of SQLite, such as a damaged file or a dropped table.
        """
        if self._table.where is not None:
            return [CONDITION_HINDERS_FLIP]
        before = old_name_after_flip(self._table.name)
        if before in self._database.tables():
            return [f"table {before!r} of an earlier flip still exists: drop it first"]
        return []

    def open_target(self, target: Target) -> "NewVecTable":
        """Create the table of the new vectors, or open it if this map created it before.

        All is created in one transaction, also the tables nobackfill_copies and nobackfill_items;
        those of an earlier version get their present form. An existing table of this map is not
        changed, and its dimension is not checked.

        Args:
            target: The table's name and dimension, and the digest of the map.

        Raises:
            AlreadyExistsError: Another table has the name, also this map's table after a flip to
                it, or new vectors of another condition. An earlier version made the table, and
                noted keys of text as numbers.
            InvalidInputError: The name is not allowed, or this table holds the vectors of this map
                already; or SQLite reports another error.
            ConfigurationError: The file is read-only.
            BusyError: Others hold the file for longer than 10 s.
        """
        table, database, name = self._table, self._database, target.name
        if not re.fullmatch(_WORD, name) or name.startswith(("nobackfill_", "sqlite_")):
            raise InvalidInputError(
                f"--to: expected a table name of letters, digits and _, got {name!r}; choose "
                "another name"
            )
        with database.transaction():
            here, facts = database.read_facts(table.name), database.read_facts(name)
            if here.get("map") == target.computer_digest:
                raise InvalidInputError(
                    f"{table.name}: this table holds the vectors of this map already, so nothing "
                    "is left to do"
                )
            wanted = {"map": target.computer_digest, "of": table.name, "vector": self.vector}
            ours = all(facts.get(key) == value for key, value in wanted.items())
            if ours and facts.get("where") != table.where:
                raise AlreadyExistsError(
                    f"{table.name}: table {name!r} holds new vectors of other rows; use the same "
                    "--where as the command that made it, or choose another --to"
                )
            there = name in database.tables()
            if there and not (ours and "flipped" not in facts):
                raise AlreadyExistsError(
                    f"{table.name}: table {name!r} exists already and was not made by this map; "
                    "choose another --to, or remove the table with `nobackfill carry --rollback`"
                )
            database.make_bookkeeping_tables()
            numbers = "SELECT 1 FROM nobackfill_items WHERE map = ? AND typeof(key) <> 'text'"
            if (
                there
                and table.has_text_key
                and database.query_all(numbers, _notes_name(name, target))
            ):
                raise AlreadyExistsError(
                    f"{table.name}: an earlier version of nobackfill made table {name!r}, and "
                    "noted keys such as '007' as numbers, so that some of its vectors may be stale "
                    "or missing; remove the table with `nobackfill carry --rollback` or "
                    "`nobackfill migrate back`, and run the command again"
                )
            if not there:
                database.record_facts(name, wanted | {"model": target.model, "where": table.where})
                database.query_all(
                    "DELETE FROM nobackfill_items WHERE map = ?", _notes_name(name, target)
                )
                database.query_all(table.copy_statement(name, target.dim))
        copy = VecTable(database, name, self.vector)
        return NewVecTable(database, table, copy, target)

    def drop_new_vectors(self, name: str) -> bool:
        """Drop a table of new vectors that was not flipped to, with its digests.

        All is removed in one transaction.

        Returns:
            False if no map made a table of this name from this source, or the file has flipped to
            it.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            ConfigurationError: The file is read-only.
            InvalidInputError: Any other error of SQLite, such as a full disk or a dropped table.
        """
        database = self._database
        with database.transaction():
            facts = database.read_facts(name)
            if name not in database.tables() or facts.get("of") != self._table.name:
                return False
            if "flipped" in facts:
                return False
            self._forget(name, facts)
            database.query_all(f"DROP TABLE {_quoted_name(name)}")
        return True

    def _forget(self, name: str, facts: Mapping[str, str]) -> None:
        self._database.query_all(
            "DELETE FROM nobackfill_items WHERE map = ?", f"{name} {facts['map']}"
        )
        self._database.record_facts(name, {})

    def count_vectors(self, column: str) -> int:
        """Count the rows of a table of new vectors; 0 if there is no such table.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            InvalidInputError: The table is no vec0 table, or has no such column of vectors; or any
                other error of SQLite, such as a damaged file.
            NotFoundError: The table was dropped during the call.
        """
        if column not in self._database.tables():
            return 0
        return VecTable(self._database, column, self.vector).count()

    def record_model(self, model: str) -> None:
        """Record the model of the old vectors, by its fingerprint; nothing with a condition.

        Args:
            model: Fingerprint of the model; empty removes it.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            ConfigurationError: The file is read-only.
            InvalidInputError: Any other error of SQLite, such as a full disk or a dropped table.
        """
        if self._table.where is not None:
            return
        with self._database.transaction():
            facts = self._database.read_facts(self._table.name)
            self._database.record_facts(self._table.name, facts | {"model": model})

    def migration_lock(self) -> AbstractContextManager[Callable[[], None]]:
        """Keep other migrations out, by a lock file next to the database: SQLite has one writer.

        Yields a function that does nothing: a lock file is not lost. The lock file lies next to the
        database and is removed at the end. The call waits at most 3 s for it.

        Raises:
            BusyError: Another migration in the same file runs.
            CannotWriteError: The lock file cannot be created.
        """
        path = Path(self._database.path).resolve()
        return lock_by_file(path.with_name(f"{path.name}-nobackfill.lock"), self._table.name)

    def read_migration_digest(self, column: str) -> str | None:
        """Return the digest of the map whose vectors a table holds; None for any other table, and
        after the flip.

        Args:
            column: Name of the table.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            InvalidInputError: Any other error of SQLite, such as a damaged file or a dropped table.
        """
        facts = self._database.read_facts(column)
        if column not in self._database.tables() or "flipped" in facts:
            return None
        return facts.get("map")

    def flip_digest(self) -> str | None:
        """Return the digest of the map that computed the source's vectors; None if no flip put them
        there.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            InvalidInputError: Any other error of SQLite, such as a damaged file or a dropped table.
        """
        facts = self._database.read_facts(self._table.name)
        return facts.get("map") if "flipped" in facts else None

    def flip_state(self, computer_digest: str) -> Literal["old", "flipped", "finished", "unknown"]:
        """Return whose vectors have the source's name: old, flipped, finished (the old ones are
        dropped) or unknown.

        It is unknown if an old table exists, but not from a flip to this map.

        Args:
            computer_digest: Digest of the map of the new vectors.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            InvalidInputError: Any other error of SQLite, such as a damaged file or a dropped table.
        """
        old_exists = self._old_name() in self._database.tables()
        if self.flip_digest() != computer_digest:
            return "unknown" if old_exists else "old"
        return "flipped" if old_exists else "finished"

    def _old_name(self) -> str:
        return old_name_after_flip(self._table.name)

    def flip_back(self, new_name: str, *, allow_loss: bool = False) -> int:
        """Give the old vectors their name back, and drop the new ones, in one transaction.

        A row counts as written if it is not as the migration made it, or has no old row. A row that
        was deleted since the flip loses its old vector, too, and is not counted.

        Args:
            new_name: Ignored: the file records the former name.
            allow_loss: Go on where rows were written since the flip: they lose their only vector.

        Returns:
            The number of rows that lost their vector.

        Raises:
            NotFoundError: There are no old vectors.
            InvalidInputError: Rows were written since the flip, and `allow_loss` is False; nothing
                is changed; or SQLite reports another error.
            BusyError: Others hold the file for longer than 10 s.
            ConfigurationError: The file is read-only.
        """
        database, table = self._database, self._table
        with database.transaction():
            facts = database.read_facts(table.name)
            if self._old_name() not in database.tables() or "flipped" not in facts:
                raise NotFoundError(
                    f"table {table.name}: no table {self._old_name()!r}, which a flip leaves with "
                    "the old vectors, so there is no flip to undo"
                )
            new, old = (
                VecTable(database, table.name, self.vector),
                VecTable(database, self._old_name(), self.vector),
            )
            items = f"{facts['flipped']} {facts['map']}"
            noted = dict(
                database.query_all("SELECT key, made FROM nobackfill_items WHERE map = ?", items)
            )
            there, seen, stale = _all_keys(old), set[Any](), []
            for page in _pages(new.rowids(Window())):
                for row in new.rows(page):
                    seen.add(row.key)
                    if row.key not in there or noted.get(row.key) != row.digest():
                        stale.append(row.key)
            refuse_lost_vectors(table.name, len(stale), "rows", allow_loss=allow_loss)
            # A row that was deleted or changed since the flip has no old vector any more.
            old.delete([key for key in there if key not in seen or key in set(stale)])
            database.query_all("DELETE FROM nobackfill_items WHERE map = ?", items)
            database.query_all(f"DROP TABLE {table.quoted}")
            database.rename(old.name, table.name)
            database.record_facts(table.name, database.read_facts(old.name))
            database.record_facts(old.name, {})
        self._table = VecTable(database, table.name, self.vector)
        return len(stale)

    def drop_old(self) -> None:
        """Drop the old vectors and the digests after a flip; the flip cannot be undone then.

        All is removed in one transaction. Call it only if `flip_state` returns flipped: the table
        of the old name is dropped, even if no flip made it.

        Raises:
            NotFoundError: There are no old vectors.
            BusyError: Others hold the file for longer than 10 s.
            ConfigurationError: The file is read-only.
            InvalidInputError: Any other error of SQLite, such as a full disk or a dropped table.
        """
        database, name = self._database, self._table.name
        with database.transaction():
            facts = database.read_facts(name)
            if self._old_name() not in database.tables():
                raise NotFoundError(
                    f"table {name}: no table {self._old_name()!r}, so that there are no old "
                    "vectors to drop"
                )
            items = f"{facts.get('flipped')} {facts.get('map')}"
            database.query_all("DELETE FROM nobackfill_items WHERE map = ?", items)
            database.record_facts(self._old_name(), {})
            database.query_all(f"DROP TABLE {_quoted_name(self._old_name())}")


class NewVecTable:
    """The table of the new vectors; implements Flippable."""

    concurrent_windows = 1
    writers_put_new_vectors = False
    flipped = False

    def __init__(
        self, database: VecDatabase, source: VecTable, copy: VecTable, target: Target
    ) -> None:
        self._database, self._source, self._copy, self._target = database, source, copy, target
        self._items = _notes_name(copy.name, target)
        # The version of the file when `pending` read it, and the ids that it returned.
        self._version = -1
        self._pending: set[str] = set()

    def pending(self, window: Window) -> Rows:
        """Remove the new vectors of deleted and changed rows; then read the rows without one.

        Rows come by increasing rowid. A row that a writer put into the new table counts as having a
        vector. The removal is a transaction of its own. Each call replaces what an earlier one
        read: write its rows before the next call.

        Args:
            window: Rowids above its lower end and up to its upper one.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            ConfigurationError: The file is read-only.
            InvalidInputError: Any other error of SQLite, such as a full disk or a dropped table.
        """
        pending_rows: list[VecRow] = []
        digests: list[str] = []
        stale: list[Any] = []
        with self._database.transaction("DEFERRED"):
            places = self._source.rowids(window)
            self._version = self._database.version
            items = self._noted_digests(window)
            for page in _pages(places):
                result = list(self._rows_with_digests(page))
                here = self._copy.rowid_by_key([row.key for row, _ in result])
                for row, now in result:
                    of = items.pop(row.key, None)
                    if of not in (None, now):
                        stale.append(row.key)
                    if of != now and (of is not None or row.key not in here):
                        pending_rows.append(row)
                        digests.append(now)
            # Items that are left over have no row in this window any more.
            stale += items
        if stale:
            self._remove(stale)
        self._pending = {str(row.key) for row in pending_rows}
        rows = _rows_with_vectors(pending_rows, self._source.name)
        return Rows(rows.ids, rows.vectors, pending_rows, digests)

    def _noted_digests(self, window: Window) -> dict[Any, str]:
        """Return the digests of the originals of our items in a window, by key."""
        where, bounds = _window_condition("place", window)
        query = f"SELECT key, of FROM nobackfill_items WHERE map = ? AND {where}"
        return dict(self._database.query_all(query, self._items, *bounds))

    def _rows_with_digests(self, places: Sequence[int]) -> Iterator[tuple[VecRow, str]]:
        """Read rows with the digest of what their new vector is computed from."""
        rows, content = self._source.rows(places), self._target.content_column
        texts = {} if content is None else self._source.texts(places, content)
        for row in rows:
            yield row, row.digest(content=texts.get(row.key))

    def _remove(self, keys: Sequence[Any]) -> None:
        with self._database.transaction():
            self._copy.delete(keys)
            self._forget(keys)

    def _forget(self, keys: Sequence[Any]) -> None:
        self._database.run_for_rows(
            "DELETE FROM nobackfill_items WHERE map = ? AND key = ?",
            [(self._items, key) for key in keys],
        )

    def write(self, rows: Rows, vectors: Vectors) -> None:
        """Write new vectors with their digests, in one transaction, and replace existing ones.

        A row that has changed since `pending` read it is left out and stays pending.

        Args:
            rows: n rows of the last `pending`; a change of earlier windows' rows is not noticed.
            vectors: float32 [n, dim].

        Raises:
            BusyError: Others hold the file for longer than 10 s; nothing was written.
            ConfigurationError: The file is read-only; nothing was written.
            InvalidInputError: A vector has another dimension, or SQLite reports another error;
                nothing was written.
            IndexError: There are fewer vectors than rows; nothing was written.
        """
        given = [one for one in rows.keys if isinstance(one, VecRow)]
        seen = [str(one) for one in rows.versions]
        with self._database.transaction():
            # Read inside the transaction: nobody else commits until its end.
            same = set(range(len(given)))
            if self._database.version != self._version:
                now = {
                    row.key: digest
                    for page in _pages(sorted(row.rowid for row in given))
                    for row, digest in self._rows_with_digests(page)
                }
                same = {row for row in same if now.get(given[row].key) == seen[row]}
            order = sorted(same)
            some = [given[row] for row in order]
            stored = np.asarray(vectors, np.float32)[order]
            self._copy.delete([row.key for row in some])
            self._copy.insert(some, stored)
            self._note_items(some, stored, [seen[row] for row in order])
        self._pending -= {str(row.key) for row in some}

    def _note_items(self, rows: Sequence[VecRow], vectors: Vectors, digests: Sequence[str]) -> None:
        self._database.run_for_rows(
            "INSERT OR REPLACE INTO nobackfill_items VALUES (?, ?, ?, ?, ?)",
            [
                (self._items, row.key, row.rowid, of, row.digest(vector))
                for row, vector, of in zip(rows, vectors, digests, strict=True)
            ],
        )

    def read(self, window: Window) -> Rows:
        """Read the new vectors that were computed here, not those that a writer put.

        The order is arbitrary.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            InvalidInputError: Any other error of SQLite, such as a damaged file or a dropped table.
        """
        with self._database.transaction("DEFERRED"):
            keys = list(self._noted_digests(window))
            rows = self._copy.rows(self._copy.rowids_of_keys(keys), with_other_columns=False)
        order = {key: number for number, key in enumerate(keys)}
        return _rows_with_vectors(sorted(rows, key=lambda one: order[one.key]), self._copy.name)

    def count(self) -> int:
        """Count the rows that have a new vector.

        Returns:
            The number of rows, also those that a writer put.

        Raises:
            BusyError: Others hold the file for longer than 10 s.
            InvalidInputError: Any other error of SQLite, such as a damaged file or a dropped table.
        """
        return self._copy.count()

    def prepare_flip(self) -> AbstractContextManager[None]:
        """Do nothing: vec0 has no index, and the transaction keeps other flips out."""
        return nullcontext()

    @contextmanager
    def open_flip(self) -> Iterator[None]:
        """Exclude other writers for the block; then swap the names in the same transaction.

        If the block raises, its writes and the flip are undone. After the flip, do not use this
        object: `flipped` stays False, and its tables have other names.

        Raises:
            InvalidInputError: Rows that the last `pending` returned have no new vector, the table
                of an earlier flip exists, or SQLite reports another error. The names stay.
            BusyError: Others hold the file for longer than 10 s.
            ConfigurationError: The file is read-only.
        """
        name, new = self._source.name, self._copy.name
        before, database = old_name_after_flip(self._source.name), self._database
        with database.transaction():
            yield
            if self._pending:
                raise InvalidInputError(
                    f"table {name}: {len(self._pending)} rows have no new vector, so searches "
                    f"cannot flip to the new vectors: {join_few(self._pending)}; run `nobackfill "
                    "carry` again"
                )
            if before in database.tables():
                raise InvalidInputError(
                    f"table {name}: the table {before!r} of an earlier flip still exists; drop "
                    "that table, then run the command again"
                )
            # Rows that writers put into both tables: a change after the flip shows by a digest.
            noted = self._noted_digests(Window())
            ours = [key for key in _all_keys(self._copy) if key not in noted]
            for page in _pages(self._copy.rowids_of_keys(ours)):
                rows = self._copy.rows(page)
                vectors = stack_vectors(
                    [row.vector for row in rows], [str(row.key) for row in rows], name
                )
                self._note_items(rows, vectors, [""] * len(rows))
            facts = database.read_facts(new)
            database.record_facts(before, database.read_facts(name))
            database.record_facts(new, {})
            database.record_facts(name, facts | {"flipped": new})
            database.rename(name, before)
            database.rename(new, name)

    def owner_tasks(self) -> list[str]:
        """Return the owner's task after the flip, as a sentence."""
        return [
            f"writers put vectors of the new model into {self._source.name} from now on; a vector "
            "of the old model's dimension is refused"
        ]

    def finish(self) -> list[str]:
        """Return the owner's step to the flip, as a sentence; vec0 needs `carry` with --flip for
        it. With a condition there is no flip, and the sentence names the table to search."""
        if self._source.where is not None:
            return [
                f"search the table {self._copy.name}, which has the rows of the condition alone, "
                "by vectors of the new model"
            ]
        return [
            "switch the queries and the writers to the new model; in the same moment run `carry` "
            "with --flip, which carries the last rows and swaps the names of both tables. ALTER "
            "TABLE alone would break them, because vec0 forgets the tables behind"
        ]


def _connect(path: str) -> Any:
    """Open a connection with sqlite-vec, by Python's own SQLite where it loads extensions.

    Two copies of SQLite in one process would release one another's locks.
    """
    connection: Any
    if hasattr(sqlite3.Connection, "enable_load_extension"):
        connection = sqlite3.connect(
            path, timeout=_WAIT_MS / 1000, isolation_level=None, check_same_thread=False
        )
    else:
        connection = apsw.Connection(path)
        connection.set_busy_timeout(_WAIT_MS)
    connection.enable_load_extension(True)
    sqlite_vec.load(connection)
    connection.enable_load_extension(False)
    return connection


def _notes_name(name: str, target: Target) -> str:
    """Return the name under which the items of a copy are noted."""
    return f"{name} {target.computer_digest}"


def _window_condition(column: str, window: Window) -> tuple[str, list[object]]:
    """Return the condition that a rowid is in a window, and its parameters."""
    both = [(">", window.lower), ("<=", window.upper)]
    given = [(sign, bound) for sign, bound in both if bound is not None]
    where = " AND ".join(["true", *(f"{column} {sign} ?" for sign, _ in given)])
    return where, [bound for _, bound in given]


def _all_keys(table: VecTable) -> set[Any]:
    column = "id" if table.has_text_key else "rowid"
    return {
        key
        for (key,) in table.database.query_all(
            f"SELECT {column} FROM {table.shadow_table('rowids')}"
        )
    }


def _pages(places: Sequence[_One]) -> Iterator[Sequence[_One]]:
    for first in range(0, len(places), _PAGE):
        yield places[first : first + _PAGE]


def _rows_with_vectors(rows: Sequence[VecRow], where: str) -> Rows:
    ids = [str(row.key) for row in rows]
    return Rows(ids, stack_vectors([row.vector for row in rows], ids, where), list(rows))


def _parse_column(definition: str, table: str) -> VecColumn:
    """Parse one definition of CREATE VIRTUAL TABLE. Raises InvalidInputError."""
    text = definition.strip()
    for role, form in _FORMS.items():
        result = form.fullmatch(text)
        if result is None:
            continue
        if role == "option":
            return VecColumn("", role, "", text)
        name, kind = result[1], result[2].lower()
        if role != "vector":
            return VecColumn(name, role, kind, text)
        metric = (result[4] or "").lower()
        one = VecColumn(name, role, kind, text, int(result[3]), metric)
        if one.stores_float32 and metric and metric not in _METRICS:
            break
        return one
    raise InvalidInputError(
        f"{table}: nobackfill does not know the definition {text!r} of a column of vec0, so the "
        "table is not migrated; copy its vectors into a vec0 table of float vectors"
    )


def _quoted_name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


@contextmanager
def translate_errors(name: str) -> Iterator[None]:
    """Convert errors of SQLite in the block to errors of nobackfill.

    Other exceptions pass unchanged.

    Args:
        name: The file, for the messages.

    Raises:
        BusyError: Others hold the file for longer than the connection waits.
        ConfigurationError: The file is read-only.
        InvalidInputError: Any other error of SQLite.
    """
    try:
        yield
    except (sqlite3.Error, apsw.Error) as error:
        busy = isinstance(error, apsw.BusyError | apsw.LockedError) or "locked" in str(error)
        kind: type[NobackfillError] = BusyError if busy else InvalidInputError
        if isinstance(error, apsw.ReadOnlyError) or "readonly" in str(error):
            kind = ConfigurationError
        raise kind(f"{name}: SQLite refuses the statement: {error}") from error
