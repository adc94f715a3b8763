"""Damaged pictures by the ten thousand: decoded or refused, never more."""

import contextlib

import pytest

from nobackfill.errors import InvalidInputError
from nobackfill.images import decode_image
from tests.support import pictures

pytestmark = pytest.mark.faults

KINDS = pictures.kinds()


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_decoded_or_refused(kind: str) -> None:
    for data in pictures.damaged(KINDS[kind], 30_000, seed=1):
        with contextlib.suppress(InvalidInputError):
            assert decode_image(data, 8, 8).shape == (8, 8, 3)
