"""Metadata filters, answered by SQLite from an index: one SQL statement, no callback a vector."""

from collections.abc import Sequence
from dataclasses import dataclass

from gallery.index import Labels
from gallery.store import Store

# bool is a kind of its own: True is not 1.
MetadataValue = str | float | bool


@dataclass(frozen=True)
class OneOf:
    """The item has `key`, with one of `values` (one value: equality)."""

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

    Raises InvalidInputError for a NaN bound or an empty list of conditions.
    """
    raise NotImplementedError
