"""Trials of releases: whatever its models do to a process, they do it to a child."""

import contextlib
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from nobackfill.errors import VerificationError
from nobackfill.release import manifest, trial
from nobackfill.release.manifest import release_space_id
from nobackfill.release.models import CHUNK_ROWS, open_upgrade
from nobackfill.release.publishing.draft import Draft, describe_file
from nobackfill.release.trial import try_release
from tests.release.crafted import smallest_by_minus_one
from tests.support import graphs
from tests.support.releases import draft, published
from tests.support.trials import forked, started

# The child without the rules: what onnxruntime does with a graph that passes them.
NO_RULES = (
    "import nobackfill.release.probes as rules\n"
    "rules.check_release = lambda files, manifest: None\n"
    "import nobackfill.release.trial as trial; trial.main()"
)


@pytest.fixture(autouse=True)
def _started() -> Iterator[None]:
    with started():
        yield


@pytest.fixture
def first(tmp_path: Path) -> Draft:
    return draft(tmp_path, 1)


@pytest.fixture
def no_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_COMMAND", [sys.executable, "-c", NO_RULES])


def trials() -> list[Path]:
    """Trials that this process has begun and that have not ended."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            if (
                int(parent) == os.getpid()
                and b"nobackfill.release.trial" in (process / "cmdline").read_bytes()
            ):
                found.append(process)
    return found


def with_embedder(made: Draft, change: Callable[[onnx.ModelProto], None]) -> Draft:
    """The same release, validly described, with another embedder."""
    path = manifest.embedder_path(1)
    model = onnx.load(made.local_files[path])
    change(model)
    graphs.save(model, made.local_files[path])
    folder = made.local_files[path].parents[2]
    embedder = made.manifest.embedder.model_copy(update={"file": published(folder, path)})
    update = {"embedder": embedder, "space": release_space_id(embedder)}
    return replace(made, manifest=made.manifest.model_copy(update=update))


def tried(made: Draft) -> None:
    try_release(made.local_files, made.manifest)


def filled(elements: int) -> Callable[[onnx.ModelProto], None]:
    """Adds constants of so many elements to an output that is added to the embedding."""

    def change(model: onnx.ModelProto) -> None:
        shape = numpy_helper.from_array(np.array([elements], np.int64), "filling")
        model.graph.initializer.append(shape)
        last = model.graph.node[-1]
        wanted, last.output[0] = last.output[0], "unfilled"
        model.graph.node.extend(
            [
                helper.make_node("ConstantOfShape", ["filling"], ["filler"]),
                helper.make_node("ReduceSum", ["filler"], ["nothing"], keepdims=0),
                helper.make_node("Add", ["unfilled", "nothing"], [wanted]),
            ]
        )

    return change


@pytest.mark.slow
def test_a_good_release_passes_and_costs_this_process_nothing(first: Draft) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try_release(first.local_files, first.manifest)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def with_upgrade(tmp_path: Path, change: Callable[[onnx.ModelProto], None]) -> Draft:
    """Release 2 with an upgrade from 1, validly described, that computes something else as well."""
    made = draft(tmp_path, 2, [draft(tmp_path, 1).manifest])
    path = manifest.upgrade_path(1, 2)
    model = onnx.load(made.local_files[path])
    change(model)
    graphs.save(model, made.local_files[path])
    folder = made.local_files[path].parents[2]
    (upgrade,) = made.manifest.upgrades
    upgrades = (upgrade.model_copy(update={"file": published(folder, path)}),)
    return replace(made, manifest=made.manifest.model_copy(update={"upgrades": upgrades}))


def wide(model: onnx.ModelProto) -> None:
    """64 MiB for each row, which the rules allow: 512 MiB for 8 probes, 64 GiB for a chunk."""
    times = numpy_helper.from_array(np.array([1, 2**24], np.int64), "times")
    zero = numpy_helper.from_array(np.array(0, np.float32), "zero")
    row = numpy_helper.from_array(np.array([1], np.int64), "row")
    model.graph.initializer.extend([times, zero, row])
    last = next(node for node in model.graph.node if "upgraded" in node.output)
    last.output[0] = "before"
    model.graph.node.extend(
        [
            helper.make_node("ReduceSum", ["before", "row"], ["sum"], keepdims=1),
            helper.make_node("Tile", ["sum", "times"], ["wide"]),
            helper.make_node("ReduceMax", ["wide", "row"], ["most"], keepdims=1),
            helper.make_node("Mul", ["most", "zero"], ["nothing"]),
            helper.make_node("Add", ["before", "nothing"], ["upgraded"]),
        ]
    )


@pytest.mark.slow
def test_an_upgrade_is_tried_on_a_full_chunk(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match=r"upgrade_1_to_2.*cannot run this model"):
        tried(with_upgrade(tmp_path, wide))


def test_arithmetic_on_denormals_takes_no_longer(tmp_path: Path) -> None:
    """A chain of products of numbers that are too small to be normal ones."""

    def chain(model: onnx.ModelProto) -> None:
        square = np.random.default_rng(0).standard_normal((graphs.DIM,) * 2, np.float32) / 8
        # The squares of small numbers are in all blocks but the first.
        small = square.copy()
        small[: graphs.BLOCK] = 0
        for name, value in (("small", small), ("square", square)):
            model.graph.initializer.append(numpy_helper.from_array(value, name))
        last = next(node for node in model.graph.node if "upgraded" in node.output)
        last.output[0] = "before"
        nodes = [
            helper.make_node("Mul", ["embedding", "embedding"], ["squared"]),
            helper.make_node("MatMul", ["squared", "small"], ["x0"]),
            *(helper.make_node("MatMul", [f"x{n}", "square"], [f"x{n + 1}"]) for n in range(100)),
            helper.make_node("Add", ["before", "x100"], ["upgraded"]),
        ]
        model.graph.node.extend(nodes)

    made = with_upgrade(tmp_path, chain)
    (upgrade,) = made.manifest.upgrades
    model = open_upgrade(made.local_files, made.manifest, upgrade)
    vectors = graphs.into_block(np.eye(graphs.BLOCK, dtype=np.float32), 1)
    side = np.ones((CHUNK_ROWS, upgrade.from_side_dim), np.float32)

    def seconds(least: float) -> float:
        embedding = np.resize(np.maximum(vectors, np.float32(least)), (CHUNK_ROWS, graphs.DIM))
        began = time.process_time()
        model.run(embedding, side)
        return time.process_time() - began

    seconds(0)
    # As denormals they take 300 times as long.
    assert seconds(1e-20) < 30 * max(seconds(0), 0.01)
    smallest = np.float32(1e-38) * np.float32(0.1)
    assert smallest > 0, "the calling thread computes as before"


def shift(model: onnx.ModelProto) -> None:
    """It embeds otherwise than its probes say."""
    middle = next(t for t in model.graph.initializer if t.name == "middle")
    middle.CopyFrom(numpy_helper.from_array(np.array(0.9, np.float32), "middle"))


@pytest.mark.slow
def test_the_child_runs_rules_and_probes(first: Draft) -> None:
    with pytest.raises(VerificationError, match=r"golden probe embedding: .* differ"):
        tried(with_embedder(first, shift))
    with pytest.raises(VerificationError, match=r"embedder_1/1/model.onnx: .*not known to be"):
        tried(with_embedder(first, smallest_by_minus_one))


@pytest.mark.slow
def test_files_of_the_folder_at_hand_are_none_of_its_modules(
    first: Draft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "downloads"
    here.mkdir()
    for name in ("json", "onnx"):
        (here / f"{name}.py").write_text(f"open({str(here / 'ran')!r}, 'w'); 1 / 0")
    monkeypatch.chdir(here)
    try_release(first.local_files, first.manifest)
    assert not (here / "ran").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("no_rules")
def test_a_graph_that_kills_its_loader_is_refused_with_the_signal(first: Draft) -> None:
    def bomb(model: onnx.ModelProto) -> None:
        smallest_by_minus_one(model)
        # Used, so that it is folded and not left out.
        model.graph.node.append(helper.make_node("Cast", ["unused"], ["number"], to=1))
        last = next(node for node in model.graph.node if "embedding" in node.output)
        last.output[0] = "before"
        model.graph.node.append(helper.make_node("Add", ["before", "number"], ["embedding"]))

    with pytest.raises(VerificationError, match="SIGFPE"):
        tried(with_embedder(first, bomb))


@pytest.mark.slow
@pytest.mark.usefixtures("no_rules")
def test_memory_is_limited(first: Draft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MEMORY_BYTES", 2**30)
    with pytest.raises(VerificationError, match=r"memory|bad allocation|bad_alloc|allocate"):
        tried(with_embedder(first, filled(2**30)))


@pytest.mark.slow
def test_the_forked_children_of_other_rooms_are_tried_alike(
    first: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    with forked():
        monkeypatch.chdir(next(iter(first.local_files.values())).parent)
        tried(first)
        here = {path: Path(os.path.relpath(file)) for path, file in first.local_files.items()}
        tried(replace(first, local_files=here))
        with pytest.raises(VerificationError, match=r"golden probe embedding: .* differ"):
            tried(with_embedder(first, shift))
        monkeypatch.setattr(trial, "MEMORY_BYTES", 2**20)
        with pytest.raises(VerificationError, match=r"memory|bad allocation|bad_alloc|allocate"):
            tried(first)


@pytest.mark.slow
def test_time_is_limited(first: Draft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "WALL_SECONDS", 0.01)
    with pytest.raises(VerificationError, match="took more than"):
        try_release(first.local_files, first.manifest)


@pytest.mark.slow
def test_who_no_longer_wants_the_answer_ends_the_child(first: Draft) -> None:
    class EnoughError(Exception):
        pass

    def enough() -> None:
        raise EnoughError

    with pytest.raises(EnoughError):
        try_release(first.local_files, first.manifest, poll=enough)
    assert trials() == []


@pytest.mark.long
@pytest.mark.slow
def test_probes_that_unpack_to_more_than_they_may_are_refused(first: Draft) -> None:
    path = manifest.probes_path(1)
    target = first.local_files[path]
    np.savez_compressed(target, image=np.zeros((2**17, graphs.SIZE, graphs.SIZE, 64), np.uint8))
    assert target.stat().st_size < 2**20
    probes = first.manifest.probes.model_copy(update={"file": describe_file(path, target)})
    with pytest.raises(VerificationError, match="at most"):
        try_release(first.local_files, first.manifest.model_copy(update={"probes": probes}))
