"""Store the vault: files of ciphertext by owner, with uploads that can be resumed.

The gateway has no key. It checks the age header, the size and the digest, and knows only ids.
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
    join_few,
)
from nobackfill.wire.limits import LARGEST_BLOB

PAGE = 1000
# Time (seconds) for which an unfinished upload is kept if its owner needs the room.
UNFINISHED_SECONDS = 24 * 3600.0
CHUNK = 256 * 1024
# Least cost (bytes) of a file on disk.
_MIN_COST = 4096
# The first bytes of every age file: https://age-encryption.org/v1.
_HEADER = b"age-encryption.org/v1\n"
_HEX = re.compile(r"^[0-9a-f]{64}\Z")
PART = ".part"


@dataclass(frozen=True)
class Blob:
    """Describe a blob.

    Attributes:
        id: name that its owner chose, 64 hex digits.
        size: number of bytes.
        sha256: digest of its bytes, 64 hex digits.
    """

    id: str
    size: int
    sha256: str


class VaultBlobs:
    """Store blobs: a folder for each owner, and in it a file for each blob, named by id and digest.

    An owner's files cost at most `quota` bytes in total; a file costs at least 4 KiB. An owner is
    the name of a token, or empty without tokens. Calls of several threads are safe.
    """

    def __init__(self, folder: Path, quota: int) -> None:
        """Create the folder with mode 0700, if it is missing; nothing is read.

        Args:
            folder: the folder of the vault; one process writes to it.
            quota: largest cost of one owner's files, in bytes.

        Raises:
            CannotWriteError: it cannot be created.
        """
        durable.make_dir(folder, 0o700)
        self._folder = folder
        self._quota = quota
        self._lock = threading.Lock()
        self._uploading: set[tuple[str, str]] = set()
        # Bytes by owner, counted when the owner first writes, with those reserved by running
        # uploads.
        self._used: dict[str, int] = {}

    def put(self, owner: str, blob: Blob, offset: int, chunks: Iterable[bytes]) -> int:
        """Store a blob, or its next piece, durably.

        An upload that ends early can be continued, also after a restart. If the complete blob is
        stored already, its size is returned, and neither offset nor chunks are read. If the owner
        lacks room, uploads that were not continued for a day are deleted first.

        Args:
            owner: the owner.
            blob: the whole blob; its announced size is reserved during the call.
            offset: offset of the first chunk: the number of bytes that are stored so far.
            chunks: the bytes; empty chunks are skipped, and without any the offset is not checked.
                Chunks before an error stay stored.

        Returns:
            The number of stored bytes; the blob is complete when it equals `blob.size`.

        Raises:
            InvalidInputError: the id or digest is not valid, the bytes are no age file, or all of
                them have another digest; then they are deleted.
            TooLargeError: the blob is too large, or there are more bytes than announced.
            OutOfRangeError: the offset is not the number of stored bytes.
            AlreadyExistsError: the id has another content.
            BusyError: another call writes or deletes the blob.
            QuotaExceededError: the owner's blobs would cost more than the quota.
            CannotWriteError: the blob cannot be written.
            OSError: a file of the vault cannot be read.
            Exception: any error of `chunks`.
        """
        _check_blob(blob)
        with self._blob_lock(owner, blob.id):
            existing = self._find_blob_path(owner, blob.id)
            if existing is not None:
                if existing.name.partition(".")[2] != blob.sha256:
                    raise AlreadyExistsError(
                        f"blob {blob.id}: another blob is stored under this id; choose another id, "
                        "or delete that blob first"
                    )
                return existing.stat().st_size
            part = self._shard_folder(owner, blob.id) / f"{blob.id}.{blob.sha256}{PART}"
            with self._lock:
                is_over_quota = self._usage_with(owner, part, blob) > self._quota
            if is_over_quota:
                self._expire(owner)
            with self._reserve_room(owner, part, blob):
                return self._receive(part, blob, offset, chunks)

    def get(self, owner: str, blob_id: str, offset: int) -> tuple[Blob, Iterator[bytes]]:
        """Return a complete blob, and its bytes from an offset.

        An id that is not valid counts as unknown.

        Args:
            owner: the owner.
            blob_id: its id.
            offset: the first byte, at least 0; the blob's size gives no bytes.

        Returns:
            The blob, and its bytes in chunks. The file stays open until they are read to the end or
            closed, or dropped if none was read; also if the blob is deleted meanwhile.

        Raises:
            NotFoundError: the owner has no such complete blob.
            OutOfRangeError: the offset is above its size.
            OSError: the file cannot be opened; also raised by the iterator, if it cannot be read.
        """
        path = self._find_blob_path(owner, blob_id) if _HEX.match(blob_id) else None
        if path is None or (blob := _describe_blob(path)) is None:
            raise _not_found()
        if offset > blob.size:
            raise OutOfRangeError(
                f"offset: expected at most {blob.size}, the size of the blob, got {offset}; "
                "request the blob again from its start"
            )
        try:
            handle = path.open("rb")
        except FileNotFoundError:
            # The blob was deleted in between.
            raise _not_found() from None

        def chunks() -> Iterator[bytes]:
            with handle:
                handle.seek(offset)
                while chunk := handle.read(CHUNK):
                    yield chunk

        return blob, chunks()

    def delete(self, owner: str, blob_id: str) -> None:
        """Delete a blob, or an unfinished upload, durably; its bytes no longer count for the quota.

        An id that is not valid counts as unknown. A reader that has the blob open reads it to the
        end.

        Raises:
            NotFoundError: the owner has neither, or it was deleted before.
            BusyError: another call writes or deletes the blob.
            CannotWriteError: it cannot be deleted.
        """
        with self._blob_lock(owner, blob_id):
            is_valid = _HEX.match(blob_id)
            files = (
                list(self._shard_folder(owner, blob_id).glob(f"{blob_id}.*")) if is_valid else []
            )
            if not files:
                raise _not_found()
            with self._lock:
                self._used_bytes(owner)
            freed = sum(map(_quota_bytes, files))
            for path in files:
                durable.remove_tree(path)
            with self._lock:
                self._used[owner] -= freed

    def list_page(self, owner: str, last_id: str) -> list[Blob]:
        """Return the next blobs by id, at most PAGE (1000).

        Args:
            owner: the owner.
            last_id: id after which the page begins; empty for the first page. It need not exist.

        Returns:
            Complete blobs by rising id; empty after the last one, and for an unknown owner.
            Unfinished uploads are left out.

        Raises:
            InvalidInputError: `last_id` is not an id.
            OSError: a folder of the vault cannot be read.
        """
        if last_id and not _HEX.match(last_id):
            raise InvalidInputError(
                "page_token: expected the next_page_token of a ListBlobs answer, or none for the "
                "first page; got another text. Leave page_token out to begin with the first page"
            )
        blobs: list[Blob] = []
        for shard in sorted(self._owner_folder(owner).glob("[0-9a-f][0-9a-f]")):
            if shard.name < last_id[:2]:
                continue
            paths = [
                path for path in shard.iterdir() if path.suffix != PART and path.name[:64] > last_id
            ]
            blobs += filter(None, map(_describe_blob, sorted(paths)))
            if len(blobs) >= PAGE:
                break
        return blobs[:PAGE]

    def _receive(self, part: Path, blob: Blob, offset: int, chunks: Iterable[bytes]) -> int:
        size = part.stat().st_size if part.exists() else 0
        for chunk in chunks:
            if not chunk:
                continue
            if offset != size:
                raise OutOfRangeError(
                    f"blob {blob.id}: expected a chunk at offset {size}, the number of stored "
                    f"bytes, got offset {offset}; continue the upload at {size}"
                )
            size = self._append(part, blob, size, chunk)
            offset = size
        if size == blob.size:
            self._finish(part, blob)
        return size

    def _append(self, part: Path, blob: Blob, size: int, chunk: bytes) -> int:
        if size + len(chunk) > blob.size:
            raise TooLargeError(
                f"blob {blob.id}: expected {blob.size} bytes, the announced size, got more; upload "
                "it again with its true size"
            )
        if size < len(_HEADER):
            expected = _HEADER[size : size + len(chunk)]
            if chunk[: len(expected)] != expected:
                raise InvalidInputError(
                    f"blob {blob.id}: expected a file in the age format, got other bytes; the "
                    "vault stores ciphertext only, so encrypt the blob on the device first"
                )
        durable.make_dir(part.parent, 0o700)
        durable.append_bytes(part, chunk, 0o600)
        return size + len(chunk)

    def _finish(self, part: Path, blob: Blob) -> None:
        if sha256_file(part) != blob.sha256:
            durable.remove_tree(part)
            raise InvalidInputError(
                f"blob {blob.id}: expected bytes with the announced SHA-256, got others; the "
                "upload was deleted, so upload the blob again from its start"
            )
        durable.replace_file(part, part.with_suffix(""))

    @contextmanager
    def _reserve_room(self, owner: str, part: Path, blob: Blob) -> Iterator[None]:
        """Reserve room for a whole blob during its upload; afterwards, for its stored part."""
        cost = max(blob.size, _MIN_COST)
        with self._lock:
            used = self._usage_with(owner, part, blob)
            has_room = used <= self._quota
            if has_room:
                self._used[owner] = used
        if not has_room:
            # The error is made outside of the lock, because it lists files.
            raise QuotaExceededError(
                f"blob {blob.id}: expected at most {self._quota} bytes of blobs under the name of "
                f"one token, got {used} with this blob; delete some blobs, or ask the operator for "
                "a larger quota"
                f"{self._unfinished(owner, part)}"
            )
        try:
            yield
        finally:
            with self._lock:
                self._used[owner] += (
                    _quota_bytes(part) or _quota_bytes(part.with_suffix(""))
                ) - cost

    def _usage_with(self, owner: str, part: Path, blob: Blob) -> int:
        """Return the bytes of an owner once a blob is complete."""
        return self._used_bytes(owner) - _quota_bytes(part) + max(blob.size, _MIN_COST)

    def _unfinished(self, owner: str, but: Path) -> str:
        """Describe an owner's unfinished uploads, which ListBlobs does not show."""
        parts = [path for path in self._owner_folder(owner).glob(f"??/*{PART}") if path != but]
        if not parts:
            return ""
        names = join_few(path.name.partition(".")[0] for path in sorted(parts))
        return (
            f". {sum(map(_quota_bytes, parts))} bytes belong to {len(parts)} unfinished uploads "
            f"({names}): finish or delete them, or wait a day"
        )

    def _expire(self, owner: str) -> None:
        """Delete an owner's uploads that were not continued for UNFINISHED_SECONDS."""
        for part in self._owner_folder(owner).glob(f"??/*{PART}"):
            name = part.name.partition(".")[0]
            with suppress(BusyError, FileNotFoundError), self._blob_lock(owner, name):
                if time.time() - part.stat().st_mtime >= UNFINISHED_SECONDS:
                    freed = _quota_bytes(part)
                    durable.remove_tree(part)
                    with self._lock:
                        self._used[owner] -= freed

    def _used_bytes(self, owner: str) -> int:
        if owner not in self._used:
            self._used[owner] = sum(map(_quota_bytes, self._owner_folder(owner).glob("??/*")))
        return self._used[owner]

    @contextmanager
    def _blob_lock(self, owner: str, blob_id: str) -> Iterator[None]:
        key = (owner, blob_id)
        with self._lock:
            if key in self._uploading:
                raise BusyError(
                    f"blob {blob_id}: another call is writing or deleting it; try again in a few "
                    "seconds"
                )
            self._uploading.add(key)
        try:
            yield
        finally:
            with self._lock:
                self._uploading.discard(key)

    def _find_blob_path(self, owner: str, blob_id: str) -> Path | None:
        paths = self._shard_folder(owner, blob_id).glob(f"{blob_id}.*")
        return next((path for path in paths if path.suffix != PART), None)

    def _shard_folder(self, owner: str, blob_id: str) -> Path:
        return self._owner_folder(owner) / blob_id[:2]

    def _owner_folder(self, owner: str) -> Path:
        # A name may have any characters; its digest is a plain folder name.
        return self._folder / hashlib.sha256(owner.encode()).hexdigest()[:32]


def _check_blob(blob: Blob) -> None:
    for name, value in (("id", blob.id), ("sha256", blob.sha256)):
        if not _HEX.match(value):
            raise InvalidInputError(
                f"blob: expected 64 lower-case hex digits as its {name}, got {value[:80]!r}; "
                f"correct the {name}"
            )
    if blob.size > LARGEST_BLOB:
        raise TooLargeError(
            f"blob {blob.id}: expected a size of at most {LARGEST_BLOB} bytes, got {blob.size}; "
            "store a smaller file"
        )
    if blob.size < len(_HEADER):
        raise InvalidInputError(
            f"blob {blob.id}: expected a file in the age format, which has at least {len(_HEADER)} "
            f"bytes, got size {blob.size}; encrypt the blob on the device first"
        )


def _quota_bytes(path: Path) -> int:
    try:
        return max(path.stat().st_size, _MIN_COST)
    except FileNotFoundError:
        return 0


def _describe_blob(path: Path) -> Blob | None:
    """Describe a file as a blob; None if it was deleted."""
    blob_id, _, sha256 = path.name.partition(".")
    try:
        return Blob(blob_id, path.stat().st_size, sha256)
    except FileNotFoundError:
        return None


def _not_found() -> NotFoundError:
    return NotFoundError(
        "the vault has no blob with this id under the name of your token; ListBlobs lists the blobs"
    )
