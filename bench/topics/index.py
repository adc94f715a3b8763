"""Search in process: our index against bare hnswlib and exact search, at equal recall@10."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import hnswlib
import numpy as np

from bench import data
from bench.harness import Bench, Contender, Row, Table, Value, measure_rate, run_interleaved
from nobackfill.gallery.search import hnsw
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.search.view import new_snapshot
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.vectors import Vectors

K = 10
RECALLS = (0.95, 0.99)
EFS = (10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512)
QUERIES = 512
NOTE = (
    "Queries a second on one thread, k = 10, seeded vectors of 128 dims that are not in the "
    "gallery; recall@10 against exact search. Each contender at the smallest ef that reaches the "
    "recall. `ours` is the whole search of a gallery's snapshot: checks, graph, exact ranking."
)
SPEC = SpaceSpec("sp-" + "0" * 64, 1, data.DIM, "squared_l2", True, None, 0)

Search = Callable[[Vectors], Labels]


@dataclass(frozen=True)
class Engine:
    """`search` at a given ef; `ef` None: there is nothing to choose."""

    name: str
    search: Search
    set_ef: Callable[[int], None] | None = None


class _Ours:
    """A snapshot of the graph, made anew for each ef: one that was made keeps the ef of then."""

    def __init__(self, base: hnsw.HnswIndex) -> None:
        self._base = base
        self._view = new_snapshot(SPEC, base)

    def set_ef(self, ef: int) -> None:
        self._base.graph.ef = ef
        self._view = new_snapshot(SPEC, self._base)

    def search(self, queries: Vectors) -> Labels:
        return self._view.search(queries, K).labels


def run(bench: Bench) -> list[Table]:
    """Each size, each recall; single queries, and batches as the gateway makes them; then what a
    size more costs."""
    small, full = (10_000, 100_000), (10_000, 100_000, 1_000_000)
    sizes: tuple[int, ...] = bench.size((500, 1000), small, full)
    tables, batches = [], {}
    for size in sizes:
        items, queries = data.draw_items(size), data.draw_items(QUERIES, seed=1)
        engines = _engines(items.new)
        true = engines[-1].search(queries.new)
        tables += [_table(bench, engines, queries.new, true, size, batch) for batch in (1, 32)]
        batches[size] = tables[-1]
    return [*tables, _growth(batches)]


def _growth(batches: Mapping[int, Table]) -> Table:
    """Cost of a query by size, from the tables that were measured."""
    costs: dict[tuple[Value, Value], dict[str, float]] = {}
    for size, table in batches.items():
        for row in table.rows:
            rate = row["queries/s"]
            assert isinstance(rate, float)
            by_size = costs.setdefault((row["recall wanted"], row["engine"]), {})
            by_size[f"{size:,} items"] = 1e6 / rate
    rows: list[Row] = []
    for (wanted, engine), by_size in costs.items():
        first, *_, last = by_size.values()
        rows.append({"recall wanted": wanted, "engine": engine, **by_size, "grown": last / first})
    note = "Microseconds a query in batches of 32; `grown`: the largest size's over the smallest's."
    return Table("How cost grows", rows, note)


def _engines(vectors: Vectors) -> list[Engine]:
    labels = np.arange(1, len(vectors) + 1)
    bare = hnswlib.Index("l2", data.DIM)
    bare.init_index(
        len(vectors), M=hnsw.LINKS_PER_ROW, ef_construction=hnsw.EF_CONSTRUCTION, random_seed=1
    )
    bare.add_items(vectors, labels, num_threads=2)
    base = hnsw.build_index(SPEC, labels, vectors, count_threads=lambda: 2)
    ours = _Ours(base)
    exact = ExactIndex(SPEC, labels, vectors)

    def graph(queries: Vectors) -> Labels:
        found: Any = bare.knn_query(queries, K, num_threads=1)[0]
        return np.asarray(found, np.int64)

    return [
        Engine("hnswlib bare", graph, bare.set_ef),
        Engine("ours", ours.search, ours.set_ef),
        Engine("ours, exact", lambda queries: exact.search(queries, K).labels),
    ]


def _table(
    bench: Bench, engines: list[Engine], queries: Vectors, true: Labels, size: int, batch: int
) -> Table:
    rows: list[Row] = []
    rounds = {}
    for wanted in RECALLS:
        chosen = {
            engine.name: smallest_sufficient_ef(engine, queries, true, wanted, batch)
            for engine in engines
        }
        contenders = [
            Contender(engine.name, _work(bench, engine, chosen[engine.name][0], queries, batch))
            for engine in engines
        ]
        measured = run_interleaved(contenders, bench.size(1, 3, 7))
        for name, figures in measured.items():
            ef, reached = chosen[name]
            rows.append(
                {
                    "recall wanted": f"{wanted}",
                    "engine": name,
                    "ef": ef,
                    "recall@10": reached,
                    "queries/s": figures.median,
                    "spread": figures.spread_text,
                    "of bare": figures.ratio(measured["hnswlib bare"]),
                }
            )
            rounds[f"{wanted} {name}"] = figures.rounds
    title = f"{size:,} items, {'one query at a time' if batch == 1 else f'batches of {batch}'}"
    return Table(title, rows, NOTE if batch == 1 else "", rounds)


def smallest_sufficient_ef(
    engine: Engine, queries: Vectors, true: Labels, wanted: float, batch: int
) -> tuple[int | None, float]:
    """The smallest ef at which `engine` finds that share of the true neighbours, asked in batches
    as it will be when it is timed, and the share."""
    if engine.set_ef is None:
        return None, recall(engine.search(queries), true)
    some = [queries[start : start + batch] for start in range(0, len(queries), batch)]
    found = 0.0
    for ef in EFS:
        engine.set_ef(ef)
        found = recall(np.concatenate([engine.search(one) for one in some]), true)
        if found >= wanted:
            return ef, found
    return EFS[-1], found


def recall(found: Labels, true: Labels) -> float:
    """Share of `true` [q, k] that is in the same query's row of `found`."""
    hits = (found[:, :, None] == true[:, None, :]).any(1).sum()
    return float(hits) / true.size


def _work(
    bench: Bench, engine: Engine, ef: int | None, queries: Vectors, batch: int
) -> Callable[[], float]:
    some = [queries[start : start + batch] for start in range(0, len(queries), batch)]
    if ef is None:
        some = some[: 32 // batch]

    def work() -> float:
        if engine.set_ef is not None and ef is not None:
            engine.set_ef(ef)

        def all_of_them() -> None:
            for one in some:
                engine.search(one)

        return measure_rate(all_of_them, sum(map(len, some)), at_least=0.01 if bench.tiny else 0.2)

    return work
