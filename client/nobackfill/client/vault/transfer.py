"""Images into the vault and out of it, resumed where a transfer broke off.

A push encrypts here and sends ciphertext. A pull decrypts here and compares each image with what
was added."""

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
from nobackfill.client.gallery_file import GalleryFile, beside
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
class Pushed:
    """What a push did. `skipped`: items whose file is gone or was changed since it was added;
    `unreadable`: such items of which the vault holds an image that another key opens; `lost`: such
    items whose pushed image the vault has lost."""

    pushed: int = 0
    bytes_sent: int = 0
    removed: int = 0
    held: int = 0
    skipped: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """All of it, for --json."""
        return asdict(self)


def push(
    device: GalleryFile,
    recipients: Sequence[str],
    where: str | None,
    output: Output,
    *,
    new_key: bool = False,
) -> Pushed:
    """Upload every image that the vault does not hold, and delete there what was removed here.

    `recipients` (public keys age1...) can decrypt what is pushed from now on, beside this device's
    own key; they and the vault at `where` are remembered once it has answered. With `new_key` a
    lost key is given up: what only that opened is pushed again while its file is there. A kill
    costs at most one chunk: what was sealed is sent as it is. Raises ConfigurationError (also for a
    vault that lacks what was pushed before), UnavailableError, BusyError, CannotWriteError.
    """
    known = [*device.state("recipients", []), *recipients]
    keys = [read_recipient(text) for text in dict.fromkeys(known)]
    with device.vaulting():
        queue = VaultQueue(device.store)
        report = Pushed()
        address = vault_address(device, where)
        with Gateway(address) as gateway:
            listed = check_vault(device, queue, gateway, address)
            device.store.state_set({"recipients": list(dict.fromkeys(known)), "vault": address})
            identity = identity_for_push(device, queue, new_key)
            outbox = beside(device.path, "outbox")
            durable.make_dir(outbox, 0o700)
            durable.sweep(outbox)
            _sweep(queue, outbox)
            _remove(gateway, queue, outbox, report)
            total = device.store.count()
            with output.progress("pushing") as advance:
                recipients_of_all = [identity.to_public(), *keys]
                for done, item in enumerate(_items(device), start=1):
                    _push_one(item, gateway, queue, listed, outbox, recipients_of_all, report)
                    advance(done, total)
            _remove(gateway, queue, outbox, report)
    return report


def _items(device: GalleryFile) -> Iterator[StoredItem]:
    after = 0
    while page := device.store.listing(after, _PAGE):
        yield from page
        after = page[-1].label


def _sweep(queue: VaultQueue, outbox: Path) -> None:
    """Remove ciphertext that was written, but not recorded before a kill."""
    known = {entry.blob for entry in queue.entries("sealed")}
    for path in sorted(outbox.iterdir()):
        if path.name not in known:
            durable.remove_tree(path)


def _remove(gateway: Gateway, queue: VaultQueue, outbox: Path, report: Pushed) -> None:
    # An item that was removed while its push was under way left a row behind.
    for entry in queue.obsolete():
        gateway.delete_blob(entry.blob)
        durable.remove_tree(outbox / entry.blob)
        queue.forget(entry.blob)
        report.removed += 1


def _push_one(
    item: StoredItem,
    gateway: Gateway,
    queue: VaultQueue,
    listed: set[str],
    outbox: Path,
    keys: list[Recipient],
    report: Pushed,
) -> None:
    held = queue.of(item.id)
    readable = held is not None and held.key == str(keys[0])
    # An item may have got another image since.
    same = held is not None and held.image_sha256 == item.digest
    lost = held is not None and held.state == "stored" and held.blob not in listed
    if held is not None and held.state == "stored" and readable and same and not lost:
        report.held += 1
        return
    entry = held
    if held is None or not (readable and same) or not (outbox / held.blob).is_file():
        entry = _seal(item, queue, outbox, keys)
    if entry is None and lost and same:
        report.lost.append(item.id)
        return
    if entry is None:
        stored = held is not None and held.state == "stored" and same
        (report.unreadable if stored else report.skipped).append(item.id)
        return
    blob = vault_pb2.Blob(id=entry.blob, size=entry.size, sha256=entry.blob_sha256)
    report.bytes_sent += upload_blob(gateway, blob, outbox / entry.blob)
    # Only now may an older blob of the item go: one lost from the outbox, or of another key.
    queue.settle(entry)
    durable.remove_tree(outbox / entry.blob)
    report.pushed += 1


def _seal(
    item: StoredItem,
    queue: VaultQueue,
    outbox: Path,
    keys: list[Recipient],
) -> VaultEntry | None:
    """Encrypt an item's file into the outbox; None if the file is not what was added."""
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


# Bytes; 255 with what a temporary file adds.
_LONGEST_NAME = 200
_SUFFIXES = {b"\xff\xd8\xff": ".jpg", b"\x89PNG": ".png", b"RIFF": ".webp"}


@dataclass
class Pulled:
    """What a pull did: paths restored, images that were there, blobs that failed and why."""

    restored: list[str] = field(default_factory=list)
    held: int = 0
    failed: dict[str, str] = field(default_factory=dict)

    def reasons(self) -> dict[str, list[str]]:
        """What failed, by the reason that it has in common with others."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.failed.items():
            by_reason.setdefault(reason, []).append(name)
        return by_reason

    def as_json(self) -> dict[str, Any]:
        """All of it, for --json."""
        return asdict(self)


class Vaulted:
    """Images of the vault, connected to on first use; close it, or use it in a `with`."""

    def __init__(self, device: GalleryFile, identity: Path | None = None) -> None:
        """`identity`: an age identity file to use instead of this gallery's, a recovery key."""
        self._device = device
        self._identity = identity
        self._inbox = beside(device.path, "inbox")
        self._open = ExitStack()
        self._gateway: Gateway | None = None
        self.queue = VaultQueue(device.store)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection, if there is one."""
        self._open.close()

    def image(self, item_id: str) -> bytes | None:
        """The image that an item was made from; None if the vault does not hold it.

        Raises VerificationError if it comes back as anything but what was pushed.
        """
        entry, item = self.queue.of(item_id), self._device.store.get(item_id)
        if entry is None or entry.state != "stored" or not _is_of(entry, item):
            return None
        return self.decrypted(entry)

    def decrypted(self, entry: VaultEntry) -> bytes:
        """The image of a row. Raises VerificationError, UnavailableError, NotFoundError."""
        blob = vault_pb2.Blob(id=entry.blob, size=entry.size, sha256=entry.blob_sha256)
        image = self.fetched(blob)
        if hashlib.sha256(image).hexdigest() != entry.image_sha256:
            raise VerificationError(
                f"blob {entry.blob}: decrypts to another image than was pushed; nothing was written"
            )
        return image

    def unknown(self) -> list[vault_pb2.Blob]:
        """The blobs that the vault lists and this gallery has no row for."""
        known = {entry.blob for entry in self.queue.entries()}
        return [blob for blob in list_blobs(self._connected()) if blob.id not in known]

    def fetched(self, blob: vault_pb2.Blob) -> bytes:
        """The plaintext of a blob. Raises VerificationError, UnavailableError, NotFoundError."""
        durable.make_dir(self._inbox, 0o700)
        # A name of ours: what the vault calls it is no path.
        name = hashlib.sha256(f"{blob.id} {blob.size} {blob.sha256}".encode()).hexdigest()
        sealed = self._inbox / name
        download_blob(self._connected(), blob, sealed)
        try:
            return keys.decrypt(sealed, [self._key()])
        finally:
            durable.remove_tree(sealed)

    def _key(self) -> Identity:
        if self._identity is not None:
            return keys.read_identity(self._identity)
        return own_identity(self._device)

    def _connected(self) -> Gateway:
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
) -> Pulled:
    """Restore images from the vault into `folder`: those of `items`, or all that it holds.

    With `unknown`, also blobs that this gallery has no row for, as after the loss of a device; they
    are named by their digest. An image that fails is named, and the others go on. Raises
    NotFoundError for an item that the vault does not hold, ConfigurationError, UnavailableError.
    """
    report = Pulled()
    durable.make_dir(folder)
    with device.vaulting(), Vaulted(device, identity) as vaulted:
        entries = _entries(vaulted.queue, items)
        others = vaulted.unknown() if unknown else []
        if others:
            sizes = size(sum(blob.size for blob in others))
            output.note(f"{len(others)} blobs of other galleries to download, {sizes}")
        total = len(entries) + len(others)
        with output.progress("pulling") as advance:
            for done, entry in enumerate(entries, start=1):
                with _failing(report, entry.item):
                    _restore(device, vaulted, entry, folder, report)
                advance(done, total)
            for done, blob in enumerate(others, start=len(entries) + 1):
                with _failing(report, blob.id):
                    _restore_unknown(vaulted.fetched(blob), folder, report)
                advance(done, total)
    return report


@contextmanager
def _failing(report: Pulled, name: str) -> Iterator[None]:
    """Name what cannot be restored, and go on."""
    try:
        yield
    except (VerificationError, NotFoundError) as error:
        report.failed[name] = str(error)


def _entries(queue: VaultQueue, items: Sequence[str]) -> list[VaultEntry]:
    stored = {entry.item: entry for entry in queue.entries("stored")}
    for item in items:
        if item not in stored:
            raise NotFoundError(f"{item}: the vault holds no image of such an item; push it first")
    return [stored[item] for item in items or sorted(stored)]


def _restore(
    device: GalleryFile, vaulted: Vaulted, entry: VaultEntry, folder: Path, report: Pulled
) -> None:
    item = device.store.get(entry.item)
    own = str(item.metadata.get("name", "")) if item is not None else ""
    digest = entry.image_sha256[:16]
    # Names and ids are any text, and an item may have got another image since.
    wished = (own, f"{entry.item}{entry.suffix}") if _is_of(entry, item) else ()
    names = filter(_is_plain, (*wished, f"{digest}{entry.suffix}"))
    target = _free([folder / name for name in (*names, digest)], entry.image_sha256)
    _write(target, lambda: vaulted.decrypted(entry), report)


def _is_of(entry: VaultEntry, item: StoredItem | None) -> bool:
    """Whether what was pushed is still the item's image, or its last where it is gone."""
    return item is None or item.digest == entry.image_sha256


def _is_plain(name: str) -> bool:
    """Whether a text can name a file in a folder, and nothing outside it."""
    short = len(name.encode("utf-8", "replace")) <= _LONGEST_NAME
    return short and name not in ("", ".", "..") and "/" not in name


def _restore_unknown(image: bytes, folder: Path, report: Pulled) -> None:
    digest = hashlib.sha256(image).hexdigest()
    target = _free([folder / f"{digest[:16]}{_suffix(image)}"], digest)
    _write(target, lambda: image, report)


def _free(targets: Sequence[Path], sha256: str) -> Path | None:
    """The first of `targets` where nothing is; None if the image is there already."""
    for target in targets:
        if not os.path.lexists(target):
            return target
        if target.is_file() and sha256_file(target) == sha256:
            return None
    raise VerificationError(f"{targets[-1]}: is there with other content; pull into another folder")


def _write(target: Path | None, image: Callable[[], bytes], report: Pulled) -> None:
    if target is None:
        report.held += 1
        return
    # The folder is the user's: of what a killed pull left there, only what was to be this file.
    durable.sweep(target.parent, f"{target.name}-")
    durable.write_file(target, image(), 0o600)
    report.restored.append(str(target))


def _suffix(image: bytes) -> str:
    return next((suffix for head, suffix in _SUFFIXES.items() if image.startswith(head)), "")
