"""Servers and their load as child processes: the gateway, echoes, closed loops of clients."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench import data
from bench.harness import Bench
from bench.loaded import processor_seconds
from bench.published import Publication
from demo import gateway, serve
from demo.children import Children
from nobackfill.release.models import open_embedder, open_side_encoder
from nobackfill.v1 import gallery_pb2, search_pb2, types_pb2
from nobackfill.vectors import Vectors

HERE = Path(__file__).parent
GALLERY = "bench"
# Pictures embedded at a time.
PICTURES = 500


@dataclass(frozen=True)
class Gateway:
    """A running `gateway serve`."""

    address: str
    process: int

    def cpu_seconds(self) -> float:
        """Processor time that it has used so far."""
        return processor_seconds(self.process)

    def resident_mib(self) -> float:
        """Memory it holds now, without its Triton."""
        return _status_mib(self.process, "VmRSS")

    def peak_mib(self) -> float:
        """The most memory it has held so far, without its Triton."""
        return _status_mib(self.process, "VmHWM")

    def triton_mib(self) -> float:
        """Memory that its Triton and its models' processes hold now."""
        return sum(_status_mib(process, "VmRSS") for process in _below(self.process))

    def settle(self) -> None:
        """Wait until galleries have their graphs, and it does next to nothing: until searches cost
        what they will. Processor time alone would not tell: on a busy machine a graph, which is
        made at a low priority, stands still for seconds."""
        with gateway.connect(self.address) as connection:
            while any(
                space.index.due for one in connection.list_galleries() for space in one.spaces
            ):
                time.sleep(0.5)
        quiet = 0
        while quiet < 4:
            before = self.cpu_seconds()
            time.sleep(0.5)
            quiet = quiet + 1 if self.cpu_seconds() - before < 0.05 else 0


def _status_mib(process: int, field: str) -> float:
    """0 for one that has ended and is not yet waited for: it has no such line."""
    lines = Path("/proc", str(process), "status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(field)), 0) / 1024


def _below(process: int) -> list[int]:
    """The processes that it started, and that these started."""
    tasks = Path("/proc", str(process), "task").glob("*/children")
    children = [int(pid) for task in tasks for pid in task.read_text().split()]
    return children + [below for child in children for below in _below(child)]


@contextmanager
def run_gateway(folder: Path, repo: Path, triton: str | None = None) -> Iterator[Gateway]:
    """`gateway serve` over a publication, with its own Triton or that at an address."""
    addresses = serve.free_addresses(2)
    with Children(folder / "logs") as children, ExitStack() as stack:
        if triton is not None:
            os.environ["NOBACKFILL_TRITON"] = triton
            stack.callback(os.environ.pop, "NOBACKFILL_TRITON")
        child = serve.start_gateway(children, repo, folder / "data", addresses)
        yield Gateway(addresses[0], child.process.pid)


def copy_filled(
    bench: Bench, pair: Publication, size: int, folder: Path, pictures: int | None = None
) -> None:
    """Bring `serving` of `folder` a gallery of so many vectors of release 2, with its graph:
    bench.data's things or, as release 2 embeds them, `pictures` of so many pixels a side.

    It is filled once for all topics.
    """
    kind = "" if pictures is None else "-pictures"
    made = bench.shared / f"gateway-{pair.folder.name}-{size}{kind}"
    if not (made / "done").exists():
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        manifest = pair.manifests[2]
        if pictures is None:
            items = data.draw_items(size)
            new, side = items.new, items.side
        else:
            new, side = _embedded(pair, size, pictures)
        assert manifest.side_space is not None
        with run_gateway(made, pair.repo) as gateway:
            fill_gallery(gateway.address, manifest.space, manifest.side_space, new, side)
            gateway.settle()
        (made / "done").touch()
    shutil.copytree(made / "data", folder / "data")


def _embedded(pair: Publication, count: int, side: int) -> tuple[Vectors, Vectors]:
    """Of so many pictures, what release 2 makes: embeddings, and side-information."""
    manifest = pair.manifests[2]
    embedder = open_embedder(pair.repo, manifest)
    encoder = open_side_encoder(pair.repo, manifest)
    parts = []
    for seed, start in enumerate(range(0, count, PICTURES), start=100):
        pixels = data.draw_images(min(PICTURES, count - start), side, seed)
        parts.append((embedder.run(pixels), encoder.run(pixels)))
    embeddings, sides = zip(*parts, strict=True)
    return np.concatenate(embeddings), np.concatenate(sides)


@contextmanager
def run_echo(kind: str, answer: int) -> Iterator[tuple[str, int]]:
    """bench/echo.py, `aio` or `sync`, with answers of so many bytes; its address and process."""
    command = [sys.executable, str(HERE / "echo.py"), kind, str(answer)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"127.0.0.1:{int(process.stdout.readline())}", process.pid
        finally:
            process.kill()


def fill_gallery(
    address: str, space: str, side_space: str, vectors: Vectors, side: Vectors
) -> None:
    """Make gallery `bench` and put items by embedding and side-information."""

    items = (
        gallery_pb2.PutItem(
            id=f"item-{row}",
            vectors=gallery_pb2.Vectors(
                embedding=types_pb2.Embedding(space=space, values=vectors[row].tobytes()),
                side_info=types_pb2.SideInfo(space=side_space, values=side[row].tobytes()),
            ),
        )
        for row in range(len(vectors))
    )
    with gateway.connect(address) as connection:
        gateway.create_gallery(connection, GALLERY)
        refused = connection.put_items(GALLERY, items)
        assert not refused, next(iter(refused.items()))


def embedding_requests(space: str, queries: Vectors, k: int = 10) -> list[bytes]:
    """Search requests as bytes."""
    return [
        search_pb2.SearchRequest(
            gallery=GALLERY,
            query=search_pb2.Query(
                embeddings=search_pb2.Embeddings(
                    embeddings=[types_pb2.Embedding(space=space, values=query.tobytes())]
                )
            ),
            k=k,
        ).SerializeToString()
        for query in queries
    ]


def image_requests(images: Sequence[bytes], k: int = 10) -> list[bytes]:
    """Search requests as bytes."""
    return [
        search_pb2.SearchRequest(
            gallery=GALLERY, query=search_pb2.Query(image=image), k=k
        ).SerializeToString()
        for image in images
    ]
