"""Folders that all workers of a run share: made by whoever asks first, while the others wait."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def run_folder(factory: pytest.TempPathFactory) -> Path:
    """Where the folders of this run lie, whichever worker asks."""
    base = factory.getbasetemp()
    top = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = top / "once"
    folder.mkdir(exist_ok=True)
    return folder


def filled(folder: Path, fill: Callable[[Path], object]) -> Path:
    """`folder`, once `fill` has come to its end in it: only read what lies there.

    Where `fill` raises or its process ends, the next who asks begins anew.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    done = folder.with_name(f"{folder.name}.done")
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            fill(folder)
            done.touch()
    return folder
