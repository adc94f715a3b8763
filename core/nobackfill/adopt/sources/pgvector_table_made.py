"""The table of new vectors: how it is made and taken back, and the triggers that empty a vector
when its row is written."""

import hashlib
import json
from typing import LiteralString

from nobackfill.adopt.sources.source import Target
from nobackfill.errors import AlreadyExistsError
from nobackfill.extras import extra

with extra("adopt"):
    from psycopg import sql

    from nobackfill.adopt.sources.postgres_table import Changes, Table

# `--to table:NAME`.
PREFIX = "table:"


def make(table: Table, vector: str, target: Target) -> None:
    """The table beside, made or found again. Raises AlreadyExistsError."""
    names = names_of(table, vector, target.name)
    mark = {"nobackfill": target.mark, "of": names["function"].as_string()}
    with table.changing() as changes:
        made = table.said_beside(names["beside"])
        if made is not None and {name: made.get(name) for name in mark} != mark:
            raise AlreadyExistsError(
                f"{table.name}: table {target.name.removeprefix(PREFIX)!r} exists already and was "
                "not made by this map; choose another --to, or remove it with --rollback"
            )
        if made is None:
            _make(table, changes, names, target, mark)
        elif not _watched(table, names):
            raise AlreadyExistsError(
                f"{table.name}: nothing has emptied what is stale in table "
                f"{target.name.removeprefix(PREFIX)!r} since its triggers are gone or disabled; "
                "remove it with --rollback and carry again"
            )


def _make(
    table: Table,
    changes: Changes,
    names: dict[str, sql.Identifier],
    target: Target,
    mark: dict[str, str],
) -> None:
    dim = sql.SQL(str(int(target.dim)))
    # As a query's, the key's column has the type and the collation of the old one.
    changes.run("CREATE TABLE {beside} AS SELECT {key} FROM {table} WITH NO DATA", **names)
    changes.run("ALTER TABLE {beside} ADD PRIMARY KEY ({key})", **names)
    changes.run("ALTER TABLE {beside} ADD COLUMN {old} vector({dim})", dim=dim, **names)
    # All but what is emptied later is passed over.
    changes.run("CREATE INDEX {empty_name} ON {beside} ({key}) WHERE {old} IS NULL", **names)
    model = {"model": target.model} if target.model else {}
    changes.run("COMMENT ON TABLE {beside} IS {mark}", mark=json.dumps(mark | model), **names)
    if model:
        said = json.dumps(model)
        changes.run("COMMENT ON COLUMN {beside}.{old} IS {said}", said=said, **names)
    changes.run(
        # By its maker's rights: who writes to the old table need not know of this one.
        "CREATE OR REPLACE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql "
        "SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS {body}",
        body=table.text(_BODY, **names),
        **names,
    )
    for event in _EVENTS:
        changes.run(event, **names)


# A literal in its function: no name can end it.
_BODY: LiteralString = """
#variable_conflict use_column
BEGIN
  IF TG_OP = 'TRUNCATE' THEN
    TRUNCATE {beside};
  END IF;
  IF TG_OP IN ('DELETE', 'UPDATE') THEN
    INSERT INTO {beside} ({key}, {old}) VALUES (OLD.{key}, NULL)
    ON CONFLICT ({key}) DO UPDATE SET {old} = NULL;
  END IF;
  IF TG_OP = 'INSERT' OR TG_OP = 'UPDATE' AND NEW.{key} IS DISTINCT FROM OLD.{key} THEN
    INSERT INTO {beside} ({key}, {old}) VALUES (NEW.{key}, NULL)
    ON CONFLICT ({key}) DO UPDATE SET {old} = NULL;
  END IF;
  RETURN NULL;
END"""
_EVENTS: tuple[LiteralString, ...] = (
    "CREATE TRIGGER {trigger} AFTER INSERT OR DELETE ON {table} "
    "FOR EACH ROW EXECUTE FUNCTION {function}()",
    "CREATE TRIGGER {changed} AFTER UPDATE ON {table} FOR EACH ROW "
    "WHEN (OLD.{old} IS DISTINCT FROM NEW.{old} OR OLD.{key} IS DISTINCT FROM NEW.{key}) "
    "EXECUTE FUNCTION {function}()",
    "CREATE TRIGGER {emptied} AFTER TRUNCATE ON {table} "
    "FOR EACH STATEMENT EXECUTE FUNCTION {function}()",
)


def _watched(table: Table, names: dict[str, sql.Identifier]) -> bool:
    """Whether all triggers are there: a table that was made anew under its name has none."""
    found = table.one(
        "SELECT count(*) FROM pg_trigger WHERE tgrelid = to_regclass({relation}) "
        "AND tgfoid = to_regproc({maker}) AND tgenabled <> 'D'",
        relation=table.composed("{table}").as_string(),
        maker=names["function"].as_string(),
    )
    return bool(found == len(_EVENTS))


def remove(table: Table, vector: str, name: str) -> bool:
    """Take it back; whether there was one of this source's."""
    names = names_of(table, vector, name)
    with table.changing() as changes:
        made = table.said_beside(names["beside"])
        if made is None or made.get("of") != names["function"].as_string():
            return False
        changes.run("DROP FUNCTION IF EXISTS {function}() CASCADE", **names)
        changes.run("DROP TABLE {beside}", **names)
    return True


def names_of(table: Table, vector: str, name: str) -> dict[str, sql.Identifier]:
    """Quoted: the table beside, its column, the triggers and their function."""
    beside = name.removeprefix(PREFIX)
    pair = f"{table.schema}\0{table.relation}\0{vector}\0{PREFIX}{beside}".encode()
    trigger = f"nobackfill_{hashlib.sha256(pair).hexdigest()[:16]}"
    return {
        "old": sql.Identifier(vector),
        "beside": sql.Identifier(table.schema, beside),
        "trigger": sql.Identifier(trigger),
        "changed": sql.Identifier(f"{trigger}_changed"),
        "emptied": sql.Identifier(f"{trigger}_emptied"),
        "function": sql.Identifier(table.schema, trigger),
        "empty_name": sql.Identifier(f"{trigger}_empty"),
        "empty": sql.Identifier(table.schema, f"{trigger}_empty"),
    }
