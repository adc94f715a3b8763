"""Translate filters to Milvus expressions over the columns of columns.py.

An expression is true wherever its filter is, and perhaps elsewhere: numbers are rounded to floats,
and a row without room for a key passes. PostgreSQL then decides. Below a `Not` the translation is
strict instead: it is true only where the filter is, so that its negation is true wherever the
negated filter is. Hashes of 63 bits stand for texts and are assumed to be unique.

An expression contains only numbers, and no text of a filter.

This is a module of its own because it needs no pymilvus, and tests use it alone.
"""

import math
from collections.abc import Callable, Sequence

from nobackfill.gallery.filters import (
    All,
    AnyOf,
    Exists,
    Filter,
    KeyTest,
    Not,
    OneOf,
    Range,
    TimeRange,
)
from nobackfill.gallery.store import is_storable_text
from nobackfill.plugins.milvus.columns import (
    FACTS,
    NUMBERS,
    flag_token,
    key_token,
    number_token,
    possible_columns,
    text_token,
    time_token,
)

EVERYTHING = ""
# Labels are positive.
_NOTHING = "id < 0"
# Longer expressions cost Milvus more than they save.
_MOST_CHARACTERS = 1 << 15
# Integers below this are exact as floats.
_EXACT = 2**53


def expression_of(filtered: Filter) -> str:
    """Translate a filter to a Milvus expression that is true for every item that passes it.

    It may also be true for other items, which the database then leaves out.

    Args:
        filtered: a filter that `check_filter` accepts.

    Returns:
        The expression; EVERYTHING, an empty text, if it is longer than 32,768 characters or every
        item passes. A filter that no item passes gives "id < 0".
    """
    text = _translate(filtered, wide=True)
    return text if len(text) <= _MOST_CHARACTERS else EVERYTHING


def _translate(filtered: Filter, *, wide: bool) -> str:
    """Translate a filter; `wide`: true wherever the filter is, else: true only where it is."""
    if isinstance(filtered, Not):
        return _negation(_translate(filtered.excluded_filter, wide=not wide))
    if isinstance(filtered, All):
        return _conjunction([_translate(part, wide=wide) for part in filtered.filters])
    if isinstance(filtered, AnyOf):
        return _disjunction([_translate(part, wide=wide) for part in filtered.filters])
    if not is_storable_text(filtered.key):
        return _NOTHING
    passes, order = _test_expression(filtered, wide=wide), key_token(filtered.key)
    # Rows whose columns have no room for the key, or only for a part of it.
    if wide:
        return _disjunction([f"upto <= {order}", passes])
    return _conjunction([f"upto > {order}", passes])


def _negation(text: str) -> str:
    if text in (EVERYTHING, _NOTHING):
        return _NOTHING if text == EVERYTHING else EVERYTHING
    return f"not ({text})"


def _conjunction(parts: Sequence[str]) -> str:
    return _join_parts(" and ", parts, of_none=EVERYTHING, strongest=_NOTHING)


def _disjunction(parts: Sequence[str]) -> str:
    return _join_parts(" or ", parts, of_none=_NOTHING, strongest=EVERYTHING)


def _join_parts(word: str, parts: Sequence[str], of_none: str, strongest: str) -> str:
    if strongest in parts:
        return strongest
    others = [part for part in parts if part != of_none]
    if len(others) <= 1:
        return others[0] if others else of_none
    return word.join(f"({part})" if " or " in part or " and " in part else part for part in others)


def _test_expression(test: KeyTest, *, wide: bool) -> str:
    if isinstance(test, Exists):
        flags = [flag_token(test.key, flag) for flag in (False, True)]
        has_number = _has_number(number_token(test.key), lambda _: [])
        return _disjunction([_has_any_fact([key_token(test.key), *flags]), has_number])
    if isinstance(test, OneOf):
        return _one_of_expression(test, wide=wide)
    inside = _bound_conditions(test, wide=wide)
    if inside is None:
        return _NOTHING
    token = time_token if isinstance(test, TimeRange) else number_token
    return _has_number(token(test.key), inside)


def _has_any_fact(tokens: Sequence[int]) -> str:
    """Match rows that have one of these facts."""
    at: dict[int, list[str]] = {}
    for token in tokens:
        for place in possible_columns(token, FACTS):
            at.setdefault(place, []).append(str(token))
    return _disjunction([_column_equals(f"t{place}", some) for place, some in sorted(at.items())])


def _has_number(token: int, inside: Callable[[str], list[str]]) -> str:
    """Match rows with a number of this hash whose column passes the conditions of `inside`."""
    return _disjunction(
        [
            _conjunction([f"k{place} == {token}", *inside(f"n{place}")])
            for place in possible_columns(token, NUMBERS)
        ]
    )


def _column_equals(column: str, values: Sequence[str]) -> str:
    return f"{column} == {values[0]}" if len(values) == 1 else f"{column} in [{', '.join(values)}]"


def _one_of_expression(test: OneOf, *, wide: bool) -> str:
    facts, numbers = set[int](), set[str]()
    for value in test.values:
        if isinstance(value, bool):
            facts.add(flag_token(test.key, value))
        elif isinstance(value, str):
            if is_storable_text(value):
                facts.add(text_token(test.key, value))
        elif not math.isinf(value) and (wide or _is_exact(value)):
            numbers.add(_float_literal(value))
    text = [_has_any_fact(sorted(facts))]
    if numbers:
        values = sorted(numbers)
        text.append(
            _has_number(number_token(test.key), lambda column: [_column_equals(column, values)])
        )
    return _disjunction(text)


def _bound_conditions(test: Range | TimeRange, *, wide: bool) -> Callable[[str], list[str]] | None:
    """Return conditions on a column that must lie within the bounds; None if nothing can."""
    bounds = (
        (">", test.at_least, True), (">", test.greater_than, False),
        ("<", test.less_than, False), ("<", test.at_most, True),
    )  # fmt: skip
    text = []
    for sign, bound, inclusive in bounds:
        if bound is None:
            continue
        if math.isinf(bound):
            if (bound > 0) == (sign == ">"):
                return None
            continue
        # Numbers on both sides of the bound may be rounded to it.
        inclusive = inclusive if _is_exact(bound) else wide
        text.append(f" {sign}{'=' if inclusive else ''} {_float_literal(bound)}")
    return lambda column: [column + one for one in text]


def _is_exact(number: int | float) -> bool:
    """Return whether no other number is rounded to the same float."""
    return abs(number) < _EXACT


def _float_literal(number: int | float) -> str:
    return repr(float(number))
