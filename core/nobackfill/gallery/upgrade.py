"""Migrate a gallery's vectors into another space, chunk by chunk.

A run that was interrupted and resumed gives the same bits as an uninterrupted one.
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

# label: in the order in which items were stored. uncertainty: the items of which the source's own
# upgrade was least certain come first.
Order = Literal["label", "uncertainty"]
# Labels, embeddings and side-information of some items.
Chunk = tuple[Labels, Vectors, Vectors | None]


class RunnerResult(Protocol):
    """The output of a runner for n items, such as nobackfill.release.models.Upgraded."""

    @property
    def embedding(self) -> Vectors:
        """Return float32 [n, dim]."""
        ...

    @property
    def side(self) -> Vectors | None:
        """Return float32 [n, side_dim], or None."""
        ...

    @property
    def uncertainty(self) -> NDArray[np.float32] | None:
        """Return float32 [n], larger is less certain, or None."""
        ...


# Labels, and a function that returns their vectors or raises the error of transforming them.
Transformed = tuple[Labels, Callable[[], RunnerResult]]


class Runner(Protocol):
    """A transform into the target space; nobackfill.release.routes opens one."""

    @property
    def reads_side(self) -> bool:
        """Tell whether only items with side-information can be migrated."""
        ...

    def run(self, embedding: Vectors, side: Vectors | None) -> RunnerResult:
        """Transform embedding [n, from_dim] and side [n, from_side_dim] or None into the target
        space."""
        ...


class Windows(Protocol):
    """The vectors that a source space has and a target lacks."""

    def chunks(self, order: Order, size: int) -> Iterator[Chunk]:
        """Yield chunks of items until none is left; all or none of a chunk have
        side-information."""
        ...


class Carrying(Protocol):
    """The operations of a store that an upgrade needs."""

    def active(self) -> SpaceInfo:
        """Return the space that answers queries."""
        ...

    def items(
        self, labels: Sequence[int] | Labels, space: str | None = None
    ) -> list[StoredItem | None]:
        """Return items in the order of `labels`; None where an item does not exist (any more).

        Args:
            labels: int64 [n], in any order.
            space: Id of the space whose origin and uncertainty the items get; None leaves both
                None.

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
        """
        ...

    def count(self, space: str | None = None) -> int:
        """Return the number of items, or of vectors in a space.

        Args:
            space: Id of the space; None counts items.

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
        """
        ...

    def begin(self, spec: SpaceSpec) -> None:
        """Add a staging space, unless it exists.

        Raises:
            InvalidInputError: It exists with another dimension, metric or side space.
        """
        ...

    def windows(self, source: str, target: SpaceSpec, needs_side: bool) -> Windows:
        """Return the vectors that `source` has and `target` lacks.

        Args:
            source: Id of the space to read.
            target: The space to write.
            needs_side: Skip items without side-information; otherwise they come last.

        Raises:
            IncompatibleSpaceError: The gallery does not have the source.
        """
        ...

    def write(
        self, space: str, labels: Labels, embedding: ArrayLike, *, side: ArrayLike | None = None,
        uncertainty: ArrayLike | None = None, origin: Origin = "upgraded", replace: bool = False,
    ) -> Labels:  # fmt: skip
        """Write vectors of existing items into a space, in one durable transaction.

        Deleted items are skipped, and items that have a vector there, unless `replace` is set.

        Args:
            space: Id of the space.
            labels: int64 [n], distinct.
            embedding: float32 [n, dim].
            side: Side-information, float32 [n, side_dim], or None.
            uncertainty: float32 [n], or None.
            origin: How the vectors were made.
            replace: Replace existing vectors, for re-embedding.

        Returns:
            The labels written, int64, increasing.

        Raises:
            InvalidInputError: Invalid vectors or another number of rows.
            IncompatibleSpaceError: The gallery does not have the space.
        """
        ...

    def left_behind(self, space: str) -> int:
        """Return the number of items without a vector in a space.

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
        """
        ...


@dataclass(frozen=True)
class UpgradeProgress:
    """The progress of an upgrade.

    Attributes:
        complete: Items with a vector in the target.
        total: All items.
        writes: Vectors that this run has written.
        seconds: Time since the start of this run.
    """

    complete: int
    total: int
    writes: int
    seconds: float


@dataclass(frozen=True)
class UpgradeOutcome:
    """The end of an upgrade.

    Attributes:
        writes: Vectors that this run has written.
        left_behind: Items without a vector in the target.
        stopped: Whether `should_stop` ended it.
    """

    writes: int
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
    """Migrate all vectors of a space into another one, which is staged if it is new.

    Items stored during the run are migrated, too; deleted ones are skipped. A stopped or killed run
    is resumed by running it again. Items without side-information stay behind if the runner reads
    it; otherwise existing side-information is passed on.

    Args:
        store: The gallery.
        runner: The transform.
        target: The space to write.
        source: Id of the space to read; None for the active one.
        origin: Recorded with the new vectors; "direct" for a runner that leaves vectors unchanged.
        chunk: Items of a transaction.
        order: The order of the work.
        ahead: Transform a chunk in a thread while the previous one is written. It takes a quarter
            less time with int8 files and a sixth with others, but leaves less room for searches.
        on_progress: Called after each durable chunk; it may sleep to leave room for searches.
        should_stop: Called before each chunk; True ends the run.

    Raises:
        UnusableOutputError: The runner made no usable vector for some items, which the message
            names; the chunk is not written.
        InvalidInputError: The runner's output is invalid; the chunk is not written.
    """
    store.begin(target)
    windows = store.windows(source or store.active().spec.space, target, runner.reads_side)
    started = time.monotonic()
    total = store.count()
    done_before = total - store.left_behind(target.space)
    written = 0
    stopped = False

    def until_stopped() -> Iterator[Chunk]:
        nonlocal stopped
        for one in windows.chunks(order, chunk):
            if should_stop is not None and should_stop():
                stopped = True
                return
            yield one

    transformed = _in_thread if ahead else _in_turn
    with closing(transformed(runner, until_stopped())) as results:
        for labels, result in results:
            written += len(_write(store, target, labels, result, origin))
            if on_progress is not None:
                done = done_before + written
                on_progress(
                    UpgradeProgress(done, max(total, done), written, time.monotonic() - started)
                )
    return UpgradeOutcome(written, store.left_behind(target.space), stopped)


def _in_turn(runner: Runner, chunks: Iterator[Chunk]) -> Generator[Transformed]:
    for labels, embedding, side in chunks:
        yield labels, partial(runner.run, embedding, side)


def _in_thread(runner: Runner, chunks: Iterator[Chunk]) -> Generator[Transformed]:
    """Yield each result once the next chunk is being transformed."""
    with ThreadPoolExecutor(1, "transform") as pool:
        ready: Transformed | None = None
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
    """Migrate a window that was read before.

    It may run on any machine and any number of times: items that have a vector in `target` keep it,
    and deleted items stay deleted.

    Args:
        store: The gallery.
        runner: The transform.
        target: The space to write.
        labels: int64 [n].
        embedding: float32 [n, from_dim].
        side: float32 [n, from_side_dim], or None.
        origin: Recorded with the new vectors.

    Returns:
        The labels written, increasing.

    Raises:
        NobackfillError: As `run_upgrade` does.
    """
    return _write(store, target, labels, partial(runner.run, embedding, side), origin)


def _write(
    store: Carrying, target: SpaceSpec, labels: Labels, result: Callable[[], RunnerResult],
    origin: Origin,
) -> Labels:  # fmt: skip
    try:
        upgraded = result()
    except UnusableOutputError as error:
        raise _with_ids(store, labels, target, error) from error
    return store.write(
        target.space, labels, upgraded.embedding, side=upgraded.side,
        uncertainty=upgraded.uncertainty, origin=origin,
    )  # fmt: skip


def _with_ids(
    store: Carrying, labels: Labels, target: SpaceSpec, error: UnusableOutputError
) -> UnusableOutputError:
    """Return the error with ids in place of row numbers."""
    items = store.items([int(labels[row]) for row in error.rows])
    names = few(item.id for item in items if item is not None)
    return UnusableOutputError(
        f"the upgrade to release {target.release} gives no usable vector for {names}: embed "
        "them again from their images, or ask the publisher for another release",
        error.rows,
    )
