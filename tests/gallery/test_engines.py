"""Every engine against a slow oracle: sorted float64 distances, one query at a time."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nobackfill.gallery.search import exact, hnsw
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.index import Index, Labels, Mask, Neighbours
from nobackfill.gallery.search.view import apply_change, new_snapshot
from nobackfill.gallery.spec import Metric, SpaceSpec
from nobackfill.gallery.store import Change
from nobackfill.vectors import Vectors
from tests.gallery.making import DIM, spec, vectors

COUNT = 3000
QUERIES = 40

Maker = Callable[[SpaceSpec, Labels, Vectors, Path], Index]


def oracle(
    metric: Metric, labels: Labels, content: Vectors, query: Vectors, k: int, allowed: Mask
) -> list[tuple[float, int]]:
    """(distance, label) of the k nearest allowed rows."""
    wide, point = content.astype(float), query.astype(float)
    if metric == "squared_l2":
        distances = ((wide - point) ** 2).sum(axis=1)
    else:
        norms = np.sqrt((wide**2).sum(axis=1) * (point**2).sum())
        distances = 1 - (wide * point).sum(axis=1) / np.where(norms == 0, 1, norms)
    pairs = zip(distances.tolist(), labels.tolist(), allowed, strict=True)
    return sorted((distance, label) for distance, label, may in pairs if may)[:k]


class Viewed:
    """A snapshot with base, delta and tombstones behind the protocol of an index."""

    def __init__(self, spec_: SpaceSpec, labels: Labels, content: Vectors) -> None:
        self.spec, self.labels, self.vectors = spec_, labels, content
        cut, nothing = len(labels) * 2 // 3, np.empty(0, np.int64)
        # The base holds strangers that are deleted, and replaced vectors, one in five.
        base = np.concatenate([labels[:cut], labels[-1] + 1 + np.arange(50)]) if cut else nothing
        old = np.concatenate([content[:cut], np.ones((50, content.shape[1]), np.float32)])
        old[:cut:5] += 1
        state = new_snapshot(spec_, ExactIndex(spec_, base, old[: len(base)]))
        state = apply_change(state, Change({}, base[cut:]))
        for rows in (np.arange(0, cut, 5), np.arange(cut, len(labels))):
            for part in np.array_split(rows, 3):
                change = Change({spec_.space: (labels[part], content[part])}, nothing)
                state = apply_change(state, change)
        self.state = state

    def search(
        self,
        queries: Vectors,
        k: int,
        allowed: Mask | None = None,
        passing: int | None = None,
        ef: int = 0,
    ) -> Neighbours:
        if allowed is None:
            return self.state.search(queries, k, ef=ef)
        chosen = self.labels[allowed]
        return self.state.search(queries, k, lambda labels: np.isin(labels, chosen), ef)


def make_exact(spec_: SpaceSpec, labels: Labels, content: Vectors, _: Path) -> Index:
    return ExactIndex(spec_, labels, content)


def make_grown(spec_: SpaceSpec, labels: Labels, content: Vectors, _: Path) -> Index:
    index = ExactIndex(spec_, labels[:0], content[:0])
    for part in np.array_split(np.arange(len(labels)), 7):
        index = index.with_more_rows(labels[part], content[part])
    return index


def make_hnsw(spec_: SpaceSpec, labels: Labels, content: Vectors, _: Path) -> Index:
    return hnsw.build_index(spec_, labels, content)


def make_loaded(spec_: SpaceSpec, labels: Labels, content: Vectors, folder: Path) -> Index:
    hnsw.build_index(spec_, labels, content).save(folder / "index")
    index, rest = hnsw.load_index(folder / "index", spec_, labels, content)
    assert not len(rest)
    return index


def make_carried(spec_: SpaceSpec, labels: Labels, content: Vectors, _: Path) -> Index:
    """From a graph that lacks the last rows and has some that are gone."""
    keep = len(labels) * 9 // 10
    old_labels = np.concatenate([labels[:keep], labels[-1] + 1 + np.arange(40)])
    old = np.concatenate([content[:keep], vectors(40, 5, content.shape[1])])
    return hnsw.transfer_index(hnsw.build_index(spec_, old_labels, old), spec_, labels, content)


def make_view(spec_: SpaceSpec, labels: Labels, content: Vectors, _: Path) -> Index:
    return Viewed(spec_, labels, content)


MAKERS: dict[str, Maker] = {
    "exact": make_exact,
    "grown": make_grown,
    "view": make_view,
    "hnsw": make_hnsw,
    "loaded": make_loaded,
    "carried": make_carried,
}
APPROXIMATE = {"hnsw", "loaded", "carried"}


@pytest.fixture(params=MAKERS)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    # At this size exact search is the cheaper way always; it is the graph that is to be tested.
    monkeypatch.setattr(hnsw, "_GRAPH_QUERY", 0)
    monkeypatch.setattr(hnsw, "_GRAPH_CANDIDATE", 0)
    return str(request.param)


@pytest.fixture(params=["squared_l2", "cosine"])
def metric(request: pytest.FixtureRequest) -> Metric:
    found: Metric = request.param
    return found


@pytest.fixture
def labels() -> Labels:
    return np.arange(COUNT, dtype=np.int64) * 3 + 7


def test_finds_what_the_oracle_finds(
    engine: str, metric: Metric, labels: Labels, tmp_path: Path
) -> None:
    content, queries = np.split(vectors(COUNT + QUERIES, 1), [COUNT])
    index = MAKERS[engine](spec(metric=metric), labels, content, tmp_path)
    found = index.search(queries, 10)
    assert found.labels.shape == found.distances.shape == (QUERIES, 10)
    assert (np.diff(found.distances, axis=1) >= 0).all()
    hits = 0
    for row, query in enumerate(queries):
        true = oracle(metric, labels, content, query, 10, np.ones(COUNT, np.bool_))
        hits += len({label for _, label in true} & set(found.labels[row].tolist()))
        if engine not in APPROXIMATE:
            assert found.labels[row].tolist() == [label for _, label in true]
            np.testing.assert_allclose(found.distances[row], [d for d, _ in true], atol=1e-5)
    assert hits / (10 * QUERIES) >= (0.97 if engine in APPROXIMATE else 1)


@pytest.mark.parametrize("share", [0.6, 0.2, 0.02, 0.0])
def test_a_filter_lets_only_the_allowed_through(
    engine: str, metric: Metric, labels: Labels, tmp_path: Path, share: float
) -> None:
    content, queries = np.split(vectors(COUNT + 20, 1), [COUNT])
    allowed = np.random.default_rng(3).random(COUNT) < share
    index = MAKERS[engine](spec(metric=metric), labels, content, tmp_path)
    found = index.search(queries, 10, allowed)
    hits, expected = 0, 0
    for row, query in enumerate(queries):
        true = {label for _, label in oracle(metric, labels, content, query, 10, allowed)}
        got = found.labels[row][found.labels[row] >= 0].tolist()
        assert set(got) <= set(labels[allowed].tolist())
        assert len(got) == len(set(got)) == min(10, int(allowed.sum()))
        hits += len(true & set(got))
        expected += len(true)
    assert hits >= 0.97 * expected
    short = found.labels < 0
    assert np.isinf(found.distances[short]).all()


@pytest.mark.parametrize("name", ["exact", "grown", "view"])
def test_equal_vectors_come_by_label(name: str, metric: Metric, tmp_path: Path) -> None:
    # More equal ones than spare candidates, and a k that cuts through them.
    content = np.repeat(vectors(3, 1), 200, axis=0)
    names = np.arange(600, dtype=np.int64)
    found = MAKERS[name](spec(metric=metric), names, content, tmp_path).search(content[::200], 30)
    assert found.labels.tolist() == [list(range(s, s + 30)) for s in (0, 200, 400)]


def test_equal_vectors_found_by_the_graph_come_by_label(engine: str, tmp_path: Path) -> None:
    content = np.repeat(vectors(900, 1), 3, axis=0)
    names = np.arange(2700, dtype=np.int64)
    found = MAKERS[engine](spec(), names, content, tmp_path).search(content[:300:3], 3)
    assert (found.distances[:, 2] == 0).mean() > 0.9
    assert (np.diff(found.labels[found.distances[:, 2] == 0], axis=1) > 0).all()


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_exact_engines_agree_with_the_oracle_on_any_input(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 60))
    metric: Metric = data.draw(st.sampled_from(["squared_l2", "cosine"]))
    # Few different values, so that ties are many.
    values = st.integers(-2, 2)
    content = np.array(
        data.draw(st.lists(st.tuples(values, values, values), min_size=count, max_size=count)),
        np.float32,
    ).reshape(count, 3)
    names = np.array(
        sorted(data.draw(st.sets(st.integers(1, 200), min_size=count, max_size=count))), np.int64
    )
    allowed = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), np.bool_)
    query = np.array([data.draw(st.tuples(values, values, values))], np.float32)
    k = data.draw(st.integers(1, 70))
    makers = ["exact"] if metric == "cosine" or count < 2 else ["exact", "grown", "view"]
    for name in makers:
        index = MAKERS[name](spec(dim=3, metric=metric), names, content, Path())
        found = index.search(query, k, allowed)
        true = oracle(metric, names, content, query[0], k, allowed)
        got = [(d, n) for d, n in zip(found.distances[0], found.labels[0], strict=True) if n >= 0]
        assert len(got) == len(true) and found.labels.shape == (1, k)
        np.testing.assert_allclose([d for d, _ in got], [d for d, _ in true], atol=1e-6)
        if metric == "squared_l2":
            assert [n for _, n in got] == [n for _, n in true]


def test_a_large_matrix_is_searched_in_blocks(
    monkeypatch: pytest.MonkeyPatch, labels: Labels
) -> None:
    index = ExactIndex(spec(), labels, vectors(COUNT, 1))
    queries = vectors(QUERIES, 2)
    whole = index.search(queries, 10)
    monkeypatch.setattr(exact, "BLOCK_ELEMENTS", 7 * COUNT)
    pieces = index.search(queries, 10)
    np.testing.assert_array_equal(whole.labels, pieces.labels)
    np.testing.assert_array_equal(whole.distances, pieces.distances)


def test_no_queries_and_no_vectors_are_answered_with_nothing() -> None:
    empty = ExactIndex(spec(), np.empty(0, np.int64), np.empty((0, DIM), np.float32))
    assert empty.search(vectors(2, 1), 3).labels.tolist() == [[-1] * 3] * 2
    assert empty.search(vectors(2, 1)[:0], 3).labels.shape == (0, 3)
    assert (
        hnsw.build_index(spec(), empty.labels, empty.vectors).search(vectors(1, 1), 2).labels[0, 0]
        < 0
    )


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_small_index_improves_what_a_large_one_found(data: st.DataObject) -> None:
    """The same as one exact search over the rows of both, ties and filters included."""
    metric: Metric = data.draw(st.sampled_from(["squared_l2", "cosine"]))
    coarse = data.draw(st.booleans())
    large, small = data.draw(st.integers(12, 80)), data.draw(st.integers(1, 40))
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    content = rng.standard_normal((large + small, 4)).astype(np.float32)
    if coarse and metric == "squared_l2":
        content = np.round(content)
    names = rng.permutation(200)[: large + small].astype(np.int64)
    queries = np.concatenate([content[:2], rng.standard_normal((3, 4)).astype(np.float32)])
    k = data.draw(st.integers(1, 12))
    order = np.argsort(names)
    both = ExactIndex(spec(dim=4, metric=metric), names[order], content[order])
    first, second = np.sort(names[:large]), np.sort(names[large:])
    rows = {name: row for row, name in enumerate(names)}
    parts = [
        ExactIndex(both.spec, part, content[[rows[name] for name in part]])
        for part in (first, second)
    ]
    allowed = rng.random(small) < 0.7 if data.draw(st.booleans()) else None
    everywhere = np.isin(both.labels, first) | np.isin(both.labels, second[allowed])
    if allowed is None:
        everywhere = np.ones(large + small, np.bool_)
    found = parts[1].merge_nearer_rows(queries, parts[0].search(queries, k), allowed)
    expected = both.search(queries, k, everywhere)
    np.testing.assert_array_equal(found.distances, expected.distances)
    np.testing.assert_array_equal(found.labels, expected.labels)
