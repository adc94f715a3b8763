"""Searches on every engine: exact ones against an oracle, graphs by their recall, filters by a slow
predicate."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.filters import Exists, Filter, Not, OneOf, Range
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.index import EXACT_EF, membership_mask
from nobackfill.gallery.spec import Metadata, Metric, SpaceSpec
from nobackfill.gallery.store import NewVectors
from tests.gallery.making import ids, spec, vectors
from tests.gallery.test_filters import FILTERS, METADATA, holds
from tests.stores.conftest import Engine

ONE = spec().space


@pytest.mark.long
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    items=st.lists(METADATA, min_size=1, max_size=12),
    changed=st.lists(METADATA, max_size=4),
    asked=st.lists(FILTERS, min_size=1, max_size=4),
)
def test_filters_let_through_what_the_predicate_does(
    engine: Engine, items: list[Metadata], changed: list[Metadata], asked: list[Filter]
) -> None:
    compare_with_predicate(engine, items, changed, asked)


def compare_with_predicate(
    engine: Engine, items: list[Metadata], changed: list[Metadata], asked: list[Filter]
) -> None:
    """Of items, some of which are changed, a filter lets those through that it should."""
    store = engine.create(spec())
    content = vectors(len(items), 1)
    new = NewVectors(ONE, content)
    labels = store.put(ids(len(items)), [new], digests=ids(len(items)), metadata=items).labels
    some = min(len(items), len(changed))
    again = NewVectors(ONE, content[:some])
    if some:
        store.put(ids(some), [again], digests=ids(some), metadata=changed[:some])
    there = [*changed[:some], *items[some:]]
    filtering, searcher = engine.filtering(store), engine.searcher(store, ONE)
    exact = ExactIndex(spec(), labels, content)
    for filtered in asked:
        expected = [
            label
            for label, what in zip(labels.tolist(), there, strict=True)
            if holds(filtered, what)
        ]
        found = filtering.find_matches(filtered)
        assert found.labels().tolist() == expected and len(found) == len(expected)
        near = searcher.search(content[:2], 5, filtered)
        allowed = membership_mask(labels, np.array(expected, np.int64))
        assert near.labels.tolist() == exact.search(content[:2], 5, allowed).labels.tolist()


def clustered(count: int, dim: int, seed: int) -> np.ndarray:
    """Vectors with ten equal ones, and one that has no direction."""
    content = vectors(count, seed, dim)
    content[5:15] = content[5]
    content[20] = 0
    return content


@pytest.mark.parametrize("metric", ["squared_l2", "cosine"])
def test_exact_searches_are_those_of_the_oracle(engine: Engine, metric: Metric) -> None:
    wanted = spec(metric=metric)
    store = engine.create(wanted)
    content = clustered(300, wanted.dim, 3)
    metadata = [{"n": n} for n in range(300)]
    labels = store.put(ids(300), [NewVectors(ONE, content)], metadata=metadata).labels
    oracle = ExactIndex(wanted, labels, content)
    searcher = engine.searcher(store, ONE)
    queries = np.concatenate([content[[5, 20, 100]], vectors(5, 9)])
    for k in (1, 3, 10, 299, 400):
        found, true = searcher.search(queries, k, None, EXACT_EF), oracle.search(queries, k)
        assert found.labels.tolist() == true.labels.tolist()
        np.testing.assert_array_equal(found.distances, true.distances)
    for filtered in (Range("n", less_than=7), Not(Exists("n")), OneOf("n", (20, 21, 999))):
        passing = engine.filtering(store).find_matches(filtered).labels()
        true = oracle.search(queries, 10, membership_mask(labels, passing))
        for ef in (0, EXACT_EF):
            found = searcher.search(queries, 10, filtered, ef)
            assert found.labels.tolist() == true.labels.tolist()
    store.delete(ids(100))
    rest = ExactIndex(wanted, labels[100:], content[100:])
    found = searcher.search(queries, 10, None, EXACT_EF)
    assert found.labels.tolist() == rest.search(queries, 10).labels.tolist()


@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
def test_a_graph_finds_nearly_what_an_exact_search_does(engine: Engine, share: float) -> None:
    store = engine.create(spec())
    content = vectors(2500, 3)
    metadata = [{"n": n} for n in range(2500)]
    labels = store.put(ids(2500), [NewVectors(ONE, content)], metadata=metadata).labels
    filtered = None if share == 1 else Range("n", less_than=2500 * share)
    allowed = np.arange(2500) < 2500 * share
    queries = vectors(40, 8)
    found = engine.searcher(store, ONE).search(queries, 10, filtered)
    true = ExactIndex(spec(), labels, content).search(queries, 10, allowed)
    assert (found.labels >= 0).all()
    assert (found.labels[:, :, None] == true.labels[:, None, :]).sum() >= 0.9 * 400


@pytest.mark.parametrize("dim", [2001, 4001])
def test_wide_vectors_are_searched_too(engine: Engine, dim: int) -> None:
    """Beyond what an index of floats holds: by halves of them, or every row."""
    wanted = spec(dim=dim)
    store = engine.create(wanted)
    content = vectors(60, 3, dim)
    labels = store.put(ids(60), [NewVectors(ONE, content)]).labels
    found = engine.searcher(store, ONE).search(content[:5], 3)
    true = ExactIndex(wanted, labels, content).search(content[:5], 3)
    assert found.labels.tolist() == true.labels.tolist()
    np.testing.assert_array_equal(found.distances, true.distances)


def test_what_is_no_query_is_refused(engine: Engine) -> None:
    store = engine.create(spec())
    searcher = engine.searcher(store, ONE)
    for queries in (vectors(1, 1, 3), np.full((1, 12), np.nan, np.float32)):
        with pytest.raises(InvalidInputError, match="queries"):
            searcher.search(queries, 3)
    with pytest.raises(InvalidInputError, match="NaN"):
        searcher.search(vectors(1, 1), 3, Range("n", at_least=float("nan")))
    nothing = searcher.search(vectors(2, 1), 3)
    assert nothing.labels.tolist() == [[-1] * 3] * 2 and np.isinf(nothing.distances).all()


def test_texts_that_no_item_can_have_pass_nothing(engine: Engine) -> None:
    store = engine.create(spec())
    store.put(["a"], [NewVectors(ONE, vectors(1, 1))], metadata=[{"k": "v"}])
    filtering = engine.filtering(store)
    for test in (OneOf("k", ("a\0",)), OneOf("a\0", ("v",)), Exists("a\0")):
        assert len(filtering.find_matches(test)) == 0
        assert len(filtering.find_matches(Not(test))) == 1


def test_more_dimensions_than_postgresql_holds_are_refused_with_a_way_out(engine: Engine) -> None:
    wide = SpaceSpec("sp-wide", 1, 16_001, "cosine", False, None, 0)
    if engine.holds_any_dimension:
        assert engine.create(wide).count() == 0
        return
    with pytest.raises(InvalidInputError, match=r"16000 dimensions, .* has 16001; .*sqlite:FOLDER"):
        engine.create(wide)
