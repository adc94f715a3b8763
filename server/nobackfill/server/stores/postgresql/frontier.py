"""The frontier of a space: the label up to which every item has a vector there, as far as somebody
has looked. Who flips looks at what came later.

What was found stays true: labels only grow and are never used again, and a vector goes with its
item alone. It is a row beside the vectors, so that a standby that takes over has the frontier of
what it has. A space whose number has no row has not been looked at.
"""

from weakref import WeakKeyDictionary

from nobackfill.server.stores.postgresql.database import Connection, run
from nobackfill.server.stores.postgresql.schema import table_of
from nobackfill.server.stores.postgresql.writing import hold_gate

# What a search reads in place of asking a graph: so many vectors, found among so many labels.
_FEW, _BEYOND = 2_000, 10_000


# Schemas whose frontiers a connection has seen: what its server has, it does not lose.
_SEEN: WeakKeyDictionary[Connection, set[str]] = WeakKeyDictionary()


def make_frontiers(connection: Connection, schema: str) -> None:
    """Not with the other tables: galleries of older versions lack it."""
    run(
        connection,
        f"CREATE TABLE IF NOT EXISTS {schema}.frontiers"
        " (space integer PRIMARY KEY, label bigint NOT NULL)",
    )


def frontier(connection: Connection, schema: str, number: int) -> int:
    """Of the space of that number; 0 where nobody has looked."""
    if not _has_frontiers(connection, schema):
        return 0
    return int(run(connection, f"SELECT {_of(schema, number)}").fetchone()[0])


def _has_frontiers(connection: Connection, schema: str) -> bool:
    found: bool = run(
        connection, f"SELECT to_regclass('{schema}.frontiers') IS NOT NULL"
    ).fetchone()[0]
    return found


def _of(schema: str, number: int) -> str:
    return f"coalesce((SELECT label FROM {schema}.frontiers WHERE space = {number:d}), 0)"


def advance(connection: Connection, schema: str, number: int) -> None:
    """Find how far a space is whole, beside others that put: two transactions of one connection,
    for both are to ask the same server."""
    with connection.transaction():
        # Who has drawn a label has ended: none up to the last becomes visible later.
        hold_gate(connection, schema)
        make_frontiers(connection, schema)
        last = run(connection, f"SELECT coalesce(max(label), 0) FROM {schema}.items").fetchone()[0]
    with connection.transaction():
        before = frontier(connection, schema, number)
        # Among those put meanwhile, too: their labels are greater.
        first = run(
            connection, f"SELECT min(i.label) FROM {_lacking(schema, number, before)}"
        ).fetchone()[0]
        reached = last if first is None else min(last, first - 1)
        if reached > before:
            run(
                connection,
                f"INSERT INTO {schema}.frontiers AS f VALUES (%s, %s) ON CONFLICT (space)"
                " DO UPDATE SET label = greatest(f.label, excluded.label)",
                [number, reached],
            )


def left_behind(connection: Connection, schema: str, number: int) -> int:
    """Number of items without a vector in a space."""
    beyond = _lacking(schema, number, frontier(connection, schema, number))
    return int(run(connection, f"SELECT count(*) FROM {beyond}").fetchone()[0])


def few_left(connection: Connection, schema: str, source: int, target: int) -> list[int] | None:
    """Labels that the space numbered `source` has and `target` has not; None where they are many,
    or too far behind the last to be looked for at each search."""
    known = _SEEN.setdefault(connection, set())
    seen = "0::bigint"
    if schema in known or _has_frontiers(connection, schema):
        known.add(schema)
        seen = _of(schema, target)
    found = run(connection, _few(schema, source, target, seen))
    labels = [label for (label,) in found]
    return None if labels[:1] == [None] or len(labels) > _FEW else labels


def _few(schema: str, source: int, target: int, seen: str) -> str:
    """One row of NULL where it is too far. The second bound leaves nothing out: it tells the
    planner, who does not know the frontier, that it is near the end."""
    table, other = table_of(schema, source), table_of(schema, target)
    return (
        f"WITH near AS MATERIALIZED (SELECT after, after + {_BEYOND:d} AS most,"
        f" (SELECT coalesce(max(label), 0) FROM {table}) - after > {_BEYOND:d} AS far"
        f" FROM (SELECT {seen} AS after) f)"
        " SELECT NULL::bigint FROM near WHERE far UNION ALL"
        f" (SELECT s.label FROM {table} s WHERE NOT (SELECT far FROM near)"
        " AND s.label > (SELECT after FROM near) AND s.label <= (SELECT most FROM near)"
        f" AND NOT EXISTS (SELECT 1 FROM {other} t WHERE t.label = s.label"
        " AND t.label > (SELECT after FROM near) AND t.label <= (SELECT most FROM near))"
        f" ORDER BY s.label LIMIT {_FEW + 1:d})"
    )


def _lacking(schema: str, number: int, after: int) -> str:
    """Items `i` without a vector in a space, after a label: what follows FROM."""
    return (
        f"{schema}.items i WHERE i.label > {after:d} AND NOT EXISTS (SELECT 1 FROM"
        f" {table_of(schema, number)} v WHERE v.label = i.label AND v.label > {after:d})"
    )
