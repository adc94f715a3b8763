"""Carry a gallery's vectors into another space, chunk by chunk.

A run that was broken off and resumed gives the same bits as an unbroken one.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nobackfill.errors import UnusableOutputError, few
from nobackfill.gallery import staging
from nobackfill.gallery.remaining import Order, Remaining
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import Origin, SpaceSpec
from nobackfill.gallery.store import Store
from nobackfill.vectors import Vectors

CHUNK = 1024


class Upgraded(Protocol):
    """What a runner gives back for n items; nobackfill.release.models.Upgraded is one."""

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
    """A route; nobackfill.release.routes opens it."""

    @property
    def reads_side(self) -> bool:
        """Whether only items with side-information can be carried."""
        ...

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
    origin: Origin = "upgraded",
    chunk: int = CHUNK,
    order: Order = "label",
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Outcome:
    """Fill `target` (staged if new) from space `source` (default: the active one).

    Items without side-information stay behind where the runner reads it; otherwise it is given
    what there is, for the target to keep. Items put meanwhile are carried along; deleted ones are
    skipped. A run that was stopped or killed goes on where it ended. `origin` is that of the new
    vectors: "direct" for a runner that leaves them as they are.
    `on_progress` is called after each durable chunk and may sleep, to leave room for searches.
    Raises UnusableOutputError, naming items, and InvalidInputError for bad outputs of the runner;
    nothing of that chunk is written then.
    """
    staging.begin(store, target)
    remaining = Remaining(store, source or store.active().spec.space, target, runner.reads_side)
    started = time.monotonic()
    total = store.count()
    before = total - staging.left_behind(store, target.space)
    written = 0
    stopped = False
    for labels, embedding, side in remaining.chunks(order, chunk):
        if should_stop is not None and should_stop():
            stopped = True
            break
        try:
            upgraded = runner.run(embedding, side)
        except UnusableOutputError as error:
            raise _named(store, labels, target, error) from error
        new = staging.write(
            store, target.space, labels, upgraded.embedding, side=upgraded.side,
            uncertainty=upgraded.uncertainty, origin=origin,
        )  # fmt: skip
        written += len(new)
        if on_progress is not None:
            done = before + written
            on_progress(Progress(done, max(total, done), written, time.monotonic() - started))
    return Outcome(written, staging.left_behind(store, target.space), stopped)


def _named(
    store: Store, labels: Labels, target: SpaceSpec, error: UnusableOutputError
) -> UnusableOutputError:
    """The error with ids in place of rows."""
    items = store.items([int(labels[row]) for row in error.rows])
    names = few(item.id for item in items if item is not None)
    return UnusableOutputError(
        f"the upgrade to release {target.release} gives no usable vector for {names}: embed "
        "them again from their images, or ask the publisher for another release",
        error.rows,
    )
