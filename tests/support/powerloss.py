"""Power loss, replayed: what a disk may hold when the power goes after the K-th recorded step.

kill -9 keeps the page cache, so it cannot show a missing fsync. Here the durable steps of a run are
recorded and a folder is rebuilt for each prefix of them, in three ways:

- `drop`: only what was synced is there: contents by fsync, names by fsync of their folder;
- `empty`: names are kept as they were, but contents that were not synced are empty;
- `torn`: all is kept, but only half of the last write.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nobackfill.durable import FAULT_INJECTOR, DurableStep

Way = Literal["drop", "empty", "torn"]
WAYS: tuple[Way, ...] = ("drop", "empty", "torn")


@dataclass(eq=False)
class _File:
    written: bytes = b""
    synced: bytes = b""


@dataclass(eq=False)
class _Folder:
    names: "dict[str, _Node]" = field(default_factory=dict)
    synced: "dict[str, _Node]" = field(default_factory=dict)


_Node = _File | _Folder


def record(steps: list[DurableStep]) -> None:
    """Let every durable step of this process be appended to `steps`."""
    FAULT_INJECTOR.observer = steps.append


class Disk:
    """A folder as it was before the recorded run, and the steps on top of it."""

    def __init__(self, top: Path, before: Path) -> None:
        """`before` holds what `top` held when the recording began."""
        self._top = top
        self._root = _load(before)
        self._last: _File | None = None

    def apply(self, step: DurableStep) -> None:
        """Take one recorded step."""
        self._last = None
        match step.kind:
            case "mkdir":
                self._folder(step.path.parent).names[step.path.name] = _Folder()
            case "create":
                self._folder(step.path.parent).names[step.path.name] = _File()
            case "write":
                self._last = self._file(step.path)
                self._last.written += step.written_bytes
            case "fsync":
                file = self._file(step.path)
                file.synced = file.written
            case "rename":
                assert step.rename_target is not None
                moved = self._folder(step.path.parent).names.pop(step.path.name)
                self._folder(step.rename_target.parent).names[step.rename_target.name] = moved
            case "unlink" | "rmdir":
                del self._folder(step.path.parent).names[step.path.name]
            case "fsync_dir":
                folder = self._folder(step.path)
                folder.synced = dict(folder.names)
            case other:
                raise AssertionError(f"unknown step {other}")

    def restore(self, folder: Path, way: Way) -> None:
        """Rebuild what the disk may hold now below `folder`."""
        self._restore(self._root, folder, way)

    def _restore(self, node: _Folder, path: Path, way: Way) -> None:
        path.mkdir(parents=True, exist_ok=True)
        for name, child in (node.synced if way == "drop" else node.names).items():
            if isinstance(child, _Folder):
                self._restore(child, path / name, way)
                continue
            content = child.written if way == "torn" else child.synced
            if way == "torn" and child is self._last:
                content = content[: len(content) // 2]
            (path / name).write_bytes(content)

    def _folder(self, path: Path) -> _Folder:
        node = self._node(path)
        assert isinstance(node, _Folder)
        return node

    def _file(self, path: Path) -> _File:
        node = self._node(path)
        assert isinstance(node, _File)
        return node

    def _node(self, path: Path) -> _Node:
        node: _Node = self._root
        for name in path.relative_to(self._top).parts:
            assert isinstance(node, _Folder)
            node = node.names[name]
        return node


def states(top: Path, before: Path, steps: list[DurableStep]) -> Iterator[tuple[int, Way, Disk]]:
    """Every prefix of the steps in every way."""
    disk = Disk(top, before)
    for count, step in enumerate(steps, start=1):
        disk.apply(step)
        for way in WAYS:
            yield count, way, disk


def _load(path: Path) -> _Folder:
    folder = _Folder()
    for child in path.iterdir():
        if child.is_dir():
            folder.names[child.name] = _load(child)
        else:
            data = child.read_bytes()
            folder.names[child.name] = _File(data, data)
    folder.synced = dict(folder.names)
    return folder
