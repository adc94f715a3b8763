"""Texts that no engine keeps, NUL and half characters, are nowhere, and no engine stumbles."""

import pytest

from nobackfill.errors import IncompatibleSpaceError, InvalidInputError
from nobackfill.gallery.filters import Exists, Filter, Not, OneOf, Range, TimeRange
from nobackfill.gallery.store import NewVectors
from tests.gallery.making import SIDE_DIM, ids, spec, vectors
from tests.stores.conftest import Engine

ODD = ("a\0b", "\ud800", "a\udfff")
ONE = spec(1).space


def test_odd_texts_are_nowhere(engine: Engine) -> None:
    store = engine.create(spec())
    new = NewVectors(ONE, vectors(3, 1), vectors(3, 2, SIDE_DIM))
    store.put(ids(3), [new], metadata=[{"n": 1, "t": "x"}] * 3)
    labels = store.labels_of(ids(3))
    filtering = engine.filtering(store)
    for odd in ODD:
        assert store.get(odd) is None
        assert len(store.labels_of([odd])) == 0
        assert store.delete([odd]) == 0
        assert store.group_by_value(odd, ONE) == []
        with pytest.raises(IncompatibleSpaceError):
            store.space(odd)
        tests: list[Filter] = [
            OneOf("t", (odd,)), OneOf(odd, ("x",)), Range(odd, 0), TimeRange(odd, 0), Exists(odd),
        ]  # fmt: skip
        for test in tests:
            assert len(filtering.find_matches(test)) == 0
            assert len(filtering.find_matches(Not(test))) == 3
        with pytest.raises(InvalidInputError):
            store.put([odd], [NewVectors(ONE, vectors(1, 3), vectors(1, 4, SIDE_DIM))])
        for metadata in ({odd: 1}, {"t": odd}, {"t": ["x", odd]}):
            with pytest.raises(InvalidInputError):
                store.change_some_metadata(labels, None, metadata, [])
        assert store.change_some_metadata(labels, None, {}, [odd]) <= 3
    assert store.count() == 3
