"""Commands of the edge client killed at random moments, and what a gallery must be after each."""

import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nobackfill.client.device import Device
from nobackfill.client.maintenance import verify
from nobackfill.client.search import Search
from tests.support import edge
from tests.support.crash import KILLED, fork

KILLS = int(os.environ.get("KILLS", "200"))

# Release -> state of its space; item -> (path, origin, vector in the active space).
Tables = tuple[dict[int, str], dict[str, tuple[str, str | None, bytes]]]


@dataclass(frozen=True)
class Scene:
    """A gallery of 12 images at release 1, whose publication has gone on to release 2."""

    base: Path
    images: list[Path]
    vault: str

    @property
    def top(self) -> Path:
        return self.base / "top"

    @property
    def gallery(self) -> Path:
        return self.top / "gallery.sqlite"

    @property
    def repo(self) -> Path:
        return self.base / "pub" / "repo"

    def tables(self) -> Tables:
        """What it holds and answers, after proof that it is sound and finds each item itself."""
        with Device(self.gallery) as device:
            assert verify(device)["problems"] == []
            active = device.store.active().spec.space
            labels, vectors = device.store.load_vectors(active)
            items = device.store.items(labels, active)
            held: dict[str, tuple[str, str | None, bytes]] = {
                item.id: (str(item.metadata["path"]), item.origin, vector.tobytes())
                for item, vector in zip(items, vectors, strict=True)
                if item is not None
            }
            assert device.store.count() == len(held)
            for item_id in list(held)[:3]:
                assert Search(device, {}).by_id(item_id, 1).hits[0].id != item_id
            (answer,) = Search(device, {}).by_images([self.images[0]], 1)
            if any(path == str(self.images[0]) for path, _, _ in held.values()):
                assert answer.hits[0].distance == pytest.approx(0, abs=1e-5)
        return edge.spaces(self.gallery), held

    def with_device(self, action: Callable[[Device], object]) -> None:
        with Device(self.gallery) as device:
            action(device)


def begin(action: Callable[[], object]) -> int:
    """Run it in a child: gRPC and a kill are its own affair; the child's id."""
    child = fork()
    if child == 0:
        try:
            action()
        except BaseException:  # noqa: BLE001 - told by the status
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def alone(action: Callable[[], object]) -> None:
    """Run it to its end in a child."""
    assert ended(begin(action)) == 0


def killed(
    name: str, scene: Scene, prepared: Path, action: Callable[[], object]
) -> Iterator[tuple[int, Callable[[], None]]]:
    """Kill `action` at random moments, each time on a fresh copy of `prepared`; yields the turn."""

    def restore() -> None:
        shutil.rmtree(scene.top)
        shutil.copytree(prepared, scene.top)

    longest = 0.0
    for _ in range(3):
        restore()
        began = time.monotonic()
        alone(action)
        longest = max(longest, time.monotonic() - began)
    chance = random.Random(name)
    hit = 0
    for turn in range(KILLS):
        restore()
        child = begin(action)
        time.sleep(chance.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        status = ended(child)
        assert status in (KILLED, 0), f"turn {turn}: {status}"
        hit += status == KILLED
        yield turn, restore
    restore()
    print(f"{name}: {hit} of {KILLS} kills hit it, within {longest:.2f} s; 0 bad")


def prepared(scene: Scene, name: str, action: Callable[[], object]) -> Path:
    """A copy of the scene's folder as it is after `action`; the folder itself stays."""
    before, after = scene.base / "before", scene.base / name
    shutil.copytree(scene.top, before)
    alone(action)
    shutil.copytree(scene.top, after)
    shutil.rmtree(scene.top)
    before.rename(scene.top)
    return after
