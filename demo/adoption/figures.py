"""What a list of ten hits is worth, and the table of all ways."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

# For each query its hits, best first.
Lists = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figures:
    """Means over the queries, 0 to 1: the known item first, among ten; the share of the ten hits
    that the new model's own ten are."""

    first: float
    ten: float
    agreement: float


def compute_figures(lists: Lists, answers: Sequence[str], own: Lists) -> Figures:
    """Of one way's lists; `own`: the new model's, of a gallery embedded again."""
    rows = list(zip(lists, answers, own, strict=True))
    return Figures(
        sum(found[:1] == [answer] for found, answer, _ in rows) / len(rows),
        sum(answer in found[:10] for found, answer, _ in rows) / len(rows),
        sum(len(set(found[:10]) & set(best[:10])) / 10 for found, _, best in rows) / len(rows),
    )


def print_figures(
    ways: Mapping[str, Figures], item_count: int, query_count: int, name: str
) -> None:
    """The table, in %."""
    table = Table(title=f"{item_count} {name}s, {query_count} queries whose {name} is known")
    table.add_column("vectors that answer")
    for name in ("R@1", "R@10", "agreement@10"):
        table.add_column(name, justify="right")
    for name, one in ways.items():
        table.add_row(
            name, *(f"{100 * value:.1f}" for value in (one.first, one.ten, one.agreement))
        )
    Console(width=80).print(table)
