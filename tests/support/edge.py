"""Devices for tests: a publication that grows release by release, and galleries that follow it."""

import functools
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nobackfill.client import creation
from nobackfill.client.device import Device
from nobackfill.client.output import Output
from nobackfill.client.photos import add
from nobackfill.client.sync import SyncOptions, SyncReport, sync
from nobackfill.images import decode_file
from nobackfill.release.models import open_embedder
from tests.support import blocks, graphs, hosts
from tests.support.once import filled

# Release -> the releases that it carries upgrades from, and whether they have int8 twins.
RELEASES: dict[int, tuple[Sequence[int], bool]] = {
    1: ((), False),
    2: ((1,), False),
    3: ((1, 2), False),
    4: ((3,), True),
}
QUIET = Output()


@dataclass(frozen=True)
class Setting:
    """A publication of release 1, a gallery that follows it, and the images that it holds."""

    repo: Path
    gallery: Path
    images: list[Path]


class World:
    """Publications of releases 1 to N and a gallery at release 1: made once, then copied, also
    where several processes share the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _upto(self, newest: int) -> Path:
        def publish(top: Path) -> None:
            if newest > 1:
                shutil.copytree(self._upto(newest - 1), top, dirs_exist_ok=True)
            sources, int8 = RELEASES[newest]
            blocks.publish_block_release(top / "repo", newest, sources, int8=int8)

        return filled(self._folder / f"upto-{newest}", publish)

    def publish(self, repo: Path, newest: int) -> None:
        """Make `repo` (a folder named repo, its keys beside it) hold releases 1 to `newest`."""
        assert repo.name == "repo"
        shutil.copytree(self._upto(newest), repo.parent, dirs_exist_ok=True)

    def setting(self, folder: Path) -> Setting:
        """A copy of everything but the images, which tests share and leave as they are."""
        made = self._made()
        shutil.copytree(made.repo.parent, folder / "pub")
        for path in made.gallery.parent.glob("gallery.sqlite*"):
            copy = shutil.copytree if path.is_dir() else shutil.copy
            copy(path, folder / path.name)
        setting = Setting(folder / "pub" / "repo", folder / "gallery.sqlite", made.images)
        with Device(setting.gallery) as device:
            device.store.update_state({"source": str(setting.repo)})
        return setting

    def _made(self) -> Setting:
        def make(top: Path) -> None:
            self.publish(top / "pub" / "repo", 1)
            blocks.write_pngs(top / "images", 12)
            fill(make_device(top / "pub" / "repo", top / "gallery.sqlite"), top / "images")

        top = filled(self._folder / "setting", make)
        # What else is there, tests have left beside them.
        images = sorted((top / "images").glob("*.png"))
        return Setting(top / "pub" / "repo", top / "gallery.sqlite", images)


def make_device(repo: Path, gallery: Path, source: str | None = None) -> Path:
    """An empty gallery that follows `repo`, or a `source` that serves it."""
    root = (repo / "1.root.json").read_bytes()
    creation.init(gallery, source or str(repo), root, lambda _: None, QUIET)
    return gallery


def fill(gallery: Path, images: Path) -> int:
    """Add every image below a folder; how many were new."""
    with Device(gallery) as device:
        return len(add(device, [images], {}, lambda done, total: None).added_names)


def follow(gallery: Path, wishes: SyncOptions | None = None) -> SyncReport:
    """Sync in this process."""
    with Device(gallery) as device:
        return sync(device, wishes or SyncOptions(), QUIET)


def upgraded_before(gallery: Path, days: int) -> None:
    """Let the last upgrade be so many days ago."""
    at = (datetime.now(UTC) - timedelta(days=days)).isoformat(timespec="seconds")
    with Device(gallery) as device:
        release = str(device.store.active().spec.release)
        carried = device.state("carried")
        device.store.update_state({"carried": {**carried, release: {**carried[release], "at": at}}})


def contents(gallery: Path) -> dict[str, tuple[str | None, NDArray[np.float32]]]:
    """Path of each item -> (origin, vector) in the active space."""
    with Device(gallery) as device:
        space = device.store.active().spec.space
        labels, vectors = device.store.load_vectors(space)
        items = device.store.items(labels, space)
    return {
        str(item.metadata["path"]): (item.origin, vector)
        for item, vector in zip(items, vectors, strict=True)
        if item is not None
    }


def spaces(gallery: Path) -> dict[int, str]:
    """Release -> state of its space."""
    with Device(gallery) as device:
        return {space.spec.release: space.state for space in device.store.spaces()}


def embedded(repo: Path, release: int, images: Sequence[Path]) -> NDArray[np.float32]:
    """What the release's embedder makes of the images: the oracle of every upgrade into it."""
    pixels = [decode_file(path, graphs.SIZE, graphs.SIZE) for path in images]
    return open_embedder(repo, blocks.manifest(repo, release)).run(np.stack(pixels))


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def http_host(folder: Path) -> Iterator[str]:
    """Python's own http.server over a folder; yields its address."""
    with serving(functools.partial(_Quiet, directory=str(folder))) as address:
        yield address


@contextmanager
def serving(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """A static host of our own making; yields its address."""
    with hosts.Host(("127.0.0.1", 0), handler) as host:
        thread = threading.Thread(target=host.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{host.server_address[1]}"
        host.shutdown()
        thread.join()
