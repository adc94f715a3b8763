"""docs/releases.md: every command in it runs, in the order of the page."""

import ast
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from release.__main__ import main
from release.keys import ROLES, Keys
from release.ledger import TERM, require_ledger
from release.publish import publish
from tests.support.releases import draft

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "releases.md").read_text()


def blocks() -> list[list[str]]:
    return [block.splitlines() for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)]


@pytest.mark.usefixtures("near_gate")
def test_every_command_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the page's order, but for `keys`, which comes before anything is published."""
    (tmp_path / "offline").mkdir()
    monkeypatch.chdir(tmp_path)
    lines = [line for block in blocks() for line in block]
    keys_line = next(line for line in lines if line.startswith("python -m release keys"))
    run(keys_line, monkeypatch)
    keys = Keys.beside(Path("model_repo"), {"targets": Path("offline/targets.pem")})
    first = draft(tmp_path / "drafts", 1)
    publish(Path("model_repo"), first, keys)
    publish(Path("model_repo"), draft(tmp_path / "drafts", 2, [first.manifest]), keys)
    # Exporting needs training runs, and a server does not end: they have tests of their own.
    elsewhere = ("python training/export.py", "python -m http.server", "python -m release keys")
    others = [line for line in lines if not line.startswith(elsewhere)]
    for line in others:
        run(line, monkeypatch)
    assert len(others) >= 10
    target = require_ledger(Path("model_repo")).targets.targets["release-2.json"]
    assert target.custom == {"withdrawn": "confuses cats"}


def run(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(line)
    match words[0]:
        case "python":
            assert words[1:3] == ["-m", "release"]
            monkeypatch.setattr(sys, "argv", words[2:])
            with pytest.raises(SystemExit) as ended:
                main()
                raise SystemExit(0)
            assert not ended.value.code, line
        case "rsync":
            copy(words)
        case _:
            subprocess.run(words, check=True)


def copy(words: list[str]) -> None:
    """What rsync does with the page's arguments, as it is not on every machine."""
    source, target = words[-2:]
    if source.endswith("/"):
        ignored = shutil.ignore_patterns(*words[words.index("--exclude") + 1 :][:1])
        shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)
    else:
        shutil.copy(source, target)


def test_options_of_export_on_the_page_exist() -> None:
    source = (ROOT / "training" / "export.py").read_text()
    names = {node.arg for node in ast.walk(ast.parse(source)) if isinstance(node, ast.arg)}
    lines = [line for block in blocks() for line in block if "training/export.py" in line]
    used = {word for line in lines for word in shlex.split(line) if word.startswith("--")}
    assert used
    for option in used | {"--force", "--dry-run"}:
        assert option[2:].replace("-", "_") in names or f'"{option}"' in source, option


def test_the_page_tells_the_terms_that_are_signed() -> None:
    for role in ROLES:
        days = TERM[role].days
        term = "1 year" if days == 365 else f"{days} days"
        assert re.search(rf"^\| {role} \|.*\| {term} \|", PAGE, re.MULTILINE), role


def test_every_command_is_on_the_page() -> None:
    for name in ("keys", "resign", "rotate", "withdraw", "verify", "list"):
        assert f"python -m release {name}" in PAGE
