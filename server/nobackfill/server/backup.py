"""Back up, restore and verify a data folder, while a gateway serves it or not.

SQLite copies each gallery in one consistent state, under any load. The backup has every item that
was acknowledged before it began. It may or may not have items that are deleted while it runs. Files
of the vault never change once they are complete. `backup.json` is written last and names every file
with its digest; a folder without it is no backup.
"""

import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
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
    NobackfillError,
    NotFoundError,
    UnusableRowsError,
    VerificationError,
    describe_writer,
    join_few,
)
from nobackfill.gallery.sqlite_file import (
    BUSY_TIMEOUT_MS,
    FileAccess,
    count_rows,
    explain_unwritable,
    free_bytes,
    open_connection,
    read_all_vectors,
    read_format,
    read_only_access,
    read_spaces,
)
from nobackfill.release.trust.trust import TrustedState
from nobackfill.server.state import AUDIT, UNFINISHED_RESTORE, WRITER, StateFile
from nobackfill.server.vault import PART
from nobackfill.vectors import check_vectors

Result = TypeVar("Result")

LISTING = "backup.json"
# Bytes that stay free on the disk that is written to, or a tenth of a smaller one.
RESERVE = 256 << 20
_FORMAT = 1
_GALLERY = "gallery.sqlite"
_STATE = "state.json"
# File of an unfinished backup that its process locks.
_LOCK = "backup.lock"
# Longest wait (seconds) for a gallery that its gateway opens, closes or locks.
_PATIENCE_S = BUSY_TIMEOUT_MS / 1000
# Every new ext4 volume has a folder of this name.
_LOST_AND_FOUND = "lost+found"


@dataclass(frozen=True)
class DataSummary:
    """Count the contents of a backup or a data folder.

    Attributes:
        galleries: number of items by name of the gallery.
        blobs: number of complete blobs in the vault.
        bytes: size of all files that belong to a backup, in bytes.
        unfinished_uploads: stored bytes of each unfinished upload to the vault, by its path in the
            folder: vault/OWNER/XX/ID.SHA256.part. A backup has none.
    """

    galleries: dict[str, int]
    blobs: int
    bytes: int
    unfinished_uploads: dict[str, int]


class _Listing(BaseModel):
    """Hold the content of backup.json: digests (SHA-256, hex) by path, and the version that wrote
    it.
    """

    format: int
    files: dict[str, str]
    written_by: str | None = None


def backup(data_folder: Path, target: Path) -> DataSummary:
    """Copy a data folder into a new folder, and verify the copy.

    A gateway may serve the data folder. Indexes and files of Triton are left out, because they can
    be made again. `target` appears only once it is complete. A backup that fails or is interrupted
    leaves nothing but new parent folders; the next one into the same parent folder removes what
    killed backups left there.

    Args:
        data_folder: the data folder; it is only read. SQLite may create its own files next to a
            gallery.
        target: the folder to create, with mode 0700.

    Returns:
        The contents of the backup.

    Raises:
        NotFoundError: `data_folder` has no galleries in files.
        AlreadyExistsError: `target` exists.
        ConfigurationError: `target` is inside `data_folder`.
        BusyError: another backup with this name is under way, or a gateway locked a gallery for too
            long.
        CannotWriteError: a file cannot be read or written, or the disk lacks room for the backup
            and RESERVE bytes.
        VerificationError: a gallery, a blob or the state is damaged.
        OSError: this user may not search a folder above one of them.
    """
    if not (data_folder / _STATE).is_file():
        raise NotFoundError(
            f"{data_folder}: expected the data folder of a gateway that stores galleries in files, "
            f"found no {_STATE}; name it with --data, or back up galleries in PostgreSQL with "
            "pg_dump"
        )
    _refuse_taken(target)
    durable.refuse_copy_into_itself(target, data_folder)
    unfinished = target.with_name(f"{durable.TEMPORARY_PREFIX}{target.name}")
    _remove_unfinished_backups(target.absolute().parent, unfinished.name)
    durable.make_dir(unfinished, 0o700)
    with _lock(unfinished / _LOCK, unfinished), _remove_on_error(unfinished):
        for path in unfinished.iterdir():
            if path.name != _LOCK:
                durable.remove_tree(path)
        # Another backup may have ended since.
        _refuse_taken(target)
        _need_room(unfinished, _bytes_to_copy(data_folder))
        # The state frames the galleries: if an activation began or ended meanwhile, they are
        # copied again.
        state = None
        while state != (state := (data_folder / _STATE).read_bytes()):
            _copy_galleries(data_folder, unfinished)
        durable.write_file(unfinished / _STATE, state, 0o600)
        with suppress(FileNotFoundError):
            durable.write_file(unfinished / WRITER, (data_folder / WRITER).read_bytes(), 0o600)
        for folder in ("vault", "trust"):
            if (data_folder / folder).is_dir():
                _copy_tree(data_folder / folder, unfinished / folder)
        _copy_audit(data_folder / AUDIT, unfinished / AUDIT)
        files = {
            str(path): sha256_file(unfinished / path) for path in _backup_file_paths(unfinished)
        }
        listing = _Listing(format=_FORMAT, files=files, written_by=version("nobackfill"))
        content = listing.model_dump_json(indent=1).encode()
        durable.write_file(unfinished / LISTING, content, 0o600)
        summary = verify(unfinished)
        durable.publish_dir(unfinished, target)
        durable.remove_tree(target / _LOCK)
    return summary


def _refuse_taken(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise AlreadyExistsError(
            f"{target}: expected no file or folder of this name, found one; name a new folder for "
            "the backup"
        )


def _remove_unfinished_backups(folder: Path, name: str) -> None:
    """Remove the unfinished backups in a folder whose makers are gone, except the one of a name.

    The caller empties that one once it holds its lock. Another process that starts a backup of the
    same target would make files in the folder while it is removed here.
    """
    for lock in folder.glob(f"{durable.TEMPORARY_PREFIX}*/{_LOCK}"):
        if lock.parent.name != name:
            with suppress(BusyError), durable.lock_file(lock):
                durable.remove_tree(lock.parent)


@contextmanager
def _lock(path: Path, *paths: Path) -> Iterator[None]:
    """Hold a lock; where none can be had, remove `paths`, which no other process then writes.

    Raises:
        BusyError: another process holds it; nothing is removed.
        CannotWriteError: it cannot be made, or the file system has no locks.
    """
    with ExitStack() as lock:
        try:
            lock.enter_context(durable.lock_file(path))
        except CannotWriteError:
            for each in paths:
                durable.remove_tree(each)
            raise
        yield


@contextmanager
def _remove_on_error(*paths: Path) -> Iterator[None]:
    """Remove paths if the block ends by an error, Ctrl-C included.

    Raises:
        CannotWriteError: the block raised an OSError.
    """
    try:
        yield
    except BaseException as error:
        for path in paths:
            durable.remove_tree(path)
        if isinstance(error, OSError):
            raise CannotWriteError(
                f"{error.filename}: cannot be read or written ({error.strerror}); check the disk "
                "and the permissions, then run the command again"
            ) from error
        raise


def _need_room(folder: Path, size: int) -> None:
    """Check that some bytes can be written and the reserve stays free.

    Raises:
        CannotWriteError: the disk has less room.
    """
    disk = os.statvfs(folder)
    reserve = min(RESERVE, disk.f_blocks * disk.f_frsize // 10)
    if (free := free_bytes(folder)) < size + reserve:
        raise CannotWriteError(
            f"{folder}: expected room for {size} bytes and a reserve of {reserve}, found {free} "
            "bytes free; free some space or choose another disk, then run the command again"
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
    """Return the largest number of bytes of a copy, which includes the write-ahead log."""
    return _file_size(gallery) + _file_size(gallery.with_name(f"{_GALLERY}-wal"))


def _bytes_to_copy(data: Path) -> int:
    others = (
        path
        for path in _backup_file_paths(data)
        if path.parts[0] in ("vault", "trust", _STATE, AUDIT)
    )
    galleries = map(_gallery_bytes, data.glob(f"galleries/*/{_GALLERY}"))
    return sum(galleries) + sum(_file_size(data / path) for path in others)


def _copy_audit(source: Path, target: Path) -> None:
    """Copy the complete lines of the audit log; the gateway may be writing the next one."""
    with suppress(FileNotFoundError):
        deeds = source.read_bytes()
        durable.write_file(target, deeds[: deeds.rfind(b"\n") + 1], 0o600)


def _copy_tree(source: Path, target: Path) -> None:
    """Copy a folder without unfinished files.

    Raises:
        CannotWriteError: a file cannot be copied.
    """
    ignore = shutil.ignore_patterns("*.part", f"{durable.TEMPORARY_PREFIX}*")
    try:
        shutil.copytree(source, target, ignore=ignore, copy_function=_copy_if_there)
    except shutil.Error as error:
        # It lists (source, target, reason) of each file.
        path, _, reason = error.args[0][0]
        raise CannotWriteError(
            f"{path}: cannot be copied ({reason}); free some space, check the disk and the "
            "permissions, then run the command again"
        ) from error


def _copy_if_there(source: str, target: str) -> None:
    """Copy a file; do nothing if it was deleted in the meantime."""
    # The gateway writes meanwhile.
    _need_room(Path(target).parent, _file_size(Path(source)))
    try:
        shutil.copy2(source, target)
    except FileNotFoundError:
        if Path(source).exists():
            raise
        # The copy may have its bytes, without its mode.
        Path(target).unlink(missing_ok=True)


def restore(source: Path, data_folder: Path) -> DataSummary:
    """Make a data folder from a backup, which is verified first.

    After an error, `data_folder` is as it was before, but the rest of a restore that was killed may
    be gone.

    The backup is read twice: to check it, and to copy it. Files of the data folder have mode 0600.

    Args:
        source: the backup; it is only read.
        data_folder: the data folder: new, or empty except for lost+found. A link is followed. A
            folder with the rest of a restore that was killed counts as empty.

    Returns:
        The contents of the backup.

    Raises:
        NotFoundError: `source` is no complete backup.
        AlreadyExistsError: `data_folder` is not empty.
        ConfigurationError: `data_folder` is inside the backup.
        BusyError: a gateway serves `data_folder`.
        VerificationError: the backup is damaged, or has another format.
        CannotWriteError: a file cannot be read or written, or the disk lacks room.
        OSError: this user may not search a folder above one of them.
        RuntimeError: `data_folder` is a loop of links.
    """
    data_folder = data_folder.resolve()
    _refuse_full(data_folder)
    durable.refuse_copy_into_itself(data_folder, source)
    if not (source / LISTING).is_file():
        raise NotFoundError(
            f"{source}: expected a complete backup, found no {LISTING}; name a folder that "
            "`gateway data backup` wrote"
        )
    summary, files = verify(source), _read_listing(source).files
    unfinished = data_folder / UNFINISHED_RESTORE
    made = [
        unfinished,
        data_folder / "lock",
        *{data_folder / Path(path).parts[0] for path in files},
    ]
    new = [] if data_folder.exists() else [data_folder]
    if new:
        made = new
        durable.make_dir(data_folder, 0o700)
    with _lock(data_folder / "lock", *new), _remove_on_error(*made):
        _refuse_full(data_folder)
        # A restore that was killed left them.
        for name in _entry_names(data_folder):
            durable.remove_tree(data_folder / name)
        _need_room(data_folder, summary.bytes)
        for path in files:
            durable.make_dir((unfinished / path).parent, 0o700)
            shutil.copyfile(source / path, unfinished / path)
            (unfinished / path).chmod(0o600)
        # The state is the last: a folder without it is no data folder yet.
        for top in sorted(unfinished.iterdir(), key=lambda path: path.name == _STATE):
            publish = durable.publish_dir if top.is_dir() else durable.replace_file
            publish(top, data_folder / top.name)
        durable.remove_tree(unfinished)
    return summary


def _entry_names(data: Path) -> list[str]:
    """Return the names in a folder, without lost+found and the lock."""
    return [path.name for path in data.iterdir() if path.name not in (_LOST_AND_FOUND, "lock")]


def _refuse_full(data: Path) -> None:
    """Check that a data folder is missing or empty; the rest of a killed restore counts as empty.

    Raises:
        AlreadyExistsError: it has other files.
    """
    if not data.exists():
        return
    names = _entry_names(data) if data.is_dir() else [data.name]
    if names and (UNFINISHED_RESTORE not in names or _STATE in names):
        raise AlreadyExistsError(
            f"{data}: expected a new or empty folder, found {join_few(sorted(names))}; name a new "
            "one with --data"
        )


def verify(folder: Path) -> DataSummary:
    """Check that a backup or a data folder is intact; nothing is written.

    A gateway may serve the data folder. SQLite may create its own files next to a gallery whose
    last changes cannot be read otherwise. Checks the digests of a backup's files, the files that a
    gateway reads at its start, every page of every gallery, every vector, and every blob.

    Args:
        folder: the backup or the data folder.

    Returns:
        The contents of the folder.

    Raises:
        NotFoundError: it is neither a backup nor a data folder.
        VerificationError: a file is damaged, missing or unknown; the error names the first one.
        BusyError: a gateway locked a gallery for too long.
        CannotWriteError: a file cannot be read.
    """
    try:
        if (folder / LISTING).is_file():
            _check_listing(folder, _read_listing(folder).files)
        if not (folder / _STATE).is_file():
            raise NotFoundError(
                f"{folder}: expected a backup or a gateway's data folder, found no {_STATE}; check "
                "its name"
            )
        StateFile(folder / _STATE)
        TrustedState.load(folder / "trust" / "trusted.json")
        galleries = {
            path.parent.name: count
            for path in sorted((folder / "galleries").glob(f"*/{_GALLERY}"))
            if not path.parent.name.startswith(".") and (count := _check_gallery(path)) is not None
        }
        blobs = sum(map(_check_blob, (folder / "vault").glob("*/??/*")))
        parts = sorted((folder / "vault").glob(f"*/??/*{PART}"))
        unfinished_uploads = {str(path.relative_to(folder)): _file_size(path) for path in parts}
    except OSError as error:
        raise CannotWriteError(
            f"{error.filename}: cannot be read ({error.strerror}); check the disk and the "
            "permissions, then run the command again"
        ) from error
    size = sum(_file_size(folder / path) for path in _backup_file_paths(folder))
    return DataSummary(galleries, blobs, size, unfinished_uploads)


def _read_listing(folder: Path) -> _Listing:
    """Read the list of a backup's files.

    Raises:
        VerificationError: it is damaged, or has another format.
    """
    path = folder / LISTING
    try:
        listing = _Listing.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise VerificationError(
            f"{path}: this list of the backup's files is damaged ({error.errors()[0]['msg']}); use "
            "another backup"
        ) from error
    if listing.format != _FORMAT:
        raise VerificationError(
            f"{path}: expected a backup of format {_FORMAT}, got format {listing.format}; use "
            f"{describe_writer(listing.written_by)}"
        )
    return listing


def _copy_database(source: Path, target: Path) -> bool:
    """Copy a gallery; return False if it was deleted in the meantime.

    Raises as `_run_in_snapshot`.
    """

    def copy(old: sqlite3.Connection) -> bool:
        with closing(sqlite3.connect(target)) as new:
            old.backup(new)
        target.chmod(0o600)
        return True

    return _run_in_snapshot(source, copy) is not None


def _run_in_snapshot(path: Path, work: Callable[[sqlite3.Connection], Result]) -> Result | None:
    """Run work in one snapshot of a gallery, which a gateway may serve at the same time.

    The gallery and its log stay as they are, and no file is removed. The -shm of SQLite is created
    where the last changes cannot be read without it. `work` is called again if the gateway opened
    or closed the gallery during it.

    Args:
        path: file of the gallery.
        work: reads by a connection.

    Returns:
        The result of `work`; None if the gallery was deleted.

    Raises:
        BusyError: the gateway locked the gallery for more than some seconds.
        VerificationError: the gallery is damaged.
        CannotWriteError: it cannot be read.
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
    """Run work once.

    Args:
        path: file of the gallery.
        work: reads by a connection.
        patient: raise an error where the last changes can only be read by creating files.

    Raises:
        _MovedError: `patient`, and files would have to be created.
    """
    try:
        access = read_only_access(path, "")
        if access.unlocked_file_stat is None and explain_unwritable(path) is None:
            # The gateway has it open: this process can read by SQLite's shared memory as well.
            access = FileAccess("mode=ro")
    except CannotWriteError as error:
        if patient:
            raise _MovedError from error
        # SQLite makes the missing -shm to read the log. A connection that can write would move the
        # log into the file when it is closed.
        access = FileAccess("mode=ro")
    try:
        with closing(open_connection(path, access)) as connection:
            connection.execute("BEGIN")
            read_format(connection, path)
            return work(connection)
    except sqlite3.Error as error:
        raise error_from_sqlite(path, error) or error from error
    finally:
        # Reads without a lock may mix two states, which would look like damage.
        access.check_unchanged(path)


class _MovedError(NobackfillError):
    """A gallery is being opened or closed by its gateway."""


def _check_listing(folder: Path, files: dict[str, str]) -> None:
    present = {str(path) for path in _backup_file_paths(folder)} - {LISTING}
    if present != set(files):
        wrong = sorted(present ^ set(files))[0]
        failure = "does not belong to the backup" if wrong in present else "is missing"
        raise VerificationError(
            f"{folder}: the file {wrong} {failure}, as its list {LISTING} shows; use another backup"
        )
    for path, digest in files.items():
        if sha256_file(folder / path) != digest:
            raise VerificationError(
                f"{folder / path}: expected the digest of {LISTING}, found another one: the file "
                "has changed since the backup; use another backup"
            )


def _check_gallery(path: Path) -> int | None:
    """Check a gallery; return its number of items, or None if it was deleted in the meantime."""

    def check(connection: sqlite3.Connection) -> int:
        verdict = connection.execute("PRAGMA integrity_check").fetchone()[0]
        if verdict != "ok":
            raise VerificationError(
                f"{path}: this gallery file is damaged ({verdict}); use or restore another backup"
            )
        for info in read_spaces(connection):
            what = f"{path}: vectors of release {info.spec.release}"
            try:
                check_vectors(read_all_vectors(connection, info)[1], info.spec.dim, error_name=what)
            except UnusableRowsError as error:
                raise VerificationError(
                    f"{path}: this gallery file is damaged: {len(error.unusable_rows)} vectors of "
                    f"release {info.spec.release} are too large or not finite; use or restore "
                    "another backup"
                ) from error
        return count_rows(connection, None)

    return _run_in_snapshot(path, check)


def _check_blob(path: Path) -> int:
    """Check a file of a vault; return 1, or 0 if it is an unfinished upload or was deleted."""
    if path.suffix == PART or path.name.startswith(durable.TEMPORARY_PREFIX):
        return 0
    try:
        digest = sha256_file(path)
    except FileNotFoundError:
        return 0
    if digest != path.name.partition(".")[2]:
        raise VerificationError(
            f"{path}: this blob of the vault is damaged: its digest is not the one in its name; "
            "use or restore another backup"
        )
    return 1


def _backup_file_paths(folder: Path) -> list[Path]:
    """Return the files of a folder that belong to a backup, relative and sorted."""
    side_files = ("-wal", "-shm", ".lock", PART, "lock")
    relative_paths = []
    for top, folders, names in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if name != _LOST_AND_FOUND and not name.startswith(durable.TEMPORARY_PREFIX)
        ]
        paths = (Path(top, name) for name in names if not name.endswith(side_files))
        relative_paths += [path.relative_to(folder) for path in paths if path.is_file()]
    return sorted(relative_paths)


def _file_size(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
