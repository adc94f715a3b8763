"""Several processes at one file, and what a death leaves behind."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nobackfill.digests import sha256_file
from nobackfill.errors import AlreadyExistsError, BusyError, NotFoundError, VerificationError
from nobackfill.gallery import sqlite_file, staging
from nobackfill.gallery.rescue import rescue_gallery
from nobackfill.gallery.sqlite_file import FileAccess, open_connection
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.staging import run_upgrade
from nobackfill.gallery.store import NewVectors
from tests.gallery.making import Linear, filled, ids, put, rows, spec, vectors

ONE, TWO = spec(1).space, spec(2).space

HOLDER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
for statement in sys.argv[2].split(";"):
    connection.execute(statement).fetchall()
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(path: Path, statements: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds a lock until it is told to end."""
    command = [sys.executable, "-c", HOLDER, str(path), statements]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


# Each is possible after those before it.
WRITES: dict[str, Callable[[SqliteGallery], object]] = {
    "put": lambda store: put(store, ["new"], seed=5),
    "delete": lambda store: store.delete(["item-1"]),
    "state": lambda store: store.update_state({"a": 1}),
    "begin": lambda store: staging.add_staging_space(store, spec(3)),
    "upgrade": lambda store: run_upgrade(store, Linear(), spec(2)),
    "flip": lambda store: staging.flip(store, TWO, leave_behind=True),
    "rollback": lambda store: staging.rollback(store, leave_behind=True),
    "drop": lambda store: staging.drop_space(store, TWO),
}


@pytest.mark.parametrize("statements", ["BEGIN IMMEDIATE", "BEGIN EXCLUSIVE"])
def test_a_writer_waits_for_another_process_and_then_says_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statements: str
) -> None:
    monkeypatch.setattr(sqlite_file, "BUSY_TIMEOUT_MS", 150)
    path = tmp_path / "g.sqlite"
    with filled(path, 10) as store:
        staging.add_staging_space(store, spec(2))
        before = rows(store, ONE), [info.state for info in store.spaces()]
        with held(path, statements):
            for write in WRITES.values():
                started = time.monotonic()
                with pytest.raises(BusyError, match="try again"):
                    write(store)
                assert time.monotonic() - started >= 0.1
            # Readers are not kept waiting.
            assert store.count() == 10 and len(store.load_vectors(ONE)[0]) == 10
        assert (rows(store, ONE), [info.state for info in store.spaces()]) == before
        for write in WRITES.values():
            write(store)


def test_a_writer_gets_its_turn_when_the_other_ends_in_time(tmp_path: Path) -> None:
    path = tmp_path / "g.sqlite"
    with filled(path, 3) as store, held(path, "BEGIN IMMEDIATE") as other:
        threading.Timer(0.3, other.kill).start()
        put(store, ["new"], seed=5)
        assert store.count() == 4


def test_a_shared_lock_of_another_process_holds_up_nobody(tmp_path: Path) -> None:
    path = tmp_path / "g.sqlite"
    with filled(path, 3) as store, held(path, "BEGIN;SELECT count(*) FROM items"):
        for write in WRITES.values():
            write(store)
        # Its snapshot keeps the log from being emptied, and that is known.
        assert store.delete(["item-0"]) == 1 and not store.scrub()
        assert Path(f"{path}-wal").stat().st_size > 0


def test_a_reader_cannot_become_a_writer(tmp_path: Path) -> None:
    """A deferred transaction that turns to writing fails at once, however long the timeout."""
    with filled(tmp_path / "g.sqlite", 3) as store:
        seen: list[str] = []
        with (
            store.read_snapshot() as connection,
            pytest.raises(sqlite3.OperationalError, match="readonly"),
        ):
            connection.execute("DELETE FROM items")
        with store.transaction() as connection:
            connection.set_trace_callback(seen.append)
        for write in WRITES.values():
            write(store)
        begins = [statement for statement in seen if statement.startswith("BEGIN")]
        assert len(begins) > 7 and set(begins) == {"BEGIN IMMEDIATE"}
        inside = False
        for statement in seen:
            inside = (inside or statement.startswith("BEGIN")) and statement != "COMMIT"
            if statement.startswith(("INSERT", "UPDATE", "DELETE", "CREATE", "DROP")):
                assert inside, statement


def test_every_connection_writes_through_to_the_disk_and_forgets_what_is_deleted(
    tmp_path: Path,
) -> None:
    wanted = {"synchronous": 2, "secure_delete": 1, "foreign_keys": 1, "journal_mode": "wal"}
    with filled(tmp_path / "g.sqlite", 1) as store, store.transaction() as connection:
        for pragma, value in wanted.items():
            assert connection.execute(f"PRAGMA {pragma}").fetchone() == (value,), pragma


def test_two_upgrades_at_once_do_the_work_once(tmp_path: Path) -> None:
    path = tmp_path / "g.sqlite"
    with filled(path, 200) as store, SqliteGallery.open(path) as other:
        outcomes = []

        def run(own: SqliteGallery) -> None:
            outcomes.append(run_upgrade(own, Linear(), spec(2), items_per_chunk=8))

        threads = [threading.Thread(target=run, args=(own,)) for own in (store, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(outcome.written_count for outcome in outcomes) == 200
        assert [outcome.left_behind_count for outcome in outcomes] == [0, 0]
        both = rows(store, TWO)
    with filled(tmp_path / "alone.sqlite", 200) as store:
        run_upgrade(store, Linear(), spec(2), items_per_chunk=8)
        assert sorted(rows(store, TWO)) == sorted(both)


def test_of_two_creators_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "g.sqlite"
    results: list[type] = []

    def create() -> None:
        try:
            with SqliteGallery.create(path, spec()):
                results.append(SqliteGallery)
        except (AlreadyExistsError, BusyError) as error:
            results.append(type(error))

    threads = [threading.Thread(target=create) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results.count(SqliteGallery) == 1 and len(results) == 6


DIES = """
import os, signal, sys
from pathlib import Path
from tests.gallery.making import put, ids
from nobackfill.gallery.sqlite_gallery import SqliteGallery
store = SqliteGallery.open(Path(sys.argv[1]))
put(store, ids(int(sys.argv[2]), start=100), seed=3)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_acknowledged_put_outlives_the_process_and_the_pages_are_checked(
    tmp_path: Path,
) -> None:
    path = tmp_path / "g.sqlite"
    filled(path, 5).close()
    done = subprocess.run([sys.executable, "-c", DIES, str(path), "20"])
    assert done.returncode == -signal.SIGKILL
    assert Path(f"{path}-wal").stat().st_size > 0
    with SqliteGallery.open(path) as store:
        assert store.count() == 25
        assert list(rows(store, ONE)) == list(range(1, 26))


def test_damage_is_found_after_an_unclean_end(tmp_path: Path) -> None:
    path = tmp_path / "g.sqlite"
    filled(path, 2000).close()
    subprocess.run([sys.executable, "-c", DIES, str(path), "1"])
    content = bytearray(path.read_bytes())
    # The header of a page in the middle.
    content[16384 * 7 : 16384 * 7 + 12] = os.urandom(12)
    path.write_bytes(content)
    names = path, Path(f"{path}-wal")
    before = [sha256_file(name) for name in names]
    with pytest.raises(VerificationError, match="restore a backup"):
        SqliteGallery.open(path)
    # A rescue reads the log, too.
    assert [sha256_file(name) for name in names] == before


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shm", "no shm"])
def test_a_rescue_reads_the_log_of_a_killed_process_and_changes_nothing(
    tmp_path: Path, shared_memory: bool
) -> None:
    path, saved = tmp_path / "g.sqlite", tmp_path / "saved.sqlite"
    filled(path, 2000).close()
    done = subprocess.run([sys.executable, "-c", DIES, str(path), "20"])
    assert done.returncode == -signal.SIGKILL
    content = bytearray(path.read_bytes())
    # The header of a page of vectors that the log does not replace.
    page = content.index(vectors(2000, 0)[1500].tobytes()) // 16384 * 16384
    content[page : page + 12] = bytes(12)
    path.write_bytes(content)
    log = Path(f"{path}-wal")
    if not shared_memory:
        Path(f"{path}-shm").unlink()
    before = sha256_file(path), sha256_file(log)
    report = rescue_gallery(path, saved, {})
    assert (sha256_file(path), sha256_file(log)) == before
    assert report.saved_item_count == 2000 and 0 < report.missing_rows < 500
    with SqliteGallery.open(saved) as store:
        saved_vectors = dict(zip(*(part.tolist() for part in store.load_vectors(ONE)), strict=True))
        items = [store.get(name) for name in ids(20, start=100)]
    logged = [saved_vectors[item.label] for item in items if item is not None]
    assert logged == vectors(20, 3).tolist()


def test_nobody_checks_while_another_has_it_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "g.sqlite"
    checks: list[str] = []

    def traced(where: Path, access: FileAccess = sqlite_file.SHARED_ACCESS) -> sqlite3.Connection:
        connection = open_connection(where, access)
        connection.set_trace_callback(checks.append)
        return connection

    with filled(path, 5) as store:
        put(store, ["more"], seed=1)
        monkeypatch.setattr(sqlite_file, "open_connection", traced)
        with SqliteGallery.open(path) as second:
            assert second.count() == 6
        assert not [statement for statement in checks if "quick_check" in statement]
    filled(tmp_path / "h.sqlite", 1).close()
    subprocess.run([sys.executable, "-c", DIES, str(path), "1"])
    SqliteGallery.open(path).close()
    assert [statement for statement in checks if "quick_check" in statement]


def test_readers_of_many_threads_have_connections_of_their_own(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 50) as store:
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                for turn in range(5):
                    put(store, ids(3, start=1000 * seed + 10 * turn), seed=seed)
                    assert len(store.load_vectors(ONE)[0]) >= 50
                    store.delete([f"item-{1000 * seed + 10 * turn}"])
            except BaseException as error:  # noqa: BLE001 - told in the main thread
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures and store.count() == 50 + 6 * 5 * 2


def test_a_listener_may_read_the_store(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 2) as store:
        seen: list[int] = []
        store.subscribe(lambda change: seen.append(store.count()))
        store.put(["a"], [NewVectors(ONE, vectors(1, 1))])
        store.delete(["a"])
        assert seen == [3, 2]


def test_what_another_process_takes_away_meanwhile_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, log = tmp_path / "g.sqlite", tmp_path / "g.sqlite-wal"
    filled(path, 3).close()
    log.touch()
    asked = os.access

    def closing(name: Path, mode: int, **more: bool) -> bool:
        log.unlink(missing_ok=True)
        return asked(name, mode, **more)

    monkeypatch.setattr(os, "access", closing)
    assert sqlite_file.explain_unwritable(path) is None and not log.exists()


def test_a_suspended_gallery_whose_file_is_gone_is_not_created_again(tmp_path: Path) -> None:
    path = tmp_path / "gallery.sqlite"
    with SqliteGallery.create(path, spec(1)) as store:
        assert store.suspend()
        path.unlink()
        with pytest.raises(NotFoundError, match="no gallery file there"):
            store.count()
        assert not path.exists()


def test_a_gallery_that_goes_while_it_is_read_without_a_lock_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "g.sqlite"
    filled(path, 3).close()
    # As on a file system that is read-only.
    monkeypatch.setattr(sqlite_file, "explain_unwritable", lambda path: "read-only")
    with SqliteGallery.open(path) as store:
        assert store.count() == 3
        with (
            pytest.raises(NotFoundError, match="gone since it was opened"),
            store.read_snapshot() as connection,
        ):
            connection.execute("SELECT count(*) FROM items").fetchone()
            path.unlink()
