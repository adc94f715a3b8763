"""The life of spaces in a gallery: staged, filled, flipped, rolled back, dropped.

Whatever is done here is one transaction. A gallery always has exactly one active space.
"""

import dataclasses
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nobackfill.errors import InvalidInputError, NotFoundError, PreconditionError
from nobackfill.gallery import reading
from nobackfill.gallery.search.index import Labels, rows_of
from nobackfill.gallery.spec import Origin, SpaceInfo, SpaceSpec
from nobackfill.gallery.store import Change, Item, Store
from nobackfill.gallery.tables import add_space, find_space, live_labels, read_spaces, vector_table
from nobackfill.gallery.writing import NewVectors, check, insert_vectors
from nobackfill.vectors import Vectors, check_vectors

# Rows deleted at once: what one statement changes stays in memory until it ends.
DROP_ROWS = 4096

_NONE = np.empty(0, np.int64)
_SPACES_CHANGED = Change({}, _NONE, spaces=True)


def begin(store: Store, spec: SpaceSpec) -> None:
    """Add a staging space; a space that is there already is left as it is.

    Raises InvalidInputError if it is there with another dimension, metric or side space.
    """
    with store.changing() as (connection, changes):
        for info in read_spaces(connection):
            if info.spec.space == spec.space:
                ensure_same(info.spec, spec)
                return
        add_space(connection, spec, "staging")
        changes.append(_SPACES_CHANGED)


def ensure_same(old: SpaceSpec, new: SpaceSpec) -> None:
    """Raises InvalidInputError where a space that is there differs."""
    if old != new:
        differing = [
            field.name
            for field in dataclasses.fields(SpaceSpec)
            if getattr(old, field.name) != getattr(new, field.name)
        ]
        raise InvalidInputError(
            f"space {new.space}: expected the {' and '.join(differing)} it has in the gallery; "
            "publish a changed model as a new release"
        )


def write(
    store: Store,
    space: str,
    labels: Labels,
    embedding: ArrayLike,
    *,
    side: ArrayLike | None = None,
    uncertainty: ArrayLike | None = None,
    origin: Origin = "upgraded",
    replace: bool = False,
) -> Labels:
    """Write vectors of existing items into a space, in one durable transaction.

    `labels` int64 [n] distinct, `embedding` [n, dim], `side` [n, side_dim], `uncertainty` [n].
    Labels deleted meanwhile are skipped, and so are those with a vector there, unless `replace` (a
    backfill: re-embedded). Returns the labels written, increasing. Raises InvalidInputError,
    IncompatibleSpaceError, BusyError, CannotWriteError.
    """
    checked = check(store.space(space), NewVectors(space, embedding, side, origin), len(labels))
    order = np.argsort(labels)
    doubt = check_doubt(uncertainty, len(labels))
    with store.changing() as (connection, changes):
        info = find_space(connection, space)
        good = live_labels(connection, "items", labels)
        if not replace:
            there = live_labels(connection, vector_table(info.number), labels)
            good = np.setdiff1d(good, there, assume_unique=True)
        rows = order[rows_of(labels[order], good)]
        kept = checked.some(rows)
        insert_vectors(
            connection, kept, good, None if doubt is None else doubt[rows], replace=replace
        )
        carried = (space,) if origin == "upgraded" else ()
        changes.append(Change({space: (good, kept.embedding)}, _NONE, carried=carried))
    return good


def check_doubt(uncertainty: ArrayLike | None, rows: int) -> NDArray[np.float32] | None:
    """Uncertainties [n] of `rows` items, if any. Raises InvalidInputError for others."""
    if uncertainty is None:
        return None
    column = np.asarray(uncertainty)[:, None]
    doubt = check_vectors(column, 1, what="uncertainties of an upgrade")[:, 0]
    if len(doubt) != rows:
        raise InvalidInputError(f"uncertainties: expected {rows} rows, got {len(doubt)}")
    return doubt


def left_behind(store: Store, space: str) -> int:
    """Number of items without a vector in `space`."""
    with store.reading() as connection:
        return _left_behind(connection, find_space(connection, space))


def _left_behind(connection: sqlite3.Connection, info: SpaceInfo) -> int:
    # Every vector belongs to an item.
    return reading.count(connection, None) - reading.count(connection, info.spec.space)


def left_behind_items(store: Store, space: str, after: int = 0, limit: int = 1000) -> list[Item]:
    """Those items by increasing label, after label `after`: a page."""
    with store.reading() as connection:
        table = vector_table(find_space(connection, space).number)
        lacking = f"NOT EXISTS (SELECT 1 FROM {table} v WHERE v.label = i.label)"
        return reading.page(connection, after, limit, lacking)


def flip(
    store: Store, space: str, *, leave_behind: bool = False, state: Mapping[str, Any] | None = None
) -> None:
    """Make `space` the active one; what was active becomes previous. `state` is set with it.

    Raises PreconditionError when items lack a vector in `space`, unless `leave_behind`.
    """
    with store.changing() as (connection, changes):
        target = find_space(connection, space)
        if target.state != "active":
            _activate(connection, target, "previous", leave_behind)
        reading.set_state(connection, state or {})
        changes.append(_SPACES_CHANGED)


def rollback(
    store: Store, *, leave_behind: bool = False, state: Mapping[str, Any] | None = None
) -> str:
    """Return to the space that was active before; the present one becomes staging, kept as it is.

    Returns the space now active. Raises NotFoundError if none is kept, PreconditionError when items
    lack a vector there, unless `leave_behind`.
    """
    with store.changing() as (connection, changes):
        before = [info for info in read_spaces(connection) if info.state == "previous"]
        if not before:
            raise NotFoundError("no earlier space is kept in this gallery; nothing to return to")
        target = max(before, key=lambda info: info.activated)
        _activate(connection, target, "staging", leave_behind)
        reading.set_state(connection, state or {})
        changes.append(_SPACES_CHANGED)
    return target.spec.space


def _activate(
    connection: sqlite3.Connection, target: SpaceInfo, old_becomes: str, leave_behind: bool
) -> None:
    if not leave_behind:
        ensure_whole(_left_behind(connection, target), target)
    connection.execute("UPDATE spaces SET state = ? WHERE state = 'active'", (old_becomes,))
    connection.execute(
        "UPDATE spaces SET state = 'active', activated = (SELECT max(activated) + 1 FROM spaces)"
        " WHERE number = ?",
        (target.number,),
    )


def ensure_whole(lacking: int, target: SpaceInfo) -> None:
    """Raises PreconditionError where so many items have no vector in a space."""
    if lacking:
        raise PreconditionError(
            f"{lacking} items have no vector in release {target.spec.release}'s space and could "
            "not be found there; list them, upgrade or embed them, or accept to leave them behind"
        )


def ensure_active_may_go(info: SpaceInfo) -> None:
    """Raises PreconditionError for the active space, which no gallery is without."""
    if info.state == "active":
        raise PreconditionError(
            f"release {info.spec.release}'s space is the active one; flip to another first"
        )


def drop(store: Store, space: str) -> None:
    """Remove a space that is not active, with all its vectors, and scrub them from the file.

    Raises PreconditionError for the active one.
    """
    with store.changing() as (connection, changes):
        info = find_space(connection, space)
        ensure_active_may_go(info)
        table = vector_table(info.number)
        piece = f"DELETE FROM {table} WHERE label IN (SELECT label FROM {table} LIMIT {DROP_ROWS})"
        while connection.execute(piece).rowcount:
            pass
        connection.execute(f"DROP TABLE {table}")
        connection.execute("DELETE FROM spaces WHERE number = ?", (info.number,))
        changes.append(_SPACES_CHANGED)
    store.scrub()


def least_certain(store: Store, space: str, limit: int = 100) -> list[Item]:
    """Upgraded items by falling uncertainty, largest first."""
    with store.reading() as connection:
        return reading.least_certain(connection, space, limit)


def upgraded(store: Store, space: str, ids: Sequence[str]) -> list[Item]:
    """Those of `ids` that an upgrade carried into the space, by falling uncertainty; those of
    unknown uncertainty last."""
    with store.reading() as connection:
        return reading.upgraded(connection, space, ids)


def sample(store: Store, space: str, other: str, count: int) -> tuple[Labels, Vectors, Vectors]:
    """About `count` items at random that have a vector in both spaces: labels [n], increasing, and
    their vectors [n, dim] in each."""
    with store.reading() as connection:
        first, second = find_space(connection, space), find_space(connection, other)
        labels = reading.random_labels(connection, second, count)
        labels = live_labels(connection, vector_table(first.number), labels)
        pairs = [reading.vectors_of(connection, labels, info) for info in (first, second)]
    return labels, pairs[0], pairs[1]
