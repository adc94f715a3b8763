"""Backup, restore and verification of a data folder, while the gateway serves it or not.

A gallery is copied by SQLite's own backup, one consistent state each, under any load. An item that
was acknowledged before the backup began is in it. The vault's files never change once they are
there. `backup.json`, written last, names every file with its digest: without it there is no backup.
"""

import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from nobackfill import durable
from nobackfill.digests import sha256_file
from nobackfill.errors import (
    AlreadyExistsError,
    InvalidInputError,
    NotFoundError,
    VerificationError,
)
from nobackfill.gallery.store import Store
from nobackfill.server.state import StateFile
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
    data, AlreadyExistsError, CannotWriteError, VerificationError.
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
            shutil.copytree(
                data / folder,
                unfinished / folder,
                ignore=shutil.ignore_patterns("*.part", ".tmp-*"),
            )
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
            _copy_database(gallery, copy)


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
    shutil.copytree(source, unfinished, ignore=shutil.ignore_patterns(LISTING))
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


def _copy_database(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target)) as new:
        # All pages in one step: a writer in between would begin the copy anew.
        old.execute("PRAGMA busy_timeout = 5000")
        old.backup(new, pages=-1)
    target.chmod(0o600)


def _check_listing(folder: Path, files: dict[str, str]) -> None:
    found = {str(path) for path in _files(folder)} - {LISTING}
    if found != set(files):
        wrong = sorted(found ^ set(files))[0]
        raise VerificationError(f"{folder}: {wrong} is missing, or does not belong to the backup")
    for path, digest in files.items():
        if sha256_file(folder / path) != digest:
            raise VerificationError(f"{folder / path}: differs from what was backed up")


def _check_gallery(path: Path) -> int:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
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
