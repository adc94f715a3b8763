"""The life of spaces in a gallery: the transaction bodies, called with the gate held alone."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from nobackfill.errors import NotFoundError
from nobackfill.gallery.search.index import Labels, rows_of
from nobackfill.gallery.spec import SpaceInfo, SpaceSpec
from nobackfill.gallery.staging import ensure_active_may_go, ensure_same, ensure_whole
from nobackfill.gallery.store import Checked
from nobackfill.server.stores.postgresql import rows
from nobackfill.server.stores.postgresql.database import Connection, run
from nobackfill.server.stores.postgresql.frontier import left_behind, make_frontiers
from nobackfill.server.stores.postgresql.schema import add_space, table_of
from nobackfill.server.stores.postgresql.writing import insert_vectors, live_labels
from nobackfill.vectors import Vectors


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
