"""Writing items: the transaction bodies of put and delete, called with the gate held."""

import json
from collections.abc import Sequence
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.store import Batch, Checked, PutResult, kept_and_replaced
from nobackfill.server.stores.postgresql.bulk import copy_in
from nobackfill.server.stores.postgresql.conditions import facets
from nobackfill.server.stores.postgresql.database import Connection, run
from nobackfill.server.stores.postgresql.rows import label_column, read_spaces
from nobackfill.server.stores.postgresql.schema import table_of
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
