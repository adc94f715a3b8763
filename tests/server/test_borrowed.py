"""Looking for connections among a process's descriptors leaves none behind."""

import os
from pathlib import Path

import pytest

from nobackfill.server.grpc.listener import _duplicate

DESCRIPTORS = Path("/proc/self/fd")


@pytest.mark.parametrize("flags", [os.O_PATH, os.O_RDONLY], ids=["path", "folder"])
def test_what_is_no_socket_is_given_back(tmp_path: Path, flags: int) -> None:
    """The folder of Triton's socket is held by its path alone."""
    folder = os.open(tmp_path, flags)
    try:
        before = len(list(DESCRIPTORS.iterdir()))
        for _ in range(3):
            with pytest.raises(OSError, match=r"Bad file|non-socket"):
                _duplicate(folder)
        assert len(list(DESCRIPTORS.iterdir())) == before
    finally:
        os.close(folder)
