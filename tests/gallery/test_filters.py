"""Metadata filters against a Python predicate."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gallery.filters import Condition, OneOf, Range, allowed_labels
from gallery.put import MetadataValue
from gallery.store import NewVectors, Store
from release.errors import InvalidInputError
from tests.gallery.making import filled, ids, spec, vectors

KEYS = st.sampled_from(["colour", "year", "ü"])
NUMBERS = st.one_of(st.integers(-3, 3).map(float), st.sampled_from([0.5, -0.5, 1e300]))
VALUES = st.one_of(NUMBERS, st.booleans(), st.sampled_from(["red", "", "1", "true", "rot'"]))
METADATA = st.dictionaries(KEYS, VALUES, max_size=3)
BOUNDS = st.one_of(st.none(), NUMBERS)
CONDITIONS = st.one_of(
    st.builds(OneOf, KEYS, st.lists(VALUES, max_size=3).map(tuple)),
    st.builds(Range, KEYS, BOUNDS, BOUNDS),
)


def holds(condition: Condition, metadata: Mapping[str, MetadataValue]) -> bool:
    if condition.key not in metadata:
        return False
    value = metadata[condition.key]
    if isinstance(condition, OneOf):
        return any(type(value) is type(v) and value == v for v in condition.values)
    if isinstance(value, bool | str):
        return False
    above = condition.at_least is None or value >= condition.at_least
    return above and (condition.less_than is None or value < condition.less_than)


@settings(max_examples=25, deadline=None)
@given(
    items=st.lists(METADATA, min_size=1, max_size=25),
    changed=st.lists(METADATA, max_size=8),
    gone=st.integers(0, 10),
    conditions=st.lists(CONDITIONS, min_size=1, max_size=3),
)
def test_filters_let_through_what_the_predicate_does(
    tmp_path_factory: pytest.TempPathFactory,
    items: list[dict[str, MetadataValue]],
    changed: list[dict[str, MetadataValue]],
    gone: int,
    conditions: list[Condition],
) -> None:
    with Store.create(tmp_path_factory.mktemp("g") / "g.sqlite", spec()) as store:
        count = len(items)
        digests = [str(n) for n in range(count)]
        new = NewVectors(spec().space, vectors(count, 1))
        store.put(ids(count), [new], digests=digests, metadata=items)
        # Metadata that changes while the content stays.
        items[: len(changed)] = changed[:count]
        store.put(ids(count), [new], digests=digests, metadata=items[:count])
        store.delete(ids(min(gone, count)))
        expected = [
            label
            for label, metadata in enumerate(items[:count], start=1)
            if label > gone and all(holds(condition, metadata) for condition in conditions)
        ]
        assert allowed_labels(store, conditions).tolist() == expected
        with store.reading() as connection:
            left = "SELECT count(*) FROM attributes WHERE label NOT IN (SELECT label FROM items)"
            assert connection.execute(left).fetchone() == (0,)


@pytest.mark.parametrize(
    ("condition", "columns"),
    [
        (OneOf("k", ("a",)), "key=? AND kind=? AND value=?"),
        (OneOf("k", ("a", "b", True, 2.0)), "key=? AND kind=? AND value=?"),
        (Range("k", 3.0), "key=? AND kind=? AND value>?"),
        (Range("k", None, 3.0), "key=? AND kind=? AND value<?"),
    ],
)
def test_a_filter_reads_its_stretch_of_the_index(
    tmp_path: Path, condition: Condition, columns: str
) -> None:
    seen: list[str] = []
    with filled(tmp_path / "g.sqlite", 3) as store:
        with store.reading() as connection:
            connection.set_trace_callback(seen.append)
        allowed_labels(store, [condition])
        (select,) = [statement for statement in seen if "attributes" in statement]
        with store.reading() as connection:
            plan = connection.execute(f"EXPLAIN QUERY PLAN {select}").fetchall()
    searches = [row[-1] for row in plan if "attributes" in row[-1]]
    assert searches and all(columns in search for search in searches), plan


def test_a_filter_without_a_meaning_is_refused(tmp_path: Path) -> None:
    with Store.create(tmp_path / "g.sqlite", spec()) as store:
        with pytest.raises(InvalidInputError, match="NaN"):
            allowed_labels(store, [Range("year", at_least=float("nan"))])
        with pytest.raises(InvalidInputError, match="at least one"):
            allowed_labels(store, [])
        nothing = allowed_labels(store, [OneOf("a", (1.0,))])
        assert nothing.dtype == np.int64 and len(nothing) == 0
