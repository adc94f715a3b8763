"""Kills of each command of the edge client at random moments: KILLS of each, 200 unless told.

After each: the gallery is sound (`verify`), a search answers with what is searched for, its tables
are as before the command or as after it, and the command run once more leads there.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nobackfill.client import creation
from nobackfill.client.device import Device
from nobackfill.client.maintenance import collect_garbage, remove, rescue, verify
from nobackfill.client.sync import roll_back
from nobackfill.client.vault.transfer import pull, push
from nobackfill.errors import AlreadyExistsError, NotFoundError
from nobackfill.release.probes import check_probes
from tests.server.process import serving
from tests.support import blocks, edge
from tests.support.random_kills import Scene, alone, killed, prepared

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    base = tmp_path_factory.mktemp("kills")
    world = edge.World(base / "world")
    setting = world.setting(base / "made")
    shutil.copytree(setting.repo.parent, base / "pub")
    (base / "top").mkdir()
    for path in setting.gallery.parent.glob("gallery.sqlite*"):
        path.rename(base / "top" / path.name)
    world.publish(base / "pub" / "repo", 2)
    with serving(base / "pub" / "repo", base / "data", "--triton=in-process") as served:
        made = Scene(base, setting.images, f"grpc://{served.address}")
        made.with_device(lambda d: d.store.update_state({"source": str(made.repo)}))
        yield made


@pytest.fixture(autouse=True)
def no_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed sync would leave its trial to end by itself, and be a second slower."""
    monkeypatch.setattr("nobackfill.client.sync.try_release", check_probes)


def follow(scene: Scene) -> None:
    edge.follow(scene.gallery)


def push_all(scene: Scene) -> None:
    scene.with_device(lambda device: push(device, [], scene.vault, edge.QUIET))


def all_or_nothing(
    name: str, scene: Scene, first: Path, action: Callable[[], object], *between: dict[int, str]
) -> None:
    """Tables are as before or as after; `between`: what states of spaces there may be meanwhile."""
    shutil.rmtree(scene.top)
    shutil.copytree(first, scene.top)
    old = scene.tables()
    alone(action)
    new = scene.tables()
    for turn, _ in killed(name, scene, first, action):
        spaces, held = scene.tables()
        assert held in (old[1], new[1]), f"turn {turn}"
        assert spaces in (old[0], new[0], *between), f"turn {turn}"
        if (spaces, held) != new:
            alone(action)
        assert scene.tables() == new, f"turn {turn}"


def test_sync(scene: Scene) -> None:
    first = prepared(scene, "at-1", lambda: None)
    all_or_nothing(
        "sync", scene, first, lambda: follow(scene), {1: "active", 2: "staging"}
    )  # fmt: skip


def test_rollback(scene: Scene) -> None:
    first = prepared(scene, "at-2", lambda: follow(scene))

    def action() -> None:
        try:
            scene.with_device(roll_back)
        except NotFoundError:
            assert edge.spaces(scene.gallery)[1] == "active"

    all_or_nothing("rollback", scene, first, action)


def test_gc(scene: Scene) -> None:
    first = prepared(scene, "for-gc", lambda: follow(scene))
    all_or_nothing("gc", scene, first, lambda: scene.with_device(collect_garbage))


def test_remove(scene: Scene) -> None:
    first = prepared(scene, "for-remove", lambda: None)
    gone = [str(path) for path in scene.images[5:8]]

    def action() -> None:
        try:
            scene.with_device(lambda device: remove(device, gone))
        except NotFoundError:
            assert len(edge.contents(scene.gallery)) == 9

    all_or_nothing("remove", scene, first, action)


def test_add(scene: Scene) -> None:
    late = scene.base / "late"
    new = {str(path) for path in blocks.write_pngs(late, 70, seed=3)}
    first = prepared(scene, "for-add", lambda: None)
    before = {path: vector for path, _, vector in scene.tables()[1].values()}

    def action() -> None:
        edge.fill(scene.gallery, late)

    for turn, _ in killed("add", scene, first, action):
        held = {path: vector for path, _, vector in scene.tables()[1].values()}
        assert before.items() <= held.items(), f"turn {turn}"
        # What is there is there in whole batches, none twice.
        assert set(held) - set(before) <= new
        assert len(held) - len(before) in (0, 32, 64, 70), f"turn {turn}"
        alone(action)
        assert len(scene.tables()[1]) == 82, f"turn {turn}"


def test_init(scene: Scene) -> None:
    first = prepared(scene, "for-init", lambda: None)
    made = scene.top / "new" / "g.sqlite"

    def action() -> None:
        made.parent.mkdir(exist_ok=True)
        root = (scene.repo / "1.root.json").read_bytes()
        try:
            creation.init(made, str(scene.repo), root, lambda _: None, edge.QUIET)
        except AlreadyExistsError:
            assert edge.spaces(made) == {2: "active"}

    for turn, _ in killed("init", scene, first, action):
        alone(action)
        with Device(made) as device:
            assert verify(device)["problems"] == [], f"turn {turn}"
        assert edge.fill(made, scene.images[0].parent) == 12, f"turn {turn}"
        assert [p for p in made.parent.rglob("*") if p.name.startswith(".tmp-")] == []


def test_rescue(scene: Scene) -> None:
    first = prepared(scene, "for-rescue", lambda: None)
    before = scene.tables()
    saved = scene.top / "saved.sqlite"

    def action() -> None:
        with contextlib.suppress(AlreadyExistsError):
            rescue(scene.gallery, saved)

    for turn, _ in killed("rescue", scene, first, action):
        assert scene.tables() == before, f"turn {turn}"
        alone(action)
        assert edge.contents(saved).keys() == edge.contents(scene.gallery).keys(), f"turn {turn}"
        assert [p for p in scene.top.rglob("*") if p.name.startswith(".tmp-")] == []


def restored(scene: Scene, folder: Path) -> None:
    """A pull into an empty folder brings every image as it was added."""
    shutil.rmtree(folder, ignore_errors=True)
    alone(lambda: pull_all(scene, folder))
    for image in scene.images:
        assert (folder / image.name).read_bytes() == image.read_bytes()


def pull_all(scene: Scene, folder: Path) -> None:
    def action(device: Device) -> None:
        done = pull(device, [], folder, None, False, edge.QUIET)
        assert done.failed == {}

    scene.with_device(action)


def test_push(scene: Scene) -> None:
    first = prepared(scene, "for-push", lambda: None)
    before = scene.tables()
    for turn, _ in killed("push", scene, first, lambda: push_all(scene)):
        assert scene.tables() == before, f"turn {turn}"
        alone(lambda: push_all(scene))
        assert scene.tables() == before, f"turn {turn}"
        restored(scene, scene.base / "restored")
        assert list((scene.top / "gallery.sqlite.outbox").iterdir()) == []


def test_pull(scene: Scene) -> None:
    first = prepared(scene, "for-pull", lambda: push_all(scene))
    folder = scene.base / "pulled"
    pixels = {image.name: image.read_bytes() for image in scene.images}

    def action() -> None:
        pull_all(scene, folder)

    for turn, _ in killed("pull", scene, first, action):
        for path in folder.iterdir() if folder.exists() else ():
            if not path.name.startswith("."):
                assert path.read_bytes() == pixels[path.name], f"turn {turn}"
        alone(action)
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == pixels, f"turn {turn}"
        scene.tables()
        shutil.rmtree(folder)
