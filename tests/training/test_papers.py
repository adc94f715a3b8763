"""docs/papers.md: every Python path in it exists, and every method and loss is on it."""

import importlib
import re
from pathlib import Path

import pytest

from nobackfill.research.catalogue import list_rows
from nobackfill.research.presets import DIGITS
from nobackfill.research.rows import ComparisonPlace

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
PATHS = sorted(set(re.findall(r"`(nobackfill(?:\.\w+)+)`", TEXT)))


def resolve(path: str) -> object:
    """The object that a dotted path names; AttributeError or ImportError where there is none."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            found = getattr(found, name)
        return found
    raise ImportError(path)


@pytest.mark.parametrize("path", PATHS)
def test_every_path_exists(path: str) -> None:
    assert resolve(path) is not None


def test_paths_are_found_at_all() -> None:
    assert len(PATHS) > 60
    with pytest.raises(AttributeError):
        resolve("nobackfill.training.networks.maps.procrustus")


@pytest.mark.parametrize("paper", ["bct", "unibct", "dmu"])
def test_every_equation_of_a_paper_has_a_line(paper: str) -> None:
    last = {"bct": 9, "unibct": 14, "dmu": 14}[paper]
    title = {"bct": "## BCT", "unibct": "## UniBCT", "dmu": "## DMU"}[paper]
    section = TEXT.split(title, 1)[1].split("\n## ", 1)[0]
    covered: set[int] = set()
    for words in re.findall(r"Eq\. ([\d, to]+)", section):
        for part in words.split(","):
            ends = [int(n) for n in re.findall(r"\d+", part)]
            covered |= set(range(ends[0], ends[-1] + 1)) if ends else set()
    assert set(range(1, last + 1)) <= covered


def test_every_section_of_fct_has_a_line() -> None:
    """Sections 3 to 5 and appendices A to J; K is a list of licences."""
    section = TEXT.split("## FCT", 1)[1].split("\n## ", 1)[0]
    places = " ".join(re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE))
    covered = set(re.findall(r"\b(?:[1-5]\.\d|[A-J]\b)", places))
    assert {f"3.{n}" for n in range(2, 6)} | {f"4.{n}" for n in range(1, 5)} <= covered
    assert {"5.1", "5.2", "5.3", *"ABCDEFGHIJ"} <= covered


def test_every_loss_module_is_named() -> None:
    for module in (ROOT / "training/nobackfill/training/losses").glob("*.py"):
        if module.stem != "__init__":
            assert f"nobackfill.training.losses.{module.stem}." in TEXT, module.stem


def test_rows_that_it_names_exist(tmp_path: Path) -> None:
    place = ComparisonPlace(DIGITS, DIGITS.splits[0], 0, tmp_path, tmp_path)
    rows = {row.name for row in list_rows(place, DIGITS.row_groups)}
    named = set(re.findall(r"`((?:fct|bct|dmu|independent)\w*)`", TEXT))
    assert named and named <= rows
