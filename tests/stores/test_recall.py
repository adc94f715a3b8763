"""Recall that is measured before a flip, on a real PostgreSQL. The oracle compares all vectors in
numpy and knows nothing of windows; bad graphs are pgvector's own, made thin on purpose."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from nobackfill.errors import BusyError
from nobackfill.gallery.search.index import Neighbours
from nobackfill.gallery.spec import Metric, SpaceInfo
from nobackfill.gallery.store import NewVectors
from nobackfill.server.stores.postgresql import graphs
from nobackfill.server.stores.postgresql.database import EF
from nobackfill.server.stores.postgresql.gallery import PostgresqlGallery
from nobackfill.vectors import Vectors
from tests.gallery.making import ids, spec, vectors
from tests.stores.thin_graphs import SPACE, filled, islands, thin
from tests.support.postgresql_searcher import PostgresqlSearcher


def nothing() -> None:
    """Between two pieces."""


def probes(store: PostgresqlGallery, info: SpaceInfo) -> graphs.RecallProbes:
    with store.database.snapshot() as connection:
        return graphs.draw_probes(connection, store.schema, info, nothing)


def all_distances(queries: Vectors, content: Vectors, metric: Metric) -> np.ndarray:
    """[q, n] in float64, each query apart."""
    wide = content.astype(np.float64)
    if metric == "cosine":
        wide /= np.maximum(np.linalg.norm(wide, axis=1), 1e-30)[:, None]
    found = []
    for query in queries.astype(np.float64):
        if metric == "cosine":
            found.append(1 - wide @ (query / max(1e-30, float(np.linalg.norm(query)))))
        else:
            found.append(((wide - query) ** 2).sum(axis=1))
    return np.array(found).reshape(len(queries), len(content))


@pytest.mark.parametrize("metric", ["squared_l2", "cosine"])
@pytest.mark.parametrize("count", [0, 1, 7, 300])
def test_what_is_nearest_is_found_by_pieces(
    empty: PostgresqlGallery, monkeypatch: pytest.MonkeyPatch, metric: Metric, count: int
) -> None:
    """With gaps in labels, equal vectors and a zero one; pieces of 17 rows."""
    monkeypatch.setattr(graphs, "_NUMBERS", 17 * 12)
    content = vectors(count, 5)
    content[count // 2 : count // 2 + 14] = 0.0 if metric == "squared_l2" else 0.5
    info = filled(empty, content, metric)
    empty.delete(ids(3, 40))
    kept = np.delete(content, np.arange(40, min(43, max(40, count))), axis=0)
    made = probes(empty, info)
    nearest = min(10, len(kept))
    assert made.neighbour_count == nearest
    # Drawn labels may have the same next one.
    assert 0.8 * min(graphs.PROBES, len(kept)) <= len(made.queries) <= graphs.PROBES
    true = np.sort(all_distances(made.queries, kept, metric), axis=1)[:, :nearest]
    np.testing.assert_allclose(made.farthest_distances, true[:, -1:], rtol=1e-5, atol=1e-6)
    # The answers of a search that forgets some of them, and its share by the same oracle.
    rng = np.random.default_rng(1)
    answers, shares = [], []
    for row in true:
        lost = int(rng.integers(0, nearest + 1))
        apart = np.concatenate([row[lost:], np.full(10 - nearest + lost, np.inf)])
        answers.append(Neighbours(np.zeros((1, 10), np.int64), apart[None].astype(np.float32)))
        shares.append((nearest - lost) / nearest)
    assert made.recall(answers) == pytest.approx(np.mean(shares) if shares else 1.0)


def shares_of_searches(store: PostgresqlGallery, info: SpaceInfo, ef: int) -> float:
    """Recall of 40 searches as they are asked in life, by the oracle."""
    content = store.load_vectors(info.spec.space)[1]
    queries = content[:: len(content) // 40][:40]
    found = PostgresqlSearcher(store.database, store.schema, info).search(queries, 10, None, ef)
    true = np.sort(all_distances(queries, content, "squared_l2"), axis=1)[:, 9:10]
    return float((found.distances <= true * (1 + 1e-5) + 1e-6).mean())


@pytest.fixture
def measuring(empty: PostgresqlGallery) -> Callable[[SpaceInfo], tuple[int, float]]:
    return lambda info: graphs.measure_recall(empty.database, empty.schema, info, nothing)


def test_a_thin_graph_is_seen_and_a_whole_one_too(
    empty: PostgresqlGallery, measuring: Callable[[SpaceInfo], tuple[int, float]]
) -> None:
    info = filled(empty, islands(3_000))
    thin(empty, info)
    width, found = measuring(info)
    assert width == 1000, "the widest was tried"
    assert found < 0.7
    assert shares_of_searches(empty, info, 0) < 0.7, "and that is what searches get"
    assert graphs.has_graph(empty.database, empty.schema, info), "its word: it is valid"
    graphs.build_graph(empty.database, empty.schema, info)
    width, found = measuring(info)
    assert found >= graphs.RECALL
    assert shares_of_searches(empty, info, width) >= 0.85


def test_a_wider_search_is_tried_before_a_graph_is_refused(
    empty: PostgresqlGallery, measuring: Callable[[SpaceInfo], tuple[int, float]]
) -> None:
    rng = np.random.default_rng(4)
    info = filled(empty, rng.standard_normal((3_000, 48)).astype(np.float32))
    thin(empty, info, m=5, construction=10)
    assert shares_of_searches(empty, info, 0) < graphs.RECALL
    width, found = measuring(info)
    assert EF < width <= 1000
    assert found >= graphs.RECALL
    assert shares_of_searches(empty, info, width) > shares_of_searches(empty, info, 0)


def test_a_few_vectors_are_asked_through_their_graph(
    empty: PostgresqlGallery, measuring: Callable[[SpaceInfo], tuple[int, float]]
) -> None:
    """None, one, and fewer than are asked for; what reads every row says nothing of a graph."""
    for count in (0, 1, 6):
        info = filled(empty, vectors(count, 5)) if count == 0 else empty.space(SPACE)
        if count:
            new = [NewVectors(one, vectors(count, 5)) for one in (spec(1).space, SPACE)]
            empty.put(ids(count), new)
        graphs.build_graph(empty.database, empty.schema, info)
        assert measuring(info) == (EF, 1.0)


def test_vectors_without_a_direction_are_asked_of_no_graph(
    empty: PostgresqlGallery, measuring: Callable[[SpaceInfo], tuple[int, float]]
) -> None:
    """A cosine graph of pgvector leaves them out."""
    content = vectors(300, 5)
    content[::2] = 0.0
    info = filled(empty, content, "cosine")
    graphs.build_graph(empty.database, empty.schema, info)
    assert measuring(info) == (EF, 1.0)


class Looks:
    """What is measured, one after another; what else happens is written down."""

    def __init__(self, *found: float | Exception) -> None:
        self.left = list(found)
        self.told: list[float] = []

    def measure(self) -> float:
        found = self.left.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


@pytest.mark.parametrize(
    ("found", "told"),
    [((0.95,), []), ((0.1, 0.5, 0.9), [0.1, 0.5]), ((BusyError("a timeout"), 1.0), [])],
)
def test_it_is_waited_until_it_is_enough(
    monkeypatch: pytest.MonkeyPatch, found: Sequence[float | Exception], told: list[float]
) -> None:
    monkeypatch.setattr(graphs, "_LOOK_S", 0.01)
    monkeypatch.setattr(graphs, "_TELL_S", 0.0)
    looks = Looks(*found)
    graphs.wait_for_recall(lambda: True, looks.measure, nothing, looks.told.append)
    assert not looks.left
    assert looks.told == told


@pytest.mark.parametrize("norm", [1e-4, 1.0, 1e3])
def test_small_vectors_are_measured_as_large_ones_are(
    empty: PostgresqlGallery, norm: float
) -> None:
    info = filled(empty, vectors(300, 5) * np.float32(norm))
    made = probes(empty, info)
    far = Neighbours(np.zeros((1, 10), np.int64), np.full((1, 10), 100 * norm**2, np.float32))
    assert made.recall([far] * len(made.queries)) == 0
