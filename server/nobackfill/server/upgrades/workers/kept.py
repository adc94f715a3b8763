"""What a worker keeps between pieces of one work: its models and connections."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic, TypeVar

Work = TypeVar("Work")
Opened = TypeVar("Opened")


class Kept(Generic[Work, Opened]):
    """Of the work that a process has last done, which its `key` names."""

    def __init__(self, opened: Callable[[Work, ExitStack], Opened]) -> None:
        """`opened` makes what a work needs; what it gives the stack is closed with it."""
        self._make = opened
        self._key: str | None = None
        self._closing = ExitStack()
        self._opened: Any = None

    def of(self, work: Work, key: str) -> Opened:
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
