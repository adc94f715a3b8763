from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.children import Children


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    """Commands that end with the test; their logs lie in tmp_path/logs."""
    with Children(tmp_path / "logs") as running:
        yield running
