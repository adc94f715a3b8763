"""`publication`: what it prints and how it exits, as a real process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nobackfill.errors import AlreadyExistsError, ConfigurationError, VerificationError
from nobackfill.release.publishing.cli import main
from nobackfill.release.publishing.metadata import SigningKeys
from nobackfill.release.publishing.publish import publish
from tests.support.releases import draft

pytestmark = pytest.mark.usefixtures("near_gate")


class Commands:
    """`publication` in this process; one test starts it as a real one."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def run(self, *args: str | Path, code: int = 0) -> str:
        """stdout, or stderr where it must fail."""
        self._monkeypatch.setattr(sys, "argv", ["release", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
            raise SystemExit(0)
        said = self._capsys.readouterr()
        assert (ended.value.code or 0) == code, said.err
        return said.err if code else said.out

    def json(self, *args: str | Path) -> Any:
        """The one object on stdout."""
        return json.loads(self.run(*args, "--json"))


@pytest.fixture
def commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Commands:
    return Commands(capsys, monkeypatch)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    publish(tmp_path / "repo", draft(tmp_path / "drafts", 1))
    return tmp_path / "repo"


def test_help_names_every_command(commands: Commands) -> None:
    text = commands.run("--help")
    for name in ("keys", "resign", "rotate", "withdraw", "verify", "list"):
        assert name in text


def test_offline_keys_from_the_beginning(commands: Commands, tmp_path: Path) -> None:
    repo, usb = tmp_path / "repo", tmp_path / "usb"
    usb.mkdir()
    away = ("--root-key", usb / "root.pem", "--targets-key", usb / "targets.pem")
    assert commands.json("keys", "--model-repo", repo, *away, "--dry-run")["written"] is False
    assert not repo.exists()
    made = commands.json("keys", "--model-repo", repo, *away)
    assert sorted(path.name for path in usb.iterdir()) == ["root.pem", "targets.pem"]
    assert len(made["fingerprint"]) == 16 * 4 + 15
    refusal = commands.run("keys", "--model-repo", repo, *away, code=AlreadyExistsError.exit_code)
    assert "rotate" in refusal
    publish(
        repo,
        draft(tmp_path / "drafts", 1),
        SigningKeys.of_publication(repo, {"targets": usb / "targets.pem"}),
    )
    assert commands.json("verify", "--model-repo", repo)["fingerprint"] == made["fingerprint"]


def test_list_and_verify_tell_the_state(commands: Commands, repo: Path) -> None:
    (entry,) = commands.json("list", "--model-repo", repo)["releases"]
    assert (entry["release"], entry["withdrawn"], entry["gate"]) == (1, None, "first")
    health = commands.json("verify", "--model-repo", repo, "--root", repo / "1.root.json")
    assert health["releases"] == [1]
    assert set(health["expires"]) == {"root", "targets", "snapshot", "timestamp"}
    assert "release 1: good" in commands.run("verify", "--model-repo", repo, "--release", "1")


def test_verify_fails_for_a_flipped_bit(commands: Commands, repo: Path) -> None:
    model = repo / "embedder_1" / "1" / "model.onnx"
    data = bytearray(model.read_bytes())
    data[-9] ^= 1
    model.write_bytes(data)
    refusal = commands.run("verify", "--model-repo", repo, code=VerificationError.exit_code)
    assert "embedder_1/1/model.onnx" in refusal


def test_withdraw_and_its_dry_run(commands: Commands, repo: Path) -> None:
    args = ("withdraw", "1", "--model-repo", repo, "--reason", "it confuses cats")
    assert commands.json(*args, "--dry-run") == {
        "release": 1, "reason": "it confuses cats", "news": True, "written": False,
    }  # fmt: skip
    assert commands.json("list", "--model-repo", repo)["releases"][0]["withdrawn"] is None
    assert commands.json(*args)["written"] is True
    assert commands.json(*args)["news"] is False
    assert "WITHDRAWN: it confuses cats" in commands.run("list", "--model-repo", repo)
    commands.run("withdraw", "5", "--model-repo", repo, "--reason", "x", code=66)


def test_resign_and_rotate(commands: Commands, repo: Path, tmp_path: Path) -> None:
    assert commands.json("resign", "--model-repo", repo)["roles"] == ["snapshot", "timestamp"]
    rotated = commands.json(
        "rotate", "--model-repo", repo, "--role", "timestamp", "--role", "targets"
    )
    assert rotated["roles"] == ["targets", "timestamp"]
    commands.run(
        "rotate", "--model-repo", repo, "--role", "leaf", code=ConfigurationError.exit_code
    )
    (tmp_path / "repo.keys" / "root.pem").unlink()
    refusal = commands.run("rotate", "--model-repo", repo, "--role", "root",
                      code=ConfigurationError.exit_code)  # fmt: skip
    assert "--root-key" in refusal


@pytest.mark.parametrize(
    "args",
    [("list",), ("verify",), ("resign",), ("resign", "--dry-run"), ("rotate", "--role", "root"),
     ("withdraw", "1", "--reason", "x"), ("withdraw", "1", "--reason", "x", "--dry-run")],
    ids=" ".join,
)  # fmt: skip
def test_nothing_published_is_said_and_nothing_is_made(
    args: tuple[str, ...], commands: Commands, tmp_path: Path
) -> None:
    refusal = commands.run(*args, "--model-repo", tmp_path / "repo", code=66)
    assert str(tmp_path / "repo") in refusal
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("args", [("nonsense",), ("withdraw", "1"), ("withdraw", "x"), ("rotate",)])
def test_wrong_usage_exits_2(commands: Commands, args: tuple[str, ...]) -> None:
    commands.run(*args, code=2)


def test_it_is_a_command(repo: Path) -> None:
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        publication = Path(sys.executable).with_name("publication")
        words = [str(publication), *args, "--model-repo", str(repo)]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    listed = run("list", "--json")
    assert listed.returncode == 0
    assert json.loads(listed.stdout)["releases"][0]["release"] == 1
    refused = run("withdraw", "9", "--reason", "x")
    assert refused.returncode == 66
    assert refused.stdout == ""
    assert refused.stderr.startswith("publication: ")
    assert "Traceback" not in refused.stderr
