"""Fixtures of crash sweeps."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from release import onnx_check
from tests.support.memory import memory_folder


@pytest.fixture
def fast_tmp(tmp_path: Path) -> Iterator[Path]:
    """An empty folder, in memory if there is enough: a kill keeps the page cache anyway."""
    with memory_folder(tmp_path) as folder:
        yield folder


@pytest.fixture
def near_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ONNX gate's rules in this process: it writes nothing, and a process costs a second."""
    monkeypatch.setattr(onnx_check, "refusals_in_subprocess", onnx_check.refusals)
