"""Metadata filters, answered by SQLite from an index: one SQL statement, no callback a vector."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
    tests, parameters = zip(*map(_test, conditions), strict=True)
    sql = " INTERSECT ".join(f"SELECT label FROM attributes WHERE {test}" for test in tests)
    with store.reading() as connection:
        rows = connection.execute(f"{sql} ORDER BY label", [p for some in parameters for p in some])
        return label_column(rows)


def _test(condition: Condition) -> tuple[str, list[MetadataValue]]:
    if isinstance(condition, OneOf):
        pairs = [(_kind(value), value) for value in condition.values]
        values = ", ".join(["(?, ?)"] * len(pairs))
        wanted = [part for pair in pairs for part in pair]
        # No values: nothing matches.
        return (
            f"key = ? AND (kind, value) IN (VALUES {values})" if pairs else "key = ? AND FALSE",
            [condition.key, *wanted],
        )
    test = "key = ? AND kind = 'number'"
    parameters: list[MetadataValue] = [condition.key]
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
