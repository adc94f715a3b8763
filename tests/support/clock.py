"""Replace the clock of one module."""

import importlib
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest


def replace_clock(
    monkeypatch: pytest.MonkeyPatch, module: str, **functions: Callable[..., object]
) -> None:
    """Replace functions of `time` in one module until the end of the test.

    Other modules keep the true clock. A test that replaced `time.monotonic` itself would move the
    clock of every thread in the process: an event loop of another test's server then sleeps for an
    hour, and whoever stops that server waits for it.

    Args:
        monkeypatch: the test's fixture.
        module: name of a module that imports `time` as a module.
        functions: the functions, by their names in `time`.
    """
    clock = SimpleNamespace(**{**vars(time), **functions})
    assert vars(importlib.import_module(module))["time"] is time
    monkeypatch.setattr(f"{module}.time", clock)
