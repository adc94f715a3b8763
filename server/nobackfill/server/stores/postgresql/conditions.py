"""Translate filters to SQL, on data that is stored with an item's metadata; filters.py defines
them.

The column `facets` has, for each key with a value: {"s": texts, "n": [number], "b": [flag], "t":
times}. Numbers are written out exactly, floats as well (a float's shortest text is another number),
and times as microseconds since 1970. So SQL compares exactly as Python would.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, TypeVar

from nobackfill.gallery.filters import (
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
    check_filter,
    date_to_microseconds,
)
from nobackfill.gallery.spec import Metadata
from nobackfill.gallery.store import is_storable_text

_LOWER, _UPPER = ("at_least", "greater_than"), ("less_than", "at_most")
# Up to so many values are searched one by one in an index.
FEW_VALUES = 8


ConditionKind = TypeVar("ConditionKind", Range | TimeRange, OneOf)


@dataclass(frozen=True)
class SqlCondition:
    """Hold a condition of SQL on a row `i` of items.

    Attributes:
        sql: the condition, with a placeholder for each value.
        parameters: the values that it binds.
        source_filter: the filter that it translates; None for the condition that all items fulfil.
    """

    sql: str
    parameters: tuple[Any, ...] = ()
    source_filter: Filter | None = None


ALWAYS_TRUE = SqlCondition("TRUE")
_NOTHING = SqlCondition("FALSE")


def encode_facets(metadata: Metadata) -> str:
    """Return the data of an item's metadata for filters, as JSON.

    Args:
        metadata: values by key; all must be storable and finite, as `check_batch` ensures.

    Returns:
        A JSON object; an empty list has no entry. "{}" for no metadata.
    """
    entries = {key: _encode_facet(value) for key, value in metadata.items()}
    listed = (
        f"{json.dumps(key, ensure_ascii=False)}:{facet}" for key, facet in entries.items() if facet
    )
    return "{" + ",".join(listed) + "}"


def _encode_facet(value: Any) -> str:
    if isinstance(value, bool):
        return f'{{"b":[{json.dumps(value)}]}}'
    if isinstance(value, int | float):
        return f'{{"n":[{_exact_decimal(value)}]}}'
    texts = [value] if isinstance(value, str) else list(value)
    if not texts:
        return ""
    times = [time for time in map(date_to_microseconds, texts) if time is not None]
    values = {"s": texts, "t": times} if times else {"s": texts}
    return json.dumps(values, ensure_ascii=False)


def _exact_decimal(number: int | float) -> str:
    return format(Decimal(number), "f")


def sql_condition(filtered: Filter | None) -> SqlCondition:
    """Translate a filter; None matches all items.

    A test of a key or text that PostgreSQL cannot store is true for no item.

    Returns:
        The condition; ALWAYS_TRUE itself for None, so that callers may compare by identity. An
        empty All also matches all items, and an empty AnyOf none.

    Raises:
        InvalidInputError: `filters.check_filter` refuses the filter.
        TypeError: A part of it is no filter, such as a mapping.
    """
    if filtered is None:
        return ALWAYS_TRUE
    check_filter(filtered)
    condition = _filter_condition(filtered)
    return condition if condition is ALWAYS_TRUE else replace(condition, source_filter=filtered)


def _filter_condition(filtered: Filter) -> SqlCondition:
    if isinstance(filtered, Not):
        inner = _filter_condition(filtered.excluded_filter)
        return SqlCondition(f"NOT ({inner.sql})", inner.parameters)
    if isinstance(filtered, All):
        return _join_conditions(" AND ", _all_condition_parts(filtered.filters), ALWAYS_TRUE)
    if isinstance(filtered, AnyOf):
        return _join_conditions(" OR ", _any_condition_parts(filtered.filters), _NOTHING)
    return _test_condition(filtered) if is_storable_text(filtered.key) else _NOTHING


def _all_condition_parts(parts: Sequence[Filter]) -> list[SqlCondition]:
    """Translate parts that must all match; ranges of one key are combined, and so are negations."""
    ranges = _group_by_key(part for part in parts if isinstance(part, Range | TimeRange))
    negated = tuple(part.excluded_filter for part in parts if isinstance(part, Not))
    others = [
        _filter_condition(part) for part in parts if not isinstance(part, Range | TimeRange | Not)
    ]
    if negated:
        inner = _join_conditions(" OR ", _any_condition_parts(negated), _NOTHING)
        others.append(SqlCondition(f"NOT ({inner.sql})", inner.parameters))
    return [*others, *(_ranges_condition(group, every=True) for group in ranges)]


def _any_condition_parts(parts: Sequence[Filter]) -> list[SqlCondition]:
    """Translate parts of which one must match; ranges, and values, of one key are combined."""
    ranges = _group_by_key(part for part in parts if isinstance(part, Range | TimeRange))
    value_tests = _group_by_key(part for part in parts if isinstance(part, OneOf))
    others = [
        _filter_condition(part) for part in parts if not isinstance(part, Range | TimeRange | OneOf)
    ]
    values = (
        OneOf(group[0].key, tuple(value for test in group for value in test.values))
        for group in value_tests
    )
    return [
        *others,
        *map(_filter_condition, values),
        *(_ranges_condition(group, every=False) for group in ranges),
    ]


def _group_by_key(tests: Iterable[ConditionKind]) -> Iterable[list[ConditionKind]]:
    groups: dict[tuple[type, str], list[ConditionKind]] = {}
    for test in tests:
        groups.setdefault((type(test), test.key), []).append(test)
    return groups.values()


def _join_conditions(
    word: str, parts: Sequence[SqlCondition], default: SqlCondition
) -> SqlCondition:
    if not parts:
        return default
    text = word.join(f"({part.sql})" for part in parts)
    return SqlCondition(text, tuple(value for part in parts for value in part.parameters))


def _test_condition(test: KeyTest) -> SqlCondition:
    if isinstance(test, OneOf):
        return _one_of_condition(test)
    if isinstance(test, Exists):
        return SqlCondition("i.facets ? %s", (test.key,))
    return _ranges_condition([test], every=True)


def _ranges_condition(ranges: Sequence[Range | TimeRange], *, every: bool) -> SqlCondition:
    """Make the condition that the item's key is in every range, or in one of them.

    PostgreSQL combines the ranges once for all rows; one by one, each row would take as many times
    longer.
    """
    key = ranges[0].key
    if not is_storable_text(key):
        return _NOTHING
    texts = tuple(map(_range_literal, ranges))
    combined, bounds = " * ".join(["%s::numrange"] * len(texts)), texts
    if not every:
        combined, bounds = "%s::nummultirange", (f"{{{','.join(texts)}}}",)
    # A key has at most one number; a subquery for each row took three times as long.
    kind = "n" if isinstance(ranges[0], Range) else "t"
    number = f"(i.facets -> %s -> '{kind}' -> 0)"
    # PostgreSQL 17 treats even NULL as within a range without bounds.
    first = f"({number} IS NOT NULL AND {number}::numeric <@ ({combined}))"
    if kind == "n":
        return SqlCondition(first, (key, key, *bounds))
    # In a list, each range may hold another time.
    parts = ["%s::numrange"] * len(texts) if every else [combined]
    of_list = " AND ".join(
        "EXISTS (SELECT 1 FROM jsonb_array_elements(i.facets -> %s -> 't') e"
        f" WHERE e.value::numeric <@ {part})"
        for part in parts
    )
    values = [value for bound in bounds for value in (key, bound)]
    return SqlCondition(
        f"({first} OR (i.facets -> %s -> 't' -> 1) IS NOT NULL AND {of_list})",
        (key, key, *bounds, key, *values),
    )


def _range_literal(test: Range | TimeRange) -> str:
    """Write a range as PostgreSQL does."""
    lowest = max(
        ((bound, name == "greater_than") for name, bound in _set_bounds(test, _LOWER)), default=None
    )
    highest = min(
        ((bound, name == "at_most") for name, bound in _set_bounds(test, _UPPER)), default=None
    )
    if lowest is not None and highest is not None and lowest[0] > highest[0]:
        return "empty"
    lower = "(" if lowest is None else f"{'(' if lowest[1] else '['}{_bound_literal(lowest[0])}"
    upper = ")" if highest is None else f"{_bound_literal(highest[0])}{']' if highest[1] else ')'}"
    return f"{lower},{upper}"


def _set_bounds(test: Range | TimeRange, names: Sequence[str]) -> list[tuple[str, int | float]]:
    return [(name, bound) for name in names if (bound := getattr(test, name)) is not None]


def _one_of_condition(test: OneOf) -> SqlCondition:
    """Make the condition that a key has one of some values.

    Few values are searched in an index. Many are compared by a hash table; one by one, each row
    would take as many times longer.
    """
    if len(test.values) <= FEW_VALUES:
        return _join_conditions(
            " OR ", [_equals_condition(test.key, value) for value in test.values], _NOTHING
        )
    flags = [
        _equals_condition(test.key, value) for value in {*test.values} if isinstance(value, bool)
    ]
    texts = [value for value in test.values if isinstance(value, str) and is_storable_text(value)]
    numbers = [
        _exact_decimal(value)
        for value in test.values
        if not isinstance(value, bool | str) and not math.isinf(value)
    ]
    conditions = [*flags]
    if numbers:
        number = "(i.facets -> %s -> 'n' -> 0)::numeric"
        text = f"({number} = ANY(%s::text[]::numeric[])) IS TRUE"
        conditions.append(SqlCondition(text, (test.key, numbers)))
    if texts:
        # All elements of a list are compared; most keys have one text.
        of_list = (
            "(i.facets -> %s -> 's' -> 1) IS NOT NULL AND EXISTS (SELECT 1 FROM"
            " jsonb_array_elements_text(i.facets -> %s -> 's') e WHERE e.value = ANY(%s::text[]))"
        )
        text = f"((i.facets -> %s -> 's' ->> 0) = ANY(%s::text[]) OR {of_list}) IS TRUE"
        conditions.append(SqlCondition(text, (test.key, texts, test.key, test.key, texts)))
    return _join_conditions(" OR ", conditions, _NOTHING)


def _bound_literal(bound: int | float) -> str:
    if isinstance(bound, float) and math.isinf(bound):
        return "Infinity" if bound > 0 else "-Infinity"
    return _exact_decimal(bound)


def _equals_condition(key: str, value: Scalar) -> SqlCondition:
    if isinstance(value, bool):
        values: Mapping[str, str] = {"b": json.dumps(value)}
    elif isinstance(value, str):
        if not is_storable_text(value):
            return _NOTHING
        values = {"s": json.dumps(value, ensure_ascii=False)}
    elif math.isinf(value):
        return _NOTHING
    else:
        values = {"n": _exact_decimal(value)}
    ((kind, text),) = values.items()
    name = json.dumps(key, ensure_ascii=False)
    return SqlCondition("i.facets @> %s::jsonb", (f'{{{name}:{{"{kind}":[{text}]}}}}',))
