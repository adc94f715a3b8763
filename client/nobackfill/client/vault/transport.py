"""The vault's transport: its gateway; ciphertext up, down and away, resumed where it broke off.

The vault is the one that the gallery was first pushed to, wherever the gallery follows releases
from later on, until `push --vault` names another that holds the same."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from nobackfill import durable
from nobackfill.client.gallery_file import GalleryFile
from nobackfill.client.sources import is_gateway
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
# The deadline of one stream, so that a gateway that falls silent does not hold it. A transfer that
# breaks off goes on from where it was; one that never moves on is given up.
STREAM_SECONDS = 30.0
_STANDSTILLS = 5
# What a vault may list: nothing it says is used before it is held to this.
_MOST_BLOBS = 1_000_000
_HEX = re.compile(r"[0-9a-f]{64}")


def upload_blob(gateway: Gateway, blob: vault_pb2.Blob, source: Path) -> int:
    """Upload the ciphertext `source`; the number of bytes that were still to be sent."""
    held = first = gateway.received_bytes(blob)
    standstills = 0
    while held < blob.size:
        try:
            answer = gateway.put_blob(blob, _chunks(source, held), held, seconds=STREAM_SECONDS)
        except NobackfillError as error:
            if not transient(error):
                raise
            answer = gateway.received_bytes(blob)
        standstills = 0 if answer > held else standstills + 1
        if standstills == _STANDSTILLS:
            raise UnavailableError(
                f"{gateway.address}: the upload stands still at {held} of {blob.size} bytes; "
                "push again later"
            )
        held = answer
    return int(blob.size - first)


def download_blob(gateway: Gateway, blob: vault_pb2.Blob, target: Path) -> None:
    """Download a blob to `target`, complete and with the right digest, or raise.

    `target`.part holds what an earlier try brought. Raises NotFoundError, VerificationError.
    """
    check_blob(blob, gateway.address)
    part = target.with_name(f"{target.name}.part")
    standstills = 0
    while (held := part.stat().st_size if part.exists() else 0) < blob.size:
        try:
            _download(gateway, blob, held, part)
        except NobackfillError as error:
            if not transient(error):
                raise
        now = part.stat().st_size if part.exists() else 0
        standstills = 0 if now > held else standstills + 1
        if standstills == _STANDSTILLS:
            raise UnavailableError(
                f"{gateway.address}: the download stands still at {now} of {blob.size} bytes; "
                "pull again later"
            )
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != blob.sha256:
        durable.remove_tree(part)
        raise VerificationError(
            f"blob {blob.id}: expected the ciphertext that was pushed, got another; the vault "
            "at this address changed it"
        )
    durable.replace(part, target)


def _download(gateway: Gateway, blob: vault_pb2.Blob, held: int, part: Path) -> None:
    for chunk in gateway.get_blob(blob.id, held, seconds=STREAM_SECONDS):
        held += len(chunk)
        if held > blob.size:
            durable.remove_tree(part)
            raise VerificationError(
                f"blob {blob.id}: expected {blob.size} bytes, the vault sends more"
            )
        durable.append(part, chunk, 0o600)
    if held < blob.size:
        durable.remove_tree(part)
        raise VerificationError(
            f"blob {blob.id}: expected {blob.size} bytes, the vault holds {held} only"
        )


def list_blobs(gateway: Gateway) -> list[vault_pb2.Blob]:
    """Every blob that the vault lists, by id.

    Raises VerificationError for ids, digests or sizes that no blob has, and for a list that
    does not move forward or has no end.
    """
    found: list[vault_pb2.Blob] = []
    token = ""
    while True:
        page = gateway.list_blobs(token)
        for blob in page.blobs:
            check_blob(blob, gateway.address)
            if found and blob.id <= found[-1].id:
                raise VerificationError(
                    f"{gateway.address}: expected blobs in the order of their ids, got "
                    f"{blob.id[:8]}… again; the vault at this address cannot be used"
                )
            found.append(blob)
        if not page.next_page_token:
            return found
        if len(found) >= _MOST_BLOBS or page.next_page_token <= token or not page.blobs:
            raise VerificationError(
                f"{gateway.address}: expected a list of at most {_MOST_BLOBS} blobs that comes to "
                f"an end, got none after {len(found)}; the vault at this address cannot be used"
            )
        token = page.next_page_token


def _chunks(source: Path, offset: int) -> Iterator[bytes]:
    with source.open("rb") as file:
        file.seek(offset)
        while chunk := file.read(_CHUNK):
            yield chunk


def check_blob(blob: vault_pb2.Blob, where: str) -> None:
    """Raises VerificationError unless a blob has an id, a digest and a size that blobs can have."""
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
    """`where`, else the vault that is remembered, else what the gallery follows. Raises
    ConfigurationError for what is no gateway."""
    found = str(where or device.state("vault") or device.state("source"))
    if not is_gateway(found):
        raise ConfigurationError(
            f"{found} holds no vault: name a gateway once, `push --vault grpc://HOST:PORT`"
        )
    return found


def check_vault(device: GalleryFile, queue: VaultQueue, gateway: Gateway, address: str) -> set[str]:
    """Return the ids of the blobs that a vault holds.

    The vault that is remembered may have lost some, as by an older backup. One at another address
    must hold all that was pushed: removed images would stay in the other for ever. Raises
    ConfigurationError, UnavailableError.
    """
    listed = {blob.id for blob in list_blobs(gateway)}
    before = device.state("vault")
    if before == address:
        return listed
    pushed = queue.entries("stored") or queue.entries("removing")
    lacking = sum(entry.blob not in listed for entry in pushed)
    if lacking:
        raise ConfigurationError(
            f"{address} lacks {lacking} of the {len(pushed)} images that were pushed to "
            f"{before or 'another gateway'}; name that one with --vault, or bring its vault to "
            "this one first (gateway data move)"
        )
    return listed


def vault_problem(device: GalleryFile) -> str | None:
    """Tell what is wrong with the vault; None if it holds all that was pushed, or nothing was.

    Raises UnavailableError and others where it does not answer.
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
        "sends those again whose files are here"
    )
