"""Making graphs for approximate search: fresh, from a file, or over other vectors.

Imported by server, training and report only.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hnswlib
import numpy as np

from nobackfill.errors import VerificationError
from nobackfill.gallery.search import distances, graph_memory
from nobackfill.gallery.search.graph_index import HnswIndex
from nobackfill.gallery.search.index import Content, Labels, Rows
from nobackfill.gallery.search.skeleton import Skeleton, fleshed, read
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.vectors import Vectors

__all__ = ["HnswIndex", "build", "carry", "load", "renew", "revive", "tuned"]

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
    graph = hnswlib.Index("l2" if spec.metric == "squared_l2" else "ip", spec.dim)
    graph.init_index(max(1, len(labels)), M=M, ef_construction=EF_CONSTRUCTION, random_seed=1)
    graph_memory.use_large_pages(graph)
    rows = np.arange(len(labels))
    _add(graph, spec, vectors, rows, rows, threads, between)
    index = HnswIndex(spec, labels, graph)
    _tune(index, between)
    return index


def _add(
    graph: Any,
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
        prepared = distances.prepare(spec.metric, vectors[rows[piece]])
        graph.add_items(prepared, names[piece], num_threads=threads())
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
        graph.set_ef(old.ef)
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
    return revive(read(path, spec), spec, labels, vectors)


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
        graph.resize_index(len(rows) + len(added))
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
            _refuse_distant(old.graph.get_current_count(), old.labels, labels)
            return carry(old, spec, labels, vectors, threads=threads, between=between)
    return build(spec, labels, vectors, threads=threads, between=between)


def _alike(old: HnswIndex, spec: SpaceSpec, labels: Labels, vectors: Content) -> bool:
    return (
        old.spec.space == spec.space
        and np.array_equal(old.labels, labels)
        and all(
            np.array_equal(
                old.vectors[start : start + PIECE],
                distances.prepare(spec.metric, vectors[start : start + PIECE]),
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
        index.graph.set_ef(ef)
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
