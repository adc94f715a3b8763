"""Every durable step of the gateway's life fails once: activations, puts, rollbacks, the vault.

After each failure every acknowledged item is found exactly once and at distance 0, and doing the
operation again leads to what an unbroken run leads to.
"""

import json
import subprocess
import sys

import pytest


def sweep(stride: int, *kinds: str) -> dict[str, int]:
    """Points by operation, from a process that may fork (server_sweep.py)."""
    program = [sys.executable, "-m", "tests.faults.server_sweep", str(stride), *kinds]
    done = subprocess.run(program, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-4000:]
    points: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    assert all(points.values()), "an operation without a durable step"
    print(f"{sum(points.values())} points: {points}")
    return points


@pytest.mark.long
@pytest.mark.timeout(280)
def test_killed_at_some_steps() -> None:
    sweep(9, "kill")


@pytest.mark.faults
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", ["kill", "short", "eio", "enospc"])
def test_failed_at_every_step(kind: str) -> None:
    sweep(1, kind)
