"""Writing items: the transaction bodies of put and delete, called with the gate held."""

import json
from collections.abc import Iterable, Sequence
from itertools import compress
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from nobackfill.errors import NotFoundError
from nobackfill.gallery.search.index import Labels, rows_of
from nobackfill.gallery.spec import SpaceInfo, SpaceSpec
from nobackfill.gallery.staging import ensure_active_may_go, ensure_same, ensure_whole
from nobackfill.gallery.store import Batch, Checked, PutResult, kept_and_replaced
from nobackfill.server.stores.postgresql import rows
from nobackfill.server.stores.postgresql.conditions import facets
from nobackfill.server.stores.postgresql.database import Connection, run
from nobackfill.server.stores.postgresql.rows import copy_in, label_column, read_spaces
from nobackfill.server.stores.postgresql.schema import add_space, table_of
from nobackfill.vectors import Vectors


def share_gate(connection: Connection, schema: str) -> None:
    """Until the transaction ends, nobody changes the gallery's spaces."""
    run(connection, f"LOCK TABLE {schema}.gate IN ROW SHARE MODE")


def hold_gate(connection: Connection, schema: str) -> None:
    """Until the transaction ends, nobody else writes. Who comes later waits behind who waits."""
    run(connection, f"LOCK TABLE {schema}.gate IN EXCLUSIVE MODE")


def insert(
    connection: Connection, schema: str, batch: Batch, vectors: Sequence[Checked]
) -> tuple[PutResult, Labels, list[NDArray[np.bool_]]]:
    """Store a batch. Returns the result, the labels that are gone, and for each of `vectors` the
    rows written."""
    rows = run(
        connection,
        f"SELECT id, label, digest FROM {schema}.items WHERE id = ANY(%s) ORDER BY label"
        " FOR UPDATE",
        [list(batch.ids)],
    )
    found = {item_id: (label, digest) for item_id, label, digest in rows}
    labels, kept, replaced = kept_and_replaced(batch, found)
    delete_labels(connection, schema, replaced)
    fresh = ~kept
    labels[fresh] = _new_labels(connection, schema, int(fresh.sum()))
    _insert_items(connection, schema, batch, labels, fresh)
    described = compress(zip(labels.tolist(), batch.metadata, strict=True), kept.tolist())
    describe(connection, schema, [(label, text) for label, text in described if text])
    written = []
    for checked in vectors:
        table = table_of(schema, checked.info.number)
        wanted = np.ones(len(labels), np.bool_)
        rest = checked
        if kept.any():
            there = live_labels(connection, table, labels[kept], checked.kept_where)
            wanted = ~np.isin(labels, there)
            rest = checked.some(wanted)
        insert_vectors(connection, schema, rest, labels[wanted], replace=bool(kept.any()))
        written.append(wanted)
    return PutResult(labels, fresh), replaced, written


def _new_labels(connection: Connection, schema: str, count: int) -> Labels:
    found = run(
        connection,
        f"SELECT nextval('{schema}.items_label_seq') FROM generate_series(1, %s)",
        [count],
    )
    return np.sort(label_column(found))


def _insert_items(
    connection: Connection, schema: str, batch: Batch, labels: Labels, fresh: NDArray[np.bool_]
) -> None:
    rows = np.flatnonzero(fresh).tolist()
    if not rows:
        return
    metadata = [batch.metadata[row] or "{}" for row in rows]
    run(
        connection,
        f"INSERT INTO {schema}.items (label, id, digest, metadata, facets)"
        " SELECT label, id, digest, metadata, facets::jsonb"
        " FROM unnest(%s::bigint[], %s::text[], %s::text[], %s::text[], %s::text[])"
        " AS new (label, id, digest, metadata, facets)"
        # In the order in which everybody waits for others that put the same ids.
        ' ORDER BY id COLLATE "C"',
        [
            labels[fresh].tolist(), [batch.ids[row] for row in rows],
            [batch.digests[row] for row in rows], metadata,
            [facets(json.loads(text)) for text in metadata],
        ],
    )  # fmt: skip


def describe(connection: Connection, schema: str, described: list[tuple[int, str]]) -> None:
    """Give items, by label, other metadata as JSON texts; what is the same is not written."""
    if not described:
        return
    labels, texts = zip(*described, strict=True)
    run(
        connection,
        f"UPDATE {schema}.items i SET metadata = new.metadata, facets = new.facets::jsonb"
        " FROM unnest(%s::bigint[], %s::text[], %s::text[]) AS new (label, metadata, facets)"
        " WHERE i.label = new.label AND i.metadata <> new.metadata",
        [list(labels), list(texts), [facets(json.loads(text)) for text in texts]],
    )


def live_labels(connection: Connection, table: str, labels: Labels, where: str = "TRUE") -> Labels:
    """Those of `labels` that `table` has in a row for which `where` holds, increasing."""
    found = run(
        connection,
        f"SELECT label FROM {table} WHERE label = ANY(%s) AND {where} ORDER BY label",
        [labels.tolist()],
    )
    return label_column(found)


def insert_vectors(
    connection: Connection, schema: str, checked: Checked, labels: Labels,
    uncertainty: Vectors | None = None, *, replace: bool = False,
) -> None:  # fmt: skip
    """Add a row to the space's table for each label; with `replace` there may be one already."""
    table = table_of(schema, checked.info.number)
    if replace and len(labels):
        run(connection, f"DELETE FROM {table} WHERE label = ANY(%s)", [labels.tolist()])
    copy_in(connection, table, labels, checked.origin, uncertainty, checked.embedding, checked.side)


def locked_labels(
    connection: Connection, schema: str, where: str, values: Sequence[object]
) -> Labels:
    """Labels of the items for which `where` holds, locked in the order in which everybody does."""
    found = run(
        connection,
        f"SELECT label FROM {schema}.items i WHERE {where} ORDER BY label FOR UPDATE",
        values,
    )
    return label_column(found)


def delete_labels(connection: Connection, schema: str, labels: Labels) -> None:
    """Remove items whose rows are locked, and their vectors in every space."""
    if not len(labels):
        return
    for info in read_spaces(connection, schema):
        table = table_of(schema, info.number)
        run(connection, f"DELETE FROM {table} WHERE label = ANY(%s)", [labels.tolist()])
    run(connection, f"DELETE FROM {schema}.items WHERE label = ANY(%s)", [labels.tolist()])


# The frontier of a space: the label up to which every item has a vector there, as far as somebody
# has looked. Who flips looks at what came later.
#
# What was found stays true: labels only grow and are never used again, and a vector goes with its
# item alone. It is a row beside the vectors, so that a standby that takes over has the frontier of
# what it has. A space whose number has no row has not been looked at.

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


# The life of spaces in a gallery: the transaction bodies, called with the gate held alone.


def begin(connection: Connection, schema: str, spec: SpaceSpec) -> bool:
    """See staging.begin; whether it is new."""
    for info in rows.read_spaces(connection, schema):
        if info.spec.space == spec.space:
            ensure_same(info.spec, spec)
            return False
    add_space(connection, schema, spec, "staging")
    make_frontiers(connection, schema)
    return True


def write(
    connection: Connection, schema: str, checked: Checked, labels: Labels,
    uncertainty: NDArray[np.float32] | None, *, replace: bool,
) -> tuple[Labels, Vectors]:  # fmt: skip
    """See staging.write, with the gate shared: the labels written, increasing, with embeddings."""
    info = rows.find_space(connection, schema, checked.info.spec.space)
    order = np.argsort(labels)
    good = rows.label_column(
        run(
            connection,
            f"SELECT label FROM {schema}.items WHERE label = ANY(%s) ORDER BY label FOR KEY SHARE",
            [labels.tolist()],
        )
    )
    if not replace:
        there = live_labels(connection, table_of(schema, info.number), labels)
        good = np.setdiff1d(good, there, assume_unique=True)
    chosen = order[rows_of(labels[order], good)]
    kept = checked.some(chosen)
    doubt = None if uncertainty is None else uncertainty[chosen]
    insert_vectors(connection, schema, kept, good, doubt, replace=replace)
    return good, kept.embedding


def flip(connection: Connection, schema: str, space: str, *, leave_behind: bool) -> None:
    """See staging.flip."""
    target = rows.find_space(connection, schema, space)
    if target.state != "active":
        _activate(connection, schema, target, "previous", leave_behind)


def rollback(connection: Connection, schema: str, *, leave_behind: bool) -> str:
    """See staging.rollback."""
    target = previous_of(rows.read_spaces(connection, schema))
    _activate(connection, schema, target, "staging", leave_behind)
    return target.spec.space


def previous_of(spaces: Iterable[SpaceInfo]) -> SpaceInfo:
    """The space that was active before. Raises NotFoundError if none is kept."""
    before = [info for info in spaces if info.state == "previous"]
    if not before:
        raise NotFoundError("no earlier space is kept in this gallery; nothing to return to")
    return max(before, key=lambda info: info.activated)


def _activate(
    connection: Connection, schema: str, target: SpaceInfo, old_becomes: str, leave_behind: bool
) -> None:
    if not leave_behind:
        ensure_whole(left_behind(connection, schema, target.number), target)
    spaces = f"{schema}.spaces"
    run(connection, f"UPDATE {spaces} SET state = %s WHERE state = 'active'", [old_becomes])
    run(
        connection,
        f"UPDATE {spaces} SET state = 'active', activated = (SELECT max(activated) + 1"
        f" FROM {spaces}) WHERE number = %s",
        [target.number],
    )


def drop(connection: Connection, schema: str, space: str) -> None:
    """See staging.drop."""
    info = rows.find_space(connection, schema, space)
    ensure_active_may_go(info)
    run(connection, f"DROP TABLE {table_of(schema, info.number)}")
    run(connection, f"DELETE FROM {schema}.spaces WHERE number = %s", [info.number])
