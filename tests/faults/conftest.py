"""Fixtures of crash sweeps."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.memory import memory_folder


@pytest.fixture
def fast_tmp(tmp_path: Path) -> Iterator[Path]:
    """An empty folder, in memory if there is enough: a kill keeps the page cache anyway."""
    with memory_folder(tmp_path) as folder:
        yield folder
