"""Filtered searches of one gallery in process, beside the same without a filter."""

from collections.abc import Callable
from functools import partial

import numpy as np

from bench import data
from bench.harness import Bench, Contender, Row, Table, run_interleaved, time_call
from bench.topics.index import recall
from nobackfill.gallery.filter_engine import FilterEngine
from nobackfill.gallery.filters import All, Filter, OneOf, Range
from nobackfill.gallery.search import hnsw
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.search.view import LiveView
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.store import NewVectors
from nobackfill.vectors import Vectors

K = 10
QUERIES = 100
PUT_ROWS = 5000
# Selectivities of a range over numbers that have nothing to do with what is near.
SHARES = (0.001, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.2, 0.5, 0.8)
SPEC = SpaceSpec("sp-" + "0" * 64, 1, data.DIM, "squared_l2", True, None, 0)
NOTE = (
    "k = 10, one query after another on one thread, the filter asked with each; medians. Whether "
    "an item passes is independent of its distance. `of bare`: over a search without a filter. "
    "recall@10 against exact search among what passes."
)
FIRST_NOTE = (
    "The first filter on a key reads it into memory; the next ones find it there. `changed`: after "
    "one item was put, what passes is made anew."
)


def run(bench: Bench) -> list[Table]:
    """Searches by selectivity; what first filters cost."""
    items = bench.size(10_000, 200_000, 200_000)
    vectors, queries = data.draw_items(items).new, data.draw_items(QUERIES, seed=1).new
    with SqliteGallery.create(bench.folder / "gallery.sqlite", SPEC) as store:
        _fill(store, vectors)
        view = LiveView(store, SPEC.space)
        view.compact(
            lambda spec, labels, content: hnsw.build_index(
                spec, labels, content, count_threads=lambda: 2
            )
        )
        filtering = FilterEngine(store)
        firsts = _firsts(store, filtering, items)
        tables = [_searches(bench, view, filtering, vectors, queries), firsts]
        filtering.close()
        view.close()
    return tables


def _fill(store: SqliteGallery, vectors: Vectors) -> None:
    count = len(vectors)
    for start in range(0, count, PUT_ROWS):
        rows = range(start, min(count, start + PUT_ROWS))
        store.put(
            [f"item-{row}" for row in rows],
            [NewVectors(SPEC.space, vectors[start : rows.stop])],
            metadata=[
                {
                    "flag": row % 2 == 0,
                    "number": row * 7919 % count,
                    "part": row * 7919 % count / 7,
                    "class": f"class {row % 1000}",
                    "name": f"name {row}",
                    "tags": ["all", f"tag {row % 50}"],
                }
                for row in rows
            ],
        )


def _firsts(store: SqliteGallery, filtering: FilterEngine, items: int) -> Table:
    asked: dict[str, Filter] = {
        "flag": OneOf("flag", (True,)),
        "integers": Range("number", less_than=items // 2),
        "fractions": Range("part", less_than=items / 14),
        "texts, 1,000 of them": OneOf("class", ("class 5",)),
        "texts, each its own": OneOf("name", ("name 7",)),
        "lists of two texts": OneOf("tags", ("tag 7",)),
    }
    # The labels of all items are read once.
    filtering.find_matches(All(()))
    rows: list[Row] = []
    for name, filtered in asked.items():
        ask = partial(filtering.find_matches, filtered)
        first, again = time_call(ask), time_call(ask)
        store.put(["item-0"], [NewVectors(SPEC.space, data.draw_items(1).new)])
        told = {"first ms": first, "again ms": again, "changed ms": time_call(ask)}
        rows.append({"filter on": name, **{column: 1e3 * one for column, one in told.items()}})
    return Table(f"First filters, {items:,} items", rows, FIRST_NOTE)


def _searches(
    bench: Bench, view: LiveView, filtering: FilterEngine, vectors: Vectors, queries: Vectors
) -> Table:
    count = len(vectors)
    numbers = np.arange(count) * 7919 % count
    filters: dict[str, Range | None] = {"no filter": None}
    for share in SHARES:
        filters[f"{share:.1%} pass"] = Range("number", less_than=round(share * count))
    contenders = [
        Contender(name, _work(view, filtering, filtered, queries))
        for name, filtered in filters.items()
    ]
    measured = run_interleaved(contenders, bench.size(1, 5, 9))
    exact = ExactIndex(SPEC, np.arange(1, count + 1), vectors)
    rows: list[Row] = []
    for name, filtered in filters.items():
        passing = numbers < (
            round(filtered.less_than or 0) if isinstance(filtered, Range) else count
        )
        true = exact.search(queries, K, passing).labels
        found = np.concatenate([_search(view, filtering, filtered, one) for one in _each(queries)])
        figures = measured[name]
        rows.append(
            {
                "filter": name,
                "recall@10": recall(found, true),
                "ms": 1e3 * figures.median,
                "spread": figures.spread_text,
                "of bare": figures.ratio(measured["no filter"]),
            }
        )
    rounds = {name: figures.rounds for name, figures in measured.items()}
    return Table(f"Filtered searches, {count:,} items of {data.DIM} dims", rows, NOTE, rounds)


def _each(queries: Vectors) -> list[Vectors]:
    return [queries[i : i + 1] for i in range(len(queries))]


def _search(
    view: LiveView, filtering: FilterEngine, filtered: Filter | None, query: Vectors
) -> Labels:
    allowed = None if filtered is None else filtering.find_matches(filtered).mask
    return view.snapshot().search(query, K, allowed).labels


def _work(
    view: LiveView, filtering: FilterEngine, filtered: Filter | None, queries: Vectors
) -> Callable[[], float]:
    each = _each(queries)

    def work() -> float:
        return float(
            np.median([time_call(partial(_search, view, filtering, filtered, one)) for one in each])
        )

    return work
