"""A short life; `make random` lives twenty long ones."""

from pathlib import Path

import pytest

from tests.lives.run import live
from tests.support.memory import memory_folder


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_short_life(tmp_path: Path) -> None:
    with memory_folder(tmp_path) as top:
        live(3, 300, top, "--triton=in-process", seldom=2)
