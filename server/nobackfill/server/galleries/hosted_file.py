"""A gallery in a file: live views of the spaces it is searched in, their bases, its items' origins.

A base is a graph that is made, renewed or inherited, tuned, and kept in a file beside the gallery.
"""

import contextlib
import re
import struct
import sys
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import structlog

from nobackfill import durable
from nobackfill.errors import CannotWriteError, NotFoundError, VerificationError
from nobackfill.gallery.connections import Residents
from nobackfill.gallery.filter_engine import FilterEngine
from nobackfill.gallery.filters import Matches
from nobackfill.gallery.listing import CarriedLabels
from nobackfill.gallery.reading import StoredItem
from nobackfill.gallery.search import hnsw
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.hnsw import HnswIndex
from nobackfill.gallery.search.index import Content, Index, Labels, Neighbours, Rows, search_origins
from nobackfill.gallery.search.view import LiveView, Opener, Snapshot
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.store import Change
from nobackfill.gallery.upgrade import Carrying
from nobackfill.server.galleries import locks
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.galleries.locks import Level
from nobackfill.server.galleries.plan import Plan
from nobackfill.server.galleries.ranking import PlanPart, Score
from nobackfill.v1 import search_pb2 as pb
from nobackfill.v1 import types_pb2 as types
from nobackfill.vectors import Vectors
from nobackfill.wire.values import ORIGINS, fill_value

# Hits as the bytes of their messages: what a hit says of its item is made once, and its distance
# and score are put between.

# Fields 2 and 3 of Hit, each a tag and a float: a distance is written even where it is 0.
_DISTANCE, _SCORED = struct.Struct("<Bf"), struct.Struct("<BfBf")
_DISTANCE_TAG, _SCORE_TAG = 0x15, 0x1D
# Field 7 of Hit, set.
_BEYOND = b"\x38\x01"
# Field 1 of SearchResponse, with a length.
_HITS_TAG = b"\x0a"


class HitBytes(NamedTuple):
    """One item's hit in one space: `scored`, or `plain` without a score, then distance and score,
    then `rest`. `origin` as the wire names it. `beyond`: in place of `scored` where the hit lies
    beyond the calibration, which it ends with."""

    scored: bytes
    plain: bytes
    rest: bytes
    origin: types.Origin
    beyond: bytes


def hit_bytes(item: StoredItem, release: int) -> HitBytes | None:
    """Of an item whose vector `release` made; None if it has no vector now."""
    if item.origin is None:
        return None
    head = pb.Hit(id=item.id).SerializeToString()
    message = pb.Hit(release=release, origin=ORIGINS[item.origin])
    for key, value in item.metadata.items():
        fill_value(value, message.metadata[key])
    # Fields come in the order of their numbers, so that a parser meets what it expects.
    rest = message.SerializeToString(deterministic=True)
    size = len(head) + len(rest)
    return HitBytes(
        _HITS_TAG + _varint(size + _SCORED.size) + head,
        _HITS_TAG + _varint(size + _DISTANCE.size) + head,
        rest,
        ORIGINS[item.origin],
        _HITS_TAG + _varint(size + _SCORED.size + len(_BEYOND)) + head,
    )


def joined(
    hits: Sequence[HitBytes], distances: Sequence[float], scores: Sequence[Score | None]
) -> bytes:
    """`hits` of a SearchResponse, in this order."""
    parts: list[bytes] = []
    for hit, distance, score in zip(hits, distances, scores, strict=True):
        if score is None:
            parts += (hit.plain, _DISTANCE.pack(_DISTANCE_TAG, distance), hit.rest)
        else:
            told = _SCORED.pack(_DISTANCE_TAG, distance, _SCORE_TAG, score.value)
            if score.beyond:
                parts += (hit.beyond, told, hit.rest, _BEYOND)
            else:
                parts += (hit.scored, told, hit.rest)
    return b"".join(parts)


def _varint(value: int) -> bytes:
    """Of a length, as protobuf writes it."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


# Items by label, kept in memory: what a hit says of an item, read from SQLite once.

# Of the items of one gallery in one space, in memory.
MOST_BYTES = 64 << 20
# An Item, its id and an empty dict, and the bytes of its hit.
_ITEM_BYTES = 900


class ItemCache:
    """Items as one space shows them. A label's id never changes; its metadata and origin may.

    An entry is dropped after the commit that changed it, and one that was read while any commit
    went by is used but not kept, so that nothing stale stays.
    """

    def __init__(self, store: Carrying, space: str) -> None:
        self._store = store
        self._space = space
        self._lock = threading.Lock()
        self._commits = 0
        self._items: OrderedDict[int, StoredItem] = OrderedDict()
        # Of those items, as far as they were asked for.
        self._shown: dict[int, HitBytes] = {}
        self._bytes = 0

    def get(self, labels: Sequence[int]) -> list[StoredItem | None]:
        """Items in the order of `labels`; None for those deleted meanwhile."""
        known = self._items
        found = [known.get(label) for label in labels]
        missing = [label for label, item in zip(labels, found, strict=True) if item is None]
        if not missing:
            return found
        commits = self._commits
        read = self._store.items(missing, self._space)
        with self._lock:
            if commits == self._commits:
                self._keep([item for item in read if item is not None])
        rest = iter(read)
        return [next(rest) if item is None else item for item in found]

    @property
    def known(self) -> Mapping[int, HitBytes]:
        """What `shown` has made of items that are in memory."""
        return self._shown

    def shown(
        self, labels: Sequence[int], make: Callable[[StoredItem], HitBytes | None]
    ) -> list[HitBytes] | None:
        """Hits of `labels`, in order; None if one is of an item that is not in memory. `make` is
        the same at each call."""
        known = self._shown
        found: list[HitBytes] = []
        for label in labels:
            hit = known.get(label)
            if hit is None:
                item = self._items.get(label)
                hit = None if item is None else make(item)
                if hit is None:
                    return None
                with self._lock:
                    if self._items.get(label) is item:
                        known[label] = hit
            found.append(hit)
        return found

    def _keep(self, items: Sequence[StoredItem]) -> None:
        """Under the lock. The oldest make room."""
        for item in items:
            if item.label not in self._items:
                self._bytes += size_of(item)
                self._items[item.label] = item
        while self._bytes > MOST_BYTES:
            self._drop(next(iter(self._items)))

    def _drop(self, label: int) -> None:
        self._shown.pop(label, None)
        item = self._items.pop(label, None)
        if item is not None:
            self._bytes -= size_of(item)

    def forget(self, labels: Sequence[int]) -> None:
        """Drop items that a commit has just changed."""
        with self._lock:
            self._commits += 1
            for label in labels:
                self._drop(label)

    def on_change(self, change: Change) -> None:
        """A listener for Store.subscribe."""
        labels = change.deleted.tolist() + change.described.tolist()
        if self._space in change.added:
            labels += change.added[self._space][0].tolist()
        self.forget(labels)


def size_of(item: StoredItem) -> int:
    """About how much memory an item and its hit take, in bytes."""
    size = 0
    for key, value in item.metadata.items():
        size += sys.getsizeof(key) + sys.getsizeof(value)
        if not isinstance(value, str | int | float):
            size += sum(map(sys.getsizeof, value))
    return _ITEM_BYTES + 2 * size


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
        locks.check_lock_order(Level.VIEW, self.name)
        with self._making, locks.hold_level(Level.VIEW, self.name):
            view = self._views.get(space)
            if view is None:
                begin = beginning(self.index_path(space), source, between)
                view = LiveView(self.store, space, begin)
                self._views = {**self._views, space: view}
            return view

    def views(self) -> Mapping[str, LiveView]:
        return self._views

    def items(self, labels: list[int], space: str) -> list[StoredItem | None]:
        return self.items_of(space).get(labels)

    def items_of(self, space: str) -> ItemCache:
        """The items that are kept in memory as `space` shows them."""
        cache = self._items.get(space)
        if cache is None:
            with self._lock:
                cache = self._items.setdefault(space, ItemCache(self.store, space))
        return cache

    def search(
        self,
        parts: Sequence[PlanPart],
        queries: Sequence[Vectors],
        k: int,
        allowed: Matches | None,
        ef: int,
    ) -> list[Neighbours]:
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
        self, part: PlanPart, snapshot: Snapshot, queries: Vectors, k: int,
        allowed: Matches | None = None, ef: int = 0,
    ) -> Neighbours:  # fmt: skip
        """What a part answers, its snapshot being this: the nearest, or, where carried and native
        vectors do not compare, the best along its scale."""
        mask = None if allowed is None else allowed.mask
        carried = self.origins.mixed(part, snapshot)
        if carried is None or part.scale is None:
            return snapshot.search(queries, k, mask, ef)
        return search_origins(
            lambda chosen: snapshot.search(queries, k, chosen, ef),
            carried.origins, part.scale, k, mask,
        )  # fmt: skip

    def _snapshots(self, parts: Sequence[PlanPart]) -> list[Snapshot]:
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

    def compares(self, part: PlanPart, ef: int) -> bool:
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
        locks.check_lock_order(Level.VIEW, self.name)
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
    dead = len(base.graph) - len(snapshot.base)
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
        self._carried: Mapping[str, CarriedLabels] = {}

    def known(self, part: PlanPart) -> bool:
        """Whether `mixed` answers without reading the file."""
        return part.scale is None or part.space in self._carried

    def mixed(self, part: PlanPart, snapshot: Snapshot) -> CarriedLabels | None:
        """What tells the origins of the vectors of a part; None where their distances rank them:
        without a scale, and while they are all of one origin."""
        if part.scale is None:
            return None
        carried = self._carried.get(part.space)
        if carried is None:
            carried = self._read(part.space)
        return carried if 0 < len(carried) < len(snapshot) else None

    def _read(self, space: str) -> CarriedLabels:
        with self._lock:
            carried = self._carried.get(space)
            if carried is None:
                carried = CarriedLabels(self._store, space)
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


# Galleries in files: a folder each, made and deleted by a rename.

NAME = re.compile(r"^[a-z0-9_-]{1,64}\Z")
_FILE = "gallery.sqlite"
# A folder with this prefix is a gallery being made or deleted when the gateway died.
_UNFINISHED = ".tmp-"


class Home(Protocol):
    """Where galleries are kept, by name."""

    def sweep(self) -> None:
        """Remove what was never finished, before anything is opened. Raises CannotWriteError."""
        ...

    def names(self) -> Iterable[str]:
        """Those that are there, in order."""
        ...

    def open(self, name: str) -> Hosted:
        """Raises VerificationError, NotFoundError, BusyError, UnavailableError."""
        ...

    def create(self, name: str, specs: Sequence[SpaceSpec], state: Mapping[str, Any]) -> None:
        """A gallery with these spaces, the last of them active, as the last step. Raises
        CannotWriteError, AlreadyExistsError."""
        ...

    def remove(self, name: str) -> Callable[[], None]:
        """Take a gallery away that nobody uses: from here on it is gone. What is returned is to be
        called once it is closed. Raises CannotWriteError."""
        ...


class InFiles:
    """What is said of each method: Home."""

    def __init__(self, folder: Path, residents: Residents) -> None:
        """`residents` bounds how many of their files are open at once."""
        self._folder = folder
        self._residents = residents

    def sweep(self) -> None:
        durable.make_dir(self._folder, 0o700)
        durable.sweep(self._folder)

    def names(self) -> list[str]:
        if not self._folder.is_dir():
            return []
        folders = sorted(self._folder.iterdir())
        return [one.name for one in folders if NAME.match(one.name) and (one / _FILE).is_file()]

    def open(self, name: str) -> Hosted:
        folder = self._folder / name
        store = SqliteGallery.open(folder / _FILE, self._residents)
        try:
            return HostedInFile(name, folder, store)
        except BaseException:
            store.close()
            raise

    def create(self, name: str, specs: Sequence[SpaceSpec], state: Mapping[str, Any]) -> None:
        unfinished = self._unfinished(name)
        durable.make_dir(unfinished, 0o700)
        with SqliteGallery.create(unfinished / _FILE, specs[0]) as store:
            for spec in specs[1:]:
                store.begin(spec)
                store.flip(spec.space)
            store.state_set(state)
        durable.publish_dir(unfinished, self._folder / name)

    def remove(self, name: str) -> Callable[[], None]:
        gone = self._unfinished(name)
        durable.publish_dir(self._folder / name, gone)
        return lambda: durable.remove_tree(gone)

    def _unfinished(self, name: str) -> Path:
        return self._folder / f"{_UNFINISHED}{name}-{uuid.uuid4().hex}"
