"""What Milvus is told of metadata and asked for filters, against the slow predicate. An expression
is read here as Python, which means by it what Milvus does; tests/scale asks a Milvus."""

import json
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from nobackfill.gallery.spec import Metadata
from nobackfill.plugins.milvus import columns as hashes
from nobackfill.plugins.milvus.columns import Columns, columns_of
from nobackfill.plugins.milvus.expressions import EVERYTHING, expression_of
from nobackfill.server.stores.postgresql.conditions import encode_facets
from tests.gallery.test_filters import (
    FILTERS,
    METADATA,
    TEXTS,
    holds,
    moment,
    nested,
    passes,
    within,
)

WORDS = st.sampled_from([f"word {n}" for n in range(20)])
# More than there is a place for.
MANY = st.dictionaries(
    st.sampled_from(["colour", "year", "ü", *(f"key {n}" for n in range(30))]),
    st.one_of(st.lists(st.one_of(TEXTS, WORDS), max_size=12), st.integers(-3, 3)),
    max_size=30,
)
SAID = re.compile(r"and|or|not|in|id|upto|[tk]\d+|n\d|e")


def told(metadata: Metadata) -> Columns:
    return columns_of(json.loads(encode_facets(metadata)))


def matches(expression: str, columns: Columns) -> bool:
    return expression == EVERYTHING or bool(eval(expression, {}, {"id": 7, **columns}))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(METADATA, MANY), min_size=1, max_size=5), FILTERS)
def test_what_passes_is_asked_for(items: list[Metadata], filtered: Filter) -> None:
    expression = expression_of(filtered)
    for metadata in items:
        assert matches(expression, told(metadata)) or not holds(filtered, metadata)


ITEMS: Sequence[Metadata] = [
    {}, {"n": 1}, {"n": 1.5}, {"n": -4}, {"n": 0}, {"n": True}, {"n": "1"}, {"n": []},
    {"c": "red"}, {"c": ["red", "blue"]}, {"c": ["blue"], "n": 7}, {"c": "2026-01-02"},
    {"c": ["2025-06-01T12:00:00Z", "2026-05-01", "red"], "n": 2026},
    {"c": "reď", "n": 1e9, "flag": False}, {"flag": True, "n": -1e-300},
]  # fmt: skip


@pytest.mark.parametrize(
    "filtered",
    [
        OneOf("n", (1,)), OneOf("n", (1.0, -4, True)), OneOf("n", ("1", 0)), OneOf("n", ()),
        OneOf("c", ("red",)), OneOf("c", ("red", "blue", "green")), OneOf("flag", (False,)),
        Exists("n"), Exists("c"), Exists("nobody"), Exists("a\0"), OneOf("c", ("a\0",)),
        Range("n"), Range("n", at_least=1), Range("n", greater_than=1), Range("n", less_than=0),
        Range("n", at_least=-4, at_most=1.5), Range("n", at_most=float("inf")),
        Range("n", at_least=float("inf")), Range("n", less_than=float("-inf")),
        TimeRange("c", at_least=moment("2026-01-02"), less_than=moment("2026-02-01")),
        TimeRange("c", greater_than=moment("2026-01-02")), TimeRange("n", at_least=0),
        Not(OneOf("c", ("red",))), Not(Range("n", at_least=1)), Not(Exists("c")),
        Not(All((Exists("c"), Not(OneOf("n", (7, 2026)))))), All(()), AnyOf(()), Not(AnyOf(())),
        AnyOf((OneOf("c", ("blue",)), Range("n", greater_than=2000), OneOf("flag", (True,)))),
        All((OneOf("c", ("red", "blue")), Not(Exists("flag")), Range("n", at_least=7))),
    ],
    ids=str,
)  # fmt: skip
def test_what_floats_can_say_is_asked_for_exactly(filtered: Filter) -> None:
    expression = expression_of(filtered)
    asked = [matches(expression, told(metadata)) for metadata in ITEMS]
    assert asked == [holds(filtered, metadata, passes_here) for metadata in ITEMS]


def passes_here(test: KeyTest, value: Scalar) -> bool:
    """The predicate knows the times of its own test; here a text is one where the store says so."""
    if not isinstance(test, TimeRange):
        return passes(test, value)
    time = date_to_microseconds(value) if isinstance(value, str) else None
    return time is not None and within(test, time)


def test_what_is_rounded_is_let_through_on_both_sides() -> None:
    """2**53 + 1 is no float."""
    items: list[Metadata] = [{"n": 2**53 + more} for more in (-1, 0, 1, 2)]
    for filtered in (
        OneOf("n", (2**53 + 1,)), Not(OneOf("n", (2**53 + 1,))), Range("n", at_least=2**53 + 1),
        Not(Range("n", less_than=2**53)), Not(Range("n", greater_than=2**53)),
    ):  # fmt: skip
        asked = [matches(expression_of(filtered), told(item)) for item in items]
        passing = [holds(filtered, item) for item in items]
        assert all(one or not other for one, other in zip(asked, passing, strict=True))
        # The first is no other number's float, and not let through with them.
        assert asked[0] == passing[0]


@given(MANY)
def test_columns_are_the_same_for_every_item(metadata: Metadata) -> None:
    columns, empty = told(metadata), told({})
    assert [(name, type(value)) for name, value in columns.items()] == [
        (name, type(value)) for name, value in empty.items()
    ]
    assert all(-(2**63) <= value < 2**63 for value in columns.values())


def test_an_item_with_more_than_fits_is_told_in_part() -> None:
    """Some of its keys; the others let it through."""
    metadata: Metadata = {f"key {number}": f"value {number}" for number in range(40)}
    columns = told(metadata)
    absent = [OneOf(key, ("another",)) for key in metadata]
    excluded = [one for one in absent if not matches(expression_of(one), columns)]
    assert 7 <= len(excluded) < 20
    assert all(
        matches(expression_of(Not(OneOf(key, (str(value),)))), columns)
        == (OneOf(key, ("another",)) not in excluded)
        for key, value in metadata.items()
    )
    # As many as an item has mostly: all of them.
    few: Metadata = {
        "a": "x", "b": ["y", "z"], "c": 1, "d": 2.5, "e": True, "f": "2026-01-02", "g": -1,
    }  # fmt: skip
    assert not any(matches(expression_of(Not(Exists(key))), told(few)) for key in few)


@pytest.mark.parametrize("text", ['"', "' or id > 0 or '", "1) or (1", "\\", "é\n", "id", "{x}"])
def test_no_text_gets_into_an_expression(text: str) -> None:
    every = AnyOf((OneOf(text, (text, 1)), Exists(text), Range(text, -1.5, 1e300)))
    for expression in (expression_of(every), expression_of(Not(every))):
        assert re.fullmatch(r"[a-z0-9 .,+<>=()\[\]-]+", expression)
        assert all(SAID.fullmatch(word) for word in re.findall(r"[a-z]+\d*", expression))


def test_expressions_are_bounded() -> None:
    texts = tuple(str(number) for number in range(MOST_VALUES))
    assert expression_of(OneOf("k", texts)) == EVERYTHING
    assert expression_of(AnyOf(tuple(Exists(text) for text in texts[:MOST_TESTS]))) == EVERYTHING
    assert 0 < len(expression_of(OneOf("k", texts[:300]))) <= 1 << 15
    # Nothing is asked for where nothing passes, and all where all does.
    assert not matches(expression_of(OneOf("k", ())), told({"j": 1}))
    assert expression_of(Not(AnyOf(()))) == EVERYTHING
    deep = expression_of(nested(MOST_DEPTH))
    assert matches(deep, told({"a": 1})) and not matches(deep, told({"b": 1}))


def test_long_texts_are_not_kept() -> None:
    hashes._cached_hash.cache_clear()
    assert hashes.hash_texts("text", "k", "x" * 1000) == hashes._token_hash("text", "k", "x" * 1000)
    assert hashes._cached_hash.cache_info().currsize == 0
    assert hashes.hash_texts("text", "k", "x") == hashes._token_hash("text", "k", "x")
    assert hashes._cached_hash.cache_info().currsize == 1
