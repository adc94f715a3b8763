"""Ways to carry a gallery in PostgreSQL into the next release's space, side by side."""

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial

import numpy as np

from bench import data, processors
from bench.flips import measure_flips
from bench.galleries import PUT_ROWS
from bench.harness import Bench, Contender, Measurement, Row, Table, run_interleaved
from bench.published import Publication
from nobackfill.gallery.spec import SpaceInfo, SpaceSpec
from nobackfill.gallery.staging import Runner, run_upgrade
from nobackfill.gallery.store import NewVectors
from nobackfill.release.models import CHUNK_ROWS
from nobackfill.release.routes import Route, open_route, plan_route
from nobackfill.server.stores.postgresql import schema
from nobackfill.server.stores.postgresql.database import execute
from nobackfill.server.stores.postgresql.gallery import PostgresqlGallery
from nobackfill.server.stores.postgresql.rows import copy_in, copy_out
from nobackfill.server.upgrades.workers.processes import WorkerProcesses
from nobackfill.server.upgrades.workers.workers import Workers, WorkerUpgrades

# Items that `bare` holds at once.
SLICE = 100_000
NOTE = (
    "{size:,} items of 128 + 128 dims, FCT's transform, its int8 file, as gateways and workers "
    "take it. `bare`: read by COPY, carried by 2 threads of onnxruntime in windows of 1,024, "
    "written by COPY, one after the other, {slice:,} at a time. `thread`: the gateway's own, 2 "
    "threads of onnxruntime. `processes`: two workers of one thread each. All share 2 cores with "
    "the database, whose fsync is off. `ray`: nodes of one processor each on this machine."
)
SPENT = (
    "Processor time of the runs above, microseconds an item: of `workers`, of `bench`, which hands "
    "out (and carries, where there are no workers), of PostgreSQL, of Ray's own processes. "
    "`cores busy`: of this machine, by whatever ran on it. `limit`: items a second if 2 cores did "
    "nothing but this."
)


def fill_gallery(store: PostgresqlGallery, size: int, *, graph: bool) -> None:
    """Put so many things, by number; a `graph` takes long to grow."""
    if not graph:
        statement = f"DROP INDEX {store.schema}.vectors_1_graph"
        store.database.write(lambda connection: execute(connection, statement))
    space, items = store.active().spec.space, data.draw_items(size)
    for start in range(0, size, PUT_ROWS):
        rows = slice(start, start + PUT_ROWS)
        ids = [str(start + n) for n in range(len(items.old[rows]))]
        store.put(ids, [NewVectors(space, items.old[rows], items.side[rows])])


class UpgradeContenders:
    """Ways to carry one gallery; each leaves it as it was."""

    def __init__(self, store: PostgresqlGallery, pair: Publication) -> None:
        self._store, self._pair = store, pair
        self._target = SpaceSpec.of(pair.manifests[2])
        found = plan_route(pair.manifests, 1, 2, pair.manifests[1].side_space)
        assert found is not None
        self._route: Route = found
        self.rates: dict[str, list[float]] = {"read": [], "carry": [], "write": []}
        self._spent: dict[str, list[dict[str, float]]] = {}

    def tables(self, bench: Bench) -> list[Table]:
        with closing(WorkerProcesses(2)) as workers:
            ways: dict[str, Callable[[], float]] = {
                "bare": self._bare,
                "thread": self._thread,
                "2 processes": partial(self._workers, workers),
            }
            if bench.full:
                del ways["thread"]
            measured = run_interleaved(
                [self._contender(name, way) for name, way in ways.items()], bench.size(1, 3, 2)
            )
        if not bench.tiny and importlib.util.find_spec("ray"):
            measured |= self._on_ray(bench)
        note = NOTE.format(size=self._store.count(), slice=SLICE)
        rows = [_medians(name, rounds) for name, rounds in self._spent.items()]
        tables = [_rates_table("Upgrades in PostgreSQL", note, measured)]
        if _nodes(2) in measured:
            tables.append(_two_nodes(measured[_nodes(1)], measured[_nodes(2)]))
        return [*tables, Table("Where upgrades in PostgreSQL work", rows, SPENT)]

    def _contender(self, name: str, way: Callable[[], float]) -> Contender:
        """Counts who works meanwhile."""

        def watched() -> float:
            machine, kinds = processors.machine_seconds(), processors.seconds_by_kind()
            began = time.perf_counter()
            rate = way()
            cores = (processors.machine_seconds() - machine) / (time.perf_counter() - began)
            spent = {
                **processors.microseconds_per_item(kinds, self._store.count()),
                "cores busy": cores,
            }
            self._spent.setdefault(name, []).append(spent)
            return rate

        return Contender(name, watched)

    def _on_ray(self, bench: Bench) -> dict[str, Measurement]:
        """One node and two in turns, so that what slows the machine for a while slows both: each
        turn starts a cluster, whose first run opens models and is not counted."""
        found: dict[str, list[float]] = {_nodes(1): [], _nodes(2): []}
        for _ in range(bench.size(1, 3, 2)):
            for nodes in (1, 2):
                with _ray(nodes) as workers:
                    self._workers(workers)
                    way = self._contender(_nodes(nodes), partial(self._workers, workers))
                    found[_nodes(nodes)].append(way.run())
        return {name: Measurement(tuple(rounds)) for name, rounds in found.items()}

    def _bare(self) -> float:
        """Items a second; of each part, too."""
        store, took = self._store, np.zeros(3)
        runner = open_route(self._pair.repo, self._route, 2, int8=True)
        source = store.active()
        store.add_staging_space(self._target)
        target = store.space(self._target.space)
        count = store.count()
        for first in range(0, count, SLICE):
            took += self._slice(runner, source, target, first)
        store.drop_space(self._target.space)
        for name, seconds in zip(("read", "carry", "write"), took.tolist(), strict=True):
            self.rates[name].append(count / seconds)
        return count / float(took.sum())

    def _slice(
        self, runner: Runner, source: SpaceInfo, target: SpaceInfo, first: int
    ) -> tuple[float, float, float]:
        """Seconds of reading, carrying, writing."""
        database, spec = self._store.database, source.spec
        table, into = (
            schema.table_name(self._store.schema, s.table_number) for s in (source, target)
        )
        where = f"label > {first} AND label <= {first + SLICE}"
        began = time.perf_counter()
        labels, old, side = database.read(
            lambda c: copy_out(c, table, where, spec.dim, spec.side_dim)
        )
        read = time.perf_counter()
        assert side is not None, "all have some"
        carried = [
            runner.run(old[start : start + CHUNK_ROWS], side[start : start + CHUNK_ROWS])
            for start in range(0, len(labels), CHUNK_ROWS)
        ]
        done = time.perf_counter()
        embedding = np.concatenate([one.embedding for one in carried])
        sides = [one.side_information for one in carried if one.side_information is not None]
        new_side = np.concatenate(sides) if sides else None
        database.write(lambda c: copy_in(c, into, labels, "upgraded", None, embedding, new_side))
        return read - began, done - read, time.perf_counter() - done

    def flips(self, bench: Bench) -> Table:
        """Both spaces full."""
        runner = open_route(self._pair.repo, self._route, 2)
        run_upgrade(self._store, runner, self._target)
        return measure_flips(bench, self._store, [self._store.active().spec, self._target])

    def _thread(self) -> float:
        runner = open_route(self._pair.repo, self._route, 2, int8=True)
        return self._timed(lambda: run_upgrade(self._store, runner, self._target).written_count)

    def _workers(self, workers: Workers) -> float:
        by_workers = WorkerUpgrades(workers, self._pair.repo)
        return self._timed(
            lambda: (
                by_workers.run(
                    self._store, self._route, self._target, lambda _: None, lambda: False
                ).written_count
            )
        )

    def _timed(self, work: Callable[[], int]) -> float:
        began = time.perf_counter()
        written = work()
        seconds = time.perf_counter() - began
        assert written == self._store.count(), "every item was carried once"
        self._store.drop_space(self._target.space)
        return written / seconds


@contextmanager
def _ray(nodes: int) -> Iterator[Workers]:
    from ray.cluster_utils import Cluster

    from nobackfill.plugins.ray.workers import RayCluster

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


def _rates_table(title: str, note: str, measured: dict[str, Measurement]) -> Table:
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
    return Table(title, rows, note, {name: one.rounds for name, one in measured.items()})


def _nodes(count: int) -> str:
    return f"ray, nodes: {count}"


def _two_nodes(one: Measurement, two: Measurement) -> Table:
    """Turn by turn."""
    rows: list[Row] = [
        {"turn": str(turn), "one node": alone, "two nodes": both, "of one": both / alone}
        for turn, (alone, both) in enumerate(zip(one.rounds, two.rounds, strict=True), 1)
    ]
    note = "Items a second of the runs above; a cluster is started for each."
    return Table("Two nodes of Ray beside one", rows, note)


def _medians(name: str, rounds: list[dict[str, float]]) -> Row:
    """Of each column, over the rounds."""
    row = {column: statistics.median(one[column] for one in rounds) for column in rounds[0]}
    work = sum(row[kind] for kind in processors.KINDS)
    return {"way": name, **row, "limit": 2e6 / work}
