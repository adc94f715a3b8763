"""The table of new vectors: how it is made and taken back, and the triggers that empty a vector
when its row is written."""

from typing import LiteralString

from nobackfill.adopt.sources.source import Target
from nobackfill.errors import AlreadyExistsError
from nobackfill.extras import extra

with extra("adopt"):
    from psycopg import sql

    from nobackfill.adopt.sources.postgres_table import Changes, Table, note

# `--to table:NAME`.
PREFIX = "table:"


def make(table: Table, vector: str, target: Target) -> bool:
    """The table beside, made or found again; whether it is the one that was flipped to. Raises
    AlreadyExistsError."""
    names = names_of(table, vector, target.name)
    of = {"of": names["function"].as_string()}
    mark = {"nobackfill": target.mark, **of}
    with table.changing() as changes:
        made = table.said_beside(names["beside"])
        flipped = {"carried": target.mark, **of}
        if made is not None and {name: made.get(name) for name in flipped} == flipped:
            return True
        if made is not None and {name: made.get(name) for name in mark} != mark:
            raise AlreadyExistsError(
                f"{table.name}: table {target.name.removeprefix(PREFIX)!r} exists already and was "
                "not made by this map; choose another --to, or remove it with --rollback"
            )
        _, states = table.watching(names["function"])
        if made is None:
            _make(changes, names, target, mark)
        elif len(states) != len(_EVENTS) or "D" in states:
            raise AlreadyExistsError(
                f"{table.name}: nothing has emptied what is stale in table "
                f"{target.name.removeprefix(PREFIX)!r} since its triggers are gone or disabled; "
                "remove it with --rollback and carry again"
            )
        name = table.trigger_name(vector, target.name)
        events = {name + end: event for end, event in _EVENTS.items()}
        changes.watch(table.trigger_body(_BODY, **names), events, **names)
    return False


def _make(
    changes: Changes, names: dict[str, sql.Identifier], target: Target, mark: dict[str, str]
) -> None:
    dim = sql.SQL(str(int(target.dim)))
    # As a query's, the key's column has the type and the collation of the old one.
    changes.run("CREATE TABLE {beside} AS SELECT {key} FROM {table} WITH NO DATA", **names)
    changes.run("ALTER TABLE {beside} ADD PRIMARY KEY ({key})", **names)
    changes.run("ALTER TABLE {beside} ADD COLUMN {old} {type}({dim})", dim=dim, **names)
    # All but what is emptied later is passed over.
    changes.run("CREATE INDEX {empty_name} ON {beside} ({key}) WHERE {old} IS NULL", **names)
    mark_and_model = note(model=target.model, **mark)
    changes.run("COMMENT ON TABLE {beside} IS {mark}", mark=mark_and_model, **names)
    if target.model:
        said = note(model=target.model)
        changes.run("COMMENT ON COLUMN {beside}.{old} IS {said}", said=said, **names)
    changes.owned("TABLE", names["beside"])


_BODY: LiteralString = """
  IF TG_OP = 'TRUNCATE' THEN
    TRUNCATE {beside};
  END IF;
  IF TG_OP IN ('DELETE', 'UPDATE') THEN
    INSERT INTO {beside} ({key}, {old}) VALUES (OLD.{key}, NULL)
    ON CONFLICT ({key}) DO UPDATE SET {old} = NULL;
  END IF;
  IF TG_OP = 'INSERT' OR TG_OP = 'UPDATE' AND NOT NEW.{key} {equals} OLD.{key} THEN
    INSERT INTO {beside} ({key}, {old}) VALUES (NEW.{key}, NULL)
    ON CONFLICT ({key}) DO UPDATE SET {old} = NULL;
  END IF;
  RETURN NULL;
END"""
_EVENTS: dict[str, LiteralString] = {
    "": "AFTER INSERT OR DELETE ON {table} FOR EACH ROW",
    "_changed": "AFTER UPDATE ON {table} FOR EACH ROW "
    "WHEN (OLD.{old} IS DISTINCT FROM NEW.{old} OR OLD.{key} IS DISTINCT FROM NEW.{key})",
    "_emptied": "AFTER TRUNCATE ON {table} FOR EACH STATEMENT",
}


def remove(table: Table, vector: str, name: str) -> bool:
    """Take it back; whether there was one of this source's."""
    names = names_of(table, vector, name)
    with table.changing() as changes:
        made = table.said_beside(names["beside"])
        ours = made is not None and made.get("of") == names["function"].as_string()
        # A flipped store searches these vectors: they cannot be rolled back.
        if made is None or not ours or "nobackfill" not in made:
            return False
        changes.run("DROP FUNCTION IF EXISTS {function}() CASCADE", **names)
        changes.run("DROP TABLE {beside}", **names)
    return True


def names_of(table: Table, vector: str, name: str) -> dict[str, sql.Identifier]:
    """Quoted: the table beside, its column and its type, the trigger function, the index of what is
    empty."""
    beside = name.removeprefix(PREFIX)
    trigger = table.trigger_name(vector, PREFIX + beside)
    return {
        "old": sql.Identifier(vector),
        "type": table.of_pgvector(table.kind(vector)),
        "beside": sql.Identifier(table.schema, beside),
        "function": sql.Identifier(table.schema, trigger),
        "empty_name": sql.Identifier(f"{trigger}_empty"),
        "empty": sql.Identifier(table.schema, f"{trigger}_empty"),
    }
