"""Write statements that give new vectors the properties, rights and dependents of the old ones.

Statements are on one line each, with schemas, so that a person may run them by any search path.
"""

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, LiteralString

from nobackfill.errors import NobackfillError
from nobackfill.extras import require_extra

with require_extra("adopt"):
    from psycopg import sql

    from nobackfill.adopt.sources.postgres_table import SourceTable, definition_of

# Numbers of an old and a new vector that fit into a page, of 8 kB, with the rest of their row.
_PAGE_DIMS = 1500
# A literal, with or without escapes, a quoted name, or a line's end.
_LINES = re.compile(r"\bE?'(?:[^']|'')*'|'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|\s*\n\s*")


def grant_statements(
    table: SourceTable,
    relation: str,
    to: str,
    columns: Sequence[str] | None,
    *,
    on_relation: bool = True,
) -> list[str]:
    """Write GRANTs that repeat the rights on a relation for another relation.

    Args:
        table: The source, whose connection is used.
        relation: The relation with the rights; the rights of its owner are left out.
        to: The relation that gets them.
        columns: The columns whose rights to include, unknown ones ignored; None for all.
        on_relation: Whether to include rights on the whole relation.

    Returns:
        Statements, sorted by the role; empty without rights.

    Raises:
        NobackfillError: PostgreSQL refuses a query of the catalogue: BusyError, NotPermittedError,
            NotFoundError, CannotWriteError or InvalidInputError.
        UnavailableError: The server does not answer.
        NotFoundError: A relation does not exist.
    """
    found = table.query_catalogue(
        "SELECT format('GRANT %s ON %s TO %s%s', string_agg(what, ', ' ORDER BY what), {to}, "
        "CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END, "
        "CASE WHEN is_grantable THEN ' WITH GRANT OPTION' END) FROM ("
        "SELECT relowner, acl.*, privilege_type AS what FROM pg_class, aclexplode(relacl) acl "
        "WHERE oid = {relation}::regclass AND {on_relation} UNION ALL "
        "SELECT relowner, acl.*, format('%s (%I)', privilege_type, attname) "
        "FROM pg_class c JOIN pg_attribute ON attrelid = c.oid, aclexplode(attacl) acl "
        "WHERE c.oid = {relation}::regclass AND (attname = ANY({columns}::name[]) OR {every})"
        ") granted WHERE grantee <> relowner GROUP BY grantee, is_grantable ORDER BY 1",
        relation=relation,
        to=to,
        columns=list(columns or ()),
        every=columns is None,
        on_relation=on_relation,
    )
    return [statement for (statement,) in found]


def row_security_statements(
    table: SourceTable, other: sql.Identifier, columns: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Write statements that repeat row-level security for another table with the same key.

    Without a policy for each that can be repeated, one policy lets roles read the vectors of rows
    that they may read. It runs the policies once and rolls them back, to see whether PostgreSQL
    takes them. It locks the other table for that moment. A missing other table counts as one that
    does not take them.

    Args:
        table: The table with the policies.
        other: The other table.
        columns: Columns that both tables have.

    Returns:
        The statements, and sentences about the policies that they cannot repeat; both are empty
        without row-level security.

    Raises:
        NobackfillError: PostgreSQL refuses a query of the catalogue: BusyError, NotPermittedError,
            NotFoundError, CannotWriteError or InvalidInputError.
        UnavailableError: The server does not answer.
        IndexError: The table was dropped meanwhile.
    """
    enabled, forced = table.query_catalogue(
        "SELECT relrowsecurity, relforcerowsecurity FROM pg_class WHERE oid = {oid}", oid=table.oid
    )[0]
    if not enabled:
        return [], []
    steps = [table.text("ALTER TABLE {other} ENABLE ROW LEVEL SECURITY", other=other)]
    if forced:
        steps.append(table.text("ALTER TABLE {other} FORCE ROW LEVEL SECURITY", other=other))
    found = table.query_catalogue(
        "SELECT quote_ident(polname), format('CREATE POLICY %I ON %s AS %s FOR %s TO %s%s%s', "
        "polname, {other}, CASE WHEN polpermissive THEN 'PERMISSIVE' ELSE 'RESTRICTIVE' END, "
        "CASE polcmd WHEN 'r' THEN 'SELECT' WHEN 'a' THEN 'INSERT' WHEN 'w' THEN 'UPDATE' "
        "WHEN 'd' THEN 'DELETE' ELSE 'ALL' END, (SELECT string_agg(CASE one WHEN 0 THEN 'PUBLIC' "
        "ELSE quote_ident(pg_get_userbyid(one)) END, ', ') FROM unnest(polroles) one), "
        "' USING (' || pg_get_expr(polqual, polrelid) || ')', "
        "' WITH CHECK (' || pg_get_expr(polwithcheck, polrelid) || ')'), "
        "NOT EXISTS (SELECT FROM pg_depend JOIN pg_attribute ON attrelid = refobjid "
        "AND attnum = refobjsubid WHERE classid = 'pg_policy'::regclass AND objid = p.oid "
        "AND refobjid = polrelid AND refobjsubid > 0 AND attname <> ALL({columns}::name[])) "
        "FROM pg_policy p WHERE polrelid = {oid} ORDER BY polname",
        other=other.as_string(),
        columns=list(columns),
        oid=table.oid,
    )
    policies = [to_one_line(policy) for _, policy, _ in found]
    if all(alike for _, _, alike in found) and table.accepts_statements(policies):
        return steps + policies, []
    # Never some of them alone: a policy that is left out may be one that restricts the others.
    readers = table.text(
        "CREATE POLICY nobackfill_readers ON {other} FOR SELECT USING "
        "(EXISTS (SELECT FROM {here} t WHERE t.{key} = {other}.{key}))",
        other=other,
    )
    names = ", ".join(name for name, _, _ in found)
    sentence = (
        f"{other.as_string()} has no column for the policies {names} of {table.name}: a role reads "
        "the vectors of the rows that it may read there, and writes none; add policies for INSERT, "
        "UPDATE and DELETE"
    )
    return [*steps, readers], [sentence]


def owner_statements(table: SourceTable, relation: str) -> list[str]:
    """Write a statement that gives a relation to the table's owner; none if it has it.

    Raises:
        NobackfillError: PostgreSQL refuses the query: BusyError, NotPermittedError, NotFoundError,
            CannotWriteError or InvalidInputError.
        UnavailableError: The server does not answer.
        NotFoundError: The relation does not exist.
    """
    found = table.query_catalogue(
        "SELECT format('ALTER TABLE %s OWNER TO %I', {relation}, pg_get_userbyid(t.relowner)) "
        "FROM pg_class t, pg_class o WHERE t.oid = {oid} AND o.oid = {relation}::regclass "
        "AND t.relowner <> o.relowner",
        relation=relation,
        oid=table.oid,
    )
    return [statement for (statement,) in found]


def to_one_line(statement: str) -> str:
    r"""Return a statement in one line.

    A line's end and the spaces around it become one space. Within a literal it becomes the escape
    \n; a quoted name stays as it is. A comment that begins with -- would swallow what follows.
    """

    def flat(match: re.Match[str]) -> str:
        part = match[0]
        if part[0].isspace():
            return " "
        if part.startswith("'") and "\n" in part:
            part = "E" + part.replace("\\", "\\\\")
        return part.replace("\n", "\\n") if part.startswith("E") else part

    return _LINES.sub(flat, statement)


@dataclass(frozen=True)
class DependentMoves:
    """Statements that make what depends on one column depend on the column that takes its name.

    Attributes:
        drop_statements: Statements to run before the columns are renamed.
        create_statements: Statements to run after the columns are renamed.
        immovable_objects: Objects that no statement moves, in PostgreSQL's words.
        hindrances: Objects because of which a statement would fail, each with the reason.
    """

    drop_statements: list[str]
    create_statements: list[str]
    immovable_objects: list[str]
    hindrances: list[str]


def dependent_moves(
    table: SourceTable, column: str, dims: tuple[int | None, int]
) -> DependentMoves:
    """Write statements that move what depends on a column of vectors to the column that takes its
    name.

    PostgreSQL writes each part by the column's name, so that the same text is of the other column
    afterwards. Only the catalogue is read. Without dependents all lists are empty. Run each list in
    its order.

    Args:
        table: The table with the old vectors.
        column: Name of the old column.
        dims: Dimensions of the old vectors (None: not declared) and of the new ones.

    Raises:
        NobackfillError: PostgreSQL refuses a query of the catalogue: BusyError, NotPermittedError,
            NotFoundError, CannotWriteError or InvalidInputError.
        UnavailableError: The server does not answer.
    """
    parts: dict[str, Any] = {"oid": table.oid, "column": column}
    direct = dependents(table, column)
    # A type of the old length; none is where it stays.
    parts["sized"] = "a^" if dims[0] == dims[1] else rf"\m(vector|halfvec|bit)\({dims[0]}\)"
    parts["oids"] = [oid for oid, _ in direct]
    parts["properties"] = _PROPERTIES
    views = table.query_catalogue(_VIEWS, **parts)
    parts["views"] = [view for view, *_ in views]
    found = [table.query_catalogue(query, **parts) for query in _ON_THE_TABLE]
    too = [table.query_catalogue(query, **parts) for query in _ON_VIEWS_TOO]
    drops = [drop for rows in too for _, drop, _ in rows]
    drops += [drop for *_, drop, _ in reversed(views)]
    drops += [drop for rows in found for _, drop, _ in rows]
    creates = [create for rows in found for _, _, create in rows]
    for _, _, name, _, create in views:
        creates += [create, *grant_statements(table, name, name, None)]
    creates += [create for rows in too for _, _, create in rows]
    here = table.text("{here}")
    creates += grant_statements(table, here, here, [column], on_relation=False)
    parts["made"] = [oid for rows in (*found, *too) for oid, drop, _ in rows if drop]
    creates += [comment for (comment,) in table.query_catalogue(_COMMENTS, **parts)]
    others = [name for (name,) in table.query_catalogue(_OTHER_VECTORS, **parts)]

    def clear(create: str | None) -> bool:
        """Return whether each type of the old dimension in a statement is of the column."""
        return not (create and _resized(create, dims) != create) or not any(
            re.search(rf"\b{re.escape(name)}\b", create) for name in others
        )

    known = {oid for rows in (*found, *too) for oid, _, create in rows if clear(create)}
    known |= {rule for _, rule, _, _, create in views if clear(create)}
    return DependentMoves(
        [to_one_line(one) for one in drops if one],
        [to_one_line(_resized(one, dims)) for one in creates if one],
        [what for oid, what in direct if oid not in known]
        + [f"view {name}" for _, rule, name, *_ in views if rule not in known | set(parts["oids"])]
        + [what for (what,) in table.query_catalogue(_ON_VIEWS_ALONE, **parts)],
        [
            what
            for query in (_ROWS_ELSEWHERE, _FOREIGN)
            for (what,) in table.query_catalogue(query, **parts)
        ],
    )


def dependents(table: SourceTable, column: str) -> list[tuple[int, str]]:
    """Return the oids and names of objects that depend on a column.

    Indexes, NOT NULL and the triggers of nobackfill are left out.

    Names are in PostgreSQL's words, and sorted. Empty for an unknown column.

    Raises:
        NobackfillError: PostgreSQL refuses the query: BusyError, NotPermittedError, NotFoundError,
            CannotWriteError or InvalidInputError.
        UnavailableError: The server does not answer.
    """
    return table.query_catalogue(
        "SELECT DISTINCT objid, CASE WHEN rulename = '_RETURN' "
        "THEN pg_describe_object('pg_class'::regclass, ev_class, 0) WHEN g.attgenerated <> '' "
        "THEN format('generated column %I of table %s', g.attname, adrelid::regclass) "
        "ELSE pg_describe_object(classid, objid, 0) END FROM pg_depend "
        "JOIN pg_attribute a ON a.attrelid = refobjid AND a.attnum = refobjsubid "
        "LEFT JOIN pg_rewrite r ON r.oid = objid AND classid = 'pg_rewrite'::regclass "
        "LEFT JOIN pg_attrdef d ON d.oid = objid AND classid = 'pg_attrdef'::regclass "
        "LEFT JOIN pg_attribute g ON g.attrelid = adrelid AND g.attnum = adnum "
        "WHERE refclassid = 'pg_class'::regclass AND a.attname = {column} AND (refobjid = {oid} "
        "OR refobjid IN (SELECT relid FROM pg_partition_tree({oid}::oid::regclass))) "
        "AND classid <> 'pg_class'::regclass AND NOT EXISTS "
        "(SELECT FROM pg_constraint c WHERE c.oid = objid AND contype = 'n') AND NOT EXISTS "
        "(SELECT FROM pg_trigger t JOIN pg_proc p ON p.oid = tgfoid WHERE t.oid = objid "
        "AND starts_with(proname, 'nobackfill_')) ORDER BY 2",
        oid=table.oid,
        column=column,
    )


def column_properties(
    table: SourceTable, column: str, relation: str, new: str, dims: tuple[int | None, int]
) -> list[str]:
    """Write statements that give a new column the storage, compression and statistics settings.

    Args:
        table: The table with the old vectors.
        column: Name of the old column.
        relation: The relation of the new column, quoted, with its schema.
        new: Name of the new column.
        dims: Dimensions of the old vectors (None: not declared) and of the new ones.

    Returns:
        One statement for each setting that is not the default. PLAIN storage becomes MAIN where a
        row of both vectors may be longer than a page. An unknown column has none.

    Raises:
        NobackfillError: PostgreSQL refuses the query: BusyError, NotPermittedError, NotFoundError,
            CannotWriteError or InvalidInputError.
        UnavailableError: The server does not answer.
    """
    found = table.query_catalogue(
        "SELECT format('ALTER TABLE %s ALTER COLUMN %I SET %s', {relation}, {new}, property) "
        "FROM pg_attribute JOIN pg_type t ON t.oid = atttypid, {properties} "
        "WHERE attrelid = {oid} AND attname = {column} AND property <> ''",
        properties=_PROPERTIES,
        relation=relation,
        new=new,
        oid=table.oid,
        column=column,
    )
    statements = [statement for (statement,) in found]
    if (dims[0] or dims[1]) + dims[1] > _PAGE_DIMS:
        statements = [re.sub(r"STORAGE PLAIN\Z", "STORAGE MAIN", one) for one in statements]
    return statements


def cluster_mark(table: SourceTable, column: str, dims: tuple[int | None, int]) -> list[str]:
    """Write a statement that marks the new column's index for CLUSTER as the old column's index.

    Args:
        table: The table with the old vectors.
        column: Name of the old column, which the new one has when the statement runs.
        dims: Dimensions of the old vectors (None: not declared) and of the new ones.

    Returns:
        One statement for a transaction that ends after it, as it sets the search path. No statement
        where no index of the column has the mark. Without an equal index it changes nothing.

    Raises:
        NobackfillError: PostgreSQL refuses the query: BusyError, NotPermittedError, NotFoundError,
            CannotWriteError or InvalidInputError.
        UnavailableError: The server does not answer.
    """
    found = table.query_catalogue(
        "SELECT pg_get_indexdef(indexrelid) FROM pg_index WHERE indrelid = {oid} "
        "AND indisclustered AND EXISTS (SELECT FROM pg_depend JOIN pg_attribute "
        "ON attrelid = refobjid AND attnum = refobjsubid WHERE classid = 'pg_class'::regclass "
        "AND objid = indexrelid AND refobjid = indrelid AND attname = {column})",
        oid=table.oid,
        column=column,
    )
    statements = []
    for (definition,) in found:
        body = table.text(
            "DECLARE one record; BEGIN SET LOCAL search_path = pg_catalog; "
            "FOR one IN SELECT indrelid::regclass AS here, relname FROM pg_index "
            "JOIN pg_class c ON c.oid = indexrelid WHERE indrelid = {here_text}::regclass "
            "AND right(pg_get_indexdef(indexrelid), {length}) = {using} LIMIT 1 LOOP "
            "EXECUTE format('ALTER TABLE %s CLUSTER ON %I', one.here, one.relname); "
            "END LOOP; END",
            here_text=table.text("{here}"),
            using=(using := _resized(definition[definition.index(" USING ") :], dims)),
            length=len(using),
        )
        statements.append(to_one_line(table.text("DO {body}", body=body)))
    return statements


def row_indexes(table: SourceTable) -> list[str]:
    """Name the indexes of a table and its partitions whose expression reads whole rows.

    They are sorted. Empty without such indexes.

    Raises:
        NobackfillError: PostgreSQL refuses the query: BusyError, NotPermittedError, NotFoundError,
            CannotWriteError or InvalidInputError.
        UnavailableError: The server does not answer.
    """
    found = table.query_catalogue(
        "SELECT indexrelid::regclass::text FROM pg_index WHERE (indrelid = {oid} OR indrelid IN "
        "(SELECT relid FROM pg_partition_tree({oid}::oid::regclass))) AND concat("
        "pg_get_expr(indexprs, indrelid), pg_get_expr(indpred, indrelid)) ~ {whole} ORDER BY 1",
        oid=table.oid,
        whole=r"\.\*",
    )
    return [name for (name,) in found]


def index_definitions(
    table: SourceTable, old: str, new: str, dims: tuple[int | None, int]
) -> list[str]:
    """Write statements that build the indexes of one column for another, with their options.

    It makes a temporary copy of the table without rows, and rolls it back; nothing is built.

    Args:
        table: The table with the old vectors.
        old: Name of the old column.
        new: Name of the new column; it must exist.
        dims: Dimensions of the old vectors (None: not declared) and of the new ones.

    Returns:
        The statements; none if the column has no index, or an index reads whole rows. They are
        sorted by the index's definition.

    Raises:
        NobackfillError: PostgreSQL refuses a query: BusyError, NotPermittedError, NotFoundError,
            CannotWriteError or InvalidInputError.
        InvalidInputError: The table has no such column, or PostgreSQL refuses a statement.
        UnavailableError: The server does not answer.
        NotPermittedError: This role may make no temporary table.
    """
    if row_indexes(table):
        return []
    shape = sql.Identifier("pg_temp", "nobackfill_shape")
    with table.lend_connection() as changes, changes.attempt():
        changes.run("SET LOCAL search_path = pg_catalog")
        # The same table, empty, in which the one column has the other's name.
        changes.run("CREATE TEMPORARY TABLE nobackfill_shape (LIKE {here} INCLUDING INDEXES)")
        for name, other in ((new, "nobackfill_new"), (old, new)):
            changes.run(
                "ALTER TABLE {shape} RENAME COLUMN {name} TO {other}",
                shape=shape,
                name=sql.Identifier(name),
                other=sql.Identifier(other),
            )
        found = changes.query_all(
            "SELECT pg_get_indexdef(indexrelid) FROM pg_index WHERE indrelid = {shape}::regclass "
            "AND EXISTS (SELECT FROM pg_depend JOIN pg_attribute ON attrelid = refobjid "
            "AND attnum = refobjsubid WHERE classid = 'pg_class'::regclass "
            "AND objid = indexrelid AND refobjid = indrelid AND attname = {new}) ORDER BY 1",
            shape=shape.as_string(),
            new=new,
        )
    on = table.create_index_prefix()
    return [to_one_line(_resized(on + definition_of(text), dims)) for (text,) in found]


def build_indexes(
    table: SourceTable, relation: sql.Identifier, column: str, statements: Sequence[str]
) -> None:
    """Build what `missing_indexes` returns, one after another.

    It returns once all are built, which may take hours. Writers continue, but not during the build
    for a partitioned table. A build that fails leaves nothing; the earlier ones stay.

    Args:
        table: The table, whose connection is used.
        relation: The relation with the new vectors.
        column: Name of their column.
        statements: CREATE INDEX statements, as `index_definitions` returns them; none builds
            nothing.

    Raises:
        BusyError: Somebody else builds an index of the relation.
        InvalidInputError: PostgreSQL refuses an index.
        CannotWriteError: The disk is full.
        UnavailableError: The server does not answer.
        NotPermittedError: This role does not own the table.
        NobackfillError: PostgreSQL refuses another statement: BusyError, NotPermittedError,
            NotFoundError, CannotWriteError or InvalidInputError.
    """
    drop_unfinished_indexes(table, relation, column, statements)
    for statement in missing_indexes(table, relation, column, statements):
        try:
            table.run_alone(statement)
        except BaseException:
            with suppress(NobackfillError):
                drop_unfinished_indexes(table, relation, column, statements)
            raise


def missing_indexes(
    table: SourceTable, relation: sql.Identifier, column: str, statements: Sequence[str]
) -> list[str]:
    """Return the statements whose index a column of a relation does not have.

    None are missing where its owner has built as many others: of vectors, or of other values. An
    invalid index does not count. The order is that of `statements`. A missing relation has no
    index, so all statements come back.

    Raises:
        NobackfillError: PostgreSQL refuses the query: BusyError, NotPermittedError, NotFoundError,
            CannotWriteError or InvalidInputError.
        UnavailableError: The server does not answer.
    """

    def of_vectors(definition: str) -> bool:
        return not definition.startswith("btree ")

    there = [one.definition for one in table.column_indexes(relation, column) if one.is_valid]
    wanted = Counter(of_vectors(definition_of(one)) for one in statements)
    built = Counter(map(of_vectors, there))
    return [
        statement
        for statement in statements
        for definition in [definition_of(statement)]
        if definition not in there
        and built[of_vectors(definition)] < wanted[of_vectors(definition)]
    ]


def drop_unfinished_indexes(
    table: SourceTable, relation: sql.Identifier, column: str, statements: Sequence[str]
) -> None:
    """Drop INVALID indexes that a killed CREATE INDEX CONCURRENTLY of `statements` has left.

    Carrying has made the column, so an INVALID index of the same definition is one of these.
    No query uses it, but each write does its work.

    Without such an index it takes no lock and changes nothing.

    Raises:
        BusyError: Somebody builds an index of the relation, or holds it for longer than 5 s.
        UnavailableError: The server does not answer.
        NotPermittedError: This role may not drop the index.
        NobackfillError: PostgreSQL refuses another statement: BusyError, NotPermittedError,
            NotFoundError, CannotWriteError or InvalidInputError.
    """
    definitions = set(map(definition_of, statements))

    def unfinished() -> list[str]:
        return [
            one.name
            for one in table.column_indexes(relation, column)
            if not one.is_valid and not one.is_partitioned and one.definition in definitions
        ]

    if not unfinished():
        return
    with table.open_changes() as changes:
        # Each concurrent build holds this lock to its end: what is INVALID now stays so.
        changes.run("LOCK TABLE {relation} IN SHARE UPDATE EXCLUSIVE MODE", relation=relation)
        for name in unfinished():
            changes.run("DROP INDEX {name}", name=sql.SQL(name))


def _resized(statement: str, dims: tuple[int | None, int]) -> str:
    """Return a statement with the new dimension in place of the old one in types of vectors."""
    old, new = dims
    return re.sub(rf"\b(vector|halfvec|bit)\({old}\)", rf"\1({new})", statement)


# Other columns of vectors as long as the old ones: a type of that length may be of theirs.
_OTHER_VECTORS: LiteralString = """
SELECT attname::text FROM pg_attribute WHERE attrelid = {oid} AND attnum > 0 AND NOT attisdropped
AND attgenerated = '' AND attname <> {column} AND format_type(atttypid, atttypmod) ~ {sized}"""
# Each gives oids of what hangs on the column, statements that drop it, and that make it again: none
# where it is inherited.
_ON_THE_TABLE: tuple[LiteralString, ...] = (
    # Columns that PostgreSQL computes from it. A column of another length is emptied first, as a
    # value of one length is none of the other.
    """
SELECT d.oid, CASE WHEN own AND sized THEN anew || '(NULL)' END, CASE WHEN own THEN concat(
CASE WHEN sized THEN format('ALTER TABLE %s ALTER COLUMN %I TYPE %s; ', adrelid::regclass, attname,
kind) END, anew, '(' || pg_get_expr(adbin, adrelid) || ')') END
FROM pg_attrdef d JOIN pg_attribute a ON attrelid = adrelid AND attnum = adnum,
format_type(atttypid, atttypmod) kind,
LATERAL (SELECT attinhcount = 0, kind ~ {sized}) i (own, sized),
format('ALTER TABLE %s ALTER COLUMN %I SET EXPRESSION AS ', adrelid::regclass, attname) anew
WHERE d.oid = ANY({oids}::oid[]) AND attgenerated <> ''
AND attname <> {column} AND current_setting('server_version_num')::int >= 170000""",
    """
SELECT d.oid, format('ALTER TABLE %s ALTER COLUMN %I DROP DEFAULT', adrelid::regclass, attname),
format('ALTER TABLE %s ALTER COLUMN %I SET DEFAULT %s', adrelid::regclass, attname,
pg_get_expr(adbin, adrelid))
FROM pg_attrdef d JOIN pg_attribute ON attrelid = adrelid AND attnum = adnum
WHERE d.oid = ANY({oids}::oid[]) AND attgenerated = '' AND attname = {column}
AND pg_get_expr(adbin, adrelid) !~ {sized}""",
    """
SELECT oid, CASE WHEN own THEN format('ALTER TABLE %s DROP CONSTRAINT %I', of, conname) END,
CASE WHEN own THEN format('ALTER TABLE %s ADD CONSTRAINT %I %s', of, conname,
pg_get_constraintdef(oid)) END
FROM pg_constraint, LATERAL (SELECT conrelid::regclass, coninhcount = 0) t (of, own)
WHERE oid = ANY({oids}::oid[]) AND contype = 'c'""",
    # From PostgreSQL 18 on NOT NULL has a name, and holds for new rows alone where it is NOT VALID.
    """
SELECT c.oid, format('ALTER TABLE %s ALTER COLUMN %I DROP NOT NULL', of, attname),
coalesce(format('ALTER TABLE %s ADD CONSTRAINT %I ', of, conname) || pg_get_constraintdef(c.oid),
format('ALTER TABLE %s ALTER COLUMN %I SET NOT NULL', of, attname))
FROM pg_attribute LEFT JOIN pg_constraint c ON conrelid = attrelid AND contype = 'n'
AND conkey = ARRAY[attnum], LATERAL (SELECT attrelid::regclass) t (of)
WHERE attname = {column} AND attnotnull AND CASE WHEN attrelid = {oid} THEN true
ELSE attrelid IN (SELECT relid FROM pg_partition_tree({oid}::oid::regclass)) AND
coalesce(coninhcount = 0, NOT (SELECT whole.attnotnull FROM pg_attribute whole
WHERE whole.attrelid = {oid} AND whole.attname = {column})) END""",
    """
SELECT oid, NULL, format('ALTER POLICY %I ON %s%s%s', polname, polrelid::regclass,
' USING (' || pg_get_expr(polqual, polrelid) || ')',
' WITH CHECK (' || pg_get_expr(polwithcheck, polrelid) || ')')
FROM pg_policy WHERE oid = ANY({oids}::oid[])""",
)
_ON_VIEWS_TOO: tuple[LiteralString, ...] = (
    """
SELECT oid, format('DROP STATISTICS %s', name), concat_ws('; ', pg_get_statisticsobjdef(oid),
format('ALTER STATISTICS %s OWNER TO %I', name, pg_get_userbyid(stxowner)),
CASE WHEN stxstattarget >= 0 THEN format('ALTER STATISTICS %s SET STATISTICS %s', name,
stxstattarget) END)
FROM pg_statistic_ext, format('%I.%I', stxnamespace::regnamespace, stxname) name
WHERE oid = ANY({oids}::oid[]) OR stxrelid = ANY({views}::oid[])""",
    """
SELECT oid, format('DROP RULE %I ON %s', rulename, ev_class::regclass),
concat(rtrim(pg_get_ruledef(oid), ';'), CASE WHEN ev_enabled <> 'O' THEN
format('; ALTER TABLE %s %s RULE %I', ev_class::regclass, CASE ev_enabled WHEN 'D' THEN 'DISABLE'
WHEN 'R' THEN 'ENABLE REPLICA' ELSE 'ENABLE ALWAYS' END, rulename) END)
FROM pg_rewrite WHERE rulename <> '_RETURN'
AND (oid = ANY({oids}::oid[]) OR ev_class = ANY({views}::oid[]))""",
    """
SELECT oid, CASE WHEN moved THEN format('DROP TRIGGER %I ON %s', tgname, tgrelid::regclass) END,
CASE WHEN moved THEN concat(pg_get_triggerdef(oid), CASE WHEN tgenabled <> 'O' THEN
format('; ALTER TABLE %s %s TRIGGER %I', tgrelid::regclass, CASE tgenabled WHEN 'D' THEN 'DISABLE'
WHEN 'R' THEN 'ENABLE REPLICA' ELSE 'ENABLE ALWAYS' END, tgname) END) END
FROM pg_trigger, LATERAL (SELECT tgparentid = 0) own (moved)
WHERE NOT tgisinternal AND (oid = ANY({oids}::oid[]) OR tgrelid = ANY({views}::oid[]))""",
    """
SELECT oid, NULL, pg_get_functiondef(oid) FROM pg_proc
WHERE oid = ANY({oids}::oid[]) AND prokind IN ('f', 'p')""",
)
# The settings of ALTER COLUMN that are not the default, of a pg_attribute with its pg_type `t`.
_PROPERTIES = sql.SQL("""unnest(ARRAY[
CASE WHEN attstorage <> typstorage THEN 'STORAGE ' || CASE attstorage WHEN 'p' THEN 'PLAIN'
WHEN 'm' THEN 'MAIN' WHEN 'e' THEN 'EXTERNAL' ELSE 'EXTENDED' END END,
'COMPRESSION ' || CASE attcompression WHEN 'p' THEN 'pglz' WHEN 'l' THEN 'lz4' END,
CASE WHEN attstattarget >= 0 THEN 'STATISTICS ' || attstattarget END,
'(' || array_to_string(attoptions, ', ') || ')']) property""")
# Views of the column and of what is computed of it, and views of these, in an order in which they
# can be made: oid, its rule, its name, statements as above. Default privileges give nobody a view
# that they had not. A materialized view is filled by REFRESH, which runs as its owner: CREATE would
# run the owner's functions with the rights of the carrying role, and read what the owner may not.
_VIEWS: LiteralString = """
WITH RECURSIVE read (view, rule, depth) AS (
  SELECT ev_class, r.oid, 1 FROM pg_rewrite r JOIN pg_depend d
  ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid
  JOIN pg_attribute a ON a.attrelid = refobjid AND a.attnum = refobjsubid
  WHERE refclassid = 'pg_class'::regclass AND rulename = '_RETURN' AND (refobjid = {oid}
  OR refobjid IN (SELECT relid FROM pg_partition_tree({oid}::oid::regclass)))
  AND (attname = {column} OR EXISTS (SELECT FROM pg_attrdef g WHERE g.adrelid = refobjid
  AND g.adnum = refobjsubid AND g.oid = ANY({oids}::oid[])))
  UNION SELECT ev_class, r.oid, depth + 1 FROM read JOIN pg_depend d ON refobjid = view
  AND refclassid = 'pg_class'::regclass AND d.classid = 'pg_rewrite'::regclass
  JOIN pg_rewrite r ON d.objid = r.oid AND rulename = '_RETURN' WHERE ev_class <> view
)
SELECT view, max(rule), view::regclass::text, format('DROP %s %s', kind, view::regclass),
concat_ws('; ',
  format('CREATE %s %s%s%s AS %s%s', kind, view::regclass,
    ' WITH (' || array_to_string(reloptions, ', ') || ')',
    (SELECT format(' TABLESPACE %I', spcname) FROM pg_tablespace s WHERE s.oid = reltablespace),
    rtrim(pg_get_viewdef(view), ';'), CASE relkind WHEN 'm' THEN ' WITH NO DATA' END),
  format('ALTER TABLE %s OWNER TO %I', view::regclass, pg_get_userbyid(relowner)),
  format('REVOKE ALL ON %s FROM %s', view::regclass, concat_ws(', ', 'PUBLIC', (SELECT
    string_agg(DISTINCT quote_ident(pg_get_userbyid(grantee)), ', ') FROM pg_default_acl,
    aclexplode(defaclacl) WHERE defaclobjtype = 'r' AND grantee NOT IN (0, relowner)))),
  'COMMENT ON ' || kind || ' ' || view::regclass || ' IS '
    || quote_literal(obj_description(view, 'pg_class')),
  (SELECT string_agg(format('COMMENT ON COLUMN %s.%I IS %L', view::regclass, attname, said), '; ')
    FROM pg_attribute, col_description(view, attnum) said WHERE attrelid = view AND said <> ''),
  (SELECT string_agg(format('ALTER TABLE %s ALTER COLUMN %I SET DEFAULT %s', view::regclass,
    attname, pg_get_expr(adbin, adrelid)), '; ') FROM pg_attrdef JOIN pg_attribute
    ON attrelid = adrelid AND attnum = adnum WHERE adrelid = view),
  (SELECT string_agg(format('ALTER TABLE %s ALTER COLUMN %I SET %s', view::regclass, attname,
    property), '; ') FROM pg_attribute JOIN pg_type t ON t.oid = atttypid, {properties}
    WHERE attrelid = view AND attnum > 0 AND NOT attisdropped AND property <> ''),
  (SELECT string_agg(concat_ws('; ', pg_get_indexdef(indexrelid), CASE WHEN indisclustered THEN
    format('ALTER TABLE %s CLUSTER ON %I', view::regclass, relname) END,
    'COMMENT ON INDEX ' || indexrelid::regclass || ' IS '
    || quote_literal(obj_description(indexrelid, 'pg_class'))), '; ')
    FROM pg_index JOIN pg_class i ON i.oid = indexrelid WHERE indrelid = view),
  CASE WHEN relkind = 'm' AND relispopulated
    THEN format('REFRESH MATERIALIZED VIEW %s', view::regclass) END)
FROM read JOIN pg_class c ON c.oid = view,
concat(CASE WHEN relkind = 'm' THEN 'MATERIALIZED ' END, 'VIEW') kind
GROUP BY view, kind, reloptions, reltablespace, relowner, relkind, relispopulated
ORDER BY max(depth), 1"""
# Comments of objects that are dropped and made again.
_COMMENTS: LiteralString = """
SELECT format('COMMENT ON %s %s IS %L', CASE classoid WHEN 'pg_constraint'::regclass
THEN 'CONSTRAINT' WHEN 'pg_trigger'::regclass THEN 'TRIGGER' WHEN 'pg_rewrite'::regclass THEN 'RULE'
ELSE 'STATISTICS' END, identity, description)
FROM pg_description, pg_identify_object(classoid, objoid, 0) WHERE objoid = ANY({made}::oid[])
AND classoid IN ('pg_constraint'::regclass, 'pg_trigger'::regclass, 'pg_rewrite'::regclass,
'pg_statistic_ext'::regclass)"""
# Objects that keep these views from being dropped: they use a view, or the type of its rows.
_ON_VIEWS_ALONE: LiteralString = """
SELECT DISTINCT pg_describe_object(classid, objid, objsubid) FROM pg_depend
LEFT JOIN pg_type t ON refclassid = 'pg_type'::regclass AND t.oid = refobjid
LEFT JOIN pg_type e ON e.oid = t.typelem
WHERE deptype = 'n' AND (refclassid = 'pg_class'::regclass AND refobjid = ANY({views}::oid[])
OR {views}::oid[] && ARRAY[t.typrelid, e.typrelid]) AND NOT EXISTS (SELECT FROM pg_rewrite r
WHERE classid = 'pg_rewrite'::regclass AND r.oid = objid AND ev_class = ANY({views}::oid[]))
UNION SELECT pg_describe_object(refclassid, refobjid, 0) FROM pg_depend
WHERE classid = 'pg_class'::regclass AND objid = ANY({views}::oid[]) AND deptype = 'e'
ORDER BY 1"""
# PostgreSQL writes no table anew, as for a stored computed column, while another table has a column
# of its rows' type.
_ROWS_ELSEWHERE: LiteralString = """
WITH RECURSIVE used (type) AS (
  SELECT reltype FROM pg_class WHERE (oid = {oid}
  OR oid IN (SELECT relid FROM pg_partition_tree({oid}::oid::regclass)))
  AND EXISTS (SELECT FROM pg_attrdef d JOIN pg_attribute ON attrelid = adrelid AND attnum = adnum
  WHERE d.oid = ANY({oids}::oid[]) AND attgenerated = 's' AND attname <> {column})
  UNION SELECT t.oid FROM used JOIN pg_type t ON typelem = type OR typbasetype = type
  OR EXISTS (SELECT FROM pg_class c JOIN pg_attribute ON attrelid = c.oid
  WHERE c.oid = typrelid AND relkind IN ('c', 'v') AND atttypid = type)
)
SELECT DISTINCT format('column %I of table %s (its type is that of the table''s rows, so that '
'PostgreSQL cannot write a computed column again)', attname, attrelid::regclass)
FROM used JOIN pg_attribute ON atttypid = type JOIN pg_class c ON c.oid = attrelid
WHERE relkind IN ('r', 'm', 'p') AND NOT attisdropped ORDER BY 1"""
# Objects that another role owns, or that are in a schema where nothing can be made.
_FOREIGN: LiteralString = """
SELECT DISTINCT concat(pg_describe_object(class, object, 0), CASE
WHEN NOT owned THEN format(' (connect as its owner %I, or GRANT %I TO %I)', name, name, role)
ELSE format(' (GRANT CREATE ON SCHEMA %s TO %s)', schema::regnamespace, concat_ws(', ',
CASE WHEN NOT makes THEN quote_ident(role) END,
CASE WHEN NOT owner_makes THEN quote_ident(name) END)) END)
FROM (SELECT 'pg_class'::regclass::oid, c.oid, relowner,
  CASE WHEN c.oid = ANY({views}::oid[]) THEN relnamespace END, c.oid = ANY({views}::oid[])
  FROM pg_class c WHERE c.oid = ANY({views}::oid[])
  OR c.oid IN (SELECT ev_class FROM pg_rewrite WHERE oid = ANY({oids}::oid[]))
  OR c.oid IN (SELECT polrelid FROM pg_policy WHERE oid = ANY({oids}::oid[]))
  OR c.oid = {oid} OR c.oid IN (SELECT relid FROM pg_partition_tree({oid}::oid::regclass))
  UNION ALL SELECT 'pg_proc'::regclass, oid, proowner, pronamespace, false FROM pg_proc
  WHERE oid = ANY({oids}::oid[])
  UNION ALL SELECT 'pg_statistic_ext'::regclass, oid, stxowner, stxnamespace, true
  FROM pg_statistic_ext WHERE oid = ANY({oids}::oid[]) OR stxrelid = ANY({views}::oid[])
) o (class, object, owner, schema, given),
LATERAL (SELECT pg_get_userbyid(owner), current_user::text, pg_has_role(owner, 'USAGE')
  AND pg_has_role(owner, CASE WHEN current_setting('server_version_num')::int < 160000
  THEN 'MEMBER' ELSE 'SET' END),
  schema IS NULL OR has_schema_privilege(schema, 'CREATE'),
  schema IS NULL OR NOT given OR owner = current_user::regrole
  OR (SELECT rolsuper FROM pg_roles WHERE rolname = current_user)
  OR has_schema_privilege(owner, schema, 'CREATE')
) r (name, role, owned, makes, owner_makes)
WHERE NOT (owned AND makes AND owner_makes) ORDER BY 1"""
