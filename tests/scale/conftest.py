"""Everything here is marked `scale`: real clusters and engines, which `make test-scale` starts."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from nobackfill.release.manifest import Manifest
from tests.server.conftest import Stages, stages_of_run
from tests.support.blocks import manifest

# Its modules import it; `make test-scale` brings it, and `make test` has no use for them.
_OF_MILVUS = ["test_milvus.py", "test_milvus_filters.py"]
collect_ignore = [] if find_spec("pymilvus") else _OF_MILVUS


@pytest.fixture(scope="session")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """The publication after release 1, after release 2 with an upgrade from it, and so on."""
    return stages_of_run(tmp_path_factory)


@pytest.fixture(scope="session")
def one(stages: Stages) -> Manifest:
    return manifest(stages[1], 1)


@pytest.fixture(scope="session")
def two(stages: Stages) -> Manifest:
    return manifest(stages[2], 2)


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    """A Ray cluster of two nodes of one processor each, on this machine.

    Who kills one is the last test of its file: adding one in its place has failed on a busy
    machine (Ray gives a new node 30 s).
    """
    with cluster({"num_cpus": 1}, {"num_cpus": 1}) as made:
        yield made


@contextmanager
def cluster(head: Mapping[str, Any], *others: Mapping[str, Any]) -> Iterator[Any]:
    """A Ray cluster on this machine, of nodes as Ray's own tests describe them."""
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed")
    made = cluster_utils.Cluster(
        initialize_head=True, head_node_args={**head, "include_dashboard": False}
    )
    try:
        for other in others:
            made.add_node(**other)
        made.wait_for_nodes()
        yield made
    finally:
        made.shutdown()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.scale)
