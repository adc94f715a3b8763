"""compare.py's trainings and rows on two nodes: what one process finds."""

from pathlib import Path
from typing import Any

import pytest

from nobackfill.research.compare import compare
from tests.research.test_compare import FEW, SHORT
from tests.research.test_compare import digits as digits


@pytest.mark.filterwarnings("default")
def test_nodes_find_what_one_process_does(two_nodes: Any, digits: Path, tmp_path: Path) -> None:
    rows = ("independent", "bct")
    alone = compare(FEW, digits, tmp_path / "one", [0], rows, 1, SHORT)
    shared = compare(FEW, digits, tmp_path / "two", [0], rows, 1, SHORT, cluster=two_nodes.address)
    assert shared.splits == alone.splits
