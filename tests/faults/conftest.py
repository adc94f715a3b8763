"""Sweeps run thousands of durable steps: in memory where there is some, as kills keep the cache."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")
ENOUGH_BYTES = 32 * 2**20


@pytest.fixture
def fast_tmp(tmp_path: Path) -> Iterator[Path]:
    """An empty folder, in memory if there is enough; removed afterwards."""
    if not MEMORY.is_dir() or shutil.disk_usage(MEMORY).free < ENOUGH_BYTES:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="nobackfill-", dir=MEMORY) as folder:
        yield Path(folder)
