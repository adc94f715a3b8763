"""Random lives of a gallery against the dict of model.py."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.gallery.model import GalleryModel


@pytest.mark.slow
def test_short_random_lives() -> None:
    run_state_machine_as_test(
        GalleryModel, settings=settings(max_examples=12, stateful_step_count=30, deadline=None)
    )


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_long_random_lives() -> None:
    run_state_machine_as_test(
        GalleryModel, settings=settings(max_examples=200, stateful_step_count=60, deadline=None)
    )
