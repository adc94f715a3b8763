"""Carry a gallery's vectors into another space, chunk by chunk.

A run that was broken off and resumed gives the same bits as an unbroken one.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nobackfill.errors import UnusableOutputError, few
from nobackfill.gallery.reading import StoredItem
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import Origin, SpaceInfo, SpaceSpec
from nobackfill.release.models import CHUNK
from nobackfill.vectors import Vectors

# label: as they were put. uncertainty: what the source's own upgrade was least certain of first.
Order = Literal["label", "uncertainty"]
# Labels, embeddings and side-information of some items.
Chunk = tuple[Labels, Vectors, Vectors | None]


class RunnerResult(Protocol):
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


# Labels, and what gives their vectors, or raises what transforming them has raised.
Made = tuple[Labels, Callable[[], RunnerResult]]


class Runner(Protocol):
    """A route; nobackfill.release.routes opens it."""

    @property
    def reads_side(self) -> bool:
        """Whether only items with side-information can be carried."""
        ...

    def run(self, embedding: Vectors, side: Vectors | None) -> RunnerResult:
        """embedding [n, from_dim], side [n, from_side_dim] or None -> vectors of the target."""
        ...


class Windows(Protocol):
    """What a source space has and a target still lacks."""

    def chunks(self, order: Order, size: int) -> Iterator[Chunk]:
        """Labels, embeddings, and side-information of all of them or of none, until nothing is left
        that was there when the last was asked for."""
        ...


class Carrying(Protocol):
    """What an upgrade needs of a store."""

    def active(self) -> SpaceInfo:
        """The space that queries are answered in."""
        ...

    def items(
        self, labels: Sequence[int] | Labels, space: str | None = None
    ) -> list[StoredItem | None]:
        """Items in the order of `labels`; None where there is none (any more)."""
        ...

    def count(self, space: str | None = None) -> int:
        """Number of items, or of vectors in a space."""
        ...

    def begin(self, spec: SpaceSpec) -> None:
        """Add a staging space; one that is there is left as it is. Raises InvalidInputError if it
        is there with another dimension, metric or side space."""
        ...

    def windows(self, source: str, target: SpaceSpec, needs_side: bool) -> Windows:
        """Items without side-information are passed over where they `needs_side`, and otherwise
        come last. Raises IncompatibleSpaceError for an unknown source."""
        ...

    def write(
        self, space: str, labels: Labels, embedding: ArrayLike, *, side: ArrayLike | None = None,
        uncertainty: ArrayLike | None = None, origin: Origin = "upgraded", replace: bool = False,
    ) -> Labels:  # fmt: skip
        """Write vectors of existing items into a space; see staging.write."""
        ...

    def left_behind(self, space: str) -> int:
        """Number of items without a vector in `space`."""
        ...


@dataclass(frozen=True)
class UpgradeProgress:
    """`done` of `total` items have a vector in the target, `written` of them by this run so far."""

    done: int
    total: int
    written: int
    seconds: float


@dataclass(frozen=True)
class UpgradeOutcome:
    """`written` by this run. `left_behind`: items with no vector in the target. `stopped` early."""

    written: int
    left_behind: int
    stopped: bool


def run_upgrade(
    store: Carrying,
    runner: Runner,
    target: SpaceSpec,
    *,
    source: str | None = None,
    origin: Origin = "upgraded",
    chunk: int = CHUNK,
    order: Order = "label",
    ahead: bool = False,
    on_progress: Callable[[UpgradeProgress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> UpgradeOutcome:
    """Fill `target` (staged if new) from space `source` (default: the active one).

    Items without side-information stay behind where the runner reads it; otherwise it is given
    what there is, for the target to keep. Items put meanwhile are carried along; deleted ones are
    skipped. A run that was stopped or killed goes on where it ended. `origin` is that of the new
    vectors: "direct" for a runner that leaves them as they are.
    `ahead`: a chunk is transformed on a thread while the one before is written, for who need not
    leave room for searches: a quarter quicker with int8 files, a sixth with others.
    `on_progress` is called after each durable chunk and may sleep, to leave room for searches.
    Raises UnusableOutputError, naming items, and InvalidInputError for bad outputs of the runner;
    nothing of that chunk is written then.
    """
    store.begin(target)
    windows = store.windows(source or store.active().spec.space, target, runner.reads_side)
    started = time.monotonic()
    total = store.count()
    before = total - store.left_behind(target.space)
    written = 0
    stopped = False

    def until_stopped() -> Iterator[Chunk]:
        nonlocal stopped
        for one in windows.chunks(order, chunk):
            if should_stop is not None and should_stop():
                stopped = True
                return
            yield one

    transformed = _ahead if ahead else _in_turn
    with closing(transformed(runner, until_stopped())) as made:
        for labels, result in made:
            written += len(_write(store, target, labels, result, origin))
            if on_progress is not None:
                done = before + written
                on_progress(
                    UpgradeProgress(done, max(total, done), written, time.monotonic() - started)
                )
    return UpgradeOutcome(written, store.left_behind(target.space), stopped)


def _in_turn(runner: Runner, chunks: Iterator[Chunk]) -> Generator[Made]:
    for labels, embedding, side in chunks:
        yield labels, partial(runner.run, embedding, side)


def _ahead(runner: Runner, chunks: Iterator[Chunk]) -> Generator[Made]:
    """Each is given away once the next is being transformed."""
    with ThreadPoolExecutor(1, "transform") as pool:
        ready: Made | None = None
        for labels, embedding, side in chunks:
            running = pool.submit(runner.run, embedding, side)
            if ready is not None:
                yield ready
            ready = labels, running.result
        if ready is not None:
            yield ready


def carry(
    store: Carrying, runner: Runner, target: SpaceSpec, labels: Labels, embedding: Vectors,
    side: Vectors | None, *, origin: Origin = "upgraded",
) -> Labels:  # fmt: skip
    """Carry a window that was read; the labels written, increasing.

    It may be done anywhere and any number of times: items that have a vector in `target` keep it,
    and deleted ones stay so. Raises as `run_upgrade`.
    """
    return _write(store, target, labels, partial(runner.run, embedding, side), origin)


def _write(
    store: Carrying, target: SpaceSpec, labels: Labels, result: Callable[[], RunnerResult],
    origin: Origin,
) -> Labels:  # fmt: skip
    try:
        upgraded = result()
    except UnusableOutputError as error:
        raise _named(store, labels, target, error) from error
    return store.write(
        target.space, labels, upgraded.embedding, side=upgraded.side,
        uncertainty=upgraded.uncertainty, origin=origin,
    )  # fmt: skip


def _named(
    store: Carrying, labels: Labels, target: SpaceSpec, error: UnusableOutputError
) -> UnusableOutputError:
    """The error with ids in place of rows."""
    items = store.items([int(labels[row]) for row in error.rows])
    names = few(item.id for item in items if item is not None)
    return UnusableOutputError(
        f"the upgrade to release {target.release} gives no usable vector for {names}: embed "
        "them again from their images, or ask the publisher for another release",
        error.rows,
    )
