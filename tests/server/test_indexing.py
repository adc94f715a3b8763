"""Indexes: what was built once is not built again, what was left is let go of, and what was put
joins."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nobackfill.errors import PreconditionError
from nobackfill.gallery.search import graph_file, hnsw
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.release.manifest import Manifest
from nobackfill.server.galleries import hosted_file, indexing
from nobackfill.server.galleries.hosted_file import HostedInFile
from nobackfill.server.gateway import GatewayServer
from nobackfill.v1 import gallery_pb2, types_pb2
from tests.server.conftest import Stages, publish_stage
from tests.server.support import Client, in_file, refused
from tests.server.test_forgetting import COUNT, unit_vectors
from tests.support import graphs
from tests.support.waiting import wait_until


def put(client: Client, one: Manifest, first: int = 0, end: int = COUNT, name: str = "g") -> None:
    """Items of release 1, with side-information."""
    sides = np.random.default_rng(4).standard_normal((end, graphs.SIDE_DIM)).astype("<f4")
    items = (
        gallery_pb2.PutItem(
            id=f"i{row}",
            vectors=gallery_pb2.Vectors(
                embedding=types_pb2.Embedding(space=one.space, values=values),
                side_info=types_pb2.SideInfo(space=one.side_space or "", values=side.tobytes()),
            ),
        )
        for row, (values, side) in islice(
            enumerate(zip(unit_vectors(end), sides, strict=True)), first, None
        )
    )
    client.put_items(name, items)


@pytest.fixture
def swapped(
    gateway: GatewayServer, client: Client, repo: Path, stages: Stages, one: Manifest, two: Manifest
) -> HostedInFile:
    """Gallery g, put in release 1 and carried to release 2, with a graph built of its own there."""
    client.create_gallery("g")
    put(client, one)
    publish_stage(repo, stages[2])
    client.swap(2)
    hosted = in_file(gateway)
    path, spec = hosted.index_path(two.space), SpaceSpec.of(two)
    wait_until(
        lambda: path.exists() and graph_file.read_skeleton(path, spec).links_fit_space,
        "no graph of its own",
    )
    return hosted


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No garbage collection: full ones come by counts of objects, whatever megabytes they hold."""
    gc.disable()
    yield
    gc.enable()


def test_a_release_that_comes_back_brings_its_index(
    swapped: HostedInFile, client: Client, two: Manifest
) -> None:
    client.rollback(confirm=True)
    assert two.space not in swapped.views()
    client.swap(2)
    index = swapped.view(two.space).snapshot().base.index
    # Built of its own vectors, not inherited once more.
    assert isinstance(index, hnsw.HnswIndex)
    assert index.links_fit_space


@pytest.mark.usefixtures("uncollected")
def test_a_space_that_was_left_is_let_go_of(
    swapped: HostedInFile, client: Client, two: Manifest
) -> None:
    left = weakref.ref(swapped.view(two.space))
    # From here on the graph has no file: its view waits for quiet times to be written again.
    assert client.delete("g", ["i7"]) == 1
    time.sleep(3 * indexing._POLL_SECONDS)
    client.rollback(confirm=True)
    wait_until(lambda: left() is None, "the view is still there")


def test_a_build_leaves_no_file_of_a_space_that_was_deleted_meanwhile(
    swapped: HostedInFile, one: Manifest, two: Manifest
) -> None:
    """The file stayed as long as the gallery."""
    view = swapped.view(one.space)
    swapped.drop_space(one.space)
    # As a build that ends now.
    swapped.build_index(one.space, view, lambda: None, hnsw.one_thread)
    assert [path.name for path in swapped.folder.glob("*.hnsw")] == [f"{two.space}.hnsw"]


def test_a_gallery_is_indexed_once_there_is_a_thread(
    gateway: GatewayServer, client: Client, one: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as busy for ever."""
    start, asked = threading.Thread.start, threading.Event()

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith("index_"):
            asked.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    client.create_gallery("g")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        put(client, one)
        assert asked.wait(30)
    wait_until(in_file(gateway).index_path(one.space).exists, "no index file")


def test_what_was_put_joins_the_graph_when_puts_end(
    gateway: GatewayServer, client: Client, one: Manifest
) -> None:
    more = indexing._QUIET_DELTA + 100
    # Too few to make the graph anew while puts go on.
    assert more < hosted_file.LARGEST_DELTA
    client.create_gallery("g")
    put(client, one)
    hosted = in_file(gateway)
    wait_until(hosted.index_path(one.space).exists, "no index file")
    put(client, one, COUNT, COUNT + more)
    view = hosted.view(one.space)
    # The graph may have begun before the last of the first items were stored.
    assert len(view.snapshot().delta) >= more
    wait_until(lambda: len(view.snapshot().delta) == 0, "much lies beside the graph")
    base = view.snapshot().base
    assert isinstance(base.index, hnsw.HnswIndex)
    assert len(base) == COUNT + more
    told = client.get_gallery("g").spaces[0].index
    assert (told.in_graph, told.compared, told.delta, told.due) == (COUNT + more, 0, 0, False)


def test_a_rollback_and_the_end_do_not_wait_for_an_index(
    gateway: GatewayServer,
    client: Client,
    repo: Path,
    stages: Stages,
    one: Manifest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both builds under way, the indexing thread's and the activation's, would never end."""
    build, over = hnsw.build_index, threading.Event()

    def endless(*args: Any, **options: Any) -> hnsw.HnswIndex:
        while not over.is_set():
            build(*args, **options)
        return build(*args, **options)

    monkeypatch.setattr(hnsw, "build_index", endless)
    client.create_gallery("g")
    put(client, one)
    publish_stage(repo, stages[2])
    try:
        events = client.begin(2, "cutover")

        def indexing_now() -> bool:
            job = gateway.upgrading.job("g")
            return job is not None and job.state == "indexing"

        wait_until(indexing_now, "the activation makes no index")
        client.rollback(confirm=True)
        with refused(PreconditionError, "was cancelled"):
            list(events)
        assert gateway.state.current.active == 1
        gateway.stop()
    finally:
        over.set()
