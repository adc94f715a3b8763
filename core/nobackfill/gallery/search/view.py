"""Provide the state that a search sees: an immutable base, an exact delta of changes, tombstones.

`LiveView` follows the commits of a store. A search holds one snapshot until it ends.
"""

import contextlib
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from nobackfill.errors import NotFoundError, VerificationError
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.index import (
    ConcatenatedContent,
    Content,
    Index,
    LabelFilter,
    Labels,
    Mask,
    Neighbours,
    Rows,
    SelectedRows,
    find_label_rows,
    merge_neighbours,
    prepare_vectors,
)  # fmt: skip
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.sqlite_file import VectorsOnDisk, find_space
from nobackfill.gallery.store import Change, Store
from nobackfill.vectors import Vectors, check_vectors

# Search in compiled code: one call that releases the interpreter's lock once; see `native/`. Where
# it is not built, `Snapshot.search` does the same in Python. A snapshot never changes, and holds
# what it reads; a search holds the snapshot.

if TYPE_CHECKING:
    from nobackfill.gallery.search import _native
    from nobackfill.gallery.search._native import Curves, Hnsw
else:
    try:
        from nobackfill.gallery.search import _native

        # A build of older sources, which a checkout may still have, lacks it.
        from nobackfill.gallery.search._native import Hnsw
    except ImportError:
        _native = None


# Parses the bytes of a SearchRequest into gallery, space, values, k and max_distance (infinity:
# none). For an image, the space is None and the values are its bytes. Returns None for any other
# query. It is None itself if nothing is compiled.
parse_search_request = None if _native is None else _native.parse
# Ranks labels and vectors in PostgreSQL's binary form by distance to a query, as
# index.nearest_candidates does; both are checked. Returns None if Python must do it. It is None
# itself if nothing is compiled.
rank_binary_rows = None if _native is None else _native.ranked


def prepare_compiled_graph(
    graph: Any, rows: Rows, labels: Labels, elements: Rows | None
) -> "_native.Graph | None":
    """Prepare a graph for compiled searches.

    The arrays are read in place: do not write to them.

    Args:
        graph: The graph.
        rows: int [elements], row in `labels` of each element, -1 for none.
        labels: int64 [n], labels of the rows.
        elements: int [n], element of each row; None if they are the same.

    Returns:
        The compiled graph, which reads the memory of `graph`: do not resize it later. None if
        nothing is compiled, or the graph is empty.

    Raises:
        ValueError: `rows` or `elements` has another length.
    """
    if _native is None or not isinstance(graph, Hnsw) or not len(graph):
        return None
    return _native.Graph(graph, rows, labels, elements)


class GraphIndex(Protocol):
    """The part of `hnsw.HnswIndex` that is used here; a device cannot import the class."""

    graph: Any
    compiled: "_native.Graph | None"

    def walk_candidates(self, k: int, ef: int) -> int | None:
        """Return the number of candidates of a walk for one query; None if every row is compared
        instead.

        Args:
            k: Number of hits, at least 1.
            ef: Minimum number of candidates; 0 for the graph's own number.

        Returns:
            The number, at most that of the rows; the graph uses its own where that is larger.
        """


class CompiledSearch:
    """A compiled search of one snapshot."""

    def __init__(self, index: GraphIndex, snapshot: "_native.Snapshot") -> None:
        """Wrap a compiled snapshot.

        Args:
            index: The large index.
            snapshot: A compiled snapshot that reads the graph of `index`.
        """
        self._index = index
        self._snapshot = snapshot
        # The graph's ef does not change during searches.
        self._candidates_by_k: dict[int, int | None] = {}

    @classmethod
    def from_indexes(
        cls, spec: SpaceSpec, base: Index, base_live: Mask | None, delta: Index,
        delta_live: Mask | None,
    ) -> "CompiledSearch | None":  # fmt: skip
        """Build a compiled search of two indexes.

        It is cheap: the arrays are read in place, so do not write to them.

        Args:
            spec: The space.
            base: The large index.
            base_live: bool [n], its rows that are alive; None for all.
            delta: The exact index of changes.
            delta_live: bool [n], its rows that are alive; None for all.

        Returns:
            The search; None if the base has no compiled graph, so that it can only be searched in
            Python.

        Raises:
            ValueError: A mask has another length, or the delta's vectors have another dimension.
        """
        # By name, because the class cannot be imported: see GraphIndex.
        graph = getattr(base, "compiled", None)
        if graph is None:
            return None
        graphed = cast(GraphIndex, base)
        compiled_snapshot = _native.Snapshot(
            graph, spec.unit_norm, int(graphed.graph.ef), base_live, np.asarray(delta.vectors),
            delta.labels, delta_live,
        )  # fmt: skip
        return cls(graphed, compiled_snapshot)

    def search(
        self, query: Vectors, k: int, ef: int, base: Mask | None, delta: Mask | None
    ) -> Neighbours | None:
        """Search with one checked query [1, dim].

        Rows that the snapshot has deleted are never found, whatever the masks say. Threads may
        search at the same time.

        Args:
            query: float32 [1, dim].
            k: Number of hits, at least 1.
            ef: Minimum number of candidates; 0 for the graph's own number.
            base: bool [n], rows of the graph that may be found; None for all.
            delta: bool [m], rows of the delta that may be found; None for all.

        Returns:
            Neighbours [1, k], nearest first; None if every row must be compared instead, or the
            walk finds too few.

        Raises:
            ValueError: A mask has another length.
        """
        candidates = self._index.walk_candidates(k, ef)
        pair = (
            None if candidates is None else self._snapshot.search(query, k, candidates, base, delta)
        )
        return None if pair is None else Neighbours(*pair)

    def encode_responses(
        self,
        queries: Sequence[tuple[bytes, int, float]],
        exact: bool,
        items: Mapping[int, tuple[bytes, bytes, bytes, int, bytes]],
        curves: "Curves",
        response_end: bytes,
    ) -> list[bytes | None]:
        """Return a SearchResponse for each query.

        The largest distance is inclusive, and compared after rounding. Threads may call it at the
        same time.

        Args:
            queries: The query's vector as little-endian float32 bytes, the number of hits k, and
                the largest distance of each; may be empty.
            exact: Whether the answers contain exact distances instead of rounded ones.
            items: Encoded items by label (server/galleries/hosted_file.py), as a dict.
            curves: The calibrations.
            response_end: Bytes after the hits.

        Returns:
            A SearchResponse in bytes for each query; None for a query with a hit that `items`
            lacks. A query of another size, or with NaN, gets None, too. All get None if the k of
            one of them needs an exact search.

        Raises:
            TypeError: `items` is no dict, or the values of a query are no bytes.
        """
        walks = []
        for values, k, farthest in queries:
            candidates = self._walks(k)
            if candidates is None:
                return [None] * len(queries)
            walks.append((values, k, candidates, farthest))
        return self._snapshot.answers(walks, exact, items, curves, response_end)

    def request_handler(
        self,
        gallery: str,
        space: str,
        default_k: int,
        most_k: int,
        exact: bool,
        items: Mapping[int, tuple[bytes, bytes, bytes, int, bytes]],
        curves: "Curves",
        response_end: bytes,
    ) -> Callable[[list[bytes]], list[bytes | None]]:
        """Return a function that answers a batch of encoded SearchRequests in one call, as
        `encode_responses` does.

        It answers requests by one embedding, once `encode_responses` was called with as many hits
        before. For all others it returns None. Requests for another gallery or space are among
        these. The function is for this snapshot, and threads may share it.

        Args:
            gallery: The requests' gallery.
            space: The requests' space.
            default_k: Number of hits of a request that asks for 0.
            most_k: Largest number of hits; a request for more gets None.
            exact: Whether distances are exact.
            items: Encoded items by label, as a dict; its later changes are seen.
            curves: The calibrations.
            response_end: Bytes after the hits.

        Raises:
            TypeError: `items` is no dict. The function raises it for a request that is no bytes.
        """
        return _native.Route(
            self._snapshot, gallery, space, default_k, most_k, exact, self._candidates_by_k, items,
            curves, response_end,
        ).answers  # fmt: skip

    def _walks(self, k: int) -> int | None:
        if k not in self._candidates_by_k:
            self._candidates_by_k[k] = self._index.walk_candidates(k, 0)
        return self._candidates_by_k[k]


def compile_curves(
    curves: Mapping[int, tuple[Sequence[float], Sequence[float]]],
) -> "Curves | None":
    """Return calibrations for compiled searches; None if nothing is compiled.

    Args:
        curves: Increasing distances and their probabilities, by the origin's number on the wire;
            may be empty.

    Raises:
        IndexError: An origin's number is above 7.
        TypeError: `curves` is no dict.
    """
    return None if _native is None else _native.Curves(curves)


# Size of the sample.
SAMPLE_QUERIES = 64
# Once the sample is full, one query in this many replaces another: about the last thousand count.
_SHARE = 16


class QuerySample:
    """A random sample of queries, in which later ones are likelier; safe to use from many threads.

    It exists in memory only: queries of users are never written.
    """

    def __init__(self, dim: int) -> None:
        self._lock = threading.Lock()
        self._vectors = np.empty((0, dim), np.float32)
        self._count = self._size = 0

    @property
    def count(self) -> int:
        """Return how many queries were answered since the start.

        Calls at the same time may count as one.
        """
        return self._count

    def observe(self, queries: Vectors) -> None:
        """Count answered queries, and store a random part of them in the sample.

        Args:
            queries: float32 [q, dim], checked; copied.

        Raises:
            ValueError: The sample has vectors of another dimension.
        """
        self.store_queries(queries[self.draw(len(queries))])

    def draw(self, count: int) -> list[int]:
        """Count answered queries, and draw those that the sample shall store.

        `store_queries` stores them. It takes no lock: calls at the same time may count as one.

        Args:
            count: Number of answered queries; 0 gives none.

        Returns:
            Their indices from 0, increasing: all until the sample is full, then each with a chance
            of 1 in 16.
        """
        # The choice is no secret: it decides on which queries an index is tuned. Two threads may
        # count as one.
        before_these, self._count = self._count, self._count + count
        return [
            number
            for number in range(count)
            if before_these + number < SAMPLE_QUERIES or random.random() * _SHARE < 1  # noqa: S311
        ]

    def store_queries(self, queries: Vectors) -> None:
        """Store queries in the sample; in a full one, each replaces a random other.

        They do not count as answered. NaN is not refused.

        Args:
            queries: float32 [q, dim]; copied. The first call fixes dim.

        Raises:
            ValueError: Another dimension.
        """
        with self._lock:
            if not len(self._vectors):
                self._vectors = np.empty((SAMPLE_QUERIES, queries.shape[1]), np.float32)
            for query in queries:
                is_full = self._size >= SAMPLE_QUERIES
                self._vectors[random.randrange(SAMPLE_QUERIES) if is_full else self._size] = query  # noqa: S311
                self._size += not is_full

    def sample(self) -> Vectors:
        """Return a copy of the sample, float32 [at most SAMPLE_QUERIES, dim].

        It is empty before the first query.
        """
        with self._lock:
            return self._vectors[: self._size].copy()


# Builds a base from live vectors, such as nobackfill.gallery.search.hnsw.build_index or ExactIndex.
BuildBase = Callable[[SpaceSpec, Labels, Content], Index]
# Opens the first base of a view, and returns the rows that are not in it.
OpenBase = Callable[[SpaceSpec, Labels, Content], tuple[Index, Rows]]


@dataclass(frozen=True)
class IndexPart:
    """An index with tombstones.

    Attributes:
        index: The index.
        live_mask: bool [n], rows that are alive; None for all.
        deleted_count: Number of other rows; counted on deletion, since every search needs it.
    """

    index: Index
    live_mask: Mask | None = None
    deleted_count: int = 0

    def __len__(self) -> int:
        return len(self.index.labels) - self.deleted_count

    def with_deleted_labels(self, labels: Labels) -> "IndexPart":
        """Return the part with tombstones for more labels; labels that it does not have are
        ignored.

        Args:
            labels: int64 [m], in any order; repeated ones count once.

        Returns:
            A new part, or this part itself if nothing changes.
        """
        if not len(labels):
            return self
        rows = np.unique(find_label_rows(self.index.labels, labels))
        if self.live_mask is not None:
            rows = rows[self.live_mask[rows]]
        if not len(rows):
            return self
        live = (
            np.ones(len(self.index.labels), np.bool_)
            if self.live_mask is None
            else self.live_mask.copy()
        )
        live[rows] = False
        return IndexPart(self.index, live, self.deleted_count + len(rows))

    def mask(self, label_filter: LabelFilter | None) -> Mask | None:
        """Return the rows that are alive and pass a filter, bool [n]; None for all.

        Do not change the mask: it may be the one of this part or of the filter.

        Args:
            label_filter: Returns which labels may be found; None for all. Its error passes through.
        """
        if label_filter is None:
            return self.live_mask
        mask_ = label_filter(self.index.labels)
        return mask_ if self.live_mask is None else mask_ & self.live_mask

    def passing_rows(self, label_filter: LabelFilter | None) -> Mask | None:
        """Return the rows that pass a filter, alive or not, bool [n]; None for all.

        Args:
            label_filter: Returns which labels may be found; None for all. Its error passes through.
        """
        return None if label_filter is None else label_filter(self.index.labels)

    def search(
        self, queries: Vectors, k: int, label_filter: LabelFilter | None, ef: int = 0
    ) -> Neighbours:
        """Return the nearest rows that are alive and pass a filter, as Neighbours [q, k].

        Args:
            queries: float32 [q, dim], checked.
            k: At least 1.
            label_filter: Returns which labels may be found; None for all.
            ef: Minimum number of candidates; 0 for the index's own number.

        Returns:
            Neighbours [q, k], nearest first, equal distances by label; padded if there are fewer
            rows.
        """
        passing = len(self) if label_filter is None else None
        return self.index.search(queries, k, self.mask(label_filter), passing, ef)

    def live_rows(self) -> Mask | slice:
        """Return the live rows as a mask bool [n], or as a slice of all rows.

        Do not write to the mask.
        """
        return slice(None) if self.live_mask is None else self.live_mask

    def live_content(self) -> tuple[Labels, Content]:
        """Return labels int64 [n], increasing, and vectors [n, dim] of the live rows, without
        copying vectors.

        The vectors are as the index stores them. Do not write to the labels.
        """
        if self.live_mask is None:
            return self.index.labels, self.index.vectors
        rows = np.flatnonzero(self.live_mask)
        return self.index.labels[rows], SelectedRows(self.index.vectors, rows)


@dataclass(frozen=True)
class Snapshot:
    """One state of one space of a gallery; `base` and `delta` share no live label."""

    spec: SpaceSpec
    base: IndexPart
    delta: IndexPart

    def __len__(self) -> int:
        return len(self.base) + len(self.delta)

    @cached_property
    def is_graph(self) -> bool:
        """Tell whether the base is a graph, so that a search may miss an item."""
        return not isinstance(self.base.index, ExactIndex)

    @cached_property
    def compared_number_count(self) -> int:
        """Return how many numbers a search compares one by one, in the delta and in an exact
        base."""
        return (len(self.delta) + (not self.is_graph) * len(self.base)) * self.spec.dim

    @cached_property
    def compiled(self) -> CompiledSearch | None:
        """Return the compiled search of this snapshot; None if it can only be searched in Python.

        It is built at the first use, and then reused. A base without live rows has none.
        """
        base, delta = self.base, self.delta
        if not len(base):
            return None
        return CompiledSearch.from_indexes(
            self.spec, base.index, base.live_mask, delta.index, delta.live_mask
        )

    def search(
        self, queries: Vectors, k: int, label_filter: LabelFilter | None = None, ef: int = 0
    ) -> Neighbours:
        """Return the k nearest live vectors.

        Args:
            queries: float32 [q, dim]; q may be 0.
            k: At least 1; it may be above the number of vectors.
            label_filter: Returns which labels may be found; None for all. It may be called several
                times.
            ef: Minimum number of candidates; 0 for the index's own number, index.EXACT_EF for an
                exact search.

        Returns:
            Neighbours [q, k], nearest first, equal distances by label; padded with label -1 and
            infinity if there are fewer vectors. A base that is a graph may miss a few.

        Raises:
            InvalidInputError: Another shape, or another dtype than float32 and float64.
            UnusableRowsError: As an InvalidInputError: values that are not finite or too large, or
                a norm that is not 1 in a space with unit vectors.
            Exception: An error of `label_filter`.
        """
        checked = check_vectors(
            queries, self.spec.dim, error_name="queries", unit_norm=self.spec.unit_norm
        )
        if len(checked) == 1 and self.compiled is not None:
            masks = [part.passing_rows(label_filter) for part in (self.base, self.delta)]
            answer = self.compiled.search(checked, k, ef, *masks)
            if answer is not None:
                return answer
        if not len(self.base):
            return self.delta.search(checked, k, label_filter)
        hits = self.base.search(checked, k, label_filter, ef)
        if not len(self.delta):
            return hits
        if np.isinf(hits.distances[:, -1]).any():
            return merge_neighbours([hits, self.delta.search(checked, k, label_filter)], k)
        assert isinstance(self.delta.index, ExactIndex), "a delta is searched exactly"
        return self.delta.index.merge_nearer_rows(checked, hits, self.delta.mask(label_filter))

    def without_labels(self, labels: Labels) -> "Snapshot":
        """Return the state without some labels, such as those that another space answers for.

        Args:
            labels: int64 [m]; labels that it does not have are ignored.

        Returns:
            A new snapshot, also where nothing is removed; this one does not change.
        """
        return replace(
            self,
            base=self.base.with_deleted_labels(labels),
            delta=self.delta.with_deleted_labels(labels),
        )

    def live_content(self) -> tuple[Labels, Content]:
        """Return every live label, int64 [n], increasing, and its vector as engines store it, [n,
        dim], without copying vectors.

        Later changes of the gallery do not reach the result. Do not write to the labels.
        """
        if not len(self.delta):
            return self.base.live_content()
        (old, old_vectors), (new, new_vectors) = self.base.live_content(), self.delta.live_content()
        labels = np.concatenate([old, new])
        order = np.argsort(labels)
        return labels[order], SelectedRows(ConcatenatedContent(old_vectors, new_vectors), order)

    def labels(self) -> Labels:
        """Return every live label, int64, increasing.

        They may be the index's own array: do not write to it.
        """
        parts = [part.index.labels[part.live_rows()] for part in (self.base, self.delta)]
        return np.sort(np.concatenate(parts)) if len(parts[1]) else parts[0]


def new_snapshot(spec: SpaceSpec, base: Index) -> Snapshot:
    """Return a snapshot with an index as its base and an empty delta.

    Args:
        spec: The space.
        base: The index; all its rows are alive.
    """
    nothing = ExactIndex(spec, np.empty(0, np.int64), np.empty((0, spec.dim), np.float32))
    return Snapshot(spec, IndexPart(base), IndexPart(nothing))


def _exact(store: Store, spec: SpaceSpec) -> Snapshot:
    return new_snapshot(spec, ExactIndex(spec, *store.load_vectors(spec.space)))


def _open_base(store: Store, spec: SpaceSpec, begin: OpenBase | None) -> Snapshot | None:
    if begin is None:
        return None
    with contextlib.suppress(VerificationError, NotFoundError), store.read_snapshot() as connection:
        stored = VectorsOnDisk(connection, find_space(connection, spec.space))
        base, others = begin(spec, stored.labels, stored)
        delta = ExactIndex(spec, stored.labels[others], stored[others])
        return replace(new_snapshot(spec, base), delta=IndexPart(delta))
    return None


def apply_change(snapshot: Snapshot, change: Change) -> Snapshot:
    """Return a snapshot's successor after a commit; the snapshot itself does not change.

    Deleted labels are removed. A new or replaced vector of the snapshot's space is found in the
    delta from then on; changes of other spaces are ignored. A label that the commit deletes and
    adds is found.

    Args:
        snapshot: The snapshot before the commit.
        change: The commit; its vectors are checked already.

    Returns:
        The successor. If the change does not concern the snapshot, the successor has the same
        parts.
    """
    snapshot = snapshot.without_labels(change.deleted_labels)
    labels, vectors = change.added_vectors.get(snapshot.spec.space, (None, None))
    if labels is None or vectors is None or not len(labels):
        return snapshot
    # A replaced vector is found in the delta from now on.
    snapshot = snapshot.without_labels(labels)
    order = np.argsort(labels)
    return replace(snapshot, delta=_extend(snapshot.delta, labels[order], vectors[order]))


def _extend(delta: IndexPart, labels: Labels, vectors: Vectors) -> IndexPart:
    """Return a delta with more rows, of increasing labels that are not alive in it."""
    index, live = delta.index, delta.live_mask
    assert isinstance(index, ExactIndex), "a delta is searched exactly"
    if not len(index.labels) or labels[0] > index.labels[-1]:
        if live is not None:
            live = np.concatenate([live, np.ones(len(labels), np.bool_)])
        return IndexPart(index.with_more_rows(labels, vectors), live, delta.deleted_count)
    old_labels, old_vectors = delta.live_content()
    labels = np.concatenate([old_labels, labels])
    vectors = np.concatenate([np.asarray(old_vectors), prepare_vectors(index.spec.metric, vectors)])
    order = np.argsort(labels)
    return IndexPart(ExactIndex(index.spec, labels[order], vectors[order]))


class LiveView:
    """The current snapshot of one space: exact at first, indexed once it was compacted."""

    def __init__(self, store: Store, space: str, open_base: OpenBase | None = None) -> None:
        """Load the space, and follow the store.

        All vectors are read. `close` ends it; after an error, it follows no more.

        Args:
            store: The gallery.
            space: Id of the space.
            open_base: Opens the first base. Without it, or where it raises VerificationError or
                NotFoundError, the base is exact. Other errors pass through.

        Raises:
            IncompatibleSpaceError: The gallery does not have the space.
            VerificationError: The gallery's file is damaged.
            NotFoundError: The gallery was closed, or its file is gone.
            BusyError: Another process has the file to itself, or changed it during a read without a
                lock.
            CannotWriteError: The file cannot be opened, or the disk fails.
        """
        self.spec = store.space(space).spec
        self._changing = threading.Lock()
        self._compacting = threading.Lock()
        # Commits since the build of a base began; they are applied to it when it is ready.
        self._log: list[Change] | None = []
        self._snapshot: Snapshot | None = None
        self._store = store
        self.query_sample = QuerySample(self.spec.dim)
        store.subscribe(self._apply)
        try:
            self._swap(_open_base(store, self.spec, open_base) or _exact(store, self.spec))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop following the store; the view's memory is then freed without a garbage
        collection.

        Snapshots stay usable, and no longer change.

        Raises:
            ValueError: It was called before.
        """
        self._store.unsubscribe(self._apply)

    def snapshot(self) -> Snapshot:
        """Return the current snapshot; use one snapshot for one search."""
        assert self._snapshot is not None, "set in the constructor"
        return self._snapshot

    def compact(self, build_base: BuildBase) -> None:
        """Build a base of all live vectors, then swap it in; searches and commits go on during the
        build.

        A second call waits for the first. Any thread may call it, also after `close`.

        Args:
            build_base: Builds the base from labels int64 [n], increasing, and vectors as engines
                store them. Its error passes through, and the present base stays.
        """
        with self._compacting:
            with self._changing:
                self._log = []
                snapshot = self.snapshot()
            try:
                self._swap(new_snapshot(self.spec, build_base(self.spec, *snapshot.live_content())))
            finally:
                with self._changing:
                    self._log = None

    def tune(self, tune_index: Callable[[Index], Index]) -> None:
        """Replace the base by another index with the same vectors, unless another base was swapped
        in.

        Where calls overlap, the one that swaps first wins, and the others change nothing.

        Args:
            tune_index: Returns the new index for the present one; returning the same index changes
                nothing. It runs without a lock; its error passes through, and changes nothing.
        """
        base = self.snapshot().base.index
        index = tune_index(base)
        with self._changing:
            snapshot = self.snapshot()
            if index is not base and snapshot.base.index is base:
                self._snapshot = replace(snapshot, base=replace(snapshot.base, index=index))

    def _apply(self, change: Change) -> None:
        with self._changing:
            if self._log is not None:
                self._log.append(change)
            if self._snapshot is not None:
                self._snapshot = apply_change(self._snapshot, change)

    def _swap(self, snapshot: Snapshot) -> None:
        with self._changing:
            for change in self._log or []:
                snapshot = apply_change(snapshot, change)
            self._log = None
            self._snapshot = snapshot
