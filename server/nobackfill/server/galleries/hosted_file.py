"""Serve a gallery in a file: a live view of each space that is searched, with its index.

An index is a graph (the base of a view) that is built, renewed or inherited, then tuned, and saved
in a file next to the gallery. This module also encodes hits, caches items, and creates and deletes
galleries in files.
"""

import contextlib
import struct
import sys
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from nobackfill import durable
from nobackfill.errors import CannotWriteError, NotFoundError, VerificationError
from nobackfill.gallery.filter_engine import FilterEngine
from nobackfill.gallery.filters import Matches
from nobackfill.gallery.listing import MigratedItems
from nobackfill.gallery.search import hnsw
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.hnsw import HnswIndex
from nobackfill.gallery.search.index import (
    Content,
    Index,
    Labels,
    Neighbours,
    Rows,
    search_by_origin,
)
from nobackfill.gallery.search.view import LiveView, OpenBase, Snapshot
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.sqlite_file import StoredItem, SuspendablePool
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.staging import UpgradableStore
from nobackfill.gallery.store import Change
from nobackfill.server.galleries.hosted import (
    GALLERY_NAME_PATTERN,
    HostedGallery,
    LockLevel,
    check_lock_order,
    hold_level,
)
from nobackfill.server.galleries.plan import Plan, PlanPart, Score
from nobackfill.v1 import search_pb2 as pb
from nobackfill.v1 import types_pb2 as types
from nobackfill.vectors import Vectors
from nobackfill.wire.values import ORIGINS, fill_value

# Hits are encoded once for each item; distance and score are inserted for each answer. Fields 2
# (distance) and 3 (score) of Hit are a tag and a float each; a distance of 0 is written, too.
_DISTANCE, _DISTANCE_AND_SCORE = struct.Struct("<Bf"), struct.Struct("<BfBf")
_DISTANCE_TAG, _SCORE_TAG = 0x15, 0x1D
# Field 7 of Hit, beyond_calibration, set to true.
_BEYOND_FIELD = b"\x38\x01"
# Tag of field 1 of SearchResponse, the hits.
_HITS_TAG = b"\x0a"


class EncodedHit(NamedTuple):
    """Hold the encoded parts of one item's hit in one space.

    A hit begins with one of three heads. Distance and score follow, then `tail`, and after the head
    `uncalibrated_head` the field beyond_calibration.

    Attributes:
        scored_head: head of a hit with a score.
        unscored_head: head of a hit without a score.
        tail: release, origin and metadata.
        origin: the origin in the protocol's values.
        uncalibrated_head: head of a hit whose distance is beyond the calibration.
    """

    scored_head: bytes
    unscored_head: bytes
    tail: bytes
    origin: types.Origin
    uncalibrated_head: bytes


def encode_hit(item: StoredItem, release: int) -> EncodedHit | None:
    """Encode an item's hit.

    Metadata keys are in order, so that equal items give equal bytes. Distance and score are
    missing; `encode_hits` adds them.

    Args:
        item: the item as the space shows it.
        release: the release that made its vector.

    Returns:
        The encoded parts; None if the item has no vector.

    Raises:
        InvalidInputError: a metadata value is None, a mapping, or a list of anything but texts.
    """
    if item.origin is None:
        return None
    head = pb.Hit(id=item.id).SerializeToString()
    message = pb.Hit(release=release, origin=ORIGINS[item.origin])
    for key, value in item.metadata.items():
        fill_value(value, message.metadata[key])
    # Fields are written in the order of their numbers, which parsers read fastest.
    tail = message.SerializeToString(deterministic=True)
    size = len(head) + len(tail)
    return EncodedHit(
        _HITS_TAG + _varint(size + _DISTANCE_AND_SCORE.size) + head,
        _HITS_TAG + _varint(size + _DISTANCE.size) + head,
        tail,
        ORIGINS[item.origin],
        _HITS_TAG + _varint(size + _DISTANCE_AND_SCORE.size + len(_BEYOND_FIELD)) + head,
    )


def encode_hits(
    hits: Sequence[EncodedHit], distances: Sequence[float], scores: Sequence[Score | None]
) -> bytes:
    """Encode the hits of a SearchResponse.

    Args:
        hits: encoded items, best first.
        distances: distance of each hit.
        scores: score of each hit; None without a calibration.

    Returns:
        The bytes of field 1 of a SearchResponse, repeated; empty without hits. Other fields may
        follow.

    Raises:
        ValueError: the lists differ in length.
    """
    parts: list[bytes] = []
    for hit, distance, score in zip(hits, distances, scores, strict=True):
        if score is None:
            parts += (hit.unscored_head, _DISTANCE.pack(_DISTANCE_TAG, distance), hit.tail)
        else:
            values = _DISTANCE_AND_SCORE.pack(_DISTANCE_TAG, distance, _SCORE_TAG, score.value)
            if score.beyond_calibration:
                parts += (hit.uncalibrated_head, values, hit.tail, _BEYOND_FIELD)
            else:
                parts += (hit.scored_head, values, hit.tail)
    return b"".join(parts)


def _varint(value: int) -> bytes:
    """Encode a length as protobuf does."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


# Most bytes of cached items of one gallery in one space.
MAX_CACHE_BYTES = 64 << 20
# Memory (bytes) of an item with its id and an empty dict, and of its encoded hit.
_ITEM_BYTES = 900


class ItemCache:
    """Cache items as one space shows them, and their encoded hits.

    A label's id never changes; its metadata and origin may. An entry is dropped after the commit
    that changed it. An item that was read while any commit happened is returned but not cached, so
    that the cache has no stale entry.
    """

    def __init__(self, store: UpgradableStore, space: str) -> None:
        self._store = store
        self._space = space
        self._lock = threading.Lock()
        self._commits = 0
        self._items: OrderedDict[int, StoredItem] = OrderedDict()
        # Encoded hits of cached items, made when first needed.
        self._encoded: dict[int, EncodedHit] = {}
        self._bytes = 0

    def get(self, labels: Sequence[int]) -> list[StoredItem | None]:
        """Return items, from the cache or the store.

        A repeated label gives the same item again. An item that is not cached is read once, and may
        evict the oldest ones. Any thread may call it.

        Args:
            labels: labels of the items.

        Returns:
            The items in the order of `labels`; None for deleted ones.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store is damaged.
            CannotWriteError: the file cannot be opened, or the disk fails.
        """
        cached_items = self._items
        items = [cached_items.get(label) for label in labels]
        missing = [label for label, item in zip(labels, items, strict=True) if item is None]
        if not missing:
            return items
        commits = self._commits
        loaded = self._store.items(missing, self._space)
        with self._lock:
            if commits == self._commits:
                self._add([item for item in loaded if item is not None])
        stored = iter(loaded)
        return [next(stored) if item is None else item for item in items]

    @property
    def encoded_hits(self) -> Mapping[int, EncodedHit]:
        """Return the encoded hits of cached items by label; do not change the mapping.

        It changes as items are encoded or dropped. A cached item that was never encoded is missing.
        """
        return self._encoded

    def encode(
        self, labels: Sequence[int], make: Callable[[StoredItem], EncodedHit | None]
    ) -> list[EncodedHit] | None:
        """Encode hits of cached items.

        It reads memory only, and keeps what it has encoded. Any thread may call it. An error of
        `make` passes through, and hits that were encoded before it stay.

        Args:
            labels: labels of the items.
            make: encodes an item; the same function at each call.

        Returns:
            The hits in the order of `labels`; None if an item is not cached or has no vector.
        """
        encoded_hits = self._encoded
        hits: list[EncodedHit] = []
        for label in labels:
            hit = encoded_hits.get(label)
            if hit is None:
                item = self._items.get(label)
                hit = None if item is None else make(item)
                if hit is None:
                    return None
                with self._lock:
                    if self._items.get(label) is item:
                        encoded_hits[label] = hit
            hits.append(hit)
        return hits

    def _add(self, items: Sequence[StoredItem]) -> None:
        """Add items, and drop the oldest ones above the limit; the caller holds the lock."""
        for item in items:
            if item.label not in self._items:
                self._bytes += cached_bytes(item)
                self._items[item.label] = item
        while self._bytes > MAX_CACHE_BYTES:
            self._drop(next(iter(self._items)))

    def _drop(self, label: int) -> None:
        self._encoded.pop(label, None)
        item = self._items.pop(label, None)
        if item is not None:
            self._bytes -= cached_bytes(item)

    def forget(self, labels: Sequence[int]) -> None:
        """Drop items that a commit has just changed.

        Labels that are not cached are ignored. Reads that began before the call are not cached. Any
        thread may call it. Call it after the commit, since a read before it would cache old items
        again.
        """
        with self._lock:
            self._commits += 1
            for label in labels:
                self._drop(label)

    def on_change(self, change: Change) -> None:
        """Drop the items of a change; a listener for Store.subscribe.

        They are deleted items, items with new metadata, and items with a new vector in the cache's
        space.
        """
        labels = change.deleted_labels.tolist() + change.metadata_labels.tolist()
        if self._space in change.added_vectors:
            labels += change.added_vectors[self._space][0].tolist()
        self.forget(labels)


def cached_bytes(item: StoredItem) -> int:
    """Estimate the memory (bytes) of an item and its encoded hit.

    It counts its metadata twice, for the item and the hit. It is a rough figure.
    """
    size = 0
    for key, value in item.metadata.items():
        size += sys.getsizeof(key) + sys.getsizeof(value)
        if not isinstance(value, str | int | float):
            size += sum(map(sys.getsizeof, value))
    return _ITEM_BYTES + 2 * size


log = structlog.get_logger("server.indexing")

# Fewer vectors than this are searched exactly, which is faster than a graph.
SMALL_GALLERY = 2_000
# A base is built again when so many vectors are outside it, or so large a share of it is deleted.
LARGEST_DELTA = 4_000
_MAX_SHARE = 0.2


class HostedInFile(HostedGallery):
    """Serve a gallery in a file; a live view of each space is searched in this process."""

    store: SqliteGallery

    def __init__(self, name: str, folder: Path, store: SqliteGallery) -> None:
        """Serve an open store.

        No view is made and no vector is read; there is no plan yet.

        Args:
            name: the gallery's name.
            folder: folder for its indexes.
            store: the store; closed with the gallery.

        Raises:
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store is damaged.
            CannotWriteError: the file cannot be opened, or the disk fails.
        """
        # Held while views are made or freed. The mapping is replaced, so a search of one view does
        # not wait while another is loaded.
        self._views_lock = threading.Lock()
        self._views: Mapping[str, LiveView] = {}
        self._items: dict[str, ItemCache] = {}
        self.origin_cache = OriginCache(store)
        self._remainder: tuple[Snapshot, Snapshot, Snapshot] | None = None
        self.prepared_searches: dict[str, Any] = {}  # by space, prepared by ReceiverSearch
        super().__init__(name, folder, store, FilterEngine(store))

    def open_views(self) -> None:
        """Make the views that the plan searches, unless they exist; see HostedGallery.open_views.

        It does nothing if there is any view.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store is damaged.
            CannotWriteError: the file cannot be opened, or the disk fails.
            LockOrderError: a view must be made, and the thread holds a view's lock or one that
                comes later.
            OSError, KeyError: a view must be made; as `view`.
        """
        if not self._views:
            self._wake(self.plan)

    def _prepare(self, plan: Plan) -> None:
        if self._views:
            self._wake(plan)

    def _wake(self, plan: Plan) -> None:
        for space in plan.searched_spaces():
            self.view(space)

    def view(
        self,
        space: str,
        source: LiveView | None = None,
        check_stop: Callable[[], None] = lambda: None,
    ) -> LiveView:
        """Return the live view of a space; it is made at the first call.

        The first call reads all vectors and a saved index; other threads that need a new view wait
        for it. An index file that is damaged, or no longer suits the vectors, is deleted and
        logged. Without any graph every vector is compared, until an index is built in the
        background. The view follows later commits until `forget_views` or `close`.

        Args:
            space: id of the space.
            source: a view whose graph is inherited if no index was saved.
            check_stop: called often while the view is made; it may raise to stop.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store is damaged.
            LockOrderError: the view is missing, and the thread holds a view's lock or one that
                comes later.
            Exception: whatever `check_stop` raises; no view is made then.
            CannotWriteError: the file cannot be opened, or the disk fails.
            OSError: an index file cannot be deleted.
            KeyError: an intact index file lacks a part.
        """
        view = self._views.get(space)
        if view is not None:
            return view
        check_lock_order(LockLevel.VIEW, self.name)
        with self._views_lock, hold_level(LockLevel.VIEW, self.name):
            view = self._views.get(space)
            if view is None:
                begin = index_opener(self.index_path(space), source, check_stop)
                view = LiveView(self.store, space, begin)
                self._views = {**self._views, space: view}
            return view

    def views(self) -> Mapping[str, LiveView]:
        """Return the live views in this process, by space; see HostedGallery.views.

        The mapping is replaced, never changed.
        """
        return self._views

    def items(self, labels: list[int], space: str) -> list[StoredItem | None]:
        """Read items as a space shows them; see HostedGallery.items.

        Args:
            labels: labels of the items.
            space: id of the space whose origin and uncertainty they get.

        Returns:
            The items in the order of `labels`, from the cache or the file; None for deleted ones.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store is damaged.
            CannotWriteError: the file cannot be opened, or the disk fails.
        """
        return self.item_cache(space).get(labels)

    def item_cache(self, space: str) -> ItemCache:
        """Return the cache of items as a space shows them.

        It is made at the first call, and dropped by `forget_views`. Whether the space exists is not
        checked. Any thread may call it. A cache from before `forget_views` follows no later commit.
        """
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
        matches: Matches | None,
        ef: int,
    ) -> list[Neighbours]:
        """Search some parts of the gallery; see HostedGallery.search.

        Views that do not exist yet are made. Without `ef`, a sample of the queries is kept to tune
        the graph.

        Args:
            parts: one part, or two; each item is found in the first part that has it.
            queries: for each part float32 [q, dim]; another number of parts is a ValueError.
            k: most neighbours of each query, at least 1.
            matches: items that may be found; None means all.
            ef: width of the graph search; 0 means the index's own.

        Returns:
            The neighbours of all queries, for each part, nearest first. Missing ones have the label
            -1 and an infinite distance.

        Raises:
            InvalidInputError: a query is not a valid vector.
            IncompatibleSpaceError: the gallery does not have the space.
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store is damaged.
            CannotWriteError: the file cannot be opened, or the disk fails.
            LockOrderError: a view must be made, and the thread holds a view's lock or one that
                comes later.
            OSError, KeyError: a view must be made; as `view`.
        """
        snapshots = self._snapshots(parts)
        neighbours = [
            self.search_part(part, snapshot, column, k, matches, ef)
            for part, snapshot, column in zip(parts, snapshots, queries, strict=True)
        ]
        if not ef:
            # A sample of these queries is used to tune the graph.
            for part, snapshot, column in zip(parts, snapshots, queries, strict=True):
                if not isinstance(snapshot.base.index, ExactIndex):
                    self.view(part.space).query_sample.observe(column)
        return neighbours

    def search_part(
        self, part: PlanPart, snapshot: Snapshot, queries: Vectors, k: int,
        matches: Matches | None = None, ef: int = 0,
    ) -> Neighbours:  # fmt: skip
        """Search one part's snapshot.

        Without a scale, or with vectors of one origin only, distances alone rank.

        Args:
            part: the part.
            snapshot: its snapshot.
            queries: float32 [q, dim].
            k: most neighbours of each query.
            matches: items that may be found; None means all.
            ef: width of the graph search; 0 means the index's own.

        Returns:
            The nearest vectors; the best along the part's scale if it has migrated and native
            vectors, whose distances do not compare. Missing ones have the label -1 and an infinite
            distance.

        Raises:
            InvalidInputError: a query is not a valid vector.
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store is damaged.
            CannotWriteError: the file cannot be opened, or the disk fails.
            IncompatibleSpaceError: the gallery has lost the space before its origins were read.
        """
        mask = None if matches is None else matches.mask
        migrated = self.origin_cache.migrated_labels(part, snapshot)
        if migrated is None or part.distance_scale is None:
            return snapshot.search(queries, k, mask, ef)
        return search_by_origin(
            lambda origin_mask: snapshot.search(queries, k, origin_mask, ef),
            migrated.origin_masks, part.distance_scale, k, mask,
        )  # fmt: skip

    def _snapshots(self, parts: Sequence[PlanPart]) -> list[Snapshot]:
        """Take a snapshot of each part, so that each item is in the first part that has it.

        The later part is taken first. An item that moves between the two snapshots is then left out
        of the later part, and never missing from both.
        """
        if len(parts) == 1:
            return [self.view(parts[0].space).snapshot()]
        new, old = parts
        old_snapshot = self.view(old.space).snapshot()
        new_snapshot = self.view(new.space).snapshot()
        return [new_snapshot, self.missing_vectors(old_snapshot, new_snapshot)]

    def missing_vectors(self, snapshot: Snapshot, other: Snapshot) -> Snapshot:
        """Return the vectors of a snapshot that another snapshot lacks; cached for the next
        search.

        Only the last pair of snapshots is cached.

        Args:
            snapshot: the snapshot to reduce; it is not changed.
            other: the snapshot whose labels are left out.
        """
        cached = self._remainder
        if cached is not None and cached[0] is snapshot and cached[1] is other:
            return cached[2]
        # Another search may replace the cached value before this one returns.
        remainder = snapshot.without_labels(other.labels())
        self._remainder = snapshot, other, remainder
        return remainder

    def scans_all_vectors(self, part: PlanPart, ef: int) -> bool:
        """Tell whether a search of a part compares every vector instead of using a graph; see
        HostedGallery.scans_all_vectors.

        It is True if the space has no graph, or `ef` is at least the graph's size. A view is made
        if there is none.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store is damaged.
            CannotWriteError: the file cannot be opened, or the disk fails.
            LockOrderError: a view must be made, and the thread holds a view's lock or one that
                comes later.
            OSError, KeyError: a view must be made; as `view`.
        """
        base = self.view(part.space).snapshot().base
        return isinstance(base.index, ExactIndex) or ef >= len(base.index.labels)

    def prepare_space(self, space: str) -> None:
        """Load a space that is about to be searched, before a switch makes puts wait; see
        HostedGallery.prepare_space.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store is damaged.
            CannotWriteError: the file cannot be opened, or the disk fails.
            LockOrderError: a view must be made, and the thread holds a view's lock or one that
                comes later.
            OSError, KeyError: a view must be made; as `view`.
        """
        self.view(space)

    def build_first_index(self, space: str, check_stop: Callable[[], None]) -> None:
        """Make the first index of a space that an upgrade has filled.

        If the release was active before a rollback, its own index is used. Otherwise the old
        space's graph is inherited; without one the index is built.

        A small space needs no index, and nothing is built. If the index cannot be saved, that is
        logged, and the next start builds it again. It may take minutes. A second call builds
        nothing again, and saves the index once more.

        Args:
            space: id of the space.
            check_stop: called often; it may raise to stop.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store is damaged.
            Exception: whatever `check_stop` raises; the present base stays.
            CannotWriteError: the file cannot be opened, or the disk fails.
            LockOrderError: a view must be made, and the thread holds a view's lock or one that
                comes later.
            OSError, KeyError: a view must be made; as `view`.
        """
        source = self.view(self.active_spec().space)
        view = self.view(space, source, check_stop)
        self._inherit_index(space, view, source, check_stop)

    def free_unused_views(self, plan: Plan) -> None:
        """Free the views that a plan does not search; no older plan may be in use; see
        HostedGallery.free_unused_views.

        Cached items, origins and prepared answers of other spaces are freed, too. Searches that
        still have a snapshot may go on.

        Raises:
            LockOrderError: the thread holds a lock that comes later, or a view's.
        """
        self._remainder = None
        check_lock_order(LockLevel.VIEW, self.name)
        with self._views_lock:
            searched = plan.searched_spaces()
            unused = [view for space, view in self._views.items() if space not in searched]
            self._views = {space: view for space, view in self._views.items() if space in searched}
        for view in unused:
            view.close()
        self.origin_cache.retain(searched)
        with self._lock:
            self._items = {
                space: cache for space, cache in self._items.items() if space in searched
            }
            self.prepared_searches = {}

    def drop_space(self, space: str) -> None:
        """Delete a space that no plan uses, with its vectors and its index file.

        A missing index file is ignored.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            PreconditionError: the space is the active one.
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            CannotWriteError: the store cannot be written.
            VerificationError: the store is damaged.
            OSError: the index file cannot be deleted; the space is gone.
        """
        super().drop_space(space)
        self.index_path(space).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the store and free the views; no call may use the gallery; see HostedGallery.close.

        Raises:
            BusyError: a call that still uses the file does not end within a minute; the gallery
                stays open and follows commits, and `close` may be called again.
        """
        super().close()
        self.origin_cache.retain(())
        views, self._views = self._views, {}
        for view in views.values():
            view.close()

    def _forward(self, change: Change) -> None:
        super()._forward(change)
        for cache in list(self._items.values()):
            cache.on_change(change)

    def index_path(self, space: str) -> Path:
        """Return the file that caches the index of a space.

        The file may not exist.
        """
        return self.folder / f"{space}.hnsw"

    def build_index(
        self, space: str, view: LiveView, check_stop: Callable[[], None], threads: hnsw.CountThreads
    ) -> None:
        """Build the base of a view from all its vectors: renew its graph, or build another.

        Searches and commits go on; a second build of the view waits. The base is tuned for recent
        queries, swapped in, and saved. If it cannot be saved, that is logged, and the next start
        builds it again.

        Args:
            space: id of the space.
            view: the view of the space.
            check_stop: called often; it may raise to stop.
            threads: number of threads, as in hnsw.build_index.

        Raises:
            Exception: whatever `check_stop` raises; the present base stays.
            NotFoundError, BusyError, VerificationError, CannotWriteError: the spaces cannot be read
                after the build; the new base stays.
            OSError: the space was deleted during the build, and its file cannot be deleted.
        """
        base = view.snapshot().base.index
        old = base if isinstance(base, HnswIndex) and base.links_fit_space else None
        self._compact(view, old, check_stop, threads)
        self._save_index(space, view)

    def _inherit_index(
        self, space: str, view: LiveView, source: LiveView, check_stop: Callable[[], None]
    ) -> None:
        """Take the graph of the old space for the new vectors, unless the view has a graph already.

        It serves at once; a new graph is built in the background.
        """
        if isinstance(view.snapshot().base.index, HnswIndex) or not needs_index(view):
            self._save_index(space, view)
            return
        base = source.snapshot().base.index
        self._compact(view, base if isinstance(base, HnswIndex) else None, check_stop)
        self._save_index(space, view)

    def _compact(
        self,
        view: LiveView,
        old: HnswIndex | None,
        check_stop: Callable[[], None],
        threads: hnsw.CountThreads = hnsw.one_thread,
    ) -> None:
        began = time.monotonic()

        def build(spec: SpaceSpec, labels: Labels, vectors: Content) -> Index:
            base = hnsw.renew_index(
                spec, labels, vectors, old=old, count_threads=threads, after_piece=check_stop
            )
            return tune_graph(base, view, check_stop)

        view.compact(build)
        seconds = round(time.monotonic() - began, 3)
        log.info("indexed", gallery=self.name, items=len(view.snapshot()), seconds=seconds)

    def _save_index(self, space: str, view: LiveView) -> None:
        """Save the base for the next start, which reads later changes from the gallery itself."""
        index, path = view.snapshot().base.index, self.index_path(space)
        try:
            if isinstance(index, HnswIndex):
                index.save(path)
        except CannotWriteError as error:
            # The index is a cache: the next start builds it again.
            log.warning(
                "the search index of a gallery was not saved; the next start builds it again",
                gallery=self.name,
                error=str(error),
            )
        if all(info.spec.space != space for info in self.spaces()):
            # The space was deleted during the build; nothing else would delete its file.
            path.unlink(missing_ok=True)


def needs_index(view: LiveView) -> bool:
    """Tell whether a view needs a new base: it has changed much, or its base was only inherited.

    Much is more than 4000 and 20 % of the graph's size outside of it, or 20 % deleted. A view of
    fewer than 2000 vectors needs none. A larger one without a graph needs one.
    """
    snapshot = view.snapshot()
    total, base = len(snapshot), snapshot.base.index
    if total < SMALL_GALLERY:
        return False
    if not isinstance(base, HnswIndex) or not base.links_fit_space:
        return True
    # Includes vectors that were deleted before the gateway started.
    deleted = len(base.graph) - len(snapshot.base)
    return len(snapshot.delta) > max(LARGEST_DELTA, _MAX_SHARE * len(base.labels)) or (
        deleted > _MAX_SHARE * len(base.labels)
    )


def tune_graph(base: Index, view: LiveView, check_stop: Callable[[], None]) -> Index:
    """Tune a graph for a sample of the queries that callers sent.

    Args:
        base: the index of the view.
        view: the view, which samples its queries.
        check_stop: called often; it may raise to stop.

    Returns:
        A graph with a suitable search width; `base` if it is no graph, or there were no queries.
        `base` itself does not change, and the graph itself is shared.

    Raises:
        Exception: whatever `check_stop` raises.
    """
    queries = view.query_sample.sample()
    if not isinstance(base, HnswIndex) or not len(queries):
        return base
    index = hnsw.tune_index(base, queries, check_stop)
    if index.ef != base.ef:
        log.info("tuned", ef=index.ef, before=base.ef)
    return index


def index_opener(
    path: Path, source: LiveView | None = None, check_stop: Callable[[], None] = lambda: None
) -> OpenBase:
    """Return a function that opens a view's first index, without building anything.

    It loads a saved index, with deletions marked and later vectors outside of the graph. Without
    one it inherits the graph of another view.

    Args:
        path: file of the saved index; deleted if it is damaged or no longer suits the vectors.
        source: a view whose graph may be inherited; None means no view.
        check_stop: called often; it may raise to stop.

    Returns:
        The function. It raises NotFoundError if there is no graph, or too few vectors for one, and
        VerificationError if the inherited graph does not suit the vectors. It also raises what
        `check_stop` raises, and OSError if such a file cannot be deleted. KeyError means that an
        intact file lacks a part.
    """

    def begin(spec: SpaceSpec, labels: Labels, vectors: Content) -> tuple[Index, Rows]:
        if len(labels) < SMALL_GALLERY:
            raise NotFoundError("too few vectors for a graph; they are searched exactly")
        with contextlib.suppress(NotFoundError):
            try:
                return hnsw.load_index(path, spec, labels, vectors)
            except VerificationError as error:
                log.warning(
                    "the file of a gallery's search index is damaged; the index is built again",
                    file=str(path),
                    error=str(error),
                )
                path.unlink(missing_ok=True)
        base = None if source is None else source.snapshot().base.index
        if not isinstance(base, HnswIndex):
            raise NotFoundError(
                "the former space has no search graph that the new one could start from"
            )
        return hnsw.rebuild_from_skeleton(
            base.skeleton(with_row_hashes=False), spec, labels, vectors, check_stop
        )

    return begin


class OriginCache:
    """Know which vectors of a gallery were migrated, in spaces where a scale ranks both origins."""

    def __init__(self, store: SqliteGallery) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._migrated: Mapping[str, MigratedItems] = {}

    def is_loaded(self, part: PlanPart) -> bool:
        """Tell whether `migrated_labels` answers without reading the file.

        It is True without a scale.
        """
        return part.distance_scale is None or part.space in self._migrated

    def migrated_labels(self, part: PlanPart, snapshot: Snapshot) -> MigratedItems | None:
        """Return the migrated labels of a part.

        Returns None if distances alone rank the part: without a scale, or if all vectors have one
        origin.

        The first call for a space reads all its origins; others wait. Later commits are followed.
        After an error the next call reads again.

        Raises:
            IncompatibleSpaceError: the gallery does not have the space.
            NotFoundError: the gallery is closed or deleted.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store is damaged.
            CannotWriteError: the file cannot be opened, or the disk fails.
        """
        if part.distance_scale is None:
            return None
        migrated = self._migrated.get(part.space)
        if migrated is None:
            migrated = self._read(part.space)
        return migrated if 0 < len(migrated) < len(snapshot) else None

    def _read(self, space: str) -> MigratedItems:
        with self._lock:
            migrated = self._migrated.get(space)
            if migrated is None:
                migrated = MigratedItems(self._store, space)
                try:
                    migrated.load()
                except BaseException:
                    migrated.close()
                    raise
                self._migrated = {**self._migrated, space: migrated}
            return migrated

    def retain(self, spaces: Collection[str]) -> None:
        """Free the labels of all other spaces.

        Any thread may call it. A later `migrated_labels` reads them again.

        Args:
            spaces: ids of the spaces to keep; empty frees all.
        """
        with self._lock:
            unused = [labels for space, labels in self._migrated.items() if space not in spaces]
            self._migrated = {
                space: labels for space, labels in self._migrated.items() if space in spaces
            }
        for labels in unused:
            labels.close()


_FILE = "gallery.sqlite"
# Prefix of a folder whose creation or deletion was interrupted.
_UNFINISHED = ".tmp-"


class FileGalleryStorage:
    """Store each gallery in a folder of its own; it is created and removed by a rename."""

    def __init__(self, folder: Path, open_stores: SuspendablePool) -> None:
        """Use a folder.

        Nothing is read or written yet.

        Args:
            folder: the folder of all galleries; `remove_leftovers` creates it.
            open_stores: limits how many of their files are open at once.
        """
        self._folder = folder
        self._residents = open_stores

    def remove_leftovers(self) -> None:
        """Remove what an interrupted creation or deletion left, before any gallery is opened; see
        GalleryStorage.remove_leftovers.

        The folder is created, with mode 0700, if it is missing.

        Raises:
            CannotWriteError: a leftover cannot be removed, or the folder cannot be made.
        """
        durable.make_dir(self._folder, 0o700)
        durable.remove_temporary_files(self._folder)

    def names(self) -> list[str]:
        """Return the names of all galleries, in order; see GalleryStorage.names.

        A folder with another name, or without the gallery's file, is ignored. A missing folder has
        none.

        Raises:
            OSError: the folder cannot be read.
        """
        if not self._folder.is_dir():
            return []
        folders = sorted(self._folder.iterdir())
        return [
            path.name
            for path in folders
            if GALLERY_NAME_PATTERN.match(path.name) and (path / _FILE).is_file()
        ]

    def open(self, name: str) -> HostedGallery:
        """Open a gallery; see GalleryStorage.open.

        The caller closes it. It has no plan yet: call `HostedGallery.replan` before the first
        search. The name is not checked. A file of an older format is migrated; after an unclean end
        its pages are checked first. A lock file is created next to it. Waits up to 5 s for another
        process.

        Raises:
            NotFoundError: there is no such file.
            VerificationError: the file is damaged, or a newer version wrote it.
            BusyError: another process holds it.
            CannotWriteError: the file cannot be read, has an old format and cannot be written, or
                the disk has no room for SQLite's files, or the file system has no locks (flock).
            OSError: this user may not search the folder, or the name is too long.
        """
        folder = self._folder / name
        store = SqliteGallery.open(folder / _FILE, self._residents)
        try:
            return HostedInFile(name, folder, store)
        except BaseException:
            store.close()
            raise

    def create(self, name: str, specs: Sequence[SpaceSpec], state: Mapping[str, Any]) -> None:
        """Create a gallery atomically; see GalleryStorage.create.

        It is made in a folder of another name, which is renamed once it is durable.

        Args:
            name: its name, which is not checked.
            specs: its spaces, at least one; the last one is active, the others previous.
            state: its first state.

        Raises:
            AlreadyExistsError: a gallery has this name; an unfinished folder stays until
                `remove_leftovers`.
            CannotWriteError: it cannot be written; `remove_leftovers` removes what is left.
            InvalidInputError: two spaces have one id and differ.
            TypeError, ValueError: a value of the state is not JSON.
            IndexError: there is no space.
        """
        unfinished = self._unfinished(name)
        durable.make_dir(unfinished, 0o700)
        with SqliteGallery.create(unfinished / _FILE, specs[0]) as store:
            for spec in specs[1:]:
                store.add_staging_space(spec)
                store.flip(spec.space)
            store.update_state(state)
        durable.publish_dir(unfinished, self._folder / name)

    def remove(self, name: str) -> Callable[[], None]:
        """Remove a gallery that nobody uses, atomically; see GalleryStorage.remove.

        The folder gets another name at once; the function deletes it. If the function does not run,
        `remove_leftovers` deletes it. Close the gallery first.

        Returns:
            The function; it may raise CannotWriteError.

        Raises:
            CannotWriteError: the folder does not exist, or cannot be renamed.
        """
        removed = self._unfinished(name)
        durable.publish_dir(self._folder / name, removed)
        return lambda: durable.remove_tree(removed)

    def _unfinished(self, name: str) -> Path:
        return self._folder / f"{_UNFINISHED}{name}-{uuid.uuid4().hex}"
