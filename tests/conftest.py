"""Set before any test module imports numpy, torch or gRPC; and a fixture of many rooms."""

import os

import pytest

# Two cores are shared by the workers of one run and by the servers that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def near_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of releases in this process: they write nothing, and a process costs a second."""
    from nobackfill.release import trial

    monkeypatch.setattr(trial, "refusal_in_child", lambda request, _: trial.refusal(request))
