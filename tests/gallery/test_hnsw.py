"""Graphs: built, saved, loaded, carried to other vectors, renewed the cheapest way."""

import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nobackfill.durable import FAULT_INJECTOR
from nobackfill.errors import CannotWriteError, NotFoundError, VerificationError
from nobackfill.gallery.search import graph_file, hnsw
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.index import Labels, prepare_vectors
from nobackfill.gallery.spec import Metric, SpaceSpec
from nobackfill.vectors import Vectors
from tests.gallery.making import DIM, spec, vectors

COUNT = 3000
LABELS = np.arange(COUNT, dtype=np.int64) * 2 + 5


@pytest.fixture(autouse=True)
def always_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hnsw, "_GRAPH_QUERY", 0)
    monkeypatch.setattr(hnsw, "_GRAPH_CANDIDATE", 0)


def rotated(content: Vectors, to_dim: int = DIM) -> Vectors:
    """As an upgrade: most neighbours stay."""
    rng = np.random.default_rng(3)
    turn = np.linalg.qr(rng.standard_normal((max(to_dim, DIM), max(to_dim, DIM))))[0]
    noise = 0.05 * rng.standard_normal((len(content), to_dim))
    return np.asarray(content @ turn[:DIM, :to_dim] + noise, np.float32)


def found_share(index: hnsw.HnswIndex, content: Vectors, labels: Labels) -> float:
    """Recall at 10 against exact search, by label."""
    queries = content[::30] + np.float32(0.01)
    true = ExactIndex(index.spec, labels, content).search(queries, 10).labels
    found = index.search(queries, 10).labels
    return float((found[:, :, None] == true[:, None, :]).any(axis=1).mean())


@pytest.fixture(scope="module")
def old() -> hnsw.HnswIndex:
    return hnsw.build_index(spec(), LABELS, vectors(COUNT, 1))


@pytest.mark.parametrize("to_dim", [DIM, DIM + 7, DIM - 4])
def test_a_graph_serves_the_vectors_after_an_upgrade(old: hnsw.HnswIndex, to_dim: int) -> None:
    target = spec(2, dim=to_dim)
    content = rotated(np.asarray(old.vectors), to_dim)
    before = old.search(old.vectors[:20], 5)
    new = hnsw.transfer_index(old, target, LABELS, content)
    assert not new.links_fit_space and new.spec == target
    np.testing.assert_array_equal(new.vectors, content)
    assert found_share(new, content, LABELS) >= 0.98
    # The old one serves on, unchanged.
    np.testing.assert_array_equal(old.search(old.vectors[:20], 5).labels, before.labels)


def test_carrying_leaves_out_what_has_no_vector_and_adds_what_is_new(old: hnsw.HnswIndex) -> None:
    rng = np.random.default_rng(1)
    kept = np.sort(rng.permutation(COUNT)[: COUNT - 200])
    added = LABELS[rng.permutation(COUNT)[:100]] + 1
    labels = np.sort(np.concatenate([LABELS[kept], added]))
    content = np.empty((len(labels), DIM), np.float32)
    content[np.isin(labels, LABELS)] = rotated(np.asarray(old.vectors))[kept]
    content[~np.isin(labels, LABELS)] = vectors(100, 9)
    new = hnsw.transfer_index(old, spec(2), labels, content)
    everything = new.search(content[:50], 60).labels
    assert set(everything.ravel()) <= set(labels)
    assert found_share(new, content, labels) >= 0.98
    again = hnsw.transfer_index(new, spec(3), labels[::2], rotated(content)[::2])
    assert set(again.search(content[:50], 60).labels.ravel()) <= set(labels[::2])


def test_within_a_space_a_replaced_vector_moves(old: hnsw.HnswIndex) -> None:
    content = np.asarray(old.vectors).copy()
    content[100:110] = 30 + vectors(10, 5)
    new = hnsw.transfer_index(old, spec(), LABELS, content)
    assert new.links_fit_space
    assert (new.search(content[100:110], 1).labels[:, 0] == LABELS[100:110]).all()
    assert found_share(new, content, LABELS) >= 0.98


def test_what_is_gone_is_forgotten_by_the_memory(old: hnsw.HnswIndex) -> None:
    new = hnsw.transfer_index(old, spec(), LABELS[1:], old.vectors[1:])
    memory = new.graph.records.tobytes()
    assert old.vectors[0].tobytes() not in memory
    assert old.vectors[1].tobytes() in memory
    assert len(new.labels) == COUNT - 1 and len(new.graph) == COUNT


@pytest.mark.slow
def test_an_unrelated_space_is_built_afresh(old: hnsw.HnswIndex) -> None:
    rng = np.random.default_rng(8)
    content = rng.standard_normal((COUNT, 64)).astype(np.float32)
    with pytest.raises(VerificationError, match="build a new index"):
        hnsw.transfer_index(old, spec(2, dim=64), LABELS, content)
    assert hnsw.renew_index(spec(2, dim=64), LABELS, content, old=old).links_fit_space
    with pytest.raises(VerificationError, match="metric"):
        hnsw.transfer_index(old, spec(2, metric="cosine"), LABELS, old.vectors)


def test_renewing_takes_the_cheapest_good_way(old: hnsw.HnswIndex) -> None:
    assert hnsw.renew_index(spec(), LABELS, old.vectors, old=old) is old
    fresh = hnsw.renew_index(spec(), LABELS[:500], old.vectors[:500], old=old)
    assert len(fresh.graph) == 500
    carried = hnsw.renew_index(spec(), LABELS[50:], old.vectors[50:], old=old)
    assert len(carried.graph) == COUNT and len(carried.labels) == COUNT - 50
    upgraded = hnsw.renew_index(spec(2), LABELS, rotated(np.asarray(old.vectors)), old=old)
    assert not upgraded.links_fit_space


def test_a_file_gives_the_same_answers(old: hnsw.HnswIndex, tmp_path: Path) -> None:
    path = tmp_path / "index"
    for index in (
        old,
        hnsw.transfer_index(old, spec(2), LABELS[9:], rotated(np.asarray(old.vectors))[9:]),
    ):
        index.save(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        loaded, rest = hnsw.load_index(path, index.spec, index.labels, index.vectors)
        assert not len(rest)
        np.testing.assert_array_equal(loaded.labels, index.labels)
        np.testing.assert_array_equal(loaded.vectors, index.vectors)
        assert (loaded.links_fit_space, loaded.ef) == (index.links_fit_space, index.ef)
        queries = vectors(50, 4)
        mask = np.arange(len(index.labels)) % 3 == 0
        for allowed in (None, mask):
            np.testing.assert_array_equal(
                loaded.search(queries, 10, allowed).labels,
                index.search(queries, 10, allowed).labels,
            )
    assert [p.name for p in tmp_path.iterdir()] == ["index"]
    with pytest.raises(NotFoundError):
        hnsw.load_index(tmp_path / "nothing", spec(), LABELS, old.vectors)
    with pytest.raises(VerificationError):
        hnsw.load_index(tmp_path, spec(), LABELS, old.vectors)


def test_a_file_outlives_churn_and_holds_no_vector(old: hnsw.HnswIndex, tmp_path: Path) -> None:
    """What was deleted is passed through, what came or was replaced is told; nothing is built."""
    path = tmp_path / "index"
    old.save(path)
    content = np.asarray(old.vectors)
    assert not any(row.tobytes()[:16] in path.read_bytes() for row in content[:50])
    assert path.stat().st_size < 0.6 * content.nbytes + 160 * COUNT
    kept = np.flatnonzero(np.arange(COUNT) % 8)
    labels = np.concatenate([LABELS[kept], LABELS[-1] + 1 + np.arange(40)])
    now = np.concatenate([content[kept], vectors(40, 6)])
    now[7] = 40 + vectors(1, 8)
    loaded, rest = hnsw.load_index(path, spec(), labels, now)
    assert rest.tolist() == [7, *range(len(kept), len(labels))]
    there = np.delete(np.arange(len(labels)), rest)
    np.testing.assert_array_equal(loaded.labels, labels[there])
    np.testing.assert_array_equal(loaded.vectors, now[there])
    assert loaded.links_fit_space and found_share(loaded, now[there], labels[there]) >= 0.98
    with pytest.raises(VerificationError, match="changed"):
        hnsw.load_index(path, spec(), labels[::2], now[::2])


@pytest.mark.parametrize("metric", ["squared_l2", "cosine"])
@pytest.mark.parametrize("threads", [1, 2])
def test_vectors_are_held_once_in_the_graphs_memory(metric: Metric, threads: int) -> None:
    content, target = vectors(COUNT, 1), spec(metric=metric)
    index = hnsw.build_index(target, LABELS, content, count_threads=lambda: threads)
    memory = graph_file.graph_vectors(index.graph)
    assert memory.base is not None and not memory.flags.owndata
    np.testing.assert_array_equal(index.vectors, prepare_vectors(metric, content))
    queries, mask = vectors(9, 3), np.arange(COUNT) % 5 == 0
    oracle = ExactIndex(target, LABELS, content)
    for allowed in (None, mask):
        np.testing.assert_array_equal(
            index.search_exactly(queries, 7, allowed).labels,
            oracle.search(queries, 7, allowed).labels,
        )
    # The memory lives for as long as anybody looks at it.
    want = memory[5].copy()
    del index
    np.testing.assert_array_equal(memory[5], want)


def test_a_file_that_cannot_be_written_is_said_and_the_old_one_stays(
    old: hnsw.HnswIndex, tmp_path: Path
) -> None:
    path = tmp_path / "index"
    old.save(path)
    before = path.read_bytes()
    new = hnsw.transfer_index(old, spec(), LABELS[1:], old.vectors[1:])
    for step in range(1, 100):
        FAULT_INJECTOR.arm(f"enospc@{step}")
        try:
            new.save(path)
        except CannotWriteError:
            pass
        else:
            assert not FAULT_INJECTOR.fired
            break
        finally:
            FAULT_INJECTOR.arm(None)
        # Only the last step, after the rename, finds the new one there: whole.
        assert (
            path.read_bytes() == before
            or len(graph_file.read_skeleton(path, spec()).labels) == COUNT - 1
        )
    assert step > 10
    with pytest.raises(CannotWriteError):
        old.save(tmp_path / "no" / "folder")


def test_a_header_says_what_the_file_holds(old: hnsw.HnswIndex, tmp_path: Path) -> None:
    old.save(tmp_path / "index")
    head = (tmp_path / "index").read_bytes()[:2000]
    assert head.startswith(graph_file.MAGIC)
    for word in (f'"space": "{spec().space}"', '"dim": 12', '"count": 3000', '"M": 16', '"last_'):
        assert word.encode() in head


@pytest.mark.slow
def test_searches_go_on_while_a_graph_is_built() -> None:
    """A build holds the interpreter lock for a small part of its time only."""
    content = np.random.default_rng(1).standard_normal((6000, 64)).astype(np.float32)
    target = SpaceSpec("sp-x", 1, 64, "squared_l2", False, None, 0)
    small = ExactIndex(target, np.arange(100), content[:100])
    gaps: list[float] = []
    done = threading.Event()

    def search() -> None:
        last = time.perf_counter()
        while not done.is_set():
            small.search(content[:1], 1)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    reader = threading.Thread(target=search)
    reader.start()
    started = time.perf_counter()
    hnsw.build_index(target, np.arange(6000), content)
    whole = time.perf_counter() - started
    done.set()
    reader.join()
    assert max(gaps) < 0.5 * whole and len(gaps) > 50


def test_a_filter_that_the_graph_cannot_reach_is_answered_exactly(old: hnsw.HnswIndex) -> None:
    """Allowed rows far from the query: none of the candidates passes."""
    content = np.asarray(old.vectors)
    far = np.argsort(((content - content[0]) ** 2).sum(axis=1))[-200:]
    mask = np.zeros(COUNT, np.bool_)
    mask[far] = True
    found = old.search(old.vectors[:1], 10, mask)
    true = ExactIndex(spec(), LABELS, old.vectors).search(old.vectors[:1], 10, mask)
    np.testing.assert_array_equal(found.labels, true.labels)


class GivenUpError(Exception):
    """Raised between two pieces."""


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [True, False])
def test_making_a_graph_can_be_given_up_within_a_piece(fresh: bool) -> None:
    """Also where rows are added to a graph that is carried, and between the probes of its ef."""
    content = vectors(COUNT, 1)
    part = np.flatnonzero(np.arange(COUNT) % 4)
    before = hnsw.build_index(spec(), LABELS[part], content[part])
    new_rows = COUNT if fresh else COUNT - len(part)
    for allowed in (0, 1, new_rows // hnsw.PIECE_ROWS):
        calls = iter(range(allowed))

        def between(calls: Iterator[int] = calls) -> None:
            if next(calls, None) is None:
                raise GivenUpError

        with pytest.raises(GivenUpError):
            if fresh:
                hnsw.build_index(spec(), LABELS, content, after_piece=between)
            else:
                hnsw.transfer_index(before, spec(), LABELS, content, after_piece=between)


def test_a_graph_is_built_where_no_thread_can_be_had() -> None:
    pytest.importorskip("nobackfill.gallery.search._native")
    script = """
import resource
from pathlib import Path
import numpy as np
from nobackfill.gallery.search._native import Hnsw
rows = np.random.default_rng(0).standard_normal((500, 8), np.float32)
graph = Hnsw("l2", 8, 500, 16, 100)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
# Less than a thread's stack.
resource.setrlimit(resource.RLIMIT_AS, (used + (6 << 20), resource.RLIM_INFINITY))
graph.add(rows, np.arange(500), 4)
assert (graph.search(rows, 1)[0][:, 0] == np.arange(500)).mean() > 0.9
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
