"""Trials of releases in this process: they write nothing, and a process costs a second."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nobackfill.release import trial


@contextmanager
def near() -> Iterator[None]:
    """To the end of the block; children are tried in tests/release and by gateways of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "refusal_in_child", lambda request, _: trial.refusal(request))
        yield
