"""Every durable step of a sync fails once: the gallery is wholly old or wholly new, and answers.

After each failure an offline search works at once, one more sync converges, and nothing stale is
left. The quick set kills at every third step; `make faults` kills at each, and adds torn writes,
I/O errors, full disks, and kills at random moments.
"""

import os
import random
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from nobackfill.client.device import Device
from nobackfill.client.search import Search
from nobackfill.client.sync import SyncOptions, sync
from nobackfill.errors import CannotWriteError
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.store import NewVectors
from nobackfill.release.probes import check_probes
from nobackfill.vectors import Vectors
from tests.support import blocks, edge, graphs, syscalls
from tests.support.crash import KILLED, count_steps, first_of, run_with_fault, sweep

# More than two chunks of an upgrade.
ITEMS = 2_500
# Kinds of failures, and how many steps lie between two of them.
FAULTS = [
    ("kill", 3),
    pytest.param("kill", 1, marks=pytest.mark.faults),
    pytest.param("short", 1, marks=pytest.mark.faults),
    pytest.param("eio", 1, marks=pytest.mark.faults),
    pytest.param("enospc", 1, marks=pytest.mark.faults),
]


@dataclass(frozen=True)
class Bench:
    """A device at release 1 whose publication has gone on to release 2; broken and restored."""

    top: Path
    pristine: Path
    repo: Path
    # Rows of both spaces by item number: what a vector must be in each.
    old: Vectors
    new: Vectors

    @property
    def gallery(self) -> Path:
        return self.top / "gallery.sqlite"

    def restore(self) -> None:
        shutil.rmtree(self.top)
        shutil.copytree(self.pristine, self.top)

    def sync(self) -> None:
        with Device(self.gallery) as device:
            sync(device, SyncOptions(), edge.QUIET)

    def check(self, step: object) -> int:
        """The release that answers now, after proof that every item has its vector there."""
        with Device(self.gallery) as device:
            release = device.store.active().spec.release
            answer = Search(device, {}).by_id("item-7", 1)
            labels, vectors = device.store.load_vectors(device.store.active().spec.space)
            items = device.store.items(labels)
        assert answer.release == release, f"step {step}"
        expected = {1: self.old, 2: self.new}[release]
        rows = [int(item.id.removeprefix("item-")) for item in items if item is not None]
        assert sorted(rows) == list(range(ITEMS)), f"step {step}: items lost or doubled"
        np.testing.assert_allclose(vectors, expected[rows], atol=1e-6, err_msg=f"step {step}")
        with sqlite3.connect(self.gallery) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        connection.close()
        return release

    def check_converged(self, step: object) -> None:
        """One more sync leads to the new release, and leaves nothing of the failure."""
        self.sync()
        assert self.check(step) == 2
        stale = [p.name for p in self.top.rglob("*") if p.name.startswith(".tmp-")]
        stale += [p.name for p in self.top.rglob("*.part")]
        assert stale == [], f"step {step}"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    base = tmp_path_factory.mktemp("sync-sweep")
    world = edge.World(base / "world")
    repo = base / "pub" / "repo"
    world.publish(repo, 1)
    top = base / "top"
    top.mkdir()
    gallery = edge.make_device(repo, top / "gallery.sqlite")
    plain = np.random.default_rng(3).standard_normal((ITEMS, graphs.BLOCK)).astype(np.float32)
    plain /= np.linalg.norm(plain, axis=1, keepdims=True)
    rows = [graphs.into_block(np.eye(graphs.BLOCK, dtype=np.float32), n) for n in (1, 2)]
    old, new = plain @ rows[0], plain @ rows[1]
    side = np.random.default_rng(4).standard_normal((ITEMS, graphs.SIDE_DIM)).astype(np.float32)
    with Device(gallery) as device:
        spec = SpaceSpec.of(blocks.manifest(repo, 1))
        ids = [f"item-{row}" for row in range(ITEMS)]
        device.store.put(ids, [NewVectors(spec.space, old, side)])
    world.publish(repo, 2)
    shutil.copytree(top, base / "before")
    yield Bench(top, base / "before", repo, old, new)


@pytest.fixture(autouse=True)
def no_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ONNX check writes nothing and would take a second at every step."""
    monkeypatch.setattr("nobackfill.client.sync.try_release", check_probes)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kind", "stride"), FAULTS)
def test_a_sync_is_all_old_or_all_new(kind: str, stride: int, bench: Bench) -> None:
    bench.restore()
    steps, flipped = count_steps(bench.sync), 0
    first, swept = first_of(steps, stride), 0
    for step, outcome in sweep(kind, bench.sync, bench.restore, first, stride):
        swept = step
        status = KILLED if kind in ("kill", "short") else CannotWriteError.exit_code
        assert outcome.status == status, f"step {step}: {outcome.error}"
        flipped += bench.check(step) == 2
        bench.check_converged(step)
    assert swept == steps
    assert 0 < flipped < 1 + (steps - first) // stride
    print(f"{kind}: {steps} steps of a sync, each {stride}.; {flipped} of these after the flip")


@pytest.mark.long
def test_a_second_kill_while_recovering_changes_nothing(bench: Bench) -> None:
    bench.restore()
    steps = count_steps(bench.sync)
    chosen = random.Random(5).sample(range(1, steps + 1), 8)
    for first, second in zip(chosen[:4], chosen[4:], strict=True):
        bench.restore()
        assert run_with_fault(f"kill@{first}", bench.sync).status == KILLED
        run_with_fault(f"kill@{second}", bench.sync)
        bench.check((first, second))
        bench.check_converged((first, second))


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_kills_at_random_moments(bench: Bench) -> None:
    bench.restore()
    started = time.monotonic()
    assert run_with_fault(None, bench.sync).status == 0
    longest = time.monotonic() - started
    chance = random.Random(20)
    killed, flipped = 0, 0
    for turn in range(200):
        bench.restore()
        child = os.fork()
        if child == 0:
            bench.sync()
            os._exit(0)
        time.sleep(chance.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        killed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED
        flipped += bench.check(f"turn {turn}") == 2
        bench.check_converged(f"turn {turn}")
    # Fewer than half where the machine was busier when the longest was measured.
    assert killed > 50
    print(f"{killed} of 200 random kills hit a running sync, {flipped} after its flip")


@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not syscalls.available(), reason="needs strace and the right to trace")
def test_power_loss_after_every_system_call(bench: Bench, tmp_path: Path) -> None:
    bench.restore()
    command: list[str | Path] = [
        Path(sys.executable).with_name("edge-client"),
        "--gallery",
        bench.gallery,
        "sync",
    ]
    calls = syscalls.trace(command, bench.top, tmp_path / "strace.log")
    releases = []
    for count, way, disk in syscalls.states(bench.top, bench.pristine, calls):
        disk.restore(bench.top, way)
        releases.append(bench.check(f"call {count} of {len(calls)}, {way}"))
        if count % 40 == 0:
            bench.check_converged(f"call {count}, {way}")
    # What the command said was done is on the disk, whatever the way.
    assert releases[-3:] == [2, 2, 2]
    assert releases[0] == 1
    print(f"{len(releases)} states of the disk after {len(calls)} system calls")
