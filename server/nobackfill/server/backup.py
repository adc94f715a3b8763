"""Backup, restore and verification of a data folder, while the gateway serves it or not.

A gallery is copied by SQLite's own backup, one consistent state each, under any load. An item that
was acknowledged before the backup began is in it. The vault's files never change once they are
there. What is deleted meanwhile may be in it or not. `backup.json`, written last, names every file
with its digest: without it there is no backup.
"""

import json
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nobackfill import durable
from nobackfill.digests import sha256_file
from nobackfill.errors import (
    AlreadyExistsError,
    CannotWriteError,
    InvalidInputError,
    NotFoundError,
    VerificationError,
)
from nobackfill.gallery.store import Store
from nobackfill.server.state import AUDIT, StateFile
from nobackfill.sqlite_errors import refusal
from nobackfill.vectors import check_vectors

LISTING = "backup.json"
_GALLERY = "gallery.sqlite"


@dataclass(frozen=True)
class Summary:
    """What a folder holds: items by gallery, blobs of ciphertext, bytes of all files."""

    galleries: dict[str, int]
    blobs: int
    bytes: int


def backup(data: Path, target: Path) -> Summary:
    """Copy everything that cannot be made again from `data` to the new folder `target`.

    Indexes and Triton's files are left out. Raises NotFoundError for a folder without a gateway's
    data, AlreadyExistsError, BusyError, CannotWriteError, VerificationError.
    """
    if not (data / "state.json").is_file():
        raise NotFoundError(f"{data}: expected a gateway's data folder, found no state.json")
    if target.exists():
        raise AlreadyExistsError(f"{target}: exists already; give a new folder")
    unfinished = target.with_name(f"{durable.TEMPORARY}{target.name}")
    durable.remove_tree(unfinished)
    durable.make_dir(unfinished, 0o700)
    # The state frames the galleries: if an activation began or ended meanwhile, copy them again.
    state = None
    while state != (state := (data / "state.json").read_bytes()):
        _copy_galleries(data, unfinished)
    durable.write_file(unfinished / "state.json", state, 0o600)
    for folder in ("vault", "trust"):
        if (data / folder).is_dir():
            ignored = ("*.part", f"{durable.TEMPORARY}*")
            _copy_tree(data / folder, unfinished / folder, ignored, _copy_if_there)
    _copy_audit(data / AUDIT, unfinished / AUDIT)
    files = {str(path): sha256_file(unfinished / path) for path in _files(unfinished)}
    listing = json.dumps({"format": 1, "files": files}, indent=1).encode()
    durable.write_file(unfinished / LISTING, listing, 0o600)
    summary = verify(unfinished)
    durable.publish_dir(unfinished, target)
    return summary


def _copy_galleries(data: Path, unfinished: Path) -> None:
    durable.remove_tree(unfinished / "galleries")
    for gallery in sorted((data / "galleries").glob(f"*/{_GALLERY}")):
        if not gallery.parent.name.startswith("."):
            copy = unfinished / "galleries" / gallery.parent.name / _GALLERY
            durable.make_dir(copy.parent, 0o700)
            if not _copy_database(gallery, copy):
                durable.remove_tree(copy.parent)


def _copy_audit(source: Path, target: Path) -> None:
    """Up to the last end of a line: the gateway may be writing the next."""
    try:
        deeds = source.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        raise _cannot_copy(source, error) from error
    durable.write_file(target, deeds[: deeds.rfind(b"\n") + 1], 0o600)


def _copy_tree(
    source: Path, target: Path, ignored: Sequence[str], copy: Callable[[str, str], object]
) -> None:
    """Copy a folder, each file by `copy`; `ignored`: patterns of names. Raises CannotWriteError."""
    ignore = shutil.ignore_patterns(*ignored)
    try:
        shutil.copytree(source, target, ignore=ignore, copy_function=copy)
    except OSError as error:
        raise _cannot_copy(source, error) from error


def _copy_if_there(source: str, target: str) -> None:
    """Copy a file, unless it is deleted meanwhile."""
    try:
        shutil.copy2(source, target)
    except FileNotFoundError:
        if Path(source).exists():
            raise
        # Its bytes may have come, without its mode.
        Path(target).unlink(missing_ok=True)


def _cannot_copy(source: Path, error: OSError) -> CannotWriteError:
    # shutil's error lists (source, target, reason) of each file.
    listed = isinstance(error, shutil.Error) and error.args[0]
    reason = f"{listed[0][0]}: {listed[0][2]}" if listed else error.strerror
    return CannotWriteError(
        f"{source}: cannot be copied ({reason}); free some space, check the disk and the "
        "permissions, and run it again"
    )


def restore(source: Path, data: Path) -> Summary:
    """Make the new data folder `data` from a verified backup.

    Raises AlreadyExistsError for a folder with something in it, VerificationError, NotFoundError,
    CannotWriteError.
    """
    if data.exists() and any(data.iterdir()):
        raise AlreadyExistsError(f"{data}: is not empty; restore into a new folder")
    if not (source / LISTING).is_file():
        raise NotFoundError(f"{source}: expected a complete backup, found no {LISTING}")
    summary = verify(source)
    unfinished = data.with_name(f"{durable.TEMPORARY}{data.name}")
    durable.remove_tree(unfinished)
    _copy_tree(source, unfinished, [LISTING], shutil.copy2)
    if data.exists():
        durable.remove_tree(data)
    durable.publish_dir(unfinished, data)
    return summary


def verify(folder: Path) -> Summary:
    """Check a backup, or the data folder of a gateway: digests where they are listed, every page of
    every gallery, and every vector.

    Raises NotFoundError, VerificationError naming the first thing that is wrong.
    """
    listing = folder / LISTING
    if listing.is_file():
        _check_listing(folder, json.loads(listing.read_bytes())["files"])
    if not (folder / "state.json").is_file():
        raise NotFoundError(f"{folder}: expected a backup or a data folder, found no state.json")
    StateFile(folder / "state.json")
    galleries = {
        path.parent.name: _check_gallery(path)
        for path in sorted((folder / "galleries").glob(f"*/{_GALLERY}"))
        if not path.parent.name.startswith(".")
    }
    blobs = _check_blobs(folder / "vault")
    return Summary(galleries, blobs, sum((folder / p).stat().st_size for p in _files(folder)))


def _copy_database(source: Path, target: Path) -> bool:
    """Whether it was there: a gallery may be deleted after it was listed. Raises BusyError,
    CannotWriteError, DamagedError."""
    try:
        with closing(_open(source, "rw")) as old, closing(sqlite3.connect(target)) as new:
            # All pages in one step: a writer in between would begin the copy anew.
            old.execute("PRAGMA busy_timeout = 5000")
            old.backup(new, pages=-1)
    except sqlite3.Error as error:
        if not source.exists():
            return False
        raise refusal(source, error) or error from error
    target.chmod(0o600)
    return True


def _open(path: Path, mode: Literal["ro", "rw"]) -> sqlite3.Connection:
    """Open a database that is there; none is made."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True)


def _check_listing(folder: Path, files: dict[str, str]) -> None:
    found = {str(path) for path in _files(folder)} - {LISTING}
    if found != set(files):
        wrong = sorted(found ^ set(files))[0]
        raise VerificationError(f"{folder}: {wrong} is missing, or does not belong to the backup")
    for path, digest in files.items():
        if sha256_file(folder / path) != digest:
            raise VerificationError(f"{folder / path}: differs from what was backed up")


def _check_gallery(path: Path) -> int:
    with closing(_open(path, "ro")) as connection:
        try:
            verdict = connection.execute("PRAGMA integrity_check").fetchone()[0]
        except sqlite3.DatabaseError as error:
            raise VerificationError(f"{path}: is damaged ({error}); restore a backup") from error
        if verdict != "ok":
            raise VerificationError(f"{path}: is damaged ({verdict}); restore a backup")
    with Store.open(path) as store:
        for info in store.spaces():
            what = f"{path}: vectors of release {info.spec.release}"
            try:
                check_vectors(store.load(info.spec.space)[1], info.spec.dim, what=what)
            except InvalidInputError as error:
                raise VerificationError(str(error)) from error
        return store.count()


def _check_blobs(vault: Path) -> int:
    count = 0
    for path in vault.glob("*/??/*"):
        if path.suffix == ".part":
            continue
        if sha256_file(path) != path.name.partition(".")[2]:
            raise VerificationError(f"{path}: the blob's digest differs; restore a backup")
        count += 1
    return count


def _files(folder: Path) -> list[Path]:
    """Files of a folder that belong to a backup."""
    side_files = ("-wal", "-shm", ".lock", ".part", "lock")
    return sorted(
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith(side_files)
    )
