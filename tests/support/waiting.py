"""Waiting for something that another thread or process does."""

import time
from collections.abc import Callable


def wait_until(reached: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Until `reached` is true; fails after `seconds`, saying `what` was not."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
