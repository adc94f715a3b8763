"""Images out of the vault: downloaded with resume, decrypted here, compared with what was added."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from client import crypto
from client.device import Device, beside
from client.output import Output
from client.push import connected
from client.vault import Vault
from client.vault_queue import Entry, VaultQueue
from nobackfill.v1 import vault_pb2
from release import durable
from release.errors import NotFoundError, VerificationError

_SUFFIXES = {b"\xff\xd8\xff": ".jpg", b"\x89PNG": ".png", b"RIFF": ".webp"}


@dataclass
class Pulled:
    """What a pull did: paths restored, images that were there, blobs that failed and why."""

    restored: list[str] = field(default_factory=list)
    held: int = 0
    failed: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """All of it, for --json."""
        return asdict(self)


class Vaulted:
    """Images of the vault, connected to on first use; close it, or use it in a `with`."""

    def __init__(self, device: Device, identity: Path | None = None) -> None:
        """`identity`: an age identity file to use instead of this gallery's, a recovery key."""
        self._device = device
        self._identity = identity or beside(device.path, "identity")
        self._inbox = beside(device.path, "inbox")
        self._open = ExitStack()
        self._vault: Vault | None = None
        self.queue = VaultQueue(device.store)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection, if there is one."""
        self._open.close()

    def image(self, item_id: str) -> bytes | None:
        """The image of an item; None if the vault does not hold it.

        Raises VerificationError if it comes back as anything but what was pushed.
        """
        entry = self.queue.of(item_id)
        return None if entry is None or entry.state != "stored" else self.decrypted(entry)

    def decrypted(self, entry: Entry) -> bytes:
        """The image of a row. Raises VerificationError, UnavailableError, NotFoundError."""
        blob = vault_pb2.Blob(id=entry.blob, size=entry.size, sha256=entry.blob_sha256)
        image = self._fetched(blob)
        if hashlib.sha256(image).hexdigest() != entry.image_sha256:
            raise VerificationError(
                f"blob {entry.blob}: decrypts to another image than was pushed; nothing was written"
            )
        return image

    def unknown(self) -> Iterator[bytes]:
        """Images of the blobs that the vault lists and this gallery has no row for."""
        known = {entry.blob for entry in self.queue.entries()}
        for blob in self._connected().blobs():
            if blob.id not in known:
                yield self._fetched(blob)

    def _connected(self) -> Vault:
        if self._vault is None:
            self._vault = self._open.enter_context(connected(self._device))
        return self._vault

    def _fetched(self, blob: vault_pb2.Blob) -> bytes:
        durable.make_dir(self._inbox, 0o700)
        sealed = self._inbox / blob.id
        self._connected().get(blob, sealed)
        try:
            return crypto.decrypt(sealed, [crypto.read_identity(self._identity)])
        finally:
            durable.remove_tree(sealed)


def pull(
    device: Device,
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
    with device.locked(), Vaulted(device, identity) as vaulted:
        entries = _entries(vaulted.queue, items)
        with output.progress("pulling") as advance:
            for done, entry in enumerate(entries, start=1):
                try:
                    _restore(device, vaulted, entry, folder, report)
                except (VerificationError, NotFoundError) as error:
                    report.failed[entry.item] = str(error)
                advance(done, len(entries))
        for image in vaulted.unknown() if unknown else ():
            digest = hashlib.sha256(image).hexdigest()
            target = folder / f"{digest[:16]}{_suffix(image)}"
            durable.write_file(target, image, 0o600)
            report.restored.append(str(target))
    return report


def _entries(queue: VaultQueue, items: Sequence[str]) -> list[Entry]:
    stored = {entry.item: entry for entry in queue.entries("stored")}
    for item in items:
        if item not in stored:
            raise NotFoundError(f"{item}: the vault holds no image of such an item; push it first")
    return [stored[item] for item in items or sorted(stored)]


def _restore(device: Device, vaulted: Vaulted, entry: Entry, folder: Path, report: Pulled) -> None:
    item = device.store.get(entry.item)
    name = str(item.metadata.get("name", "")) if item is not None else ""
    for target in (folder / Path(name or entry.item).name, folder / f"{entry.item}{entry.suffix}"):
        if not target.exists():
            durable.write_file(target, vaulted.decrypted(entry), 0o600)
            report.restored.append(str(target))
            return
        if hashlib.sha256(target.read_bytes()).hexdigest() == entry.image_sha256:
            report.held += 1
            return
    raise VerificationError(f"{target}: is there with other content; pull into another folder")


def _suffix(image: bytes) -> str:
    return next((suffix for head, suffix in _SUFFIXES.items() if image.startswith(head)), "")
