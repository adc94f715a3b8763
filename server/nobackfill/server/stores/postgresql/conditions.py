"""Filters as SQL, over what is kept of an item's metadata for them; semantics in filters.py.

`facets` holds, for each key that has a value: {"s": texts, "n": [number], "b": [flag], "t": times}.
Numbers are written out exactly, floats too (a float's shortest text is another number), and times
as microseconds since 1970, so that SQL compares what Python would.
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
    Not,
    OneOf,
    Range,
    Scalar,
    Test,
    TimeRange,
    check,
    microseconds,
)
from nobackfill.gallery.spec import Metadata
from nobackfill.gallery.store import storable

_LOWER, _UPPER = ("at_least", "greater_than"), ("less_than", "at_most")
# Values that are looked for one by one, in an index.
FEW_VALUES = 8


Kind = TypeVar("Kind", Range | TimeRange, OneOf)


@dataclass(frozen=True)
class Condition:
    """A condition on a row `i` of items, with the values that it binds, and the filter that it
    says, if there is one."""

    text: str
    values: tuple[Any, ...] = ()
    says: Filter | None = None


EVERYTHING = Condition("TRUE")
_NOTHING = Condition("FALSE")


def facets(metadata: Metadata) -> str:
    """What is kept of metadata for filters, as JSON."""
    found = {key: _facet(value) for key, value in metadata.items()}
    listed = (
        f"{json.dumps(key, ensure_ascii=False)}:{facet}" for key, facet in found.items() if facet
    )
    return "{" + ",".join(listed) + "}"


def _facet(value: Any) -> str:
    if isinstance(value, bool):
        return f'{{"b":[{json.dumps(value)}]}}'
    if isinstance(value, int | float):
        return f'{{"n":[{_exact(value)}]}}'
    texts = [value] if isinstance(value, str) else list(value)
    if not texts:
        return ""
    times = [time for time in map(microseconds, texts) if time is not None]
    kept = {"s": texts, "t": times} if times else {"s": texts}
    return json.dumps(kept, ensure_ascii=False)


def _exact(number: int | float) -> str:
    return format(Decimal(number), "f")


def condition_of(filtered: Filter | None) -> Condition:
    """Raises InvalidInputError for a filter that `filters.check` refuses."""
    if filtered is None:
        return EVERYTHING
    check(filtered)
    found = _of(filtered)
    return found if found is EVERYTHING else replace(found, says=filtered)


def _of(filtered: Filter) -> Condition:
    if isinstance(filtered, Not):
        inner = _of(filtered.of)
        return Condition(f"NOT ({inner.text})", inner.values)
    if isinstance(filtered, All):
        return _joined(" AND ", _of_all(filtered.of), EVERYTHING)
    if isinstance(filtered, AnyOf):
        return _joined(" OR ", _of_any(filtered.of), _NOTHING)
    return _test(filtered) if storable(filtered.key) else _NOTHING


def _of_all(parts: Sequence[Filter]) -> list[Condition]:
    """Ranges of one key are asked together, and so is what is denied."""
    ranges = _by_key(part for part in parts if isinstance(part, Range | TimeRange))
    denied = tuple(part.of for part in parts if isinstance(part, Not))
    others = [_of(part) for part in parts if not isinstance(part, Range | TimeRange | Not)]
    if denied:
        inner = _joined(" OR ", _of_any(denied), _NOTHING)
        others.append(Condition(f"NOT ({inner.text})", inner.values))
    return [*others, *(_within(some, every=True) for some in ranges)]


def _of_any(parts: Sequence[Filter]) -> list[Condition]:
    """Ranges of one key are asked together, and so are values of one key."""
    ranges = _by_key(part for part in parts if isinstance(part, Range | TimeRange))
    wanted = _by_key(part for part in parts if isinstance(part, OneOf))
    others = [_of(part) for part in parts if not isinstance(part, Range | TimeRange | OneOf)]
    values = (
        OneOf(some[0].key, tuple(value for one in some for value in one.values)) for some in wanted
    )
    return [*others, *map(_of, values), *(_within(some, every=False) for some in ranges)]


def _by_key(tests: Iterable[Kind]) -> Iterable[list[Kind]]:
    found: dict[tuple[type, str], list[Kind]] = {}
    for test in tests:
        found.setdefault((type(test), test.key), []).append(test)
    return found.values()


def _joined(word: str, parts: Sequence[Condition], of_none: Condition) -> Condition:
    if not parts:
        return of_none
    text = word.join(f"({part.text})" for part in parts)
    return Condition(text, tuple(value for part in parts for value in part.values))


def _test(test: Test) -> Condition:
    if isinstance(test, OneOf):
        return _one_of(test)
    if isinstance(test, Exists):
        return Condition("i.facets ? %s", (test.key,))
    return _within([test], every=True)


def _within(ranges: Sequence[Range | TimeRange], *, every: bool) -> Condition:
    """That the item's key is in `every` range, or in one of them. PostgreSQL joins the ranges once
    for all rows: one by one they took each row so many times as long."""
    key = ranges[0].key
    if not storable(key):
        return _NOTHING
    said = tuple(map(_range, ranges))
    joined, bounds = " * ".join(["%s::numrange"] * len(said)), said
    if not every:
        joined, bounds = "%s::nummultirange", (f"{{{','.join(said)}}}",)
    # A key has one number or none: a subquery for each row took thrice the time.
    kind = "n" if isinstance(ranges[0], Range) else "t"
    number = f"(i.facets -> %s -> '{kind}' -> 0)"
    # PostgreSQL 17 takes all, even what is not there, for within a range without bounds.
    first = f"({number} IS NOT NULL AND {number}::numeric <@ ({joined}))"
    if kind == "n":
        return Condition(first, (key, key, *bounds))
    # Of a list, each range may hold another time.
    asked = ["%s::numrange"] * len(said) if every else [joined]
    of_list = " AND ".join(
        "EXISTS (SELECT 1 FROM jsonb_array_elements(i.facets -> %s -> 't') e"
        f" WHERE e.value::numeric <@ {one})"
        for one in asked
    )
    values = [value for bound in bounds for value in (key, bound)]
    return Condition(
        f"({first} OR (i.facets -> %s -> 't' -> 1) IS NOT NULL AND {of_list})",
        (key, key, *bounds, key, *values),
    )


def _range(test: Range | TimeRange) -> str:
    """The same in PostgreSQL's words."""
    least = max(
        ((bound, name == "greater_than") for name, bound in _given(test, _LOWER)), default=None
    )
    most = min(((bound, name == "at_most") for name, bound in _given(test, _UPPER)), default=None)
    if least is not None and most is not None and least[0] > most[0]:
        return "empty"
    lower = "(" if least is None else f"{'(' if least[1] else '['}{_bound(least[0])}"
    upper = ")" if most is None else f"{_bound(most[0])}{']' if most[1] else ')'}"
    return f"{lower},{upper}"


def _given(test: Range | TimeRange, names: Sequence[str]) -> list[tuple[str, int | float]]:
    return [(name, bound) for name in names if (bound := getattr(test, name)) is not None]


def _one_of(test: OneOf) -> Condition:
    """Few values are looked for in an index. Many are compared with what a row has, by a table of
    hashes: looked for one by one, they take each row so many times as long."""
    if len(test.values) <= FEW_VALUES:
        return _joined(" OR ", [_equals(test.key, value) for value in test.values], _NOTHING)
    flags = [_equals(test.key, value) for value in {*test.values} if isinstance(value, bool)]
    texts = [value for value in test.values if isinstance(value, str) and storable(value)]
    numbers = [
        _exact(value)
        for value in test.values
        if not isinstance(value, bool | str) and not math.isinf(value)
    ]
    found = [*flags]
    if numbers:
        number = "(i.facets -> %s -> 'n' -> 0)::numeric"
        text = f"({number} = ANY(%s::text[]::numeric[])) IS TRUE"
        found.append(Condition(text, (test.key, numbers)))
    if texts:
        # Of a list all elements are looked at; most keys have one text.
        of_list = (
            "(i.facets -> %s -> 's' -> 1) IS NOT NULL AND EXISTS (SELECT 1 FROM"
            " jsonb_array_elements_text(i.facets -> %s -> 's') e WHERE e.value = ANY(%s::text[]))"
        )
        text = f"((i.facets -> %s -> 's' ->> 0) = ANY(%s::text[]) OR {of_list}) IS TRUE"
        found.append(Condition(text, (test.key, texts, test.key, test.key, texts)))
    return _joined(" OR ", found, _NOTHING)


def _bound(bound: int | float) -> str:
    if isinstance(bound, float) and math.isinf(bound):
        return "Infinity" if bound > 0 else "-Infinity"
    return _exact(bound)


def _equals(key: str, value: Scalar) -> Condition:
    if isinstance(value, bool):
        kept: Mapping[str, str] = {"b": json.dumps(value)}
    elif isinstance(value, str):
        if not storable(value):
            return _NOTHING
        kept = {"s": json.dumps(value, ensure_ascii=False)}
    elif math.isinf(value):
        return _NOTHING
    else:
        kept = {"n": _exact(value)}
    ((kind, text),) = kept.items()
    name = json.dumps(key, ensure_ascii=False)
    return Condition("i.facets @> %s::jsonb", (f'{{{name}:{{"{kind}":[{text}]}}}}',))
