"""Start-up: a device's search and a gateway's first answer, from process start."""

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
from PIL import Image

from bench import data
from bench.commands import command, edge
from bench.galleries import put
from bench.harness import Bench, Contender, Row, Table, interleave
from bench.published import INNER, SIZE, Publication, publication
from bench.serving import by_image, copy_filled
from demo import serve
from demo.children import Children
from nobackfill.gallery.store import Store
from nobackfill.v1 import release_pb2, release_pb2_grpc, search_pb2, search_pb2_grpc

DEVICE = (
    "Seconds of whole commands; `python` is an interpreter that imports numpy and onnxruntime and "
    "ends, below which no search by image can come."
)
GATEWAY = (
    "Seconds from process start to the first answer, with Triton, one start each: to ListReleases "
    "that a release is active, where nothing was ever served; and to Search by image, of a gallery "
    "whose index file is good, and of one whose index file is gone."
)
# gRPC's own pauses between attempts to connect, 1 s and more, would be most of what is measured.
IMPATIENT = [
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.min_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 20),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


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
            "spread": figures.spread_text,
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
    request = search_pb2.SearchRequest.FromString(by_image([image])[0])

    def searched(channel: grpc.Channel) -> bool:
        return bool(search_pb2_grpc.SearchServiceStub(channel).Search(request, timeout=60).hits)

    def active(channel: grpc.Channel) -> bool:
        answer = release_pb2_grpc.ReleaseServiceStub(channel).ListReleases(
            release_pb2.ListReleasesRequest(), timeout=60
        )
        return any(r.state == release_pb2.RELEASE_STATE_ACTIVE for r in answer.releases)

    first = _until(active, folder / "first", pair.repo)
    copy_filled(bench, pair, size, folder)
    warm = _until(searched, folder, pair.repo)
    for index in (folder / "data").rglob("*.hnsw"):
        index.unlink()
    cold = _until(searched, folder, pair.repo)
    rows: list[Row] = [
        {"start": "very first, a release is active", "seconds": first},
        {"start": f"{size:,} items, index file good", "seconds": warm},
        {"start": f"{size:,} items, index file gone", "seconds": cold},
    ]
    return Table("gateway", rows, GATEWAY)


def _until(answered: Callable[[grpc.Channel], bool], folder: Path, repo: Path) -> float:
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
        with grpc.insecure_channel(addresses[0], options=IMPATIENT) as channel:
            while child.process.poll() is None:
                with contextlib.suppress(grpc.RpcError):
                    if answered(channel):
                        return time.perf_counter() - started
                time.sleep(0.02)
        raise child.failure()
