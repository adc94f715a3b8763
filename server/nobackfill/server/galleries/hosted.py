"""Serve one gallery, whatever stores it: its store, its plan, its counts and its speed."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nobackfill.errors import ConfigurationError, ItemQuotaError, few
from nobackfill.gallery.filters import Filtering, Matches
from nobackfill.gallery.gallery_store import GalleryStore
from nobackfill.gallery.reading import StoredItem
from nobackfill.gallery.search.index import Neighbours
from nobackfill.gallery.search.view import LiveView, Snapshot
from nobackfill.gallery.spec import Metadata, SpaceInfo, SpaceSpec
from nobackfill.gallery.store import Change, NewVectors
from nobackfill.release.manifest import Manifest
from nobackfill.server.galleries import locks
from nobackfill.server.galleries.locks import Level, Users, WriteLock
from nobackfill.server.galleries.plan import (
    BOTH,
    SOURCE,
    AnswererOf,
    Filling,
    Plan,
    make_plan,
)
from nobackfill.server.galleries.ranking import PlanPart
from nobackfill.server.state import State
from nobackfill.vectors import Vectors


@dataclass(frozen=True)
class Allowance:
    """Limit the galleries of a token to `items` items in total."""

    galleries: frozenset[str]
    items: int

    def check(self, present: int, new: int) -> None:
        """Check that new items fit.

        Args:
            present: items that the galleries have.
            new: items to be added; 0 always fits.

        Raises:
            ItemQuotaError: there would be too many items.
        """
        if new and present + new > self.items:
            raise ItemQuotaError(
                f"expected at most {self.items} items in {few(sorted(self.galleries))} for this "
                f"token, found {present} and {new} new ones; delete some items, or ask the "
                "operator for a larger quota"
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


class Speed:
    """Estimate how long searches of one gallery take."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._typical = _FAST_SECONDS / 4
        self._in_memory = 1.0
        self._queries = 0

    def record(self, seconds: float, queries: int = 1) -> None:
        """Record a search.

        Args:
            seconds: its duration.
            queries: number of queries that it answered at once.
        """
        self._mean += _SMOOTHING * (seconds - self._mean)
        # Only the share of longer searches counts, not how much longer they are: a search that
        # waited for its turn is one of many.
        self._typical *= _RAISE if seconds > queries * self._typical else _LOWER

    def record_immediate(self, seconds: float, queries: int) -> None:
        """Record searches on the receiving thread that found all their items in memory.

        Args:
            seconds: their duration.
            queries: number of queries.
        """
        self.record(seconds, queries)
        self._queries += queries
        self._in_memory = 1 - (1 - self._in_memory) * (1 - _MEMORY_SMOOTHING) ** queries

    @property
    def is_fast(self) -> bool:
        """Whether searches are fast, and mostly find their items in memory."""
        return self._typical < _FAST_SECONDS and self._in_memory > _MIN_IN_MEMORY

    def is_quick(self, snapshot: Snapshot) -> bool:
        """Tell whether a search of a snapshot takes no longer than handing it to a thread."""
        return self._typical < _FAST_SECONDS and is_light(snapshot)

    def record_attempt(self, *, in_memory: bool) -> None:
        """Record a search on the receiving thread; `whole` tells whether all its items were in
        memory.
        """
        self._in_memory += _MEMORY_SMOOTHING * (in_memory - self._in_memory)

    def should_try(self) -> bool:
        """Tell whether to search on the receiving thread: not if items are mostly read from
        disk.
        """
        self._queries += 1
        return self._in_memory > _MIN_IN_MEMORY or self._queries % _TRY_INTERVAL == 0

    def is_slow(self, views: Iterable[LiveView]) -> bool:
        """Tell whether searches of some views are slow at present, as without a graph."""
        comparisons = sum(view.snapshot().compared for view in views)
        return self._mean > _SLOW_SECONDS or comparisons > _SLOW_ELEMENTS


def is_light(snapshot: Snapshot) -> bool:
    """Tell whether a search of a snapshot compares few numbers, however busy the machine is."""
    return snapshot.compared < _FAST_ELEMENTS


# Keys of `Hosted.state`: the rollout of the staging space, and why the gallery has not moved.
ROLLOUT, NOTE = "rollout", "note"
# Key of `Hosted.state`: answers have exact distances.
EXACT = "exact_distances"


class Hosted(ABC):
    """Serve one open gallery.

    `users` counts the calls that work with it. `is_closing` is set while its deletion waits for the
    last of them. `replan` replaces `plan`, one reference: a call takes it once, with `using`, and
    keeps it to its end. Puts share `write_lock`; a change of the gallery's spaces holds it
    exclusively.
    """

    # Number in its store: a later gallery of the same name has another number.
    number = 0
    store: GalleryStore
    plan: Plan

    def __init__(self, name: str, folder: Path, store: GalleryStore, filtering: Filtering) -> None:
        """Serve an open store.

        Args:
            name: the gallery's name.
            folder: folder for its indexes.
            store: the store; closed with the gallery.
            filtering: evaluates filters; closed with the gallery.
        """
        self.name, self.folder, self.store = name, folder, store
        self.users = Users(Level.GALLERY, name)
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
        self.exact = bool(self.state(EXACT))
        self.speed = Speed()

    def enter_plan(self) -> Plan:
        """Return the present plan with one more user; the caller leaves `plan.users`."""
        while True:
            plan = self.plan
            plan.users.enter()
            if plan is self.plan:
                return plan
            plan.users.leave()

    @contextmanager
    def using(self) -> Iterator[Plan]:
        """Use the present plan during a block."""
        plan = self.enter_plan()
        try:
            with locks.hold_level(Level.PLAN, self.name):
                yield plan
        finally:
            plan.users.leave()

    def replan(
        self, state: State, manifests: Mapping[int, Manifest], answerer_of: AnswererOf,
        check: Callable[[Plan], None],
    ) -> Plan:  # fmt: skip
        """Make the plan again from the gallery's spaces.

        Views that its searches need are made before it is used; `forget_views` frees the others.

        Args:
            state: the gateway's state.
            manifests: published releases by number.
            answerer_of: makes the plan's answerer.
            check: called with the new plan before it is used; it may raise to refuse the plan.

        Returns:
            The replaced plan; the new one if it is the first.

        Raises:
            ConfigurationError: the gallery has a space of a release that is not published here.
        """
        spaces, rollout, epoch = self._read()
        if missing := {info.spec.release for info in spaces} - set(manifests):
            raise ConfigurationError(
                f"gallery {self.name!r} has vectors of release {max(missing)}, which is not "
                "published here; start with the --model-repo that has this release"
            )
        source, both = self.state(SOURCE) is not None, bool(self.state(BOTH))
        new = make_plan(
            spaces, state, manifests, answerer_of, rollout, epoch, source=source, both=both
        )
        check(new)
        self._prepare(new)
        old, self.plan = getattr(self, "plan", new), new
        return old

    def _read(self) -> tuple[Sequence[SpaceInfo], Filling | None, int]:
        """Read the spaces, the rollout and the epoch, from which a plan is made."""
        return self.spaces(), self.state(ROLLOUT), 0

    def put(
        self, plan: Plan, ids: Sequence[str], vectors: Sequence[NewVectors],
        digests: Sequence[str | None], metadata: Sequence[Metadata | None],
        allowance: Allowance | None = None,
    ) -> None:  # fmt: skip
        """Store items whose vectors were made for a plan.

        Args:
            plan: the plan.
            ids: ids of the items, without repeats.
            vectors: vectors of all items, for each space of the plan.
            digests: digest of each item's content; None if unknown.
            metadata: metadata of each item; None keeps what it has.
            allowance: limit of the caller's items; None means no limit.

        Raises:
            OutdatedError: another gateway has replaced the plan.
            ItemQuotaError: there would be too many items.
            BusyError: the store is locked for too long.
            CannotWriteError: the store cannot be written.
        """
        self.store.put(ids, vectors, digests=digests, metadata=metadata)

    @abstractmethod
    def check_complete(self) -> None:
        """Check that no part of the gallery is missing.

        Raises:
            DamagedError: a part is missing that was not deleted by a gateway.
        """

    @abstractmethod
    def wake(self) -> None:
        """Make the views that the plan searches, unless they exist.

        A small gallery makes them at its first use, not at the start.
        """

    @abstractmethod
    def _prepare(self, plan: Plan) -> None:
        """Make what searches of a plan need, unless `wake` will do so."""

    def views(self) -> Mapping[str, LiveView]:
        """Return the live views in this process, by space."""
        return {}

    @abstractmethod
    def forget_views(self, plan: Plan) -> None:
        """Free the views that a plan does not search; no older plan may be in use."""

    @abstractmethod
    def items(self, labels: list[int], space: str) -> list[StoredItem | None]:
        """Read items as a space shows them.

        Args:
            labels: labels of the items.
            space: id of the space.

        Returns:
            The items in the order of `labels`; None for deleted ones.
        """

    def spaces_of(self, label: int) -> list[str]:
        """Return the spaces in which an item has a vector."""
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

        Args:
            parts: the parts; each item is found in the first part that has it.
            queries: for each part float32 [q, dim].
            k: most neighbours of each query.
            matches: items that may be found; None means all.
            ef: width of the graph search, as in Index.search; 0 means the index's own.

        Returns:
            The neighbours of all queries, for each part.

        Raises:
            InvalidInputError: a query is not a valid vector.
        """

    @abstractmethod
    def compares(self, part: PlanPart, ef: int) -> bool:
        """Tell whether a search of a part compares every vector instead of using a graph."""

    @abstractmethod
    def expect(self, space: str) -> None:
        """Load a space that is about to be searched, before a switch makes puts wait."""

    @abstractmethod
    def make_ready(self, space: str, check_stop: Callable[[], None]) -> None:
        """Make the first index of a space that an upgrade has filled.

        Args:
            space: id of the space.
            check_stop: called often; it may raise to stop.
        """

    def drop(self, space: str) -> None:
        """Delete a space that no plan uses.

        Raises:
            CannotWriteError: the store cannot be written.
        """
        self.store.drop(space)

    def spaces(self) -> tuple[SpaceInfo, ...]:
        """Return all spaces, oldest first, as of the last commit."""
        with self._lock:
            if self._spaces is None:
                self._spaces = tuple(self.store.spaces())
            return self._spaces

    def state(self, key: str) -> Any:
        """Return a small JSON value that is stored with the gallery; None without one."""
        with self._lock:
            if self._state is None:
                self._state = self.store.state()
            return self._state.get(key)

    def remember(self, values: Mapping[str, Any]) -> None:
        """Store small JSON values with the gallery, durably.

        Args:
            values: value by key; None deletes a key.

        Raises:
            BusyError: the store is locked for too long.
            CannotWriteError: the store cannot be written.
        """
        try:
            self.store.state_set(values)
        finally:
            with self._lock:
                self._state = None

    def count(self) -> int:
        """Return the number of items; cached until the next commit."""
        return self._count(None)

    def sizes(self) -> Mapping[str, int]:
        """Return the number of vectors by space, from views, or cached until the next commit."""
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
        """Whether searches of the gallery are slow at present."""
        return self.speed.is_slow(self.views().values())

    def spec(self) -> SpaceSpec:
        """Return the active space of the store."""
        return next(info.spec for info in self.spaces() if info.state == "active")

    def answer_exactly(self, exact: bool) -> None:
        """Set whether answers have exact distances instead of rounded ones, durably.

        Raises:
            CannotWriteError: the store cannot be written.
        """
        self.remember({EXACT: exact})
        self.exact = exact

    def close(self) -> None:
        """Close the store; no call may use the gallery."""
        self.store.unsubscribe(self._forward)
        self.filtering.close()
        self.store.close()

    def _forward(self, change: Change) -> None:
        with self._lock:
            self._counts = {}
            if change.spaces:
                # A change of spaces may also change the state.
                self._spaces = self._state = None
