"""Indexes over swaps: what was built once is not built again."""

import time
from pathlib import Path

import numpy as np

from gallery import hnsw
from gallery.spec import SpaceSpec
from nobackfill.v1 import gallery_pb2, types_pb2
from release.manifest import Manifest
from tests.server.conftest import Stages, publish_stage
from tests.server.support import TIMEOUT_S, Client, running
from tests.server.test_forgetting import COUNT, unit_vectors
from tests.support import graphs


def put(client: Client, one: Manifest) -> None:
    """COUNT items of release 1, with side-information."""
    sides = np.random.default_rng(4).standard_normal((COUNT, graphs.SIDE_DIM)).astype("<f4")
    client.put(
        gallery_pb2.PutItem(
            id=f"i{row}",
            vectors=gallery_pb2.Vectors(
                embedding=types_pb2.Embedding(space=one.space, values=values),
                side_info=types_pb2.SideInfo(space=one.side_space or "", values=side.tobytes()),
            ),
        )
        for row, (values, side) in enumerate(zip(unit_vectors(), sides, strict=True))
    )


def test_a_release_that_comes_back_brings_its_index(
    repo: Path, tmp_path: Path, stages: Stages, one: Manifest, two: Manifest
) -> None:
    with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
        client.create()
        put(client, one)
        publish_stage(repo, stages[2])
        client.activate(2)
        hosted = gateway.core.galleries.get("g")
        deadline = time.monotonic() + TIMEOUT_S
        while not hnsw.load(hosted.index_path(two.space), SpaceSpec.of(two)).fresh:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        client.rollback(confirm=True)
        assert two.space not in hosted.views()
        client.activate(2)
        index = hosted.view(two.space).snapshot().base.index
        # Built of its own vectors, not inherited once more.
        assert isinstance(index, hnsw.HnswIndex)
        assert index.fresh
