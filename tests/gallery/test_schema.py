"""The file is readable without us: plain tables, checked by SQLite's own command line."""

import json
import shutil
import sqlite3
import struct
import subprocess
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import pytest

from nobackfill.errors import VerificationError
from nobackfill.gallery import staging
from nobackfill.gallery.schema import migrations
from nobackfill.gallery.sqlite_file import GALLERY_FORMAT
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.staging import run_upgrade
from nobackfill.gallery.store import NewVectors
from tests.gallery.making import Linear, ids, spec, vectors


def sql(path: Path, statement: str) -> list[list[str]]:
    """What a program that knows nothing of ours reads: the CLI, or Python's module without it."""
    if shutil.which("sqlite3") is None:
        with closing(sqlite3.connect(path)) as connection, connection:
            return [[str(v) for v in row] for row in connection.execute(statement)]
    command = ["sqlite3", "-readonly", "-json", str(path), statement]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [[str(v) for v in row.values()] for row in json.loads(done.stdout or "[]")]


def make(path: Path) -> None:
    with SqliteGallery.create(path, spec()) as store:
        store.put(
            ids(3),
            [NewVectors(spec().space, vectors(3, 1), vectors(3, 2, 5))],
            digests=["a", "b", "c"],
            metadata=[{"year": 2024.0, "place": "Zürich"}, {"seen": True}, {}],
        )
        run_upgrade(store, Linear(), spec(2))
        staging.flip(store, spec(2).space, state={"floor": {"root": 1}})


def test_another_program_reads_the_gallery(tmp_path: Path) -> None:
    path = tmp_path / "g.sqlite"
    make(path)
    assert sql(path, "PRAGMA integrity_check") == [["ok"]]
    assert sql(path, "PRAGMA foreign_key_check") == []
    assert sql(path, "SELECT label, id, digest FROM items ORDER BY label") == [
        ["1", "item-0", "a"], ["2", "item-1", "b"], ["3", "item-2", "c"],
    ]  # fmt: skip
    assert sql(path, "SELECT id FROM items WHERE metadata ->> 'place' = 'Zürich'") == [["item-0"]]
    assert sql(path, "SELECT release, dim, metric, state, number FROM spaces ORDER BY number") == [
        ["1", "12", "squared_l2", "previous", "1"], ["2", "12", "squared_l2", "active", "2"],
    ]  # fmt: skip
    assert sql(path, "SELECT DISTINCT origin FROM vectors_2") == [["upgraded"]]
    hexadecimal = sql(path, "SELECT hex(embedding) FROM vectors_1 WHERE label = 2")[0][0]
    assert struct.unpack("<12f", bytes.fromhex(hexadecimal)) == tuple(vectors(3, 1)[1])
    assert sql(path, "SELECT key, kind, value, label FROM attributes ORDER BY label, key") == [
        ["place", "text", "Zürich", "1"], ["year", "number", "2024.0", "1"],
        ["seen", "flag", "1", "2"],
    ]  # fmt: skip
    assert sql(path, "SELECT value FROM state") == [['{"root": 1}']]


def test_a_second_active_space_is_impossible(tmp_path: Path) -> None:
    make(tmp_path / "g.sqlite")
    with (
        closing(sqlite3.connect(tmp_path / "g.sqlite")) as connection,
        pytest.raises(sqlite3.IntegrityError),
    ):
        connection.execute("UPDATE spaces SET state = 'active'")


def test_a_file_is_brought_up_to_date_where_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "g.sqlite"
    make(path)
    applied = "SELECT name FROM _sqlite_migrations WHERE migration_set = 'gallery'"
    assert sql(path, applied) == [[m.name] for m in migrations._migrations]
    assert len(migrations._migrations) == GALLERY_FORMAT
    assert sql(path, "PRAGMA user_version") == [[str(GALLERY_FORMAT)]]


@pytest.mark.parametrize(
    ("pragma", "said"),
    [
        ("user_version = 99", f"use nobackfill {version('nobackfill')}, which wrote it"),
        ("application_id = 5", "another program"),
    ],
)
def test_a_file_of_another_program_or_a_newer_one_is_refused(
    tmp_path: Path, pragma: str, said: str
) -> None:
    path = tmp_path / "g.sqlite"
    make(path)
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA {pragma}")
    connection.close()
    with pytest.raises(VerificationError, match=said):
        SqliteGallery.open(path)


@pytest.mark.parametrize(
    ("statement", "writer"),
    [
        ("UPDATE _sqlite_migrations SET name = '7.1.0rc2' WHERE name LIKE '0%'",
         "nobackfill 7.1.0rc2, which wrote it"),
        ("DELETE FROM _sqlite_migrations WHERE migration_set = 'nobackfill'",
         "the newer nobackfill that wrote it"),
        ("DROP TABLE _sqlite_migrations", "the newer nobackfill that wrote it"),
        ("UPDATE _sqlite_migrations SET name = 'x; rm' WHERE migration_set = 'nobackfill'",
         "the newer nobackfill that wrote it"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_version_that_wrote_the_file(
    tmp_path: Path, statement: str, writer: str
) -> None:
    path = tmp_path / "g.sqlite"
    make(path)
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(VerificationError, match=f"got format 99; use {writer}"):
        SqliteGallery.open(path)


def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "g.sqlite"
    path.write_bytes(b"hello " * 5000)
    with pytest.raises(VerificationError, match="another kind"):
        SqliteGallery.open(path)
