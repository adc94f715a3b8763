"""Push images to the vault and pull them back; interrupted transfers resume.

A push encrypts on the device and sends ciphertext. A pull decrypts on the device and compares each
image with its digest.
"""

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyrage.x25519 import Identity, Recipient

from nobackfill import durable
from nobackfill.client.gallery_file import GalleryFile, sidecar_path
from nobackfill.client.output import Output, format_bytes
from nobackfill.client.photos import local_image
from nobackfill.client.vault import keys
from nobackfill.client.vault.keys import encrypt, identity_for_push, own_identity, read_recipient
from nobackfill.client.vault.queue import VaultEntry, VaultQueue
from nobackfill.client.vault.transport import (
    check_vault,
    download_blob,
    list_blobs,
    upload_blob,
    vault_address,
)
from nobackfill.digests import sha256_file
from nobackfill.errors import NotFoundError, VerificationError
from nobackfill.gallery.sqlite_file import StoredItem
from nobackfill.v1 import vault_pb2
from nobackfill.wire.gateway import Gateway

_PAGE = 500


@dataclass
class PushReport:
    """The result of a push.

    Attributes:
        pushed_count: how many images were uploaded.
        bytes_sent: bytes of ciphertext sent.
        removed_count: how many blobs were deleted in the vault.
        duplicate_count: how many images the vault held already.
        missing_files: items that were not pushed, because their file is gone or was changed after
            it was added.
        unreadable: items with such a file, whose image in the vault only another key opens.
        lost_copies: items with such a file, whose pushed image the vault has lost.
    """

    pushed_count: int = 0
    bytes_sent: int = 0
    removed_count: int = 0
    duplicate_count: int = 0
    missing_files: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    lost_copies: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the report as in `edge-client push --json`.

        Returns:
            The counts and lists, under the keys pushed, bytes_sent, removed, held, skipped,
            unreadable and lost.
        """
        return {
            "pushed": self.pushed_count, "bytes_sent": self.bytes_sent,
            "removed": self.removed_count,
            "held": self.duplicate_count, "skipped": self.missing_files,
            "unreadable": self.unreadable, "lost": self.lost_copies,
        }  # fmt: skip


def push(
    device: GalleryFile,
    recipients: Sequence[str],
    gateway_address: str | None,
    output: Output,
    *,
    new_key: bool = False,
) -> PushReport:
    """Encrypt and upload every image that the vault lacks, and delete there what was removed here.

    The recipients and the vault's address are stored in the gallery once the vault has answered.
    The first push makes the gallery's key. After a kill, the next push sends the sealed ciphertext
    and repeats at most one chunk.

    An item whose file is above 32 MiB counts as missing. Images are sent one after another, each
    from its file in memory. Images that were sent before an error stay in the vault. Blocks for as
    long as the transfer takes.

    Args:
        device: the gallery.
        recipients: public keys age1... that can decrypt what is pushed from now on, in addition to
            the device's own key and to earlier recipients.
        gateway_address: the vault's gateway, grpc(s)://HOST:PORT; None: the stored one, else the
            gallery's source.
        output: where to write progress.
        new_key: replace a lost key; push again, while their files exist, the images that only the
            lost key opens.

    Returns:
        Counts, and the items that could not be pushed, because their files are missing or changed.

    Raises:
        ConfigurationError: a key is missing or malformed, the address is no gateway, the token or
            certificate cannot be read, or another vault than the stored one lacks pushed images.
        UnavailableError: the vault does not answer, or an upload makes no progress, also because
            the gateway's disk is full.
        NotPermittedError: the gateway refuses the token.
        QuotaExceededError: the vault holds as many bytes as it may.
        VerificationError: the vault lists malformed blobs, or the gallery file is damaged.
        BusyError: another push or pull runs (this does not wait), or another process holds the
            gallery file, or the gateway has too much work.
        CannotWriteError: the disk is full or read-only.
        InvalidInputError: the vault refuses a ciphertext, also as too large (TooLargeError).
        AlreadyExistsError: the vault holds another blob under the random id.
        NotFoundError: the gallery was closed.
        OutOfRangeError: another upload of the same ciphertext runs.
        NobackfillError: ciphertext in the outbox cannot be read.
    """
    all_recipients = [*device.state("recipients", []), *recipients]
    keys = [read_recipient(text) for text in dict.fromkeys(all_recipients)]
    with device.vault_lock():
        queue = VaultQueue(device.store)
        report = PushReport()
        address = vault_address(device, gateway_address)
        with Gateway(address) as gateway:
            vault_blobs = check_vault(device, queue, gateway, address)
            device.store.update_state(
                {"recipients": list(dict.fromkeys(all_recipients)), "vault": address}
            )
            identity = identity_for_push(device, queue, new_key)
            outbox = sidecar_path(device.path, "outbox")
            durable.make_dir(outbox, 0o700)
            durable.remove_temporary_files(outbox)
            queue.sweep(outbox)
            _remove(gateway, queue, outbox, report)
            total = device.store.count()
            with output.progress("pushing") as advance:
                recipients_of_all = [identity.to_public(), *keys]
                for count, item in enumerate(_items(device), start=1):
                    _push_one(item, gateway, queue, vault_blobs, outbox, recipients_of_all, report)
                    advance(count, total)
            _remove(gateway, queue, outbox, report)
    return report


def _items(device: GalleryFile) -> Iterator[StoredItem]:
    label = 0
    while page := device.store.list_items(label, _PAGE):
        yield from page
        label = page[-1].label


def _remove(gateway: Gateway, queue: VaultQueue, outbox: Path, report: PushReport) -> None:
    # An item that was removed during its push has left a row.
    for entry in queue.obsolete_entries():
        gateway.delete_blob(entry.blob_id)
        durable.remove_tree(outbox / entry.blob_id)
        queue.delete_entry(entry.blob_id)
        report.removed_count += 1


def _push_one(
    item: StoredItem,
    gateway: Gateway,
    queue: VaultQueue,
    vault_blobs: set[str],
    outbox: Path,
    keys: list[Recipient],
    report: PushReport,
) -> None:
    previous = queue.latest_entry(item.id)
    readable = previous is not None and previous.public_key == str(keys[0])
    # The item's image may have been replaced since the push.
    same = previous is not None and previous.image_sha256 == item.digest
    is_lost = (
        previous is not None and previous.state == "stored" and previous.blob_id not in vault_blobs
    )
    if previous is not None and previous.state == "stored" and readable and same and not is_lost:
        report.duplicate_count += 1
        return
    entry = previous
    if previous is None or not (readable and same) or not (outbox / previous.blob_id).is_file():
        entry = _seal(item, queue, outbox, keys)
    if entry is None and is_lost and same:
        report.lost_copies.append(item.id)
        return
    if entry is None:
        is_stored = previous is not None and previous.state == "stored" and same
        (report.unreadable if is_stored else report.missing_files).append(item.id)
        return
    blob = vault_pb2.Blob(id=entry.blob_id, size=entry.blob_bytes, sha256=entry.blob_sha256)
    report.bytes_sent += upload_blob(gateway, blob, outbox / entry.blob_id)
    # Only now delete older blobs of the item: lost from the outbox, or sealed with another key.
    queue.mark_stored(entry)
    durable.remove_tree(outbox / entry.blob_id)
    report.pushed_count += 1


def _seal(
    item: StoredItem, queue: VaultQueue, outbox: Path, keys: list[Recipient]
) -> VaultEntry | None:
    """Encrypt an item's file into the outbox; return None if the file is gone or was changed."""
    image = local_image(item)
    if image is None:
        return None
    sealed = encrypt(image, keys)
    entry = VaultEntry(
        blob_id=secrets.token_hex(32),
        item_id=item.id,
        image_sha256=str(item.digest),
        blob_sha256=hashlib.sha256(sealed).hexdigest(),
        blob_bytes=len(sealed),
        suffix=Path(str(item.metadata.get("name", ""))).suffix,
        state="sealed",
        public_key=str(keys[0]),
    )
    durable.write_file(outbox / entry.blob_id, sealed, 0o600)
    queue.insert_sealed(entry)
    return entry


# Longest file name in bytes: 255 less what a temporary name adds.
_LONGEST_NAME = 200
_SUFFIXES = {b"\xff\xd8\xff": ".jpg", b"\x89PNG": ".png", b"RIFF": ".webp"}


@dataclass
class PullReport:
    """The result of a pull.

    Attributes:
        restored: paths of the files that were written.
        duplicate_count: how many images the folder held already.
        failed: the reason by item, or by blob without an item.
    """

    restored: list[str] = field(default_factory=list)
    duplicate_count: int = 0
    failed: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the report as in `edge-client pull --json`.

        Returns:
            The lists and the count, under the keys restored, held and failed.
        """
        return {"restored": self.restored, "held": self.duplicate_count, "failed": self.failed}


class VaultReader:
    """Reads images of a gallery's vault; connects on first use. Close it.

    Attributes:
        queue: the gallery's table of images in the vault.
    """

    def __init__(self, device: GalleryFile, identity: Path | None = None) -> None:
        """Prepare to read images; nothing is read or connected yet.

        Args:
            device: the gallery.
            identity: an age key file to use instead of the gallery's own; None: the own one. It is
                read for each image.
        """
        self._device = device
        self._identity = identity
        self._inbox = sidecar_path(device.path, "inbox")
        self._open = ExitStack()
        self._gateway: Gateway | None = None
        self.queue = VaultQueue(device.store)

    def close(self) -> None:
        """Close the connection, if there is one.

        A later read connects again. A second call does nothing.
        """
        self._open.close()

    def read_image(self, item_id: str) -> bytes | None:
        """Download and decrypt the image that an item was made from.

        Takes no lock; the ciphertext lies in the folder inbox during the call. Two calls at once
        for one image disturb each other.

        Args:
            item_id: the item's id; an unknown one gives None, unless a removed item's image is
                still in the vault.

        Returns:
            The encoded image. None if it was not pushed, or if the pushed image is not the present
            one of the item.

        Raises:
            VerificationError: the vault returns other bytes than were pushed, or the gallery file
                is damaged.
            NotFoundError: the vault has lost the blob, or the gallery was closed.
            ConfigurationError: the key or the vault's address is missing or malformed, or the token
                or certificate cannot be read.
            NotPermittedError: the gateway refuses the token.
            UnavailableError: the vault does not answer.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the disk is full or read-only.
            OSError: the part of an earlier download cannot be read.
        """
        entry, item = self.queue.latest_entry(item_id), self._device.store.get(item_id)
        if entry is None or entry.state != "stored" or not _is_of(entry, item):
            return None
        return self.decrypt_entry(entry)

    def decrypt_entry(self, entry: VaultEntry) -> bytes:
        """Download and decrypt the image of a row, and compare it with its digest.

        Two calls at once for one row disturb each other.

        Args:
            entry: a row of the gallery's table.

        Returns:
            The encoded image.

        Raises:
            VerificationError: the vault returns other bytes than were pushed, another key encrypted
                them, or the gallery file is damaged.
            NotFoundError: the vault has lost the blob, or the gallery was closed.
            ConfigurationError: the key or the vault's address is missing or malformed, or the token
                or certificate cannot be read.
            NotPermittedError: the gateway refuses the token.
            UnavailableError: the vault does not answer, or the download makes no progress.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the disk is full or read-only.
            OSError: the part of an earlier download cannot be read.
        """
        blob = vault_pb2.Blob(id=entry.blob_id, size=entry.blob_bytes, sha256=entry.blob_sha256)
        image = self.decrypt_blob(blob)
        if hashlib.sha256(image).hexdigest() != entry.image_sha256:
            raise VerificationError(
                f"blob {entry.blob_id}: the vault returned another image than the one that was "
                "pushed, and nothing was written; tell the gateway's operator, who can restore a "
                "backup"
            )
        return image

    def unknown_blobs(self) -> list[vault_pb2.Blob]:
        """List the blobs of the vault that have no row in this gallery, ordered by id.

        Raises:
            VerificationError: the vault's list is malformed, or the gallery file is damaged.
            ConfigurationError: the vault's address is no gateway, or the token or certificate
                cannot be read.
            NotPermittedError: the gateway refuses the token.
            UnavailableError: the vault does not answer.
            BusyError: another process holds the gallery file for 5 seconds, or the gateway has too
                much work.
            CannotWriteError: the file cannot be opened, or the disk fails.
            NotFoundError: the gallery was closed.
        """
        own_blobs = {entry.blob_id for entry in self.queue.entries()}
        return [blob for blob in list_blobs(self._connect()) if blob.id not in own_blobs]

    def decrypt_blob(self, blob: vault_pb2.Blob) -> bytes:
        """Download a blob and decrypt it in memory; no plaintext is written.

        The ciphertext is deleted afterwards. An interrupted download stays, and the next call
        continues it. Two calls at once for one blob disturb each other.

        Args:
            blob: id, size and digest of the ciphertext.

        Returns:
            The plaintext.

        Raises:
            NotFoundError: the vault does not hold the blob, or the gallery was closed.
            VerificationError: `blob` is malformed, the bytes differ from the digest, another key
                encrypted them, or the gallery file is damaged.
            ConfigurationError: the key or the vault's address is missing or malformed, or the token
                or certificate cannot be read.
            NotPermittedError: the gateway refuses the token.
            UnavailableError: the vault does not answer, or the download makes no progress.
            CannotWriteError: the disk is full or read-only.
            BusyError: another process holds the gallery file for 5 seconds.
            OSError: the part of an earlier download cannot be read.
        """
        durable.make_dir(self._inbox, 0o700)
        # The vault's ids are untrusted, so they are not used as file names.
        name = hashlib.sha256(f"{blob.id} {blob.size} {blob.sha256}".encode()).hexdigest()
        sealed = self._inbox / name
        download_blob(self._connect(), blob, sealed)
        try:
            return keys.decrypt(sealed, [self._key()])
        finally:
            durable.remove_tree(sealed)

    def _key(self) -> Identity:
        if self._identity is not None:
            return keys.read_identity(self._identity)
        return own_identity(self._device)

    def _connect(self) -> Gateway:
        if self._gateway is None:
            self._gateway = self._open.enter_context(Gateway(vault_address(self._device)))
        return self._gateway


def pull(
    device: GalleryFile,
    items: Sequence[str],
    folder: Path,
    identity: Path | None,
    include_unknown: bool,
    output: Output,
) -> PullReport:
    """Restore images from the vault into a folder, and compare each with its digest.

    An image that the vault lacks, or whose bytes are not as they were, is reported and does not
    affect the others; any other error ends the call. Existing files are never replaced. A file gets
    the name that it had, or one made of its digest if that name is in use. Files get mode 0600.
    Images that were restored before an error stay.

    Args:
        device: the gallery.
        items: ids of items; empty: all images that the gallery pushed, in the order of their ids.
            An item that is named twice is restored once, and counts as held the second time.
        folder: where to write the images; made if it is missing.
        identity: an age key file to use instead of the gallery's own; None: the own one.
        include_unknown: also restore blobs without a row in this gallery, named by their digest;
            for example after the loss of a device.
        output: where to write progress and notes.

    Returns:
        The paths of the files that were written, how many the folder held already, and the
        failures. An image that another key encrypted is a failure, too.

    Raises:
        NotFoundError: the gallery has pushed no image of one of `items`; nothing was restored; or
            the gallery was closed.
        ConfigurationError: the key or the vault's address is missing or malformed, or the token or
            certificate cannot be read.
        VerificationError: the vault's list is malformed, or the gallery file is damaged.
        NotPermittedError: the gateway refuses the token.
        UnavailableError: the vault does not answer.
        BusyError: another push or pull runs (this does not wait), or another process holds the
            gallery file, or the gateway has too much work.
        CannotWriteError: the disk is full or read-only.
        OSError: an existing file of the same name, or the part of an earlier download, cannot be
            read.
    """
    report = PullReport()
    durable.make_dir(folder)
    with device.vault_lock(), closing(VaultReader(device, identity)) as vaulted:
        entries = _entries(vaulted.queue, items)
        others = vaulted.unknown_blobs() if include_unknown else []
        if others:
            sizes = format_bytes(sum(blob.size for blob in others))
            output.print_note(f"{len(others)} blobs of other galleries to download, {sizes}")
        total = len(entries) + len(others)
        with output.progress("pulling") as advance:
            for count, entry in enumerate(entries, start=1):
                with _report_failure(report, entry.item_id):
                    _restore(device, vaulted, entry, folder, report)
                advance(count, total)
            for count, blob in enumerate(others, start=len(entries) + 1):
                with _report_failure(report, blob.id):
                    _restore_unknown(vaulted.decrypt_blob(blob), folder, report)
                advance(count, total)
    return report


@contextmanager
def _report_failure(report: PullReport, name: str) -> Iterator[None]:
    """Report an image that cannot be restored, and continue."""
    try:
        yield
    except (VerificationError, NotFoundError) as error:
        report.failed[name] = str(error)


def _entries(queue: VaultQueue, items: Sequence[str]) -> list[VaultEntry]:
    entries = {entry.item_id: entry for entry in queue.entries("stored")}
    for item in items:
        if item not in entries:
            raise NotFoundError(
                f"{item}: the vault holds no image of this item; run `edge-client push` first"
            )
    return [entries[item] for item in items or sorted(entries)]


def _restore(
    device: GalleryFile, vaulted: VaultReader, entry: VaultEntry, folder: Path, report: PullReport
) -> None:
    item = device.store.get(entry.item_id)
    own = str(item.metadata.get("name", "")) if item is not None else ""
    digest = entry.image_sha256[:16]
    # Names and ids are arbitrary text, and the item's image may have been replaced.
    preferred = (own, f"{entry.item_id}{entry.suffix}") if _is_of(entry, item) else ()
    names = filter(_is_plain, (*preferred, f"{digest}{entry.suffix}"))
    target = _free([folder / name for name in (*names, digest)], entry.image_sha256)
    _write(target, lambda: vaulted.decrypt_entry(entry), report)


def _is_of(entry: VaultEntry, item: StoredItem | None) -> bool:
    """Return whether a row holds the item's present image, or the last image of a removed item."""
    return item is None or item.digest == entry.image_sha256


def _is_plain(name: str) -> bool:
    """Return whether a text is a file name inside a folder, and no path out of it."""
    try:
        short = len(os.fsencode(name)) <= _LONGEST_NAME
    except UnicodeEncodeError:
        # Half of a character, which no file system stores.
        return False
    return short and name not in ("", ".", "..") and not {"/", "\0"} & {*name}


def _restore_unknown(image: bytes, folder: Path, report: PullReport) -> None:
    digest = hashlib.sha256(image).hexdigest()
    target = _free([folder / f"{digest[:16]}{_suffix(image)}"], digest)
    _write(target, lambda: image, report)


def _free(targets: Sequence[Path], sha256: str) -> Path | None:
    """Return the first of `targets` that does not exist; None if one holds the image already."""
    for target in targets:
        if not os.path.lexists(target):
            return target
        if target.is_file() and sha256_file(target) == sha256:
            return None
    raise VerificationError(
        f"{targets[-1]}: a file with other content exists there; pull into another folder (--to)"
    )


def _write(target: Path | None, image: Callable[[], bytes], report: PullReport) -> None:
    if target is None:
        report.duplicate_count += 1
        return
    # The folder is the user's: delete only temporary files of this very target.
    durable.remove_temporary_files(target.parent, f"{target.name}-")
    durable.write_file(target, image(), 0o600)
    report.restored.append(str(target))


def _suffix(image: bytes) -> str:
    return next((suffix for head, suffix in _SUFFIXES.items() if image.startswith(head)), "")
