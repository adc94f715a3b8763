"""Without a compiler the package hnswlib has the graphs: the same links, files and answers."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from nobackfill.gallery.search import graph_file, hnsw, view
from nobackfill.gallery.search.package_graph import PackageGraph
from nobackfill.gallery.spec import Metric
from nobackfill.vectors import Vectors
from tests.gallery.making import DIM, spec

pytestmark = pytest.mark.skipif(
    view.parse_search_request is None,
    reason="nothing was compiled: there is nothing to compare with",
)
COUNT = 2000
LABELS = np.arange(COUNT) * 2 + 5


def whole_numbers(count: int, seed: int) -> Vectors:
    """Their distances are exact, however they are summed."""
    return np.random.default_rng(seed).integers(-9, 10, (count, DIM)).astype(np.float32)


@contextmanager
def the_package() -> Iterator[None]:
    """As where nothing was compiled."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (hnsw, graph_file):
            patch.setattr(module, "Hnsw", PackageGraph)
        yield


@pytest.fixture(autouse=True)
def always_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hnsw, "_GRAPH_QUERY", 0)
    monkeypatch.setattr(hnsw, "_GRAPH_CANDIDATE", 0)


def same(a: hnsw.HnswIndex, b: hnsw.HnswIndex) -> None:
    ours, theirs = a.skeleton(), b.skeleton()
    assert dict(ours.links.parameters) == dict(theirs.links.parameters)
    for name in ("ground_links", "upper_level_counts", "upper_links"):
        np.testing.assert_array_equal(getattr(ours.links, name), getattr(theirs.links, name))
    np.testing.assert_array_equal(ours.row_hashes, theirs.row_hashes)
    np.testing.assert_array_equal(ours.element_rows, theirs.element_rows)
    np.testing.assert_array_equal(a.vectors[:], b.vectors[:])
    assert (a.ef, a.links_fit_space) == (b.ef, b.links_fit_space)
    queries = whole_numbers(20, 7)
    for allowed in (None, np.arange(len(a.labels)) % 3 == 0):
        found, expected = a.search(queries, 10, allowed), b.search(queries, 10, allowed)
        np.testing.assert_array_equal(found.labels, expected.labels)
        np.testing.assert_array_equal(found.distances, expected.distances)


def test_the_package_builds_the_same_graph() -> None:
    content = whole_numbers(COUNT, 1)
    ours = hnsw.build_index(spec(), LABELS, content)
    with the_package():
        theirs = hnsw.build_index(spec(), LABELS, content)
    assert isinstance(theirs.graph, PackageGraph) and not isinstance(ours.graph, PackageGraph)
    assert theirs.compiled is None and ours.compiled is not None
    same(ours, theirs)


@pytest.mark.parametrize("metric", ["squared_l2", "cosine"])
def test_either_opens_what_the_other_wrote(metric: Metric, tmp_path: Path) -> None:
    own, content = spec(metric=metric), whole_numbers(COUNT, 1)
    path, kept = tmp_path / "index", np.flatnonzero(np.arange(COUNT) % 9)
    hnsw.build_index(own, LABELS, content).save(path)
    ours, _ = hnsw.load_index(path, own, LABELS[kept], content[kept])
    with the_package():
        theirs, _ = hnsw.load_index(path, own, LABELS[kept], content[kept])
        assert isinstance(theirs.graph, PackageGraph)
        theirs.save(tmp_path / "theirs")
    ours.save(tmp_path / "ours")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    again, _ = hnsw.load_index(tmp_path / "theirs", own, LABELS[kept], content[kept])
    if metric == "squared_l2":
        same(ours, theirs)
        same(again, theirs)


def test_the_package_carries_a_graph_alike() -> None:
    content = whole_numbers(COUNT, 1)
    labels = np.sort(np.concatenate([LABELS[100:], LABELS[:90] + 1]))
    now = whole_numbers(len(labels), 2)
    now[np.isin(labels, LABELS)] = content[100:]
    ours = hnsw.transfer_index(hnsw.build_index(spec(), LABELS, content), spec(), labels, now)
    with the_package():
        theirs = hnsw.transfer_index(hnsw.build_index(spec(), LABELS, content), spec(), labels, now)
    same(ours, theirs)


@pytest.mark.slow
def test_a_process_without_compiled_code_says_so_and_searches() -> None:
    script = (
        "import sys\n"
        "sys.modules['nobackfill.gallery.search._native'] = None\n"
        "import numpy as np\n"
        "from nobackfill.gallery.search import hnsw, view\n"
        "from tests.gallery.making import spec, vectors\n"
        "content = vectors(3000, 1)\n"
        "snapshot = view.new_snapshot(spec(), hnsw.build_index(spec(), np.arange(3000), content))\n"
        "assert snapshot.compiled is None and view.parse_search_request is None\n"
        "print(snapshot.search(content[:9], 1).labels[:, 0].tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == str(list(range(9))).split()
    assert "compiled search is missing" in done.stderr and "compiler" in done.stderr
