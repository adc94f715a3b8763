"""Filters as expressions of Milvus over the columns of columns.py; semantics in filters.py.

An expression holds wherever its filter does, and perhaps elsewhere: numbers are rounded to floats,
and a row that has no place for a key is let through. PostgreSQL decides. Below a `Not` it is the
other way round: there what is said holds only where the filter does, so that its denial holds
wherever the filter's does. Hashes are taken for what they stand for: 63 bits of them.

Nothing of a filter's texts goes into an expression, only numbers.

A module of its own: it needs no pymilvus, and tests reach it alone.
"""

import math
from collections.abc import Callable, Sequence

from nobackfill.gallery.filters import (
    All,
    AnyOf,
    Exists,
    Filter,
    Not,
    OneOf,
    Range,
    Test,
    TimeRange,
)
from nobackfill.gallery.store import storable
from nobackfill.plugins.milvus.columns import (
    FACTS,
    NUMBERS,
    flag_token,
    key_token,
    number_token,
    places,
    text_token,
    time_token,
)

EVERYTHING = ""
# Labels are positive.
_NOTHING = "id < 0"
# Longer ones cost Milvus more than they save.
_MOST_CHARACTERS = 1 << 15
# Integers to here are floats.
_EXACT = 2**53


def expression_of(filtered: Filter) -> str:
    """What holds of every item that passes, as far as it can be said shortly."""
    said = _said(filtered, wide=True)
    return said if len(said) <= _MOST_CHARACTERS else EVERYTHING


def _said(filtered: Filter, *, wide: bool) -> str:
    """What holds wherever the filter does, or (not `wide`) only where it does."""
    if isinstance(filtered, Not):
        return _denied(_said(filtered.of, wide=not wide))
    if isinstance(filtered, All):
        return _both([_said(part, wide=wide) for part in filtered.of])
    if isinstance(filtered, AnyOf):
        return _either([_said(part, wide=wide) for part in filtered.of])
    if not storable(filtered.key):
        return _NOTHING
    passes, order = _test(filtered, wide=wide), key_token(filtered.key)
    # A row in which the key is not told, or not whole.
    if wide:
        return _either([f"upto <= {order}", passes])
    return _both([f"upto > {order}", passes])


def _denied(said: str) -> str:
    if said in (EVERYTHING, _NOTHING):
        return _NOTHING if said == EVERYTHING else EVERYTHING
    return f"not ({said})"


def _both(parts: Sequence[str]) -> str:
    return _joined(" and ", parts, of_none=EVERYTHING, strongest=_NOTHING)


def _either(parts: Sequence[str]) -> str:
    return _joined(" or ", parts, of_none=_NOTHING, strongest=EVERYTHING)


def _joined(word: str, parts: Sequence[str], of_none: str, strongest: str) -> str:
    if strongest in parts:
        return strongest
    rest = [part for part in parts if part != of_none]
    if len(rest) <= 1:
        return rest[0] if rest else of_none
    return word.join(f"({part})" if " or " in part or " and " in part else part for part in rest)


def _test(test: Test, *, wide: bool) -> str:
    if isinstance(test, Exists):
        flags = [flag_token(test.key, flag) for flag in (False, True)]
        has_number = _number(number_token(test.key), lambda _: [])
        return _either([_facts([key_token(test.key), *flags]), has_number])
    if isinstance(test, OneOf):
        return _one_of(test, wide=wide)
    inside = _inside(test, wide=wide)
    if inside is None:
        return _NOTHING
    token = time_token if isinstance(test, TimeRange) else number_token
    return _number(token(test.key), inside)


def _facts(tokens: Sequence[int]) -> str:
    """That a row has one of these facts."""
    at: dict[int, list[str]] = {}
    for token in tokens:
        for place in places(token, FACTS):
            at.setdefault(place, []).append(str(token))
    return _either([_equals(f"t{place}", some) for place, some in sorted(at.items())])


def _number(token: int, inside: Callable[[str], list[str]]) -> str:
    """That a row has a number of this hash for which what `inside` says of its column holds."""
    return _either(
        [_both([f"k{place} == {token}", *inside(f"n{place}")]) for place in places(token, NUMBERS)]
    )


def _equals(column: str, values: Sequence[str]) -> str:
    return f"{column} == {values[0]}" if len(values) == 1 else f"{column} in [{', '.join(values)}]"


def _one_of(test: OneOf, *, wide: bool) -> str:
    facts, numbers = set[int](), set[str]()
    for value in test.values:
        if isinstance(value, bool):
            facts.add(flag_token(test.key, value))
        elif isinstance(value, str):
            if storable(value):
                facts.add(text_token(test.key, value))
        elif not math.isinf(value) and (wide or _is_exact(value)):
            numbers.add(_float(value))
    said = [_facts(sorted(facts))]
    if numbers:
        wanted = sorted(numbers)
        said.append(_number(number_token(test.key), lambda column: [_equals(column, wanted)]))
    return _either(said)


def _inside(test: Range | TimeRange, *, wide: bool) -> Callable[[str], list[str]] | None:
    """What is said of a column that is to lie within the bounds; None: nothing lies there."""
    bounds = (
        (">", test.at_least, True), (">", test.greater_than, False),
        ("<", test.less_than, False), ("<", test.at_most, True),
    )  # fmt: skip
    said = []
    for sign, bound, closed in bounds:
        if bound is None:
            continue
        if math.isinf(bound):
            if (bound > 0) == (sign == ">"):
                return None
            continue
        # What is rounded to the bound may lie on both sides of it.
        closed = closed if _is_exact(bound) else wide
        said.append(f" {sign}{'=' if closed else ''} {_float(bound)}")
    return lambda column: [column + one for one in said]


def _is_exact(number: int | float) -> bool:
    """Whether no other number is rounded to the same float."""
    return abs(number) < _EXACT


def _float(number: int | float) -> str:
    return repr(float(number))
