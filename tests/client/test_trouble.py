"""Bad networks, locked files, full disks, two at once: refused in a sentence, nothing half done."""

import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, tzinfo
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Self

import pytest

from nobackfill import durable
from nobackfill.client.device import Device
from nobackfill.client.search import Search
from nobackfill.client.sync import SyncOptions
from nobackfill.errors import BusyError, UnavailableError, VerificationError
from tests.client.test_cli import ask, run, start
from tests.support import blocks, edge
from tests.support.edge import Setting


class _Cutting(BaseHTTPRequestHandler):
    """Serves files with ranges, and hangs up after `cut` bytes of each answer."""

    def __init__(self, *args: object, folder: Path, cut: int) -> None:
        self._folder = folder
        self._cut = cut
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        path = self._folder / self.path.lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        # Metadata comes through whole: nobody could resume it.
        end = None if path.suffix == ".json" else start + self._cut
        self.wfile.write(data[start:end])

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def test_a_network_that_keeps_breaking_is_overcome(setting: Setting, world: edge.World) -> None:
    world.publish(setting.repo, 2)
    with edge.serving(functools.partial(_Cutting, folder=setting.repo, cut=9_000)) as address:
        broken = 0
        for _ in range(20):
            try:
                assert edge.follow(setting.gallery, SyncOptions(source=address)).state == "upgraded"
                break
            except UnavailableError:
                broken += 1
                assert len(edge.contents(setting.gallery)) == 12
    assert 2 <= broken < 20


def test_a_host_that_sends_something_else_changes_nothing(
    setting: Setting, world: edge.World
) -> None:
    world.publish(setting.repo, 2)
    model = setting.repo / "upgrade_1_to_2" / "1" / "model.onnx"
    good = model.read_bytes()
    model.write_bytes(good[:-1] + b"\0")
    with pytest.raises(VerificationError, match="a file that differs from the signed one"):
        edge.follow(setting.gallery)
    assert {origin for origin, _ in edge.contents(setting.gallery).values()} == {"native"}
    model.write_bytes(good)
    assert edge.follow(setting.gallery).state == "upgraded"


def test_another_address_of_the_same_publication(setting: Setting, world: edge.World) -> None:
    world.publish(setting.repo, 2)
    with edge.http_host(setting.repo) as address:
        edge.follow(setting.gallery, SyncOptions(source=address))
        with Device(setting.gallery) as device:
            assert device.state("source") == address
    stranger = setting.gallery.parent / "stranger" / "repo"
    blocks.publish_block_release(stranger, 1)
    with pytest.raises(VerificationError):
        edge.follow(setting.gallery, SyncOptions(source=str(stranger)))
    with Device(setting.gallery) as device:
        assert device.state("source") == address


def test_a_host_that_is_gone_leaves_the_gallery_in_use(setting: Setting) -> None:
    assert "try" in run(setting.gallery, "sync", "--from", "http://127.0.0.1:1", code=69).stderr
    assert ask(setting.gallery, "search", setting.images[0])["hits"]


@pytest.mark.parametrize("years", [-10, 10])
def test_a_clock_that_is_wrong_by_years_stops_news_and_nothing_else(
    setting: Setting, world: edge.World, monkeypatch: pytest.MonkeyPatch, years: int
) -> None:
    world.publish(setting.repo, 2)
    before = setting.gallery.read_bytes()

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls.fromtimestamp(time.time() + 365 * 86_400 * years, tz)

    with monkeypatch.context() as wrong:
        for module in ("nobackfill.release.trust.trust", "nobackfill.release.trust.trust"):
            wrong.setattr(f"{module}.datetime", Clock)
        if years > 0:
            with pytest.raises(VerificationError, match="clock"):
                edge.follow(setting.gallery)
            assert setting.gallery.read_bytes() == before
        else:
            # Fresh metadata is fresh, as the time of the last refresh is remembered.
            assert edge.follow(setting.gallery).state == "upgraded"
        assert len(edge.contents(setting.gallery)) == 12
    assert edge.follow(setting.gallery).release == 2


HOLD = (
    "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None);"
    "c.execute(sys.argv[2]); c.execute('SELECT count(*) FROM items').fetchone();"
    "print('held', flush=True); sys.stdin.read()"
)


@contextmanager
def held(gallery: Path, begin: str) -> Iterator[subprocess.Popen[str]]:
    """Another process in a transaction on the gallery."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(gallery), begin],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield holder
        holder.kill()


@pytest.mark.parametrize("begin", ["BEGIN IMMEDIATE", "BEGIN EXCLUSIVE"])
def test_a_locked_database_is_waited_for_then_named(
    setting: Setting, world: edge.World, monkeypatch: pytest.MonkeyPatch, begin: str
) -> None:
    world.publish(setting.repo, 2)
    monkeypatch.setattr("nobackfill.gallery.sqlite_file.BUSY_TIMEOUT_MS", 200)
    with held(setting.gallery, begin):
        with pytest.raises(BusyError, match="another process writes"):
            edge.follow(setting.gallery)
        # Reading goes on beside a writer.
        assert len(edge.contents(setting.gallery)) == 12
    assert edge.follow(setting.gallery).state == "upgraded"


def test_a_reader_elsewhere_does_not_stop_a_sync(setting: Setting, world: edge.World) -> None:
    world.publish(setting.repo, 2)
    with held(setting.gallery, "BEGIN"):
        assert edge.follow(setting.gallery).state == "upgraded"


def test_of_two_syncs_one_is_told_to_try_again(setting: Setting, world: edge.World) -> None:
    world.publish(setting.repo, 2)
    lock = setting.gallery.with_name("gallery.sqlite.models") / "sync.lock"
    with durable.lock_file(lock):
        assert "try again" in run(setting.gallery, "sync", code=75).stderr
    code = (
        "import sys, pathlib; from nobackfill import durable\n"
        "with durable.lock_file(pathlib.Path(sys.argv[1])): print('held', flush=True); "
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(BusyError):
            edge.follow(setting.gallery)
        # The holder's death frees the lock.
        holder.kill()
    assert edge.follow(setting.gallery).state == "upgraded"


def test_a_full_disk_is_named_and_overcome(
    setting: Setting, world: edge.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish(setting.repo, 2)
    monkeypatch.setenv("NOBACKFILL_FAULT", "enospc@12+")
    assert "free some space" in start(setting.gallery, "sync", code=73).stderr
    monkeypatch.delenv("NOBACKFILL_FAULT")
    assert edge.follow(setting.gallery).state == "upgraded"


def test_searches_answer_while_a_sync_runs(setting: Setting, world: edge.World) -> None:
    world.publish(setting.repo, 2)
    answers: list[int] = []
    syncing = subprocess.Popen(
        [Path(sys.executable).with_name("edge-client"), "--gallery", setting.gallery, "sync"],
        env=os.environ,
        stdout=subprocess.PIPE,
    )
    with syncing, Device(setting.gallery) as device:
        item = device.store.list_items()[0].id
        while syncing.poll() is None:
            answer = Search(device, {}).by_id(item, 3)
            assert len(answer.hits) == 3
            answers.append(answer.release)
        answers.append(Search(device, {}).by_id(item, 3).release)
    assert syncing.returncode == 0
    # Old, then new: never back and forth.
    assert answers == sorted(answers)
    assert {1, 2} == set(answers)


@pytest.mark.skipif(shutil.which("sqlite3") is None, reason="needs the sqlite3 command")
def test_the_gallery_is_an_ordinary_sqlite_file(setting: Setting) -> None:
    done = subprocess.run(
        ["sqlite3", setting.gallery, "SELECT count(*) FROM items"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "12\n"
