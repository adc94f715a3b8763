"""Write to a gallery: the bodies of transactions, called with the gallery's gate held."""

import json
from collections.abc import Iterable, Sequence
from itertools import compress
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from nobackfill.errors import NotFoundError
from nobackfill.gallery.search.index import Labels, find_label_rows
from nobackfill.gallery.spec import SpaceInfo, SpaceSpec
from nobackfill.gallery.staging import check_same_space, ensure_complete, ensure_not_active
from nobackfill.gallery.store import Batch, CheckedVectors, PutResult, compare_with_stored
from nobackfill.server.stores.postgresql import rows
from nobackfill.server.stores.postgresql.conditions import encode_facets
from nobackfill.server.stores.postgresql.database import Connection, execute, scalar
from nobackfill.server.stores.postgresql.rows import copy_in, label_column, read_spaces
from nobackfill.server.stores.postgresql.schema import add_space, table_name
from nobackfill.vectors import Vectors


def lock_gallery_shared(connection: Connection, schema: str) -> None:
    """Keep others from changing the gallery's spaces until the transaction ends.

    It waits for a change of spaces that holds or awaits the gate.

    Raises:
        psycopg.Error: the statement fails, as without the table; the caller translates it.
    """
    execute(connection, f"LOCK TABLE {schema}.gate IN ROW SHARE MODE")


def lock_gallery_exclusive(connection: Connection, schema: str) -> None:
    """Keep all others from writing until the transaction ends; later ones queue behind this one.

    It waits for all who write now.

    Raises:
        psycopg.Error: the statement fails, as without the table; the caller translates it.
    """
    execute(connection, f"LOCK TABLE {schema}.gate IN EXCLUSIVE MODE")


def insert_items(
    connection: Connection, schema: str, batch: Batch, vectors: Sequence[CheckedVectors]
) -> tuple[PutResult, Labels, list[NDArray[np.bool_]]]:
    """Store a batch of items, as GalleryStore.put describes.

    An item with the same digest keeps its label and vectors. It gets vectors that it lacks, and
    native vectors replace its migrated ones. Others are deleted, and stored again with new labels.
    Metadata of kept items is replaced where the batch has some.

    Args:
        connection: the connection, within a transaction that shares the gate.
        schema: schema of the gallery.
        batch: the items, without repeated ids.
        vectors: their vectors, by space, in the order of the items.

    Returns:
        The result, the labels that were replaced (int64, increasing), and for each of `vectors` a
        mask bool [n] of the rows written.

    Raises:
        psycopg.Error: a statement fails, as after a collision with another put of the same ids; the
            caller translates or repeats it.
    """
    rows = execute(
        connection,
        f"SELECT id, label, digest FROM {schema}.items WHERE id = ANY(%s) ORDER BY label"
        " FOR UPDATE",
        [list(batch.ids)],
    )
    known = {item_id: (label, digest) for item_id, label, digest in rows}
    labels, kept, replaced = compare_with_stored(batch, known)
    delete_labels(connection, schema, replaced)
    is_new = ~kept
    labels[is_new] = _new_labels(connection, schema, int(is_new.sum()))
    _insert_items(connection, schema, batch, labels, is_new)
    changes = compress(zip(labels.tolist(), batch.metadata, strict=True), kept.tolist())
    write_metadata(connection, schema, [(label, text) for label, text in changes if text])
    written = []
    for checked in vectors:
        table = table_name(schema, checked.space_info.table_number)
        is_missing = np.ones(len(labels), np.bool_)
        missing = checked
        if kept.any():
            present = labels_in_table(
                connection, table, labels[kept], checked.unchanged_sql_condition
            )
            is_missing = ~np.isin(labels, present)
            missing = checked.select(is_missing)
        insert_vectors(connection, schema, missing, labels[is_missing], replace=bool(kept.any()))
        written.append(is_missing)
    return PutResult(labels, is_new), replaced, written


def _new_labels(connection: Connection, schema: str, count: int) -> Labels:
    query = f"SELECT nextval('{schema}.items_label_seq') FROM generate_series(1, %s)"
    return np.sort(label_column(execute(connection, query, [count])))


def _insert_items(
    connection: Connection, schema: str, batch: Batch, labels: Labels, is_new: NDArray[np.bool_]
) -> None:
    rows = np.flatnonzero(is_new).tolist()
    if not rows:
        return
    metadata = [batch.metadata[row] or "{}" for row in rows]
    execute(
        connection,
        f"INSERT INTO {schema}.items (label, id, digest, metadata, facets)"
        " SELECT label, id, digest, metadata, facets::jsonb"
        " FROM unnest(%s::bigint[], %s::text[], %s::text[], %s::text[], %s::text[])"
        " AS new (label, id, digest, metadata, facets)"
        # In the order in which every transaction waits for others with the same ids.
        ' ORDER BY id COLLATE "C"',
        [
            labels[is_new].tolist(), [batch.ids[row] for row in rows],
            [batch.digests[row] for row in rows], metadata,
            [encode_facets(json.loads(text)) for text in metadata],
        ],
    )  # fmt: skip


def write_metadata(connection: Connection, schema: str, described: list[tuple[int, str]]) -> None:
    """Replace the metadata of items, given by label as JSON texts; equal metadata is not
    written.

    Labels that do not exist are ignored. Facets for filters change with the metadata. Without items
    nothing runs. If a label is repeated, PostgreSQL takes one of its texts.

    Raises:
        psycopg.Error: the statement fails, as without the table; the caller translates it.
        ValueError: a text is not JSON; nothing is written.
    """
    if not described:
        return
    labels, texts = zip(*described, strict=True)
    execute(
        connection,
        f"UPDATE {schema}.items i SET metadata = new.metadata, facets = new.facets::jsonb"
        " FROM unnest(%s::bigint[], %s::text[], %s::text[]) AS new (label, metadata, facets)"
        " WHERE i.label = new.label AND i.metadata <> new.metadata",
        [list(labels), list(texts), [encode_facets(json.loads(text)) for text in texts]],
    )


def labels_in_table(
    connection: Connection, table: str, labels: Labels, where: str = "TRUE"
) -> Labels:
    """Return the labels, increasing, that a table has in a row that fulfils a condition.

    Args:
        connection: the connection.
        table: the table's name, quoted.
        labels: int64 [n]; may be empty. A repeated one counts once.
        where: SQL on the table's columns, without placeholders.

    Raises:
        psycopg.Error: the statement fails, as without the table; the caller translates it.
    """
    query = f"SELECT label FROM {table} WHERE label = ANY(%s) AND {where} ORDER BY label"
    return label_column(execute(connection, query, [labels.tolist()]))


def insert_vectors(
    connection: Connection, schema: str, checked: CheckedVectors, labels: Labels,
    uncertainty: Vectors | None = None, *, replace: bool = False,
) -> None:  # fmt: skip
    """Add one row to a space's table for each label.

    Without labels nothing is written. Whether an item has the label is not checked.

    Args:
        connection: the connection, within a transaction.
        schema: schema of the gallery.
        checked: the vectors.
        labels: one label for each.
        uncertainty: one value for each; None if unknown.
        replace: replace rows that exist.

    Raises:
        psycopg.Error: the statement fails, as for a label that has a row and no `replace`.
        ValueError: there are several vectors, and another number of labels.
    """
    table = table_name(schema, checked.space_info.table_number)
    if replace and len(labels):
        execute(connection, f"DELETE FROM {table} WHERE label = ANY(%s)", [labels.tolist()])
    embedding, side = checked.embedding, checked.side_information
    copy_in(connection, table, labels, checked.origin, uncertainty, embedding, side)


def lock_items(connection: Connection, schema: str, where: str, values: Sequence[object]) -> Labels:
    """Lock the items that fulfil a condition, in the order of all transactions; returns their
    labels.

    The locks last until the transaction ends. It waits for transactions that hold one of them.

    Args:
        connection: a connection inside a transaction.
        schema: schema of the gallery.
        where: SQL on the row `i`, with a placeholder for each value.
        values: the values.

    Returns:
        int64, increasing; empty if no item fulfils it.

    Raises:
        psycopg.Error: the statement fails, as without the table; the caller translates it.
    """
    query = f"SELECT label FROM {schema}.items i WHERE {where} ORDER BY label FOR UPDATE"
    return label_column(execute(connection, query, values))


def delete_labels(connection: Connection, schema: str, labels: Labels) -> None:
    """Delete items whose rows are locked, and their vectors in every space.

    Labels that do not exist are ignored.

    Raises:
        psycopg.Error: the statement fails, as without the table; the caller translates it.
    """
    if not len(labels):
        return
    for info in read_spaces(connection, schema):
        table = table_name(schema, info.table_number)
        execute(connection, f"DELETE FROM {table} WHERE label = ANY(%s)", [labels.tolist()])
    execute(connection, f"DELETE FROM {schema}.items WHERE label = ANY(%s)", [labels.tolist()])


# The frontier of a space is a label up to which every item has a vector there, as of the last
# check; a flip only checks later labels. A frontier stays true: labels only grow and are never
# reused, and a vector is deleted only with its item. It is a row next to the vectors, so that a
# standby that takes over has the frontier of its own data. A space without a row was never checked.

# Instead of using a graph, a search reads up to _FEW vectors, found among up to _BEYOND labels.
_FEW, _BEYOND = 2_000, 10_000


# Schemas whose frontiers a connection has seen; its server does not lose them.
_SEEN: WeakKeyDictionary[Connection, set[str]] = WeakKeyDictionary()


def create_frontier_table(connection: Connection, schema: str) -> None:
    """Create the table of frontiers, which galleries of older versions lack.

    It does nothing if the table exists. Hold the gate: two calls at once may collide.

    Raises:
        psycopg.Error: the statement fails, as without the table; the caller translates it.
    """
    execute(
        connection,
        f"CREATE TABLE IF NOT EXISTS {schema}.frontiers"
        " (space integer PRIMARY KEY, label bigint NOT NULL)",
    )


def read_frontier(connection: Connection, schema: str, space_number: int) -> int:
    """Return the frontier of a space; 0 if it was never checked.

    All items up to this label have a vector in the space. A gallery without the table of frontiers
    gives 0, and so does an unknown space.

    Raises:
        psycopg.Error: the statement fails, as without the table; the caller translates it.
    """
    if not _has_frontiers(connection, schema):
        return 0
    return int(scalar(connection, f"SELECT {_frontier_expression(schema, space_number)}"))


def _has_frontiers(connection: Connection, schema: str) -> bool:
    return bool(scalar(connection, f"SELECT to_regclass('{schema}.frontiers') IS NOT NULL"))


def _frontier_expression(schema: str, number: int) -> str:
    return f"coalesce((SELECT label FROM {schema}.frontiers WHERE space = {number:d}), 0)"


def advance_frontier(connection: Connection, schema: str, space_number: int) -> None:
    """Move the frontier of a space, while others put items.

    It uses two transactions of one connection, because both must ask the same server.

    It never moves back. It stops before the first item without a vector, and holds the gate only
    briefly, after a wait for all who write. The search for that item may read many rows.

    Args:
        connection: a connection outside a transaction.
        schema: schema of the gallery.
        space_number: number of the space.

    Raises:
        psycopg.Error: the statement fails, as without the table; the caller translates it.
    """
    with connection.transaction():
        # With the gate held, every transaction that took a label has ended: no label up to the last
        # one becomes visible later.
        lock_gallery_exclusive(connection, schema)
        create_frontier_table(connection, schema)
        last = scalar(connection, f"SELECT coalesce(max(label), 0) FROM {schema}.items")
    with connection.transaction():
        old_frontier = read_frontier(connection, schema, space_number)
        # This includes items put in the meantime; their labels are greater.
        missing = _items_without_vector(schema, space_number, old_frontier)
        first = scalar(connection, f"SELECT min(i.label) FROM {missing}")
        reached = last if first is None else min(last, first - 1)
        if reached > old_frontier:
            execute(
                connection,
                f"INSERT INTO {schema}.frontiers AS f VALUES (%s, %s) ON CONFLICT (space)"
                " DO UPDATE SET label = greatest(f.label, excluded.label)",
                [space_number, reached],
            )


def count_items_without_vector(connection: Connection, schema: str, space_number: int) -> int:
    """Return the number of items without a vector in a space.

    Only items above the frontier are checked.

    Raises:
        psycopg.Error: the statement fails, as without the table; the caller translates it.
    """
    missing = _items_without_vector(
        schema, space_number, read_frontier(connection, schema, space_number)
    )
    return int(scalar(connection, f"SELECT count(*) FROM {missing}"))


def few_missing_labels(
    connection: Connection, schema: str, source_number: int, target_number: int
) -> list[int] | None:
    """Return the labels that one space has and another lacks.

    Labels up to the target's frontier are not checked.

    Args:
        connection: the connection.
        schema: schema of the gallery.
        source_number: number of the space that has them.
        target_number: number of the space that lacks them.

    Returns:
        The labels, increasing, at most 2000; may be empty. None if there are more, or the source's
        last label is more than 10000 above the target's frontier.

    Raises:
        psycopg.Error: the statement fails, as without the table; the caller translates it.
    """
    seen_schemas = _SEEN.setdefault(connection, set())
    frontier_sql = "0::bigint"
    if schema in seen_schemas or _has_frontiers(connection, schema):
        seen_schemas.add(schema)
        frontier_sql = _frontier_expression(schema, target_number)
    cursor = execute(
        connection, _few_missing_query(schema, source_number, target_number, frontier_sql)
    )
    labels = [label for (label,) in cursor]
    return None if labels[:1] == [None] or len(labels) > _FEW else labels


def _few_missing_query(schema: str, source: int, target: int, frontier_sql: str) -> str:
    """Make the query; it returns one row of NULL if the frontier is too far behind.

    The second bound excludes nothing. It tells the planner, which does not know the frontier, that
    it is near the end.
    """
    table, other = table_name(schema, source), table_name(schema, target)
    return (
        f"WITH near AS MATERIALIZED (SELECT after, after + {_BEYOND:d} AS most,"
        f" (SELECT coalesce(max(label), 0) FROM {table}) - after > {_BEYOND:d} AS far"
        f" FROM (SELECT {frontier_sql} AS after) f)"
        " SELECT NULL::bigint FROM near WHERE far UNION ALL"
        f" (SELECT s.label FROM {table} s WHERE NOT (SELECT far FROM near)"
        " AND s.label > (SELECT after FROM near) AND s.label <= (SELECT most FROM near)"
        f" AND NOT EXISTS (SELECT 1 FROM {other} t WHERE t.label = s.label"
        " AND t.label > (SELECT after FROM near) AND t.label <= (SELECT most FROM near))"
        f" ORDER BY s.label LIMIT {_FEW + 1:d})"
    )


def _items_without_vector(schema: str, number: int, label: int) -> str:
    """Make the FROM clause for items `i` above a label without a vector in a space."""
    return (
        f"{schema}.items i WHERE i.label > {label:d} AND NOT EXISTS (SELECT 1 FROM"
        f" {table_name(schema, number)} v WHERE v.label = i.label AND v.label > {label:d})"
    )


# The following functions change spaces; they are called with the gate held exclusively.


def create_staging_space(connection: Connection, schema: str, spec: SpaceSpec) -> bool:
    """Create a staging space, and return True; return False if it exists, in whatever state.

    No graph is made. Call it with the gate held.

    Raises:
        InvalidInputError: the space exists with another release, dimension, metric, norm or side
            space, or has too many dimensions for pgvector.
        psycopg.Error: the statement fails; the caller translates it.
    """
    for info in rows.read_spaces(connection, schema):
        if info.spec.space == spec.space:
            check_same_space(info.spec, spec)
            return False
    add_space(connection, schema, spec, "staging")
    create_frontier_table(connection, schema)
    return True


def write_vectors(
    connection: Connection, schema: str, checked: CheckedVectors, labels: Labels,
    uncertainty: NDArray[np.float32] | None, *, replace: bool,
) -> tuple[Labels, Vectors]:  # fmt: skip
    """Write vectors of existing items into a space.

    The rows of the items are locked (FOR KEY SHARE) until the transaction ends.

    Args:
        connection: a connection inside a transaction.
        schema: the gallery's schema, quoted.
        checked: the vectors and their space.
        labels: int64 [n], distinct; a label without an item is skipped.
        uncertainty: float32 [n], or None.
        replace: replace vectors that the space has; otherwise they are skipped.

    Returns:
        The labels that were written, increasing, and their embeddings.

    Raises:
        IncompatibleSpaceError: the gallery does not have the space.
        psycopg.Error: the statement fails; the caller translates it.
    """
    info = rows.find_space(connection, schema, checked.space_info.spec.space)
    order = np.argsort(labels)
    query = f"SELECT label FROM {schema}.items WHERE label = ANY(%s) ORDER BY label FOR KEY SHARE"
    existing = label_column(execute(connection, query, [labels.tolist()]))
    if not replace:
        present = labels_in_table(connection, table_name(schema, info.table_number), labels)
        existing = np.setdiff1d(existing, present, assume_unique=True)
    selection = order[find_label_rows(labels[order], existing)]
    selected = checked.select(selection)
    chosen_uncertainty = None if uncertainty is None else uncertainty[selection]
    insert_vectors(connection, schema, selected, existing, chosen_uncertainty, replace=replace)
    return existing, selected.embedding


def flip(connection: Connection, schema: str, space: str, *, leave_behind: bool) -> None:
    """Make a space the active one, and the active space the previous one.

    If the space is active already, nothing changes.

    Earlier previous spaces stay previous. Call it with the gate held. No vector changes.

    Args:
        connection: the connection, within a transaction.
        schema: schema of the gallery.
        space: id of the space.
        leave_behind: allow items without a vector in it; searches do not find them.

    Raises:
        IncompatibleSpaceError: the gallery does not have the space.
        PreconditionError: items lack a vector in it, and `leave_behind` is False.
        psycopg.Error: the statement fails, as without the table; the caller translates it.
    """
    target = rows.find_space(connection, schema, space)
    if target.state != "active":
        _activate(connection, schema, target, "previous", leave_behind)


def rollback(connection: Connection, schema: str, *, leave_behind: bool) -> str:
    """Make the previous space the active one, and return its id.

    The space that was active becomes staging and keeps its vectors.

    Call it with the gate held. If there are several previous spaces, it takes the one that was
    activated last.

    Args:
        connection: the connection, within a transaction.
        schema: schema of the gallery.
        leave_behind: allow items without a vector in it; searches do not find them.

    Raises:
        NotFoundError: there is no previous space.
        PreconditionError: items lack a vector in it, and `leave_behind` is False.
        psycopg.Error: the statement fails, as without the table; the caller translates it.
    """
    target = previous_space(rows.read_spaces(connection, schema))
    _activate(connection, schema, target, "staging", leave_behind)
    return target.spec.space


def previous_space(spaces: Iterable[SpaceInfo]) -> SpaceInfo:
    """Return the space that was active before.

    If there are several, it is the one that was activated last.

    Raises:
        NotFoundError: there is none.
    """
    previous = [info for info in spaces if info.state == "previous"]
    if not previous:
        raise NotFoundError(
            "this gallery has no older release to roll back to: it was created with the present "
            "release, or `gateway retire` has removed the older vectors"
        )
    return max(previous, key=lambda info: info.activation_rank)


def _activate(
    connection: Connection, schema: str, target: SpaceInfo, old_state: str, leave_behind: bool
) -> None:
    if not leave_behind:
        ensure_complete(count_items_without_vector(connection, schema, target.table_number), target)
    spaces = f"{schema}.spaces"
    execute(connection, f"UPDATE {spaces} SET state = %s WHERE state = 'active'", [old_state])
    execute(
        connection,
        f"UPDATE {spaces} SET state = 'active', activated = (SELECT max(activated) + 1"
        f" FROM {spaces}) WHERE number = %s",
        [target.table_number],
    )


def drop_space(connection: Connection, schema: str, space: str) -> None:
    """Delete a space with its vectors; items stay.

    The frontier of the space stays; numbers of spaces are never used again. Call it with the gate
    held.

    Raises:
        IncompatibleSpaceError: the gallery does not have the space.
        PreconditionError: the space is the active one.
        psycopg.Error: the statement fails, as without the table; the caller translates it.
    """
    info = rows.find_space(connection, schema, space)
    ensure_not_active(info)
    execute(connection, f"DROP TABLE {table_name(schema, info.table_number)}")
    execute(connection, f"DELETE FROM {schema}.spaces WHERE number = %s", [info.table_number])
