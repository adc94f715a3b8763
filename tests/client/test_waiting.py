"""While a source is waited for, every other command goes on, and the sync goes on from there."""

import functools
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from nobackfill.client.device import Device
from nobackfill.client.maintenance import collect_garbage
from nobackfill.client.search import Search
from nobackfill.client.sync import SyncOptions, SyncReport, roll_back
from nobackfill.errors import BusyError
from tests.support import edge
from tests.support.edge import Setting


class _Held(SimpleHTTPRequestHandler):
    """A static host that holds one file back until it is released."""

    def __init__(self, *args: Any, gate: "Gate", **options: Any) -> None:
        self._gate = gate
        super().__init__(*args, **options)

    def do_GET(self) -> None:
        if self.path.endswith(self._gate.path):
            self._gate.asked.set()
            self._gate.released.wait(60)
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class Gate:
    def __init__(self, path: str) -> None:
        self.path = path
        self.asked = threading.Event()
        self.released = threading.Event()


@contextmanager
def waiting(setting: Setting, path: str) -> Iterator[tuple[Gate, Future[SyncReport]]]:
    """A sync that waits for `path` in a thread of its own."""
    gate = Gate(path)
    handler = functools.partial(_Held, directory=str(setting.repo), gate=gate)
    with edge.serving(handler) as address, ThreadPoolExecutor(1) as pool:
        report = pool.submit(edge.follow, setting.gallery, SyncOptions(source=address))
        try:
            assert gate.asked.wait(60)
            yield gate, report
        finally:
            gate.released.set()


@pytest.fixture
def upgraded(setting: Setting, world: edge.World) -> Setting:
    """A gallery in release 2 that can go back to 1, and release 3 published."""
    world.publish(setting.repo, 2)
    edge.follow(setting.gallery)
    world.publish(setting.repo, 3)
    return setting


@pytest.mark.parametrize(
    "path", ["timestamp.json", "release-3.json", "upgrade_2_to_3/1/model.onnx"]
)
def test_rollback_gc_and_search_do_not_wait(upgraded: Setting, path: str) -> None:
    with waiting(upgraded, path) as (gate, report):
        with Device(upgraded.gallery) as device:
            hits = Search(device, {}).by_images([upgraded.images[0]], 3)[0].hits
            assert len(hits) == 3
            assert roll_back(device) == (2, 1)
            assert device.active_manifest().release == 1
            collect_garbage(device)
        with pytest.raises(BusyError):
            edge.follow(upgraded.gallery)
        assert not report.done()
        gate.released.set()
        done = report.result()
    # From where the rollback led: release 3 is carried from 1, not from 2.
    assert (done.state, done.from_release, done.release) == ("upgraded", 1, 3)
    assert len(edge.contents(upgraded.gallery)) == 12


def test_gc_leaves_what_a_sync_downloads(upgraded: Setting) -> None:
    with waiting(upgraded, "embedder_3/1/model.onnx") as (gate, report):
        models = Path(f"{upgraded.gallery}.models")
        before = {path.name for path in models.glob("release-3.json")}
        with Device(upgraded.gallery) as device:
            collect_garbage(device)
        assert {path.name for path in models.glob("release-3.json")} == before != set()
        gate.released.set()
        assert report.result().release == 3
