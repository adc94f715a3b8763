"""Filters as SQL, over what is kept of an item's metadata for them; semantics in filters.py.

`facets` holds, for each key that has a value: {"s": texts, "n": [number], "b": [flag], "t": times}.
Numbers are written out exactly, floats too (a float's shortest text is another number), and times
as microseconds since 1970, so that SQL compares what Python would.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

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
    check,
    microseconds,
)
from nobackfill.gallery.writing import Metadata, storable

_BOUNDS = (("at_least", ">="), ("greater_than", ">"), ("less_than", "<"), ("at_most", "<="))


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
        return _joined(" AND ", [_of(part) for part in filtered.of], EVERYTHING)
    if isinstance(filtered, AnyOf):
        return _joined(" OR ", [_of(part) for part in filtered.of], _NOTHING)
    return _test(filtered) if storable(filtered.key) else _NOTHING


def _joined(word: str, parts: Sequence[Condition], of_none: Condition) -> Condition:
    if not parts:
        return of_none
    text = word.join(f"({part.text})" for part in parts)
    return Condition(text, tuple(value for part in parts for value in part.values))


def _test(test: Test) -> Condition:
    if isinstance(test, OneOf):
        return _joined(" OR ", [_equals(test.key, value) for value in test.values], _NOTHING)
    if isinstance(test, Exists):
        return Condition("i.facets ? %s", (test.key,))
    wanted = [(sign, bound) for name, sign in _BOUNDS if (bound := getattr(test, name)) is not None]
    if isinstance(test, Range):
        return _in_range(test.key, wanted)
    inside = "".join(f" AND e.value::bigint {sign} %s::bigint" for sign, _ in wanted)
    return Condition(
        f"EXISTS (SELECT 1 FROM jsonb_array_elements(i.facets -> %s -> 't') e WHERE TRUE{inside})",
        (test.key, *(str(bound) for _, bound in wanted)),
    )


def _in_range(key: str, wanted: Sequence[tuple[str, int | float]]) -> Condition:
    """An item has one number of a key, or none: a subquery for each row took thrice the time."""
    number = "(i.facets -> %s -> 'n' -> 0)::numeric"
    inside = [f"{number} {sign} %s::numeric" for sign, _ in wanted] or [f"{number} IS NOT NULL"]
    bounds = [value for _, bound in wanted for value in (key, _bound(bound))] or [key]
    return Condition(f"({' AND '.join(inside)}) IS TRUE", tuple(bounds))


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
