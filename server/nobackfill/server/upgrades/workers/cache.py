"""What a process keeps open between pieces of one work: models, connections, files. No database is
needed, so that a gateway without the extra `postgres` has it."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic, TypeVar

CacheKey = TypeVar("CacheKey")
Opened = TypeVar("Opened")


class OpenCache(Generic[CacheKey, Opened]):
    """Of the work that a process has last done, which its `key` names."""

    def __init__(self, opened: Callable[[CacheKey, ExitStack], Opened]) -> None:
        """`opened` makes what a work needs; what it gives the stack is closed with it."""
        self._make = opened
        self._key: str | None = None
        self._closing = ExitStack()
        self._opened: Any = None

    def of(self, work: CacheKey, key: str) -> Opened:
        """Opened for `work`, in place of what another needed. Raises what opening raises."""
        if self._key != key:
            self._key, self._opened = None, None
            self._closing.close()
            with ExitStack() as closing:
                self._opened = self._make(work, closing)
                self._closing = closing.pop_all()
            self._key = key
        opened: Opened = self._opened
        return opened


def laid_out(files: Mapping[str, bytes], closing: ExitStack) -> Path:
    """A folder of these files, by their published paths, that goes with the stack."""
    folder = Path(closing.enter_context(TemporaryDirectory(prefix="nobackfill-")))
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder
