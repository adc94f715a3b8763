"""Galleries in PostgreSQL beside the bare engine: searches, upgrades by workers, and from those
rates the simulated upgrade of a billion items."""

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial

import numpy as np
import psycopg
from pgvector.psycopg import register_vector

from bench import data
from bench.flips import flips
from bench.galleries import PUT_ROWS
from bench.harness import Bench, Contender, Measured, Row, Table, compared, interleave
from bench.published import INNER, Publication, publication
from bench.simulation import Plan, simulate
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.upgrade import CHUNK, run_upgrade
from nobackfill.gallery.writing import NewVectors
from nobackfill.release.routes import Route, open_route, plan_route
from nobackfill.server.stores.postgresql import schema
from nobackfill.server.stores.postgresql.bulk import copy_in, copy_out
from nobackfill.server.stores.postgresql.database import EF, Database
from nobackfill.server.stores.postgresql.galleries import PostgresqlGalleries
from nobackfill.server.stores.postgresql.gallery import PostgresqlGallery
from nobackfill.server.stores.postgresql.searcher import PostgresqlSearcher
from nobackfill.server.upgrades.workers.processes import Processes
from nobackfill.server.upgrades.workers.run import ByWorkers
from nobackfill.server.upgrades.workers.workers import Workers
from tests.support.postgres import running

K = 10
UPGRADED = (
    "128 + 128 dims, FCT's transform fp32. `bare`: all read by COPY, carried by 2 threads of "
    "onnxruntime in windows of 1,024, written by COPY, one after the other. `thread`: the "
    "gateway's own, 2 threads of onnxruntime. `processes`: two workers of one thread each. All "
    "share 2 cores with the database, whose fsync is off. `ray`: nodes of one processor each on "
    "this machine."
)
SEARCHED = (
    "k = 10, ef 100, one query a call, on a graph of pgvector. `bare`: the same SQL by psycopg, "
    "its rows taken as they come. `store`: spare candidates, distances computed here, equal ones "
    "by label."
)
SIMULATED = (
    "128 + 128 dims in windows of 65,536, one worker a core; the rates of `bare` above, a lane of "
    "the store reading and writing as fast as this one. 1 % of the windows take 5 times as long, a "
    "worker is lost every 24 hours on average and back after 10 minutes; 20 runs. `least`: neither "
    "happens, and the slower side never waits."
)


def run(bench: Bench) -> list[Table]:
    size = bench.size(2_100, 100_000, 1_000_000)
    pair = publication(bench.shared, inner=bench.size(64, INNER, INNER))
    with running() as server, server.database() as url, closing(Database(url, 40)) as database:
        database.open(schema.prepare)
        galleries = PostgresqlGalleries(database)
        spec = SpaceSpec.of(pair.manifests[1])
        store = galleries.create("g", [spec], {})
        items = data.things(size)
        for start in range(0, size, PUT_ROWS):
            rows = slice(start, start + PUT_ROWS)
            ids = [str(start + n) for n in range(len(items.old[rows]))]
            store.put(ids, [NewVectors(spec.space, items.old[rows], items.side[rows])])
        upgrading = _Upgrading(store, url, pair)
        tables = [upgrading.table(bench)]
        queries = data.things(500, seed=1).old
        tables += [
            _searches(bench, store, url, queries, n) for n in bench.size((2,), (1, 32), (1, 32))
        ]
        tables.append(upgrading.flips(bench))
    return [*tables, _plans(bench, upgrading.rates)]


class _Upgrading:
    """Ways to carry one gallery; each leaves it as it was."""

    def __init__(self, store: PostgresqlGallery, url: str, pair: Publication) -> None:
        self._store, self._url, self._pair = store, url, pair
        self._target = SpaceSpec.of(pair.manifests[2])
        found = plan_route(pair.manifests, 1, 2, pair.manifests[1].side_space)
        assert found is not None
        self._route: Route = found
        self.rates: dict[str, list[float]] = {"read": [], "carry": [], "write": []}

    def table(self, bench: Bench) -> Table:
        with closing(Processes(2)) as workers:
            ways: dict[str, Callable[[], float]] = {
                "bare": self._bare,
                "thread": self._thread,
                "2 processes": partial(self._workers, workers),
            }
            measured = interleave(
                [Contender(name, way) for name, way in ways.items()], bench.size(1, 3, 2)
            )
        if not bench.tiny and importlib.util.find_spec("ray"):
            measured |= self._on_ray(bench)
        return _rates_table("Upgrades in PostgreSQL", measured)

    def _on_ray(self, bench: Bench) -> dict[str, Measured]:
        found: dict[str, Measured] = {}
        for nodes in (1, 2):
            with _ray(nodes) as workers:
                way = Contender(f"ray, nodes: {nodes}", partial(self._workers, workers))
                found |= interleave([way], bench.size(1, 3, 2))
        return found

    def _bare(self) -> float:
        """Items a second; of each part, too."""
        store, database = self._store, self._store.database
        spec = store.active().spec
        info = store.space(spec.space)
        runner = open_route(self._pair.repo, self._route, 2)
        table = schema.table_of(store.schema, info.number)
        began = time.perf_counter()
        labels, old, side = database.read(
            lambda c: copy_out(c, table, "TRUE", spec.dim, spec.side_dim)
        )
        read = time.perf_counter()
        assert side is not None, "all have some"
        carried = [
            runner.run(old[start : start + CHUNK], side[start : start + CHUNK])
            for start in range(0, len(labels), CHUNK)
        ]
        done = time.perf_counter()
        store.begin(self._target)
        into = schema.table_of(store.schema, store.space(self._target.space).number)
        embedding = np.concatenate([one.embedding for one in carried])
        sides = [one.side for one in carried if one.side is not None]
        database.write(
            lambda c: copy_in(
                c,
                into,
                labels,
                "upgraded",
                None,
                embedding,
                np.concatenate(sides) if sides else None,
            )
        )
        end = time.perf_counter()
        store.drop(self._target.space)
        for name, seconds in (
            ("read", read - began),
            ("carry", done - read),
            ("write", end - done),
        ):
            self.rates[name].append(len(labels) / seconds)
        return len(labels) / (end - began)

    def flips(self, bench: Bench) -> Table:
        """Both spaces full."""
        runner = open_route(self._pair.repo, self._route, 2)
        run_upgrade(self._store, runner, self._target)
        return flips(bench, self._store, [self._store.active().spec, self._target])

    def _thread(self) -> float:
        runner = open_route(self._pair.repo, self._route, 2)
        return self._timed(lambda: run_upgrade(self._store, runner, self._target).written)

    def _workers(self, workers: Workers) -> float:
        by_workers = ByWorkers(workers, self._pair.repo)
        return self._timed(
            lambda: (
                by_workers.run(
                    self._store, self._route, self._target, lambda _: None, lambda: False
                ).written
            )
        )

    def _timed(self, work: Callable[[], int]) -> float:
        began = time.perf_counter()
        written = work()
        seconds = time.perf_counter() - began
        assert written == self._store.count(), "every item was carried once"
        self._store.drop(self._target.space)
        return written / seconds


@contextmanager
def _ray(nodes: int) -> Iterator[Workers]:
    from ray.cluster_utils import Cluster

    from nobackfill.server.upgrades.workers.ray_cluster import RayCluster

    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(nodes - 1):
            cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        with closing(RayCluster(cluster.address)) as workers:
            yield workers
    finally:
        cluster.shutdown()


def _rates_table(title: str, measured: dict[str, Measured]) -> Table:
    bare = measured["bare"].median
    rows: list[Row] = [
        {
            "way": name,
            "items/s": one.median,
            "spread": one.spread_text,
            "of bare": one.median / bare,
        }
        for name, one in measured.items()
    ]
    return Table(title, rows, UPGRADED, {name: one.rounds for name, one in measured.items()})


def _searches(
    bench: Bench, store: PostgresqlGallery, url: str, queries: np.ndarray, clients: int
) -> Table:
    """Queries a second of so many clients at once."""
    info = store.active()
    table = schema.table_of(store.schema, info.number)
    searcher = PostgresqlSearcher(store.database, store.schema, info)
    count = bench.size(20, 2_000, 4_000)

    def ours(row: int) -> None:
        searcher.search(queries[row % len(queries)][None], K)

    with ExitStack() as stack:
        connections = [
            stack.enter_context(psycopg.connect(url, autocommit=True)) for _ in range(clients)
        ]
        for connection in connections:
            register_vector(connection)
            connection.execute(f"SET hnsw.ef_search = {EF:d}".encode())

        operator = "<->" if info.spec.metric == "squared_l2" else "<=>"
        statement = f"SELECT label FROM {table} ORDER BY embedding {operator} %s LIMIT {K}"  # noqa: S608

        def bare(row: int) -> None:
            connection = connections[row % clients]
            connection.execute(
                statement.encode(), [queries[row % len(queries)]], binary=True
            ).fetchall()

        def rate(work: Callable[[int], None]) -> float:
            began = time.perf_counter()
            with ThreadPoolExecutor(clients) as threads:
                spans = [threads.submit(_each, work, c, count, clients) for c in range(clients)]
                for span in spans:
                    span.result()
            return count / (time.perf_counter() - began)

        ways = [Contender("bare", partial(rate, bare)), Contender("store", partial(rate, ours))]
        measured = interleave(ways, bench.size(1, 5, 5))
    return compared(
        f"Searches in PostgreSQL, clients: {clients}", "queries/s", measured, "bare", SEARCHED
    )


def _each(work: Callable[[int], None], client: int, count: int, clients: int) -> None:
    for row in range(client, count, clients):
        work(row)


def _plans(bench: Bench, rates: dict[str, list[float]]) -> Table:
    """Hours for a billion, by workers and by lanes of the store."""
    read, carry, write = (statistics.median(rates[name]) for name in ("read", "carry", "write"))
    rows: list[Row] = []
    for workers, lanes in bench.size(
        ((8, 2),), ((16, 2), (64, 4), (256, 16)), ((16, 2), (64, 4), (256, 16))
    ):
        items = bench.size(10_000_000, 1_000_000_000, 1_000_000_000)
        # Two threads carried.
        plan = Plan(items, 65_536, workers, lanes, read, carry / 2, write)
        runs = [simulate(plan, seed) for seed in range(bench.size(3, 20, 20))]
        hours = [one.hours for one in runs]
        rows.append(
            {
                "cores": workers, "lanes": lanes, "least hours": plan.least_hours,
                "hours": statistics.median(hours), "from": min(hours), "to": max(hours),
                "lost": statistics.median(one.lost for one in runs),
                "core hours": workers * statistics.median(hours),
            }
        )  # fmt: skip
    return Table("An upgrade of 1,000,000,000 items, simulated", rows, SIMULATED)
