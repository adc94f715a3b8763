"""Set before any test module imports numpy, torch or gRPC; and fixtures of many rooms."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.postgres import Server

# Two cores are shared by the workers of one run and by the servers that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def near_gate() -> Iterator[None]:
    """Trials of releases in this process."""
    from tests.support import trials

    with trials.near():
        yield


@pytest.fixture(scope="module")
def near_trials() -> Iterator[None]:
    """The same for a whole module."""
    from tests.support import trials

    with trials.near():
        yield


@pytest.fixture(scope="session")
def postgres() -> Iterator["Server"]:
    """A PostgreSQL with pgvector. Where it cannot start, tests say so and are skipped; they fail
    where CI is set."""
    from tests.support.postgres import Server, running

    try:
        manager = running()
        server: Server = manager.__enter__()
    except (RuntimeError, OSError, AssertionError) as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    try:
        yield server
    finally:
        manager.__exit__(None, None, None)
