"""What hangs on a table of PostgreSQL: statements that give the same to another table.

Statements are on one line each, with schemas, so that a person may run them by any search path.
"""

import re
from collections.abc import Sequence

from nobackfill.extras import extra

with extra("adopt"):
    from psycopg import sql

    from nobackfill.adopt.sources.postgres_table import Table

# A literal, a quoted name, or a line's end.
_LINES = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|\s*\n\s*")


def grants(table: Table, relation: str, to: str, columns: Sequence[str]) -> list[str]:
    """GRANTs of what other roles than its owner have on a relation, for another one, and on those
    columns of it that are called so there, too."""
    found = table.described(
        "SELECT format('GRANT %s ON %s TO %s%s', string_agg(what, ', ' ORDER BY what), {to}, "
        "CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END, "
        "CASE WHEN is_grantable THEN ' WITH GRANT OPTION' END) FROM ("
        "SELECT relowner, acl.*, privilege_type AS what FROM pg_class, aclexplode(relacl) acl "
        "WHERE oid = {relation}::regclass UNION ALL "
        "SELECT relowner, acl.*, format('%s (%I)', privilege_type, attname) "
        "FROM pg_class c JOIN pg_attribute ON attrelid = c.oid, aclexplode(attacl) acl "
        "WHERE c.oid = {relation}::regclass AND attname = ANY({columns}::name[])) granted "
        "WHERE grantee <> relowner GROUP BY grantee, is_grantable ORDER BY 1",
        relation=relation,
        to=to,
        columns=list(columns),
    )
    return [statement for (statement,) in found]


def security(
    table: Table, other: sql.Identifier, columns: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Statements that give a table with the same key the rows' security of this one, and sentences
    that name what they cannot give. `columns`: those that both have."""
    enabled, forced = table.described(
        "SELECT relrowsecurity, relforcerowsecurity FROM pg_class WHERE oid = {oid}", oid=table.oid
    )[0]
    if not enabled:
        return [], []
    steps = [table.text("ALTER TABLE {other} ENABLE ROW LEVEL SECURITY", other=other)]
    if forced:
        steps.append(table.text("ALTER TABLE {other} FORCE ROW LEVEL SECURITY", other=other))
    found = table.described(
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
    policies = [one_line(policy) for _, policy, _ in found]
    if all(alike for _, _, alike in found) and table.accepts(policies):
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


def owner(table: Table, relation: str) -> list[str]:
    """A statement that gives a relation to the table's owner, unless it is theirs."""
    found = table.described(
        "SELECT format('ALTER TABLE %s OWNER TO %I', {relation}, pg_get_userbyid(t.relowner)) "
        "FROM pg_class t, pg_class o WHERE t.oid = {oid} AND o.oid = {relation}::regclass "
        "AND t.relowner <> o.relowner",
        relation=relation,
        oid=table.oid,
    )
    return [statement for (statement,) in found]


def one_line(statement: str) -> str:
    """The same statement without an end of a line."""

    def flat(found: re.Match[str]) -> str:
        part = found[0]
        if part.startswith("'") and "\n" in part:
            return "E" + part.replace("\\", "\\\\").replace("\n", "\\n")
        return part if part[0] in "'\"" else " "

    return _LINES.sub(flat, statement)
