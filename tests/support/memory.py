"""Temporary folders in memory: tests of durable writes sync thousands of times."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MEMORY = Path("/dev/shm")
ENOUGH_BYTES = 32 * 2**20


@contextmanager
def memory_folder(otherwise: Path) -> Iterator[Path]:
    """An empty folder in memory, removed afterwards; `otherwise` where there is not enough."""
    if not MEMORY.is_dir() or shutil.disk_usage(MEMORY).free < ENOUGH_BYTES:
        yield otherwise
        return
    with tempfile.TemporaryDirectory(prefix="nobackfill-", dir=MEMORY) as folder:
        yield Path(folder)
