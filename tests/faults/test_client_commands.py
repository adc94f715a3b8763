"""Every durable step of the other commands fails once: nothing is lost, another run converges."""

import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from nobackfill.client import creation
from nobackfill.client.device import Device
from nobackfill.client.maintenance import collect_garbage, remove, verify
from nobackfill.client.sync import roll_back
from nobackfill.errors import AlreadyExistsError, CannotWriteError, NotFoundError
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.store import NewVectors
from nobackfill.release.probes import check_probes
from tests.support import blocks, edge, graphs
from tests.support.crash import KILLED, sweep

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]
KINDS = ["kill", "short", "eio", "enospc"]


@dataclass(frozen=True)
class Scene:
    """A gallery of 12 images, upgraded to release 2, with the way back open."""

    top: Path
    pristine: Path
    images: list[Path]
    late: Path

    @property
    def gallery(self) -> Path:
        return self.top / "gallery.sqlite"

    def restore(self) -> None:
        shutil.rmtree(self.top)
        shutil.copytree(self.pristine, self.top)

    def paths(self) -> set[str]:
        """Paths of the items, each searchable; the gallery is sound."""
        with Device(self.gallery) as device:
            assert verify(device)["problems"] == []
        return set(edge.contents(self.gallery))

    def with_device(self, action: Callable[[Device], object]) -> Callable[[], None]:
        def run() -> None:
            with Device(self.gallery) as device:
                action(device)

        return run


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    base = tmp_path_factory.mktemp("commands")
    world = edge.World(base / "world")
    setting = world.setting(base / "top")
    world.publish(setting.repo, 2)
    edge.follow(setting.gallery)
    blocks.write_pngs(base / "late", 40, seed=3)
    shutil.copytree(base / "top", base / "pristine")
    return Scene(base / "top", base / "pristine", setting.images, base / "late")


@pytest.fixture(autouse=True)
def no_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nobackfill.client.sync.try_release", check_probes)


def failures(kind: str, action: Callable[[], object], scene: Scene) -> Iterator[int]:
    for step, outcome in sweep(kind, action, scene.restore):
        status = KILLED if kind in ("kill", "short") else CannotWriteError.exit_code
        assert outcome.status == status, f"step {step}: {outcome.error}"
        yield step
    print(f"{kind}: swept")


@pytest.mark.parametrize("kind", KINDS)
def test_add(kind: str, scene: Scene) -> None:
    before = {str(path) for path in scene.images}
    late = {str(path) for path in scene.late.iterdir()}
    for step in failures(kind, lambda: edge.fill(scene.gallery, scene.late), scene):
        assert before <= scene.paths() <= before | late, f"step {step}"
        edge.fill(scene.gallery, scene.late)
        assert scene.paths() == before | late, f"step {step}"


@pytest.mark.parametrize("kind", KINDS)
def test_remove(kind: str, scene: Scene) -> None:
    gone = [str(path) for path in scene.images[:3]]
    before = {str(path) for path in scene.images}
    action = scene.with_device(lambda device: remove(device, gone))
    for step in failures(kind, action, scene):
        left = scene.paths()
        assert left in (before, before - set(gone)), f"step {step}"
        if left == before:
            action()
        assert scene.paths() == before - set(gone), f"step {step}"


@pytest.mark.parametrize("kind", KINDS)
def test_rollback(kind: str, scene: Scene) -> None:
    action = scene.with_device(roll_back)
    for step in failures(kind, action, scene):
        assert len(scene.paths()) == 12
        if edge.spaces(scene.gallery)[1] == "previous":
            action()
        else:
            with pytest.raises(NotFoundError):
                action()
        assert edge.spaces(scene.gallery) == {1: "active", 2: "staging"}, f"step {step}"
        assert len(scene.paths()) == 12


@pytest.mark.parametrize("kind", KINDS)
def test_gc(kind: str, scene: Scene) -> None:
    for step in failures(kind, scene.with_device(collect_garbage), scene):
        assert len(scene.paths()) == 12
        scene.with_device(collect_garbage)()
        assert edge.spaces(scene.gallery) == {2: "active"}, f"step {step}"
        assert len(scene.paths()) == 12


@pytest.mark.parametrize("kind", KINDS)
def test_init(kind: str, scene: Scene) -> None:
    gallery = scene.top / "new" / "g.sqlite"
    repo = scene.top / "pub" / "repo"

    def init() -> None:
        gallery.parent.mkdir(exist_ok=True)
        root = (repo / "1.root.json").read_bytes()
        creation.init(gallery, str(repo), root, lambda _: None, edge.QUIET)

    for step in failures(kind, init, scene):
        if gallery.exists():
            with pytest.raises(AlreadyExistsError):
                init()
        else:
            init()
        assert edge.fill(gallery, scene.late) == 40, f"step {step}"
        assert [p for p in gallery.parent.rglob("*") if p.name.startswith(".tmp-")] == []


def test_twenty_pairs_of_syncs(scene: Scene, tmp_path: Path) -> None:
    """Two at once, the first killed in half of the pairs: one upgrades, none harms."""
    world = edge.World(tmp_path / "world")
    chance = random.Random(4)
    edge_client = Path(sys.executable).with_name("edge-client")
    codes = set()
    for turn in range(20):
        setting = world.setting(tmp_path / str(turn))
        world.publish(setting.repo, 2)
        command: list[str | Path] = [edge_client, "--gallery", setting.gallery, "sync"]
        pair = [subprocess.Popen(command) for _ in range(2)]
        if turn % 2:
            try:
                pair[0].wait(chance.uniform(0.2, 1.5))
            except subprocess.TimeoutExpired:
                pair[0].kill()
        codes |= {process.wait() for process in pair}
        assert edge.follow(setting.gallery).release == 2
        assert len(edge.contents(setting.gallery)) == 12
    assert codes <= {0, 75, KILLED}
    print(f"exit codes of the pairs: {sorted(codes)}")


def test_a_sync_takes_no_memory_for_its_items(tmp_path: Path) -> None:
    """300,000 items through three syncs (upgrade, confirm, next upgrade), each below 250 MB."""
    world = edge.World(tmp_path / "world")
    setting = world.setting(tmp_path / "top")
    rng = np.random.default_rng(0)
    with Device(setting.gallery) as device:
        spec = SpaceSpec.of(blocks.manifest(setting.repo, 1))
        for first in range(0, 300_000, 20_000):
            rows = rng.standard_normal((20_000, graphs.BLOCK), dtype=np.float32)
            rows /= np.linalg.norm(rows, axis=1, keepdims=True)
            vectors = rows @ graphs.into_block(np.eye(graphs.BLOCK, dtype=np.float32), 1)
            side = rng.standard_normal((20_000, graphs.SIDE_DIM), dtype=np.float32)
            ids = [f"{number}" for number in range(first, first + 20_000)]
            device.store.put(ids, [NewVectors(spec.space, vectors, side)])
    edge_client = Path(sys.executable).with_name("edge-client")
    for newest in (2, 2, 3):
        world.publish(setting.repo, newest)
        # A small process between us and the command, as a child begins with its parent's peak.
        meter = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True);"
        meter += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)"
        done = subprocess.run(
            [sys.executable, "-c", meter, edge_client, "--gallery", setting.gallery, "sync"],
            capture_output=True,
            text=True,
            check=True,
        )
        peak = int(done.stderr.splitlines()[-1]) * 1024 / 1e6
        print(f"peak {peak:.0f} MB: {done.stdout.strip()}")
        assert peak < 250
        if newest == 2:
            edge.upgraded_before(setting.gallery, days=8)
