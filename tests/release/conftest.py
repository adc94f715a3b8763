"""Fixtures of the release room."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from release import onnx_check
from tests.support.memory import memory_folder


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """pytest's, but in memory if there is enough: every durable write waits for the disk."""
    with memory_folder(tmp_path) as folder:
        yield folder


@pytest.fixture
def near_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ONNX gate's rules in this process, for tests of other things: one costs a second."""
    monkeypatch.setattr(onnx_check, "refusals_in_subprocess", onnx_check.refusals)
