"""Start-up: a device's search and a gateway's first answer, from process start."""

import sys
import time
from functools import partial
from pathlib import Path

import grpc
from PIL import Image

from bench import data
from bench.commands import command, edge
from bench.galleries import put
from bench.harness import Bench, Contender, Row, Table, interleave, seconds
from bench.models import INNER
from bench.published import SIZE, Publication, publication
from bench.serving import by_image, copy_filled, serving
from demo import gateway, serve
from demo.children import Children
from gallery.store import Store
from nobackfill.v1 import search_pb2, search_pb2_grpc

DEVICE = (
    "Seconds of whole commands; `python` is an interpreter that imports numpy and onnxruntime and "
    "ends, below which no search by image can come."
)
GATEWAY = (
    "Seconds from process start to the first answer to Search by image, with Triton: of a gallery "
    "whose index file is good, of one whose index is gone, and of the very first start."
)


def run(bench: Bench) -> list[Table]:
    """Device, then gateway."""
    pair = publication(bench.shared, inner=bench.size(64, INNER, INNER))
    return [_device(bench, pair), _gateway(bench, pair)]


def _device(bench: Bench, pair: Publication) -> Table:
    size = bench.size(300, 10_000, 10_000)
    gallery = bench.folder / "gallery.sqlite"
    edge(gallery, "init", "--from", pair.repo, "--root", pair.repo / "1.root.json")
    with Store.open(gallery) as store:
        put(store, pair.manifests[2].space, data.things(size))
    query = bench.folder / "query.png"
    Image.fromarray(data.images(1, SIZE, seed=7)[0]).save(query)
    bare = [sys.executable, "-c", "import numpy, onnxruntime; print('{}')"]
    contenders = [
        Contender("python", lambda: command(bare, bench.folder).seconds),
        Contender("search IMAGE", lambda: edge(gallery, "search", query).seconds),
        Contender("search --id", lambda: edge(gallery, "search", "--id", "item-0").seconds),
        Contender("status", lambda: edge(gallery, "status").seconds),
    ]
    measured = interleave(contenders, bench.size(1, 7, 9))
    rows: list[Row] = [
        {
            "command": name,
            "seconds": figures.median,
            "spread": f"±{100 * figures.spread:.0f} %",
            "of python": figures.ratio(measured["python"]),
        }
        for name, figures in measured.items()
    ]
    rounds = {name: figures.rounds for name, figures in measured.items()}
    return Table(f"edge-client, {size:,} items", rows, DEVICE, rounds)


def _gateway(bench: Bench, pair: Publication) -> Table:
    size = bench.size(300, 100_000, 100_000)
    folder = bench.folder
    (image,) = data.jpegs(1, SIZE)
    first = seconds(partial(_until_active, folder / "first", pair.repo))
    copy_filled(bench, pair, size, folder)
    warm = _until_answer(folder, pair.repo, image)
    for index in (folder / "data").rglob("*.hnsw"):
        index.unlink()
    cold = _until_answer(folder, pair.repo, image)
    rows: list[Row] = [
        {"start": "very first, until a release is active", "seconds": first},
        {"start": f"{size:,} items, index file good", "seconds": warm},
        {"start": f"{size:,} items, index file gone", "seconds": cold},
    ]
    return Table("gateway", rows, GATEWAY)


def _until_active(folder: Path, repo: Path) -> None:
    with serving(folder, repo):
        pass


def _until_answer(folder: Path, repo: Path, image: bytes) -> float:
    addresses = serve.free_addresses(2)
    request = search_pb2.SearchRequest.FromString(by_image([image])[0])
    started = time.perf_counter()
    with Children(folder / "logs") as children:
        child = children.start(
            "gateway",
            [
                *(serve.COMMAND, "serve", "--model-repo", repo, "--data", folder / "data"),
                *("--address", addresses[0], "--metrics-address", addresses[1]),
            ],
        )
        with gateway.connect(addresses[0]) as channel:
            search = search_pb2_grpc.SearchServiceStub(channel).Search
            while child.process.poll() is None:
                try:
                    assert search(request, timeout=60, wait_for_ready=True).hits
                    return time.perf_counter() - started
                except grpc.RpcError:
                    time.sleep(0.02)
        raise child.failure()
