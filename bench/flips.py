"""Flips of a gallery in PostgreSQL while others put and search without a pause."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from bench.harness import Bench, Row, Table
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.store import NewVectors
from nobackfill.server.stores.postgresql.gallery import PostgresqlGallery
from nobackfill.server.stores.postgresql.search import (
    CandidateSource,
)
from tests.support.postgresql_searcher import PostgresqlSearcher

K, WRITERS, READERS = 10, 2, 2
NOTE = (
    "{size:,} items, both spaces full; {writers} threads put one item again and again, in both "
    "spaces, {readers} search the space that is active; {flips} flips from one space to the other. "
    "Milliseconds of one call; fsync is off. `look`: for items that a space lacks, as a gateway "
    "does before it flips. `failed`: calls that raised."
)


def measure_flips(
    bench: Bench, store: PostgresqlGallery, specs: Sequence[SpaceSpec],
    candidates: CandidateSource | None = None,
) -> Table:  # fmt: skip
    """What a flip takes, and what others wait meanwhile. `candidates`: in place of the database's
    graphs."""
    rng, count = np.random.default_rng(0), bench.size(4, 40, 100)
    rows = [store.load_vectors(spec.space)[1][:1] for spec in specs]
    sides = [rng.standard_normal((1, s.side_dim)).astype("<f4") for s in specs]
    new = [NewVectors(*one) for one in zip((s.space for s in specs), rows, sides, strict=True)]
    stopping = threading.Event()

    def again(work: Callable[[int], object], worker: int) -> tuple[list[float], int]:
        """Milliseconds of each call until the flips are over, and how many raised."""
        took, failed = [], 0
        while not stopping.is_set():
            began = time.perf_counter()
            try:
                work(worker)
            except Exception:  # noqa: BLE001 - whatever it is, it is counted
                failed += 1
            took.append(1000 * (time.perf_counter() - began))
        return took, failed

    def search(_: int) -> None:
        info = store.active()
        query = rows[[spec.space for spec in specs].index(info.spec.space)]
        PostgresqlSearcher(store.database, store.schema, info, candidates).search(query, K)

    looked: list[float] = []
    flipped: list[float] = []
    with ThreadPoolExecutor(WRITERS + READERS) as threads:
        puts = [
            threads.submit(again, lambda n: store.put([f"w{n}"], new), n) for n in range(WRITERS)
        ]
        searches = [threads.submit(again, search, n) for n in range(READERS)]
        try:
            looked += [_ms(store.advance_frontier, spec.space) for spec in specs]
            for turn in range(count):
                time.sleep(0.05)
                flipped.append(_ms(store.flip, specs[1 - turn % 2].space))
        finally:
            stopping.set()
    told = {
        "look": (looked, 0),
        "flip": (flipped, 0),
        **{
            name: ([ms for one in made for ms in one.result()[0]], sum(o.result()[1] for o in made))
            for name, made in (("put", puts), ("search", searches))
        },
    }
    note = NOTE.format(size=store.count(), writers=WRITERS, readers=READERS, flips=count)
    table_rows: list[Row] = [
        {
            "call": name, "calls": len(took), "failed": failed,
            "median ms": float(np.median(took)), "worst ms": max(took),
        }
        for name, (took, failed) in told.items()
    ]  # fmt: skip
    return Table("Flips in PostgreSQL", table_rows, note)


def _ms(call: Callable[[str], None], space: str) -> float:
    began = time.perf_counter()
    call(space)
    return 1000 * (time.perf_counter() - began)
