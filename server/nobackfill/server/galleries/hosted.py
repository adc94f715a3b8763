"""A gallery being served, whatever keeps it: its store, its plan, and what is counted of it."""

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

# What a token may have its galleries hold together.


@dataclass(frozen=True)
class Allowance:
    """At most `items` in the galleries of these names."""

    galleries: frozenset[str]
    items: int

    def check(self, there: int, new: int) -> None:
        """Raises ItemQuotaError where `new` items beside those that are `there` are too many."""
        if new and there + new > self.items:
            raise ItemQuotaError(
                f"expected at most {self.items} items in {few(sorted(self.galleries))} together "
                f"under this token, {there} are there and {new} more came; delete some, or ask its "
                "operator for more"
            )


# How long searches of a gallery take: slow ones keep to a lane of their kind.

# Slower than this, in the mean of the last few searches.
_SLOW_S = 0.02
_SMOOTHING = 0.2
# Settles where two searches of five take longer.
_LONGER, _SHORTER = 1.06, 0.96
# Searches are answered where they arrive while they usually take less: meanwhile nothing else that
# arrives is looked at.
_QUICK_S = 0.001
# Where fewer answers than this share have all their items in memory, one query in so many is
# searched where it arrives: the others would be searched there for nothing.
_MOSTLY, _TRIED = 0.5, 16
_MEMORY = 0.1
# So many numbers compared take as long.
_QUICK_ELEMENTS = 1 << 20
# So many numbers compared by each search take as long: known before the first is asked.
_SLOW_ELEMENTS = 1 << 24


class Speed:
    """Of the searches of one gallery."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._usual = _QUICK_S / 4
        self._whole = 1.0
        self._queries = 0

    def took(self, seconds: float, queries: int = 1) -> None:
        """Count one search, of so many queries at once."""
        self._mean += _SMOOTHING * (seconds - self._mean)
        # However long one waits for its turn, it is one of many: the share of longer ones counts.
        self._usual *= _LONGER if seconds > queries * self._usual else _SHORTER

    def took_whole(self, seconds: float, queries: int) -> None:
        """Count searches where they arrived, all their items in memory."""
        self.took(seconds, queries)
        self._queries += queries
        self._whole = 1 - (1 - self._whole) * (1 - _MEMORY) ** queries

    @property
    def at_its_best(self) -> bool:
        """Whether searches are quick, and mostly find their items in memory."""
        return self._usual < _QUICK_S and self._whole > _MOSTLY

    def quick(self, snapshot: Snapshot) -> bool:
        """Whether a search of the snapshot takes hardly longer than handing it on."""
        return self._usual < _QUICK_S and light(snapshot)

    def tried(self, *, whole: bool) -> None:
        """Count a search where it arrived. `whole`: all its items were in memory."""
        self._whole += _MEMORY * (whole - self._whole)

    def worth_a_try(self) -> bool:
        """Whether to search where a query arrives: not where items mostly have to be read."""
        self._queries += 1
        return self._whole > _MOSTLY or self._queries % _TRIED == 0

    def slow(self, views: Iterable[LiveView]) -> bool:
        """Whether searches of these views take long at present: most galleries where they do have
        no graph yet."""
        compared = sum(view.snapshot().compared for view in views)
        return self._mean > _SLOW_S or compared > _SLOW_ELEMENTS


def light(snapshot: Snapshot) -> bool:
    """Whether a search of the snapshot compares little, whatever else the machine does."""
    return snapshot.compared < _QUICK_ELEMENTS


# Keys of `Hosted.state`: how the gallery came to its staging space, and why it stays behind.
ROLLOUT, NOTE = "rollout", "note"
# Whether answers bring distances as they were computed.
EXACT = "exact_distances"


class Hosted(ABC):
    """One open gallery.

    `users` are all who work with it, `Galleries` counts them; `leaving` is set while its deletion
    waits for the last. `plan` is one reference, set by `replan`: a call takes it once, by `using`,
    and keeps to it.
    `write_lock` is shared by puts, and exclusive to whoever changes the gallery's spaces.
    """

    # Its number in a store: another gallery of the same name has another one.
    number = 0
    store: GalleryStore
    plan: Plan

    def __init__(self, name: str, folder: Path, store: GalleryStore, filtering: Filtering) -> None:
        """`filtering`: what answers filters."""
        self.name, self.folder, self.store = name, folder, store
        self.users = Users(Level.GALLERY, name)
        self.leaving = False
        self.write_lock = WriteLock(name)
        self._lock = threading.Lock()
        store.subscribe(self._forward)
        self.filtering = filtering
        # What the store says, kept so that looking over all galleries opens no files.
        self._spaces: tuple[SpaceInfo, ...] | None = None
        self._state: Mapping[str, Any] | None = None
        # Replaced at each change: what was counted before it lands in a mapping nobody reads.
        self._counts: dict[str | None, int] = {}
        self.exact = bool(self.state(EXACT))
        self.speed = Speed()

    def enter_plan(self) -> Plan:
        """The plan that there is now, used by one more: who enters it leaves its `users`."""
        while True:
            plan = self.plan
            plan.users.enter()
            if plan is self.plan:
                return plan
            plan.users.leave()

    @contextmanager
    def using(self) -> Iterator[Plan]:
        """The plan, one of its `users` being the caller."""
        plan = self.enter_plan()
        try:
            with locks.hold_level(Level.PLAN, self.name):
                yield plan
        finally:
            plan.users.leave()

    def replan(
        self, state: State, manifests: Mapping[int, Manifest], answerer_of: AnswererOf,
        before: Callable[[Plan], None],
    ) -> Plan:  # fmt: skip
        """Make the plan anew from the gallery's spaces; returns the one before.

        What searches of it need is made before it is seen; `forget_views` lets go of what no plan
        needs. `before` it is seen, it may be refused.
        Raises ConfigurationError for a space of a release that is not published here.
        """
        spaces, rollout, epoch = self._read()
        if missing := {info.spec.release for info in spaces} - set(manifests):
            raise ConfigurationError(
                f"gallery {self.name!r} lives in release {max(missing)}, which is not published "
                "here; give the publication folder it was made with"
            )
        source, both = self.state(SOURCE) is not None, bool(self.state(BOTH))
        new = make_plan(
            spaces, state, manifests, answerer_of, rollout, epoch, source=source, both=both
        )
        before(new)
        self._prepare(new)
        old, self.plan = getattr(self, "plan", new), new
        return old

    def _read(self) -> tuple[Sequence[SpaceInfo], Filling | None, int]:
        """What a plan is made of: spaces, rollout, epoch."""
        return self.spaces(), self.state(ROLLOUT), 0

    def put(
        self, plan: Plan, ids: Sequence[str], vectors: Sequence[NewVectors],
        digests: Sequence[str | None], metadata: Sequence[Metadata | None],
        allowance: Allowance | None = None,
    ) -> None:  # fmt: skip
        """Store what `plan` made of items. Raises OutdatedError where another gateway has replaced
        it, ItemQuotaError beyond the `allowance`, and as `store.put`."""
        self.store.put(ids, vectors, digests=digests, metadata=metadata)

    @abstractmethod
    def check_whole(self) -> None:
        """Raises DamagedError where a part of the gallery is missing that nobody has dropped."""

    @abstractmethod
    def wake(self) -> None:
        """Make the views that the plan searches: of a gallery that is opened at the start they are
        made at its first use, unless it is large."""

    @abstractmethod
    def _prepare(self, plan: Plan) -> None:
        """Make what searches of a plan need, unless `wake` is to make it."""

    def views(self) -> Mapping[str, LiveView]:
        """Every live view there is in this process, by space."""
        return {}

    @abstractmethod
    def forget_views(self, plan: Plan) -> None:
        """Let go of the views that `plan` does not search; nobody may use an older one by now."""

    @abstractmethod
    def items(self, labels: list[int], space: str) -> list[StoredItem | None]:
        """Items as `space` shows them, in order; None for those deleted meanwhile."""

    def spaces_of(self, label: int) -> list[str]:
        """Spaces in which an item has a vector."""
        spaces = [info.spec.space for info in self.spaces()]
        return [space for space in spaces if self.store.vector(label, space) is not None]

    @abstractmethod
    def search(
        self,
        parts: Sequence[PlanPart],
        queries: Sequence[Vectors],
        k: int,
        allowed: Matches | None,
        ef: int,
    ) -> list[Neighbours]:
        """What each part answers to its queries [q, dim], each item in the first part that has it.
        `ef` as in Index.search. Raises InvalidInputError for queries that are none."""

    @abstractmethod
    def compares(self, part: PlanPart, ef: int) -> bool:
        """Whether a search of the part compares every vector, rather than ask a graph."""

    @abstractmethod
    def expect(self, space: str) -> None:
        """A space that is there is searched from now on: read it before puts have to wait."""

    @abstractmethod
    def make_ready(self, space: str, between: Callable[[], None]) -> None:
        """Give a space that an upgrade has filled its first index; `between` may raise to stop."""

    def drop(self, space: str) -> None:
        """Remove a space that no plan uses. Raises as `store.drop`."""
        self.store.drop(space)

    def spaces(self) -> tuple[SpaceInfo, ...]:
        """All spaces, oldest first, as of the last commit."""
        with self._lock:
            if self._spaces is None:
                self._spaces = tuple(self.store.spaces())
            return self._spaces

    def state(self, key: str) -> Any:
        """A small JSON value kept with the gallery, or None."""
        with self._lock:
            if self._state is None:
                self._state = self.store.state()
            return self._state.get(key)

    def remember(self, values: Mapping[str, Any]) -> None:
        """Keep small JSON values, durably; None removes. Raises BusyError, CannotWriteError."""
        try:
            self.store.state_set(values)
        finally:
            with self._lock:
                self._state = None

    def count(self) -> int:
        """Items, counted once after a commit."""
        return self._count(None)

    def sizes(self) -> Mapping[str, int]:
        """Vectors by space: counted by the views, and once after a commit where there are none."""
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
    def slow(self) -> bool:
        """Whether searches take long at present."""
        return self.speed.slow(self.views().values())

    def spec(self) -> SpaceSpec:
        """The space that is active in the store."""
        return next(info.spec for info in self.spaces() if info.state == "active")

    def answer_exactly(self, exact: bool) -> None:
        """Whether answers bring distances as they were computed, from now on."""
        self.remember({EXACT: exact})
        self.exact = exact

    def close(self) -> None:
        self.store.unsubscribe(self._forward)
        self.filtering.close()
        self.store.close()

    def _forward(self, change: Change) -> None:
        with self._lock:
            self._counts = {}
            if change.spaces:
                # Whoever moves spaces may set state with it.
                self._spaces = self._state = None
