"""Images into the vault: encrypted here, sent as ciphertext, resumed where it broke off."""

import hashlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pyrage.x25519 import Recipient

from nobackfill import durable
from nobackfill.client.gallery_file import GalleryFile, beside
from nobackfill.client.output import Output
from nobackfill.client.photos.files import local_image
from nobackfill.client.vault import encryption
from nobackfill.client.vault.address import address_of, check_vault
from nobackfill.client.vault.identity import identity_for_push
from nobackfill.client.vault.queue import Entry, VaultQueue
from nobackfill.client.vault.transport import upload
from nobackfill.gallery.store import Item
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
    keys = [encryption.recipient(text) for text in dict.fromkeys(known)]
    with device.vaulting():
        queue = VaultQueue(device.store)
        report = Pushed()
        address = address_of(device, where)
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


def _items(device: GalleryFile) -> Iterator[Item]:
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
    item: Item,
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
    report.bytes_sent += upload(gateway, blob, outbox / entry.blob)
    # Only now may an older blob of the item go: one lost from the outbox, or of another key.
    queue.settle(entry)
    durable.remove_tree(outbox / entry.blob)
    report.pushed += 1


def _seal(
    item: Item,
    queue: VaultQueue,
    outbox: Path,
    keys: list[Recipient],
) -> Entry | None:
    """Encrypt an item's file into the outbox; None if the file is not what was added."""
    image = local_image(item)
    if image is None:
        return None
    sealed = encryption.encrypt(image, keys)
    entry = Entry(
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
