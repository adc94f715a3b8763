"""A gallery in PostgreSQL that a Milvus searches: put, told, searched beside that Milvus alone,
upgraded, flipped, filtered."""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bench import data
from bench.flips import measure_flips
from bench.harness import Bench, Contender, Row, Table, run_interleaved, time_call
from bench.published import INNER, Publication, make_publication
from bench.searching import Found, Way, compare_searches, recall_of_labels
from nobackfill.gallery.filters import Filter, OneOf, Range
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.spec import SpaceInfo, SpaceSpec
from nobackfill.gallery.staging import run_upgrade
from nobackfill.release.routes import open_route, plan_route
from nobackfill.server.stores.postgresql.database import EF
from nobackfill.vectors import Vectors

if TYPE_CHECKING:
    # It needs the extra `milvus`.
    from bench.fed import FedGallery

K, QUERIES, FILTERED = 10, 200, 30
SHARES = (0.5, 0.1, 0.01, 0.001)
LIFE = (
    "{count:,} items of 128 + 128 dims, each with six texts, a flag and a number; Milvus 2.3.5 as "
    "it comes, and PostgreSQL, whose fsync is off, on the same 2 cores. `told`: after the step "
    "before, until Milvus has all of it; it is told from the first put on. `ready`: after that, "
    "until it has a graph and answers with a measured recall of .9, as a switch waits; it builds "
    "with the lowest priority (nice 19). `carried`: FCT's transform, its int8 file, 2 threads."
)
SEARCHED = (
    "k = 10, ef 100, one query a call. `bare`: pymilvus, what is there already is found "
    "(Eventually). `strong`: pymilvus, all that was written before (Strong), for which it waits "
    "until its clock ticks, every 200 ms. `store`: all that was written before, looked up in the "
    "database. recall@10: of 200 queries, by exact search."
)
NOTE = (
    "k = 10, ef 100, one query after another, medians of a query; who passes has nothing to do "
    "with what is near. `bare`: what the store asks Milvus first, without the database. recall@10 "
    "by exact search among what passes."
)
Search = Callable[[Vectors, Filter | None], Found]


def run(bench: Bench) -> list[Table]:
    """The small size: what is more than the database compares by itself."""
    count = bench.size(6_000, 20_000, 200_000)
    if importlib.util.find_spec("milvus") is None:
        return [Table("Vectors in Milvus", [{"step": "no Milvus is installed here"}])]
    from bench.fed import open_fed_gallery

    pair = make_publication(bench.shared, inner=bench.size(64, INNER, INNER))
    items = data.draw_items(count)
    asked = data.draw_items(bench.size(20, QUERIES, QUERIES), seed=1)
    with open_fed_gallery(bench.folder, SpaceSpec.of(pair.manifests[1])) as made:
        life = _Life(made, count)
        metadata = [_metadata(count, row) for row in range(count)]
        first = made.store.active()
        life.step("put", lambda: made.put(first.spec.space, items.old, items.side, metadata))
        life.waits("1", first)
        tables = [_searches(bench, made, first, asked.old, n) for n in bench.clients]
        tables.append(_filters(bench, made, first, items.old, asked.old))
        life.step("carried", lambda: _carry(made, pair))
        second = made.store.space(SpaceSpec.of(pair.manifests[2]).space)
        life.waits("2", second)
        specs = [first.spec, second.spec]
        tables.append(measure_flips(bench, made.store, specs, made.candidates))
        note = LIFE.format(count=count)
        return [Table("Life of a gallery beside Milvus", life.rows, note), *tables]


class _Life:
    """What each step takes."""

    def __init__(self, made: "FedGallery", count: int) -> None:
        self._made, self._count = made, count
        self.rows: list[Row] = []

    def step(self, name: str, work: Callable[[], object]) -> None:
        took = time_call(work)
        self.rows.append({"step": name, "seconds": took, "items/s": self._count / took})

    def waits(self, space: str, info: SpaceInfo) -> None:
        for name, wait in (
            ("told", self._made.wait_until_told),
            ("ready", self._made.wait_until_ready),
        ):
            self.rows.append(
                {"step": f"{name}, space {space}", "seconds": time_call(partial(wait, info))}
            )


def _carry(made: "FedGallery", pair: Publication) -> None:
    route = plan_route(pair.manifests, 1, 2, pair.manifests[1].side_space)
    assert route is not None, "release 2 has an upgrade from 1"
    runner = open_route(pair.repo, route, 2, int8=True)
    run_upgrade(made.store, runner, SpaceSpec.of(pair.manifests[2]))


def _metadata(count: int, row: int) -> dict[str, Any]:
    number = row * 7919 % count
    shares = {f"{share:.1%}": f"class {number % round(1 / share)}" for share in SHARES}
    return shares | {"number": number, "tags": ["all", f"tag {row % 50}"], "flag": row % 2 == 0}


def _searches(
    bench: Bench, made: "FedGallery", info: SpaceInfo, queries: Vectors, clients: int
) -> Table:
    searcher, alone = made.open_searcher(info), made.search_milvus_alone(info)

    def ours(row: int) -> Found:
        (found,) = searcher.search(queries[row % len(queries)][None], K).labels
        return [int(label) for label in found]

    ways: dict[str, Way] = {
        "bare": lambda row: alone(queries[row % len(queries)], K, EF, "", 1),
        "strong": lambda row: alone(queries[row % len(queries)], K, EF),
        "store": ours,
    }
    exact = ExactIndex(info.spec, *made.store.load_vectors(info.spec.space))
    truth = exact.search(queries, K).labels.tolist()
    title = f"Searches beside Milvus, clients: {clients}"
    count = clients * bench.size(5, 40, 40)
    return compare_searches(bench, title, SEARCHED, ways, truth, clients, count)


def _filters(
    bench: Bench, made: "FedGallery", info: SpaceInfo, vectors: Vectors, queries: Vectors
) -> Table:
    from nobackfill.plugins.milvus.expressions import expression_of

    count, queries = len(vectors), queries[:FILTERED]
    numbers = np.arange(count) * 7919 % count
    asked: dict[str, tuple[Filter | None, NDArray[np.bool_]]] = {
        "no filter": (None, np.ones(count, np.bool_))
    }
    for share in SHARES:
        title, parts, most = f"{share:.1%}", round(1 / share), round(share * count)
        asked[f"equality, {title}"] = (OneOf(title, ("class 0",)), numbers % parts == 0)
        asked[f"range, {title}"] = (Range("number", less_than=most), numbers < most)
    searcher, alone = made.open_searcher(info), made.search_milvus_alone(info)

    def ours(query: Vectors, filtered: Filter | None) -> Found:
        return [int(label) for label in searcher.search(query[None], K, filtered).labels[0]]

    def bare(query: Vectors, filtered: Filter | None) -> Found:
        said = "" if filtered is None else expression_of(filtered)
        return alone(query, K, EF, said, 1)

    # Labels are given in the order of puts.
    exact = ExactIndex(info.spec, np.arange(1, count + 1), vectors)
    rows: list[Row] = []
    rounds: dict[str, tuple[float, ...]] = {}
    for name, (filtered, passing) in asked.items():
        ways: dict[str, Search] = {"store": ours, "bare": bare}
        contenders = [
            Contender(way, partial(_median_ms, search, queries, filtered))
            for way, search in ways.items()
        ]
        measured = run_interleaved(contenders, bench.size(1, 3, 5))
        rounds |= {f"{name}, {way}": figures.rounds for way, figures in measured.items()}
        true = exact.search(queries, K, passing).labels.tolist()
        rows.append(
            {
                "filter": name,
                "recall@10": recall_of_labels(true, [ours(query, filtered) for query in queries]),
                "ms": measured["store"].median,
                "spread": measured["store"].spread_text,
                "bare ms": measured["bare"].median,
                "of bare": measured["store"].ratio(measured["bare"]),
            }
        )
    return Table("Filtered searches beside Milvus", rows, NOTE, rounds)


def _median_ms(search: Search, queries: Vectors, filtered: Filter | None) -> float:
    return 1e3 * float(np.median([time_call(partial(search, one, filtered)) for one in queries]))
