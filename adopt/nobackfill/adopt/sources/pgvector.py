"""A table of PostgreSQL with pgvector. New vectors go into a new column of the same rows, so a
deleted row takes its vector along; a trigger empties it where the old vector changes."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal, LiteralString

import numpy as np

from nobackfill.adopt.sources.postgres_rows import parsed
from nobackfill.adopt.sources.source import (
    Beside,
    ColumnValues,
    Facts,
    Rows,
    SearchMetric,
    Target,
    Window,
    even,
)
from nobackfill.errors import AlreadyExistsError, InvalidInputError, NotFoundError, few
from nobackfill.extras import extra
from nobackfill.vectors import Vectors

with extra("adopt"):
    from psycopg import sql

    from nobackfill.adopt.sources import pgvector_beside
    from nobackfill.adopt.sources.pgvector_beside import (
        METRICS,
        MOST_NAME,
        PgvectorBeside,
        PgvectorTable,
        before,
        column_obstacles,
        table_obstacles,
    )
    from nobackfill.adopt.sources.postgres_dependents import column_properties, moves
    from nobackfill.adopt.sources.postgres_table import Changes, SourceTable, note

_SIGNS: Mapping[SearchMetric, LiteralString] = {
    "cosine": "<=>", "squared_l2": "<->", "inner_product": "<#>", "l1": "<+>",
}  # fmt: skip
# When a new vector is emptied. The first two conditions tell what carrying itself writes without
# reading an old vector. IS DISTINCT FROM would not do: a dump of it does not name the operator's
# schema, so the triggers of a restored table are missing.
_CHANGED: LiteralString = (
    " UPDATE ON {table} FOR EACH ROW WHEN (NEW.{new} IS NOT NULL AND NEW.{new} {same} OLD.{new} "
    "AND ((OLD.{old} IS NULL) <> (NEW.{old} IS NULL) OR NOT OLD.{old} {same} NEW.{old}{content}))"
)
_BEFORE: LiteralString = "BEFORE" + _CHANGED
_AFTER: LiteralString = "AFTER" + _CHANGED
# A row that an update moves to another partition is inserted there.
_MOVED: LiteralString = "AFTER INSERT ON {table} FOR EACH ROW WHEN (NEW.{new} IS NOT NULL)"
# AFTER meets what the owner's own triggers and a generated column make of a row. It writes an empty
# vector, which fires neither again.
_BODY: LiteralString = """
  IF TG_WHEN = 'BEFORE' THEN
    NEW.{new} := NULL;
    RETURN NEW;
  END IF;
  EXECUTE 'UPDATE ' || TG_RELID::regclass || {emptying} USING NEW.{key};
  RETURN NULL;
END"""


class PgvectorSource:
    """A table with a key; see Table. `vector`: None for the only column of vectors."""

    def __init__(
        self, address: str, table: str, key: str | None = None, vector: str | None = None
    ) -> None:
        self._table = SourceTable(address, table, key)
        vectors = [name for name in self._table.columns if self._table.kind(name)]
        if vector is None:
            # What was carried is found when it is named.
            vectors = [name for name in vectors if self._table.mark(name) is None]
        if (vector is None and len(vectors) != 1) or (vector is not None and vector not in vectors):
            others = {name: kind for name, kind in self._table.columns.items() if _other(kind)}
            what_next = "name one with --vector"
            if others:
                what_next = (
                    f"vectors of type {few(sorted(set(others.values())))} (in {few(others)}) are "
                    "not carried"
                )
            elif not vectors:
                what_next = (
                    "a column of numbers becomes one by ALTER TABLE … ALTER COLUMN … TYPE vector(N)"
                )
            raise InvalidInputError(
                f"{table}: expected {'one column' if vector is None else repr(vector)} of type "
                f"vector or halfvec, found {few(vectors) or 'none'}; {what_next}"
            )
        self.vector = vector or vectors[0]
        self._expressions: dict[str, tuple[str, sql.Composable]] = {}

    def facts(self) -> Facts:
        table, vector = self._table, self.vector
        others = tuple(name for name in table.columns if name not in (table.key, vector))
        model = table.said(vector).get("model")
        return Facts(f"{table.name}.{vector}", table.dim(vector), self.metric, model, others)

    @cached_property
    def metric(self) -> SearchMetric | None:
        """Of the old column's indexes; a search has no time to ask for it. Raises InvalidInputError
        where they are of several."""
        metrics = {METRICS[name] for name, _ in self._table.indexes(self.vector) if name in METRICS}
        if len(metrics) > 1:
            raise InvalidInputError(
                f"{self._table.name}.{self.vector}: expected indexes of one metric, found "
                f"{few(sorted(metrics))}; drop those that no query uses"
            )
        return next(iter(metrics), None)

    @cached_property
    def halves(self) -> bool:
        """Whether the old column, or an index of it, holds halves."""
        classes = [name for name, _ in self._table.indexes(self.vector)]
        return self._table.kind(self.vector) == "halfvec" or any(
            name.startswith("halfvec") for name in classes
        )

    def count(self) -> int:
        return self.filled(self.vector)

    def dims(self) -> dict[int, int]:
        dim = self._table.dim(self.vector)
        return self._table.dims(self.vector) if dim is None else {dim: self.count()}

    def windows(self, rows: int) -> Iterator[Window]:
        self._table.every_row_is_seen()
        after: object = None
        while True:
            last = self._table.one(
                "SELECT {key} FROM {table} t WHERE {above} ORDER BY {key} OFFSET {skipped} LIMIT 1",
                above=self._table.within(Window(after), "t"),
                skipped=rows - 1,
            )
            # The last window is open: it holds what comes while the others are carried.
            yield Window(after, last)
            if last is None:
                return
            after = last

    def read(self, window: Window) -> Rows:
        return self.rows(self.vector, window)

    def column(self, window: Window, name: str) -> ColumnValues:
        if name not in self._table.columns:
            raise InvalidInputError(f"{self._table.name}: no column {name!r}")
        found = self._table.all(
            "SELECT {key}::text, {name}::text FROM {table} t WHERE {name} IS NOT NULL AND {within} "
            "ORDER BY t.{key}",
            name=sql.Identifier(name),
            within=self._table.within(window, "t"),
        )
        return ColumnValues([key for key, _ in found], [value for _, value in found])

    def nearest(self, vector: Vectors, count: int, beside: str | None = None) -> list[str]:
        """By an index where there is one, told to look at no fewer than `count` candidates."""
        column, of = beside or self.vector, None
        if column.startswith(pgvector_beside.PREFIX):
            of = pgvector_beside.table_names(self._table, self.vector, column)["beside"]
            column = self.vector
        elif column not in self._table.columns:
            raise InvalidInputError(f"{self._table.name}: no column {column!r}")
        kind, expression = self._searched(column, of)
        found = self._table.searched(
            "SELECT {key}::text FROM {relation} t WHERE {column} IS NOT NULL "
            "ORDER BY {expression} {sign} {value}::{kind} LIMIT {count}",
            "SET LOCAL hnsw.ef_search = {candidates}",
            relation=of or self._table.composed("{table}"),
            column=sql.Identifier(column),
            expression=expression,
            sign=self._table.operator(_SIGNS[self.metric or "cosine"]),
            kind=self._table.of_pgvector(kind),
            value=str(np.asarray(vector, np.float32).tolist()),
            count=count,
            candidates=min(1000, max(40, count)),
        )
        return [name for (name,) in found]

    def _searched(self, column: str, of: sql.Identifier | None) -> tuple[str, sql.Composable]:
        """The type that a column is searched by, and the expression that an index is on."""
        place = column if of is None else of.as_string()
        if place not in self._expressions:
            metric = self.metric or "cosine"
            found = [
                one for one in self._table.indexes(column, of) if METRICS.get(one[0]) == metric
            ]
            kind, expression = self._table.kind(self.vector), sql.Identifier(column).as_string()
            if found:
                kind, expression = found[0][0].partition("_")[0], found[0][1]
            # A name or an expression of the catalogue's.
            self._expressions[place] = kind, sql.SQL(expression)
        return self._expressions[place]

    def lookup(self, ids: Sequence[str]) -> Rows:
        found = self._table.searched(
            "SELECT {key}::text, {vector_send}({column}::{vector}) FROM {table} t "
            "WHERE {column} IS NOT NULL AND {key} = ANY({ids}::{kind}[])",
            column=sql.Identifier(self.vector),
            kind=sql.SQL(self._table.key_type),
            ids=list(ids),
        )
        vectors = [np.frombuffer(value[4:], ">f4") for _, value in found]
        names = [name for name, _ in found]
        return Rows(names, even(vectors, names, self._table.name))

    def texts(self, ids: Sequence[str], column: str) -> dict[str, str]:
        if column not in self._table.columns:
            raise InvalidInputError(f"{self._table.name}: no column {column!r}")
        found = self._table.searched(
            "SELECT {key}::text, {column}::text FROM {table} t "
            "WHERE {column} IS NOT NULL AND {key} = ANY({ids}::{kind}[])",
            column=sql.Identifier(column),
            kind=sql.SQL(self._table.key_type),
            ids=list(ids),
        )
        return dict(found)

    def close(self) -> None:
        self._table.close()

    def warnings(self, to: str) -> list[str]:
        triggers = [] if to.startswith(pgvector_beside.PREFIX) else self._table.on_update()
        if not triggers:
            return []
        return [
            f"{self._table.name}: writing {to} updates every row, which fires the triggers "
            f"{', '.join(triggers)}; --to {pgvector_beside.PREFIX}NAME updates no row"
        ]

    def obstacles(self, target: Target) -> list[str]:
        if target.name.startswith(pgvector_beside.PREFIX):
            return table_obstacles(self._table)
        if self._flipped(target):
            return []
        return column_obstacles(self._table, self.vector, target)

    def _flipped(self, target: Target) -> bool:
        """Tell whether a flip gave the target's name to vectors of its map."""
        name = target.name
        return self.vector == before(name) and self._table.said(name).get("carried") == target.mark

    def beside(self, target: Target) -> Beside:
        self._table.every_row_is_seen()
        name = target.name.removeprefix(pgvector_beside.PREFIX)
        if len(name.encode("utf-8", "surrogateescape")) > MOST_NAME:
            raise InvalidInputError(
                f"--to: expected at most {MOST_NAME} bytes, which is what PostgreSQL keeps of a "
                f"name, got {name!r}"
            )
        if name != target.name:
            names, digest = pgvector_beside.make_table(self._table, self.vector, target)
            place_in_table = PgvectorTable(self, self._table, target, names, digest)
            place_in_table.drop_unfinished_indexes()
            return place_in_table
        with self._table.changing() as changes:
            made = self._table.mark(target.name)
            found = self._table.triggers(self._names(target.name)["function"]).digest
            # Also one that somebody else has made since the table was looked at.
            there = made is not None or target.name in self._table.columns
            # After a flip, rows are filled that have no new vector.
            flipped = self._flipped(target)
            if there and made != target.mark and not flipped:
                raise AlreadyExistsError(
                    f"{self._table.name}: column {target.name!r} exists already and was not made "
                    "by this map; choose another --to, or remove it with --rollback"
                )
            if not there:
                names = self._names(target.name)
                dim = sql.SQL(str(int(target.dim)))
                changes.run("ALTER TABLE {table} ADD COLUMN {new} {type}({dim})", dim=dim, **names)
                mark = note(nobackfill=target.mark, model=target.model)
                changes.run("COMMENT ON COLUMN {table}.{new} IS {mark}", mark=mark, **names)
                dims = self._table.dim(self.vector), target.dim
                here = self._table.text("{here}")
                for step in column_properties(self._table, self.vector, here, target.name, dims):
                    changes.run_text(step)
            digest = None if flipped else self.watch(changes, target)
            if target.native and not flipped:
                self._check_watched(changes, target, found, digest, there)
        place = PgvectorBeside(self, self._table, self._names(target.name), target, flipped, digest)
        place.drop_unfinished_indexes()
        return place

    def _check_watched(
        self, changes: Changes, target: Target, found: str | None, digest: str | None, there: bool
    ) -> None:
        """Note the digest of the triggers. Raise AlreadyExistsError where it differs from what was
        noted: no map can tell which of the native vectors are stale then."""
        noted = self._table.said(target.name).get("triggers")
        if there and noted != found and self.filled(target.name):
            raise AlreadyExistsError(
                f"{self._table.name}: column {target.name!r} may hold stale vectors: its triggers "
                "were dropped, disabled or made again since they were written; remove it with "
                "--rollback and carry again"
            )
        if noted != digest:
            changes.run(
                "COMMENT ON COLUMN {table}.{new} IS {mark}",
                mark=note(nobackfill=target.mark, model=target.model, triggers=digest),
                **self._names(target.name),
            )

    def watch(self, changes: Changes, target: Target) -> str | None:
        """Triggers that empty a vector whose old one changes, made or mended: a writer who knows
        nothing of the new column leaves a vector there that is no longer of the old one. Returns
        their digest."""
        table, names = self._table, self._names(target.name)
        emptying = table.text(" AS t SET {new} = NULL WHERE t.{key} {equals} $1", **names)
        body = table.trigger_body(_BODY, emptying=emptying, **names)
        name = table.trigger_name(self.vector, target.name)
        triggers = {f"{name}_changed": _AFTER}
        watched = filter(None, (self.vector, target.content))
        if not any(table.generated(column) for column in watched):
            # Most changes are met before the row is written, which is then written once.
            triggers[name] = _BEFORE
        if table.partitioned:
            triggers[f"{name}_moved"] = _MOVED
        changes.forget_watchers(**names)
        content = table.changed_text(target.content)
        return changes.watch(body, triggers, content=content, **names)

    def rollback(self, name: str) -> bool:
        if name.startswith(pgvector_beside.PREFIX):
            return pgvector_beside.remove_table(self._table, self.vector, name)
        names = self._names(name)
        with self._table.changing() as changes:
            if self._table.mark(name) is None:
                return False
            changes.forget_watchers(**names)
            changes.run("DROP FUNCTION IF EXISTS {function}() CASCADE", **names)
            changes.run("ALTER TABLE {table} DROP COLUMN {new}", **names)
        return True

    def name_model(self, model: str) -> None:
        """See Reversible."""
        said = self._table.said(self.vector) | {"model": model}
        with self._table.changing() as changes:
            changes.run(
                "COMMENT ON COLUMN {table}.{old} IS {said}",
                said=note(self._table.comment(self.vector), **said),
                old=sql.Identifier(self.vector),
            )

    def mark_of(self, column: str) -> str | None:
        """See Reversible."""
        return self._table.mark(column)

    def flip_state(self, mark: str) -> Literal["old", "flipped", "finished", "unknown"]:
        """See Reversible."""
        kept = before(self.vector) in self._table.columns
        if self._table.said(self.vector).get("carried") != mark:
            return "unknown" if kept else "old"
        return "flipped" if kept else "finished"

    def flip_back(self, to: str, *, lose: bool = False) -> int:
        """See Reversible."""
        table, old = self._table, before(self.vector)
        names = self._names(old) | {"name": sql.Identifier(to)}
        if old not in table.columns:
            raise NotFoundError(f"{table.name}: no column {old!r}: nothing was flipped")
        # A row that is hidden would lose its only vector, uncounted.
        table.every_row_is_seen()
        states = table.triggers(names["function"]).states
        if not states or set(states) != {"A"}:
            raise InvalidInputError(
                f"{table.name}: column {old!r} may hold stale vectors, because no trigger has "
                "emptied them since the flip; only `nobackfill migrate` makes a flip that can be "
                "taken back"
            )

        def steps() -> list[str]:
            moved = moves(table, self.vector, (table.dim(self.vector), table.dim(old) or 0))
            if moved.left:
                raise InvalidInputError(
                    f"{table.name}: these depend on the new vectors and cannot be moved: "
                    f"{few(moved.left)}; drop them and try again"
                )
            rename = "ALTER TABLE {table} RENAME COLUMN {old} TO {name}"
            return [
                *table.finding_pgvector(),
                table.text("DROP FUNCTION {function}() CASCADE", **names),
                *moved.before,
                table.text(rename, **names),
                table.text("ALTER TABLE {table} RENAME COLUMN {new} TO {old}", **names),
                *moved.after,
                table.text("ALTER TABLE {table} DROP COLUMN {name}", **names),
            ]

        demanded = table.one(
            "SELECT attnotnull FROM pg_attribute WHERE attrelid = {oid} AND attname = {column}",
            oid=table.oid,
            column=self.vector,
        )
        with table.flipping(steps):
            lost = int(
                table.one(
                    "SELECT count(*) FROM {table} WHERE {old} IS NOT NULL AND {new} IS NULL",
                    **names,
                )
            )
            if lost and (demanded or not lose):
                ending = (
                    f"{self.vector!r} is NOT NULL: delete these rows, or fill {old!r} with the "
                    "old model"
                    if demanded
                    else "run it with --yes to lose them"
                )
                raise InvalidInputError(
                    f"{table.name}: {lost} rows were written since the flip and have no old "
                    f"vector; {ending}"
                )
        return lost

    def drop_old(self) -> None:
        """See Reversible."""
        old = before(self.vector)
        if old not in self._table.columns:
            raise NotFoundError(f"{self._table.name}: no column {old!r}: nothing was flipped")
        with self._table.changing() as changes:
            names = self._names(old)
            changes.run("DROP FUNCTION IF EXISTS {function}() CASCADE", **names)
            changes.run("ALTER TABLE {table} DROP COLUMN {new}", **names)

    def _names(self, new: str) -> dict[str, sql.Identifier]:
        """Quoted: both columns, their type, and the trigger function, which is beside the table:
        its owner may make things there."""
        return {
            "old": sql.Identifier(self.vector),
            "new": sql.Identifier(new),
            "type": self._table.of_pgvector(self._table.kind(self.vector)),
            "function": sql.Identifier(
                self._table.schema, self._table.trigger_name(self.vector, new)
            ),
        }

    def filled(self, column: str) -> int:
        """Rows that have a vector in `column`; 0 where there is no such column."""
        if column not in self._table.columns:
            return 0
        return int(
            self._table.one(
                "SELECT count(*) FROM {table} WHERE {column} IS NOT NULL",
                column=sql.Identifier(column),
            )
        )

    def rows(self, column: str, window: Window, missing: str | None = None) -> Rows:
        """Rows of a window by key that have a vector in `column`, and none in `missing`."""
        found = self._table.copied(
            "SELECT t.{key}::text, {column}::{vector}, t.ctid, t.xmin, t.tableoid "
            "FROM {table} t WHERE {column} IS NOT NULL AND {condition} AND {within} "
            "ORDER BY t.{key}",
            column=sql.Identifier(column),
            condition=sql.SQL("true")
            if missing is None
            else sql.SQL("{} IS NULL").format(sql.Identifier(missing)),
            within=self._table.within(window, "t"),
        )
        return parsed(found, self._table.name)


def _other(kind: str) -> bool:
    """Whether it is a type of vectors that are not carried."""
    return kind.rpartition(".")[2].startswith(("bit", "sparsevec"))
