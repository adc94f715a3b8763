"""A deleted item is gone from the cached index, too."""

from pathlib import Path

import numpy as np
import pytest

from nobackfill.v1 import gallery_pb2, types_pb2
from server.galleries import indexing
from tests.server.support import TIMEOUT_S, Client, running
from tests.support import graphs
from tests.support.blocks import manifest
from tests.support.waiting import wait_until

COUNT = indexing.SMALL + 100


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


def test_a_deleted_vector_leaves_the_index_file(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing, "_SETTLED_S", 0.2)
    data, space, vectors = tmp_path / "data", manifest(repo, 1).space, unit_vectors()
    with running(repo, data) as gateway, Client(gateway.address) as client:
        client.create()
        items = [
            gallery_pb2.PutItem(
                id=f"i{row}",
                vectors=gallery_pb2.Vectors(
                    embedding=types_pb2.Embedding(space=space, values=values)
                ),
            )
            for row, values in enumerate(vectors)
        ]
        client.put(items)
        wait_for(data, "*.hnsw")
        assert any(name.endswith(".hnsw") for name in files_with(data, vectors[7]))
        request = gallery_pb2.DeleteItemsRequest(gallery="g", ids=["i7"])
        assert client.galleries.DeleteItems(request, timeout=TIMEOUT_S).deleted == 1
        assert files_with(data, vectors[7]) == []
        # The file comes back without it.
        wait_for(data, "*.hnsw")
        assert files_with(data, vectors[7]) == []
        assert any(name.endswith(".hnsw") for name in files_with(data, vectors[8]))
    assert files_with(data, vectors[7]) == []
