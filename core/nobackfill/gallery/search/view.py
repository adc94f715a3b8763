"""What a search sees: an immutable base, an exact delta of what came since, and tombstones.

`LiveView` follows a store's commits; `snapshot` is one reference, held by a search to its end.
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
from nobackfill.gallery.reading import Stored
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.index import (
    Content,
    Index,
    Joined,
    Labels,
    Mask,
    Neighbours,
    Picked,
    Rows,
    merge,
    prepare,
    rows_of,
)  # fmt: skip
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.store import Change, Store
from nobackfill.gallery.tables import find_space
from nobackfill.vectors import Vectors, check_vectors

# Searching in compiled code, one call that lets go of the interpreter's lock once; see `native/`.
#
# It is an extra: where it was not built, `Snapshot.search` does the same in Python. What a snapshot
# reads never changes and is held by it; who searches holds the snapshot.

if TYPE_CHECKING:
    from nobackfill.gallery.search import _native
    from nobackfill.gallery.search._native import Curves, Hnsw
else:
    try:
        from nobackfill.gallery.search import _native

        # A build of older sources, which a checkout may still hold, has none.
        from nobackfill.gallery.search._native import Hnsw
    except ImportError:
        _native = None


# A SearchRequest's bytes to gallery, space, values, k and max_distance (infinity: none); by image,
# the space is None and the values are its bytes. None: it is another than by one of these alone, or
# none. Itself None where nothing was compiled.
parse = None if _native is None else _native.parse
# Labels and vectors in PostgreSQL's binary form, checked as the query is: the nearest to it, as
# distances.py and index.best rank them; None: Python is to. Itself None where nothing was compiled.
ranked = None if _native is None else _native.ranked


def graph_of(
    graph: Any, held: Rows, labels: Labels, elements: Rows | None
) -> "_native.Graph | None":
    """A graph as it is searched. `held`: the row in `labels` of each element, -1: nobody's;
    `elements`: the element of each row, None: the same."""
    if _native is None or not isinstance(graph, Hnsw) or not len(graph):
        return None
    return _native.Graph(graph, held, labels, elements)


class GraphIndex(Protocol):
    """What is asked of `hnsw.HnswIndex`, which a device cannot load."""

    graph: Any
    compiled: "_native.Graph | None"

    def walked(self, k: int, ef: int) -> int | None: ...


class CompiledSearch:
    """Of one snapshot."""

    def __init__(self, index: GraphIndex, snapshot: "_native.Snapshot") -> None:
        """`snapshot` reads the graph of `index`, among others."""
        self._index = index
        self._snapshot = snapshot
        # The graph's ef does not change while it is searched.
        self._walked: dict[int, int | None] = {}

    @classmethod
    def of(
        cls, spec: SpaceSpec, base: Index, base_live: Mask | None, delta: Index,
        delta_live: Mask | None,
    ) -> "CompiledSearch | None":  # fmt: skip
        """Make one of two indexes and which of their rows are alive (bool [n]; None: all).

        None: they are searched in Python only.
        """
        # Asked for by name: of the class, see GraphIndex.
        graph = getattr(base, "compiled", None)
        if graph is None:
            return None
        graphed = cast(GraphIndex, base)
        made = _native.Snapshot(
            graph, spec.unit, int(graphed.graph.ef), base_live, np.asarray(delta.vectors),
            delta.labels, delta_live,
        )  # fmt: skip
        return cls(graphed, made)

    def search(
        self, query: Vectors, k: int, ef: int, base: Mask | None, beside: Mask | None
    ) -> Neighbours | None:
        """Of one checked query [1, dim]; `base` and `beside`: rows of the graph and of the delta
        that are allowed. None: compare every row."""
        asked = self._index.walked(k, ef)
        found = None if asked is None else self._snapshot.search(query, k, asked, base, beside)
        return None if found is None else Neighbours(*found)

    def answers(
        self,
        queries: Sequence[tuple[bytes, int, float]],
        exact: bool,
        known: Mapping[int, tuple[bytes, bytes, bytes, int, bytes]],
        curves: "Curves",
        end: bytes,
    ) -> list[bytes | None]:
        """A SearchResponse to each of `queries` (values, k, farthest): the hits that are `known` by
        label (server/galleries/hosted_file.py), no farther than `farthest`, then `end`. None: one
        is not known, or it is searched otherwise.
        """
        walks = []
        for values, k, farthest in queries:
            asked = self._walks(k)
            if asked is None:
                return [None] * len(queries)
            walks.append((values, k, asked, farthest))
        return self._snapshot.answers(walks, exact, known, curves, end)

    def route(
        self,
        gallery: str,
        space: str,
        usual_k: int,
        most_k: int,
        exact: bool,
        known: Mapping[int, tuple[bytes, bytes, bytes, int, bytes]],
        curves: "Curves",
        end: bytes,
    ) -> Callable[[list[bytes]], list[bytes | None]]:
        """From SearchRequests to what `answers` answers, in one call: of those by one embedding in
        `space` of `gallery` for at most `most_k` hits (0: `usual_k`), if `answers` was asked for
        as many before. None for all others."""
        return _native.Route(
            self._snapshot, gallery, space, usual_k, most_k, exact, self._walked, known,
            curves, end,
        ).answers  # fmt: skip

    def _walks(self, k: int) -> int | None:
        if k not in self._walked:
            self._walked[k] = self._index.walked(k, 0)
        return self._walked[k]


def curves_of(curves: Mapping[int, tuple[Sequence[float], Sequence[float]]]) -> "Curves | None":
    """Distances and probabilities of calibrations, by origin as the wire names it."""
    return None if _native is None else _native.Curves(curves)


# Queries that are kept.
SAMPLE_QUERIES = 64
# Once so many are kept, one in so many takes another's place: the last thousand count.
_SHARE = 16


class QuerySample:
    """Queries at random, later ones likelier. In memory only: what people look for is written
    nowhere. Safe to use from many threads."""

    def __init__(self, dim: int) -> None:
        self._lock = threading.Lock()
        self._vectors = np.empty((0, dim), np.float32)
        self._seen = self._kept = 0

    @property
    def seen(self) -> int:
        """How many queries came by."""
        return self._seen

    def see(self, queries: Vectors) -> None:
        """Queries [q, dim] that were checked and answered."""
        self.keep(queries[self.chosen(len(queries))])

    def chosen(self, count: int) -> list[int]:
        """Count queries that were checked and answered; which of them are to be kept."""
        # No secret hangs on it: which queries an index is tuned on. Two threads may count as one.
        seen, self._seen = self._seen, self._seen + count
        return [
            number
            for number in range(count)
            if seen + number < SAMPLE_QUERIES or random.random() * _SHARE < 1  # noqa: S311
        ]

    def keep(self, queries: Vectors) -> None:
        """Those of them [q, dim]."""
        with self._lock:
            if not len(self._vectors):
                self._vectors = np.empty((SAMPLE_QUERIES, queries.shape[1]), np.float32)
            for query in queries:
                filled = self._kept >= SAMPLE_QUERIES
                self._vectors[random.randrange(SAMPLE_QUERIES) if filled else self._kept] = query  # noqa: S311
                self._kept += not filled

    def sample(self) -> Vectors:
        """Those that are kept, a copy, float32 [at most SIZE, dim]."""
        with self._lock:
            return self._vectors[: self._kept].copy()


# Which of an index's labels (increasing) may be found: bool, one for each.
Allowed = Callable[[Labels], Mask]
# Makes a base of live vectors; nobackfill.gallery.search.hnsw.build is one, ExactIndex another.
Builder = Callable[[SpaceSpec, Labels, Content], Index]
# What a view begins with: a base of labels and vectors, and the rows that are not in it.
Opener = Callable[[SpaceSpec, Labels, Content], tuple[Index, Rows]]


@dataclass(frozen=True)
class IndexPart:
    """An index, which of its rows are alive (bool [n]; None: all) and how many are not: counted as
    they die, for every search asks."""

    index: Index
    live: Mask | None = None
    dead: int = 0

    def __len__(self) -> int:
        return len(self.index.labels) - self.dead

    def less(self, labels: Labels) -> "IndexPart":
        """The same with tombstones for `labels`."""
        rows = np.unique(rows_of(self.index.labels, labels))
        if self.live is not None:
            rows = rows[self.live[rows]]
        if not len(rows):
            return self
        live = np.ones(len(self.index.labels), np.bool_) if self.live is None else self.live.copy()
        live[rows] = False
        return IndexPart(self.index, live, self.dead + len(rows))

    def mask(self, allowed: Allowed | None) -> Mask | None:
        """Rows that are alive and allowed; None: all."""
        if allowed is None:
            return self.live
        chosen = allowed(self.index.labels)
        return chosen if self.live is None else chosen & self.live

    def chosen(self, allowed: Allowed | None) -> Mask | None:
        """Rows that are allowed, alive or not; None: all."""
        return None if allowed is None else allowed(self.index.labels)

    def search(self, queries: Vectors, k: int, allowed: Allowed | None, ef: int = 0) -> Neighbours:
        """The nearest of them."""
        passing = len(self) if allowed is None else None
        return self.index.search(queries, k, self.mask(allowed), passing, ef)

    def live_rows(self) -> Mask | slice:
        """What selects the live rows."""
        return slice(None) if self.live is None else self.live

    def content(self) -> tuple[Labels, Content]:
        """Live labels and vectors."""
        if self.live is None:
            return self.index.labels, self.index.vectors
        rows = np.flatnonzero(self.live)
        return self.index.labels[rows], Picked(self.index.vectors, rows)


@dataclass(frozen=True)
class Snapshot:
    """One state of one space of a gallery. `base` and `delta` share no live label."""

    spec: SpaceSpec
    base: IndexPart
    delta: IndexPart

    def __len__(self) -> int:
        return len(self.base) + len(self.delta)

    @cached_property
    def graphed(self) -> bool:
        """Whether a graph leads to most of it."""
        return not isinstance(self.base.index, ExactIndex)

    @cached_property
    def compared(self) -> int:
        """Numbers that each search compares one by one: without a graph, and beside one."""
        return (len(self.delta) + (not self.graphed) * len(self.base)) * self.spec.dim

    @cached_property
    def compiled(self) -> CompiledSearch | None:
        """The same for searches in compiled code, where there are any."""
        base, delta = self.base, self.delta
        if not len(base):
            return None
        return CompiledSearch.of(self.spec, base.index, base.live, delta.index, delta.live)

    def search(
        self, queries: Vectors, k: int, allowed: Allowed | None = None, ef: int = 0
    ) -> Neighbours:
        """The `k` nearest live vectors; `allowed` says which may be found; None: all. `ef` as in
        Index.search.

        Raises InvalidInputError for queries that are not float32 [q, dim] and finite.
        """
        checked = check_vectors(queries, self.spec.dim, what="queries", unit=self.spec.unit)
        if len(checked) == 1 and self.compiled is not None:
            chosen = [part.chosen(allowed) for part in (self.base, self.delta)]
            answer = self.compiled.search(checked, k, ef, *chosen)
            if answer is not None:
                return answer
        if not len(self.base):
            return self.delta.search(checked, k, allowed)
        found = self.base.search(checked, k, allowed, ef)
        if not len(self.delta):
            return found
        if np.isinf(found.distances[:, -1]).any():
            return merge([found, self.delta.search(checked, k, allowed)], k)
        assert isinstance(self.delta.index, ExactIndex), "a delta is searched exactly"
        return self.delta.index.improve(checked, found, self.delta.mask(allowed))

    def without(self, labels: Labels) -> "Snapshot":
        """The same state less `labels`: in a dual rollout, those that another space answers for."""
        return replace(self, base=self.base.less(labels), delta=self.delta.less(labels))

    def content(self) -> tuple[Labels, Content]:
        """Every live label, increasing, and its vector, as engines hold them, not copied."""
        if not len(self.delta):
            return self.base.content()
        (old, old_vectors), (new, new_vectors) = self.base.content(), self.delta.content()
        labels = np.concatenate([old, new])
        order = np.argsort(labels)
        return labels[order], Picked(Joined(old_vectors, new_vectors), order)

    def labels(self) -> Labels:
        """Every live label, increasing."""
        parts = [part.index.labels[part.live_rows()] for part in (self.base, self.delta)]
        return np.sort(np.concatenate(parts)) if len(parts[1]) else parts[0]


def snapshot_of(spec: SpaceSpec, base: Index) -> Snapshot:
    """A base alone."""
    nothing = ExactIndex(spec, np.empty(0, np.int64), np.empty((0, spec.dim), np.float32))
    return Snapshot(spec, IndexPart(base), IndexPart(nothing))


def _exact(store: Store, spec: SpaceSpec) -> Snapshot:
    return snapshot_of(spec, ExactIndex(spec, *store.load(spec.space)))


def _begun(store: Store, spec: SpaceSpec, begin: Opener | None) -> Snapshot | None:
    if begin is None:
        return None
    with (
        contextlib.suppress(VerificationError, NotFoundError),
        store.reading() as connection,
    ):
        stored = Stored(connection, find_space(connection, spec.space))
        base, rest = begin(spec, stored.labels, stored)
        delta = ExactIndex(spec, stored.labels[rest], stored[rest])
        return replace(snapshot_of(spec, base), delta=IndexPart(delta))
    return None


def changed(snapshot: Snapshot, change: Change) -> Snapshot:
    """The state after one commit; vectors that were replaced count as added."""
    snapshot = snapshot.without(change.deleted)
    labels, vectors = change.added.get(snapshot.spec.space, (None, None))
    if labels is None or vectors is None or not len(labels):
        return snapshot
    # What is replaced is found in the delta from now on.
    snapshot = snapshot.without(labels)
    order = np.argsort(labels)
    return replace(snapshot, delta=_with(snapshot.delta, labels[order], vectors[order]))


def _with(delta: IndexPart, labels: Labels, vectors: Vectors) -> IndexPart:
    """A delta with more rows, of increasing labels that are not alive in it."""
    index, live = delta.index, delta.live
    assert isinstance(index, ExactIndex), "a delta is searched exactly"
    if not len(index.labels) or labels[0] > index.labels[-1]:
        if live is not None:
            live = np.concatenate([live, np.ones(len(labels), np.bool_)])
        return IndexPart(index.extended(labels, vectors), live, delta.dead)
    old_labels, old_vectors = delta.content()
    labels = np.concatenate([old_labels, labels])
    vectors = np.concatenate([np.asarray(old_vectors), prepare(index.spec.metric, vectors)])
    order = np.argsort(labels)
    return IndexPart(ExactIndex(index.spec, labels[order], vectors[order]))


class LiveView:
    """The current snapshot of one space: exact as soon as it is made, indexed once compacted."""

    def __init__(self, store: Store, space: str, begin: Opener | None = None) -> None:
        """`begin` makes the first base; without it, or where it raises VerificationError or
        NotFoundError, that is exact. Raises IncompatibleSpaceError if the gallery does not have
        the space.
        """
        self.spec = store.space(space).spec
        self._changing = threading.Lock()
        self._compacting = threading.Lock()
        # Commits since a base was begun, passed to it when it is ready.
        self._log: list[Change] | None = []
        self._snapshot: Snapshot | None = None
        self._store = store
        self.asked = QuerySample(self.spec.dim)
        store.subscribe(self._apply)
        try:
            self._swap(_begun(store, self.spec, begin) or _exact(store, self.spec))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop following the store. Nothing here then refers to itself: what a view holds goes with
        it, without waiting for a garbage collection."""
        self._store.unsubscribe(self._apply)

    def snapshot(self) -> Snapshot:
        """What a search uses to its end."""
        assert self._snapshot is not None, "set in the constructor"
        return self._snapshot

    def compact(self, build: Builder) -> None:
        """Build a base of all live vectors aside, then swap one reference; all else goes on."""
        with self._compacting:
            with self._changing:
                self._log = []
                snapshot = self.snapshot()
            try:
                self._swap(snapshot_of(self.spec, build(self.spec, *snapshot.content())))
            finally:
                with self._changing:
                    self._log = None

    def tune(self, tuned: Callable[[Index], Index]) -> None:
        """Search the base as `tuned` gives it, the same vectors, unless another came meanwhile."""
        before = self.snapshot().base.index
        index = tuned(before)
        with self._changing:
            snapshot = self.snapshot()
            if index is not before and snapshot.base.index is before:
                self._snapshot = replace(snapshot, base=replace(snapshot.base, index=index))

    def _apply(self, change: Change) -> None:
        with self._changing:
            if self._log is not None:
                self._log.append(change)
            if self._snapshot is not None:
                self._snapshot = changed(self._snapshot, change)

    def _swap(self, snapshot: Snapshot) -> None:
        with self._changing:
            for change in self._log or []:
                snapshot = changed(snapshot, change)
            self._log = None
            self._snapshot = snapshot
