"""Transfer ciphertext to and from the vault; interrupted transfers resume.

The vault's address is stored at the first push. It stays when the gallery follows another source,
until `push --vault` names another gateway that holds the same images.
"""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from nobackfill import durable
from nobackfill.client.gallery_file import GalleryFile, is_gateway
from nobackfill.client.vault.queue import VaultQueue
from nobackfill.errors import (
    ConfigurationError,
    NobackfillError,
    UnavailableError,
    VerificationError,
)
from nobackfill.v1 import vault_pb2
from nobackfill.wire.gateway import Gateway
from nobackfill.wire.limits import LARGEST_BLOB
from nobackfill.wire.statuses import transient

_CHUNK = 256 * 1024
# Deadline of one stream, so that a silent gateway cannot block a transfer. A broken transfer
# resumes at its offset; after this many attempts without progress it fails.
STREAM_SECONDS = 30.0
_STANDSTILLS = 5
# The vault is untrusted: its list of blobs is checked against these limits.
_MOST_BLOBS = 1_000_000
_HEX = re.compile(r"[0-9a-f]{64}")


def upload_blob(gateway: Gateway, blob: vault_pb2.Blob, source: Path) -> int:
    """Upload the ciphertext file `source`; resume what the vault holds already.

    Returns:
        The bytes that had to be sent.

    Raises:
        UnavailableError: the upload made no progress in five attempts.
    """
    position = first = gateway.received_bytes(blob)
    standstills = 0
    while position < blob.size:
        try:
            answer = gateway.put_blob(
                blob, _chunks(source, position), position, seconds=STREAM_SECONDS
            )
        except NobackfillError as error:
            if not transient(error):
                raise
            answer = gateway.received_bytes(blob)
        standstills = 0 if answer > position else standstills + 1
        if standstills == _STANDSTILLS:
            raise UnavailableError(
                f"{gateway.address}: the upload stopped at {position} of {blob.size} bytes; "
                "push again later"
            )
        position = answer
    return int(blob.size - first)


def download_blob(gateway: Gateway, blob: vault_pb2.Blob, target: Path) -> None:
    """Download a blob to `target`; the file appears only when complete and verified.

    `target`.part keeps the bytes of an interrupted download.

    Raises:
        NotFoundError: the vault does not hold the blob.
        VerificationError: the bytes have another size or digest.
        UnavailableError: the download made no progress in five attempts.
    """
    check_blob(blob, gateway.address)
    part = target.with_name(f"{target.name}.part")
    standstills = 0
    while (position := part.stat().st_size if part.exists() else 0) < blob.size:
        try:
            _download(gateway, blob, position, part)
        except NobackfillError as error:
            if not transient(error):
                raise
        size_now = part.stat().st_size if part.exists() else 0
        standstills = 0 if size_now > position else standstills + 1
        if standstills == _STANDSTILLS:
            raise UnavailableError(
                f"{gateway.address}: the download stopped at {size_now} of {blob.size} bytes; "
                "pull again later"
            )
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != blob.sha256:
        durable.remove_tree(part)
        raise VerificationError(
            f"blob {blob.id}: the digest differs from the ciphertext that was pushed; the vault "
            "at this address changed it"
        )
    durable.replace(part, target)


def _download(gateway: Gateway, blob: vault_pb2.Blob, position: int, part: Path) -> None:
    for chunk in gateway.get_blob(blob.id, position, seconds=STREAM_SECONDS):
        position += len(chunk)
        if position > blob.size:
            durable.remove_tree(part)
            raise VerificationError(
                f"blob {blob.id}: expected {blob.size} bytes, the vault sends more"
            )
        durable.append(part, chunk, 0o600)
    if position < blob.size:
        durable.remove_tree(part)
        raise VerificationError(
            f"blob {blob.id}: expected {blob.size} bytes, the vault holds only {position}"
        )


def list_blobs(gateway: Gateway) -> list[vault_pb2.Blob]:
    """List every blob of the vault, ordered by id.

    Raises:
        VerificationError: an id, digest or size is malformed, or the list is unordered or endless.
    """
    listing: list[vault_pb2.Blob] = []
    token = ""
    while True:
        page = gateway.list_blobs(token)
        for blob in page.blobs:
            check_blob(blob, gateway.address)
            if listing and blob.id <= listing[-1].id:
                raise VerificationError(
                    f"{gateway.address}: expected blobs in the order of their ids, got "
                    f"{blob.id[:8]}… again; the vault at this address cannot be used"
                )
            listing.append(blob)
        if not page.next_page_token:
            return listing
        if len(listing) >= _MOST_BLOBS or page.next_page_token <= token or not page.blobs:
            raise VerificationError(
                f"{gateway.address}: expected a list of at most {_MOST_BLOBS} blobs, got no end "
                f"after {len(listing)}; the vault at this address cannot be used"
            )
        token = page.next_page_token


def _chunks(source: Path, offset: int) -> Iterator[bytes]:
    with source.open("rb") as file:
        file.seek(offset)
        while chunk := file.read(_CHUNK):
            yield chunk


def check_blob(blob: vault_pb2.Blob, where: str) -> None:
    """Raise VerificationError unless id, digest and size of a blob are well formed."""
    if not (_HEX.fullmatch(blob.id) and _HEX.fullmatch(blob.sha256)):
        raise VerificationError(
            f"{where}: expected ids and digests of 64 hex digits, got {blob.id[:80]!r} and "
            f"{blob.sha256[:80]!r}; the vault at this address cannot be used"
        )
    if not 0 < blob.size <= LARGEST_BLOB:
        raise VerificationError(
            f"{where}: blob {blob.id}: expected a size of 1 to {LARGEST_BLOB} bytes, got "
            f"{blob.size}; the vault at this address cannot be used"
        )


def vault_address(device: GalleryFile, where: str | None = None) -> str:
    """Return the vault's address: `where`, else the stored vault, else the gallery's source.

    Raises:
        ConfigurationError: the address is no gateway.
    """
    address = str(where or device.state("vault") or device.state("source"))
    if not is_gateway(address):
        raise ConfigurationError(
            f"{address} is no gateway and holds no vault: name one with `push --vault "
            "grpc://HOST:PORT`"
        )
    return address


def check_vault(device: GalleryFile, queue: VaultQueue, gateway: Gateway, address: str) -> set[str]:
    """Return the ids of the blobs that a vault holds.

    The stored vault may have lost blobs, for example after a restored backup. A vault at another
    address must hold every pushed blob: otherwise blobs of removed images would stay in the old
    vault for ever.

    Raises:
        ConfigurationError: a new vault lacks pushed blobs.
        UnavailableError: the vault does not answer.
    """
    listed = {blob.id for blob in list_blobs(gateway)}
    stored_address = device.state("vault")
    if stored_address == address:
        return listed
    pushed = queue.entries("stored") or queue.entries("removing")
    lacking = sum(entry.blob not in listed for entry in pushed)
    if lacking:
        raise ConfigurationError(
            f"{address} lacks {lacking} of the {len(pushed)} images that were pushed to "
            f"{stored_address or 'another gateway'}; name that one with --vault, or move its "
            "vault to this one first (gateway data move)"
        )
    return listed


def vault_problem(device: GalleryFile) -> str | None:
    """Describe which pushed images the vault lacks; None if it holds all, or none was pushed.

    Raises:
        UnavailableError: the vault does not answer within 5 seconds.
    """
    stored = VaultQueue(device.store).entries("stored")
    address = device.state("vault")
    if not stored or address is None:
        return None
    with Gateway(address, seconds=5) as gateway:
        listed = {blob.id for blob in list_blobs(gateway)}
    lacking = sum(entry.blob not in listed for entry in stored)
    if not lacking:
        return None
    return (
        f"{address} lacks {lacking} of the {len(stored)} images that were pushed to it; `push` "
        "sends again those whose files are here"
    )
