"""A second space beside the active one: filled, flipped to, rolled back, dropped.

Each change is one transaction. A gallery always has exactly one active space. What an upgrade
still has to carry, what it costs, and how many neighbours it keeps are read here, too.
"""

import dataclasses
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nobackfill import durable
from nobackfill.errors import InvalidInputError, NotFoundError, PreconditionError
from nobackfill.gallery import reading
from nobackfill.gallery.connections import PAGE_BYTES, connect
from nobackfill.gallery.reading import StoredItem
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.index import Labels, rows_of
from nobackfill.gallery.spec import Origin, SpaceInfo, SpaceSpec, side_passes
from nobackfill.gallery.store import Change, Checked, NewVectors, Store, check_new, insert_vectors
from nobackfill.gallery.tables import (
    VECTOR_TABLE,
    add_space,
    among,
    find_space,
    from_blobs,
    label_column,
    live_labels,
    read_spaces,
    vector_table,
)
from nobackfill.gallery.upgrade import Order, Runner
from nobackfill.release.models import CHUNK
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
    checked = check_new(store.space(space), NewVectors(space, embedding, side, origin), len(labels))
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


def left_behind_items(
    store: Store, space: str, after: int = 0, limit: int = 1000
) -> list[StoredItem]:
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


def least_certain(store: Store, space: str, limit: int = 100) -> list[StoredItem]:
    """Upgraded items by falling uncertainty, largest first."""
    with store.reading() as connection:
        return reading.least_certain(connection, space, limit)


def upgraded(store: Store, space: str, ids: Sequence[str]) -> list[StoredItem]:
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


class Remaining:
    """Reads from a source space what a target still lacks."""

    def __init__(self, store: Store, source: str, target: SpaceSpec, needs_side: bool) -> None:
        """Items without side-information are passed over where the runner `needs_side`; otherwise
        they come after those that have some, which goes along for a runner that carries it.

        Raises IncompatibleSpaceError for an unknown source.
        """
        self.store = store
        self.source = store.space(source)
        spaces = {info.spec.space: info for info in store.spaces()}
        self.target = spaces.get(target.space)
        self._passes = side_passes(self.source.spec, target, needs_side=needs_side)

    def chunks(self, order: Order, size: int) -> Iterator[tuple[Labels, Vectors, Vectors | None]]:
        """Labels, embeddings and side-information (of all of them or of none), `size` items each.

        Until nothing is left: what is put meanwhile has larger labels and comes at the end.
        """
        last = dict.fromkeys(self._passes, 0)
        found = True
        while found:
            found = False
            for with_side in self._passes:
                todo = self.labels(order, with_side, last[with_side])
                if len(todo):
                    found = True
                    last[with_side] = int(todo.max())
                for start in range(0, len(todo), size):
                    chunk = self.read(todo[start : start + size], bool(with_side))
                    if len(chunk[0]):
                        yield chunk

    def all_labels(self) -> Labels:
        """Every label that `chunks` would come to, if nothing changed."""
        return np.concatenate([self.labels("label", with_side) for with_side in self._passes])

    def labels(self, order: Order, with_side: bool | None, after: int = 0) -> Labels:
        """Labels above `after` that the target lacks, with or without side-information (None: no
        matter), in the order of work."""
        by = {"label": "s.label", "uncertainty": "s.uncertainty DESC, s.label"}[order]
        where = {None: "TRUE", True: "s.side IS NOT NULL", False: "s.side IS NULL"}[with_side]
        if self.target is not None:
            there = vector_table(self.target.number)
            where += f" AND NOT EXISTS (SELECT 1 FROM {there} t WHERE t.label = s.label)"
        with self.store.reading() as connection:
            rows = connection.execute(
                f"SELECT s.label FROM {vector_table(self.source.number)} s"
                f" WHERE s.label > ? AND {where} ORDER BY {by}",
                (after,),
            )
            return label_column(rows)

    def read(self, labels: Labels, with_side: bool) -> tuple[Labels, Vectors, Vectors | None]:
        """Those of `labels` that are still there, by label."""
        condition, parameters = among(labels)
        with self.store.reading() as connection:
            rows = connection.execute(
                f"SELECT label, embedding, {'side' if with_side else 'NULL'}"
                f" FROM {vector_table(self.source.number)} WHERE {condition} ORDER BY label",
                parameters,
            ).fetchall()
        spec = self.source.spec
        if not rows:
            return np.empty(0, np.int64), np.empty((0, spec.dim), np.float32), None
        columns = zip(*rows, strict=True)
        found = np.array(next(columns), np.int64)
        # A range can hold others than those that were asked for.
        asked = np.isin(found, labels)
        embedding, side = ([*compress(column, asked)] for column in columns)
        sides = from_blobs(side, spec.side_dim) if with_side else None
        return found[asked], from_blobs(embedding, spec.dim), sides


NEIGHBOUR_PROBES = 1000
NEIGHBOURS = 10


# Of a gallery: about so many items that have a vector in both of two spaces, labels [n] and their
# vectors [n, dim] in each.
Sample = Callable[[str, str, int], tuple[Labels, Vectors, Vectors]]


def neighbours_kept(sample: Sample, old: SpaceSpec, new: SpaceSpec) -> float | None:
    """Share of each probe's K nearest among the probes that stay so after the upgrade, 0 to 1.

    Probes are items that have a vector in both spaces, drawn at random anew each time. None where
    there are too few.
    """
    labels, was, now = sample(old.space, new.space, NEIGHBOUR_PROBES)
    if len(labels) <= NEIGHBOURS:
        return None
    before, after = _nearest(old, labels, was), _nearest(new, labels, now)
    kept = [len(set(a) & set(b)) / NEIGHBOURS for a, b in zip(before, after, strict=True)]
    return float(np.mean(kept))


def _nearest(spec: SpaceSpec, labels: Labels, vectors: Vectors) -> list[list[int]]:
    found = ExactIndex(spec, labels, vectors).search(vectors, NEIGHBOURS + 1).labels
    return [
        [label for label in row if label != own][:NEIGHBOURS]
        for own, row in zip(labels.tolist(), found.tolist(), strict=True)
    ]


# Chunks that are carried to measure the next ones, after a few rows that make the runner ready.
_CHUNKS = 2
_FIRST_ROWS = 8


@dataclass(frozen=True)
class Estimate:
    """`seconds`: reading, carrying and writing without pauses. `bytes`: what the space adds to the
    file on disk. `left_behind`: items that cannot go."""

    items: int
    seconds: float
    bytes: int
    left_behind: int


def estimate(
    store: Store, runner: Runner, target: SpaceSpec, scratch: Path, *, source: str | None = None
) -> Estimate:
    """Cost of `run_upgrade`, before anything starts.

    Two chunks of items are read, carried and written durably to a temporary file in the folder
    `scratch`, on the gallery's disk; `durable.sweep` removes what a kill leaves of it.
    Raises InvalidInputError for a bad output of the runner, CannotWriteError.
    """
    remaining = Remaining(store, source or store.active().spec.space, target, runner.reads_side)
    todo = remaining.all_labels()
    done = 0 if remaining.target is None else store.count(target.space)
    left_behind = store.count() - done - len(todo)
    if not len(todo):
        return Estimate(0, 0.0, 0, left_behind)
    # Spread over the gallery.
    most = _CHUNKS * CHUNK
    probe = todo[:: max(1, len(todo) // most)][:most]
    runner.run(*remaining.read(probe[:_FIRST_ROWS], runner.reads_side)[1:])
    aside = _Aside(target)
    began = time.perf_counter()
    temporary = tempfile.TemporaryDirectory(prefix=f"{durable.TEMPORARY}estimate-", dir=scratch)
    with temporary as folder, aside.open(Path(folder) / "probe.sqlite") as connection:
        for start in range(0, len(probe), CHUNK):
            rows = probe[start : start + CHUNK]
            labels, embedding, side = remaining.read(rows, runner.reads_side)
            upgraded = runner.run(embedding, side)
            new = NewVectors(target.space, upgraded.embedding, upgraded.side)
            aside.write(connection, check_new(aside.info, new, len(labels)), labels)
        seconds = time.perf_counter() - began
        written = aside.bytes(connection)
    share = len(todo) / len(probe)
    return Estimate(len(todo), seconds * share, int(written * share), left_behind)


class _Aside:
    """A file set up as a gallery's, with one table of vectors."""

    def __init__(self, target: SpaceSpec) -> None:
        self.info = SpaceInfo(target, "staging", 1, 0)

    @contextmanager
    def open(self, path: Path) -> Iterator[sqlite3.Connection]:
        with closing(connect(path)) as connection:
            connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            connection.execute("PRAGMA journal_mode = WAL")
            # Its vectors belong to items of another file.
            connection.execute("PRAGMA foreign_keys = OFF")
            connection.execute(VECTOR_TABLE.format(name=vector_table(self.info.number)))
            yield connection

    def write(self, connection: sqlite3.Connection, checked: Checked, labels: Labels) -> None:
        with durable.transaction(connection):
            insert_vectors(connection, checked, labels)

    def bytes(self, connection: sqlite3.Connection) -> int:
        """Size of the table: every page but that of the schema."""
        pages: int = connection.execute("PRAGMA page_count").fetchone()[0]
        return (pages - 1) * PAGE_BYTES
