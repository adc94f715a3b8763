"""Galleries in PostgreSQL beside the bare engine: searches, upgrades by workers, and from those
rates the simulated upgrade of a billion items."""

import statistics
from contextlib import ExitStack, closing

import numpy as np
import psycopg
from pgvector.psycopg import register_vector

from bench import data
from bench.harness import Bench, Row, Table
from bench.published import INNER, make_publication
from bench.searching import Found, compare_searches
from bench.simulation import UpgradePlan, simulate_upgrade
from bench.upgrades import UpgradeContenders, fill_gallery
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.server.stores.postgresql import schema
from nobackfill.server.stores.postgresql.database import EF, Database
from nobackfill.server.stores.postgresql.gallery import PostgresqlGalleries, PostgresqlGallery
from tests.support.postgres import running
from tests.support.postgresql_searcher import PostgresqlSearcher

K = 10
RECALLED = 200
SEARCHED = (
    "k = 10, ef 100, one query a call, on a graph of pgvector. `bare`: the same SQL by psycopg, "
    "its rows taken as they come. `store`: spare candidates, distances computed here, equal ones "
    "by label. `recall@10`: of 200 queries, by exact search."
)
# Cores that carry, lanes of the store.
PLANNED = ((16, 4), (32, 16), (128, 64))
SIMULATED = (
    "128 + 128 dims in windows of 65,536, one worker a core; the rates of `bare` above: a lane of "
    "the store reads {read:,.0f} items a second and writes {write:,.0f}, a core carries "
    "{carry:,.0f}. 1 % of the windows take 5 times as long, a worker is lost every 24 hours on "
    "average and back after 10 minutes; 20 runs. `least`: neither happens, and the slower side "
    "never waits. `core hours`: a lane keeps a core of the database busy."
)


def run(bench: Bench) -> list[Table]:
    """The large size: upgrades alone."""
    size = bench.size(2_100, 100_000, 1_000_000)
    pair = make_publication(bench.shared, inner=bench.size(64, INNER, INNER))
    with running() as server, server.database() as url, closing(Database(url, 40)) as database:
        database.open(schema.prepare)
        store = PostgresqlGalleries(database).create("g", [SpaceSpec.of(pair.manifests[1])], {})
        fill_gallery(store, size, graph=not bench.full)
        upgrading = UpgradeContenders(store, pair)
        tables = upgrading.tables(bench)
        if not bench.full:
            queries = data.draw_items(500, seed=1).old
            tables += [
                _searches(bench, store, url, queries, n) for n in bench.size((2,), (1, 32), ())
            ]
            tables.append(upgrading.flips(bench))
    return [*tables, _plans(bench, upgrading.rates)]


def _searches(
    bench: Bench, store: PostgresqlGallery, url: str, queries: np.ndarray, clients: int
) -> Table:
    """Queries a second of so many clients at once."""
    info = store.active()
    table = schema.table_name(store.schema, info.table_number)
    searcher = PostgresqlSearcher(store.database, store.schema, info)
    count = bench.size(20, 2_000, 4_000)

    def ours(row: int) -> Found:
        (found,) = searcher.search(queries[row % len(queries)][None], K).labels
        return [int(label) for label in found]

    with ExitStack() as stack:
        connections = [
            stack.enter_context(psycopg.connect(url, autocommit=True)) for _ in range(clients)
        ]
        for connection in connections:
            register_vector(connection)
            connection.execute(f"SET hnsw.ef_search = {EF:d}".encode())

        operator = "<->" if info.spec.metric == "squared_l2" else "<=>"
        statement = f"SELECT label FROM {table} ORDER BY embedding {operator} %s LIMIT {K}"  # noqa: S608

        def bare(row: int) -> Found:
            connection = connections[row % clients]
            rows = connection.execute(
                statement.encode(), [queries[row % len(queries)]], binary=True
            ).fetchall()
            return [label for (label,) in rows]

        exact = ExactIndex(info.spec, *store.load_vectors(info.spec.space))
        truth = exact.search(queries[:RECALLED], K).labels.tolist()
        title = f"Searches in PostgreSQL, clients: {clients}"
        ways = {"bare": bare, "store": ours}
        return compare_searches(bench, title, SEARCHED, ways, truth, clients, count)


def _plans(bench: Bench, rates: dict[str, list[float]]) -> Table:
    """Hours for a billion, by workers and by lanes of the store."""
    read, carry, write = (statistics.median(rates[name]) for name in ("read", "carry", "write"))
    # Two threads carried.
    carry /= 2
    rows: list[Row] = []
    for workers, lanes in bench.size(((8, 2),), PLANNED, PLANNED):
        items = bench.size(10_000_000, 1_000_000_000, 1_000_000_000)
        plan = UpgradePlan(items, 65_536, workers, lanes, read, carry, write)
        runs = [simulate_upgrade(plan, seed) for seed in range(bench.size(3, 20, 20))]
        hours = [one.hours for one in runs]
        rows.append(
            {
                "cores": workers, "lanes": lanes, "least hours": plan.least_hours,
                "hours": statistics.median(hours), "from": min(hours), "to": max(hours),
                "lost": statistics.median(one.lost_workers for one in runs),
                "core hours": (workers + lanes) * statistics.median(hours),
            }
        )  # fmt: skip
    note = SIMULATED.format(read=read, carry=carry, write=write)
    return Table("An upgrade of 1,000,000,000 items, simulated", rows, note)
