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
    """Hold what the last work of this process needs; its `key` identifies the work."""

    def __init__(self, open_work: Callable[[CacheKey, ExitStack], Opened]) -> None:
        """Start empty.

        Args:
            open_work: opens what a work needs; it registers on the stack what must be closed.
        """
        self._make = open_work
        self._key: str | None = None
        self._closing = ExitStack()
        self._opened: Any = None

    def of(self, work: CacheKey, key: str) -> Opened:
        """Return what a work needs; it is opened if the last work was another.

        Raises:
            Exception: whatever opening raises.
        """
        if self._key != key:
            self._key, self._opened = None, None
            self._closing.close()
            with ExitStack() as closing:
                self._opened = self._make(work, closing)
                self._closing = closing.pop_all()
            self._key = key
        opened: Opened = self._opened
        return opened


def write_files(files: Mapping[str, bytes], closing: ExitStack) -> Path:
    """Write files into a temporary folder, by their published paths; it is deleted with the
    stack.
    """
    folder = Path(closing.enter_context(TemporaryDirectory(prefix="nobackfill-")))
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder
