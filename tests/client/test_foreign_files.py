"""Gallery files and paths of other people: each is refused in a sentence, and none is endless."""

import json
import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nobackfill.client.cli.main import run_line
from nobackfill.client.vault.keys import read_identity
from nobackfill.client.vault.queue import TABLE
from nobackfill.client.vault.transfer import _is_plain
from nobackfill.errors import ConfigurationError
from tests.support.commands import run_here
from tests.support.edge import Setting

Run = Callable[..., tuple[int, str]]
COMMANDS = ("list", "status", "verify", "gc", "rescue --to FOLDER/saved.sqlite")
_ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT"


def _view(table: str, columns: str) -> str:
    return f"DROP TABLE {table}; CREATE VIEW {table} AS {_ENDLESS} {columns} FROM n"


_DEEP = "'" + "[" * 100_000 + "'"
# By what is wrong with the tables: no command takes such a file.
TABLES = {
    "endless items": _view("items", "x AS label, x AS id, NULL AS digest, '{}' AS metadata"),
    "endless state": _view("state", "x AS key, '1' AS value"),
    "endless spaces": _view(
        "spaces",
        "x AS number, x AS space, 1 AS release, 64 AS dim, 'cosine' AS metric, 1 AS unit, NULL AS"
        " side_space, 0 AS side_dim, 'active' AS state, 1 AS activated",
    ),
    "endless vectors": _view(
        "vectors_1",
        "x AS label, 'native' AS origin, NULL AS uncertainty, x'00' AS embedding, NULL AS side",
    ),
    "endless commits": _view("commits", "x AS count"),
    "a trigger": f"CREATE TRIGGER t AFTER UPDATE ON commits BEGIN"
    f" INSERT INTO state {_ENDLESS} x, x FROM n; END",
    "a virtual table": "DROP TABLE commits; CREATE VIRTUAL TABLE commits USING fts5(count)",
    "a generated column": "ALTER TABLE items ADD COLUMN more AS (label * 2)",
    "no items": "DROP TABLE items",
    "no digests": "ALTER TABLE items DROP COLUMN digest",
    "labels of text": "CREATE TABLE i AS SELECT 'a' || label AS label, id, digest, metadata FROM"
    " items; DROP TABLE items; ALTER TABLE i RENAME TO items",
    "no space": "DROP TABLE spaces",
}
VALUES = {
    **{
        f"{column} = {value}": f"UPDATE spaces SET {column} = {value}"
        for column, value in (
            ("dim", "0"), ("dim", "-1"), ("dim", "4611686018427387904"), ("dim", "'x'"),
            ("metric", "'no'"), ("number", "-5"), ("space", "x'00'"), ("release", "x'00'"),
            ("side_dim", "-1"),
            ("release", "-3"), ("release", "4294967296"),
        )
    },
    "deep metadata": f"UPDATE items SET metadata = {_DEEP}",
    "metadata that is a list": "UPDATE items SET metadata = '[]'",
    "ids that are bytes": "UPDATE items SET id = x'ff' || label",
    "short vectors": "UPDATE vectors_1 SET embedding = x'00'",
    "vectors of text": "UPDATE vectors_1 SET embedding = 'x'",
    "an endless label": "UPDATE items SET label = 9223372036854775807 WHERE label = 3",
    "an old format": "PRAGMA user_version = 0",
    **{
        f"state {key} = {value[:9]}": f"UPDATE state SET value = {value} WHERE key = '{key}'"
        for key in ("source", "root", "floor", "installed", "cohort", "tried")
        for value in ("'5'", "'\"x\"'", "'[[1]]'", "'{\"1\": {\"a\": [null]}}'", "'{'", _DEEP)
    },
    **{
        f"state {key} = {value[:20]}": f"INSERT OR REPLACE INTO state VALUES ('{key}', {value})"
        for key in ("held_back", "held_digests", "carried", "last_sync", "tried", "installed")
        for value in (
            "'[1]'", "'{\"x\": \"y\"}'", "'{\"2\": \"y\"}'", "'{\"2\": {\"at\": 1}}'",
            "'{\"1\": {\"at\": \"2026-01-01\"}}'", "'{\"x\": [{}]}'", "'{\"-1\": null}'",
            "'{\"release\": \"x\", \"failure\": 1}'",
        )
    },
}  # fmt: skip


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process, within a minute: its exit code, and what it says."""

    def run(gallery: Path, *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["edge-client", "--gallery", str(gallery), *arguments])
        with pytest.raises(SystemExit) as ended:
            run_line()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.err + said.out

    return run


@pytest.fixture(autouse=True)
def _within_a_minute() -> Iterator[None]:
    """SQLite answers no signal of Python's while it runs a statement: this one ends the process."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(120)
    yield
    signal.alarm(0)


def spoiled(setting: Setting, folder: Path, statements: str) -> Path:
    folder.mkdir()
    for path in setting.gallery.parent.glob("gallery.sqlite*"):
        (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / path.name)
    connection = sqlite3.connect(folder / "gallery.sqlite", isolation_level=None)
    connection.execute("PRAGMA foreign_keys = OFF")
    connection.executescript(statements)
    connection.close()
    return folder / "gallery.sqlite"


def test_what_stands_where_a_table_belongs_is_refused(
    setting: Setting, tmp_path: Path, here: Run
) -> None:
    for number, (what, statements) in enumerate(TABLES.items()):
        gallery = spoiled(setting, tmp_path / str(number), statements)
        for command in COMMANDS:
            words = command.replace("FOLDER", str(gallery.parent)).split()
            code, said = here(gallery, *words)
            assert code == 65, (what, command, said)
            assert said.count("\n") == 1 and "damaged" in said, (what, command, said)


@pytest.mark.long
@pytest.mark.parametrize(
    "command", ["status", "verify", "sync", "report", "gc", "rescue --to FOLDER/saved.sqlite"]
)
def test_values_of_other_kinds_are_named(
    setting: Setting, tmp_path: Path, here: Run, command: str
) -> None:
    for number, (what, statements) in enumerate(VALUES.items()):
        gallery = spoiled(setting, tmp_path / str(number), statements)
        code, said = here(gallery, *command.replace("FOLDER", str(gallery.parent)).split())
        assert code in (0, 65, 66, 69, 78), (what, said)
        assert code == 0 or said, what


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("release", 2**32), ("release", 10_000_000), ("release", -1), ("release", True),
        ("seconds", 10**400), ("seconds", "NaN"), ("seconds", -1.0), ("seconds", "Infinity"),
        ("neighbours_kept", 10**400), ("neighbours_kept", 1.5), ("neighbours_kept", "NaN"),
        ("failure", [1]),
    ],
)  # fmt: skip
def test_a_report_takes_no_number_that_its_message_cannot_hold(
    setting: Setting, tmp_path: Path, here: Run, key: str, value: object
) -> None:
    last = {
        "release": 2, "probes_passed": True, "seconds": 1.5, "neighbours_kept": 0.5,
        "failure": "none",
    }  # fmt: skip
    written = json.dumps({**last, key: value}).replace('"NaN"', "NaN")
    written = written.replace('"Infinity"', "Infinity")
    statement = f"INSERT OR REPLACE INTO state VALUES ('last_sync', '{written}')"
    gallery = spoiled(setting, tmp_path / "one", statement)
    code, said = here(gallery, "report", "--to", "grpc://127.0.0.1:1")
    assert code == 65 and "damaged (its state has an unusable value of 'last_sync')" in said, said


@pytest.mark.parametrize(
    ("key", "value", "command"),
    [
        ("held_back", '{"2": "\\ud800"}', "status"),
        ("source", '"\\u0000"', "sync"),
        ("carried", '{"1": {"at": "2026-01-01T00:00:00+00:00", "routes": 5}}', "sync"),
        ("carried", '{"1": {"at": "2026-01-01T00:00:00+00:00", "routes": [NaN]}}', "sync"),
        ("a later version's", "[1e400]", "rescue --to FOLDER/saved.sqlite"),
    ],
)
def test_state_that_no_version_writes_is_refused(
    setting: Setting, tmp_path: Path, here: Run, key: str, value: str, command: str
) -> None:
    """Python reads such values from JSON, and could neither use nor store them."""
    stored = key.replace("'", "''")
    statement = f"INSERT OR REPLACE INTO state VALUES ('{stored}', '{value}')"
    gallery = spoiled(setting, tmp_path / "one", statement)
    code, said = here(gallery, *command.replace("FOLDER", str(gallery.parent)).split())
    assert code == 65 and "is damaged" in said and key in said, said


@pytest.mark.parametrize("change", ["value = 5", "value = x'00'", "label = label + 0.5"])
def test_an_index_of_metadata_that_no_version_writes_is_refused(
    setting: Setting, tmp_path: Path, here: Run, change: str
) -> None:
    statement = f"UPDATE attributes SET {change} WHERE key = 'folder'"
    gallery = spoiled(setting, tmp_path / "one", statement)
    code, said = here(gallery, "search", str(setting.images[0]), "--where", "folder=x")
    assert code == 65 and "is damaged" in said, said


def test_names_that_no_file_can_have_are_of_no_file(
    setting: Setting, tmp_path: Path, here: Run
) -> None:
    metadata = '{"path": "a\\u0000b", "name": "\\u0000"}'
    gallery = spoiled(setting, tmp_path / "one", f"UPDATE items SET metadata = '{metadata}'")
    sheet = tmp_path / "sheet.png"
    code, said = here(gallery, "search", str(setting.images[0]), "--sheet", str(sheet))
    assert code == 0 and sheet.exists(), said
    names = ("a\0b", "\ud800", "..", "a/b", "", "x" * 300)
    assert not any(map(_is_plain, names)) and _is_plain("a\udc80 b.jpg")


@pytest.mark.parametrize(
    "change",
    [
        "size = -1", "size = 0", "size = 'x'", "size = 1.5", "blob = 5", "blob = '../secret'",
        "blob_sha256 = x'00'", "blob_sha256 = 'short'", "suffix = 7", "image_sha256 = 1", "key = 3",
        "image_sha256 = '../secret'", "state = 'lost'",
    ],
)  # fmt: skip
def test_rows_of_the_vault_that_nobody_wrote_are_named(
    setting: Setting, tmp_path: Path, here: Run, change: str
) -> None:
    table = TABLE.replace("STRICT", "").replace("TEXT", "").replace("INTEGER", "")
    table = table.replace("CHECK (state IN ('sealed', 'stored', 'removing'))", "")
    row = f"'{'a' * 64}', 'x', '{'b' * 64}', '{'c' * 64}', 9, '.png', 'stored', 'k'"
    made = f"{table}; INSERT INTO vault VALUES ({row})"
    gallery = spoiled(setting, tmp_path / "one", f"{made}; UPDATE vault SET {change}")
    code, said = here(gallery, "status")
    assert code == 65 and "its table of pushed images has a row with unusable values" in said, said


def test_rescue_follows_no_link(setting: Setting, tmp_path: Path, here: Run) -> None:
    gallery = spoiled(setting, tmp_path / "one", "")
    models = gallery.with_name("gallery.sqlite.models")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("not yours")
    (models / "linked.npz").symlink_to(tmp_path / "secret" / "key")
    here(gallery, "rescue", "--to", str(tmp_path / "a.sqlite"))
    assert (tmp_path / "a.sqlite.models").is_dir()
    assert not (tmp_path / "a.sqlite.models" / "linked.npz").exists()
    shutil.rmtree(models)
    models.symlink_to(tmp_path / "secret")
    _, said = here(gallery, "rescue", "--to", str(tmp_path / "b.sqlite"))
    assert not (tmp_path / "b.sqlite.models").exists()
    assert str(models) in said


@pytest.mark.parametrize("name", [b"\xff\xfe", b"x" * 300, b"/" + b"y/" * 3000])
@pytest.mark.parametrize(
    "words", ["init --from REPO --root ROOT", "rescue --to NAME", "remove NAME", "sync --from NAME",
              "add NAME"],
)  # fmt: skip
def test_names_that_are_none_get_a_sentence(
    setting: Setting, tmp_path: Path, words: str, name: bytes
) -> None:
    gallery = bytes(setting.gallery) if "init" not in words else name
    root = bytes(setting.repo / "1.root.json")
    filled = {b"REPO": bytes(setting.repo), b"ROOT": root, b"NAME": name}
    arguments = [filled.get(word, word) for word in words.encode().split()]
    done = run_here(run_line, "edge-client", "--gallery", gallery, *arguments, cwd=tmp_path)
    assert done.returncode in (0, 65, 66, 73, 78), done.stderr


@pytest.mark.parametrize(
    "words", ["init --from REPO --root /dev/zero", "add --texts /dev/zero", "add /dev/zero"]
)
def test_files_without_an_end_are_refused(
    setting: Setting, tmp_path: Path, here: Run, words: str
) -> None:
    gallery = tmp_path / "new.sqlite" if "init" in words else setting.gallery
    filled = words.replace("REPO", str(setting.repo))
    code, said = here(gallery, *filled.split())
    assert code in (65, 78), said
    with pytest.raises(ConfigurationError, match="regular file"):
        read_identity(Path("/dev/zero"))
