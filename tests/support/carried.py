"""A gallery in PostgreSQL whose upgrade is carried by workers while others write; and a check that
nothing is lost, doubled or brought back."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.staging import UpgradeOutcome, UpgradeProgress
from nobackfill.gallery.store import NewVectors
from nobackfill.release.manifest import Manifest
from nobackfill.release.routes import open_route, route_along
from nobackfill.server.stores.postgresql import schema
from nobackfill.server.stores.postgresql.database import Database, execute
from nobackfill.server.stores.postgresql.gallery import PostgresqlGalleries
from nobackfill.server.upgrades.workers.workers import Workers, WorkerUpgrades
from nobackfill.vectors import Vectors
from tests.support import graphs

# Items in a transaction.
_PUT = 10_000


class Carried:
    """`count` items of release 1, and the way to release 2, which `files` publishes."""

    def __init__(self, url: str, files: Path, one: Manifest, two: Manifest, count: int) -> None:
        self.files, self.source, self.target = files, SpaceSpec.of(one), SpaceSpec.of(two)
        self.route = route_along({1: one, 2: two}, (1, 2))
        self.runner = open_route(files, self.route)
        self.database = Database(url)
        self.database.open(schema.prepare)
        self.store = PostgresqlGalleries(self.database).create("g", [self.source], {})
        # An upgrade does not read the graph, and it takes long to grow.
        drop = f"DROP INDEX {self.store.schema}.vectors_1_graph"
        self.database.write(lambda connection: execute(connection, drop))
        names = [f"item-{n}" for n in range(count)]
        for first in range(0, count, _PUT):
            some = names[first : first + _PUT]
            self.store.put(some, [self._new(len(some), 1 + first)])
        self.deleted: set[str] = set()

    def _new(self, count: int, seed: int) -> NewVectors:
        rng = np.random.default_rng(seed)
        inside = rng.standard_normal((count, graphs.BLOCK)).astype(np.float32)
        vectors = np.zeros((count, graphs.DIM), np.float32)
        vectors[:, : graphs.BLOCK] = inside / np.linalg.norm(inside, axis=1, keepdims=True)
        sides = np.zeros((count, graphs.SIDE_DIM), np.float32)
        sides[:, : graphs.SIDE_BLOCK] = rng.standard_normal((count, graphs.SIDE_BLOCK))
        return NewVectors(self.source.space, vectors, sides)

    def upgrade(
        self, workers: Workers, on_progress: Callable[[UpgradeProgress], None],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> UpgradeOutcome:  # fmt: skip
        """In this thread, while another puts new items, puts some again and deletes."""
        self.store.add_staging_space(self.target)
        ended = threading.Event()
        with ThreadPoolExecutor(1) as beside:
            writing = beside.submit(self._write, ended)
            try:
                by_workers = WorkerUpgrades(workers, self.files)
                return by_workers.run(self.store, self.route, self.target, on_progress, should_stop)
            finally:
                ended.set()
                writing.result()

    def _write(self, ended: threading.Event) -> None:
        turn, count = 0, self.store.count()
        while not ended.wait(0.02) or turn < 5:
            old = self._new(2, 1000 + turn)
            carried = self.runner.run(*_arrays(old))
            new = NewVectors(self.target.space, carried.embedding, carried.side_information)
            # As gateways put once a space is staged: into both.
            self.store.put([f"item-{count - 1 - turn}", f"new-{turn}"], [old, new])
            self.deleted |= {f"item-{turn}", f"new-{turn - 2}"}
            self.store.delete([f"item-{turn}", f"new-{turn - 2}"])
            turn += 1

    def check(self) -> None:
        """Every item has, once, what its own vector is carried to; nothing else is there."""
        labels, old = self.store.load_vectors(self.source.space)
        carried, new = self.store.load_vectors(self.target.space)
        assert carried.tolist() == labels.tolist() and len(labels) == self.store.count()
        rows = self.store.stored_vectors(labels, self.source.space)
        sides = np.frombuffer(b"".join(side or b"" for side in rows.side_blobs), "<f4")
        expected = self.runner.run(old, sides.reshape(len(labels), -1).astype(np.float32))
        np.testing.assert_allclose(new, expected.embedding, atol=1e-5)
        there = {item.id for item in self.store.items(labels) if item is not None}
        assert len(there) == len(labels) and self.deleted and not there & self.deleted


def _arrays(new: NewVectors) -> tuple[Vectors, Vectors]:
    return np.asarray(new.embedding, np.float32), np.asarray(new.side_information, np.float32)
