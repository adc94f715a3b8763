"""A server's upgrade of one gallery: read, transform, write, index; and end to end."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bench import bare, data
from bench.galleries import fill
from bench.harness import Bench, Contender, Measured, Row, Table, interleave, seconds
from bench.models import INNER
from bench.published import Publication, publication
from bench.topics.index import recall
from gallery import hnsw, staging
from gallery.exact import ExactIndex
from gallery.hnsw import HnswIndex
from gallery.index import Labels
from gallery.spec import SpaceSpec
from gallery.store import Store
from gallery.upgrade import CHUNK, run_upgrade
from release.errors import VerificationError
from release.routes import RouteRunner, open_route, plan_route
from release.vectors import Vectors

THREADS = 2
EFS = (16, 32, 64, 128, 256, 512)
K = 10
PARTS = (
    "Seconds for a gallery of 128 + 128 dims and FCT's transform on 2 threads. `bare sum`: read "
    "all rows, onnxruntime on the same batches, write all rows, one after the other. `whole`: the "
    "new space staged, filled, flipped, and its index answering."
)


@dataclass(frozen=True)
class Work:
    """What every part needs: a filled gallery to copy, the publication, the old graph."""

    folder: Path
    pair: Publication
    original: Path
    old: HnswIndex

    def gallery(self) -> Store:
        """A fresh copy of the filled gallery."""
        path = self.folder / "copy.sqlite"
        for old in self.folder.glob("copy.sqlite*"):
            old.unlink()
        shutil.copyfile(self.original, path)
        return Store.open(path)

    def runner(self, kind: str) -> RouteRunner:
        route = plan_route(self.pair.manifests, 1, 2, has_side=True)
        assert route is not None
        return open_route(self.pair.repo, route, THREADS, int8=kind == "int8")


def run(bench: Bench) -> list[Table]:
    """Parts and whole, then what the inherited graph finds."""
    count = bench.size(3000, 100_000, 100_000)
    pair = publication(bench.shared, inner=bench.size(64, INNER, INNER))
    real = bench.data is not None
    items = data.stored(bench.data, count) if bench.data else data.things(count)
    original = bench.folder / "gallery.sqlite"
    with fill(original, pair.manifests[1], items) as store:
        labels, vectors = store.load(pair.manifests[1].space)
    old = hnsw.build(SpaceSpec.of(pair.manifests[1]), labels, vectors, threads=THREADS)
    work = Work(bench.folder, pair, original, old)
    ways = {"bare sum": _bare, "upgrade": _ours, "whole": _whole}
    contenders = [
        Contender(f"{name}, {kind}", partial(way, work, kind))
        for name, way in ways.items()
        for kind in ("fp32", "int8")
    ]
    measured = interleave(contenders, bench.size(1, 2, 5), warm=False)
    what = f"{count:,} {'stored vectors' if real else 'seeded vectors'}"
    rows = [_row(name, figures, measured, count) for name, figures in measured.items()]
    parts = Table(f"Upgrade of {what}", rows, PARTS, {n: f.rounds for n, f in measured.items()})
    return [parts, *_indexes(bench, work, items)]


def _row(name: str, figures: Measured, measured: dict[str, Measured], count: int) -> Row:
    limit = measured[f"bare sum, {name.split(', ')[1]}"]
    return {
        "what": name,
        "seconds": figures.median,
        "spread": f"±{100 * figures.spread:.0f} %",
        "items/s": count / figures.median,
        "of bare sum": figures.ratio(limit),
    }


def _bare(work: Work, kind: str) -> float:
    with work.gallery() as store:
        return bare.upgrade_seconds(store, work.pair, kind, THREADS)


def _ours(work: Work, kind: str) -> float:
    """The staged upgrade that serves and survives kills meanwhile, without an index."""
    runner = work.runner(kind)
    with work.gallery() as store:
        target = SpaceSpec.of(work.pair.manifests[2])
        return seconds(lambda: run_upgrade(store, runner, target, reads_side=True))


def _whole(work: Work, kind: str) -> float:
    """Until the new space answers: models opened, upgraded, flipped, indexed by the old graph."""
    target = SpaceSpec.of(work.pair.manifests[2])
    with work.gallery() as store:
        started = time.perf_counter()
        run_upgrade(store, work.runner(kind), target, reads_side=True)
        staging.flip(store, target.space)
        labels, vectors = store.load(target.space)
        hnsw.renew(target, labels, vectors, old=work.old).search(vectors[:1], K)
        return time.perf_counter() - started


def _indexes(bench: Bench, work: Work, items: data.Vectored) -> list[Table]:
    """Fresh on one and two threads, and inherited: seconds, then recall against ef."""
    target = SpaceSpec.of(work.pair.manifests[2])
    runner = work.runner("int8")
    upgraded = np.concatenate(
        [
            runner.run(items.old[i : i + CHUNK], items.side[i : i + CHUNK]).embedding
            for i in range(0, len(items.old), CHUNK)
        ]
    )
    labels = work.old.labels
    made: dict[str, HnswIndex] = {}
    ways: dict[str, Callable[[], HnswIndex]] = {
        "fresh, 1 thread": lambda: hnsw.build(target, labels, upgraded, threads=1),
        "fresh, 2 threads": lambda: hnsw.build(target, labels, upgraded, threads=2),
        "inherited": lambda: hnsw.carry(work.old, target, labels, upgraded),
    }
    rows: list[Row] = []
    for name, way in ways.items():
        started = time.perf_counter()
        try:
            made[name] = way()
        except VerificationError as error:
            rows.append({"index": name, "seconds": str(error)})
            continue
        took = time.perf_counter() - started
        rows.append({"index": name, "seconds": took, "items/s": len(labels) / took})
    built = Table("Index of the new space", rows, "Until it answers, its recall probed.")
    rng = np.random.default_rng(0)
    queries = upgraded[rng.choice(len(upgraded), bench.size(64, 512, 512), replace=False)]
    true = ExactIndex(target, labels, upgraded).search(queries, K).labels
    found = [_found(name, index, queries, true) for name, index in made.items()]
    note = "Queries are vectors of the gallery; queries a second on one thread, batches of 32."
    return [built, Table("Recall@10 against ef", [row for part in found for row in part], note)]


def _found(name: str, index: HnswIndex, queries: Vectors, true: Labels) -> list[Row]:
    rows: list[Row] = []
    for ef in EFS:
        index.graph.set_ef(ef)
        got = index.search(queries, K).labels

        def all_of_them() -> None:
            for start in range(0, len(queries), 32):
                index.search(queries[start : start + 32], K)

        took = min(seconds(all_of_them) for _ in range(3))
        rows.append(
            {
                "index": name,
                "ef": ef,
                "recall@10": recall(got, true),
                "queries/s": len(queries) / took,
            }
        )
    return rows
