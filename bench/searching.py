"""Ways to search one space, side by side, by so many clients at once."""

import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from bench.harness import Bench, Contender, Table, comparison_table, run_interleaved

# Labels that answer the query of a row.
Found = list[int]
Way = Callable[[int], Found]


def compare_searches(
    bench: Bench, title: str, note: str, ways: Mapping[str, Way], truth: list[Found],
    clients: int, count: int,
) -> Table:  # fmt: skip
    """Queries a second of each way, `count` of them a round, beside the way named `bare`; recall of
    the first queries, of which `truth` has the answers."""

    def rate(way: Way) -> float:
        began = time.perf_counter()
        with ThreadPoolExecutor(clients) as threads:
            parts = [threads.submit(_each, way, c, count, clients) for c in range(clients)]
            for part in parts:
                part.result()
        return count / (time.perf_counter() - began)

    contenders = [Contender(name, partial(rate, way)) for name, way in ways.items()]
    measured = run_interleaved(contenders, bench.size(1, 5, 5))
    recalls = [
        recall_of_labels(truth, [way(row) for row in range(len(truth))]) for way in ways.values()
    ]
    result = comparison_table(title, "queries/s", measured, "bare", note)
    rows = [{**row, "recall@10": one} for row, one in zip(result.rows, recalls, strict=True)]
    return replace(result, rows=rows)


def recall_of_labels(truth: list[Found], found: list[Found]) -> float:
    """The share of true labels that were found; where fewer pass than were asked for, -1 fills."""
    pairs = [({*wanted} - {-1}, {*got}) for wanted, got in zip(truth, found, strict=True)]
    return statistics.mean(len(wanted & got) / len(wanted) for wanted, got in pairs)


def _each(way: Way, client: int, count: int, clients: int) -> None:
    for row in range(client, count, clients):
        way(row)
