"""Carry a gallery's vectors into another space, chunk by chunk.

A run that was broken off and resumed gives the same bits as an unbroken one.
"""

import contextlib
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from gallery import staging
from gallery.index import Labels
from gallery.put import Checked, NewVectors, check, insert_vectors
from gallery.spec import Origin, SpaceInfo, SpaceSpec
from gallery.store import Store
from gallery.tables import VECTOR_TABLE, among, from_blobs, label_column, vector_table
from release.vectors import Vectors

# label: as they were put. uncertainty: what the source's own upgrade was least certain of first.
Order = Literal["label", "uncertainty"]

CHUNK = 1024
# Items carried to measure an estimate, and what SQLite adds to a row of vectors.
PROBE_ITEMS = 512
ROW_OVERHEAD_BYTES = 64


class Upgraded(Protocol):
    """What a runner gives back for n items; release.models.Upgraded is one."""

    @property
    def embedding(self) -> Vectors:
        """[n, dim]"""
        ...

    @property
    def side(self) -> Vectors | None:
        """[n, side_dim]"""
        ...

    @property
    def uncertainty(self) -> NDArray[np.float32] | None:
        """[n], larger is less certain"""
        ...


class Runner(Protocol):
    """An upgrade or a route; release.models and release.routes open them."""

    def run(self, embedding: Vectors, side: Vectors | None) -> Upgraded:
        """embedding [n, from_dim], side [n, from_side_dim] or None -> vectors of the target."""
        ...


@dataclass(frozen=True)
class Progress:
    """`done` of `total` items have a vector in the target, `written` of them by this run so far."""

    done: int
    total: int
    written: int
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """`written` by this run. `left_behind`: items with no vector in the target. `stopped` early."""

    written: int
    left_behind: int
    stopped: bool


def run_upgrade(
    store: Store,
    runner: Runner,
    target: SpaceSpec,
    *,
    source: str | None = None,
    reads_side: bool = False,
    origin: Origin = "upgraded",
    chunk: int = CHUNK,
    order: Order = "label",
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Outcome:
    """Fill `target` (staged if new) from space `source` (default: the active one).

    Items without side-information stay behind where the runner `reads_side`. Items put meanwhile
    are carried along; deleted ones are skipped. A run that was stopped or killed goes on where it
    ended. `origin` is that of the new vectors: "direct" for a runner that leaves them as they are.
    `on_progress` is called after each durable chunk and may sleep, to leave room for searches.
    Raises InvalidInputError for a bad output of the runner (nothing of that chunk is written).
    """
    staging.begin(store, target)
    read = _Reader(store, source or store.active().spec.space, target.space, reads_side)
    started = time.monotonic()
    written = 0
    stopped = False
    total = store.count()
    before = total - staging.left_behind(store, target.space)
    # What is put while a pass runs has larger labels and is found by the next one.
    last = 0
    while not stopped and len(todo := read.missing(order, last)):
        last = int(todo.max())
        for start in range(0, len(todo), chunk):
            if should_stop is not None and should_stop():
                stopped = True
                break
            labels, embedding, side = read.vectors(todo[start : start + chunk])
            if not len(labels):
                continue
            upgraded = runner.run(embedding, side)
            written += len(
                staging.write(
                    store,
                    target.space,
                    labels,
                    upgraded.embedding,
                    side=upgraded.side,
                    uncertainty=upgraded.uncertainty,
                    origin=origin,
                )
            )
            if on_progress is not None:
                seconds = time.monotonic() - started
                done = before + written
                on_progress(Progress(done, max(total, done), written, seconds))
    return Outcome(written, staging.left_behind(store, target.space), stopped)


class _Reader:
    """Reads what the target still lacks from the source."""

    def __init__(self, store: Store, source: str, target: str, reads_side: bool) -> None:
        self.store = store
        self.source = store.space(source)
        spaces = {info.spec.space: info for info in store.spaces()}
        self.target = spaces.get(target)
        self.reads_side = reads_side
        self.table = vector_table(self.source.number)

    def missing(self, order: Order, after: int = 0) -> Labels:
        """Labels above `after` that can be carried over and are not yet, in the order of work."""
        by = {"label": "s.label", "uncertainty": "s.uncertainty DESC, s.label"}[order]
        where = "s.label > ?"
        if self.reads_side:
            where += " AND s.side IS NOT NULL"
        if self.target is not None:
            there = vector_table(self.target.number)
            where += f" AND NOT EXISTS (SELECT 1 FROM {there} t WHERE t.label = s.label)"
        with self.store.reading() as connection:
            rows = connection.execute(
                f"SELECT s.label FROM {self.table} s WHERE {where} ORDER BY {by}", (after,)
            )
            return label_column(rows)

    def vectors(self, labels: Labels) -> tuple[Labels, Vectors, Vectors | None]:
        """Those of `labels` that are still there, by label, with what the runner reads."""
        condition, parameters = among(labels)
        side = "side" if self.reads_side else "NULL"
        with self.store.reading() as connection:
            rows = connection.execute(
                f"SELECT label, embedding, {side} FROM {self.table}"
                f" WHERE {condition} ORDER BY label",
                parameters,
            ).fetchall()
        spec = self.source.spec
        if not rows:
            return np.empty(0, np.int64), np.empty((0, spec.dim), np.float32), None
        columns = zip(*rows, strict=True)
        found = np.array(next(columns), np.int64)
        # A range can hold others than those that were asked for.
        asked = np.isin(found, labels)
        embedding, sides = ([*compress(column, asked)] for column in columns)
        side_info = from_blobs(sides, spec.side_dim) if self.reads_side else None
        return found[asked], from_blobs(embedding, spec.dim), side_info


@dataclass(frozen=True)
class Estimate:
    """From a short measured probe that changes nothing. `bytes`: what the space adds on disk."""

    items: int
    seconds: float
    bytes: int
    left_behind: int


def estimate(
    store: Store,
    runner: Runner,
    target: SpaceSpec,
    *,
    source: str | None = None,
    reads_side: bool = False,
) -> Estimate:
    """Cost of `run_upgrade`, before anything starts.

    A few items are read, carried and written to a table in memory, so a slow disk adds to it.
    Raises InvalidInputError for a bad output of the runner.
    """
    read = _Reader(store, source or store.active().spec.space, target.space, reads_side)
    todo = read.missing("label")
    total = store.count()
    done = 0 if read.target is None else store.count(target.space)
    seconds = 0.0
    if len(todo):
        # Spread over the gallery; the first few rows make the runner ready.
        probe = todo[:: max(1, len(todo) // PROBE_ITEMS)][:PROBE_ITEMS]
        runner.run(*read.vectors(probe[:8])[1:])
        started = time.perf_counter()
        labels, embedding, side = read.vectors(probe)
        upgraded = runner.run(embedding, side)
        new = NewVectors(target.space, upgraded.embedding, upgraded.side)
        _write_aside(check(SpaceInfo(target, "staging", 1, 0), new, len(labels)), labels)
        seconds = (time.perf_counter() - started) / len(labels) * len(todo)
    row = 4 * (target.dim + target.side_dim) + ROW_OVERHEAD_BYTES
    return Estimate(len(todo), seconds, len(todo) * row, total - done - len(todo))


def _write_aside(checked: Checked, labels: Labels) -> None:
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.execute(VECTOR_TABLE.format(name=vector_table(checked.info.number)))
        connection.execute("BEGIN")
        insert_vectors(connection, checked, labels)
