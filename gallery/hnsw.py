"""Approximate search: an hnswlib graph that is never changed once it is made.

Imported by server, training and report only. The graph's own labels are rows of `vectors`.
"""

import contextlib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hnswlib
import numpy as np

from gallery import distances, graph_state, index_file
from gallery.exact import ExactIndex
from gallery.index import Index, Labels, Mask, Neighbours, best
from gallery.spec import SpaceSpec
from release.errors import NotFoundError, VerificationError
from release.vectors import Vectors

ENGINE = f"hnswlib {version('hnswlib')}"
# Rows that are added at a time; a build can be given up between two pieces.
PIECE = 500
# Links a row (Malkov and Yashunin's M), and candidates while building.
M = 16
EF_CONSTRUCTION = 100
# Candidates while searching: the first that finds LEAST_RECALL of the 10 nearest in a probe.
TRIED_EF = (64, 128, 256, 512)
LEAST_RECALL = 0.99
# Queries of such a probe, and how many neighbours of each.
PROBES = 64
K = 10
# Rows that came or went, as a share of all, up to which a graph is carried rather than built.
LARGEST_CHANGE = 0.3
# Microseconds, measured at 100,000 x 128 with filters that pass .5 % to 50 %: which of the two ways
# is taken. Exact: for each row that passes, once and for each query. Graph: for each query, and for
# each candidate it is asked for.
_EXACT_ROW, _EXACT_ROW_QUERY = 0.2, 0.02
_GRAPH_QUERY, _GRAPH_CANDIDATE = 150.0, 1.2


class HnswIndex:
    """A graph over the rows of `vectors`; a larger `ef` finds more, and takes longer."""

    def __init__(
        self, spec: SpaceSpec, labels: Labels, vectors: Vectors, graph: Any, *, fresh: bool = True
    ) -> None:
        """`graph` holds row i of the prepared `vectors` under label i; nobody else changes it.

        `fresh`: its links were made for these vectors, not for those of a space before an upgrade.
        """
        self.fresh = fresh
        self.ef = TRIED_EF[0]
        graph.set_ef(self.ef)
        self.spec = spec
        self.labels = labels
        self.vectors = vectors
        self.graph = graph
        self._exact = ExactIndex(spec, labels, vectors)

    def search(
        self, queries: Vectors, k: int, allowed: Mask | None = None, passing: int | None = None
    ) -> Neighbours:
        """See Index.search. Distances are the graph's own, float32."""
        count = len(self.labels)
        if passing is None:
            passing = count if allowed is None else int(np.count_nonzero(allowed))
        asked = wanted = min(k, passing)
        if allowed is not None:
            # Rows met on the way that may not be found make the search wider.
            asked = min(count, 8 + int(1.2 * wanted * count / max(1, passing)))
        exact_cost = passing * (_EXACT_ROW + _EXACT_ROW_QUERY * len(queries))
        if exact_cost <= len(queries) * (_GRAPH_QUERY + _GRAPH_CANDIDATE * asked):
            return self._exact.search(queries, k, allowed)
        prepared = distances.prepare(self.spec.metric, queries)
        try:
            rows, apart = self.graph.knn_query(prepared, k=asked, num_threads=1)
        except RuntimeError:
            # Its word for fewer rows reached than asked for: parts of the graph hang apart.
            return self._exact.search(queries, k, allowed)
        # The inner product of a vector with itself can be rounded to above 1.
        np.maximum(apart, 0, out=apart)
        if allowed is None:
            return _answer(self.labels[rows.view(np.int64)], apart, k)
        found = allowed[rows.view(np.int64)]
        # Allowed rows first, still by distance.
        order = np.argsort(~found, axis=1, kind="stable")[:, :wanted]
        rows = np.take_along_axis(rows.view(np.int64), order, axis=1)
        answer = _answer(self.labels[rows], np.take_along_axis(apart, order, axis=1), k)
        short = found.sum(axis=1) < wanted
        if short.any():
            exact = self._exact.search(queries[short], k, allowed)
            answer.labels[short] = exact.labels
            answer.distances[short] = exact.distances
        return answer

    def save(self, path: Path) -> None:
        """Write a checked file. Raises CannotWriteError."""
        state = self.graph.__getstate__()[0]
        arrays = {key: value for key, value in state.items() if isinstance(value, np.ndarray)}
        parameters = {key: value for key, value in state.items() if key not in arrays}
        parameters["fresh"] = self.fresh
        index_file.write(path, self.spec, ENGINE, parameters, {"labels": self.labels} | arrays)


def _answer(labels: Labels, apart: Vectors, k: int) -> Neighbours:
    """Sorted candidates as an answer: equal distances by label, padded to k."""
    if labels.shape[1] < k or (apart[:, 1:] == apart[:, :-1]).any():
        return best(labels, apart, k)
    return Neighbours(labels, apart)


def build(
    spec: SpaceSpec,
    labels: Labels,
    vectors: Vectors,
    *,
    threads: int = 1,
    between: Callable[[], None] = lambda: None,
) -> HnswIndex:
    """A fresh graph of `vectors` float32 [n, dim]; other threads search on meanwhile.

    `between` is called after each PIECE of rows, and may raise to give up.
    """
    prepared = distances.prepare(spec.metric, vectors)
    graph = hnswlib.Index("l2" if spec.metric == "squared_l2" else "ip", spec.dim)
    graph.init_index(max(1, len(labels)), M=M, ef_construction=EF_CONSTRUCTION, random_seed=1)
    _add(graph, prepared, np.arange(len(labels)), threads, between)
    index = HnswIndex(spec, labels, prepared, graph)
    _tune(index, between)
    return index


def _add(
    graph: Any, prepared: Vectors, rows: Labels, threads: int, between: Callable[[], None]
) -> None:
    """Add `rows` of `prepared` in pieces."""
    for start in range(0, len(rows), PIECE):
        piece = rows[start : start + PIECE]
        graph.add_items(prepared[piece], piece, num_threads=threads)
        between()


def load(path: Path, spec: SpaceSpec) -> HnswIndex:
    """Read a checked file. Raises VerificationError before hnswlib sees a byte, NotFoundError."""
    file = index_file.read(path, spec, ENGINE)
    arrays = dict(file.arrays)
    labels = arrays.pop("labels")
    state = dict(file.parameters) | arrays
    vectors = np.empty((len(labels), spec.dim), np.float32)
    alive = ~graph_state.deleted(state)
    vectors[graph_state.labels(state)[alive]] = graph_state.vectors(state, spec.dim)[alive]
    fresh = state.pop("fresh")
    index = HnswIndex(spec, labels, vectors, hnswlib.Index(state), fresh=fresh)
    _tune(index)
    return index


def carry(
    old: HnswIndex,
    spec: SpaceSpec,
    labels: Labels,
    vectors: Vectors,
    *,
    threads: int = 1,
    between: Callable[[], None] = lambda: None,
) -> HnswIndex:
    """The graph of `old` over new content, 40 times faster than a fresh one.

    After an upgrade `spec` is another space: the links stay and the vectors are replaced, for an
    upgrade keeps most neighbours; searching then takes a larger ef. Within one space, what is gone
    is marked, and what is new is added. `old` is left as it is. Raises VerificationError where the
    outcome would find less than LEAST_RECALL, or metrics differ: build afresh then. `threads` and
    `between` as in `build`.
    """
    if old.spec.metric != spec.metric:
        raise VerificationError("the graph is of another metric; build a fresh one")
    prepared = distances.prepare(spec.metric, vectors)
    state = old.graph.__getstate__()[0]
    # From element to old row to label to new row.
    names, alive = graph_state.labels(state), ~graph_state.deleted(state)
    rows = np.full(len(names), -1, np.int64)
    there = np.searchsorted(labels, old.labels)
    there[there == len(labels)] = 0
    kept = labels[there] == old.labels if len(labels) else np.zeros(len(old.labels), np.bool_)
    if old.spec.space == spec.space:
        # A vector that was replaced is another neighbour: its element cannot stay where it is.
        kept[kept] = (old.vectors[kept] == prepared[there[kept]]).all(axis=1)
    rows[alive] = np.where(kept, there, -1)[names[alive]]
    added = np.setdiff1d(np.arange(len(labels)), rows)
    state = graph_state.carried(state, rows, prepared, room=len(added))
    graph = hnswlib.Index(state)
    between()
    _add(graph, prepared, added, threads, between)
    fresh = old.fresh and old.spec.space == spec.space
    index = HnswIndex(spec, labels, prepared, graph, fresh=fresh)
    if (found := _tune(index, between)) < LEAST_RECALL:
        raise VerificationError(
            f"the carried graph finds {found:.3f} of the true neighbours, expected {LEAST_RECALL}; "
            "build a fresh one"
        )
    return index


def renew(
    spec: SpaceSpec,
    labels: Labels,
    vectors: Vectors,
    *,
    old: HnswIndex | None = None,
    file: Path | None = None,
    threads: int = 1,
    between: Callable[[], None] = lambda: None,
) -> HnswIndex:
    """The cheapest good index of this content: what `file` holds or `old`, as it is or carried to
    what changed; else a fresh one.

    `old` may be of the space before an upgrade. What is carried to another space is not `fresh`,
    and gives way to a fresh build when there is time. `between` as in `build`.
    """
    if old is None and file is not None:
        with contextlib.suppress(NotFoundError, VerificationError):
            old = load(file, spec)
    prepared = distances.prepare(spec.metric, vectors)
    if old is not None:
        alike = old.spec.space == spec.space and np.array_equal(old.labels, labels)
        if alike and np.array_equal(old.vectors, prepared):
            return old
        kept = len(np.intersect1d(old.labels, labels, assume_unique=True))
        # Dead elements are in the way of every search; new ones cost what they cost in a build.
        changes = len(labels) - kept + old.graph.get_current_count() - kept
        if changes <= LARGEST_CHANGE * len(labels):
            with contextlib.suppress(VerificationError):
                return carry(old, spec, labels, prepared, threads=threads, between=between)
    return build(spec, labels, prepared, threads=threads, between=between)


def _tune(index: HnswIndex, between: Callable[[], None] = lambda: None) -> float:
    """Set the smallest ef that finds enough, or the largest; returns the recall it gives."""
    probes, farthest = _truth(index)
    found = 0.0
    for ef in TRIED_EF:
        between()
        index.graph.set_ef(ef)
        index.ef = ef
        if (found := _recall(index, probes, farthest)) >= LEAST_RECALL:
            break
    return found


def _truth(index: Index) -> tuple[Vectors, Vectors]:
    """Some of its own vectors [q, dim], and how far the last of the K nearest lies [q, 1]."""
    probes = index.vectors[:: max(1, len(index.labels) // PROBES)][:PROBES]
    if not len(probes):
        return probes, np.empty((0, 1), np.float32)
    exact = ExactIndex(index.spec, index.labels, index.vectors)
    return probes, exact.search(probes, min(K, len(index.labels))).distances[:, -1:]


def _recall(index: Index, probes: Vectors, farthest: Vectors) -> float:
    """Share of the true K nearest of the probes that `index` finds."""
    if not len(probes):
        return 1.0
    found = index.search(probes, min(K, len(index.labels))).distances
    # By distance, not by label: one of several equal vectors is as good as another.
    return float((found <= farthest * (1 + 1e-5) + 1e-6).mean())
