"""Fixtures of the release room."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.memory import memory_folder


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """pytest's, but in memory if there is enough: every durable write waits for the disk."""
    with memory_folder(tmp_path) as folder:
        yield folder
