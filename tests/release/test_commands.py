"""`python -m release`: what it prints and how it exits, as a real process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from release.errors import AlreadyExistsError, ConfigurationError, VerificationError
from release.keys import Keys
from release.publish import publish
from tests.support.releases import draft

pytestmark = pytest.mark.usefixtures("near_gate")


def command(*args: str | Path, code: int = 0) -> str:
    """stdout, or stderr where it must fail."""
    done = subprocess.run(
        [sys.executable, "-m", "release", *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr if code else done.stdout


def answer(*args: str | Path) -> Any:
    return json.loads(command(*args, "--json"))


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    publish(tmp_path / "repo", draft(tmp_path / "drafts", 1))
    return tmp_path / "repo"


def test_help_names_every_command() -> None:
    text = command("--help")
    for name in ("keys", "resign", "rotate", "withdraw", "verify", "list"):
        assert name in text


def test_offline_keys_from_the_beginning(tmp_path: Path) -> None:
    repo, usb = tmp_path / "repo", tmp_path / "usb"
    usb.mkdir()
    away = ("--root-key", usb / "root.pem", "--targets-key", usb / "targets.pem")
    assert answer("keys", "--model-repo", repo, *away, "--dry-run")["written"] is False
    assert not repo.exists()
    made = answer("keys", "--model-repo", repo, *away)
    assert sorted(path.name for path in usb.iterdir()) == ["root.pem", "targets.pem"]
    assert len(made["fingerprint"]) == 16 * 4 + 15
    refusal = command("keys", "--model-repo", repo, *away, code=AlreadyExistsError.exit_code)
    assert "rotate" in refusal
    publish(
        repo, draft(tmp_path / "drafts", 1), Keys.beside(repo, {"targets": usb / "targets.pem"})
    )
    assert answer("verify", "--model-repo", repo)["fingerprint"] == made["fingerprint"]


def test_list_and_verify_tell_the_state(repo: Path) -> None:
    (entry,) = answer("list", "--model-repo", repo)["releases"]
    assert (entry["release"], entry["withdrawn"], entry["gate"]) == (1, None, "first")
    health = answer("verify", "--model-repo", repo, "--root", repo / "1.root.json")
    assert health["releases"] == [1]
    assert set(health["expires"]) == {"root", "targets", "snapshot", "timestamp"}
    assert "release 1: good" in command("verify", "--model-repo", repo, "--release", "1")


def test_verify_fails_for_a_flipped_bit(repo: Path) -> None:
    model = repo / "embedder_1" / "1" / "model.onnx"
    data = bytearray(model.read_bytes())
    data[-9] ^= 1
    model.write_bytes(data)
    refusal = command("verify", "--model-repo", repo, code=VerificationError.exit_code)
    assert "embedder_1/1/model.onnx" in refusal


def test_withdraw_and_its_dry_run(repo: Path) -> None:
    args = ("withdraw", "1", "--model-repo", repo, "--reason", "it confuses cats")
    assert answer(*args, "--dry-run") == {
        "release": 1, "reason": "it confuses cats", "news": True, "written": False,
    }  # fmt: skip
    assert answer("list", "--model-repo", repo)["releases"][0]["withdrawn"] is None
    assert answer(*args)["written"] is True
    assert answer(*args)["news"] is False
    assert "WITHDRAWN: it confuses cats" in command("list", "--model-repo", repo)
    command("withdraw", "5", "--model-repo", repo, "--reason", "x", code=1)


def test_resign_and_rotate(repo: Path, tmp_path: Path) -> None:
    assert answer("resign", "--model-repo", repo)["roles"] == ["snapshot", "timestamp"]
    rotated = answer("rotate", "--model-repo", repo, "--role", "timestamp", "--role", "targets")
    assert rotated["roles"] == ["targets", "timestamp"]
    command("rotate", "--model-repo", repo, "--role", "leaf", code=ConfigurationError.exit_code)
    (tmp_path / "repo.keys" / "root.pem").unlink()
    refusal = command("rotate", "--model-repo", repo, "--role", "root",
                      code=ConfigurationError.exit_code)  # fmt: skip
    assert "--root-key" in refusal


@pytest.mark.parametrize("args", [("nonsense",), ("withdraw", "1"), ("withdraw", "x"), ("rotate",)])
def test_wrong_usage_exits_2(args: tuple[str, ...]) -> None:
    command(*args, code=2)
