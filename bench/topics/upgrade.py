"""A server's upgrade of one gallery: read, transform, write, index; and end to end."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bench import bare, data
from bench.galleries import fill_gallery
from bench.harness import Bench, Contender, Measurement, Row, Table, run_interleaved, time_call
from bench.published import INNER, Publication, make_publication
from bench.topics.index import recall
from nobackfill.errors import VerificationError
from nobackfill.gallery import staging
from nobackfill.gallery.search import hnsw
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.hnsw import HnswIndex
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.staging import Runner, RunnerResult, run_upgrade
from nobackfill.release.models import CHUNK_ROWS
from nobackfill.release.routes import RouteRunner, open_route, plan_route
from nobackfill.vectors import Vectors

THREADS = 2
EFS = (16, 32, 64, 128, 256, 512)
K = 10
PARTS = (
    "Seconds for a gallery of 128 + 128 dims and FCT's transform on 2 threads. `bare`: read all "
    "rows, bare onnxruntime on the same batches, write all rows, one after the other. `upgrade`: "
    "staged, checked, durable chunk by chunk, so that it serves and survives kills meanwhile. "
    "`whole`: from the old space answering to the new one answering: models opened, upgrade, flip, "
    "vectors loaded, and an index that inherits the old graph, or is built afresh on 2 threads."
)


Seconds = dict[str, float]


class TimedRunner:
    """A runner; `seconds` it took so far."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.reads_side = runner.reads_side
        self.seconds = 0.0

    def run(self, embedding: Vectors, side: Vectors | None) -> RunnerResult:
        """See Runner.run."""
        started = time.perf_counter()
        upgraded = self._runner.run(embedding, side)
        self.seconds += time.perf_counter() - started
        return upgraded


@dataclass(frozen=True)
class UpgradeFixture:
    """What every part needs: a filled gallery to copy, the publication, the old graph."""

    folder: Path
    pair: Publication
    original: Path
    old: HnswIndex

    def gallery(self) -> SqliteGallery:
        """A fresh copy of the filled gallery."""
        path = self.folder / "copy.sqlite"
        for old in self.folder.glob("copy.sqlite*"):
            old.unlink()
        shutil.copyfile(self.original, path)
        return SqliteGallery.open(path)

    def runner(self, kind: str) -> RouteRunner:
        route = plan_route(self.pair.manifests, 1, 2, self.pair.manifests[1].side_space)
        assert route is not None
        return open_route(self.pair.repo, route, THREADS, int8=kind == "int8")


def run(bench: Bench) -> list[Table]:
    """Parts and whole, then what the inherited graph finds."""
    count = bench.size(3000, 100_000, 100_000)
    pair = make_publication(bench.shared, inner=bench.size(64, INNER, INNER))
    items = data.draw_items(count)
    original = bench.folder / "gallery.sqlite"
    with fill_gallery(original, pair.manifests[1], items) as store:
        labels, vectors = store.load_vectors(pair.manifests[1].space)
    old = hnsw.build_index(
        SpaceSpec.of(pair.manifests[1]), labels, vectors, count_threads=lambda: THREADS
    )
    work = UpgradeFixture(bench.folder, pair, original, old)
    measured = _measured(bench, work)
    rows = [_row(name, figures, measured, count) for name, figures in measured.items()]
    rounds = {name: figures.rounds for name, figures in measured.items()}
    parts = Table(f"Upgrade of {count:,} seeded vectors", rows, PARTS, rounds)
    return [parts, *_indexes(bench, work, items)]


def _measured(bench: Bench, work: UpgradeFixture) -> dict[str, Measurement]:
    """Every part by name and kind, from interleaved rounds of bare and ours."""
    met: dict[str, list[float]] = {}

    def one(way: Callable[[UpgradeFixture, str], Seconds], kind: str) -> float:
        parts = way(work, kind)
        for name, took in parts.items():
            met.setdefault(f"{name}, {kind}", []).append(took)
        return max(parts.values())

    contenders = [
        Contender(f"{way.__name__} {kind}", partial(one, way, kind))
        for kind in ("fp32", "int8")
        for way in (_bare, _ours)
    ]
    run_interleaved(contenders, bench.size(1, 2, 5), warm=False)
    return {name: Measurement(tuple(figures)) for name, figures in met.items()}


def _row(name: str, figures: Measurement, measured: dict[str, Measurement], count: int) -> Row:
    limit = measured[f"bare sum, {name.split(', ')[-1]}"]
    return {
        "what": name,
        "seconds": figures.median,
        "spread": figures.spread_text,
        "items/s": count / figures.median,
        "of bare sum": figures.ratio(limit),
    }


def _bare(work: UpgradeFixture, kind: str) -> Seconds:
    with work.gallery() as store:
        parts = bare.time_upgrade(store, work.pair, kind, THREADS)
    return {
        "bare read": parts.read,
        "bare transform": parts.transform,
        "bare write": parts.write,
        "bare sum": parts.total,
    }


def _ours(work: UpgradeFixture, kind: str) -> Seconds:
    """One upgrade and its parts; in int8 a fresh index, too, beside the one that inherits."""
    target = SpaceSpec.of(work.pair.manifests[2])
    with work.gallery() as store:
        started = time.perf_counter()
        runner = TimedRunner(work.runner(kind))
        opened = time.perf_counter() - started
        upgraded = time_call(lambda: run_upgrade(store, runner, target))
        flipped = time_call(lambda: staging.flip(store, target.space))
        started = time.perf_counter()
        labels, vectors = store.load_vectors(target.space)
        loaded = time.perf_counter() - started

        def answers(index: HnswIndex) -> None:
            index.search(vectors[:1], K)

        inherited = time_call(
            lambda: answers(hnsw.renew_index(target, labels, vectors, old=work.old))
        )
        parts = {
            "models opened": opened,
            "upgrade": upgraded,
            "upgrade's transform": runner.seconds,
            "upgrade's read and write": upgraded - runner.seconds,
            "flip": flipped,
            "vectors loaded": loaded,
            "index inherited": inherited,
            "whole, index inherited": opened + upgraded + flipped + loaded + inherited,
        }
        if kind == "int8":
            fresh = time_call(
                lambda: answers(
                    hnsw.build_index(target, labels, vectors, count_threads=lambda: THREADS)
                )
            )
            parts["index fresh"] = fresh
            parts["whole, index fresh"] = parts["whole, index inherited"] - inherited + fresh
        return parts


def _indexes(bench: Bench, work: UpgradeFixture, items: data.ItemVectors) -> list[Table]:
    """Fresh on one and two threads, and inherited: seconds, then recall against ef."""
    target = SpaceSpec.of(work.pair.manifests[2])
    runner = work.runner("int8")
    upgraded = np.concatenate(
        [
            runner.run(items.old[i : i + CHUNK_ROWS], items.side[i : i + CHUNK_ROWS]).embedding
            for i in range(0, len(items.old), CHUNK_ROWS)
        ]
    )
    labels = work.old.labels
    made: dict[str, HnswIndex] = {}
    ways: dict[str, Callable[[], HnswIndex]] = {
        "fresh, 1 thread": lambda: hnsw.build_index(
            target, labels, upgraded, count_threads=lambda: 1
        ),
        "fresh, 2 threads": lambda: hnsw.build_index(
            target, labels, upgraded, count_threads=lambda: 2
        ),
        "inherited": lambda: hnsw.transfer_index(work.old, target, labels, upgraded),
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
    built = Table("Index of the new space", rows, "Until it answers, its recall probed; once each.")
    queries = data.draw_items(bench.size(64, 512, 512), seed=2).new
    true = ExactIndex(target, labels, upgraded).search(queries, K).labels
    found = [_found(name, index, queries, true) for name, index in made.items()]
    note = (
        "Queries are what the new model makes of other things, the gallery is upgraded (int8); "
        "queries a second on one thread, batches of 32, the best of three runs, one index after "
        "the other."
    )
    return [built, Table("Recall@10 against ef", [row for part in found for row in part], note)]


def _found(name: str, index: HnswIndex, queries: Vectors, true: Labels) -> list[Row]:
    rows: list[Row] = []
    for ef in EFS:
        index.graph.ef = ef
        got = index.search(queries, K).labels

        def all_of_them() -> None:
            for start in range(0, len(queries), 32):
                index.search(queries[start : start + 32], K)

        took = min(time_call(all_of_them) for _ in range(3))
        rows.append(
            {
                "index": name,
                "ef": ef,
                "recall@10": recall(got, true),
                "queries/s": len(queries) / took,
            }
        )
    return rows
