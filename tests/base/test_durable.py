"""Durable writes: whole or not at all, faults at every step, locks, transactions."""

import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from nobackfill import durable
from nobackfill.durable import FAULT_INJECTOR, DurableStep, FaultInjector
from nobackfill.errors import AlreadyExistsError, BusyError, CannotWriteError, ConfigurationError
from tests.support.crash import KILLED, run_with_fault, sweep


def test_a_file_is_put_with_its_mode_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    durable.write_file(path, b"one", mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    durable.write_file(path, b"two")
    assert path.read_bytes() == b"two"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("kind", ["kill", "short", "eio", "enospc"])
def test_a_file_is_old_or_new_whatever_step_fails(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"

    def prepare() -> None:
        durable.remove_temporary_files(tmp_path)
        path.write_bytes(b"old" * 1000)

    steps = 0
    for step, outcome in sweep(kind, lambda: durable.write_file(path, b"new" * 900), prepare):
        steps = step
        assert path.read_bytes() in (b"old" * 1000, b"new" * 900)
        if kind in ("eio", "enospc"):
            assert outcome.status == CannotWriteError.exit_code
            assert [p.name for p in tmp_path.iterdir()] == ["file"]
        else:
            assert outcome.status == KILLED
    # create, write, fsync, rename, fsync of the folder
    assert steps == 5


def test_append_adds_and_a_torn_write_leaves_a_prefix(tmp_path: Path) -> None:
    path = tmp_path / "file"
    durable.append_bytes(path, b"one")
    durable.append_bytes(path, b"two")
    assert path.read_bytes() == b"onetwo"
    for _, outcome in sweep("short", lambda: durable.append_bytes(path, b"three!"), lambda: None):
        assert outcome.status == KILLED
        assert b"onetwo".startswith(path.read_bytes()[:6])
        assert path.read_bytes()[6:] in (b"", b"thr", b"three!", b"thrthree!")


def test_a_folder_appears_whole_and_never_over_another(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    durable.make_dir(source / "deep")
    durable.write_file(source / "deep" / "file", b"data")
    durable.publish_dir(source, target)
    assert (target / "deep" / "file").read_bytes() == b"data"
    assert not source.exists()
    durable.make_dir(source)
    with pytest.raises(AlreadyExistsError):
        durable.publish_dir(source, target)
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(AlreadyExistsError):
        durable.publish_dir(source, tmp_path / "link")


def test_a_published_folder_was_synced_before_it_got_its_name(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "file").write_bytes(b"data")
    steps: list[DurableStep] = []
    FAULT_INJECTOR.observer = steps.append
    try:
        durable.publish_dir(source, tmp_path / "target")
    finally:
        FAULT_INJECTOR.observer = None
    kinds = [(step.kind, step.path.name) for step in steps]
    rename = kinds.index(("rename", "source"))
    assert kinds.index(("fsync", "file")) < kinds.index(("fsync_dir", "deep")) < rename
    assert ("fsync_dir", tmp_path.name) in kinds[rename:]


def test_trees_links_and_nothing_can_be_removed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"stays")
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep" / "file").write_bytes(b"goes")
    (tree / "link").symlink_to(outside)
    (tree / "file_link").symlink_to(outside / "file")
    durable.remove_tree(tree)
    assert not tree.exists()
    assert (outside / "file").read_bytes() == b"stays"
    durable.remove_tree(tree)


def test_sweep_removes_temporaries_only(tmp_path: Path) -> None:
    for name in (".tmp-a-1", ".tmp-b-2", "a", "b.tmp-1"):
        (tmp_path / name).write_bytes(b"")
    assert [p.name for p in durable.remove_temporary_files(tmp_path, "a")] == [".tmp-a-1"]
    durable.remove_temporary_files(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b.tmp-1"]


def test_a_missing_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(CannotWriteError, match=str(tmp_path / "missing" / "file")):
        durable.write_file(tmp_path / "missing" / "file", b"")


def test_a_full_disk_says_so(tmp_path: Path) -> None:
    outcome = run_with_fault("enospc@2", lambda: durable.write_file(tmp_path / "file", b"x"))
    assert "free some space" in outcome.error


def test_a_lock_is_held_by_one_and_freed_by_death(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "lock"
    holder = (
        "import sys, time; from pathlib import Path; from nobackfill import durable\n"
        f"with durable.lock_file(Path({str(path)!r})):\n"
        "    print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(BusyError, match="try again"), durable.lock_file(path, timeout_s=0.1):
            raise AssertionError("two holders")
        child.kill()
    with durable.lock_file(path):
        pass


def test_transactions_commit_or_roll_back(tmp_path: Path) -> None:
    connection = database(tmp_path / "db")
    with durable.transaction(connection):
        connection.execute("INSERT INTO t VALUES (1)")
    with pytest.raises(ZeroDivisionError), durable.transaction(connection):
        connection.execute("INSERT INTO t VALUES (2)")
        raise ZeroDivisionError
    assert connection.execute("SELECT * FROM t").fetchall() == [(1,)]
    connection.close()


@pytest.mark.parametrize("kind", ["kill", "eio", "enospc"])
def test_a_transaction_is_whole_or_absent_whatever_step_fails(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "db"
    database(path).close()

    def insert() -> None:
        connection = sqlite3.connect(path, isolation_level=None)
        with durable.transaction(connection):
            connection.executemany("INSERT INTO t VALUES (?)", [(1,), (2,)])

    def empty() -> None:
        run_sql(path, "DELETE FROM t")

    counts = []
    for _, _ in sweep(kind, insert, empty):
        counts.append(run_sql(path, "SELECT count(*) FROM t")[0][0])
    # begin, before the commit, after it
    assert counts == [0, 0, 2]


def test_a_database_in_use_is_busy_not_broken(tmp_path: Path) -> None:
    first = database(tmp_path / "db")
    second = sqlite3.connect(tmp_path / "db", isolation_level=None, timeout=0.05)
    with durable.transaction(first), pytest.raises(BusyError), durable.transaction(second):
        raise AssertionError("two writers")
    first.close()
    second.close()


def test_a_read_only_database_cannot_be_written(tmp_path: Path) -> None:
    database(tmp_path / "db").close()
    connection = sqlite3.connect(f"file:{tmp_path / 'db'}?mode=ro", uri=True, isolation_level=None)
    with pytest.raises(CannotWriteError), durable.transaction(connection):
        connection.execute("INSERT INTO t VALUES (1)")
    connection.close()


@pytest.mark.parametrize("spec", ["kill", "kill@", "kill@0", "burn@1", "kill@1x", "kill@-1"])
def test_unknown_faults_are_refused(spec: str) -> None:
    with pytest.raises(ConfigurationError, match="kill@N"):
        FaultInjector(spec)


def test_faults_fire_once_or_from_there_on() -> None:
    for spec, fired in (("eio@2", [0, 1, 0, 0]), ("eio@2+", [0, 1, 1, 1]), (None, [0, 0, 0, 0])):
        faults = FaultInjector(spec)
        assert [int(bool(faults.count_step())) for _ in range(4)] == fired
        assert faults.steps == 4
        assert faults.fired == any(fired)


def test_the_environment_arms_a_process(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path; from nobackfill import durable\n"
        f"durable.write_file(Path({str(tmp_path / 'file')!r}), b'x')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "NOBACKFILL_FAULT": "kill@3"},
        check=False,
    )
    assert done.returncode == KILLED
    assert not (tmp_path / "file").exists()


def database(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("CREATE TABLE IF NOT EXISTS t (x)")
    return connection


def run_sql(path: Path, sql: str) -> list[tuple[int, ...]]:
    connection = sqlite3.connect(path, isolation_level=None)
    rows = connection.execute(sql).fetchall()
    connection.close()
    return rows
