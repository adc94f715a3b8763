"""Real small file systems: mounted by who may, else the test is skipped with the reason."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, megabytes: int, block: int | None = None) -> Iterator[Path]:
    """A file system of its own at `folder`: in memory, or ext4 with blocks of so many bytes."""
    folder.mkdir()
    image = folder.with_suffix(".img")
    if block is None:
        _done("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder))
    else:
        with image.open("wb") as file:
            file.truncate(megabytes << 20)
        _done("mke2fs", "-q", "-t", "ext4", "-b", str(block), "-m", "0", str(image))
        _done("mount", "-o", "loop", str(image), str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A file system of `small_disk`, read-only for a while."""
    _done("mount", "-o", "remount,ro", str(folder))
    try:
        yield
    finally:
        _done("mount", "-o", "remount,rw", str(folder))


def fill(folder: Path, but: int) -> None:
    """Write a file until about `but` bytes are free, in pieces that grow smaller."""
    filler = os.open(folder / "filler", os.O_RDWR | os.O_CREAT)
    try:
        size, piece = 0, 1 << 20
        while piece >= 1024:
            found = os.fstatvfs(filler)
            if found.f_bfree * found.f_frsize - piece < but:
                piece //= 2
                continue
            try:
                os.posix_fallocate(filler, size, piece)
                size += piece
            except OSError:
                piece //= 2
    finally:
        os.close(filler)


def _done(*command: str) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs the command {command[0]}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{command[0]} is refused here: {done.stderr.strip()}")
