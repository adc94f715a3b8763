"""Graphs for approximate search: the index, and how one is made.

A graph is built fresh, read from a file, or carried to other vectors. Server, training and report
import this; nothing else does.
"""

import contextlib
import copy
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nobackfill.errors import VerificationError
from nobackfill.gallery.search import graph_file, view
from nobackfill.gallery.search.exact import PICKED_SHARE, ExactIndex, offsets
from nobackfill.gallery.search.graph_file import (
    Hnsw,
    Layout,
    Skeleton,
    fleshed,
    read_skeleton,
    sums_of,
)
from nobackfill.gallery.search.index import (
    Content,
    Labels,
    Mask,
    Neighbours,
    Picked,
    Rows,
    best,
    give_way,
    prepare,
)
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.vectors import Vectors

# Microseconds, measured at 200,000 x 128 with filters that pass .1 % to 95 %: which of two ways is
# taken. Exact: for each row that passes, once and for each query. Graph: for each query, and for
# each candidate it is asked for.
_EXACT_ROW, _EXACT_ROW_QUERY = 0.08, 0.01
_GRAPH_QUERY, _GRAPH_CANDIDATE = 80.0, 0.6
# The share of the candidates among which enough have to pass: at the far end a graph finds less.
_NEAR_END = 0.75


class HnswIndex:
    """A graph and the labels of its vectors, which are held once: in the graph's own memory. A
    larger `ef` finds more, and takes longer."""

    def __init__(
        self,
        spec: SpaceSpec,
        labels: Labels,
        graph: Hnsw,
        rows: Rows | None = None,
        *,
        fresh: bool = True,
    ) -> None:
        """`graph` knows row rows[i] of `labels` as i; -1 is nobody's, and marked deleted. None: row
        i as i. Nobody else changes it.

        `fresh`: its links were made for these vectors, not for those of a space before an upgrade.
        """
        self.fresh = fresh
        self._least = 0
        self.spec = spec
        self.labels = labels
        self.graph = graph
        self._rows = rows
        names = graph_file.names_of(graph)
        # Row of each element, in the order of the graph's memory, and element of each row.
        self._held = names if rows is None else rows[names]
        memory = graph_file.vectors_of(graph)
        self.vectors: Content = memory
        self._elements: Rows | None = None
        known = labels
        if not np.array_equal(self._held, np.arange(len(labels))):
            alive = np.flatnonzero(self._held >= 0)
            self._elements = np.empty(len(labels), np.intp)
            self._elements[self._held[alive]] = alive
            self.vectors = Picked(memory, self._elements)
            known = np.append(labels, -1)[self._held]
        _move_to_large_pages(graph)
        self._exact = ExactIndex.of_prepared(spec, known, memory, offsets(spec, memory))
        self.compiled = view.graph_of(graph, self._held, labels, self._elements)

    @property
    def ef(self) -> int:
        """Candidates of a search."""
        return max(self._least, self.graph.ef)

    def exact(self, queries: Vectors, k: int, allowed: Mask | None = None) -> Neighbours:
        """The same search, comparing every row."""
        if self._elements is None:
            return self._exact.search(queries, k, allowed)
        if allowed is not None:
            rows = np.flatnonzero(allowed)
            if len(rows) * PICKED_SHARE <= len(allowed):
                return self._exact.search_rows(queries, k, self._elements[rows])
        mask = np.zeros(len(self._held), np.bool_)
        mask[self._elements if allowed is None else self._elements[allowed]] = True
        return self._exact.search(queries, k, mask)

    def seeking(self, ef: int) -> "HnswIndex":
        """The same index with at least `ef` candidates a search. The graph stays as it is: it may
        be searched at this moment, and its own ef is every search's."""
        index = copy.copy(self)
        index._least = ef
        return index

    def search(
        self,
        queries: Vectors,
        k: int,
        allowed: Mask | None = None,
        passing: int | None = None,
        ef: int = 0,
    ) -> Neighbours:
        """See Index.search. Distances are the graph's own, float32."""
        asked = self._asked(k, ef)
        if asked is None:
            return self.exact(queries, k, allowed)
        if allowed is None:
            found = None
            if not _exact_is_cheaper(len(self.labels), len(queries), asked):
                found = self._near(prepare(self.spec.metric, queries), asked)
            if found is None:
                return self.exact(queries, k)
            return _answer(self.labels[found[0][:, :k]], found[1][:, :k], k)
        if passing is None:
            passing = int(np.count_nonzero(allowed))
        answer = Neighbours(
            np.full((len(queries), k), -1, np.int64), np.full((len(queries), k), np.inf, np.float32)
        )
        wide = asked if asked > max(k, self.graph.ef) else 0
        left = self._filtered(queries, k, allowed, passing, wide, answer)
        if len(left):
            exact = self.exact(queries[left], k, allowed)
            answer.labels[left], answer.distances[left] = exact.labels, exact.distances
        return answer

    def walked(self, k: int, ef: int) -> int | None:
        """Candidates that one query asks the graph for; None: every row is compared with it."""
        asked = self._asked(k, ef)
        exact = asked is None or _exact_is_cheaper(len(self.labels), 1, asked)
        return None if exact else asked

    def _asked(self, k: int, ef: int) -> int | None:
        count = len(self.labels)
        # A graph that is asked for more neighbours looks at as many candidates.
        wide = max(ef, self._least)
        return None if ef >= count else min(max(k, wide if wide > self.graph.ef else 0), count)

    def _filtered(
        self,
        queries: Vectors,
        k: int,
        allowed: Mask,
        passing: int,
        wide: int,
        answer: Neighbours,
    ) -> Rows:
        """Fill the answers that the graph gives cheaper than comparing every row that passes, with
        `wide` candidates at least; returns the queries without one.

        Rows met on the way that may not be found make the search wider: so wide that, where the
        filter has nothing to do with what is near, one query in two hundred finds too few. Where it
        has, what passes lies at the far end or beyond, and the graph is not trusted with it.
        """
        count, wanted = len(self.labels), min(k, passing)
        some = (wanted + 2.5 * wanted**0.5 + 2) / _NEAR_END
        asked = min(count, max(wide, int(some * count / max(1, passing))))
        every = np.arange(len(queries))
        if _exact_is_cheaper(passing, len(queries), asked):
            return every
        found = self._near(prepare(self.spec.metric, queries), asked)
        if found is None:
            return every
        rows, apart = found
        passed = allowed[rows]
        near = asked if asked == count else int(_NEAR_END * asked)
        full = np.count_nonzero(passed[:, :near], axis=1) >= wanted
        # Rows that passed first, still by distance.
        order = np.argsort(~passed[full], axis=1, kind="stable")[:, :wanted]
        rows = np.take_along_axis(rows[full], order, axis=1)
        fuller = _answer(self.labels[rows], np.take_along_axis(apart[full], order, axis=1), k)
        answer.labels[full], answer.distances[full] = fuller.labels, fuller.distances
        left: Rows = np.flatnonzero(~full)
        return left

    def _near(self, prepared: Vectors, asked: int) -> tuple[Rows, Vectors] | None:
        """Rows and distances [q, asked], nearest first; None if so many were not reached: parts of
        the graph hang apart."""
        found = self.graph.search(prepared, asked)
        if found is None:
            return None
        names, apart = found
        rows = names if self._rows is None else self._rows[names]
        # The inner product of a vector with itself can be rounded to above 1.
        np.maximum(apart, 0, out=apart)
        return rows, apart

    def skeleton(self, *, sums: bool = True) -> Skeleton:
        """What is left of it without its vectors."""
        links = graph_file.links_of(self.graph)
        kept = sums_of(graph_file.vectors_of(self.graph)) if sums else None
        ef = self.graph.ef
        return Skeleton(self.spec, self.labels, self._held, links, kept, self.fresh, ef)

    def save(self, path: Path) -> None:
        """Write a checked file, without the vectors. Raises CannotWriteError."""
        self.skeleton().write(path)


# Whatever is larger, glibc's malloc takes from the kernel and gives back to it.
_MAPPED_BYTES = 32 << 20
# Advice to Linux: use large pages from now on; move what is written to them at once (from 6.1 on).
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def _is_large(graph: Hnsw) -> bool:
    """Whether the records are memory of their own, in which large pages help."""
    return graph.capacity * Layout.of(graph.dim, graph.m).size > _MAPPED_BYTES


def _move_to_large_pages(graph: Hnsw) -> None:
    """Move records that are written to large pages, in a thread of its own, while others read them:
    a graph that is read from its file is searched sooner. On a virtual machine the host has to give
    each large page back, which takes 2 s for 660 MB."""

    def move() -> None:
        give_way()
        if not graph.advise(_MADV_COLLAPSE):
            # An older kernel, or no page to be had: the rest is done by and by.
            graph.advise(_MADV_HUGEPAGE)

    if _is_large(graph):
        threading.Thread(target=move, name="large pages", daemon=True).start()


def _exact_is_cheaper(passing: int, queries: int, asked: int) -> bool:
    exact = passing * (_EXACT_ROW + _EXACT_ROW_QUERY * queries)
    return exact <= queries * (_GRAPH_QUERY + _GRAPH_CANDIDATE * asked)


def _answer(labels: Labels, apart: Vectors, k: int) -> Neighbours:
    """Sorted candidates as an answer: equal distances by label, padded to k."""
    if labels.shape[1] < k or (apart[:, 1:] == apart[:, :-1]).any():
        return best(labels, apart, k)
    return Neighbours(labels, apart)


# Rows that are added at a time; a build can be given up between two pieces.
PIECE = 500
# Links a row (Malkov and Yashunin's M), and candidates while building.
M = 16
EF_CONSTRUCTION = 100
# Candidates while searching: the first that finds LEAST_RECALL of the 10 nearest in a probe.
TRIED_EF = (48, 64, 128, 256, 512, 1024)
# The same for queries that were asked.
WIDEST_EF = (*TRIED_EF, 2048, 4096)
LEAST_RECALL = 0.99
# Queries of such a probe, and how many neighbours of each.
PROBES, PROBES_AT_ONCE = 64, 4
K = 10
# Rows that came or went, as a share of all, up to which a graph is carried rather than built.
LARGEST_CHANGE = 0.3

# How many threads may be busy now.
Threads = Callable[[], int]


def one_thread() -> int:
    """Adds all rows in the same order each time: the same graph."""
    return 1


def build(
    spec: SpaceSpec,
    labels: Labels,
    vectors: Content,
    *,
    threads: Threads = one_thread,
    between: Callable[[], None] = lambda: None,
) -> HnswIndex:
    """A fresh graph of `vectors` float32 [n, dim]; other threads search on meanwhile.

    `threads` is asked before each PIECE of rows how many may add it; `between` is called after it,
    and may raise to give up.
    """
    space = "l2" if spec.metric == "squared_l2" else "ip"
    graph = Hnsw(space, spec.dim, max(1, len(labels)), M, EF_CONSTRUCTION)
    if _is_large(graph):
        # Nothing is written yet. A walk goes from one record to any other, and with small pages
        # waits as long for where it is as for what is there. A kernel without large pages refuses.
        graph.advise(_MADV_HUGEPAGE)
    rows = np.arange(len(labels))
    _add(graph, spec, vectors, rows, rows, threads, between)
    index = HnswIndex(spec, labels, graph)
    _tune(index, between)
    return index


def _add(
    graph: Hnsw,
    spec: SpaceSpec,
    vectors: Content,
    rows: Rows,
    names: Rows,
    threads: Threads,
    between: Callable[[], None],
) -> None:
    """Add `rows` of `vectors` in pieces, under `names`."""
    for start in range(0, len(rows), PIECE):
        piece = slice(start, start + PIECE)
        prepared = prepare(spec.metric, vectors[rows[piece]])
        graph.add(prepared, names[piece], threads())
        between()


def revive(
    old: Skeleton,
    spec: SpaceSpec,
    labels: Labels,
    vectors: Content,
    between: Callable[[], None] = lambda: None,
) -> tuple[HnswIndex, Rows]:
    """The links of `old` over as many of these vectors as had a place there, and the rows that had
    none: they came since, or were replaced. Vectors are read once, in order.

    Raises VerificationError where the outcome would find less than LEAST_RECALL, too much has
    changed, or metrics differ: build afresh then.
    """
    _refuse_metric(old.spec, spec)
    _refuse_distant(len(old.links), old.labels, labels)
    graph, rows = fleshed(old, spec, labels, vectors, between)
    there = np.zeros(len(labels), np.bool_)
    there[rows[rows >= 0]] = True
    # Rows are counted among those that are there.
    counted = np.append(np.cumsum(there) - 1, -1)[rows]
    fresh = old.fresh and old.spec.space == spec.space
    index = HnswIndex(spec, labels[there], graph, counted, fresh=fresh)
    if _unchanged(old, spec, labels, rows):
        # To compare some of its vectors with all takes a third of a start.
        graph.ef = old.ef
    else:
        _accept(index, between)
    return index, np.flatnonzero(~there)


def _unchanged(old: Skeleton, spec: SpaceSpec, labels: Labels, rows: Rows) -> bool:
    """Whether each element has the very vector that it was tuned with."""
    return (
        old.ef in TRIED_EF
        and old.sums is not None
        and old.spec.space == spec.space
        and np.array_equal(old.labels, labels)
        and np.array_equal(old.rows, rows)
    )


def _refuse_metric(old: SpaceSpec, spec: SpaceSpec) -> None:
    if old.metric != spec.metric:
        raise VerificationError("the graph is of another metric; build a fresh one")


def _refuse_distant(elements: int, old: Labels, labels: Labels) -> None:
    kept = len(np.intersect1d(old, labels, assume_unique=True))
    # Dead elements are in the way of every search; new ones cost what they cost in a build.
    changes = len(labels) - kept + elements - kept
    if changes > LARGEST_CHANGE * len(labels):
        raise VerificationError(f"{changes} of {len(labels)} rows changed; build a fresh graph")


def _accept(index: HnswIndex, between: Callable[[], None]) -> None:
    if (found := _tune(index, between)) < LEAST_RECALL:
        raise VerificationError(
            f"the carried graph finds {found:.3f} of the true neighbours, expected {LEAST_RECALL}; "
            "build a fresh one"
        )


def load(path: Path, spec: SpaceSpec, labels: Labels, vectors: Content) -> tuple[HnswIndex, Rows]:
    """`revive` what a checked file holds. Raises VerificationError before hnswlib sees a byte,
    NotFoundError."""
    return revive(read_skeleton(path, spec), spec, labels, vectors)


def carry(
    old: HnswIndex,
    spec: SpaceSpec,
    labels: Labels,
    vectors: Content,
    *,
    threads: Threads = one_thread,
    between: Callable[[], None] = lambda: None,
) -> HnswIndex:
    """The graph of `old` over new content, 40 times faster than a fresh one.

    After an upgrade `spec` is another space: the links stay and the vectors are replaced, for an
    upgrade keeps most neighbours; searching then takes a larger ef. Within one space, what is gone
    is marked, and what is new is added. `old` is left as it is. Raises VerificationError where the
    outcome would find less than LEAST_RECALL, or metrics differ. `threads` and `between` as in
    `build`.
    """
    _refuse_metric(old.spec, spec)
    skeleton = old.skeleton(sums=old.spec.space == spec.space)
    graph, rows = fleshed(skeleton, spec, labels, vectors, between)
    added = np.setdiff1d(np.arange(len(labels)), rows)
    if len(added):
        # Nobody searches it yet.
        graph.resize(len(rows) + len(added))
        names = len(rows) + np.arange(len(added))
        _add(graph, spec, vectors, added, names, threads, between)
        rows = np.concatenate([rows, added])
    fresh = old.fresh and old.spec.space == spec.space
    index = HnswIndex(spec, labels, graph, rows, fresh=fresh)
    _accept(index, between)
    return index


def renew(
    spec: SpaceSpec,
    labels: Labels,
    vectors: Content,
    *,
    old: HnswIndex | None = None,
    threads: Threads = one_thread,
    between: Callable[[], None] = lambda: None,
) -> HnswIndex:
    """The cheapest good index of this content: `old`, as it is or carried to what changed; else a
    fresh one.

    `old` may be of the space before an upgrade. What is carried to another space is not `fresh`,
    and gives way to a fresh build when there is time. `between` as in `build`.
    """
    if old is not None:
        if _alike(old, spec, labels, vectors):
            return old
        with contextlib.suppress(VerificationError):
            _refuse_distant(len(old.graph), old.labels, labels)
            return carry(old, spec, labels, vectors, threads=threads, between=between)
    return build(spec, labels, vectors, threads=threads, between=between)


def _alike(old: HnswIndex, spec: SpaceSpec, labels: Labels, vectors: Content) -> bool:
    return (
        old.spec.space == spec.space
        and np.array_equal(old.labels, labels)
        and all(
            np.array_equal(
                old.vectors[start : start + PIECE],
                prepare(spec.metric, vectors[start : start + PIECE]),
            )
            for start in range(0, len(labels), PIECE)
        )
    )


def tuned(
    index: HnswIndex, queries: Vectors, between: Callable[[], None] = lambda: None
) -> HnswIndex:
    """The same index, wide enough for `queries` [q, dim] that were really asked: they may be of
    another distribution than the vectors, and then find far less. `between` may raise to give up.
    """
    index = index.seeking(0)
    farthest = _farthest(index, queries, between)
    for ef in (index.ef, *(ef for ef in WIDEST_EF if ef > index.ef)):
        found = index.seeking(ef)
        if _recall(found, queries, farthest, between) >= LEAST_RECALL:
            break
    return found


def _tune(index: HnswIndex, between: Callable[[], None] = lambda: None) -> float:
    """Set the smallest ef that finds enough of its own vectors, or the largest; returns the recall
    it gives. Nobody searches it yet."""
    probes = index.vectors[:: max(1, len(index.labels) // PROBES)][:PROBES]
    farthest = _farthest(index, probes, between)
    found = 0.0
    for ef in TRIED_EF:
        index.graph.ef = ef
        if (found := _recall(index, probes, farthest, between)) >= LEAST_RECALL:
            break
    return found


def _farthest(index: HnswIndex, probes: Vectors, between: Callable[[], None]) -> Vectors:
    """How far the last of the K nearest lies of each, [q, 1]."""
    farthest = [np.empty((0, 1), np.float32)]
    # A few at a time: each brings its distance to every row into memory.
    for start in range(0, len(probes), PROBES_AT_ONCE):
        piece = probes[start : start + PROBES_AT_ONCE]
        farthest.append(index.exact(piece, min(K, len(index.labels))).distances[:, -1:])
        between()
    return np.concatenate(farthest)


def _recall(
    index: HnswIndex, probes: Vectors, farthest: Vectors, between: Callable[[], None]
) -> float:
    """Share of the true K nearest of the probes that `index` finds for one query at a time: many
    at once are cheaper compared with every row, and would say nothing of the graph."""
    if not len(probes):
        return 1.0
    found = []
    for probe in probes:
        found.append(index.search(probe[None], min(K, len(index.labels))).distances)
        between()
    # By distance, not by label: one of several equal vectors is as good as another.
    return float((np.concatenate(found) <= farthest * (1 + 1e-5) + 1e-6).mean())
