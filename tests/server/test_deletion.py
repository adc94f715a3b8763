"""A gallery is deleted beside every use of it: nothing closes under its users, none deadlock."""

import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from nobackfill.errors import BusyError, CannotWriteError, NotFoundError
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.release.manifest import Manifest
from nobackfill.server.galleries.hosted import (
    LockLevel,
    LockOrderError,
    WriteLock,
    check_lock_order,
    hold_level,
)
from nobackfill.server.gateway import GatewayServer
from nobackfill.v1 import gallery_pb2, release_pb2
from tests.server.conftest import Stages, publish_stage
from tests.server.process import serving
from tests.server.support import Client, embedding, images, in_file, refused, running

ROUNDS = 25


@contextmanager
def over_and_over(*calls: Callable[[], object]) -> Iterator[None]:
    """Each call on a thread of its own, again and again; a gallery that is gone is no failure."""
    stop = threading.Event()

    def work(call: Callable[[], object]) -> int:
        done = 0
        while not stop.is_set():
            with suppress(NotFoundError, BusyError):
                call()
            done += 1
        return done

    with ThreadPoolExecutor(len(calls)) as pool:
        results = [pool.submit(work, call) for call in calls]
        try:
            yield
        finally:
            stop.set()
        assert all(result.result(60) for result in results)


@pytest.mark.long
def test_every_use_beside_deletions_in_a_loop(repo: Path, tmp_path: Path, one: Manifest) -> None:
    """The gateway died of SIGSEGV within seconds: SQLite connections were closed under readers."""
    item = gallery_pb2.PutItem(
        id="i0", vectors=gallery_pb2.Vectors(embedding=embedding(one, images(1)[0]))
    )
    query = embedding(one, images(1)[0])
    with (
        serving(repo, tmp_path / "data", "--triton=in-process") as served,
        Client(served.address) as client,
    ):
        client.create_when_idle()
        with over_and_over(
            lambda: client.get_gallery("g"),
            lambda: list(client.list_galleries()),
            lambda: client.get("g", "i0"),
            lambda: client.find_by(query),
            lambda: client.put_items("g", [item]),
            lambda: list(client.watch_upgrade("g")),
            lambda: urllib.request.urlopen(f"http://{served.metrics}/metrics").read(),
        ):
            for _ in range(ROUNDS):
                client.delete_gallery("g")
                client.create_gallery("g")
        assert served.stop() == 0


def test_a_deletion_and_a_put_under_way_wait_for_each_other_in_one_order(
    gateway: GatewayServer, client: Client, one: Manifest, tmp_path: Path
) -> None:
    """The put was inside a plan and wanted the lock, the deletion inside the lock and wanted the
    plan: both waited for a minute, and so did who made another gallery."""
    client.create_gallery("g")
    galleries = gateway.galleries
    with ThreadPoolExecutor(1) as pool, galleries.use_gallery("g") as hosted, hosted.use_plan():
        deletion = pool.submit(client.delete_gallery, "g")
        while not hosted.is_closing:
            pass
        client.create_gallery("another")
        with refused(NotFoundError):
            client.get_gallery("g")
        with hosted.write_lock.shared():
            assert not deletion.done()
    deletion.result(30)
    assert [gallery.name for gallery in galleries.all()] == ["another"]
    assert not list((tmp_path / "data").glob("galleries/.tmp-*"))


def test_a_gallery_that_stays_in_use_stays(
    gateway: GatewayServer, client: Client, monkeypatch: pytest.MonkeyPatch, one: Manifest
) -> None:
    monkeypatch.setattr("nobackfill.server.galleries.hosted._DRAIN_SECONDS", 0.05)
    client.create_gallery("g")
    with gateway.galleries.use_gallery("g"), refused(BusyError):
        client.delete_gallery("g")
    client.put_images(images(2))
    assert client.get_gallery("g").items == 2
    client.delete_gallery("g")
    with refused(NotFoundError):
        client.get_gallery("g")


def test_a_pause_ends_with_its_gallery(repo: Path, tmp_path: Path, stages: Stages) -> None:
    """The next gallery of the name was paused from birth, and the next activation never ended."""
    with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        client.pause_upgrade("g")
        client.delete_gallery("g")
        client.create_gallery("g")
        client.put_images(images(3))
        publish_stage(repo, stages[2])
        assert client.swap(2).phase == release_pb2.PHASE_DONE
        client.pause_upgrade("g")
        # As a kill between the deletion and its record leaves it.
        gateway.galleries.delete("g")
    with running(repo, tmp_path / "data") as gateway:
        assert gateway.state.current.paused == ()


def test_closing_waits_for_who_reads(tmp_path: Path, one: Manifest) -> None:
    store = SqliteGallery.create(tmp_path / "g.sqlite", SpaceSpec.of(one))
    with ThreadPoolExecutor(1) as pool:
        with store.read_snapshot() as connection:
            closing = pool.submit(store.close)
            assert connection.execute("SELECT count(*) FROM items").fetchone() == (0,)
            assert store.count() == 0
            assert not closing.done()
        closing.result(30)
    with pytest.raises(NotFoundError, match="closed"):
        store.count()


def test_closing_gives_up_where_a_reader_never_ends(
    tmp_path: Path, one: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nobackfill.gallery.sqlite_file._CLOSE_S", 0.05)
    with SqliteGallery.create(tmp_path / "g.sqlite", SpaceSpec.of(one)) as store:
        with store.read_snapshot(), pytest.raises(BusyError, match="a call still uses it"):
            store.close()
        assert store.count() == 0


def test_a_gallery_that_background_work_reads_stays_until_it_can_be_closed(
    gateway: GatewayServer, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gallery was gone, its folder stayed until the next start, and so did its open files."""
    monkeypatch.setattr("nobackfill.gallery.sqlite_file._CLOSE_S", 0.05)
    client.create_gallery("g")
    client.put_images(images(2))
    assert len(client.find(images(1)[0], k=9).hits) == 2
    hosted = in_file(gateway)
    with hosted.store.read_snapshot() as connection:
        assert connection.execute("SELECT count(*) FROM items").fetchone() == (2,)
        with refused(BusyError):
            client.delete_gallery("g")
        with pytest.raises(BusyError):
            hosted.close()
        client.put_images(images(4))
        assert client.get_gallery("g").items == 4
        assert len(client.find(images(1)[0], k=9).hits) == 4
    client.delete_gallery("g")
    assert not [path for path in (tmp_path / "data" / "galleries").iterdir() if "g" in path.name]
    hosted.close()
    with pytest.raises(NotFoundError):
        hosted.store.count()


def test_a_gallery_whose_folder_cannot_be_moved_is_served_as_before(
    gateway: GatewayServer, client: Client, tmp_path: Path
) -> None:
    client.create_gallery("g")
    client.put_images(images(2))
    # Nothing can be synced behind a broken link.
    link = tmp_path / "data" / "galleries" / "g" / "link"
    link.symlink_to("nowhere")
    with refused(CannotWriteError):
        client.delete_gallery("g")
    client.put_images(images(3))
    assert len(client.find(images(1)[0], k=9).hits) == 3
    link.unlink()
    client.delete_gallery("g")
    with refused(NotFoundError):
        client.get_gallery("g")


def test_one_gallery_that_cannot_be_closed_leaves_no_other_open(
    gateway: GatewayServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nobackfill.gallery.sqlite_file._CLOSE_S", 0.05)
    for name in "abc":
        client.create_gallery(name)
    a, b, c = (in_file(gateway, name) for name in "abc")
    with b.store.read_snapshot():
        with pytest.raises(BusyError):
            gateway.galleries.close()
        for hosted in (a, c):
            with pytest.raises(NotFoundError):
                hosted.store.count()
    gateway.galleries.close()
    with pytest.raises(NotFoundError):
        b.store.count()


def test_an_interrupted_wait_keeps_nobody_out() -> None:
    """Later callers that shared the lock waited for ever, though nobody waited to hold it alone."""
    lock, shared, end = WriteLock("a"), threading.Event(), threading.Event()
    later: list[Future[None]] = []

    def share() -> None:
        with lock.shared():
            shared.set()
            end.wait(60)

    def share_briefly() -> None:
        with lock.shared():
            pass

    with ThreadPoolExecutor(3) as pool:
        pool.submit(share)
        assert shared.wait(30)

        def interrupted(*_: object) -> None:
            later.append(pool.submit(share_briefly))
            # Long enough for it to wait behind this thread.
            time.sleep(0.3)
            raise KeyboardInterrupt

        main = threading.main_thread().ident
        assert main is not None
        before = signal.signal(signal.SIGUSR1, interrupted)
        timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGUSR1))
        timer.start()
        try:
            with pytest.raises(KeyboardInterrupt), lock.exclusive():
                pass
            later[0].result(30)
        finally:
            signal.signal(signal.SIGUSR1, before)
            end.set()
    with lock.exclusive():
        pass


def test_waiting_against_the_order_is_refused() -> None:
    a, b = WriteLock("a"), WriteLock("b")
    with a.exclusive(), b.exclusive():
        with pytest.raises(LockOrderError, match="waiting for PLAN"):
            check_lock_order(LockLevel.PLAN)
        with pytest.raises(LockOrderError, match="holding WRITES"), a.shared():
            pass
    with hold_level(LockLevel.PLAN, "a"):
        with pytest.raises(LockOrderError, match="waiting for GALLERY"):
            check_lock_order(LockLevel.GALLERY, "a")
        with a.shared():
            check_lock_order(LockLevel.VIEW, "a")
    check_lock_order(LockLevel.NAMES)
