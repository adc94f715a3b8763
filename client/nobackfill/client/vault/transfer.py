"""Push images to the vault and pull them back; interrupted transfers resume.

A push encrypts on the device and sends ciphertext. A pull decrypts on the device and compares each
image with its digest.
"""

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from pyrage.x25519 import Identity, Recipient

from nobackfill import durable
from nobackfill.client.gallery_file import GalleryFile, sidecar
from nobackfill.client.output import Output, size
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
from nobackfill.gallery.reading import StoredItem
from nobackfill.v1 import vault_pb2
from nobackfill.wire.gateway import Gateway

_PAGE = 500


@dataclass
class PushReport:
    """The result of a push.

    Attributes:
        pushed: how many images were uploaded.
        bytes_sent: bytes of ciphertext sent.
        removed: how many blobs were deleted in the vault.
        held: how many images the vault held already.
        skipped: items whose file is gone or was changed after it was added.
        unreadable: such items whose image in the vault only another key opens.
        lost: such items whose pushed image the vault has lost.
    """

    pushed: int = 0
    bytes_sent: int = 0
    removed: int = 0
    held: int = 0
    skipped: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return all fields, for --json."""
        return asdict(self)


def push(
    device: GalleryFile,
    recipients: Sequence[str],
    where: str | None,
    output: Output,
    *,
    new_key: bool = False,
) -> PushReport:
    """Upload every image that the vault does not hold, and delete there what was removed here.

    The recipients and the vault's address are stored in the gallery once the vault has answered.
    After a kill, the next push sends the sealed ciphertext and repeats at most one chunk.

    Args:
        device: the gallery.
        recipients: public keys age1... that can decrypt what is pushed from now on, in addition to
            the device's own key.
        where: the vault's gateway; None: the stored one, else the gallery's source.
        output: where to write progress.
        new_key: give up a lost key; push again, while their files exist, the images that only the
            lost key opens.

    Raises:
        ConfigurationError: a key is missing or malformed, or the vault lacks pushed images.
        UnavailableError: the vault does not answer.
        BusyError: another push or pull runs.
        CannotWriteError: the disk is full or read-only.
    """
    all_recipients = [*device.state("recipients", []), *recipients]
    keys = [read_recipient(text) for text in dict.fromkeys(all_recipients)]
    with device.vault_lock():
        queue = VaultQueue(device.store)
        report = PushReport()
        address = vault_address(device, where)
        with Gateway(address) as gateway:
            vault_blobs = check_vault(device, queue, gateway, address)
            device.store.state_set(
                {"recipients": list(dict.fromkeys(all_recipients)), "vault": address}
            )
            identity = identity_for_push(device, queue, new_key)
            outbox = sidecar(device.path, "outbox")
            durable.make_dir(outbox, 0o700)
            durable.sweep(outbox)
            _sweep(queue, outbox)
            _remove(gateway, queue, outbox, report)
            total = device.store.count()
            with output.progress("pushing") as advance:
                recipients_of_all = [identity.to_public(), *keys]
                for done, item in enumerate(_items(device), start=1):
                    _push_one(item, gateway, queue, vault_blobs, outbox, recipients_of_all, report)
                    advance(done, total)
            _remove(gateway, queue, outbox, report)
    return report


def _items(device: GalleryFile) -> Iterator[StoredItem]:
    after = 0
    while page := device.store.listing(after, _PAGE):
        yield from page
        after = page[-1].label


def _sweep(queue: VaultQueue, outbox: Path) -> None:
    """Delete ciphertext in the outbox that a killed push wrote without a row."""
    all_recipients = {entry.blob for entry in queue.entries("sealed")}
    for path in sorted(outbox.iterdir()):
        if path.name not in all_recipients:
            durable.remove_tree(path)


def _remove(gateway: Gateway, queue: VaultQueue, outbox: Path, report: PushReport) -> None:
    # An item that was removed during its push has left a row.
    for entry in queue.obsolete():
        gateway.delete_blob(entry.blob)
        durable.remove_tree(outbox / entry.blob)
        queue.forget(entry.blob)
        report.removed += 1


def _push_one(
    item: StoredItem,
    gateway: Gateway,
    queue: VaultQueue,
    vault_blobs: set[str],
    outbox: Path,
    keys: list[Recipient],
    report: PushReport,
) -> None:
    previous = queue.of(item.id)
    readable = previous is not None and previous.key == str(keys[0])
    # The item's image may have been replaced since the push.
    same = previous is not None and previous.image_sha256 == item.digest
    lost = previous is not None and previous.state == "stored" and previous.blob not in vault_blobs
    if previous is not None and previous.state == "stored" and readable and same and not lost:
        report.held += 1
        return
    entry = previous
    if previous is None or not (readable and same) or not (outbox / previous.blob).is_file():
        entry = _seal(item, queue, outbox, keys)
    if entry is None and lost and same:
        report.lost.append(item.id)
        return
    if entry is None:
        stored = previous is not None and previous.state == "stored" and same
        (report.unreadable if stored else report.skipped).append(item.id)
        return
    blob = vault_pb2.Blob(id=entry.blob, size=entry.size, sha256=entry.blob_sha256)
    report.bytes_sent += upload_blob(gateway, blob, outbox / entry.blob)
    # Only now delete older blobs of the item: lost from the outbox, or sealed with another key.
    queue.settle(entry)
    durable.remove_tree(outbox / entry.blob)
    report.pushed += 1


def _seal(
    item: StoredItem,
    queue: VaultQueue,
    outbox: Path,
    keys: list[Recipient],
) -> VaultEntry | None:
    """Encrypt an item's file into the outbox; return None if the file is gone or was changed."""
    image = local_image(item)
    if image is None:
        return None
    sealed = encrypt(image, keys)
    entry = VaultEntry(
        blob=secrets.token_hex(32),
        item=item.id,
        image_sha256=str(item.digest),
        blob_sha256=hashlib.sha256(sealed).hexdigest(),
        size=len(sealed),
        suffix=Path(str(item.metadata.get("name", ""))).suffix,
        state="sealed",
        key=str(keys[0]),
    )
    durable.write_file(outbox / entry.blob, sealed, 0o600)
    queue.seal(entry)
    return entry


# Longest file name in bytes: 255 less what a temporary name adds.
_LONGEST_NAME = 200
_SUFFIXES = {b"\xff\xd8\xff": ".jpg", b"\x89PNG": ".png", b"RIFF": ".webp"}


@dataclass
class PullReport:
    """The result of a pull: paths restored, images already there, the reason by failed blob."""

    restored: list[str] = field(default_factory=list)
    held: int = 0
    failed: dict[str, str] = field(default_factory=dict)

    def reasons(self) -> dict[str, list[str]]:
        """Group the failed blobs by their reason."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.failed.items():
            by_reason.setdefault(reason, []).append(name)
        return by_reason

    def as_json(self) -> dict[str, Any]:
        """Return all fields, for --json."""
        return asdict(self)


class VaultReader:
    """Reads images of the vault; connects on first use. Close it, or use it in a `with`."""

    def __init__(self, device: GalleryFile, identity: Path | None = None) -> None:
        """Prepare to read; `identity` is an age key file to use instead of the gallery's own."""
        self._device = device
        self._identity = identity
        self._inbox = sidecar(device.path, "inbox")
        self._open = ExitStack()
        self._gateway: Gateway | None = None
        self.queue = VaultQueue(device.store)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, if there is one."""
        self._open.close()

    def image(self, item_id: str) -> bytes | None:
        """Return the image that an item was made from; None if the vault does not hold it.

        Raises:
            VerificationError: the vault returns something other than what was pushed.
            UnavailableError: the vault does not answer.
        """
        entry, item = self.queue.of(item_id), self._device.store.get(item_id)
        if entry is None or entry.state != "stored" or not _is_of(entry, item):
            return None
        return self.decrypt_entry(entry)

    def decrypt_entry(self, entry: VaultEntry) -> bytes:
        """Return the image of a row. Raises VerificationError, UnavailableError, NotFoundError."""
        blob = vault_pb2.Blob(id=entry.blob, size=entry.size, sha256=entry.blob_sha256)
        image = self.fetch(blob)
        if hashlib.sha256(image).hexdigest() != entry.image_sha256:
            raise VerificationError(
                f"blob {entry.blob}: decrypts to another image than was pushed; nothing was written"
            )
        return image

    def unknown(self) -> list[vault_pb2.Blob]:
        """List the blobs of the vault that have no row in this gallery."""
        all_recipients = {entry.blob for entry in self.queue.entries()}
        return [blob for blob in list_blobs(self._connect()) if blob.id not in all_recipients]

    def fetch(self, blob: vault_pb2.Blob) -> bytes:
        """Return the plaintext of a blob. Raises VerificationError, UnavailableError and
        NotFoundError."""
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
    unknown: bool,
    output: Output,
) -> PullReport:
    """Restore images from the vault into a folder; a failed image is reported, the others go on.

    Args:
        device: the gallery.
        items: ids of items; empty: all images that the gallery pushed.
        folder: where to write the images.
        identity: an age key file to use instead of the gallery's own.
        unknown: also restore blobs without a row in this gallery, named by their digest; for
            example after the loss of a device.
        output: where to write progress and notes.

    Raises:
        NotFoundError: the vault holds no image of one of `items`.
        ConfigurationError: the key is missing or malformed.
        UnavailableError: the vault does not answer.
    """
    report = PullReport()
    durable.make_dir(folder)
    with device.vault_lock(), VaultReader(device, identity) as vaulted:
        entries = _entries(vaulted.queue, items)
        others = vaulted.unknown() if unknown else []
        if others:
            sizes = size(sum(blob.size for blob in others))
            output.note(f"{len(others)} blobs of other galleries to download, {sizes}")
        total = len(entries) + len(others)
        with output.progress("pulling") as advance:
            for done, entry in enumerate(entries, start=1):
                with _report_failure(report, entry.item):
                    _restore(device, vaulted, entry, folder, report)
                advance(done, total)
            for done, blob in enumerate(others, start=len(entries) + 1):
                with _report_failure(report, blob.id):
                    _restore_unknown(vaulted.fetch(blob), folder, report)
                advance(done, total)
    return report


@contextmanager
def _report_failure(report: PullReport, name: str) -> Iterator[None]:
    """Report an image that cannot be restored, and continue."""
    try:
        yield
    except (VerificationError, NotFoundError) as error:
        report.failed[name] = str(error)


def _entries(queue: VaultQueue, items: Sequence[str]) -> list[VaultEntry]:
    stored = {entry.item: entry for entry in queue.entries("stored")}
    for item in items:
        if item not in stored:
            raise NotFoundError(f"{item}: the vault holds no image of this item; push it first")
    return [stored[item] for item in items or sorted(stored)]


def _restore(
    device: GalleryFile, vaulted: VaultReader, entry: VaultEntry, folder: Path, report: PullReport
) -> None:
    item = device.store.get(entry.item)
    own = str(item.metadata.get("name", "")) if item is not None else ""
    digest = entry.image_sha256[:16]
    # Names and ids are arbitrary text, and the item's image may have been replaced.
    preferred = (own, f"{entry.item}{entry.suffix}") if _is_of(entry, item) else ()
    names = filter(_is_plain, (*preferred, f"{digest}{entry.suffix}"))
    target = _free([folder / name for name in (*names, digest)], entry.image_sha256)
    _write(target, lambda: vaulted.decrypt_entry(entry), report)


def _is_of(entry: VaultEntry, item: StoredItem | None) -> bool:
    """Return whether a row holds the item's present image, or the last image of a removed item."""
    return item is None or item.digest == entry.image_sha256


def _is_plain(name: str) -> bool:
    """Return whether a text is a file name inside a folder, and no path out of it."""
    short = len(name.encode("utf-8", "replace")) <= _LONGEST_NAME
    return short and name not in ("", ".", "..") and "/" not in name


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
    raise VerificationError(f"{targets[-1]}: exists with other content; pull into another folder")


def _write(target: Path | None, image: Callable[[], bytes], report: PullReport) -> None:
    if target is None:
        report.held += 1
        return
    # The folder is the user's: delete only temporary files of this very target.
    durable.sweep(target.parent, f"{target.name}-")
    durable.write_file(target, image(), 0o600)
    report.restored.append(str(target))


def _suffix(image: bytes) -> str:
    return next((suffix for head, suffix in _SUFFIXES.items() if image.startswith(head)), "")
