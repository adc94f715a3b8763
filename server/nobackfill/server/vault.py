"""The vault: files of ciphertext, one owner's apart from another's, uploads that resume.

The gateway has no key. It checks the age header, the size and the digest, and knows ids only.
"""

import hashlib
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from nobackfill import durable
from nobackfill.digests import sha256_file
from nobackfill.errors import (
    AlreadyExistsError,
    BusyError,
    InvalidInputError,
    NotFoundError,
    OutOfRangeError,
    QuotaExceededError,
    TooLargeError,
    few,
)
from nobackfill.wire.limits import LARGEST_BLOB

PAGE = 1000
# Seconds for which an upload that has not ended is kept, where its owner needs the room.
KEPT_S = 24 * 3600.0
CHUNK = 256 * 1024
# A file takes as much of a disk, however small it is.
_LEAST = 4096
# What every age file begins with: https://age-encryption.org/v1.
_HEADER = b"age-encryption.org/v1\n"
_HEX = re.compile(r"^[0-9a-f]{64}\Z")
PART = ".part"


@dataclass(frozen=True)
class Blob:
    """`id` and `sha256` are 64 hex digits, `size` in bytes."""

    id: str
    size: int
    sha256: str


class VaultBlobs:
    """A file for each blob, named by its id and digest, below a folder for each owner.

    No owner's files take more than `quota` bytes together, a file at least 4 KiB.
    """

    def __init__(self, folder: Path, quota: int) -> None:
        """Raises CannotWriteError."""
        durable.make_dir(folder, 0o700)
        self._folder = folder
        self._quota = quota
        self._lock = threading.Lock()
        self._uploading: set[tuple[str, str]] = set()
        # Bytes by owner, counted when one first writes; with what is promised to uploads under way.
        self._used: dict[str, int] = {}

    def put(self, owner: str, blob: Blob, offset: int, chunks: Iterable[bytes]) -> int:
        """Store a blob, or the next piece of one; the bytes held, all of them durable.

        Raises InvalidInputError (id, digest, not age), TooLargeError, OutOfRangeError for an offset
        other than what is held, AlreadyExistsError for an id with another content, BusyError while
        another upload of it runs, QuotaExceededError, CannotWriteError.
        """
        _check(blob)
        with self._alone(owner, blob.id):
            existing = self._find(owner, blob.id)
            if existing is not None:
                if existing.name.partition(".")[2] != blob.sha256:
                    raise AlreadyExistsError("a blob of that id is stored; choose another id")
                return existing.stat().st_size
            part = self._shard(owner, blob.id) / f"{blob.id}.{blob.sha256}{PART}"
            with self._lock:
                full = self._with(owner, part, blob) > self._quota
            if full:
                self._expire(owner)
            with self._room(owner, part, blob):
                return self._receive(part, blob, offset, chunks)

    def get(self, owner: str, blob_id: str, offset: int) -> tuple[Blob, Iterator[bytes]]:
        """A blob and its bytes from an offset on. Raises NotFoundError, OutOfRangeError."""
        path = self._need(owner, blob_id)
        blob = _blob(path)
        if blob is None:
            raise _none()
        if offset > blob.size:
            raise OutOfRangeError(f"the blob has {blob.size} bytes, asked for offset {offset}")
        try:
            handle = path.open("rb")
        except FileNotFoundError:
            # Deleted between the two.
            raise _none() from None

        def chunks() -> Iterator[bytes]:
            with handle:
                handle.seek(offset)
                while chunk := handle.read(CHUNK):
                    yield chunk

        return blob, chunks()

    def delete(self, owner: str, blob_id: str) -> None:
        """Delete a blob, or what came of one. Raises NotFoundError, CannotWriteError."""
        with self._alone(owner, blob_id):
            plain = _HEX.match(blob_id)
            held = list(self._shard(owner, blob_id).glob(f"{blob_id}.*")) if plain else []
            if not held:
                raise _none()
            with self._lock:
                self._usage(owner)
            freed = sum(map(_cost, held))
            for path in held:
                durable.remove_tree(path)
            with self._lock:
                self._used[owner] -= freed

    def page(self, owner: str, after: str) -> list[Blob]:
        """Up to PAGE blobs by id, those after id `after`. Raises InvalidInputError for a token."""
        if after and not _HEX.match(after):
            raise InvalidInputError("page_token: expected one that ListBlobs gave")
        found: list[Blob] = []
        for shard in sorted(self._owner(owner).glob("[0-9a-f][0-9a-f]")):
            if shard.name < after[:2]:
                continue
            paths = [p for p in shard.iterdir() if p.suffix != PART and p.name[:64] > after]
            found += filter(None, map(_blob, sorted(paths)))
            if len(found) >= PAGE:
                break
        return found[:PAGE]

    def _receive(self, part: Path, blob: Blob, offset: int, chunks: Iterable[bytes]) -> int:
        held = part.stat().st_size if part.exists() else 0
        for chunk in chunks:
            if not chunk:
                continue
            if offset != held:
                raise OutOfRangeError(f"expected offset {held}, got {offset}; go on from there")
            held = self._append(part, blob, held, chunk)
            offset = held
        if held == blob.size:
            self._finish(part, blob)
        return held

    def _append(self, part: Path, blob: Blob, held: int, chunk: bytes) -> int:
        if held + len(chunk) > blob.size:
            raise TooLargeError(f"expected {blob.size} bytes as announced, got more")
        if held < len(_HEADER):
            expected = _HEADER[held : held + len(chunk)]
            if chunk[: len(expected)] != expected:
                raise InvalidInputError("expected age ciphertext; encrypt on the device first")
        durable.make_dir(part.parent, 0o700)
        durable.append(part, chunk, 0o600)
        return held + len(chunk)

    def _finish(self, part: Path, blob: Blob) -> None:
        if sha256_file(part) != blob.sha256:
            durable.remove_tree(part)
            raise InvalidInputError("the bytes have another SHA-256 than announced; upload again")
        durable.replace(part, part.with_suffix(""))

    @contextmanager
    def _room(self, owner: str, part: Path, blob: Blob) -> Iterator[None]:
        """Room for all of the blob while it comes; after that, for what there is of it."""
        full = max(blob.size, _LEAST)
        with self._lock:
            used = self._with(owner, part, blob)
            fits = used <= self._quota
            if fits:
                self._used[owner] = used
        if not fits:
            # Nobody waits for the lock while files are listed.
            raise QuotaExceededError(
                f"the vault keeps {self._quota} bytes under one name, this blob would make it "
                f"{used}; delete what is not needed, or ask its operator for more"
                f"{self._unfinished(owner, part)}"
            )
        try:
            yield
        finally:
            with self._lock:
                self._used[owner] += (_cost(part) or _cost(part.with_suffix(""))) - full

    def _with(self, owner: str, part: Path, blob: Blob) -> int:
        """Bytes of an owner once a blob is whole."""
        return self._usage(owner) - _cost(part) + max(blob.size, _LEAST)

    def _unfinished(self, owner: str, but: Path) -> str:
        """Name an owner's uploads that have not ended, which no list shows."""
        parts = [path for path in self._owner(owner).glob(f"??/*{PART}") if path != but]
        if not parts:
            return ""
        names = few(path.name.partition(".")[0] for path in sorted(parts))
        return (
            f". {sum(map(_cost, parts))} bytes are of {len(parts)} uploads that have not ended "
            f"({names}): finish or delete them, or wait a day"
        )

    def _expire(self, owner: str) -> None:
        """Remove what came of uploads that nobody has gone on with for KEPT_S."""
        for part in self._owner(owner).glob(f"??/*{PART}"):
            name = part.name.partition(".")[0]
            with suppress(BusyError, FileNotFoundError), self._alone(owner, name):
                if time.time() - part.stat().st_mtime >= KEPT_S:
                    freed = _cost(part)
                    durable.remove_tree(part)
                    with self._lock:
                        self._used[owner] -= freed

    def _usage(self, owner: str) -> int:
        if owner not in self._used:
            self._used[owner] = sum(map(_cost, self._owner(owner).glob("??/*")))
        return self._used[owner]

    @contextmanager
    def _alone(self, owner: str, blob_id: str) -> Iterator[None]:
        key = (owner, blob_id)
        with self._lock:
            if key in self._uploading:
                raise BusyError("another call is writing this blob; try again when it has ended")
            self._uploading.add(key)
        try:
            yield
        finally:
            with self._lock:
                self._uploading.discard(key)

    def _need(self, owner: str, blob_id: str) -> Path:
        path = self._find(owner, blob_id) if _HEX.match(blob_id) else None
        if path is None:
            raise _none()
        return path

    def _find(self, owner: str, blob_id: str) -> Path | None:
        found = self._shard(owner, blob_id).glob(f"{blob_id}.*")
        return next((path for path in found if path.suffix != PART), None)

    def _shard(self, owner: str, blob_id: str) -> Path:
        return self._owner(owner) / blob_id[:2]

    def _owner(self, owner: str) -> Path:
        # A name may hold anything; its digest is a plain folder name.
        return self._folder / hashlib.sha256(owner.encode()).hexdigest()[:32]


def _check(blob: Blob) -> None:
    if not _HEX.match(blob.id) or not _HEX.match(blob.sha256):
        raise InvalidInputError("expected an id and a sha256 of 64 hex digits each")
    if blob.size > LARGEST_BLOB:
        raise TooLargeError(f"expected at most {LARGEST_BLOB} bytes, got {blob.size}")
    if blob.size < len(_HEADER):
        raise InvalidInputError("expected age ciphertext, got fewer bytes than its header")


def _cost(path: Path) -> int:
    try:
        return max(path.stat().st_size, _LEAST)
    except FileNotFoundError:
        return 0


def _blob(path: Path) -> Blob | None:
    """None for one that was deleted since its name was read."""
    blob_id, _, sha256 = path.name.partition(".")
    try:
        return Blob(blob_id, path.stat().st_size, sha256)
    except FileNotFoundError:
        return None


def _none() -> NotFoundError:
    return NotFoundError("no blob of that id is stored")
