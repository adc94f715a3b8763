"""A deleted item is gone from the disk, and the index stays."""

from pathlib import Path

import numpy as np

from nobackfill.gallery.search import hnsw
from nobackfill.server.galleries import hosted_file
from nobackfill.v1 import gallery_pb2, types_pb2
from tests.server.support import Client, in_file, running
from tests.support import graphs
from tests.support.blocks import manifest
from tests.support.waiting import wait_until

COUNT = hosted_file.SMALL_GALLERY + 100


def unit_vectors(count: int = COUNT) -> list[bytes]:
    rng = np.random.default_rng(3)
    content = rng.standard_normal((count, graphs.DIM)).astype(np.float32)
    content /= np.linalg.norm(content, axis=1, keepdims=True)
    return [row.tobytes() for row in content]


def files_with(data: Path, sought: bytes) -> list[str]:
    return [p.name for p in data.rglob("*") if p.is_file() and sought in p.read_bytes()]


def wait_for(data: Path, pattern: str) -> Path:
    wait_until(lambda: list(data.rglob(pattern)), f"no {pattern} in {data}")
    return next(data.rglob(pattern))


def test_no_vector_is_in_the_index_file_which_outlives_deletions(
    repo: Path, tmp_path: Path
) -> None:
    data, space, vectors = tmp_path / "data", manifest(repo, 1).space, unit_vectors()
    with running(repo, data) as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        items = [
            gallery_pb2.PutItem(
                id=f"i{row}",
                vectors=gallery_pb2.Vectors(
                    embedding=types_pb2.Embedding(space=space, values=values)
                ),
            )
            for row, values in enumerate(vectors)
        ]
        client.put_items("g", items)
        index = wait_for(data, "*.hnsw")
        written = index.read_bytes()
        # It is there for the next start, and holds no vector, of whatever item.
        holding = files_with(data, vectors[7])
        assert holding and all(name.startswith("gallery.sqlite") for name in holding)
        assert client.delete("g", ["i7"]) == 1
        assert files_with(data, vectors[7]) == []
        # Deleting leaves the index: a restart needs it.
        assert index.read_bytes() == written
    assert files_with(data, vectors[7]) == []
    with running(repo, data) as gateway:
        snapshot = in_file(gateway).view(space).snapshot()
        assert isinstance(snapshot.base.index, hnsw.HnswIndex)
        # The index may have been written before the last items were put.
        assert len(snapshot.base) >= hosted_file.SMALL_GALLERY - 1
        assert len(snapshot.base) + len(snapshot.delta) == COUNT - 1
    assert files_with(data, vectors[7]) == []
