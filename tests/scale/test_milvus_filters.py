"""Filters beside a real Milvus: it is asked for what may pass, and what passes is what passes
elsewhere. What it is asked, without one, is in tests/stores/test_expressions.py."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from nobackfill.gallery import edits
from nobackfill.gallery.filters import All, AnyOf, Exists, Filter, Not, OneOf, Range, TimeRange
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.index import membership_mask
from nobackfill.gallery.spec import Metadata, MetadataValue
from nobackfill.gallery.store import NewVectors
from nobackfill.plugins.milvus import candidates
from nobackfill.plugins.milvus.expressions import expression_of
from nobackfill.plugins.milvus.gallery import MilvusGallery
from nobackfill.server.stores.postgresql.graphs import RECALL
from tests.gallery.making import ids, spec, vectors
from tests.gallery.test_filters import FILTERS, TIMES, holds, moment
from tests.stores.milvus_engine import MilvusEngine
from tests.support.postgresql_searcher import PostgresqlSearcher

ONE = spec(1).space
COUNT = 3_000


@pytest.fixture
def engine(milvus_engine: MilvusEngine) -> MilvusEngine:
    """Behaviour that every engine has is tested in tests/stores."""
    return milvus_engine


# Of each kind, and some that are nearly equal.
VALUES: tuple[MetadataValue | None, ...] = (
    None, -1, 0, 1, 1.0, 0.5, 2**53, 2**53 + 1, True, False, "1", "true", "red", "ü", "", *TIMES,
    [], ["red", "ü"], ["2026-01-02", "2026"],
)  # fmt: skip


def described(number: int) -> Metadata:
    """The values of an item, in other company for each."""
    steps = (("colour", 1), ("year", 3), ("ü", 7))
    chosen = ((key, VALUES[number // step % len(VALUES)]) for key, step in steps)
    return {key: value for key, value in chosen if value is not None}


class Counted(candidates.Candidates):
    """Counts the searches that Milvus answered."""

    answered = 0

    def find_candidates(self, *given: Any) -> list[Any] | None:
        found = super().find_candidates(*given)
        self.answered += found is not None
        return found


def test_filters_mean_beside_milvus_what_they_mean_elsewhere(engine: MilvusEngine) -> None:
    """As tests/stores/test_search.py asks every engine, with items enough to ask Milvus."""
    store = engine.create(spec())
    assert isinstance(store, MilvusGallery)
    content, metadata = vectors(400, 1), [described(number) for number in range(400)]
    new = NewVectors(ONE, content)
    labels = store.put(ids(400), [new], digests=ids(400), metadata=metadata).labels
    engine.feed(store)
    counted = Counted(engine.collections, engine.known)
    asked = PostgresqlSearcher(store.database, store.schema, store.space(ONE), counted)
    exact = ExactIndex(spec(), labels, content)
    shares: list[float] = []

    @settings(max_examples=60, deadline=None)
    @given(FILTERS)
    def check(filtered: Filter) -> None:
        passing = labels[[holds(filtered, one) for one in metadata]]
        found = asked.search(content[:2], 5, filtered).labels
        true = exact.search(content[:2], 5, membership_mask(labels, passing)).labels
        assert set(found[found >= 0].tolist()) <= set(passing.tolist())
        assert ((found >= 0) == (true >= 0)).all()
        shares.append(float(np.mean([np.isin(a, b) for a, b in zip(true, found, strict=True)])))

    check()
    # Metadata that changes while the content stays: what Milvus was not told yet, and what it was.
    metadata[:8] = [described(number) for number in range(1000, 1008)]
    store.put(ids(8), [NewVectors(ONE, content[:8])], digests=ids(8), metadata=metadata[:8])
    check()
    engine.feed(store)
    check()
    assert counted.answered > 60, "Milvus was asked"
    assert np.mean(shares) > RECALL


def of_kinds(number: int) -> Metadata:
    """Metadata of each kind, which have nothing to do with what is near."""
    shuffled = number * 7919 % COUNT
    found: dict[str, MetadataValue] = {
        "half": shuffled % 2 == 0, "class": f"c{shuffled % 100}", "n": shuffled,
        "part": shuffled / 7, "tags": ["all", f"tag {shuffled % 20}", f"tag {shuffled % 30}"],
        "at": f"{1970 + shuffled % 60}-05-01T12:00:00Z",
    }  # fmt: skip
    if shuffled % 3 == 0:
        found["third"] = "ü'\"\\"
    return found


OF_KINDS: tuple[Filter, ...] = (
    OneOf("half", (True,)), OneOf("class", ("c7",)), OneOf("tags", ("tag 3", "tag 9", "none")),
    OneOf("n", (5, 6.0, 77)), OneOf("third", ("ü'\"\\",)), Exists("third"), Not(Exists("third")),
    Range("n", at_least=100, less_than=1600), Range("part", greater_than=0.5, at_most=20.25),
    Range("n", less_than=3), Not(Range("n", at_least=30)), Range("n", at_least=-1.5),
    TimeRange("at", at_least=moment("1999-01-01"), less_than=moment("2004-06-01")),
    Not(OneOf("class", tuple(f"c{n}" for n in range(95)))),
    AnyOf((OneOf("class", ("c1", "c2")), Range("n", greater_than=2990))),
    All((OneOf("tags", ("tag 1",)), Not(OneOf("half", (True,))), Range("n", at_most=2000))),
    OneOf("nobody", ("x",)), Not(Exists("nobody")),
    # Few pass, which the database would find by looking at half of the items.
    All((OneOf("half", (True,)), Range("n", less_than=12))),
)  # fmt: skip


def test_milvus_gives_what_passes_and_nothing_else(engine: MilvusEngine) -> None:
    store = engine.create(spec())
    assert isinstance(store, MilvusGallery)
    content = vectors(COUNT, 1)
    there = dict(enumerate(map(of_kinds, range(COUNT)), start=1))
    store.put(ids(COUNT), [NewVectors(ONE, content)], metadata=[*there.values()])
    name, filtering = engine.collection(store, ONE), engine.filtering(store)

    def check() -> None:
        engine.feed(store)
        for filtered in OF_KINDS:
            passing = filtering.find_matches(filtered).labels().tolist()
            said = expression_of(filtered)
            assert sorted(engine.collections.matching_labels(name, said, COUNT) or []) == passing
            near = engine.collections.search(name, spec(), content[0], 18, 100, said)
            assert set(near) <= set(passing) and len(near) == min(18, len(passing))
            if len(passing) > 1:
                assert engine.collections.matching_labels(name, said, len(passing) - 1) is None

    check()
    edits.change_metadata(
        store, edits.select_matches(filtering, Range("n", at_most=50)), {"n": -7}, ()
    )
    some = edits.select_matches(filtering, OneOf("class", ("c7", "c1")))
    edits.change_metadata(store, some, {"class": "c2"}, ("third",))
    store.delete(ids(300, 2000))
    check()


def test_searches_with_filters_find_what_exact_ones_do(engine: MilvusEngine) -> None:
    """By each of the ways: few pass, many do, Milvus is told, and is not told yet."""
    store = engine.create(spec())
    assert isinstance(store, MilvusGallery)
    content = vectors(COUNT, 1)
    labels = store.put(
        ids(COUNT), [NewVectors(ONE, content)], metadata=[*map(of_kinds, range(COUNT))]
    ).labels
    engine.feed(store)
    store.delete(["item-5"])
    counted = Counted(engine.collections, engine.known)
    asked = PostgresqlSearcher(store.database, store.schema, store.space(ONE), counted)
    exact, queries = ExactIndex(spec(), labels, content), content[:6]
    for filtered in OF_KINDS:
        passing = engine.filtering(store).find_matches(filtered).labels()
        found = asked.search(queries, 10, filtered).labels
        true = exact.search(queries, 10, membership_mask(labels, passing)).labels
        assert ((found >= 0) == (true >= 0)).all()
        share = np.mean([np.isin(a, b) for a, b in zip(true, found, strict=True)])
        assert share >= RECALL, filtered
    # But where an index of the database said that few pass.
    assert counted.answered == (len(OF_KINDS) - 2) * len(queries)
