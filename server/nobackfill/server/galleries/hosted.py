"""Serve galleries by name, whatever stores them: each has a store, a plan, counts and a speed.

Threads take the locks of galleries in one order, that of `LockLevel`. It is checked at every wait.
"""

import re
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

import structlog

from nobackfill.errors import (
    AlreadyExistsError,
    BusyError,
    ConfigurationError,
    DamagedError,
    InvalidInputError,
    ItemQuotaError,
    NobackfillError,
    NotFoundError,
    UnavailableError,
    VerificationError,
    join_few,
)
from nobackfill.gallery.filters import Matches, StoreFilter
from nobackfill.gallery.gallery_store import GalleryStore
from nobackfill.gallery.search.index import Neighbours
from nobackfill.gallery.search.view import LiveView, Snapshot
from nobackfill.gallery.spec import Metadata, SpaceInfo, SpaceSpec
from nobackfill.gallery.sqlite_file import StoredItem
from nobackfill.gallery.store import Change, NewVectors
from nobackfill.release.manifest import Manifest
from nobackfill.server.catalog import Catalog
from nobackfill.server.galleries.plan import (
    RANK_FUSION_KEY,
    SOURCE_KEY,
    AnswererOf,
    FillMode,
    Plan,
    PlanPart,
    make_plan,
)
from nobackfill.server.state import GalleryDeletedError, GatewayState, OutdatedPlanError, State
from nobackfill.vectors import Vectors


class LockLevel(IntEnum):
    """Name the things that a thread may wait for, in the order in which it must take them."""

    RELEASES = 0
    NAMES = 1
    GALLERY = 2
    PLAN = 3
    WRITES = 4
    VIEW = 5


class LockOrderError(AssertionError):
    """A thread waited against the order of locks; two threads could wait for each other for
    ever.
    """


class _HeldLocks(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[LockLevel, str]] = []


_held = _HeldLocks()


def check_lock_order(level: LockLevel, name: str = "") -> None:
    """Check that this thread may wait for a lock.

    Nothing is locked or recorded. Python's -O does not switch it off.

    Args:
        level: the kind of lock.
        name: the gallery's name, for locks of one gallery; names are taken in rising order.

    Raises:
        LockOrderError: the thread holds a lock that comes later, or this one already.
    """
    for other, held_name in _held.stack:
        if other > level or (other == level and held_name >= name):
            raise LockOrderError(
                f"waiting for {level.name} {name!r} while holding {other.name} {held_name!r}; "
                "this is a defect of the gateway, which must take locks in the order of "
                "nobackfill.server.galleries.hosted.LockLevel: please report it"
            )


@contextmanager
def hold_level(level: LockLevel, name: str = "") -> Iterator[None]:
    """Record that this thread holds a lock during a block.

    The order is not checked; call `check_lock_order` before the wait. The record belongs to the
    thread and ends with the block, also after an error.

    Args:
        level: the kind of lock.
        name: the gallery's name, for locks of one gallery.
    """
    _held.stack.append((level, name))
    try:
        yield
    finally:
        _held.stack.remove((level, name))


class UseCounter:
    """Count the users of an object that may only be freed when it has none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_free = threading.Condition(self._lock)
        self._count = 0
        self._is_closed = False

    def enter(self) -> bool:
        """Count one more user, without waiting; False if the object is closed.

        After True, call `leave` once, from any thread.
        """
        with self._lock:
            self._count += not self._is_closed
            return not self._is_closed

    def leave(self) -> None:
        """Count one user less.

        Call it once for each `enter` that returned True. The last user wakes those that wait. A
        call too many is not detected, and upsets the count.
        """
        with self._lock:
            self._count -= 1
            if not self._count:
                self._is_free.notify_all()

    def wait_until_none(self, timeout_s: float) -> bool:
        """Wait until there is no user; new ones may enter meanwhile and afterwards.

        Args:
            timeout_s: longest wait in seconds; 0 only looks.

        Returns:
            False if there is still a user.
        """
        with self._lock:
            return self._is_free.wait_for(lambda: not self._count, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Wait until there is no user, and from then on let none enter.

        Users may enter during the wait. A second call returns True if there is none.

        Args:
            timeout_s: longest wait in seconds; 0 only looks.

        Returns:
            False if there is still a user; then the object stays open.
        """
        with self._lock:
            self._is_closed = self._is_free.wait_for(lambda: not self._count, timeout_s)
            return self._is_closed

    def reopen(self) -> None:
        """Let users enter again.

        It does nothing if the object is open.
        """
        with self._lock:
            self._is_closed = False


class WriteLock:
    """Lock the writes of a gallery: puts share it, and a change of its spaces holds it exclusively.

    A thread that waits to hold it exclusively goes before threads that come later to share it.
    """

    def __init__(self, name: str = "") -> None:
        """Make a free lock.

        Args:
            name: the gallery's name, for the order of locks.
        """
        self._name = name
        self._condition = threading.Condition()
        self._shared = 0
        self._exclusive = False
        self._waiting = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock during a block, together with others that share it.

        It waits without a time limit while another thread holds or awaits the lock exclusively. A
        thread that has it may not take it again.

        Raises:
            LockOrderError: the thread holds a lock that comes later, or this one already.
        """
        check_lock_order(LockLevel.WRITES, self._name)
        with self._condition:
            self._condition.wait_for(lambda: not self._exclusive and not self._waiting)
            self._shared += 1
        try:
            with hold_level(LockLevel.WRITES, self._name):
                yield
        finally:
            with self._condition:
                self._shared -= 1
                self._condition.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock during a block, alone.

        It waits without a time limit for all who share it. A thread that has it may not take it
        again.

        Raises:
            LockOrderError: the thread holds a lock that comes later, or this one already.
        """
        check_lock_order(LockLevel.WRITES, self._name)
        with self._condition:
            self._waiting += 1
            try:
                self._condition.wait_for(lambda: not self._exclusive and not self._shared)
            finally:
                self._waiting -= 1
                # After an interrupted wait nobody else wakes the threads that wait behind it.
                self._condition.notify_all()
            self._exclusive = True
        try:
            with hold_level(LockLevel.WRITES, self._name):
                yield
        finally:
            with self._condition:
                self._exclusive = False
                self._condition.notify_all()


@dataclass(frozen=True)
class ItemQuota:
    """Limit the number of items in the galleries of a token.

    Attributes:
        galleries: names of the galleries.
        max_items: most items that they may have in total.
    """

    galleries: frozenset[str]
    max_items: int

    def check(self, stored_count: int, new_count: int) -> None:
        """Check that new items fit.

        Reaching the limit exactly is allowed.

        Args:
            stored_count: items that the galleries have.
            new_count: items to be added; 0 always fits.

        Raises:
            ItemQuotaError: there would be too many items.
        """
        if new_count and stored_count + new_count > self.max_items:
            raise ItemQuotaError(
                f"expected at most {self.max_items} items in {join_few(sorted(self.galleries))} "
                f"for this token, found {stored_count} and {new_count} new ones; delete some "
                "items, or ask the operator to raise items=N in the tokens file"
            )


# A gallery is slow if the moving mean of its searches is longer than this (seconds); its searches
# then use a lane of their own.
_SLOW_SECONDS = 0.02
_SMOOTHING = 0.2
# These factors make the estimate settle where two searches of five take longer.
_RAISE, _LOWER = 1.06, 0.96
# Searches below this (seconds) run on the thread that receives calls; meanwhile it receives nothing
# else.
_FAST_SECONDS = 0.001
# If fewer than this share of answers have all their items in memory, only one query in so many is
# tried on the receiving thread.
_MIN_IN_MEMORY, _TRY_INTERVAL = 0.5, 16
_MEMORY_SMOOTHING = 0.1
# Comparing so many numbers takes about as long.
_FAST_ELEMENTS = 1 << 20
# Comparing so many numbers makes a gallery slow, even before its first search.
_SLOW_ELEMENTS = 1 << 24


class SearchSpeed:
    """Estimate how long searches of one gallery take."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._typical = _FAST_SECONDS / 4
        self._in_memory = 1.0
        self._queries = 0

    def record_search(self, seconds: float, query_count: int = 1) -> None:
        """Record a search.

        The estimates are of this process, and approximate when several threads record at once.

        Args:
            seconds: its duration, of all its queries together.
            query_count: number of queries that it answered at once.
        """
        self._mean += _SMOOTHING * (seconds - self._mean)
        # Only the share of longer searches counts, not how much longer they are: a search that
        # waited for its turn is one of many.
        self._typical *= _RAISE if seconds > query_count * self._typical else _LOWER

    def record_on_receiver(self, seconds: float, query_count: int) -> None:
        """Record searches on the receiving thread that found all their items in memory.

        It also counts `query_count` answers that were found in memory. 0 queries change only the
        durations.

        Args:
            seconds: their duration, all together.
            query_count: number of queries.
        """
        self.record_search(seconds, query_count)
        self._queries += query_count
        self._in_memory = 1 - (1 - self._in_memory) * (1 - _MEMORY_SMOOTHING) ** query_count

    @property
    def is_fast(self) -> bool:
        """Tell whether searches take less than 1 ms each, and mostly find their items in memory."""
        return self._typical < _FAST_SECONDS and self._in_memory > _MIN_IN_MEMORY

    def is_faster_than_handover(self, snapshot: Snapshot) -> bool:
        """Tell whether a search of a snapshot takes no longer than handing it to a thread.

        The search must also compare fewer than 2^20 numbers.
        """
        return self._typical < _FAST_SECONDS and is_cheap_search(snapshot)

    def record_receiver_search(self, *, in_memory: bool) -> None:
        """Record a search on the receiving thread.

        It changes no duration.

        Args:
            in_memory: whether all its items were in memory.
        """
        self._in_memory += _MEMORY_SMOOTHING * (in_memory - self._in_memory)

    def should_search_on_receiver(self) -> bool:
        """Tell whether to search on the receiving thread: not if items are mostly read from
        disk.

        Each call counts a query. If items are mostly read from disk, every 16th query is still
        tried.
        """
        self._queries += 1
        return self._in_memory > _MIN_IN_MEMORY or self._queries % _TRY_INTERVAL == 0

    def is_slow(self, views: Iterable[LiveView]) -> bool:
        """Tell whether searches of some views are slow at present, as without a graph.

        They are if the moving mean of searches is above 20 ms, or the views together compare more
        than 2^24 numbers.
        """
        comparisons = sum(view.snapshot().compared_number_count for view in views)
        return self._mean > _SLOW_SECONDS or comparisons > _SLOW_ELEMENTS


def is_cheap_search(snapshot: Snapshot) -> bool:
    """Tell whether a search of a snapshot compares few numbers, however busy the machine is.

    Few means less than 2^20 for one query: dimension times the rows of the delta and of an exact
    base. The numbers that a graph compares do not count.
    """
    return snapshot.compared_number_count < _FAST_ELEMENTS


# Keys of `HostedGallery.state_value`: the rollout of the staging space, and why the gallery has not
# moved.
ROLLOUT, NOTE = "rollout", "note"
# Key of `HostedGallery.state_value`: answers have exact distances.
EXACT_DISTANCES_KEY = "exact_distances"


class HostedGallery(ABC):
    """Serve one open gallery.

    `use_counter` counts the calls that work with it. `is_closing` is set while its deletion waits
    for the last of them. `replan` replaces `plan`, one reference: a call takes it once, with
    `use_plan`, and keeps it to its end. Puts share `write_lock`; a change of the gallery's spaces
    holds it exclusively.
    """

    # Number in its store: a later gallery of the same name has another number.
    number = 0
    store: GalleryStore
    plan: Plan

    def __init__(
        self, name: str, folder: Path, store: GalleryStore, filtering: StoreFilter
    ) -> None:
        """Serve an open store.

        It subscribes to the store, and reads its state once.

        Args:
            name: the gallery's name.
            folder: folder for its indexes.
            store: the store; closed with the gallery.
            filtering: evaluates filters; closed with the gallery.

        Raises:
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store is damaged.
            CannotWriteError: the file cannot be opened, or the disk fails.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        self.name, self.folder, self.store = name, folder, store
        self.use_counter = UseCounter()
        self.is_closing = False
        self.write_lock = WriteLock(name)
        self._lock = threading.Lock()
        store.subscribe(self._forward)
        self.filtering = filtering
        # Cached, so that listing all galleries opens no files.
        self._spaces: tuple[SpaceInfo, ...] | None = None
        self._state: Mapping[str, Any] | None = None
        # Replaced at each change: a count that began earlier is then stored in a mapping that
        # nobody reads.
        self._counts: dict[str | None, int] = {}
        self.exact_distances = bool(self.state_value(EXACT_DISTANCES_KEY))
        self.search_speed = SearchSpeed()

    def enter_plan(self) -> Plan:
        """Return the present plan with one more user; the caller leaves `plan.use_counter`.

        It never waits for long: it repeats if the plan is replaced at that moment. `replan` must
        have run before; otherwise it raises AttributeError. No lock level is recorded; `use_plan`
        records it.
        """
        while True:
            plan = self.plan
            plan.use_counter.enter()
            if plan is self.plan:
                return plan
            plan.use_counter.leave()

    @contextmanager
    def use_plan(self) -> Iterator[Plan]:
        """Use the present plan during a block.

        A caller that replaces the plan may wait for the end of the block, so keep it short. Before
        the first `replan` it raises AttributeError.

        Yields:
            The plan, also if it is replaced meanwhile.
        """
        plan = self.enter_plan()
        try:
            with hold_level(LockLevel.PLAN, self.name):
                yield plan
        finally:
            plan.use_counter.leave()

    def replan(
        self, state: State, manifests: Mapping[int, Manifest], answerer_of: AnswererOf,
        check: Callable[[Plan], None],
    ) -> Plan:  # fmt: skip
        """Make the plan again from the gallery's spaces.

        Views that its searches need are made before it is used; `free_unused_views` frees the
        others.

        After an error the present plan stays. The replaced plan may still have users. Do not call
        it in two threads at once.

        Args:
            state: the gateway's state.
            manifests: published releases by number.
            answerer_of: makes the plan's answerer.
            check: called with the new plan before it is used; it may raise to refuse the plan.

        Returns:
            The replaced plan; the new one if it is the first.

        Raises:
            ConfigurationError: the gallery has a space of a release that is not published here, or
                the database refuses the statement.
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store, or an index that searches need, is damaged.
            NobackfillError: whatever `check` raises.
            OSError: an index file cannot be deleted.
            CannotWriteError: the file cannot be opened, or the disk fails.
        """
        spaces, rollout, epoch = self._read()
        if missing := {info.spec.release for info in spaces} - set(manifests):
            raise ConfigurationError(
                f"gallery {self.name!r} has vectors of release {max(missing)}, which is not "
                "published in this gateway's --model-repo; start `gateway serve --model-repo "
                "FOLDER` with a folder that has this release"
            )
        new = make_plan(
            spaces,
            state,
            manifests,
            answerer_of,
            UseCounter(),
            rollout,
            epoch,
            has_source=self.state_value(SOURCE_KEY) is not None,
            with_fusion=bool(self.state_value(RANK_FUSION_KEY)),
        )
        check(new)
        self._prepare(new)
        old, self.plan = getattr(self, "plan", new), new
        return old

    def _read(self) -> tuple[Sequence[SpaceInfo], FillMode | None, int]:
        """Read the spaces, the rollout and the epoch, from which a plan is made."""
        return self.spaces(), self.state_value(ROLLOUT), 0

    def put(
        self, plan: Plan, ids: Sequence[str], vectors: Sequence[NewVectors],
        digests: Sequence[str | None], metadata: Sequence[Metadata | None],
        allowance: ItemQuota | None = None,
    ) -> None:  # fmt: skip
        """Store items whose vectors were made for a plan, durably, all or none.

        The caller holds `write_lock` shared. An item with the same digest keeps its vectors and
        gets those that it lacks; any other existing item is replaced.

        Args:
            plan: the plan.
            ids: ids of the items, without repeats.
            vectors: vectors of all items, for each space of the plan.
            digests: digest of each item's content; None if unknown, which replaces an existing
                item.
            metadata: metadata of each item; None keeps what an unchanged item has.
            allowance: limit of the caller's items, which only a database checks here; None means no
                limit.

        Raises:
            OutdatedPlanError: another gateway has replaced the plan; only in a database.
            ItemQuotaError: there would be too many items; only in a database.
            InvalidInputError: an id, a vector or metadata is not valid, or an id is repeated.
            IncompatibleSpaceError: the gallery lacks a space.
            NotFoundError: the gallery is closed or deleted.
            BusyError: the store is locked for too long.
            UnavailableError: the database does not answer, or the outcome is unknown; repeating is
                safe.
            CannotWriteError: the store cannot be written.
            VerificationError: the store is damaged.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        self.store.put(ids, vectors, digests=digests, metadata=metadata)

    def check_complete(self) -> None:  # noqa: B027 - a file has no parts
        """Check that no part of the gallery is missing; a file has no parts that can be missing.

        Raises:
            DamagedError: a part is missing that was not deleted by a gateway.
            BusyError, UnavailableError: the database is busy, or does not answer.
            ConfigurationError: the database refuses the statement, as without rights.
        """

    def open_views(self) -> None:  # noqa: B027 - a database has no views
        """Make the views that the plan searches, unless they exist.

        A small gallery makes them at its first use, not at the start. It reads all vectors, which
        may take seconds. In a database it does nothing.

        Raises:
            IncompatibleSpaceError: the gallery does not have a space of the plan.
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store is damaged.
            CannotWriteError: the file cannot be opened, or the disk fails.
        """

    def _prepare(self, plan: Plan) -> None:  # noqa: B027 - likewise
        """Make what searches of a plan need, unless `open_views` will do so."""

    def views(self) -> Mapping[str, LiveView]:
        """Return the live views in this process, by space.

        A space that no search has used has none; a database has no views at all. The mapping is
        replaced and never changed.
        """
        return {}

    def free_unused_views(self, plan: Plan) -> None:  # noqa: B027 - likewise
        """Free the views that a plan does not search; no older plan may be in use.

        It frees cached items of other spaces, too. In a database it does nothing.
        """

    @abstractmethod
    def items(self, labels: list[int], space: str) -> list[StoredItem | None]:
        """Read items as a space shows them.

        Origin and uncertainty are those of the space; both are None without a vector there.

        Args:
            labels: labels of the items.
            space: id of the space.

        Returns:
            The items in the order of `labels`; None for deleted ones.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            OutdatedPlanError: another gateway has deleted the space; only in a database.
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store is damaged.
            CannotWriteError: the file cannot be opened, or the disk fails.
            ConfigurationError: the database refuses the statement, as without rights.
        """

    def spaces_of(self, label: int) -> list[str]:
        """Return the spaces in which an item has a vector.

        A deleted item has none. Oldest space first.

        Raises:
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store is damaged.
            CannotWriteError: the file cannot be opened, or the disk fails.
            ConfigurationError: the database refuses the statement.
            IncompatibleSpaceError: a space was deleted meanwhile.
        """
        spaces = [info.spec.space for info in self.spaces()]
        return [space for space in spaces if self.store.vector(label, space) is not None]

    @abstractmethod
    def search(
        self,
        parts: Sequence[PlanPart],
        queries: Sequence[Vectors],
        k: int,
        matches: Matches | None,
        ef: int,
    ) -> list[Neighbours]:
        """Search some parts of the gallery.

        In a file, missing views are made first. Without `ef`, a sample of the queries is kept there
        to tune the graph.

        Args:
            parts: one part, or two; each item is found in the first part that has it.
            queries: for each part float32 [q, dim].
            k: most neighbours of each query, at least 1.
            matches: items that may be found; None means all.
            ef: width of the graph search, as in Index.search; 0 means the index's own.

        Returns:
            The neighbours of all queries, for each part: nearest first, equal distances by label,
            padded with -1 and infinity. Where a part has a distance scale, converted distances
            order them; the distances returned are the items' own.

        Raises:
            InvalidInputError: a query is not a valid vector.
            OutdatedPlanError: another gateway has deleted a space or the gallery; only in a
                database.
            DeadlineError, CancelledError: the call's time is over, or its caller has gone; only in
                a database.
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store is damaged.
            CannotWriteError: the file cannot be opened, or the disk fails.
            ConfigurationError: the database refuses the statement, as without rights.
            OSError: a view must be made, and an index file cannot be deleted.
        """

    @abstractmethod
    def scans_all_vectors(self, part: PlanPart, ef: int) -> bool:
        """Tell whether a search of a part compares every vector instead of using a graph.

        Args:
            part: the part.
            ef: width of the graph search; 0 means the index's own.

        Raises:
            OutdatedPlanError: another gateway has deleted the space; only in a database.
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store is damaged.
            CannotWriteError: the file cannot be opened, or the disk fails.
            ConfigurationError: the database refuses the statement, as without rights.
        """

    @abstractmethod
    def prepare_space(self, space: str) -> None:
        """Prepare a space that is about to be searched, before a switch makes puts wait.

        A gallery in a file loads its view. A database records which items have a vector there.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            CannotWriteError: the store cannot be written.
            VerificationError: the store is damaged.
            ConfigurationError: the database refuses the statement, as without rights.
        """

    @abstractmethod
    def build_first_index(self, space: str, check_stop: Callable[[], None]) -> None:
        """Make the first index of a space that an upgrade has filled; return once it can be
        searched.

        Args:
            space: id of the space.
            check_stop: called often; it may raise to stop.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            CannotWriteError: the store cannot be written.
            VerificationError: the store is damaged.
            NobackfillError: whatever `check_stop` raises.
            ConfigurationError: the database refuses the statement, as without rights.
        """

    def drop_space(self, space: str) -> None:
        """Delete a space that no plan uses, with its vectors and its index file.

        Whether a plan uses it is not checked.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            PreconditionError: the space is the active one.
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            CannotWriteError: the store cannot be written.
            VerificationError: the store is damaged.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        self.store.drop_space(space)

    def spaces(self) -> tuple[SpaceInfo, ...]:
        """Return all spaces, oldest first, as of the last commit.

        They are cached until this process changes the spaces, or a new plan is made in a database.
        Threads wait for one that reads them.

        Raises:
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store is damaged.
            CannotWriteError: the file cannot be opened, or the disk fails.
            ConfigurationError: the database refuses the statement.
        """
        with self._lock:
            if self._spaces is None:
                self._spaces = tuple(self.store.spaces())
            return self._spaces

    def state_value(self, key: str) -> Any:
        """Return a small JSON value that is stored with the gallery; None without one.

        It is cached until this process changes it or, in a shared database, a new plan is made. Do
        not change the value. Threads wait for one that reads it.

        Raises:
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store is damaged.
            CannotWriteError: the file cannot be opened, or the disk fails.
            ConfigurationError: the database refuses the statement.
        """
        with self._lock:
            if self._state is None:
                self._state = self.store.state()
            return self._state.get(key)

    def store_state(self, values: Mapping[str, Any]) -> None:
        """Store small JSON values with the gallery, durably and all at once.

        Other keys stay. The plan is not made again. The next `state_value` reads all values again,
        also after an error. Attributes that were made of a value, such as `exact_distances`, stay.

        Args:
            values: value by key; None deletes a key.

        Raises:
            TypeError: a value cannot be written as JSON.
            ValueError: a value contains NaN or infinity.
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            CannotWriteError: the store cannot be written.
            VerificationError: the store is damaged.
            ConfigurationError: the database refuses the statement.
        """
        try:
            self.store.update_state(values)
        finally:
            with self._lock:
                self._state = None

    def count(self) -> int:
        """Return the number of items.

        It is cached until the next commit of this process; in a database for half a second.

        Raises:
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store is damaged.
            CannotWriteError: the file cannot be opened, or the disk fails.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        return self._count(None)

    def vector_counts(self) -> Mapping[str, int]:
        """Return the number of vectors by space, from views, or cached as in `count`.

        A space that another gateway has just deleted counts 0. Spaces come oldest first, staging
        ones too; an empty one counts 0.

        Raises:
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store is damaged.
            CannotWriteError: the file cannot be opened, or the disk fails.
            ConfigurationError: the database refuses the statement.
        """
        views, spaces = self.views(), [info.spec.space for info in self.spaces()]
        return {
            space: len(views[space].snapshot()) if space in views else self._count(space)
            for space in spaces
        }

    def _count(self, space: str | None) -> int:
        if space not in (counts := self._counts):
            counts[space] = self.store.count(space)
        return counts[space]

    @property
    def is_slow(self) -> bool:
        """Tell whether searches of the gallery are slow at present; see SearchSpeed.is_slow."""
        return self.search_speed.is_slow(self.views().values())

    def active_spec(self) -> SpaceSpec:
        """Return the active space of the store.

        It is that of `spaces`, which may be cached.

        Raises:
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store is damaged.
            CannotWriteError: the file cannot be opened, or the disk fails.
            ConfigurationError: the database refuses the statement.
        """
        return next(info.spec for info in self.spaces() if info.state == "active")

    def set_exact_distances(self, exact: bool) -> None:
        """Set whether answers have exact distances instead of rounded ones, durably.

        Searches that begin afterwards use it at once; other gateways with their next plan. After an
        error the setting stays.

        Raises:
            CannotWriteError: the store cannot be written.
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store is damaged.
            ConfigurationError: the database refuses the statement.
        """
        self.store_state({EXACT_DISTANCES_KEY: exact})
        self.exact_distances = exact

    def close(self) -> None:
        """Close the store; no call may use the gallery. A second call does nothing.

        Other methods then raise NotFoundError; in a database they still work.

        Raises:
            BusyError: a call that still uses the file does not end within a minute; the gallery
                stays open and follows commits, and `close` may be called again.
        """
        self.store.close()
        self.filtering.close()
        with suppress(ValueError):
            # A gallery that is closed already is not subscribed.
            self.store.unsubscribe(self._forward)

    def _forward(self, change: Change) -> None:
        with self._lock:
            self._counts = {}
            if change.spaces_changed:
                # A change of spaces may also change the state.
                self._spaces = self._state = None


log = structlog.get_logger("server.galleries")

GALLERY_NAME_PATTERN = re.compile(r"^[a-z0-9_-]{1,64}\Z")
CREATED_KEY = "created"
# Longest time (seconds) that a deletion waits for calls that use the gallery.
_DRAIN_SECONDS = 60.0
# Larger galleries make their views at the start, others at their first use.
_LAZY_ITEMS = 1_000
# Errors that damaged files of one gallery can cause.
UNUSABLE_GALLERY_ERRORS = (NobackfillError, OSError, sqlite3.Error, ValueError)


class GalleryStorage(Protocol):
    """Store galleries by name."""

    def remove_leftovers(self) -> None:
        """Remove what an interrupted creation or deletion left, before any gallery is opened.

        The folder of galleries is created if it is missing. In a database it does nothing.

        Raises:
            CannotWriteError: it cannot be removed, or the folder cannot be made.
        """

    def names(self) -> Iterable[str]:
        """Return the names of all galleries, in order.

        Raises:
            BusyError, UnavailableError: the database is busy, or does not answer.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
            OSError: the folder cannot be read.
        """

    def open(self, name: str) -> HostedGallery:
        """Open a gallery; it has no plan yet.

        The caller closes it.

        Raises:
            NotFoundError: no gallery has this name.
            VerificationError: the gallery is damaged, or a newer version wrote it.
            BusyError: another process holds it, or the database is busy.
            UnavailableError: the database does not answer.
            CannotWriteError: the file cannot be read, or the disk has no room for SQLite's files.
            ConfigurationError: the database refuses the statement, as without rights.
        """

    def create(self, name: str, specs: Sequence[SpaceSpec], state: Mapping[str, Any]) -> None:
        """Create a gallery atomically; it is not opened.

        After UnavailableError the gallery may exist.

        Args:
            name: its name, which is not checked.
            specs: its spaces, at least one; the last one is active, the others previous.
            state: its first state.

        Raises:
            AlreadyExistsError: a gallery has this name.
            InvalidInputError: a space has too many dimensions for the database.
            CannotWriteError: it cannot be written; leftovers are removed at the next start.
            BusyError, UnavailableError: the database is busy, or does not answer.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """

    def remove(self, name: str) -> Callable[[], None]:
        """Remove a gallery that nobody uses, atomically.

        The caller knows that the gallery exists.

        Args:
            name: the gallery. A file must not be open.

        Returns:
            A function that frees its storage, to be called once it is closed; it may raise
            CannotWriteError.

        Raises:
            CannotWriteError: it cannot be removed, or a folder does not exist. A database ignores
                an unknown name.
            BusyError, UnavailableError: the database is busy, or does not answer.
            ConfigurationError: the database refuses the statement, as without rights.
        """


class GalleryRegistry:
    """Keep open galleries by name.

    The mapping is replaced, never changed, so readers need no lock. A caller that works with a
    gallery counts as its user, through `use_gallery`, `all` or `hold_all`. A deletion closes the
    gallery when its last user has left.
    """

    def __init__(
        self, home: GalleryStorage, catalog: Catalog, state: GatewayState, answerer_of: AnswererOf
    ) -> None:
        """Start without galleries.

        Args:
            home: where galleries are stored.
            catalog: published releases.
            state: the gateway's state.
            answerer_of: makes the answerer of a plan.
        """
        self._home = home
        self._answerer_of = answerer_of
        self._catalog = catalog
        self._state = state
        self._names = threading.Lock()
        self._hosted: Mapping[str, HostedGallery] = {}
        # Galleries that are set aside (not served), with the reason; an open one is in both
        # mappings.
        self._reasons: Mapping[str, str] = {}
        self._update_lock = threading.Lock()
        # Called when a gallery is set aside, and when such a gallery is deleted.
        self.on_quarantine: Callable[[], None] = lambda: None

    def open_all(self) -> None:
        """Open all galleries, and remove what an interrupted creation or deletion left.

        A gallery that cannot be served, also one that is busy, is set aside and logged. Views of
        galleries with more than 1000 items are made here; others at their first use. Call it once.

        Raises:
            VerificationError: there are galleries, and none can be served.
            CannotWriteError: leftovers cannot be removed.
            UnavailableError: the database does not answer; galleries that were opened stay open,
                and `close` does not close them.
            BusyError: the database is busy while it lists the names.
            ConfigurationError, DamagedError: the database refuses the list of names, or is damaged.
            OSError: the folder cannot be read.
        """
        self._home.remove_leftovers()
        hosted = {}
        for name in self._home.names():
            try:
                hosted[name] = self._open(name)
            except UnavailableError:
                # An unreachable database is not the gallery's fault.
                raise
            except UNUSABLE_GALLERY_ERRORS as error:
                self.quarantine(name, error)
        log.info("serving galleries", count=len(hosted), set_aside=len(self._reasons))
        if self._reasons and not hosted:
            name, reason = next(iter(self._reasons.items()))
            raise VerificationError(
                f"none of the {len(self._reasons)} galleries can be served; the first is {name!r}: "
                f"{reason}. Restore the data folder with `gateway data restore`, or start with the "
                "--model-repo and --data that belong together"
            )
        self._hosted = hosted

    def _open(self, name: str, check: Callable[[Plan], None] = lambda plan: None) -> HostedGallery:
        hosted = self._home.open(name)
        try:
            self.replan(hosted, check)
            # Without views vectors are counted page by page: a second for a million.
            if hosted.count() > _LAZY_ITEMS:
                hosted.open_views()
            # Count now, while the file is open: it may be closed again before somebody lists it.
            hosted.vector_counts()
            hosted.check_complete()
        except BaseException:
            hosted.close()
            raise
        return hosted

    def replan(
        self, hosted: HostedGallery, check: Callable[[Plan], None] = lambda plan: None
    ) -> Plan:
        """Make a gallery's plan again for the present state and the published releases.

        After an error the present plan stays.

        Args:
            hosted: the gallery.
            check: called with the new plan before it is used; it may raise to refuse the plan.

        Returns:
            The replaced plan; the new one if it is the first.

        Raises:
            ConfigurationError: the gallery has a space of a release that is not published here, or
                the database refuses the statement.
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store is damaged.
            NobackfillError: whatever `check` raises.
            OSError: an index file cannot be deleted.
            CannotWriteError: the file cannot be opened, or the disk fails.
        """
        return hosted.replan(self._state.current, self._catalog.manifests, self._answerer_of, check)

    def quarantine(self, name: str, error: Exception) -> None:
        """Stop serving a gallery that turns out to be unusable: new calls to it are refused.

        Calls that use it go on; it is closed when it is deleted, or with the others.

        It logs an error, and calls `on_quarantine`. A second call replaces the reason. The name
        need not exist. `names` still lists it.

        Args:
            name: the gallery.
            error: the reason.
        """
        log.error(
            "a gallery is set aside: it is not served; correct the error, and restart the gateway",
            gallery=name,
            error=str(error),
        )
        with self._update_lock:
            self._reasons = {**self._reasons, name: str(error)}
        self.on_quarantine()

    def quarantine_reasons(self) -> Mapping[str, str]:
        """Return why each set-aside gallery is not served, by name.

        The mapping is replaced and never changed.
        """
        return self._reasons

    @contextmanager
    def use_gallery(self, name: str) -> Iterator[HostedGallery]:
        """Use a gallery during a block; it stays open until the end.

        A thread may use several galleries at once; the order of locks is not checked.

        Args:
            name: the gallery.

        Yields:
            The gallery. If the block raises GalleryDeletedError or OutdatedPlanError, and a table
            of the gallery is missing, the gallery is set aside.

        Raises:
            NotFoundError: no gallery has this name, or it is being deleted.
            VerificationError: the gallery is set aside; or the shared state is damaged while an
                unknown name is looked up.
            UnavailableError: the database does not answer.
            BusyError: the database is busy while an unknown name is looked up.
            DamagedError: the block failed because a table is missing.
            CannotWriteError: the publication's verified metadata cannot be stored while an unknown
                name is looked up.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        hosted = self.peek(name)
        if hosted.is_closing or not hosted.use_counter.enter():
            raise _unknown(name)
        try:
            with hold_level(LockLevel.GALLERY, name):
                yield hosted
        except (GalleryDeletedError, OutdatedPlanError):
            try:
                hosted.check_complete()
            except DamagedError as error:
                self.quarantine(name, error)
                raise
            raise
        finally:
            hosted.use_counter.leave()

    def searchable_gallery(self, name: str) -> HostedGallery | None:
        """Return a gallery that can be searched without waiting; None otherwise.

        The caller may read its memory only, and does not count as a user.

        It is None for an unknown name, a gallery that is set aside, and one that is being deleted.
        """
        hosted = self._hosted.get(name)
        return None if hosted is None or hosted.is_closing or name in self._reasons else hosted

    def is_slow(self, name: str) -> bool:
        """Tell whether searches of a gallery are slow at present; False for an unknown one.

        It reads memory only.
        """
        hosted = self._hosted.get(name)
        return hosted is not None and hosted.is_slow

    def names(self) -> set[str]:
        """Return the names of all galleries, also of those that are set aside.

        In a shared database they are those that this gateway has followed so far.
        """
        return {*self._hosted, *self._reasons}

    def all(self) -> Iterator[HostedGallery]:
        """Yield every served gallery by name; each stays open until the next one is requested.

        Galleries that are set aside, closed or created after the first one are left out. If a
        caller stops early, its gallery stays in use until the iterator is closed.
        """
        for name, hosted in sorted(self._hosted.items()):
            if name not in self._reasons and hosted.use_counter.enter():
                try:
                    yield hosted
                finally:
                    hosted.use_counter.leave()

    @contextmanager
    def hold_all(self) -> Iterator[list[HostedGallery]]:
        """Hold every served gallery open during a block, in the order of the names.

        Deletions wait for the end of the block, at most 60 s, and then fail. A gallery that is
        created meanwhile is not held.

        Yields:
            The galleries; the list may be empty.
        """
        with ExitStack() as stack:
            galleries = []
            for hosted in self.all():
                if hosted.use_counter.enter():
                    stack.callback(hosted.use_counter.leave)
                    stack.enter_context(hold_level(LockLevel.GALLERY, hosted.name))
                    galleries.append(hosted)
            yield galleries

    def peek(self, name: str) -> HostedGallery:
        """Return a gallery without counting as its user; it may be closed at any moment.

        In a shared database, an unknown name makes this gateway follow the others first. A gallery
        that is being deleted is returned, too.

        Raises:
            NotFoundError: no gallery has this name.
            VerificationError: the gallery is set aside; or the shared state is damaged while an
                unknown name is looked up.
            UnavailableError: the database does not answer.
            BusyError: the database is busy while an unknown name is looked up.
            CannotWriteError: the publication's verified metadata cannot be stored while an unknown
                name is looked up.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        if self._state.shared and name not in self.names():
            # Another gateway may have created it a moment ago.
            self._state.catch_up()
        if reason := self._reasons.get(name):
            raise VerificationError(
                f"gallery {name!r} is set aside (not served): {reason}; restore it from a backup "
                f"and restart the gateway, or run `gateway gallery delete {name} --yes`"
            )
        if hosted := self._hosted.get(name):
            return hosted
        raise _unknown(name)

    def create(self, name: str) -> None:
        """Create an empty gallery, and serve it.

        It has the active release's space, and those of the releases that a rollback can return to.
        If it cannot be opened after it was created, it is served after the next start. It waits
        without a limit for another creation or deletion that holds the names.

        Args:
            name: 1 to 64 characters of a-z, 0-9, '-' and '_'.

        Raises:
            InvalidInputError: the name is not valid, or a space has too many dimensions for the
                database.
            AlreadyExistsError: a gallery has this name, also one that is set aside.
            PreconditionError: no release is active.
            NotFoundError: a release is not published any more.
            CannotWriteError: the gallery cannot be written.
            BusyError, UnavailableError: the database is busy, or does not answer.
            VerificationError: a release's manifest cannot be used, or the new file is damaged.
            LockOrderError: the thread holds a lock that comes later.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
        """
        releases = (*self._state.current.previous, self._state.active_release())
        specs = [SpaceSpec.of(self._catalog.manifest(release)) for release in releases]
        if not GALLERY_NAME_PATTERN.match(name):
            raise InvalidInputError(
                "name: expected a gallery name of 1 to 64 characters of a-z, 0-9, '-' and '_', "
                f"got {name[:80]!r}; choose another name"
            )
        with self._lock_names():
            if name in self.names():
                raise AlreadyExistsError(
                    f"gallery {name!r} exists already; choose another name, or put items into it"
                )
            self._home.create(name, specs, {CREATED_KEY: time.time()})
            hosted = self._open(name)
            hosted.open_views()
            with self._update_lock:
                # The thread that follows other gateways may have opened it already.
                self._hosted = {name: hosted, **self._hosted}

    def sync_with_store(self, check: Callable[[Plan], None]) -> list[HostedGallery]:
        """Open galleries that other gateways have created, and close those that they have deleted.

        A gallery that was deleted elsewhere refuses new calls from the beginning; it is not closed
        here. A gallery whose release is not published here yet is tried again at the next call. The
        list has no new galleries, because their plans are new. Do not call it in two threads at
        once.

        Args:
            check: called with the plan of each new gallery; it may raise to refuse it.

        Returns:
            The galleries whose plan is outdated.

        Raises:
            UnavailableError: the database does not answer.
            VerificationError: the shared state or a new gallery is damaged, or `check` refuses one
                of its models.
            BusyError: the database is busy.
            ConfigurationError: the database refuses the statement, as without rights.
            NobackfillError: whatever else `check` raises; no new gallery is served then. After
                NotFoundError and ConfigurationError of `check` the gallery is only left out, until
                the next call.
        """
        # Read this first: a gallery that is created here after the look is not in it, and stays.
        open_before = self._hosted
        marks = self._state.refresh()
        deleted = {
            name
            for name, hosted in open_before.items()
            if name not in marks or marks[name][0] != hosted.number
        }
        for name in deleted:
            open_before[name].is_closing = True
        opened = {}
        for name in marks:
            if (name not in open_before or name in deleted) and name not in self._reasons:
                # It was deleted since it was listed, or its release is not published here yet.
                with suppress(NotFoundError, ConfigurationError):
                    opened[name] = self._open(name, check)
        with self._update_lock:
            remaining = {
                name: hosted
                for name, hosted in self._hosted.items()
                if name not in deleted or hosted is not open_before[name]
            }
            self._hosted = {**opened, **remaining}
        return [
            hosted
            for name, hosted in open_before.items()
            if name not in deleted and hosted.plan.epoch != marks[name][1]
        ]

    def delete(self, name: str) -> None:
        """Delete a gallery once no call uses it; new calls are refused at once.

        It waits up to 60 s for calls that use the gallery, and then as long for background work
        that reads its file. After an error the gallery is served as before, unless only the storage
        of a deleted gallery could not be freed; the next start frees it. One that is set aside and
        was never opened is removed without a wait.

        Args:
            name: the gallery, which may be set aside.

        Raises:
            NotFoundError: no gallery has this name, or another call is deleting it.
            BusyError: calls use it for too long, or the database is busy; the gallery stays.
            CannotWriteError: the gallery cannot be deleted, its storage cannot be freed, or the
                publication's verified metadata cannot be stored.
            UnavailableError: the database does not answer.
            ConfigurationError, DamagedError: the database refuses the statement, or is damaged.
            LockOrderError: the thread holds a lock that comes later.
            VerificationError: the shared state or a new gallery is damaged; nothing was deleted.
        """
        self._state.catch_up()
        with self._lock_names():
            hosted = self._hosted.get(name)
            if hosted is None and name in self._reasons:
                finish = self._home.remove(name)
                self._clear_reason(name)
                finish()
                return
            if hosted is None or hosted.is_closing:
                raise _unknown(name)
            hosted.is_closing = True
        try:
            check_lock_order(LockLevel.GALLERY, name)
            if not hosted.use_counter.close(_DRAIN_SECONDS):
                raise BusyError(
                    f"gallery {name!r} cannot be deleted: calls have used it for "
                    f"{_DRAIN_SECONDS:.0f} seconds; try again when they have ended"
                )
            # Before the removal: an open store could open the file of a later gallery of this name.
            hosted.store.close()
            with self._lock_names():
                finish = self._home.remove(name)
                with self._update_lock:
                    self._hosted = {n: h for n, h in self._hosted.items() if n != name}
                self._clear_reason(name)
        except BaseException:
            hosted.store.reopen()
            hosted.is_closing = False
            hosted.use_counter.reopen()
            raise
        hosted.close()
        finish()

    def close(self) -> None:
        """Close all galleries, one after another, also after an error. A second call does nothing.

        Raises:
            BusyError: a call that still uses a file does not end within a minute; the other
                galleries are closed.
        """
        with ExitStack() as closing:
            for hosted in self._hosted.values():
                closing.callback(hosted.close)

    def _clear_reason(self, name: str) -> None:
        """Forget why a gallery was set aside: a new one of this name is another gallery."""
        if name not in self._reasons:
            return
        with self._update_lock:
            self._reasons = {n: why for n, why in self._reasons.items() if n != name}
        self.on_quarantine()

    @contextmanager
    def _lock_names(self) -> Iterator[None]:
        check_lock_order(LockLevel.NAMES)
        with self._names, hold_level(LockLevel.NAMES):
            yield


def _unknown(name: str) -> NotFoundError:
    return NotFoundError(
        f"no gallery has the name {name[:64]!r}; create it first with `gateway gallery create`, "
        "or choose one that `gateway gallery list` shows"
    )
