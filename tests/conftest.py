"""Set before any test module imports numpy, torch or gRPC; and a fixture of many rooms."""

import os

import pytest

# Two cores are shared by the workers of one run and by the servers that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def near_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ONNX gate's rules in this process: it writes nothing, and a process costs a second."""
    from release import onnx_check

    monkeypatch.setattr(onnx_check, "refusals_in_subprocess", onnx_check.refusals)
