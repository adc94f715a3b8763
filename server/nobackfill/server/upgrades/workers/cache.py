"""Keep models, connections and files open between the pieces of one work.

This module needs no database, so that a gateway without the extra `postgres` has it.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic, TypeVar

CacheKey = TypeVar("CacheKey")
Opened = TypeVar("Opened")


class OpenCache(Generic[CacheKey, Opened]):
    """Hold the open resources of the last work of this process; a key identifies the work.

    It is not for several threads at once.
    """

    def __init__(self, open_work: Callable[[CacheKey, ExitStack], Opened]) -> None:
        """Start empty.

        Args:
            open_work: opens what a work needs; it registers on the stack what must be closed.
        """
        self._make = open_work
        self._key: str | None = None
        self._closing = ExitStack()
        self._opened: Any = None

    def open_for(self, work: CacheKey, key: str) -> Opened:
        """Return the resources of a work.

        If the last call had another key, its resources are closed first, and those of this work are
        opened.

        They stay open until a call with another key; nothing closes them at the end of the process.

        Args:
            work: the work; it is only read when its resources are opened.
            key: identifies the work.

        Raises:
            Exception: the error of opening, or of closing the earlier resources. Nothing stays
                open, and the next call opens again.
        """
        if self._key != key:
            self._key, self._opened = None, None
            self._closing.close()
            with ExitStack() as closing:
                self._opened = self._make(work, closing)
                self._closing = closing.pop_all()
            self._key = key
        resources: Opened = self._opened
        return resources


def write_files(files: Mapping[str, bytes], closing: ExitStack) -> Path:
    """Write files into a new temporary folder. After an error, it stays until `closing` ends.

    Args:
        files: content by published path, relative and below the folder; it is not checked.
        closing: closing this stack deletes the folder.

    Returns:
        The folder.

    Raises:
        OSError: the disk of temporary files cannot be written.
    """
    folder = Path(closing.enter_context(TemporaryDirectory(prefix="nobackfill-")))
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder
