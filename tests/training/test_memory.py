"""Steps find the memory that the ones before them used, in a process of its own."""

import subprocess
import sys

import pytest

_FAULTS = """
import resource
import torch
from nobackfill.training.loop.loop import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(4_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
cleared = faults()
keep_freed_memory()
print(cleared, faults())
"""


@pytest.mark.long
def test_pages_are_not_cleared_anew_for_every_step() -> None:
    told = subprocess.run(
        [sys.executable, "-c", _FAULTS], capture_output=True, text=True, check=True
    )
    before, after = map(int, told.stdout.split())
    # The first of ten still asks the system.
    assert after < before / 5
