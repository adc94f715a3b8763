"""The frontier of a space: the label up to which every item has a vector there, as far as somebody
has looked. Who flips looks at what came later.

What was found stays true: labels only grow and are never used again, and a vector goes with its
item alone. It is a row beside the vectors, so that a standby that takes over has the frontier of
what it has. A space whose number has no row has not been looked at.
"""

from nobackfill.server.stores.postgresql.database import Connection, run
from nobackfill.server.stores.postgresql.rows import label_column
from nobackfill.server.stores.postgresql.schema import table_of
from nobackfill.server.stores.postgresql.writing import hold_gate

# What a search reads in place of asking a graph: so many vectors, found among so many labels.
_FEW, _BEYOND = 2_000, 10_000


def frontier(connection: Connection, schema: str, number: int) -> int:
    """Of the space of that number; 0 where nobody has looked."""
    if not run(connection, f"SELECT to_regclass('{schema}.frontiers') IS NOT NULL").fetchone()[0]:
        return 0
    row = run(
        connection, f"SELECT label FROM {schema}.frontiers WHERE space = %s", [number]
    ).fetchone()
    return 0 if row is None else int(row[0])


def advance(connection: Connection, schema: str, number: int) -> None:
    """Find how far a space is whole, beside others that put: two transactions of one connection,
    for both are to ask the same server."""
    with connection.transaction():
        # Who has drawn a label has ended: none up to the last becomes visible later.
        hold_gate(connection, schema)
        # Not with the other tables: galleries of older versions lack it.
        run(
            connection,
            f"CREATE TABLE IF NOT EXISTS {schema}.frontiers"
            " (space integer PRIMARY KEY, label bigint NOT NULL)",
        )
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
    after, table = frontier(connection, schema, target), table_of(schema, source)
    last = run(connection, f"SELECT coalesce(max(label), 0) FROM {table}").fetchone()[0]
    if last - after > _BEYOND:
        return None
    found = run(
        connection,
        f"SELECT s.label FROM {table} s WHERE s.label > {after:d} AND NOT EXISTS (SELECT 1 FROM"
        f" {table_of(schema, target)} t WHERE t.label = s.label AND t.label > {after:d})"
        f" ORDER BY s.label LIMIT {_FEW + 1}",
    )
    labels: list[int] = label_column(found).tolist()
    return labels if len(labels) <= _FEW else None


def _lacking(schema: str, number: int, after: int) -> str:
    """Items `i` without a vector in a space, after a label: what follows FROM."""
    return (
        f"{schema}.items i WHERE i.label > {after:d} AND NOT EXISTS (SELECT 1 FROM"
        f" {table_of(schema, number)} v WHERE v.label = i.label AND v.label > {after:d})"
    )
