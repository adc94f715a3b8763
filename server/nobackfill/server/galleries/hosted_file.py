"""A gallery in a file: live views of the spaces it is searched in, their bases, its items' origins.

A base is a graph that is made, renewed or inherited, tuned, and kept in a file beside the gallery.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from nobackfill.errors import CannotWriteError, NotFoundError, VerificationError
from nobackfill.gallery.carried import Carried
from nobackfill.gallery.change import Change
from nobackfill.gallery.filter_engine import FilterEngine
from nobackfill.gallery.matches import Matches
from nobackfill.gallery.search import hnsw, origins
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.hnsw import HnswIndex
from nobackfill.gallery.search.index import Content, Index, Labels, Neighbours, Rows
from nobackfill.gallery.search.view import LiveView, Opener, Snapshot
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.stored_vectors import Item
from nobackfill.server.galleries import lock_order
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.galleries.items import ItemCache
from nobackfill.server.galleries.lock_order import Level
from nobackfill.server.galleries.plan import Part, Plan
from nobackfill.vectors import Vectors

log = structlog.get_logger("server.indexing")

# Fewer vectors than this are searched exactly, faster than by a graph.
SMALL = 2_000
# A base is made anew when so many vectors lie beside it or so large a share of it is dead.
LARGEST_DELTA = 4_000
_LARGEST_SHARE = 0.2


class HostedInFile(Hosted):
    """One gallery in a file, searched in this process by a live view of each space."""

    store: SqliteGallery

    def __init__(self, name: str, folder: Path, store: SqliteGallery) -> None:
        """`folder`: where indexes are kept."""
        # Held to make or drop views. The mapping is replaced: a search of a view that is there does
        # not wait while another is read.
        self._making = threading.Lock()
        self._views: Mapping[str, LiveView] = {}
        self._items: dict[str, ItemCache] = {}
        self.origins = Origins(store)
        self._rest: tuple[Snapshot, Snapshot, Snapshot] | None = None
        self.ready: dict[str, Any] = {}  # by space, what ImmediateAnswers have made
        super().__init__(name, folder, store, FilterEngine(store))

    def check_whole(self) -> None:
        """A file has no parts that can be missing."""

    def wake(self) -> None:
        if not self._views:
            self._wake(self.plan)

    def _prepare(self, plan: Plan) -> None:
        if self._views:
            self._wake(plan)

    def _wake(self, plan: Plan) -> None:
        for space in plan.searched():
            self.view(space)

    def view(
        self, space: str, source: LiveView | None = None, between: Callable[[], None] = lambda: None
    ) -> LiveView:  # fmt: skip
        """The live view of a space, made when it is first asked for: with the index that is kept of
        it, or that it inherits from `source`. `between` may raise to give up."""
        view = self._views.get(space)
        if view is not None:
            return view
        lock_order.check(Level.VIEW, self.name)
        with self._making, lock_order.holding(Level.VIEW, self.name):
            view = self._views.get(space)
            if view is None:
                begin = beginning(self.index_path(space), source, between)
                view = LiveView(self.store, space, begin)
                self._views = {**self._views, space: view}
            return view

    def views(self) -> Mapping[str, LiveView]:
        return self._views

    def items(self, labels: list[int], space: str) -> list[Item | None]:
        return self.items_of(space).get(labels)

    def items_of(self, space: str) -> ItemCache:
        """The items that are kept in memory as `space` shows them."""
        cache = self._items.get(space)
        if cache is None:
            with self._lock:
                cache = self._items.setdefault(space, ItemCache(self.store, space))
        return cache

    def search(
        self, parts: Sequence[Part], queries: Sequence[Vectors], k: int, allowed: Matches | None,
        ef: int,
    ) -> list[Neighbours]:  # fmt: skip
        snapshots = self._snapshots(parts)
        found = [
            self.best(part, snapshot, column, k, allowed, ef)
            for part, snapshot, column in zip(parts, snapshots, queries, strict=True)
        ]
        if not ef:
            # What was asked of a graph, which is tuned on some of it.
            for part, snapshot, column in zip(parts, snapshots, queries, strict=True):
                if not isinstance(snapshot.base.index, ExactIndex):
                    self.view(part.space).asked.see(column)
        return found

    def best(
        self, part: Part, snapshot: Snapshot, queries: Vectors, k: int,
        allowed: Matches | None = None, ef: int = 0,
    ) -> Neighbours:  # fmt: skip
        """What a part answers, its snapshot being this: the nearest, or, where carried and native
        vectors do not compare, the best along its scale."""
        mask = None if allowed is None else allowed.mask
        carried = self.origins.mixed(part, len(snapshot))
        if carried is None or part.scale is None:
            return snapshot.search(queries, k, mask, ef)
        return origins.search(
            lambda chosen: snapshot.search(queries, k, chosen, ef),
            carried.origins, part.scale, k, mask,
        )  # fmt: skip

    def _snapshots(self, parts: Sequence[Part]) -> list[Snapshot]:
        """One snapshot a part, each item in the first part that has it.

        The later part is taken first: what moves to the earlier part between the two is then left
        out of the later one, and never missing from both.
        """
        if len(parts) == 1:
            return [self.view(parts[0].space).snapshot()]
        new, old = parts
        before = self.view(old.space).snapshot()
        upgraded = self.view(new.space).snapshot()
        return [upgraded, self.rest(before, upgraded)]

    def rest(self, snapshot: Snapshot, other: Snapshot) -> Snapshot:
        """What `snapshot` has and `other` has not; kept for the next search of the same two."""
        known = self._rest
        if known is not None and known[0] is snapshot and known[1] is other:
            return known[2]
        self._rest = snapshot, other, snapshot.without(other.labels())
        return self._rest[2]

    def compares(self, part: Part, ef: int) -> bool:
        base = self.view(part.space).snapshot().base
        return isinstance(base.index, ExactIndex) or ef >= len(base.index.labels)

    def expect(self, space: str) -> None:
        self.view(space)

    def make_ready(self, space: str, between: Callable[[], None]) -> None:
        """Give a space that an upgrade has filled its first index; `between` may raise to stop.
        Where the release was active before a rollback, its own index is still there; what cannot be
        inherited is built."""
        source = self.view(self.spec().space)
        view = self.view(space, source, between)
        self._inherit_index(space, view, source, between)

    def forget_views(self, plan: Plan) -> None:
        self._rest = None
        lock_order.check(Level.VIEW, self.name)
        with self._making:
            kept = plan.searched()
            gone = [view for space, view in self._views.items() if space not in kept]
            self._views = {space: v for space, v in self._views.items() if space in kept}
        for view in gone:
            view.close()
        self.origins.keep(kept)
        with self._lock:
            self._items = {space: one for space, one in self._items.items() if space in kept}
            self.ready = {}

    def drop(self, space: str) -> None:
        super().drop(space)
        self.index_path(space).unlink(missing_ok=True)

    def close(self) -> None:
        self.origins.keep(())
        for view in self.views().values():
            view.close()
        super().close()

    def _forward(self, change: Change) -> None:
        super()._forward(change)
        for cache in list(self._items.values()):
            cache.on_change(change)

    def index_path(self, space: str) -> Path:
        """Where the index of a space is cached."""
        return self.folder / f"{space}.hnsw"

    def make_index(
        self, space: str, view: LiveView, between: Callable[[], None], threads: hnsw.Threads
    ) -> None:
        """Give the view a base of all its vectors: its own, renewed, or a fresh graph.

        `between` is called now and then, and may raise to give up; `threads` as in hnsw.build.
        """
        base = view.snapshot().base.index
        old = base if isinstance(base, HnswIndex) and base.fresh else None
        self._compact(view, old, between, threads)
        self._save_index(space, view)

    def _inherit_index(
        self, space: str, view: LiveView, source: LiveView, between: Callable[[], None]
    ) -> None:
        """After an upgrade: the graph of the space before, over the new vectors, unless the view
        began with one. It serves at once; a fresh one follows in the background. `between` as in
        `make_index`."""
        if isinstance(view.snapshot().base.index, HnswIndex) or not due(view):
            self._save_index(space, view)
            return
        base = source.snapshot().base.index
        self._compact(view, base if isinstance(base, HnswIndex) else None, between)
        self._save_index(space, view)

    def _compact(
        self,
        view: LiveView,
        old: HnswIndex | None,
        between: Callable[[], None],
        threads: hnsw.Threads = hnsw.one_thread,
    ) -> None:
        began = time.monotonic()

        def build(spec: SpaceSpec, labels: Labels, vectors: Content) -> Index:
            base = hnsw.renew(spec, labels, vectors, old=old, threads=threads, between=between)
            return tuned(base, view, between)

        view.compact(build)
        seconds = round(time.monotonic() - began, 3)
        log.info("indexed", gallery=self.name, items=len(view.snapshot()), seconds=seconds)

    def _save_index(self, space: str, view: LiveView) -> None:
        """Keep the base for the next start: changes since are found in the gallery itself."""
        index = view.snapshot().base.index
        try:
            if isinstance(index, HnswIndex):
                index.save(self.index_path(space))
        except CannotWriteError as error:
            # It is a cache: the next start builds again.
            log.warning("index not saved", error=str(error))


def due(view: LiveView) -> bool:
    """Whether a view has changed enough since its base was made, or its base was only carried."""
    snapshot = view.snapshot()
    total, base = len(snapshot), snapshot.base.index
    if total < SMALL:
        return False
    if not isinstance(base, HnswIndex) or not base.fresh:
        return True
    # Also what was deleted before the gateway started.
    dead = base.graph.get_current_count() - len(snapshot.base)
    return len(snapshot.delta) > max(LARGEST_DELTA, _LARGEST_SHARE * len(base.labels)) or (
        dead > _LARGEST_SHARE * len(base.labels)
    )


def tuned(base: Index, view: LiveView, between: Callable[[], None]) -> Index:
    """A graph as wide as finds what is really asked of the view; `between` as in
    `HostedInFile.make_index`."""
    queries = view.asked.sample()
    if not isinstance(base, HnswIndex) or not len(queries):
        return base
    index = hnsw.tuned(base, queries, between)
    if index.ef != base.ef:
        log.info("tuned", ef=index.ef, before=base.ef)
    return index


def beginning(
    path: Path, source: LiveView | None = None, between: Callable[[], None] = lambda: None
) -> Opener:
    """Take the index at `path`, with tombstones for what is gone and what came since beside it;
    else the links of `source`'s. Neither builds anything. `between` may raise to give up."""

    def begin(spec: SpaceSpec, labels: Labels, vectors: Content) -> tuple[Index, Rows]:
        if len(labels) < SMALL:
            raise NotFoundError("searched exactly: a few vectors only")
        with contextlib.suppress(NotFoundError):
            try:
                return hnsw.load(path, spec, labels, vectors)
            except VerificationError as error:
                log.warning("index file refused, building anew", error=str(error))
                path.unlink(missing_ok=True)
        base = None if source is None else source.snapshot().base.index
        if not isinstance(base, HnswIndex):
            raise NotFoundError("there is no graph to inherit")
        return hnsw.revive(base.skeleton(sums=False), spec, labels, vectors, between)

    return begin


class Origins:
    """Which spaces of a gallery hold carried and native vectors that are ranked along a scale."""

    def __init__(self, store: SqliteGallery) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._carried: Mapping[str, Carried] = {}

    def known(self, part: Part) -> bool:
        """Whether `mixed` answers without reading the file."""
        return part.scale is None or part.space in self._carried

    def mixed(self, part: Part, vectors: int) -> Carried | None:
        """What tells the origins of the `vectors` of a part; None where their distances rank them:
        without a scale, and while they are all of one origin."""
        if part.scale is None:
            return None
        carried = self._carried.get(part.space)
        if carried is None:
            carried = self._read(part.space)
        return carried if 0 < len(carried) < vectors else None

    def _read(self, space: str) -> Carried:
        with self._lock:
            carried = self._carried.get(space)
            if carried is None:
                carried = Carried(self._store, space)
                try:
                    carried.load()
                except BaseException:
                    carried.close()
                    raise
                self._carried = {**self._carried, space: carried}
            return carried

    def keep(self, spaces: Collection[str]) -> None:
        """Let go of all other spaces."""
        with self._lock:
            gone = [one for space, one in self._carried.items() if space not in spaces]
            self._carried = {s: one for s, one in self._carried.items() if s in spaces}
        for one in gone:
            one.close()
