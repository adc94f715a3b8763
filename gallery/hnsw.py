"""Approximate search: an hnswlib graph that is never changed once it is made.

Imported by server, training and report only. The graph's own labels are rows of `vectors`.
"""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import hnswlib
import numpy as np
from numpy.typing import NDArray

from gallery import distances, index_file
from gallery.exact import ExactIndex
from gallery.index import Index, Labels, Mask, Neighbours, best
from gallery.spec import SpaceSpec
from release.errors import VerificationError
from release.vectors import Vectors

ENGINE = f"hnswlib {version('hnswlib')}"
# Links a row (Malkov and Yashunin's M), candidates while building, candidates while searching.
M = 16
EF_CONSTRUCTION = 100
EF = 64
# Candidates ranked again by exact distance, beyond k.
SPARE_CANDIDATES = 6
# A filter that leaves fewer rows than this is answered exactly.
EXACT_ROWS = 2000
# Candidates asked of the graph at most; beyond, exact search is faster.
MOST_CANDIDATES = 2000


class HnswIndex:
    """A graph over the rows of `vectors`; a larger `ef` finds more, and takes longer."""

    def __init__(
        self, spec: SpaceSpec, labels: Labels, vectors: Vectors, graph: Any, ef: int = EF
    ) -> None:
        """`graph` holds row i of the prepared `vectors` under label i; nobody else changes it."""
        graph.set_ef(ef)
        self.spec = spec
        self.labels = labels
        self.vectors = vectors
        self.graph = graph
        self._exact = ExactIndex(spec, labels, vectors)

    def search(self, queries: Vectors, k: int, allowed: Mask | None = None) -> Neighbours:
        """See Index.search."""
        count = len(self.labels)
        passing = count if allowed is None else int(allowed.sum())
        wanted = min(k + SPARE_CANDIDATES, passing)
        # Rows met on the way that may not be found make the search wider.
        asked = int(1.2 * wanted * count / max(1, passing)) if allowed is not None else wanted
        if passing <= EXACT_ROWS or asked > MOST_CANDIDATES:
            return self._exact.search(queries, k, allowed)
        queries = distances.prepare(self.spec.metric, queries)
        try:
            rows = self.graph.knn_query(queries, k=asked, num_threads=1)[0].astype(np.int64)
        except RuntimeError:
            # Its word for fewer rows reached than asked for: parts of the graph hang apart.
            return self._exact.search(queries, k, allowed)
        if allowed is None:
            return self._ranked(queries, rows, k)
        found = allowed[rows]
        # Allowed rows first, each group in the order of distance.
        order = np.argsort(~found, axis=1, kind="stable")[:, :wanted]
        answer = self._ranked(queries, np.take_along_axis(rows, order, axis=1), k)
        short = found.sum(axis=1) < wanted
        if short.any():
            exact = self._exact.search(queries[short], k, allowed)
            answer.labels[short] = exact.labels
            answer.distances[short] = exact.distances
        return answer

    def _ranked(self, queries: Vectors, rows: NDArray[np.int64], k: int) -> Neighbours:
        exact = distances.between(self.spec.metric, queries, self.vectors[rows])
        return best(self.labels[rows], exact, k)

    def save(self, path: Path) -> None:
        """Write a checked file. Raises CannotWriteError."""
        state = self.graph.__getstate__()[0]
        arrays = {key: value for key, value in state.items() if isinstance(value, np.ndarray)}
        parameters = {key: value for key, value in state.items() if key not in arrays}
        index_file.write(path, self.spec, ENGINE, parameters, {"labels": self.labels} | arrays)


def build(spec: SpaceSpec, labels: Labels, vectors: Vectors, *, threads: int = 1) -> HnswIndex:
    """A fresh graph of `vectors` float32 [n, dim]; other threads search on meanwhile."""
    prepared = distances.prepare(spec.metric, vectors)
    graph = hnswlib.Index("l2" if spec.metric == "squared_l2" else "ip", spec.dim)
    graph.init_index(len(labels), M=M, ef_construction=EF_CONSTRUCTION, random_seed=1)
    graph.add_items(prepared, np.arange(len(labels)), num_threads=threads)
    return HnswIndex(spec, labels, prepared, graph)


def load(path: Path, spec: SpaceSpec) -> HnswIndex:
    """Read a checked file. Raises VerificationError before hnswlib sees a byte, NotFoundError."""
    file = index_file.read(path, spec, ENGINE)
    arrays = dict(file.arrays)
    labels = arrays.pop("labels")
    state = dict(file.parameters) | arrays
    vectors = _vectors(state, spec.dim)
    return HnswIndex(spec, labels, vectors, hnswlib.Index(state))


def _vectors(state: dict[str, Any], dim: int) -> Vectors:
    """The vectors that lie in a graph's state, [n, dim] by row."""
    records = state["data_level0"].view(np.uint8).reshape(-1, state["size_data_per_element"])
    start = state["offset_data"]
    vectors = np.empty((len(records), dim), np.float32)
    rows = state["label_lookup_external"]
    vectors[rows] = records[state["label_lookup_internal"], start : start + 4 * dim].view("<f4")
    return vectors


def inherit(old: HnswIndex, spec: SpaceSpec, labels: Labels, vectors: Vectors) -> HnswIndex:
    """The graph of `old` over new vectors of the same items: serves at once, at a larger ef."""
    raise NotImplementedError


def recall(index: Index, *, queries: int = 100, k: int = 10) -> float:
    """Share of the true `k` nearest that `index` finds, probed with some of its own vectors."""
    step = max(1, len(index.labels) // queries)
    probes = index.vectors[::step][:queries]
    found = index.search(probes, k).labels
    true = ExactIndex(index.spec, index.labels, index.vectors).search(probes, k).labels
    if not len(probes):
        raise VerificationError("expected an index with vectors to probe, got an empty one")
    hits = (found[:, :, None] == true[:, None, :]) & (true[:, None, :] >= 0)
    return float(hits.sum() / (true >= 0).sum())
