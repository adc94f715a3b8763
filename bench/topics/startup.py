"""Start-up: a device's search and a gateway's first answer, from process start."""

import contextlib
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from bench import data
from bench.commands import run_command, run_edge_client
from bench.galleries import put_items
from bench.harness import Bench, Contender, Row, Table, run_interleaved
from bench.published import INNER, SIZE, Publication, make_publication
from bench.serving import GALLERY, copy_filled
from demo import serve
from demo.children import Children
from nobackfill.errors import NobackfillError
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.v1 import release_pb2
from nobackfill.wire.gateway import Gateway

DEVICE = (
    "Seconds of whole commands; `python` is an interpreter that imports numpy and onnxruntime and "
    "ends, below which no search by image can come."
)
GATEWAY = (
    "Seconds from process start to the first answer, with Triton, one start each: to ListReleases "
    "that a release is active, where nothing was ever served; and to Search by image, of a gallery "
    "whose index file is good, and of one whose index file is gone."
)


def run(bench: Bench) -> list[Table]:
    """Device, then gateway."""
    pair = make_publication(bench.shared, inner=bench.size(64, INNER, INNER))
    return [_device(bench, pair), _gateway(bench, pair)]


def _device(bench: Bench, pair: Publication) -> Table:
    size = bench.size(300, 10_000, 10_000)
    gallery = bench.folder / "gallery.sqlite"
    run_edge_client(gallery, "init", "--from", pair.repo, "--root", pair.repo / "1.root.json")
    with SqliteGallery.open(gallery) as store:
        put_items(store, pair.manifests[2].space, data.draw_items(size))
    query = bench.folder / "query.png"
    Image.fromarray(data.draw_images(1, SIZE, seed=7)[0]).save(query)
    bare = [sys.executable, "-c", "import numpy, onnxruntime; print('{}')"]
    contenders = [
        Contender("python", lambda: run_command(bare, bench.folder).seconds),
        Contender("search IMAGE", lambda: run_edge_client(gallery, "search", query).seconds),
        Contender(
            "search --id", lambda: run_edge_client(gallery, "search", "--id", "item-0").seconds
        ),
        Contender("status", lambda: run_edge_client(gallery, "status").seconds),
    ]
    measured = run_interleaved(contenders, bench.size(1, 7, 9))
    rows: list[Row] = [
        {
            "command": name,
            "seconds": figures.median,
            "spread": figures.spread_text,
            "of python": figures.ratio(measured["python"]),
        }
        for name, figures in measured.items()
    ]
    rounds = {name: figures.rounds for name, figures in measured.items()}
    return Table(f"edge-client, {size:,} items", rows, DEVICE, rounds)


def _gateway(bench: Bench, pair: Publication) -> Table:
    sizes: tuple[int, ...] = bench.size((300,), (100_000,), (100_000, 1_000_000))
    (image,) = data.draw_jpegs(1, SIZE)

    def searched(gateway: Gateway) -> bool:
        return bool(gateway.search(GALLERY, image=image).hits)

    def active(gateway: Gateway) -> bool:
        releases = gateway.list_releases()
        return any(one.state == release_pb2.RELEASE_STATE_ACTIVE for one in releases)

    first = _until(active, bench.folder / "first", pair.repo)
    rows: list[Row] = [{"start": "very first, a release is active", "seconds": first}]
    for size in sizes:
        folder = bench.folder / str(size)
        folder.mkdir()
        copy_filled(bench, pair, size, folder)
        warm = _until(searched, folder, pair.repo)
        for index in (folder / "data").rglob("*.hnsw"):
            index.unlink()
        cold = _until(searched, folder, pair.repo)
        shutil.rmtree(folder)
        rows += [
            {"start": f"{size:,} items, index file good", "seconds": warm},
            {"start": f"{size:,} items, index file gone", "seconds": cold},
        ]
    return Table("gateway", rows, GATEWAY)


def _until(answered: Callable[[Gateway], bool], folder: Path, repo: Path) -> float:
    """Seconds from process start until `answered`, which may raise while nobody listens."""
    addresses = serve.free_addresses(2)
    started = time.perf_counter()
    with Children(folder / "logs") as children:
        child = children.start(
            "gateway",
            [
                *(serve.COMMAND, "serve", "--model-repo", repo, "--data", folder / "data"),
                *("--address", addresses[0], "--metrics-address", addresses[1]),
            ],
        )
        while child.process.poll() is None:
            # A connection for each try: gRPC's pauses before it makes a broken one again, 1 s and
            # more, would be most of what is measured.
            with (
                contextlib.suppress(NobackfillError),
                Gateway(addresses[0], seconds=60, retries=False) as gateway,
            ):
                if answered(gateway):
                    return time.perf_counter() - started
            time.sleep(0.02)
        raise child.failure()
