from pathlib import Path

import pytest

from demo.journal import Journal
from nobackfill.errors import ConfigurationError


def test_finished_steps_are_there_after_a_restart(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.json", {"seed": 1})
    journal.finish("data", {"classes": ["a"]}, 1.234)
    again = Journal(tmp_path / "journal.json", {"seed": 1})
    assert "data" in again
    assert "train" not in again
    assert again["data"] == {"classes": ["a"]}
    assert again.seconds == {"data": 1.23}


def test_other_options_are_refused_by_name(tmp_path: Path) -> None:
    Journal(tmp_path / "journal.json", {"seed": 1, "images": None}).finish("data", {}, 1)
    with pytest.raises(ConfigurationError, match=r"'seed': \(1, 2\)") as refusal:
        Journal(tmp_path / "journal.json", {"seed": 2, "images": None})
    assert refusal.value.exit_code == 78
