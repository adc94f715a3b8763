"""Memory of one gallery as the gateway holds it, as a multiple of its vectors."""

import multiprocessing
from pathlib import Path

import numpy as np

from bench.harness import Bench, Row, Table
from nobackfill.gallery import staging
from nobackfill.gallery.search import hnsw
from nobackfill.gallery.search.view import LiveView
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.store import NewVectors
from nobackfill.server.galleries.hosted_file import index_opener
from nobackfill.server.process_limits import limit_malloc_arenas
from nobackfill.vectors import Vectors

NOTE = (
    "Resident memory beyond that of a process with the gallery's file open and BLAS in use, over 4 "
    "bytes a number. Peaks are the kernel's, counted anew for each phase; start and upgrade have "
    "a process each."
)
# A build of so many takes under a minute on two cores.
ITEMS, DIM, LATENT, PROBES = 40_000, 512, 16, 2000
PUT_ROWS = 2000


def run(bench: Bench) -> list[Table]:
    """Building, starting, upgrading."""
    items, dim = bench.size((2500, 32), (ITEMS, DIM), (ITEMS, DIM))
    path = bench.folder / "gallery.sqlite"
    _fill(path, items, dim)
    rows: list[Row] = []
    # A fresh process each, its malloc as the gateway has it: what one phase leaves there is not the
    # next one's.
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(1, limit_malloc_arenas, maxtasksperchild=1) as pool:
        for phase in (_built, _started, _upgraded):
            rows += pool.apply(phase, (path, items * dim * 4))
    return [Table(f"{items:,} x {dim}", rows, NOTE)]


def _spec(release: int, dim: int) -> SpaceSpec:
    return SpaceSpec(f"sp-{release:064x}", release, dim, "squared_l2", False, None, 0)


def _fill(path: Path, items: int, dim: int) -> None:
    """Items with a vector in two spaces, the second a turn of the first."""
    rng = np.random.default_rng(1)
    latent = rng.standard_normal((items, LATENT))
    mix = rng.standard_normal((LATENT, dim))
    turn = np.linalg.qr(rng.standard_normal((dim, dim)))[0]
    with SqliteGallery.create(path, _spec(1, dim)) as store:
        staging.add_staging_space(store, _spec(2, dim))
        for start in range(0, items, PUT_ROWS):
            piece = latent[start : start + PUT_ROWS] @ mix
            noisy: Vectors = (piece + 0.05 * rng.standard_normal(piece.shape)).astype(np.float32)
            labels = store.put(
                [f"item-{start + i}" for i in range(len(piece))],
                [NewVectors(_spec(1, dim).space, noisy)],
            ).labels
            staging.write_vectors(
                store, _spec(2, dim).space, labels, (noisy @ turn).astype(np.float32)
            )


def _memory(field: str) -> int:
    """Bytes of VmRSS or VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def _empty() -> int:
    """Bytes that the process has before a gallery: with BLAS's own buffers, which stay."""
    some = np.ones((PROBES, DIM), np.float32)
    np.matmul(some, some.T)
    return _memory("VmRSS")


def _from_here() -> None:
    """Count the peak anew."""
    Path("/proc/self/clear_refs").write_text("5")


def _row(phase: str, field: str, before: int, size: int) -> Row:
    return {"phase": phase, "times the vectors": round((_memory(field) - before) / size, 2)}


def _built(path: Path, size: int) -> list[Row]:
    with SqliteGallery.open(path) as store:
        before = _empty()
        view = LiveView(store, store.active().spec.space)
        view.compact(hnsw.build_index)
        rows = [_row("first build, peak", "VmHWM", before, size)]
        base = view.snapshot().base.index
        assert isinstance(base, hnsw.HnswIndex)
        base.save(path.with_name("1.hnsw"))
        view.close()
    return rows


def _started(path: Path, size: int) -> list[Row]:
    with SqliteGallery.open(path) as store:
        before = _empty()
        view = LiveView(store, store.active().spec.space, index_opener(path.with_name("1.hnsw")))
        assert isinstance(view.snapshot().base.index, hnsw.HnswIndex)
        rows = [_row("start, peak", "VmHWM", before, size)]
        rows.append(_row("steady", "VmRSS", before, size))
        view.close()
    return rows


def _upgraded(path: Path, size: int) -> list[Row]:
    with SqliteGallery.open(path) as store:
        before = _empty()
        spaces = [info.spec.space for info in store.spaces()]
        old = LiveView(store, spaces[0], index_opener(path.with_name("1.hnsw")))
        _from_here()
        new = LiveView(store, spaces[1], index_opener(path.with_name("2.hnsw"), old))
        inherited = new.snapshot().base.index
        assert isinstance(inherited, hnsw.HnswIndex) and not inherited.links_fit_space
        rows = [_row("upgrade, peak until it serves", "VmHWM", before, size)]
        rows.append(_row("until retired", "VmRSS", before, size))
        del inherited
        _from_here()
        new.compact(hnsw.build_index)
        rows.append(_row("fresh graph after an upgrade, peak", "VmHWM", before, size))
        new.close()
        old.close()
    return rows
