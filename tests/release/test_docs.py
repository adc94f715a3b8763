"""docs/releases.md: every command in it runs, in the order of the page."""

import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nobackfill.errors import UnavailableError
from nobackfill.release.publishing.cli import main
from nobackfill.release.publishing.metadata import (
    ROLES,
    VALIDITY,
    SigningKeys,
    require_signed_metadata,
)
from nobackfill.release.publishing.publish import publish
from nobackfill.release.trust.trust import fetch_first_root, fetcher_for
from tests.support.documents import lines, page, run_command
from tests.support.releases import draft

PAGE = page("docs/releases.md")


@pytest.mark.usefixtures("near_gate")
def test_every_command_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the page's order, but for `keys`, which comes before anything is published."""
    (tmp_path / "offline").mkdir()
    monkeypatch.chdir(tmp_path)
    commands = lines(PAGE, "sh")
    keys_line = next(line for line in commands if line.startswith("publication keys"))
    run(keys_line, monkeypatch)
    keys = SigningKeys.of_publication(Path("model_repo"), {"targets": Path("offline/targets.pem")})
    first = draft(tmp_path / "drafts", 1)
    publish(Path("model_repo"), first, keys)
    publish(Path("model_repo"), draft(tmp_path / "drafts", 2, [first.manifest]), keys)
    # Exporting needs training runs, or models: tests/training/test_releases_page.py.
    elsewhere = ("python training/export.py", "nobackfill", "publication keys")
    others = [line for line in commands if not line.startswith(elsewhere)]
    for line in others:
        run(line, monkeypatch)
    assert len(others) >= 10
    target = require_signed_metadata(Path("model_repo")).targets.targets["release-2.json"]
    assert target.custom == {"withdrawn": "confuses cats"}


def run(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(line)
    match words[0]:
        case "python" if words[2] == "http.server":
            serve(words)
        case "publication":
            run_command(main, words, monkeypatch)
        case "rsync":
            copy(words)
        case _:
            subprocess.run(words, check=True)


def serve(words: list[str]) -> None:
    """Start the page's static host, on a port that is free, and read from it as a device does."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
    with subprocess.Popen([sys.executable, *words[1:-1], port], stderr=subprocess.PIPE) as host:
        fetcher, base = fetcher_for(f"http://127.0.0.1:{port}")
        deadline = time.monotonic() + 30
        while True:
            try:
                root = fetch_first_root(fetcher, base)
                break
            except UnavailableError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        host.terminate()
    assert root == Path("model_repo/1.root.json").read_bytes()


def copy(words: list[str]) -> None:
    """What rsync does with the page's arguments, as it is not on every machine."""
    source, target = words[-2:]
    if source.endswith("/"):
        ignored = shutil.ignore_patterns(*words[words.index("--exclude") + 1 :][:1])
        shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)
    else:
        shutil.copy(source, target)


def test_the_page_tells_the_terms_that_are_signed() -> None:
    for role in ROLES:
        days = VALIDITY[role].days
        term = "1 year" if days == 365 else f"{days} days"
        assert re.search(rf"^\| {role} \|.*\| {term} \|", PAGE, re.MULTILINE), role


def test_every_command_is_on_the_page() -> None:
    for name in ("keys", "resign", "rotate", "withdraw", "verify", "list"):
        assert f"publication {name}" in PAGE
