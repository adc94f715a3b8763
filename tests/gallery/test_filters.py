"""The filter engine against a slow predicate that goes through the items one by one."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.filter_engine import FilterEngine, passing_labels
from nobackfill.gallery.filters import (
    MOST_DEPTH,
    MOST_TESTS,
    MOST_VALUES,
    All,
    AnyOf,
    Exists,
    Filter,
    KeyTest,
    Not,
    OneOf,
    Range,
    Scalar,
    TimeRange,
    date_to_microseconds,
)
from nobackfill.gallery.spec import MetadataValue
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.store import NewVectors
from tests.gallery.making import ids, spec, vectors

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Texts that are times, with the time they are, and others that are nearly.
TIMES = {
    "2026-01-02": datetime(2026, 1, 2, tzinfo=UTC),
    "2026-01-02T00:00:00Z": datetime(2026, 1, 2, tzinfo=UTC),
    "2026-01-02 01:00:00.000001": datetime(2026, 1, 2, 1, 0, 0, 1, tzinfo=UTC),
    "2026-01-02T01:30:00+02:00": datetime(2026, 1, 1, 23, 30, tzinfo=UTC),
    "1969-12-31T23:59:59.5Z": datetime(1969, 12, 31, 23, 59, 59, 500_000, tzinfo=UTC),
}
NO_TIMES = ["2026-02-30", "2026", "20260102", "0000-01-01", "2026-01-02T25:00:00Z", "2026:01:02"]

KEYS = st.sampled_from(["colour", "year", "ü"])
BIG = [2**53, 2**53 + 1, 2**63 - 1, -(2**63), 2**62 + 1]
NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.integers(-3, 3).map(float),
    st.sampled_from([0.5, -0.0, 1e300, -1e300, 2.0**53, 2.0**63, -(2.0**63), *BIG]),
)
TEXTS = st.sampled_from(["red", "", "1", "true", "rot'", "ü", *TIMES, *NO_TIMES])
SCALARS = st.one_of(NUMBERS, st.booleans(), TEXTS)
METADATA = st.dictionaries(KEYS, st.one_of(SCALARS, st.lists(TEXTS, max_size=3)), max_size=3)
BOUNDS = st.one_of(st.none(), NUMBERS, st.sampled_from([float("inf"), float("-inf")]))
MOMENTS = st.one_of(
    st.none(),
    st.sampled_from([(time - EPOCH) // timedelta(microseconds=1) for time in TIMES.values()]),
)
TESTS = st.one_of(
    st.builds(OneOf, KEYS, st.lists(SCALARS, max_size=3).map(tuple)),
    st.builds(Range, KEYS, BOUNDS, BOUNDS, BOUNDS, BOUNDS),
    st.builds(TimeRange, KEYS, MOMENTS, MOMENTS, MOMENTS, MOMENTS),
    st.builds(Exists, KEYS),
)
FILTERS: st.SearchStrategy[Filter] = st.recursive(
    TESTS,
    lambda inner: st.one_of(
        st.builds(All, st.lists(inner, max_size=3).map(tuple)),
        st.builds(AnyOf, st.lists(inner, max_size=3).map(tuple)),
        st.builds(Not, inner),
    ),
    max_leaves=5,
)


def passes(test: Filter, value: Scalar) -> bool:
    if isinstance(test, OneOf):
        return any(kind(value) == kind(wanted) and value == wanted for wanted in test.values)
    if isinstance(test, Range):
        # Python compares integers with floats exactly.
        return kind(value) is float and within(test, value)
    if isinstance(test, TimeRange):
        time = TIMES.get(value) if isinstance(value, str) else None
        return time is not None and within(test, (time - EPOCH) // timedelta(microseconds=1))
    return True


def kind(value: Scalar) -> type:
    return float if type(value) is int else type(value)


def within(test: Range | TimeRange, value: Scalar) -> bool:
    assert isinstance(value, int | float)
    return (
        (test.at_least is None or value >= test.at_least)
        and (test.greater_than is None or value > test.greater_than)
        and (test.at_most is None or value <= test.at_most)
        and (test.less_than is None or value < test.less_than)
    )


def holds(
    filtered: Filter, metadata: Mapping[str, MetadataValue],
    passing: Callable[[KeyTest, Scalar], bool] = passes,
) -> bool:  # fmt: skip
    """`passing`: whether one value passes a test."""
    if isinstance(filtered, All):
        return all(holds(part, metadata, passing) for part in filtered.filters)
    if isinstance(filtered, AnyOf):
        return any(holds(part, metadata, passing) for part in filtered.filters)
    if isinstance(filtered, Not):
        return not holds(filtered.excluded_filter, metadata, passing)
    value = metadata.get(filtered.key, [])
    if isinstance(value, str | int | float):
        return passing(filtered, value)
    return any(passing(filtered, one) for one in value)


def moment(text: str) -> int:
    """Of a text that is a time, in microseconds."""
    found = date_to_microseconds(text)
    assert found is not None
    return found


@pytest.mark.long
@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    items=st.lists(METADATA, min_size=1, max_size=25),
    changed=st.lists(METADATA, max_size=8),
    gone=st.integers(0, 10),
    asked=st.lists(FILTERS, min_size=1, max_size=4),
)
def test_filters_let_through_what_the_predicate_does(
    tmp_path_factory: pytest.TempPathFactory,
    items: list[dict[str, MetadataValue]],
    changed: list[dict[str, MetadataValue]],
    gone: int,
    asked: list[Filter],
) -> None:
    count = len(items)
    there: dict[int, dict[str, MetadataValue]] = {}

    def check(store: SqliteGallery, filtering: FilterEngine) -> None:
        for filtered in asked:
            expected = [label for label, what in there.items() if holds(filtered, what)]
            assert passing_labels(store, filtered).tolist() == expected
            found = filtering.find_matches(filtered)
            assert found.labels().tolist() == expected
            assert len(found) == len(expected)
            for index in (np.arange(1, 60), np.arange(1, 60, 7), np.array([*there], np.int64)):
                assert index[found.mask(index)].tolist() == np.intersect1d(index, expected).tolist()

    with SqliteGallery.create(tmp_path_factory.mktemp("g") / "g.sqlite", spec()) as store:
        filtering = FilterEngine(store)
        check(store, filtering)
        digests = [str(n) for n in range(count)]
        new = NewVectors(spec().space, vectors(count, 1))
        store.put(ids(count), [new], digests=digests, metadata=items)
        there = dict(enumerate(items, start=1))
        check(store, filtering)
        # Metadata that changes while the content stays.
        items[: len(changed)] = changed[:count]
        store.put(ids(count), [new], digests=digests, metadata=items[:count])
        store.delete(ids(min(gone, count)))
        there = {n: what for n, what in enumerate(items[:count], start=1) if n > gone}
        check(store, filtering)
        filtering.close()
        with store.read_snapshot() as connection:
            left = "SELECT count(*) FROM attributes WHERE label NOT IN (SELECT label FROM items)"
            assert connection.execute(left).fetchone() == (0,)


@pytest.mark.parametrize("text", TIMES)
def test_times_are_read_as_rfc_3339_says(text: str) -> None:
    assert date_to_microseconds(text) == (TIMES[text] - EPOCH) // timedelta(microseconds=1)


@pytest.mark.parametrize("text", [*NO_TIMES, "", "2026-01-02\n", "2026-W01-1", "٢٠٢٦-01-02"])
def test_other_texts_are_no_times(text: str) -> None:
    assert date_to_microseconds(text) is None


def nested(levels: int) -> Filter:
    filtered: Filter = Exists("a")
    for _ in range(levels):
        filtered = Not(filtered)
    return filtered


@pytest.mark.parametrize(
    ("filtered", "why"),
    [
        (Range("year", at_least=float("nan")), "NaN"),
        (OneOf("year", (float("nan"),)), "NaN"),
        (Range("year", at_most=2**63), "64 bits"),
        (All((Exists("a"),) * (MOST_TESTS + 1)), "at most 500 conditions, got 501"),
        (
            AnyOf((OneOf("a", (1,) * MOST_VALUES), OneOf("b", ("x",)))),
            "at most 10000 values, got 10001",
        ),
        (nested(MOST_DEPTH + 1), "levels"),
    ],
)
def test_filters_are_bounded(tmp_path: Path, filtered: Filter, why: str) -> None:
    with SqliteGallery.create(tmp_path / "g.sqlite", spec()) as store:
        with pytest.raises(InvalidInputError, match=why):
            FilterEngine(store).find_matches(filtered)
        with pytest.raises(InvalidInputError, match=why):
            passing_labels(store, filtered)
        assert not len(passing_labels(store, OneOf("a", (1.0,) * MOST_VALUES)))
        assert not len(passing_labels(store, nested(MOST_DEPTH)))
