"""Backup, restore and verification of a data folder, while the gateway serves it or not.

A gallery is copied by SQLite's own backup, one consistent state each, under any load. An item that
was acknowledged before the backup began is in it. The vault's files never change once they are
there. What is deleted meanwhile may be in it or not. `backup.json`, written last, names every file
with its digest: without it there is no backup.
"""

import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from nobackfill import durable
from nobackfill.digests import sha256_file
from nobackfill.durable import error_from_sqlite
from nobackfill.errors import (
    AlreadyExistsError,
    BusyError,
    CannotWriteError,
    InvalidInputError,
    NobackfillError,
    NotFoundError,
    VerificationError,
    describe_writer,
)
from nobackfill.gallery.sqlite_file import (
    BUSY_TIMEOUT_MS,
    FileAccess,
    all_vectors,
    count_rows,
    explain_unwritable,
    free_bytes,
    open_connection,
    read_format,
    read_spaces,
    reading_access,
)
from nobackfill.release.trust.trust import TrustedState
from nobackfill.server.state import AUDIT, UNFINISHED_RESTORE, WRITER, StateFile
from nobackfill.vectors import check_vectors

Result = TypeVar("Result")

LISTING = "backup.json"
# Bytes that stay free on the disk that is written to, or a tenth of a smaller one.
RESERVE = 256 << 20
_FORMAT = 1
_GALLERY = "gallery.sqlite"
_STATE = "state.json"
# Of an unfinished backup: its maker holds it.
_LOCK = "backup.lock"
# How long a gallery is waited for that its gateway opens, closes or has to itself.
_PATIENCE_S = BUSY_TIMEOUT_MS / 1000
# The root folder of a fresh ext4 volume has it.
_LOST_AND_FOUND = "lost+found"


@dataclass(frozen=True)
class Summary:
    """What a folder holds: items by gallery, blobs of ciphertext, bytes of all files."""

    galleries: dict[str, int]
    blobs: int
    bytes: int


class _Listing(BaseModel):
    """Digests (SHA-256, hex) by the paths of a backup's files, and the version that wrote them."""

    format: int
    files: dict[str, str]
    written_by: str | None = None


def backup(data: Path, target: Path) -> Summary:
    """Copy everything that cannot be made again from `data` to the new folder `target`.

    Indexes and Triton's files are left out. A backup that fails or is interrupted leaves nothing;
    the next one into the same parent folder removes what killed backups left there.

    Raises NotFoundError for a folder without a gateway's data, AlreadyExistsError,
    ConfigurationError for a target inside `data`, BusyError while another backup is made under this
    name, CannotWriteError where the disk lacks room for the backup and RESERVE bytes,
    VerificationError.
    """
    if not (data / _STATE).is_file():
        raise NotFoundError(
            f"{data}: expected the data folder of a gateway that keeps its galleries in files, "
            f"found no {_STATE}; galleries in PostgreSQL are backed up with pg_dump"
        )
    _refuse_taken(target)
    durable.refuse_inside(target, data)
    _sweep(target.absolute().parent)
    unfinished = target.with_name(f"{durable.TEMPORARY_PREFIX}{target.name}")
    durable.make_dir(unfinished, 0o700)
    with durable.lock_file(unfinished / _LOCK), _undone(unfinished):
        for path in unfinished.iterdir():
            if path.name != _LOCK:
                durable.remove_tree(path)
        # Another backup may have ended since.
        _refuse_taken(target)
        _need_room(unfinished, _bytes_to_copy(data))
        # The state frames the galleries: if an activation began or ended meanwhile, they are
        # copied again.
        state = None
        while state != (state := (data / _STATE).read_bytes()):
            _copy_galleries(data, unfinished)
        durable.write_file(unfinished / _STATE, state, 0o600)
        with suppress(FileNotFoundError):
            durable.write_file(unfinished / WRITER, (data / WRITER).read_bytes(), 0o600)
        for folder in ("vault", "trust"):
            if (data / folder).is_dir():
                _copy_tree(data / folder, unfinished / folder)
        _copy_audit(data / AUDIT, unfinished / AUDIT)
        files = {str(path): sha256_file(unfinished / path) for path in _files(unfinished)}
        listing = _Listing(format=_FORMAT, files=files, written_by=version("nobackfill"))
        content = listing.model_dump_json(indent=1).encode()
        durable.write_file(unfinished / LISTING, content, 0o600)
        summary = verify(unfinished)
        durable.publish_dir(unfinished, target)
        durable.remove_tree(target / _LOCK)
    return summary


def _refuse_taken(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise AlreadyExistsError(f"{target}: exists already; give a new folder")


def _sweep(folder: Path) -> None:
    """Remove the unfinished backups in a folder whose makers are gone."""
    for lock in folder.glob(f"{durable.TEMPORARY_PREFIX}*/{_LOCK}"):
        with suppress(BusyError), durable.lock_file(lock):
            durable.remove_tree(lock.parent)


@contextmanager
def _undone(*made: Path) -> Iterator[None]:
    """Remove what was made if the block ends by an error, Ctrl-C included."""
    try:
        yield
    except BaseException as error:
        for path in made:
            durable.remove_tree(path)
        if isinstance(error, OSError):
            raise CannotWriteError(
                f"{error.filename}: cannot be read or written ({error.strerror}); check the disk "
                "and the permissions, and run it again"
            ) from error
        raise


def _need_room(folder: Path, needed: int) -> None:
    """Raises CannotWriteError unless `needed` bytes can be written and the reserve stays free."""
    disk = os.statvfs(folder)
    reserve = min(RESERVE, disk.f_blocks * disk.f_frsize // 10)
    if (free := free_bytes(folder)) < needed + reserve:
        raise CannotWriteError(
            f"{folder}: expected room for {needed} bytes and a reserve of {reserve}, found {free} "
            "bytes free; free some space or choose another disk, and run it again"
        )


def _copy_galleries(data: Path, unfinished: Path) -> None:
    durable.remove_tree(unfinished / "galleries")
    for gallery in sorted((data / "galleries").glob(f"*/{_GALLERY}")):
        if not gallery.parent.name.startswith("."):
            # The gateway writes meanwhile.
            _need_room(unfinished, _gallery_bytes(gallery))
            copy = unfinished / "galleries" / gallery.parent.name / _GALLERY
            durable.make_dir(copy.parent, 0o700)
            if not _copy_database(gallery, copy):
                durable.remove_tree(copy.parent)


def _gallery_bytes(gallery: Path) -> int:
    """The most bytes that a copy takes: the write-ahead log is written into it."""
    return _size(gallery) + _size(gallery.with_name(f"{_GALLERY}-wal"))


def _bytes_to_copy(data: Path) -> int:
    others = (path for path in _files(data) if path.parts[0] in ("vault", "trust", _STATE, AUDIT))
    galleries = map(_gallery_bytes, data.glob(f"galleries/*/{_GALLERY}"))
    return sum(galleries) + sum(_size(data / path) for path in others)


def _copy_audit(source: Path, target: Path) -> None:
    """Up to the last end of a line: the gateway may be writing the next."""
    with suppress(FileNotFoundError):
        deeds = source.read_bytes()
        durable.write_file(target, deeds[: deeds.rfind(b"\n") + 1], 0o600)


def _copy_tree(source: Path, target: Path) -> None:
    """Copy a folder, without what is unfinished. Raises CannotWriteError."""
    ignore = shutil.ignore_patterns("*.part", f"{durable.TEMPORARY_PREFIX}*")
    try:
        shutil.copytree(source, target, ignore=ignore, copy_function=_copy_if_there)
    except shutil.Error as error:
        # It lists (source, target, reason) of each file.
        path, _, reason = error.args[0][0]
        raise CannotWriteError(
            f"{path}: cannot be copied ({reason}); free some space, check the disk and the "
            "permissions, and run it again"
        ) from error


def _copy_if_there(source: str, target: str) -> None:
    """Copy a file, unless it is deleted meanwhile."""
    # The gateway writes meanwhile.
    _need_room(Path(target).parent, _size(Path(source)))
    try:
        shutil.copy2(source, target)
    except FileNotFoundError:
        if Path(source).exists():
            raise
        # Its bytes may have come, without its mode.
        Path(target).unlink(missing_ok=True)


def restore(source: Path, data: Path) -> Summary:
    """Make the data folder `data` from a verified backup: a new folder, or one that is empty but
    for lost+found, as a fresh volume is. A link is followed.

    Raises AlreadyExistsError for a folder with something in it, ConfigurationError for a new folder
    inside the backup, BusyError where a gateway serves it, VerificationError, NotFoundError,
    CannotWriteError where the disk lacks room; then `data` is as it was.
    """
    data = data.resolve()
    _refuse_full(data)
    durable.refuse_inside(data, source)
    if not (source / LISTING).is_file():
        raise NotFoundError(f"{source}: expected a complete backup, found no {LISTING}")
    summary, files = verify(source), _listing(source).files
    unfinished = data / UNFINISHED_RESTORE
    made = [unfinished, data / "lock", *{data / Path(path).parts[0] for path in files}]
    if not data.exists():
        made = [data]
        durable.make_dir(data, 0o700)
    with durable.lock_file(data / "lock"), _undone(*made):
        _refuse_full(data)
        # Left by a restore that was killed.
        for name in _names(data):
            durable.remove_tree(data / name)
        _need_room(data, summary.bytes)
        for path in files:
            durable.make_dir((unfinished / path).parent, 0o700)
            shutil.copyfile(source / path, unfinished / path)
            (unfinished / path).chmod(0o600)
        # The state is the last: a folder without it is no data folder yet.
        for top in sorted(unfinished.iterdir(), key=lambda path: path.name == _STATE):
            publish = durable.publish_dir if top.is_dir() else durable.replace_file
            publish(top, data / top.name)
        durable.remove_tree(unfinished)
    return summary


def _names(data: Path) -> list[str]:
    """List the entries of a folder, without lost+found and a lock."""
    return [path.name for path in data.iterdir() if path.name not in (_LOST_AND_FOUND, "lock")]


def _refuse_full(data: Path) -> None:
    """A restore that was killed leaves a folder that counts as empty."""
    if not data.exists():
        return
    names = _names(data) if data.is_dir() else [data.name]
    if names and (UNFINISHED_RESTORE not in names or _STATE in names):
        raise AlreadyExistsError(f"{data}: is not empty; restore into a new folder")


def verify(folder: Path) -> Summary:
    """Check a backup, or the data folder of a gateway, which may be serving: digests where they are
    listed, what a start reads, every page of every gallery, and every vector.

    Raises NotFoundError, VerificationError naming the first thing that is wrong, CannotWriteError
    for what cannot be read.
    """
    try:
        if (folder / LISTING).is_file():
            _check_listing(folder, _listing(folder).files)
        if not (folder / _STATE).is_file():
            raise NotFoundError(f"{folder}: expected a backup or a data folder, found no {_STATE}")
        StateFile(folder / _STATE)
        TrustedState.load(folder / "trust" / "trusted.json")
        galleries = {
            path.parent.name: count
            for path in sorted((folder / "galleries").glob(f"*/{_GALLERY}"))
            if not path.parent.name.startswith(".") and (count := _check_gallery(path)) is not None
        }
        blobs = sum(map(_check_blob, (folder / "vault").glob("*/??/*")))
    except OSError as error:
        raise CannotWriteError(
            f"{error.filename}: cannot be read ({error.strerror}); check the disk and the "
            "permissions, and run it again"
        ) from error
    return Summary(galleries, blobs, sum(_size(folder / path) for path in _files(folder)))


def _listing(folder: Path) -> _Listing:
    """Read the list of files of a backup. Raises VerificationError."""
    path = folder / LISTING
    try:
        found = _Listing.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise VerificationError(
            f"{path}: is damaged ({error.errors()[0]['msg']}); use another backup"
        ) from error
    if found.format != _FORMAT:
        raise VerificationError(
            f"{path}: expected a backup of format {_FORMAT}, got format {found.format}; use "
            f"{describe_writer(found.written_by)}"
        )
    return found


def _copy_database(source: Path, target: Path) -> bool:
    """Whether it was there: a gallery may be deleted after it was listed. Raises as `_read`."""

    def copy(old: sqlite3.Connection) -> bool:
        with closing(sqlite3.connect(target)) as new:
            old.backup(new)
        target.chmod(0o600)
        return True

    return _read(source, copy) is not None


def _read(path: Path, work: Callable[[sqlite3.Connection], Result]) -> Result | None:
    """Run `work` in one snapshot of a gallery, also beside its gateway, which finds nothing
    made or removed there; None where it is deleted meanwhile.

    `work` is called again where the gateway opened the gallery under it. Raises BusyError,
    VerificationError, CannotWriteError.
    """
    end = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return _read_once(path, work, patient=time.monotonic() < end)
        except (NobackfillError, OSError, sqlite3.Error) as error:
            if not path.exists():
                return None
            if not isinstance(error, _MovedError | BusyError) or time.monotonic() >= end:
                raise
            time.sleep(0.02)


def _read_once(
    path: Path, work: Callable[[sqlite3.Connection], Result], *, patient: bool
) -> Result:
    """`patient`: not where the log's last changes could only be read by making files."""
    try:
        access = reading_access(path, "")
        if access.unlocked is None and explain_unwritable(path) is None:
            # The gateway has it open: SQLite's shared memory is there, for us to read by as well.
            access = FileAccess("mode=ro")
    except CannotWriteError as error:
        if patient:
            raise _MovedError from error
        access = FileAccess("mode=rw")
    try:
        with closing(open_connection(path, access)) as connection:
            connection.execute("BEGIN")
            read_format(connection, path)
            return work(connection)
    except sqlite3.Error as error:
        raise error_from_sqlite(path, error) or error from error
    finally:
        # Reads without a lock may mix two states: no verdict follows from it.
        access.check_unchanged(path)


class _MovedError(NobackfillError):
    """A gallery is being opened or closed by its gateway."""


def _check_listing(folder: Path, files: dict[str, str]) -> None:
    found = {str(path) for path in _files(folder)} - {LISTING}
    if found != set(files):
        wrong = sorted(found ^ set(files))[0]
        raise VerificationError(f"{folder}: {wrong} is missing, or does not belong to the backup")
    for path, digest in files.items():
        if sha256_file(folder / path) != digest:
            raise VerificationError(f"{folder / path}: differs from what was backed up")


def _check_gallery(path: Path) -> int | None:
    """Number of items; None for a gallery that is deleted meanwhile."""

    def check(connection: sqlite3.Connection) -> int:
        verdict = connection.execute("PRAGMA integrity_check").fetchone()[0]
        if verdict != "ok":
            raise VerificationError(f"{path}: is damaged ({verdict}); restore a backup")
        for info in read_spaces(connection):
            what = f"{path}: vectors of release {info.spec.release}"
            try:
                check_vectors(all_vectors(connection, info)[1], info.spec.dim, what=what)
            except InvalidInputError as error:
                raise VerificationError(str(error)) from error
        return count_rows(connection, None)

    return _read(path, check)


def _check_blob(path: Path) -> int:
    """How many blobs of a vault it is: none is an upload that has not ended, or is gone."""
    if path.suffix == ".part" or path.name.startswith(durable.TEMPORARY_PREFIX):
        return 0
    try:
        digest = sha256_file(path)
    except FileNotFoundError:
        return 0
    if digest != path.name.partition(".")[2]:
        raise VerificationError(f"{path}: the blob's digest differs; restore a backup")
    return 1


def _files(folder: Path) -> list[Path]:
    """Files of a folder that belong to a backup."""
    side_files = ("-wal", "-shm", ".lock", ".part", "lock")
    found = []
    for top, folders, names in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if name != _LOST_AND_FOUND and not name.startswith(durable.TEMPORARY_PREFIX)
        ]
        paths = (Path(top, name) for name in names if not name.endswith(side_files))
        found += [path.relative_to(folder) for path in paths if path.is_file()]
    return sorted(found)


def _size(path: Path) -> int:
    """Bytes of a file; none of one that is gone."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
