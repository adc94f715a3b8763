"""What the documents say is there is there: files, commands, make targets, exit codes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from nobackfill import errors
from tests.support.documents import ROOT, section
from tests.support.documents import page as text_of

PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")], key=lambda path: path.relative_to(ROOT)
)
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]
# Superseded decisions stay as they were written, with the file names of their time.
CURRENT = [path for path in PAGES if path.parent.name != "superseded"]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_no_half_of_a_merge_is_left(page: Path) -> None:
    left = re.findall(r"^(?:<{7} |>{7} |={7}$).*", text_of(page), re.MULTILINE)
    assert not left, f"{page.name}: {left}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_to_files_that_are_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text_of(page)):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", CURRENT, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_are_there(page: Path) -> None:
    rooms = "bench|client|configs|core|demo|docs|protos|server|tests|training"
    for name in re.findall(rf"`((?:{rooms})/[\w./-]*)`", text_of(page)):
        assert (ROOT / name).exists() or "NAME" in name, f"{page.name} names {name}"


def test_every_party_of_the_threat_model_names_tests_that_are_there() -> None:
    text = text_of("docs/threat-model.md")
    rows = section(text, "The parties, one by one").splitlines()
    parties = [row for row in rows if row.startswith("| **")]
    assert len(parties) == 7
    for row in parties:
        assert re.search(r"`tests/\w+/test_\w+\.py`", row), row
    for name in re.findall(r"`(tests/[\w/]+\.py)`", text):
        assert re.search(r"^def test_", (ROOT / name).read_text("utf-8"), re.MULTILINE), name
    everything = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in everything, name


@pytest.mark.parametrize(
    "name",
    [name for name in NAMES if re.match(r"docs/(?!tutorials/|adr/(?:0|superseded))", name)],
)
def test_a_page_begins_with_its_readers(name: str) -> None:
    first = text_of(ROOT / name).split("\n\n")[1]
    sentence = first.split(". ")[0]
    assert re.search(r"\bfor\b", sentence, re.IGNORECASE), f"{name} opens with: {sentence}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_make_targets_that_are_named_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    text = text_of(page)
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE))
    assert named <= targets, f"{page.name}: make {sorted(named - targets)}"


@pytest.mark.parametrize(
    ("name", "module"),
    [("edge-client", "nobackfill.client.cli.main"), ("gateway", "nobackfill.server.cli.main")],
)
def test_subcommands_that_are_named_exist(name: str, module: str) -> None:
    script = f"from {module} import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
    )
    commands = set(re.findall(r"^[│ ]+([a-z-]+) ", done.stdout, re.MULTILINE))
    assert commands
    for page in PAGES:
        fenced = re.findall(rf"^ *{name} ([a-z][a-z-]*)", text_of(page), re.MULTILINE)
        quoted = re.findall(rf"`{name} ([a-z][a-z-]*)", text_of(page))
        assert set(fenced + quoted) <= commands, page.name


def test_every_exit_code_is_documented() -> None:
    classes = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.NobackfillError)
    ]
    text = text_of("docs/architecture.md")
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    assert {error.exit_code for error in classes} <= documented
    reasons = {e.reason for e in classes if issubclass(e, errors.PreconditionError)}
    for reason in reasons - {"PRECONDITION"}:
        assert reason in text
