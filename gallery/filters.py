"""Metadata filters, answered by SQLite from an index: one SQL statement, no callback a vector."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from gallery.index import Labels
from gallery.put import MetadataValue
from gallery.store import Store
from gallery.tables import label_column
from release.errors import InvalidInputError


@dataclass(frozen=True)
class OneOf:
    """The item has `key`, with one of `values` (one value: equality). Numbers are no flags."""

    key: str
    values: tuple[MetadataValue, ...]


@dataclass(frozen=True)
class Range:
    """The item's `key` is a number with at_least <= number < less_than; None leaves a side open."""

    key: str
    at_least: float | None = None
    less_than: float | None = None


Condition = OneOf | Range


def allowed_labels(store: Store, conditions: Sequence[Condition]) -> Labels:
    """Labels of the items for which every condition holds, int64, strictly increasing.

    Raises InvalidInputError for a bound that is NaN, or no condition at all.
    """
    if not conditions:
        raise InvalidInputError("expected at least one condition; leave the filter out instead")
    statements, parameters = zip(*map(_select, conditions), strict=True)
    with store.reading() as connection:
        rows = connection.execute(
            f"{' INTERSECT '.join(statements)} ORDER BY label", [*chain.from_iterable(parameters)]
        )
        return label_column(rows)


def _select(condition: Condition) -> tuple[str, list[MetadataValue]]:
    """A statement that reads one stretch of the index a value, or one for a range."""
    if isinstance(condition, OneOf):
        kinds: dict[str, list[MetadataValue]] = {} if condition.values else {"text": []}
        for value in condition.values:
            kinds.setdefault(_kind(value), []).append(value)
        # Not (kind, value) IN (…): that would read all of the key.
        tests = [
            (f"kind = '{kind}' AND value IN ({', '.join('?' * len(values))})", values)
            for kind, values in kinds.items()
        ]
    else:
        tests = [_range_test(condition)]
    select = "SELECT label FROM attributes WHERE key = ? AND"
    parameters = [parameter for _, values in tests for parameter in (condition.key, *values)]
    # A subquery, because UNION and INTERSECT bind alike.
    union = " UNION ".join(f"{select} {test}" for test, _ in tests)
    return f"SELECT label FROM ({union})", parameters


def _range_test(condition: Range) -> tuple[str, list[MetadataValue]]:
    test = "kind = 'number'"
    parameters: list[MetadataValue] = []
    for comparison, bound in ((">=", condition.at_least), ("<", condition.less_than)):
        if bound is not None:
            if math.isnan(bound):
                raise InvalidInputError(f"range of {condition.key!r}: expected a number, got NaN")
            test += f" AND value {comparison} ?"
            parameters.append(bound)
    return test, parameters


def _kind(value: MetadataValue) -> str:
    if isinstance(value, bool):
        return "flag"
    return "text" if isinstance(value, str) else "number"
