"""Searches in compiled code find what those in Python find, and outlive the graphs they read."""

import gc
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.search import hnsw, view
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.index import Mask, Neighbours
from nobackfill.gallery.search.view import IndexPart, Snapshot, new_snapshot
from nobackfill.gallery.spec import Metric, SpaceSpec
from nobackfill.vectors import Vectors
from tests.gallery.making import spec as making_spec

pytestmark = pytest.mark.skipif(
    view.parse_search_request is None, reason="nothing was compiled: there is no compiler"
)
# So many that a graph is cheaper than comparing all; and beside it.
ROWS, BESIDE = 3000, 40
FEW = 1500


def space(dim: int, metric: Metric) -> SpaceSpec:
    return replace(making_spec(dim=dim), metric=metric, unit_norm=False)


def content(rng: np.random.Generator, rows: int, dim: int, whole: bool) -> Vectors:
    """Whole numbers make equal distances, and sums that are exact in any order."""
    if whole:
        return rng.integers(-2, 3, (rows, dim)).astype(np.float32)
    return rng.standard_normal((rows, dim), dtype=np.float32)


def made(dim: int, metric: Metric, whole: bool, rows: int = ROWS) -> Snapshot:
    rng = np.random.default_rng(dim)
    of = space(dim, metric)
    labels = np.cumsum(rng.integers(1, 4, rows + BESIDE))
    vectors = content(rng, rows + BESIDE, dim, whole)
    base = hnsw.build_index(of, labels[:rows], vectors[:rows])
    delta = ExactIndex(of, labels[rows:], vectors[rows:])
    return replace(new_snapshot(of, base), delta=IndexPart(delta))


def in_python(snapshot: Snapshot) -> Snapshot:
    other = replace(snapshot)
    other.__dict__["compiled"] = None
    return other


def same(a: Neighbours, b: Neighbours) -> None:
    assert a.labels.tobytes() == b.labels.tobytes()
    assert a.distances.tobytes() == b.distances.tobytes()


@pytest.fixture(scope="module")
def snapshots() -> dict[tuple[int, Metric, bool], Snapshot]:
    cases: list[tuple[int, Metric, bool]] = [
        (3, "squared_l2", True), (16, "squared_l2", False), (17, "cosine", False),
        (32, "cosine", True), (128, "squared_l2", False),
    ]  # fmt: skip
    return {case: made(*case) for case in cases}


@hypothesis_settings(max_examples=150, deadline=None)
@given(data=st.data())
@pytest.mark.slow
def test_the_same_neighbours_byte_for_byte(
    snapshots: dict[tuple[int, Metric, bool], Snapshot], data: st.DataObject
) -> None:
    case = data.draw(st.sampled_from(sorted(snapshots)))
    snapshot = snapshots[case]
    assert snapshot.compiled is not None
    gone = data.draw(st.integers(0, BESIDE))
    if gone:
        snapshot = replace(
            snapshot, delta=snapshot.delta.with_deleted_labels(snapshot.delta.index.labels[:gone])
        )
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    query = content(rng, 1, case[0], case[2])
    if data.draw(st.booleans()):
        query = np.asarray(snapshot.base.index.vectors[rng.integers(0, ROWS, 1)])
    k, ef = data.draw(st.integers(1, 200)), data.draw(st.sampled_from([0, 1, 10, 65, 300, 2999]))
    same(snapshot.search(query, k, ef=ef), in_python(snapshot).search(query, k, ef=ef))


def test_a_carried_graph_with_dead_elements_is_searched_alike() -> None:
    snapshot = made(16, "squared_l2", whole=False)
    base = snapshot.base.index
    assert isinstance(base, hnsw.HnswIndex)
    kept = np.flatnonzero(np.arange(ROWS) % 7 > 0)
    labels, vectors = base.labels[kept], np.asarray(base.vectors[kept])
    carried = hnsw.transfer_index(base, base.spec, labels, vectors)
    now = new_snapshot(base.spec, carried)
    rng = np.random.default_rng(0)
    assert now.compiled is not None
    for query in content(rng, 50, 16, whole=False):
        same(now.search(query[None], 10), in_python(now).search(query[None], 10))


@pytest.fixture(scope="module")
def clusters() -> tuple[Snapshot, NDArray[np.int64], Vectors]:
    """A graph of 40 clusters, which of them each row is of, and queries."""
    rng = np.random.default_rng(7)
    centres = rng.standard_normal((40, 16), dtype=np.float32)
    of = rng.integers(0, 40, 6000)
    noise = rng.standard_normal((6040, 16), dtype=np.float32)
    own = space(16, "squared_l2")
    base = hnsw.build_index(own, np.arange(1, 6001), centres[of] + 0.3 * noise[:6000])
    return new_snapshot(own, base), of, centres[rng.integers(0, 40, 40)] + 0.3 * noise[6000:]


@pytest.mark.parametrize("share", [0.001, 0.01, 0.05, 0.1, 0.3, 0.5, 0.7, 0.95])
@pytest.mark.parametrize("clustered", [False, True])
@pytest.mark.parametrize("dead", [False, True])
def test_what_passes_is_found_and_nothing_else(
    clusters: tuple[Snapshot, NDArray[np.int64], Vectors],
    share: float,
    clustered: bool,
    dead: bool,
) -> None:
    snapshot, of, queries = clusters
    rng = np.random.default_rng(8)
    base = snapshot.base.index
    assert isinstance(base, hnsw.HnswIndex)
    chosen: Mask = of < max(1, share * 40) if clustered else rng.random(6000) < share
    if dead:
        snapshot = snapshot.without_labels(1 + np.flatnonzero(~chosen))
    true = base.search_exactly(queries, 10, chosen)
    found = [
        snapshot.search(one[None], 10, None if dead else lambda labels: chosen[labels - 1])
        for one in queries
    ]
    hits = 0
    for row, one in enumerate(found):
        there = one.labels[0][one.labels[0] >= 0]
        assert chosen[there - 1].all() and len(set(there.tolist())) == len(there)
        assert len(there) == min(10, int(chosen.sum()))
        assert (np.diff(one.distances[0][: len(there)]) >= 0).all()
        hits += len(np.intersect1d(there, true.labels[row]))
    assert hits >= 0.98 * (true.labels >= 0).sum()


def test_bad_queries_are_refused_as_in_python() -> None:
    snapshot = made(3, "squared_l2", whole=True)
    assert snapshot.compiled is not None
    for bad in ([[np.nan, 0, 0]], [[np.inf, 0, 0]], [[1e16, 0, 0]], [[1, 2]]):
        with pytest.raises(InvalidInputError):
            snapshot.search(np.array(bad, np.float32), 3)
    for values in (b"", b"123", np.array([np.nan, 0, 0], "<f4").tobytes(), bytes(16)):
        curves = view.compile_curves({})
        assert curves is not None
        assert snapshot.compiled.encode_responses([(values, 3, np.inf)], True, {}, curves, b"") == [
            None
        ]


@pytest.mark.long
@pytest.mark.slow
def test_a_search_outlives_the_graph_that_others_let_go_of() -> None:
    """Threads search what they hold while it is replaced and let go of; then nothing is left."""
    rng = np.random.default_rng(1)
    pristine = [made(16, "squared_l2", whole=False, rows=FEW)]
    queries = content(rng, 20, 16, whole=False)
    expected = [one.search(queries[:1], 10).labels.tolist() for one in pristine]
    current, ended = [pristine[0]], threading.Event()
    failures: list[object] = []

    def search() -> None:
        while not ended.is_set():
            mine = current[0]
            for query in queries:
                found = mine.search(query[None], 10)
                if (found.labels < 0).any() or not np.isfinite(found.distances).all():
                    failures.append(found)
            if mine.search(queries[:1], 10).labels.tolist() not in expected:
                failures.append(mine)

    threads = [threading.Thread(target=search) for _ in range(4)]
    graphs = [weakref.ref(one.base.index) for one in pristine]
    pristine.clear()
    for thread in threads:
        thread.start()
    for _ in range(6):
        current[0] = made(16, "squared_l2", whole=False, rows=FEW)
        graphs.append(weakref.ref(current[0].base.index))
        gc.collect()
    ended.set()
    for thread in threads:
        thread.join()
    assert not failures
    current.clear()
    gc.collect()
    assert [graph() for graph in graphs] == [None] * len(graphs)


@pytest.mark.parametrize("metric", ["cosine", "squared_l2"])
@pytest.mark.parametrize("share", [0.001, 0.3])
def test_damaged_vectors_are_farthest(metric: Metric, share: float) -> None:
    """No store takes NaN: they come from a file that was damaged, and must not mix up the rest."""
    rng = np.random.default_rng(3)
    of = space(16, metric)
    vectors = rng.standard_normal((ROWS + BESIDE, 16), dtype=np.float32)
    bad = rng.random(len(vectors)) < share
    bad[ROWS::4] = True
    vectors[bad, 3] = np.nan
    labels = np.arange(len(vectors))
    base = hnsw.build_index(of, labels[:ROWS], vectors[:ROWS])
    delta = IndexPart(ExactIndex(of, labels[ROWS:], vectors[ROWS:]))
    snapshot = replace(new_snapshot(of, base), delta=delta)
    assert snapshot.compiled is not None
    for query in rng.standard_normal((20, 1, 16), dtype=np.float32):
        found = snapshot.search(query, 30)
        assert not np.isnan(found.distances).any()
        assert (np.diff(found.distances[0]) >= 0).all()
        assert not bad[found.labels[0][np.isfinite(found.distances[0])]].any()
