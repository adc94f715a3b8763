"""Power loss for everything a process writes, SQLite's own files included: traced, then replayed.

`strace` records the system calls of a command on the files below one folder. A disk is rebuilt
after each of them as powerloss.Disk does it for our own durable steps: what was not synced is
dropped, or empty, or torn. Locks and the shared-memory index (-shm) do not outlive a power loss.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.powerloss import WAYS, Way

CALLS = (
    "openat,write,pwrite64,ftruncate,fallocate,fsync,fdatasync,rename,renameat,renameat2,"
    "unlink,unlinkat,mkdir,mkdirat,rmdir"
)
_LINE = re.compile(r"^\d+ +(\w+)\((.*)\) += (-?\d+)")
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_HANDLE = re.compile(r"^\d+<((?:\\x[0-9a-f]{2})*)>")


@dataclass(frozen=True)
class Call:
    """One system call that succeeded: `data` of a write at `offset` (None: at the end)."""

    name: str
    path: Path
    target: Path | None = None
    data: bytes = b""
    offset: int | None = None


def available() -> bool:
    """Whether processes can be traced here."""
    if shutil.which("strace") is None:
        return False
    return subprocess.run(["strace", "true"], check=False, capture_output=True).returncode == 0


def trace(command: Sequence[str | Path], top: Path, log: Path) -> list[Call]:
    """Run a command, which must succeed; its calls on files below `top`, in order."""
    options: list[str | Path] = [
        "-f",
        "-y",
        "-xx",
        "-s",
        "100000000",
        "-e",
        f"trace={CALLS}",
        "-o",
        log,
    ]
    subprocess.run(["strace", *options, *command], check=True, capture_output=True)
    calls = []
    with log.open(encoding="ascii") as lines:
        for line in lines:
            call = _parse(line)
            if call is not None and call.path.is_relative_to(top) and call.path.suffix != ".lock":
                calls.append(call)
    return [call for call in calls if not call.path.name.endswith("-shm")]


def _parse(line: str) -> Call | None:
    found = _LINE.match(line)
    assert found or "(" not in line or "exited" in line or "unfinished" in line or "resumed" in line
    if not found or int(found[3]) < 0:
        return None
    name, rest = found[1], found[2]
    texts = [_decode(text) for text in _TEXT.findall(rest)]
    handle = _HANDLE.match(rest)
    path = Path(_decode(handle[1]).decode()) if handle else None
    match name:
        case "openat":
            if "O_CREAT" not in rest:
                return None
            kind = "truncate" if "O_TRUNC" in rest else "create"
            return Call(kind, Path(texts[0].decode()))
        case "pwrite64" if path:
            return Call("write", path, data=texts[0], offset=int(rest.rsplit(", ", 1)[1]))
        case "write" if path:
            return Call("write", path, data=texts[0])
        case "ftruncate" if path:
            return Call("resize", path, offset=int(rest.rsplit(", ", 1)[1]))
        case "fallocate" if path:
            mode, start, length = map(int, rest.rsplit(", ", 3)[1:])
            assert mode == 0, line[:200]
            return Call("resize", path, offset=start + length)
        case "fsync" | "fdatasync" if path:
            return Call("sync", path)
        case "rename" | "renameat" | "renameat2":
            return Call("rename", Path(texts[0].decode()), Path(texts[1].decode()))
        case "unlink" | "unlinkat" | "rmdir":
            return Call("remove", Path(texts[0].decode()))
        case "mkdir" | "mkdirat":
            return Call("mkdir", Path(texts[0].decode()))
    return None


def _decode(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


class _File:
    def __init__(self, content: bytes = b"") -> None:
        self.content = bytearray(content)
        self.synced = bytes(content)


class Disk:
    """Files and folders below `top`, as they are in memory and as the disk has them."""

    def __init__(self, top: Path, before: Path) -> None:
        """`before` holds what `top` held when the trace began."""
        self._top = top
        self._files: dict[str, _File] = {}
        self._folders: set[str] = {"."}
        for path in before.rglob("*"):
            name = path.relative_to(before).as_posix()
            if path.is_dir():
                self._folders.add(name)
            else:
                self._files[name] = _File(path.read_bytes())
        # What the folders on the disk name: by file name, the file that had it.
        self._synced_names = dict(self._files)
        # The last write: its file, its middle, its end.
        self._last: tuple[_File, int, int] | None = None

    def apply(self, call: Call) -> None:
        """Take one call."""
        name = self._name(call.path)
        self._last = None
        match call.name:
            case "create":
                self._files.setdefault(name, _File())
            case "truncate":
                self._files.setdefault(name, _File()).content.clear()
            case "write":
                self._write(self._files[name], call)
            case "resize":
                content, size = self._files[name].content, call.offset or 0
                del content[size:]
                content.extend(bytes(size - len(content)))
            case "sync" if name in self._folders:
                self._sync_folder(name)
            case "sync":
                self._files[name].synced = bytes(self._files[name].content)
            case "rename":
                assert call.target is not None
                self._files[self._name(call.target)] = self._files.pop(name)
            case "remove":
                self._files.pop(name, None)
                self._folders.discard(name)
            case "mkdir":
                self._folders.add(name)

    def _write(self, file: _File, call: Call) -> None:
        start = len(file.content) if call.offset is None else call.offset
        file.content.extend(bytes(max(0, start - len(file.content))))
        file.content[start : start + len(call.data)] = call.data
        self._last = (file, start + len(call.data) // 2, start + len(call.data))

    def _sync_folder(self, folder: str) -> None:
        def inside(name: str) -> bool:
            return Path(name).parent.as_posix() == folder

        names = {n: f for n, f in self._synced_names.items() if not inside(n)}
        self._synced_names = names | {n: f for n, f in self._files.items() if inside(n)}

    def restore(self, folder: Path, way: Way) -> None:
        """Rebuild what the disk may hold now in `folder`, which is emptied first."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name in self._folders:
            (folder / name).mkdir(parents=True, exist_ok=True)
        for name, file in (self._synced_names if way == "drop" else self._files).items():
            content = bytes(file.content) if way == "torn" else file.synced
            if way == "torn" and self._last is not None and self._last[0] is file:
                _, half, end = self._last
                # The second half of the last write holds what the disk had there, if anything.
                content = content[:half] + file.synced[half:end] + content[end:]
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
            (folder / name).chmod(0o600)

    def _name(self, path: Path) -> str:
        return path.relative_to(self._top).as_posix()


def states(top: Path, before: Path, calls: Sequence[Call]) -> Iterator[tuple[int, Way, Disk]]:
    """The disk after every call, in every way."""
    disk = Disk(top, before)
    for count, call in enumerate(calls, start=1):
        disk.apply(call)
        for way in WAYS:
            yield count, way, disk
