"""Upgrade a gallery: fill a second space chunk by chunk, activate it, roll back, drop it.

Each change is one transaction. A gallery always has exactly one active space. A run that was
interrupted and resumed gives the same bits as an uninterrupted one. This module also measures the
cost of an upgrade, and how many neighbours it preserves.
"""

import dataclasses
import json
import sqlite3
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nobackfill import durable
from nobackfill.errors import (
    InvalidInputError,
    NotFoundError,
    PreconditionError,
    UnusableOutputError,
    join_few,
)
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.index import Labels, find_label_rows
from nobackfill.gallery.spec import Origin, SpaceInfo, SpaceSpec, plan_side_passes
from nobackfill.gallery.sqlite_file import (
    PAGE_BYTES,
    VECTOR_TABLE,
    StoredItem,
    add_space,
    count_rows,
    draw_random_labels,
    find_space,
    item_from_row,
    items_page,
    labels_sql_condition,
    live_labels,
    open_connection,
    read_spaces,
    read_vectors,
    rows_to_labels,
    set_state_values,
    vector_table_name,
    vectors_from_blobs,
)
from nobackfill.gallery.store import (
    Change,
    NewVectors,
    Store,
    check_new_vectors,
    insert_vectors,
    storable_ids,
)
from nobackfill.release.models import CHUNK_ROWS
from nobackfill.vectors import Vectors, check_vectors

# label: in the order in which items were stored. uncertainty: the items of which the source's own
# upgrade was least certain come first.
UpgradeOrder = Literal["label", "uncertainty"]
# Labels, embeddings and side-information of some items.
Chunk = tuple[Labels, Vectors, Vectors | None]


class RunnerResult(Protocol):
    """The output of a runner for n items, such as nobackfill.release.models.Upgraded."""

    @property
    def embedding(self) -> Vectors:
        """Return float32 [n, dim], in the order of the inputs."""

    @property
    def side_information(self) -> Vectors | None:
        """Return float32 [n, side_dim], or None where the upgrade makes no side-information."""

    @property
    def uncertainty(self) -> NDArray[np.float32] | None:
        """Return float32 [n], larger is less certain; None where the upgrade does not know it."""


# Labels, and a function that returns their vectors or raises the error of transforming them.
Transformed = tuple[Labels, Callable[[], RunnerResult]]


class Runner(Protocol):
    """A transform into the target space; nobackfill.release.routes opens one."""

    @property
    def reads_side(self) -> bool:
        """Tell whether only items with side-information can be migrated."""

    def run(self, embedding: Vectors, side: Vectors | None) -> RunnerResult:
        """Transform vectors into the target space.

        Args:
            embedding: float32 [n, from_dim], n at least 1.
            side: Side-information, float32 [n, from_side_dim]; None without.

        Raises:
            InvalidInputError: Another shape, or missing side-information.
            VerificationError: The outputs are no vectors of the target space.
            UnusableOutputError: The model returns no usable vector for some rows, which its
                `unusable_rows` list.
        """


class VectorWindows(Protocol):
    """The vectors that a source space has and a target lacks."""

    def chunks(self, order: UpgradeOrder, items_per_chunk: int) -> Iterator[Chunk]:
        """Yield chunks of at most `items_per_chunk` items until none is left; all or none of a
        chunk have side-information.

        Items that are stored during the iteration come at the end.

        Args:
            order: label or uncertainty.
            items_per_chunk: Largest number of items of a chunk, at least 1.

        Raises:
            KeyError, ValueError: Another order.
            BusyError, CannotWriteError, UnavailableError, VerificationError, NotFoundError: The
                store is locked, cannot be opened, does not answer, is damaged, or was closed.
        """


class UpgradableStore(Protocol):
    """The operations of a store that an upgrade needs."""

    def active(self) -> SpaceInfo:
        """Return the space that answers queries.

        Raises:
            DamagedError: There is not exactly one.
            BusyError, CannotWriteError, UnavailableError, NotFoundError: The store is locked,
                cannot be opened, does not answer, or was closed.
        """

    def items(
        self, labels: Sequence[int] | Labels, space: str | None = None
    ) -> list[StoredItem | None]:
        """Return items in the order of `labels`; None where an item does not exist (any more).

        Args:
            labels: int64 [n], in any order; a label may repeat.
            space: Id of the space whose origin and uncertainty the items get; None leaves both
                None.

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
            BusyError, CannotWriteError, UnavailableError, VerificationError, NotFoundError: The
                store is locked, cannot be opened, does not answer, is damaged, or was closed.
        """

    def count(self, space: str | None = None) -> int:
        """Return the number of items, or of vectors in a space.

        Args:
            space: Id of the space; None counts items.

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
            BusyError, CannotWriteError, UnavailableError, VerificationError, NotFoundError: The
                store is locked, cannot be opened, does not answer, is damaged, or was closed.
        """

    def add_staging_space(self, spec: SpaceSpec) -> None:
        """Add a staging space, unless the gallery has it already, in any state.

        Raises:
            InvalidInputError: It exists with another release, dimension, metric, norm or side
                space.
            BusyError, CannotWriteError, UnavailableError, VerificationError, NotFoundError: The
                store is locked, cannot be written, does not answer, is damaged, or was closed;
                nothing is changed.
            Exception: An error of a listener; the space stays added.
        """

    def windows_of_missing_vectors(
        self, source: str, target: SpaceSpec, needs_side: bool
    ) -> VectorWindows:
        """Return the vectors that `source` has and `target` lacks.

        Args:
            source: Id of the space to read.
            target: The space to write; while the gallery lacks it, no item counts as migrated.
            needs_side: Skip items without side-information; otherwise they come last.

        Raises:
            IncompatibleSpaceError: The gallery does not have the source.
            BusyError, CannotWriteError, UnavailableError, VerificationError, NotFoundError: The
                store is locked, cannot be opened, does not answer, is damaged, or was closed.
        """

    def write_vectors(
        self, space: str, labels: Labels, embedding: ArrayLike, *, side: ArrayLike | None = None,
        uncertainty: ArrayLike | None = None, origin: Origin = "upgraded", replace: bool = False,
    ) -> Labels:  # fmt: skip
        """Write vectors of existing items into a space, in one durable transaction.

        Deleted items are skipped, and items that have a vector there, unless `replace` is set.

        Args:
            space: Id of the space.
            labels: int64 [n], distinct, in any order.
            embedding: float32 [n, dim], in the order of `labels`.
            side: Side-information, float32 [n, side_dim], or None.
            uncertainty: float32 [n], or None.
            origin: How the vectors were made.
            replace: Replace existing vectors, for re-embedding.

        Returns:
            The labels written, int64, increasing; empty if none was.

        Raises:
            InvalidInputError: Invalid vectors or another number of rows; nothing is written.
            IncompatibleSpaceError: The gallery does not have the space.
            BusyError, CannotWriteError, UnavailableError, VerificationError, NotFoundError: The
                store is locked, cannot be written, does not answer, is damaged, or was closed;
                nothing is written.
            ValueError: Nested lists of unequal lengths.
            IndexError: `uncertainty` is a single number.
            Exception: An error of a listener; the vectors stay written.
        """

    def count_items_without_vector(self, space: str) -> int:
        """Return the number of items without a vector in a space.

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
            BusyError, CannotWriteError, UnavailableError, VerificationError, NotFoundError: The
                store is locked, cannot be opened, does not answer, is damaged, or was closed.
        """


@dataclass(frozen=True)
class UpgradeProgress:
    """The progress of an upgrade.

    Attributes:
        complete_count: Items with a vector in the target.
        item_count: All items.
        written_count: Vectors that this run has written.
        seconds: Time since the start of this run.
    """

    complete_count: int
    item_count: int
    written_count: int
    seconds: float


@dataclass(frozen=True)
class UpgradeOutcome:
    """The end of an upgrade.

    Attributes:
        written_count: Vectors that this run has written.
        left_behind_count: Items without a vector in the target.
        was_stopped: Whether `should_stop` ended it.
    """

    written_count: int
    left_behind_count: int
    was_stopped: bool


def run_upgrade(
    store: UpgradableStore,
    runner: Runner,
    target: SpaceSpec,
    *,
    source_space: str | None = None,
    origin: Origin = "upgraded",
    items_per_chunk: int = CHUNK_ROWS,
    order: UpgradeOrder = "label",
    transform_ahead: bool = False,
    on_progress: Callable[[UpgradeProgress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> UpgradeOutcome:
    """Migrate all vectors of a space into another one, which is staged if it is new.

    The target does not become active: `flip` does that. Items stored during the run are migrated,
    too; deleted ones are skipped. A stopped or killed run is resumed by running it again; a
    complete one is changed by nothing. Two runs at once do no harm: items that have a vector keep
    it. Items without side-information stay behind if the runner reads it; otherwise existing
    side-information is passed on.

    Args:
        store: The gallery.
        runner: The transform.
        target: The space to write.
        source_space: Id of the space to read; None or "" for the active one.
        origin: Recorded with the new vectors; "direct" for a runner that leaves vectors unchanged.
        items_per_chunk: Items of a transaction, at least 1.
        order: label: as the items were stored. uncertainty: those whose present vector is least
            certain come first.
        transform_ahead: Transform a chunk in a thread while the previous one is written. It takes
            a quarter less time with int8 files and a sixth with others, but leaves less room for
            searches. The thread ends with this call, which after an error waits for the chunk in
            it.
        on_progress: Called after each durable chunk; it may sleep to leave room for searches. None
            for no reports.
        should_stop: Called before each chunk; True ends the run. None runs to the end.

    Returns:
        The end of the upgrade; no writes where nothing was left to migrate.

    Raises:
        UnusableOutputError: The runner made no usable vector for some items, which the message
            names; the chunk is not written, earlier ones stay.
        InvalidInputError: `items_per_chunk` is below 1, or the target exists with another release,
            dimension, metric, norm or side space; nothing is changed. The runner's output is
            invalid; the chunk is not written, earlier ones stay.
        IncompatibleSpaceError: The gallery does not have the source. The target was staged already.
        Exception: Any error of the runner, of `on_progress`, of `should_stop` or of a listener of
            the store; chunks written before it stay.
        BusyError, CannotWriteError, UnavailableError, VerificationError, NotFoundError: The store
            is locked, cannot be written, does not answer, is damaged, or was closed. Earlier chunks
            stay.
        KeyError, ValueError: `order` is unknown.
    """
    if items_per_chunk < 1:
        raise InvalidInputError(
            "items_per_chunk, the number of items that an upgrade migrates at once: expected at "
            f"least 1, got {items_per_chunk}; pass a larger number"
        )
    store.add_staging_space(target)
    windows = store.windows_of_missing_vectors(
        source_space or store.active().spec.space, target, runner.reads_side
    )
    started = time.monotonic()
    total = store.count()
    done_before = total - store.count_items_without_vector(target.space)
    written = 0
    stopped = False

    def until_stopped() -> Iterator[Chunk]:
        nonlocal stopped
        for one in windows.chunks(order, items_per_chunk):
            if should_stop is not None and should_stop():
                stopped = True
                return
            yield one

    transformed = _in_thread if transform_ahead else _in_turn
    with closing(transformed(runner, until_stopped())) as results:
        for labels, result in results:
            written += len(_write(store, target, labels, result, origin))
            if on_progress is not None:
                done = done_before + written
                on_progress(
                    UpgradeProgress(done, max(total, done), written, time.monotonic() - started)
                )
    return UpgradeOutcome(written, store.count_items_without_vector(target.space), stopped)


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


def migrate_window(
    store: UpgradableStore, runner: Runner, target: SpaceSpec, labels: Labels, embedding: Vectors,
    side: Vectors | None, *, origin: Origin = "upgraded",
) -> Labels:  # fmt: skip
    """Migrate a window that was read before.

    It may run on any machine and any number of times: items that have a vector in `target` keep it,
    and deleted items stay deleted.

    Args:
        store: The gallery.
        runner: The transform.
        target: The space to write.
        labels: int64 [n], distinct, n at least 1.
        embedding: float32 [n, from_dim].
        side: float32 [n, from_side_dim], or None.
        origin: Recorded with the new vectors.

    Returns:
        The labels written, int64, increasing; empty if none was.

    Raises:
        UnusableOutputError: The runner made no usable vector for some items, which the message
            names; nothing is written.
        InvalidInputError: The runner's output is invalid; nothing is written.
        IncompatibleSpaceError: The gallery does not have `target`.
        BusyError, CannotWriteError, UnavailableError, VerificationError, NotFoundError: The store
            is locked, cannot be written, does not answer, is damaged, or was closed; nothing is
            written.
        Exception: Any other error of the runner; nothing is written. After an error of a listener
            of the store, the vectors stay written.
    """
    return _write(store, target, labels, partial(runner.run, embedding, side), origin)


def _write(
    store: UpgradableStore, target: SpaceSpec, labels: Labels, result: Callable[[], RunnerResult],
    origin: Origin,
) -> Labels:  # fmt: skip
    try:
        upgraded = result()
    except UnusableOutputError as error:
        raise _with_ids(store, labels, target, error) from error
    return store.write_vectors(
        target.space, labels, upgraded.embedding, side=upgraded.side_information,
        uncertainty=upgraded.uncertainty, origin=origin,
    )  # fmt: skip


def _with_ids(
    store: UpgradableStore, labels: Labels, target: SpaceSpec, error: UnusableOutputError
) -> UnusableOutputError:
    """Return the error with ids in place of row numbers."""
    items = store.items([int(labels[row]) for row in error.unusable_rows])
    names = join_few(item.id for item in items if item is not None)
    return UnusableOutputError(
        f"the upgrade to release {target.release} gives no usable vector for {names}: re-embed "
        "these items from their images or texts, or ask the publisher for another release",
        error.unusable_rows,
    )


# Rows that a statement deletes: its changes stay in memory until it ends.
DROP_ROWS = 4096

_NONE = np.empty(0, np.int64)
_SPACES_CHANGED = Change({}, _NONE, spaces_changed=True)


def add_staging_space(store: Store, spec: SpaceSpec) -> None:
    """Add a staging space to a gallery; do nothing if the gallery has it already, in any state.

    It gets an empty table. Listeners are told that the spaces changed; they are not called where
    the gallery has the space. The values of `spec` are not checked: an impossible one, such as a
    dimension of 0, makes later calls raise DamagedError.

    Raises:
        InvalidInputError: It exists with another release, dimension, metric, norm or side space.
        BusyError: Another process still writes the gallery after 5 s; nothing is changed.
        CannotWriteError: The file is read-only, or the disk fails or is full.
        VerificationError: The file is damaged.
        NotFoundError: The gallery was closed, or its file is gone.
        Exception: An error of a listener; the change stays committed, and later listeners are not
            called.
    """
    with store.change_transaction() as (connection, changes):
        for info in read_spaces(connection):
            if info.spec.space == spec.space:
                check_same_space(info.spec, spec)
                return
        add_space(connection, spec, "staging")
        changes.append(_SPACES_CHANGED)


def check_same_space(old: SpaceSpec, new: SpaceSpec) -> None:
    """Check that an existing space equals a new one.

    Raises:
        InvalidInputError: A field differs; the message names it.
    """
    if old != new:
        differing = [
            field.name
            for field in dataclasses.fields(SpaceSpec)
            if getattr(old, field.name) != getattr(new, field.name)
        ]
        raise InvalidInputError(
            f"space {new.space}: expected the same {' and '.join(differing)} as in the gallery; "
            "publish a changed model as a new release"
        )


def write_vectors(
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

    Deleted items are skipped, and items that have a vector there, unless `replace` is set. A
    replaced row also loses its old side-information and uncertainty.

    Listeners get the vectors written after the commit, also where there are none.

    Args:
        store: The gallery.
        space: Id of the space.
        labels: int64 [n], distinct, in any order; n may be 0.
        embedding: float32 [n, dim], in the order of `labels`.
        side: Side-information, float32 [n, side_dim]; None stores none.
        uncertainty: float32 [n]; None stores none.
        origin: How the vectors were made.
        replace: Replace existing vectors, for re-embedding.

    Returns:
        The labels written, int64, increasing; empty if none was.

    Raises:
        InvalidInputError: Invalid vectors or uncertainties, another number of rows, or
            side-information that the space does not have; nothing is written.
        IncompatibleSpaceError: The gallery does not have the space.
        BusyError: Another process still writes the gallery after 5 s; nothing is changed.
        CannotWriteError: The file is read-only, or the disk fails or is full.
        VerificationError: The file is damaged.
        NotFoundError: The gallery was closed, or its file is gone.
        ValueError: Nested lists of unequal lengths.
        IndexError: `uncertainty` is a single number.
        Exception: An error of a listener; the change stays committed, and later listeners are not
            called.
    """
    checked = check_new_vectors(
        store.space(space), NewVectors(space, embedding, side, origin), len(labels)
    )
    order = np.argsort(labels)
    doubt = check_uncertainty(uncertainty, len(labels))
    with store.change_transaction() as (connection, changes):
        info = find_space(connection, space)
        good = live_labels(connection, "items", labels)
        if not replace:
            existing = live_labels(connection, vector_table_name(info.table_number), labels)
            good = np.setdiff1d(good, existing, assume_unique=True)
        rows = order[find_label_rows(labels[order], good)]
        selected = checked.select(rows)
        insert_vectors(
            connection, selected, good, None if doubt is None else doubt[rows], replace=replace
        )
        carried = (space,) if origin == "upgraded" else ()
        changes.append(Change({space: (good, selected.embedding)}, _NONE, migrated_spaces=carried))
    return good


def check_uncertainty(uncertainty: ArrayLike | None, row_count: int) -> NDArray[np.float32] | None:
    """Check the uncertainties of an upgrade. Negative ones pass.

    Args:
        uncertainty: float32 or float64 [n]; None for none.
        row_count: The expected number n.

    Returns:
        float32 [n]; None for None.

    Raises:
        InvalidInputError: Another number or dtype. UnusableRowsError, with the rows: values that
            are not finite or above 1e15.
        ValueError: Nested lists of unequal lengths.
        IndexError: A single number.
    """
    if uncertainty is None:
        return None
    column = np.asarray(uncertainty)[:, None]
    doubt = check_vectors(column, 1, error_name="uncertainties of an upgrade")[:, 0]
    if len(doubt) != row_count:
        raise InvalidInputError(
            f"uncertainties of an upgrade: expected one for each of {row_count} upgraded vectors, "
            f"got {len(doubt)}; return as many as vectors, or None"
        )
    return doubt


def count_items_without_vector(store: Store, space: str) -> int:
    """Return the number of items without a vector in a space.

    Raises:
        IncompatibleSpaceError: The gallery does not have the space.
        VerificationError: The file is damaged.
        BusyError: Another process has the file to itself, or changed it during a read without a
            lock.
        CannotWriteError: The file cannot be opened, or the disk fails.
        NotFoundError: The gallery was closed, or its file is gone.
    """
    with store.read_snapshot() as connection:
        return _count_items_left_behind(connection, find_space(connection, space))


def _count_items_left_behind(connection: sqlite3.Connection, info: SpaceInfo) -> int:
    # Every vector belongs to an item.
    return count_rows(connection, None) - count_rows(connection, info.spec.space)


def items_without_vector(store: Store, space: str, limit: int = 1000) -> list[StoredItem]:
    """Return the first items without a vector in a space, by increasing label.

    Args:
        store: The gallery.
        space: Id of the space.
        limit: Largest number of items; 0 gives none, a negative number all.

    Returns:
        Items without origin and uncertainty; empty if all have a vector.

    Raises:
        IncompatibleSpaceError: The gallery does not have the space.
        VerificationError: The file is damaged.
        BusyError: Another process has the file to itself, or changed it during a read without a
            lock.
        CannotWriteError: The file cannot be opened, or the disk fails.
        NotFoundError: The gallery was closed, or its file is gone.
    """
    with store.read_snapshot() as connection:
        table = vector_table_name(find_space(connection, space).table_number)
        missing_count = f"NOT EXISTS (SELECT 1 FROM {table} v WHERE v.label = i.label)"
        return items_page(connection, 0, limit, missing_count)


def flip(
    store: Store, space: str, *, leave_behind: bool = False, state: Mapping[str, Any] | None = None
) -> None:
    """Make a space the active one; the active one becomes previous.

    If the space is active already, only `state` is stored.

    Listeners are called. Vectors of all spaces stay. A previous space may be activated again.

    Args:
        store: The gallery.
        space: Id of the space.
        leave_behind: Allow items without a vector in it; searches no longer find them.
        state: JSON values to store in the same transaction; None as a value removes it.

    Raises:
        PreconditionError: Items lack a vector in it, and `leave_behind` is False.
        IncompatibleSpaceError: The gallery does not have the space.
        BusyError: Another process still writes the gallery after 5 s; nothing is changed.
        CannotWriteError: The file is read-only, or the disk fails or is full.
        VerificationError: The file is damaged.
        NotFoundError: The gallery was closed, or its file is gone.
        TypeError, ValueError: A value of `state` cannot be written as JSON, or contains NaN,
            infinity or half a surrogate pair; nothing is changed.
        Exception: An error of a listener; the change stays committed, and later listeners are not
            called.
    """
    with store.change_transaction() as (connection, changes):
        target = find_space(connection, space)
        if target.state != "active":
            _activate(connection, target, "previous", leave_behind)
        set_state_values(connection, state or {})
        changes.append(_SPACES_CHANGED)


def rollback(
    store: Store, *, leave_behind: bool = False, state: Mapping[str, Any] | None = None
) -> str:
    """Return to the space that was active most recently before; the present one becomes staging and
    keeps its vectors.

    Listeners are called. A second call goes back to the space before.

    Args:
        store: The gallery.
        leave_behind: Allow items without a vector in the earlier space; searches no longer find
            them.
        state: JSON values to store in the same transaction; None as a value removes it.

    Returns:
        The id of the active space.

    Raises:
        NotFoundError: The gallery has no previous space, was closed, or its file is gone.
        PreconditionError: Items lack a vector there, and `leave_behind` is False.
        BusyError: Another process still writes the gallery after 5 s; nothing is changed.
        CannotWriteError: The file is read-only, or the disk fails or is full.
        VerificationError: The file is damaged.
        TypeError, ValueError: A value of `state` cannot be written as JSON, or contains NaN,
            infinity or half a surrogate pair; nothing is changed.
        Exception: An error of a listener; the change stays committed, and later listeners are not
            called.
    """
    with store.change_transaction() as (connection, changes):
        previous = [info for info in read_spaces(connection) if info.state == "previous"]
        if not previous:
            raise NotFoundError(
                "this gallery has no older release to roll back to: it was never upgraded, or "
                "the older release's vectors were removed. Activate a release instead"
            )
        target = max(previous, key=lambda info: info.activation_rank)
        _activate(connection, target, "staging", leave_behind)
        set_state_values(connection, state or {})
        changes.append(_SPACES_CHANGED)
    return target.spec.space


def _activate(
    connection: sqlite3.Connection, target: SpaceInfo, old_becomes: str, leave_behind: bool
) -> None:
    if not leave_behind:
        ensure_complete(_count_items_left_behind(connection, target), target)
    connection.execute("UPDATE spaces SET state = ? WHERE state = 'active'", (old_becomes,))
    connection.execute(
        "UPDATE spaces SET state = 'active', activated = (SELECT max(activated) + 1 FROM spaces)"
        " WHERE number = ?",
        (target.table_number,),
    )


def ensure_complete(missing_count: int, target: SpaceInfo) -> None:
    """Check that all items have a vector in a space.

    Args:
        missing_count: Number of items without a vector, 0 or more.
        target: The space.

    Raises:
        PreconditionError: Some items have none.
    """
    if missing_count:
        raise PreconditionError(
            f"{missing_count} items have no vector in release {target.spec.release}'s space, so "
            "searches would not find them if this release answered; finish the upgrade, embed "
            "these items with the release's model, or pass leave_behind=True to accept that they "
            "are not found"
        )


def ensure_not_active(info: SpaceInfo) -> None:
    """Refuse to remove the active space; every gallery needs one.

    Raises:
        PreconditionError: The space is active.
    """
    if info.state == "active":
        raise PreconditionError(
            f"the space of release {info.spec.release} is the active one of this gallery and "
            "cannot be removed; activate another release first"
        )


def drop_space(store: Store, space: str) -> None:
    """Remove a space with all its vectors, and scrub them from the file.

    If a reader prevents the scrub, the next change of the gallery tries again.

    A staging space that an upgrade is filling can be removed; the upgrade then fails. All is one
    transaction, during which other writers wait. Listeners are called.

    The scrub follows the transaction: the space stays removed if the scrub fails.

    Raises:
        PreconditionError: The space is active.
        IncompatibleSpaceError: The gallery does not have it.
        BusyError: Another process still writes the gallery after 5 s; nothing is changed.
        CannotWriteError: The file is read-only, or the disk fails or is full.
        VerificationError: The file is damaged.
        NotFoundError: The gallery was closed, or its file is gone.
        Exception: An error of a listener; the space stays removed, but its bytes are scrubbed only
            by `Store.scrub`, or by a later change that deletes.
    """
    with store.change_transaction() as (connection, changes):
        info = find_space(connection, space)
        ensure_not_active(info)
        table = vector_table_name(info.table_number)
        piece = f"DELETE FROM {table} WHERE label IN (SELECT label FROM {table} LIMIT {DROP_ROWS})"
        while connection.execute(piece).rowcount:
            pass
        connection.execute(f"DROP TABLE {table}")
        connection.execute("DELETE FROM spaces WHERE number = ?", (info.table_number,))
        changes.append(_SPACES_CHANGED)
    store.scrub()


def least_certain_items(store: Store, space: str, limit: int = 100) -> list[StoredItem]:
    """Return migrated items of a space, the largest uncertainty first, then by label.

    Args:
        store: The gallery.
        space: Id of the space.
        limit: Largest number of items; 0 gives none, a negative number all.

    Returns:
        Items whose vector has an uncertainty; others are left out. Empty if there is none.

    Raises:
        IncompatibleSpaceError: The gallery does not have the space.
        VerificationError: The file is damaged.
        BusyError: Another process has the file to itself, or changed it during a read without a
            lock.
        CannotWriteError: The file cannot be opened, or the disk fails.
        NotFoundError: The gallery was closed, or its file is gone.
    """
    with store.read_snapshot() as connection:
        table = vector_table_name(find_space(connection, space).table_number)
        rows = connection.execute(
            "SELECT i.label, i.id, i.digest, i.metadata, v.origin, v.uncertainty"
            f" FROM {table} v JOIN items i ON i.label = v.label WHERE v.uncertainty IS NOT NULL"
            " ORDER BY v.uncertainty DESC, v.label LIMIT ?",
            (limit,),
        )
        return [item_from_row(row) for row in rows]


def find_migrated(store: Store, space: str, ids: Sequence[str]) -> list[StoredItem]:
    """Return the items of `ids` whose vector in a space was migrated.

    Only vectors of the origin "upgraded" count, not those that an upgrade passed on as "direct".

    Args:
        store: The gallery.
        space: Id of the space.
        ids: Ids of items; ids that do not exist are skipped, and one that is given twice counts
            once.

    Returns:
        Items by falling uncertainty; an unknown uncertainty comes last. Equal ones are by label.
        Empty if none was migrated.

    Raises:
        IncompatibleSpaceError: The gallery does not have the space.
        VerificationError: The file is damaged.
        BusyError: Another process has the file to itself, or changed it during a read without a
            lock.
        CannotWriteError: The file cannot be opened, or the disk fails.
        NotFoundError: The gallery was closed, or its file is gone.
    """
    with store.read_snapshot() as connection:
        table = vector_table_name(find_space(connection, space).table_number)
        rows = connection.execute(
            "SELECT i.label, i.id, i.digest, i.metadata, v.origin, v.uncertainty FROM items i JOIN "
            f"{table} v ON v.label = i.label WHERE i.id IN (SELECT value FROM json_each(?)) AND "
            "v.origin = 'upgraded' ORDER BY v.uncertainty IS NULL, v.uncertainty DESC, v.label",
            (json.dumps(storable_ids(ids)),),
        )
        return [item_from_row(row) for row in rows]


def sample_pairs(
    store: Store, space: str, other_space: str, count: int
) -> tuple[Labels, Vectors, Vectors]:
    """Draw about `count` items that have a vector in both spaces, at random.

    Args:
        store: The gallery.
        space: Id of the first space.
        other_space: Id of the second space.
        count: Largest number of items, at least 1.

    Returns:
        Labels int64 [n], increasing, and their vectors float32 [n, dim] in each space. n may be
        smaller than `count`, and 0. The draw differs at each call, and items after a gap of deleted
        labels are drawn somewhat more often.

    Raises:
        IncompatibleSpaceError: The gallery lacks a space.
        VerificationError: The file is damaged.
        BusyError: Another process has the file to itself, or changed it during a read without a
            lock.
        CannotWriteError: The file cannot be opened, or the disk fails.
        NotFoundError: The gallery was closed, or its file is gone.
        ValueError: `count` is negative, and the second space has vectors.
    """
    with store.read_snapshot() as connection:
        first, second = find_space(connection, space), find_space(connection, other_space)
        labels = draw_random_labels(connection, second, count)
        labels = live_labels(connection, vector_table_name(first.table_number), labels)
        pairs = [read_vectors(connection, labels, info) for info in (first, second)]
    return labels, pairs[0], pairs[1]


class RemainingVectors:
    """The vectors that a source space has and a target lacks."""

    def __init__(self, store: Store, source: str, target: SpaceSpec, needs_side: bool) -> None:
        """Choose the spaces.

        Args:
            store: The gallery.
            source: Id of the space to read.
            target: The space to write; while the gallery lacks it, every vector of the source
                counts.
            needs_side: Skip items without side-information; otherwise they come last.

        Raises:
            IncompatibleSpaceError: The gallery does not have the source.
            VerificationError: The gallery's file is damaged.
            BusyError: Another process has the file to itself, or changed it during a read without a
                lock.
            CannotWriteError: The file cannot be opened, or the disk fails.
            NotFoundError: The gallery was closed, or its file is gone.
        """
        self.store = store
        self.source = store.space(source)
        spaces = {info.spec.space: info for info in store.spaces()}
        self.target = spaces.get(target.space)
        self._passes = plan_side_passes(self.source.spec, target, needs_side=needs_side)

    def chunks(
        self, order: UpgradeOrder, items_per_chunk: int
    ) -> Iterator[tuple[Labels, Vectors, Vectors | None]]:
        """Yield labels int64 [n], embeddings float32 [n, dim] and side-information float32 [n,
        side_dim] or None, in chunks of at most `items_per_chunk` items, until none is left.

        All or none of a chunk have side-information. Items that are stored during the iteration
        have larger labels and come at the end. A space that is added after the constructor ran is
        not noticed: then nothing counts as migrated. Each chunk is read in a snapshot of its own.
        Deleted items are skipped. An item that another run migrates meanwhile may be yielded. The
        vectors are read-only and may be NaN.

        Args:
            order: label or uncertainty.
            items_per_chunk: Largest number of items of a chunk, at least 1.

        Raises:
            KeyError: Another order.
            ValueError: `items_per_chunk` is 0.
            VerificationError: The file is damaged, or a space was removed meanwhile.
            BusyError: Another process has the file to itself, or changed it during a read without a
                lock.
            CannotWriteError: The file cannot be opened, or the disk fails.
            NotFoundError: The gallery was closed, or its file is gone.
        """
        last = dict.fromkeys(self._passes, 0)
        more = True
        while more:
            more = False
            for with_side in self._passes:
                todo = self.missing_labels(order, with_side, last[with_side])
                if len(todo):
                    more = True
                    last[with_side] = int(todo.max())
                for start in range(0, len(todo), items_per_chunk):
                    chunk = self.read(todo[start : start + items_per_chunk], bool(with_side))
                    if len(chunk[0]):
                        yield chunk

    def all_labels(self) -> Labels:
        """Return every label that `chunks` would yield if nothing changed, int64, in passes by
        side-information.

        Raises:
            VerificationError: The gallery's file is damaged, or a space was removed meanwhile.
            BusyError: Another process has the file to itself, or changed it during a read without a
                lock.
            CannotWriteError: The file cannot be opened, or the disk fails.
            NotFoundError: The gallery was closed, or its file is gone.
        """
        return np.concatenate(
            [self.missing_labels("label", with_side) for with_side in self._passes]
        )

    def missing_labels(
        self, order: UpgradeOrder, with_side: bool | None, start_after: int = 0
    ) -> Labels:
        """Return the labels above `start_after` that the target lacks, in the order of the work.

        Args:
            order: label or uncertainty; with uncertainty, the largest comes first, and unknown ones
                last.
            with_side: Only items with side-information (True) or without (False); None for all.
            start_after: The largest label to skip.

        Returns:
            int64 [n]; all of them are in memory.

        Raises:
            KeyError: Another order.
            VerificationError: The gallery's file is damaged, or a space was removed meanwhile.
            BusyError: Another process has the file to itself, or changed it during a read without a
                lock.
            CannotWriteError: The file cannot be opened, or the disk fails.
            NotFoundError: The gallery was closed, or its file is gone.
        """
        by = {"label": "s.label", "uncertainty": "s.uncertainty DESC, s.label"}[order]
        where = {None: "TRUE", True: "s.side IS NOT NULL", False: "s.side IS NULL"}[with_side]
        if self.target is not None:
            target_table = vector_table_name(self.target.table_number)
            where += f" AND NOT EXISTS (SELECT 1 FROM {target_table} t WHERE t.label = s.label)"
        with self.store.read_snapshot() as connection:
            rows = connection.execute(
                f"SELECT s.label FROM {vector_table_name(self.source.table_number)} s"
                f" WHERE s.label > ? AND {where} ORDER BY {by}",
                (start_after,),
            )
            return rows_to_labels(rows)

    def read(self, labels: Labels, with_side: bool) -> tuple[Labels, Vectors, Vectors | None]:
        """Read embeddings and side-information of the items that still exist, by increasing label.

        Args:
            labels: int64 [n], distinct; labels without a vector are skipped.
            with_side: Whether to read side-information; then each of the items must have it.

        Returns:
            Labels int64 [m], embeddings float32 [m, dim], and side-information float32 [m,
            side_dim]; None without it, and where m is 0. The vectors are read-only and may be NaN.

        Raises:
            DamagedError: A vector has another length, an item lacks its side-information, or the
                space was removed meanwhile.
            BusyError: Another process has the file to itself, or changed it during a read without a
                lock.
            CannotWriteError: The file cannot be opened, or the disk fails.
            NotFoundError: The gallery was closed, or its file is gone.
        """
        condition, parameters = labels_sql_condition(labels)
        with self.store.read_snapshot() as connection:
            rows = connection.execute(
                f"SELECT label, embedding, {'side' if with_side else 'NULL'} FROM "
                f"{vector_table_name(self.source.table_number)} WHERE {condition} ORDER BY label",
                parameters,
            ).fetchall()
        spec = self.source.spec
        if not rows:
            return np.empty(0, np.int64), np.empty((0, spec.dim), np.float32), None
        columns = zip(*rows, strict=True)
        stored_labels = np.array(next(columns), np.int64)
        # A range may contain further labels.
        requested = np.isin(stored_labels, labels)
        embedding, side = ([*compress(column, requested)] for column in columns)
        sides = vectors_from_blobs(side, spec.side_dim) if with_side else None
        return stored_labels[requested], vectors_from_blobs(embedding, spec.dim), sides


NEIGHBOUR_PROBES = 1000
NEIGHBOURS = 10


# Draws items of a gallery that have a vector in both of two spaces: labels [n] and their vectors
# [n, dim] in each.
SamplePairs = Callable[[str, str, int], tuple[Labels, Vectors, Vectors]]


def neighbour_overlap(
    draw_pairs: SamplePairs, source: SpaceSpec, target: SpaceSpec
) -> float | None:
    """Measure the share of nearest neighbours that an upgrade preserves.

    Probes are items that have a vector in both spaces, drawn at random at each call. For each
    probe, its NEIGHBOURS nearest other probes are compared.

    Args:
        draw_pairs: Draws the probes.
        source: The source space.
        target: The target space.

    Returns:
        0 to 1; None if at most NEIGHBOURS items have both vectors.

    Raises:
        IncompatibleSpaceError: The gallery lacks a space.
        BusyError, CannotWriteError, UnavailableError, VerificationError, NotFoundError: The store
            is locked, cannot be opened, does not answer, is damaged, or was closed; raised by
            `draw_pairs`.
    """
    labels, old_vectors, new_vectors = draw_pairs(source.space, target.space, NEIGHBOUR_PROBES)
    if len(labels) <= NEIGHBOURS:
        return None
    nearest = _nearest(source, labels, old_vectors), _nearest(target, labels, new_vectors)
    shares = [len(set(a) & set(b)) / NEIGHBOURS for a, b in zip(*nearest, strict=True)]
    return float(np.mean(shares))


def _nearest(spec: SpaceSpec, labels: Labels, vectors: Vectors) -> list[list[int]]:
    nearest = ExactIndex(spec, labels, vectors).search(vectors, NEIGHBOURS + 1).labels
    return [
        [label for label in row if label != own][:NEIGHBOURS]
        for own, row in zip(labels.tolist(), nearest.tolist(), strict=True)
    ]


# Chunks that are migrated for the measurement, after a few rows that warm the runner up.
_CHUNKS = 2
_FIRST_ROWS = 8


@dataclass(frozen=True)
class Estimate:
    """The estimated cost of an upgrade.

    Attributes:
        item_count: Items to migrate.
        seconds: Time of reading, migrating and writing without pauses.
        growth_bytes: Growth of the file.
        left_behind_count: Items that cannot be migrated.
    """

    item_count: int
    seconds: float
    growth_bytes: int
    left_behind_count: int


def estimate_upgrade(
    store: Store, runner: Runner, target: SpaceSpec, scratch_folder: Path
) -> Estimate:
    """Estimate the cost of `run_upgrade` on two chunks of items; change nothing in the gallery.

    The chunks are read, migrated and written durably to a temporary file. The call removes the
    file; after a kill, `durable.remove_temporary_files` does.

    Args:
        store: The gallery.
        runner: The transform.
        target: The space to write.
        scratch_folder: Folder of the temporary file, on the gallery's disk.

    Returns:
        The cost; zeros, except `left_behind_count`, if nothing is to be migrated. It counts
        items without side-information that the runner needs.

    Raises:
        InvalidInputError: The runner's output is invalid.
        VerificationError: The runner makes no usable vectors, or the gallery's file is damaged.
        CannotWriteError: The temporary file cannot be written, or the gallery's cannot be opened.
        sqlite3.Error: SQLite cannot create the temporary file, such as on a full disk.
        IncompatibleSpaceError: The gallery does not have the source.
        BusyError: Another process has the file to itself, or changed it during a read without a
            lock.
        NotFoundError: The gallery was closed, or its file is gone.
        OSError: `scratch_folder` is missing or cannot be written.
        UnusableOutputError: As a VerificationError: the runner makes no usable vector for some
            rows.
        Exception: Any other error of the runner.
    """
    remaining = RemainingVectors(store, store.active().spec.space, target, runner.reads_side)
    todo = remaining.all_labels()
    migrated = 0 if remaining.target is None else store.count(target.space)
    left_behind = store.count() - migrated - len(todo)
    if not len(todo):
        return Estimate(0, 0.0, 0, left_behind)
    # Items from all parts of the gallery.
    most = _CHUNKS * CHUNK_ROWS
    probe = todo[:: max(1, len(todo) // most)][:most]
    runner.run(*remaining.read(probe[:_FIRST_ROWS], runner.reads_side)[1:])
    info = SpaceInfo(target, "staging", 1, 0)
    start_time = time.perf_counter()
    temporary = tempfile.TemporaryDirectory(
        prefix=f"{durable.TEMPORARY_PREFIX}estimate-", dir=scratch_folder
    )
    probe_file = Path(temporary.name) / "probe.sqlite"
    with temporary, closing(open_connection(probe_file)) as connection:
        # One table of vectors, set up like a gallery's.
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode = WAL")
        # Its vectors belong to items of the gallery's file.
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.execute(VECTOR_TABLE.format(name=vector_table_name(info.table_number)))
        for start in range(0, len(probe), CHUNK_ROWS):
            rows = probe[start : start + CHUNK_ROWS]
            labels, embedding, side = remaining.read(rows, runner.reads_side)
            upgraded = runner.run(embedding, side)
            new = NewVectors(target.space, upgraded.embedding, upgraded.side_information)
            checked = check_new_vectors(info, new, len(labels))
            with durable.transaction(connection):
                insert_vectors(connection, checked, labels)
        seconds = time.perf_counter() - start_time
        # Every page except the schema's.
        written = (connection.execute("PRAGMA page_count").fetchone()[0] - 1) * PAGE_BYTES
    share = len(todo) / len(probe)
    return Estimate(len(todo), seconds * share, int(written * share), left_behind)
