"""Build graphs for approximate search, and search them.

A graph is built from scratch, read from a file, or transferred to other vectors. Only server,
training and report import this module.
"""

import contextlib
import copy
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nobackfill.errors import VerificationError
from nobackfill.gallery.search import graph_file, view
from nobackfill.gallery.search.exact import FEW_ROWS_SHARE, ExactIndex, distance_offsets
from nobackfill.gallery.search.graph_file import (
    GraphSkeleton,
    Hnsw,
    RecordLayout,
    hash_vector_rows,
    read_skeleton,
    rebuild_graph,
)
from nobackfill.gallery.search.index import (
    Content,
    Labels,
    Mask,
    Neighbours,
    Rows,
    SelectedRows,
    lower_thread_priority,
    nearest_candidates,
    prepare_vectors,
)
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.vectors import Vectors

# Microseconds, measured at 200,000 x 128 with filters that pass .1 % to 95 %; they decide between
# the two ways. Exact: for each passing row, once and for each query. Graph: for each query and each
# candidate.
_EXACT_ROW, _EXACT_ROW_QUERY = 0.08, 0.01
_GRAPH_QUERY, _GRAPH_CANDIDATE = 80.0, 0.6
# Enough hits must be among this share of the candidates: at its far end, a graph finds less.
_NEAR_END = 0.75


class HnswIndex:
    """A graph with the labels of its vectors, which exist only in the graph's own memory.

    A larger `ef` finds more and takes longer.
    """

    def __init__(
        self,
        spec: SpaceSpec,
        labels: Labels,
        graph: Hnsw,
        rows: Rows | None = None,
        *,
        links_fit_space: bool = True,
    ) -> None:
        """Wrap a graph; no other code may change it.

        A graph of more than 32 MiB is moved to large memory pages by a daemon thread.

        Args:
            spec: The space.
            labels: int64 [n], increasing; n may be 0.
            graph: The graph.
            rows: int [names], row in `labels` of each name in the graph; -1 for none, which must be
                marked deleted. None: the name is the row.
            links_fit_space: Whether the links were built for these vectors. Otherwise they were
                built for another space's vectors.
        """
        self.links_fit_space = links_fit_space
        self._least = 0
        self.spec = spec
        self.labels = labels
        self.graph = graph
        self._rows = rows
        names = graph_file.graph_labels(graph)
        # Row of each element in the order of the graph's memory, and element of each row.
        self._held = names if rows is None else rows[names]
        memory = graph_file.graph_vectors(graph)
        self.vectors: Content = memory
        self._elements: Rows | None = None
        element_labels = labels
        if not np.array_equal(self._held, np.arange(len(labels))):
            alive = np.flatnonzero(self._held >= 0)
            self._elements = np.empty(len(labels), np.intp)
            self._elements[self._held[alive]] = alive
            self.vectors = SelectedRows(memory, self._elements)
            element_labels = np.append(labels, -1)[self._held]
        _move_to_large_pages(graph)
        self._exact = ExactIndex.from_prepared(
            spec, element_labels, memory, distance_offsets(spec, memory)
        )
        self.compiled = view.prepare_compiled_graph(graph, self._held, labels, self._elements)

    @property
    def ef(self) -> int:
        """Return the least number of candidates of a search."""
        return max(self._least, self.graph.ef)

    def search_exactly(self, queries: Vectors, k: int, mask: Mask | None = None) -> Neighbours:
        """Search by comparing every row, as ExactIndex.search does.

        Args:
            queries: float32 [q, dim], checked; q may be 0.
            k: At least 1; it may be above n.
            mask: bool [n], the rows that may be found; None for all.

        Returns:
            Neighbours [q, k], nearest first, equal distances by label; padded with label -1 and
            infinity if there are fewer rows.
        """
        if self._elements is None:
            return self._exact.search(queries, k, mask)
        if mask is not None:
            rows = np.flatnonzero(mask)
            if len(rows) * FEW_ROWS_SHARE <= len(mask):
                return self._exact.search_rows(queries, k, self._elements[rows])
        elements = np.zeros(len(self._held), np.bool_)
        elements[self._elements if mask is None else self._elements[mask]] = True
        return self._exact.search(queries, k, elements)

    def with_candidates(self, ef: int) -> "HnswIndex":
        """Return an index over the same graph with at least `ef` candidates for each search.

        The graph itself does not change: it may be in use, and its own ef applies to every search.

        Args:
            ef: Minimum number of candidates; 0 for the graph's own. Unlike in `search`, n or more
                does not make the search exact.

        Returns:
            The new index, which shares labels, vectors and graph with this one; this one does not
            change.
        """
        index = copy.copy(self)
        index._least = ef
        return index

    def search(
        self,
        queries: Vectors,
        k: int,
        mask: Mask | None = None,
        passing_count: int | None = None,
        ef: int = 0,
    ) -> Neighbours:
        """Return the k nearest rows to each query by a walk of the graph; a few may be missed.

        If comparing every row is cheaper, or the walk finds too few, every row is compared.
        Distances of a walk are computed in float32. Threads may search at once.

        Args:
            queries: float32 [q, dim], checked; q may be 0.
            k: At least 1; it may be above n.
            mask: bool [n], the rows that may be found; None for all. Another length is not always
                noticed, and raises IndexError where it is.
            passing_count: Number of these rows; None to count them, which takes longer than a
                search. It is not checked; without a mask it is ignored.
            ef: Minimum number of candidates; 0 for the index's own number, EXACT_EF or at least n
                for an exact search.

        Returns:
            Neighbours [q, k], nearest first, equal distances by label; padded with label -1 and
            infinity if there are fewer rows.
        """
        candidates = self._candidates(k, ef)
        if candidates is None:
            return self.search_exactly(queries, k, mask)
        if mask is None:
            near_rows = None
            if not _exact_is_cheaper(len(self.labels), len(queries), candidates):
                near_rows = self._near(prepare_vectors(self.spec.metric, queries), candidates)
            if near_rows is None:
                return self.search_exactly(queries, k)
            return _answer(self.labels[near_rows[0][:, :k]], near_rows[1][:, :k], k)
        if passing_count is None:
            passing_count = int(np.count_nonzero(mask))
        answer = Neighbours(
            np.full((len(queries), k), -1, np.int64), np.full((len(queries), k), np.inf, np.float32)
        )
        wide = candidates if candidates > max(k, self.graph.ef) else 0
        unanswered = self._filtered(queries, k, mask, passing_count, wide, answer)
        if len(unanswered):
            exact = self.search_exactly(queries[unanswered], k, mask)
            answer.labels[unanswered], answer.distances[unanswered] = exact.labels, exact.distances
        return answer

    def walk_candidates(self, k: int, ef: int) -> int | None:
        """Return the number of candidates of a walk for one query; None if every row is compared
        instead.

        Args:
            k: Number of hits, at least 1.
            ef: Minimum number of candidates; 0 for the index's own number.

        Returns:
            The number, at most n; the graph uses its own where that is larger.
        """
        candidates = self._candidates(k, ef)
        exact = candidates is None or _exact_is_cheaper(len(self.labels), 1, candidates)
        return None if exact else candidates

    def _candidates(self, k: int, ef: int) -> int | None:
        count = len(self.labels)
        # hnswlib uses at least as many candidates as neighbours.
        wide = max(ef, self._least)
        return None if ef >= count else min(max(k, wide if wide > self.graph.ef else 0), count)

    def _filtered(
        self, queries: Vectors, k: int, mask: Mask, passing: int, wide: int, answer: Neighbours
    ) -> Rows:
        """Fill the answers that the graph gives at lower cost than comparing every passing row.

        Rows on the way that may not be found require a wider search: wide enough that, if the
        filter is independent of nearness, one query in two hundred finds too few. If it is not, the
        passing rows lie at the far end or beyond, and the graph is not used.

        Args:
            queries: float32 [q, dim].
            k: Number of hits.
            mask: bool [n], the rows that may be found.
            passing: Number of these rows.
            wide: Minimum number of candidates.
            answer: Filled in place.

        Returns:
            The queries without an answer.
        """
        count, target = len(self.labels), min(k, passing)
        some = (target + 2.5 * target**0.5 + 2) / _NEAR_END
        candidates = min(count, max(wide, int(some * count / max(1, passing))))
        every = np.arange(len(queries))
        if _exact_is_cheaper(passing, len(queries), candidates):
            return every
        result = self._near(prepare_vectors(self.spec.metric, queries), candidates)
        if result is None:
            return every
        rows, distances = result
        passes = mask[rows]
        near_end = candidates if candidates == count else int(_NEAR_END * candidates)
        full = np.count_nonzero(passes[:, :near_end], axis=1) >= target
        # Passing rows first, each part in the order of distance.
        order = np.argsort(~passes[full], axis=1, kind="stable")[:, :target]
        rows = np.take_along_axis(rows[full], order, axis=1)
        fuller = _answer(self.labels[rows], np.take_along_axis(distances[full], order, axis=1), k)
        answer.labels[full], answer.distances[full] = fuller.labels, fuller.distances
        unanswered: Rows = np.flatnonzero(~full)
        return unanswered

    def _near(self, prepared: Vectors, candidates: int) -> tuple[Rows, Vectors] | None:
        """Return rows and distances [q, candidates], nearest first; None if the graph is not
        connected enough."""
        result = self.graph.search(prepared, candidates)
        if result is None:
            return None
        names, distances = result
        rows = names if self._rows is None else self._rows[names]
        # The inner product of a vector with itself may be rounded to above 1.
        np.maximum(distances, 0, out=distances)
        return rows, distances

    def skeleton(self, *, with_row_hashes: bool = True) -> GraphSkeleton:
        """Return a copy of the graph without its vectors.

        The links are copied; the labels and rows are this index's own arrays. No other thread may
        change the graph during the call.

        Args:
            with_row_hashes: Compute a sum of each vector, which an index file needs; it reads every
                vector. Without, the skeleton's `row_hashes` is None.
        """
        links = graph_file.copy_links(self.graph)
        vector_sums = (
            hash_vector_rows(graph_file.graph_vectors(self.graph)) if with_row_hashes else None
        )
        ef = self.graph.ef
        return GraphSkeleton(
            self.spec, self.labels, self._held, links, vector_sums, self.links_fit_space, ef
        )

    def save(self, path: Path) -> None:
        """Write an index file without the vectors, atomically, in place of any file there.

        It computes a sum of every vector. Only one process may write a path at a time: temporary
        files of others are removed.

        Args:
            path: The file, in an existing folder; it gets mode 0600.

        Raises:
            CannotWriteError: The file cannot be written; an earlier file stays.
        """
        self.skeleton().write(path)


# glibc's malloc maps larger blocks directly from the kernel.
_MAPPED_BYTES = 32 << 20
# Advice to Linux: use large pages from now on; move written memory to them at once (from 6.1 on).
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def _is_large(graph: Hnsw) -> bool:
    """Tell whether the records are a memory block of their own, in which large pages help."""
    return graph.capacity * RecordLayout.of(graph.dim, graph.m).record_bytes > _MAPPED_BYTES


def _move_to_large_pages(graph: Hnsw) -> None:
    """Move written records to large pages in a thread, while others read them.

    So a graph is usable right after it was read from its file. On a virtual machine the host must
    provide each large page, which takes 2 s for 660 MB.
    """

    def move() -> None:
        lower_thread_priority()
        if not graph.advise(_MADV_COLLAPSE):
            # An older kernel, or no free page: the kernel does it gradually.
            graph.advise(_MADV_HUGEPAGE)

    if _is_large(graph):
        threading.Thread(target=move, name="large pages", daemon=True).start()


def _exact_is_cheaper(passing: int, queries: int, candidates: int) -> bool:
    exact = passing * (_EXACT_ROW + _EXACT_ROW_QUERY * queries)
    return exact <= queries * (_GRAPH_QUERY + _GRAPH_CANDIDATE * candidates)


def _answer(labels: Labels, distances: Vectors, k: int) -> Neighbours:
    """Return sorted candidates as an answer: equal distances by label, padded to k."""
    if labels.shape[1] < k or (distances[:, 1:] == distances[:, :-1]).any():
        return nearest_candidates(labels, distances, k)
    return Neighbours(labels, distances)


# Rows that are added at a time; a build can be cancelled between two pieces.
PIECE_ROWS = 500
# Links of a row (Malkov and Yashunin's M), and candidates while building.
LINKS_PER_ROW = 16
EF_CONSTRUCTION = 100
# Candidates that are tried for searches: the first that finds LEAST_RECALL of the 10 nearest of a
# probe is used.
TRIED_EF = (48, 64, 128, 256, 512, 1024)
# The same for real queries.
WIDEST_EF = (*TRIED_EF, 2048, 4096)
LEAST_RECALL = 0.99
# Number of probes, and how many are searched exactly at a time; neighbours of each.
PROBES, PROBES_AT_ONCE = 64, 4
RECALL_NEIGHBOURS = 10
# A graph is transferred rather than built if at most this share of the rows was added or removed.
LARGEST_TRANSFER_CHANGE = 0.3

# Returns how many threads may be used now.
CountThreads = Callable[[], int]


def one_thread() -> int:
    """Return 1: rows are added in the same order each time, which gives the same graph."""
    return 1


def build_index(
    spec: SpaceSpec,
    labels: Labels,
    vectors: Content,
    *,
    count_threads: CountThreads = one_thread,
    after_piece: Callable[[], None] = lambda: None,
) -> HnswIndex:
    """Build a graph; other threads may search meanwhile.

    The ef of searches is chosen so that the index finds LEAST_RECALL of its own vectors'
    neighbours; if no tried ef does, it is the largest, without an error. With one thread, the same
    content gives the same graph. A graph of more than 32 MiB is moved to large memory pages by a
    daemon thread.

    Args:
        spec: The space.
        labels: int64 [n], increasing; n may be 0.
        vectors: float32 [n, dim], checked; copied into the graph. They are read once, in order, and
            an error of reading passes through.
        count_threads: Called before each piece of PIECE_ROWS rows: how many threads may add it.
        after_piece: Called after each piece, and between the probes; its error ends the build and
            passes through.
    """
    space = "l2" if spec.metric == "squared_l2" else "ip"
    graph = Hnsw(space, spec.dim, max(1, len(labels)), LINKS_PER_ROW, EF_CONSTRUCTION)
    if _is_large(graph):
        # Nothing is written yet. A walk jumps between records, and with small pages waits as long
        # for their addresses as for their content. A kernel without large pages refuses.
        graph.advise(_MADV_HUGEPAGE)
    rows = np.arange(len(labels))
    _add(graph, spec, vectors, rows, rows, count_threads, after_piece)
    index = HnswIndex(spec, labels, graph)
    _tune(index, after_piece)
    return index


def _add(
    graph: Hnsw,
    spec: SpaceSpec,
    vectors: Content,
    rows: Rows,
    names: Rows,
    count_threads: CountThreads,
    after_piece: Callable[[], None],
) -> None:
    """Add rows of vectors under given names, in pieces."""
    for start in range(0, len(rows), PIECE_ROWS):
        piece = slice(start, start + PIECE_ROWS)
        prepared = prepare_vectors(spec.metric, vectors[rows[piece]])
        graph.add(prepared, names[piece], count_threads())
        after_piece()


def rebuild_from_skeleton(
    old: GraphSkeleton,
    spec: SpaceSpec,
    labels: Labels,
    vectors: Content,
    after_piece: Callable[[], None] = lambda: None,
) -> tuple[HnswIndex, Rows]:
    """Rebuild a graph from a skeleton over vectors of the gallery, which are read once, in order.

    `old` does not change. Added rows are not in the index, so the caller searches them apart.

    Args:
        old: The skeleton.
        spec: The space of the vectors.
        labels: int64 [n], increasing. Without any, only an empty skeleton is accepted.
        vectors: float32 [n, dim].
        after_piece: Called after each piece; its error ends the work and passes through.

    Returns:
        The index, and the rows that it lacks because they are new or were replaced, int [m].

    Raises:
        VerificationError: The graph would find less than LEAST_RECALL, too much has changed, or the
            metrics differ: build a new one.
        DamagedError: As a VerificationError: `vectors` reads a damaged row.
        KeyError: The skeleton lacks a parameter of the graph.
    """
    _refuse_metric(old.spec, spec)
    _refuse_distant(len(old.links), old.labels, labels)
    graph, rows = rebuild_graph(old, spec, labels, vectors, after_piece)
    present = np.zeros(len(labels), np.bool_)
    present[rows[rows >= 0]] = True
    rows_among_present = np.append(np.cumsum(present) - 1, -1)[rows]
    own_links = old.links_fit_space and old.spec.space == spec.space
    index = HnswIndex(spec, labels[present], graph, rows_among_present, links_fit_space=own_links)
    if _unchanged(old, spec, labels, rows):
        # Skip the probe, which takes a third of the start.
        graph.ef = old.ef
    else:
        _accept(index, after_piece)
    return index, np.flatnonzero(~present)


def _unchanged(old: GraphSkeleton, spec: SpaceSpec, labels: Labels, rows: Rows) -> bool:
    """Tell whether each element has the same vector as when the graph was tuned."""
    return (
        old.ef in TRIED_EF
        and old.row_hashes is not None
        and old.spec.space == spec.space
        and np.array_equal(old.labels, labels)
        and np.array_equal(old.element_rows, rows)
    )


def _refuse_metric(old: SpaceSpec, spec: SpaceSpec) -> None:
    if old.metric != spec.metric:
        raise VerificationError(
            f"release {spec.release}: the search graph to reuse was built for the metric "
            f"{old.metric}, and the vectors are compared by {spec.metric}; build a new index"
        )


def _refuse_distant(elements: int, old: Labels, labels: Labels) -> None:
    common = len(np.intersect1d(old, labels, assume_unique=True))
    # Dead elements slow every search down; new ones cost as much as in a build.
    changes = len(labels) - common + elements - common
    if changes > LARGEST_TRANSFER_CHANGE * len(labels):
        raise VerificationError(
            f"the search graph to reuse is too old: {changes} items changed since it was built, "
            f"and the gallery has {len(labels)}; build a new index"
        )


def _accept(index: HnswIndex, after_piece: Callable[[], None]) -> None:
    if (recall := _tune(index, after_piece)) < LEAST_RECALL:
        raise VerificationError(
            f"the old vectors' search graph, used for the new vectors, finds {recall:.3f} of the "
            f"true neighbours, expected at least {LEAST_RECALL}; build a new index"
        )


def load_index(
    path: Path, spec: SpaceSpec, labels: Labels, vectors: Content
) -> tuple[HnswIndex, Rows]:
    """Read an index file, and rebuild its graph over a gallery's vectors, which are read once.

    Args:
        path: The file.
        spec: The space of the vectors.
        labels: int64 [n], increasing.
        vectors: float32 [n, dim], read once, in order; an error of reading passes through.

    Returns:
        The index, and the rows that it lacks because they are new or were replaced, int [m].

    Raises:
        NotFoundError: No such file.
        VerificationError: The file is damaged or of another space, too much has changed, or the
            graph would find less than LEAST_RECALL: build a new one.
        KeyError: An intact file lacks an array or a parameter of the graph.
    """
    return rebuild_from_skeleton(read_skeleton(path, spec), spec, labels, vectors)


def transfer_index(
    old: HnswIndex,
    spec: SpaceSpec,
    labels: Labels,
    vectors: Content,
    *,
    count_threads: CountThreads = one_thread,
    after_piece: Callable[[], None] = lambda: None,
) -> HnswIndex:
    """Transfer a graph to new content, 40 times faster than building one. `old` does not change.

    After an upgrade, `spec` is another space: the links stay and the vectors are replaced, since an
    upgrade preserves most neighbours; searches then need a larger ef. Within one space, removed
    rows are marked and new ones are added. The number of changed rows is not limited here.

    Args:
        old: The graph.
        spec: The space of the vectors.
        labels: int64 [n], increasing; n may be 0.
        vectors: float32 [n, dim], read once, in order, added rows twice; an error of reading passes
            through.
        count_threads: Called before each piece of added rows: how many threads may add it.
        after_piece: Called after each piece of work; its error ends it and passes through.

    Returns:
        A new index, with the ef that finds LEAST_RECALL of its own vectors' neighbours.

    Raises:
        VerificationError: The graph would find less than LEAST_RECALL, or the metrics differ: build
            a new one.
    """
    _refuse_metric(old.spec, spec)
    skeleton = old.skeleton(with_row_hashes=old.spec.space == spec.space)
    graph, rows = rebuild_graph(skeleton, spec, labels, vectors, after_piece)
    added = np.setdiff1d(np.arange(len(labels)), rows)
    if len(added):
        # No thread searches it yet.
        graph.resize(len(rows) + len(added))
        names = len(rows) + np.arange(len(added))
        _add(graph, spec, vectors, added, names, count_threads, after_piece)
        rows = np.concatenate([rows, added])
    own_links = old.links_fit_space and old.spec.space == spec.space
    index = HnswIndex(spec, labels, graph, rows, links_fit_space=own_links)
    _accept(index, after_piece)
    return index


def renew_index(
    spec: SpaceSpec,
    labels: Labels,
    vectors: Content,
    *,
    old: HnswIndex | None = None,
    count_threads: CountThreads = one_thread,
    after_piece: Callable[[], None] = lambda: None,
) -> HnswIndex:
    """Return a good index of some content at the lowest cost: `old` itself, `old` transferred, or a
    new one.

    Args:
        spec: The space of the vectors.
        labels: int64 [n], increasing; n may be 0.
        vectors: float32 [n, dim], read up to three times. An error of reading passes through,
            except for a VerificationError during a transfer.
        old: An index, perhaps of the space before an upgrade. A transfer to another space does not
            have `links_fit_space`; replace it by a build when there is time. None builds a new
            one. So does an `old` of another metric, of which more than LARGEST_TRANSFER_CHANGE of
            the rows changed, or that would find less than LEAST_RECALL.
        count_threads: Called before each piece of added rows: how many threads may add it.
        after_piece: Called after each piece of work; its error ends it and passes through, except
            for a VerificationError during a transfer, which leads to a build.

    Returns:
        The index; `old` itself if its labels and vectors are the same, bit for bit.
    """
    if old is not None:
        if _alike(old, spec, labels, vectors):
            return old
        with contextlib.suppress(VerificationError):
            _refuse_distant(len(old.graph), old.labels, labels)
            return transfer_index(
                old, spec, labels, vectors, count_threads=count_threads, after_piece=after_piece
            )
    return build_index(spec, labels, vectors, count_threads=count_threads, after_piece=after_piece)


def _alike(old: HnswIndex, spec: SpaceSpec, labels: Labels, vectors: Content) -> bool:
    return (
        old.spec.space == spec.space
        and np.array_equal(old.labels, labels)
        and all(
            np.array_equal(
                old.vectors[start : start + PIECE_ROWS],
                prepare_vectors(spec.metric, vectors[start : start + PIECE_ROWS]),
            )
            for start in range(0, len(labels), PIECE_ROWS)
        )
    )


def tune_index(
    index: HnswIndex, queries: Vectors, after_piece: Callable[[], None] = lambda: None
) -> HnswIndex:
    """Return the index with enough candidates to find LEAST_RECALL of real queries' neighbours, or
    with the largest number that is tried.

    Their distribution may differ from that of the vectors, so that a search finds far less.

    Args:
        index: The index.
        queries: float32 [q, dim], checked; without queries or rows, the index has only the graph's
            own number of candidates.
        after_piece: Called between pieces of work; its error ends it and passes through.

    Returns:
        An index over the same graph; `index` itself does not change. An earlier minimum of
        `with_candidates` does not count.
    """
    index = index.with_candidates(0)
    if not len(index.labels):
        return index
    farthest = _farthest(index, queries, after_piece)
    for ef in (index.ef, *(ef for ef in WIDEST_EF if ef > index.ef)):
        candidate = index.with_candidates(ef)
        if _recall(candidate, queries, farthest, after_piece) >= LEAST_RECALL:
            break
    return candidate


def _tune(index: HnswIndex, after_piece: Callable[[], None] = lambda: None) -> float:
    """Set the smallest ef that finds enough of the index's own vectors, or the largest; return the
    recall."""
    probes = index.vectors[:: max(1, len(index.labels) // PROBES)][:PROBES]
    farthest = _farthest(index, probes, after_piece)
    recall = 0.0
    for ef in TRIED_EF:
        index.graph.ef = ef
        if (recall := _recall(index, probes, farthest, after_piece)) >= LEAST_RECALL:
            break
    return recall


def _farthest(index: HnswIndex, probes: Vectors, after_piece: Callable[[], None]) -> Vectors:
    """Return the distance of the K-th nearest of each probe, [q, 1]."""
    farthest = [np.empty((0, 1), np.float32)]
    # A few at a time: each needs memory for its distance to every row.
    for start in range(0, len(probes), PROBES_AT_ONCE):
        piece = probes[start : start + PROBES_AT_ONCE]
        farthest.append(
            index.search_exactly(piece, min(RECALL_NEIGHBOURS, len(index.labels))).distances[:, -1:]
        )
        after_piece()
    return np.concatenate(farthest)


def _recall(
    index: HnswIndex, probes: Vectors, farthest: Vectors, after_piece: Callable[[], None]
) -> float:
    """Return the share of the probes' true K nearest that the index finds for one query at a time.

    Many queries at a time would be compared with every row, and would tell nothing about the graph.
    """
    if not len(probes):
        return 1.0
    distances = []
    for probe in probes:
        distances.append(
            index.search(probe[None], min(RECALL_NEIGHBOURS, len(index.labels))).distances
        )
        after_piece()
    # By distance, not by label: one of several equal vectors is as good as another.
    return float((np.concatenate(distances) <= farthest * (1 + 1e-5) + 1e-6).mean())
