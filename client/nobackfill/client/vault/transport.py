"""Transfer ciphertext to and from the vault; interrupted transfers resume.

The vault's address is stored at the first push. It stays when the gallery follows another source,
until `push --vault` names another gateway that holds the same images.
"""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from nobackfill import durable
from nobackfill.client.gallery_file import GalleryFile, is_gateway_address
from nobackfill.client.vault.queue import VaultQueue
from nobackfill.errors import (
    ConfigurationError,
    NobackfillError,
    OutOfRangeError,
    UnavailableError,
    VerificationError,
)
from nobackfill.v1 import vault_pb2
from nobackfill.wire.gateway import Gateway
from nobackfill.wire.limits import LARGEST_BLOB
from nobackfill.wire.statuses import is_transient

_CHUNK = 256 * 1024
# Deadline of one stream, so that a silent gateway cannot block a transfer. A broken transfer
# resumes at its offset; after this many attempts without progress it fails.
STREAM_SECONDS = 30.0
_STANDSTILLS = 5
# The vault is untrusted: its list of blobs is checked against these limits.
_MOST_BLOBS = 1_000_000
_HEX = re.compile(r"[0-9a-f]{64}")


def upload_blob(gateway: Gateway, blob: vault_pb2.Blob, source: Path) -> int:
    """Upload a file of ciphertext to the vault; continue after the bytes that it holds already.

    Each attempt lasts at most 30 seconds. After an error, the vault holds the bytes that it
    received.

    Args:
        gateway: the vault's gateway.
        blob: id, size and digest of the ciphertext.
        source: the file.

    Returns:
        The bytes that had to be sent; 0 if the vault held all.

    Raises:
        UnavailableError: the upload made no progress in five attempts, also because the gateway's
            disk is full or another upload of the blob runs; or the gateway does not answer.
        NotPermittedError: the gateway refuses the token.
        QuotaExceededError: the vault holds as many bytes as it may.
        AlreadyExistsError: the vault holds another blob under this id.
        InvalidInputError: the file is no age ciphertext, or differs from `blob`.
        OutOfRangeError: another upload of the blob has changed the number of bytes that it holds.
        NobackfillError: the file cannot be read; gRPC hides the OSError.
        TooLargeError: the ciphertext is larger than the vault accepts.
        CannotWriteError, BusyError: the gateway cannot tell how many bytes it holds.
    """
    position = first = gateway.received_bytes(blob)
    standstills = 0
    while position < blob.size:
        try:
            received = gateway.put_blob(
                blob, _chunks(source, position), position, seconds=STREAM_SECONDS
            )
        except NobackfillError as error:
            if not is_transient(error):
                raise
            received = gateway.received_bytes(blob)
        standstills = 0 if received > position else standstills + 1
        if standstills == _STANDSTILLS:
            raise UnavailableError(
                f"{gateway.address}: the upload stopped at {position} of {blob.size} bytes; "
                "push again later"
            )
        position = received
    return int(blob.size - first)


def download_blob(gateway: Gateway, blob: vault_pb2.Blob, target: Path) -> None:
    """Download a blob of ciphertext; the file appears only when it is complete and verified.

    TARGET.part holds the bytes of an interrupted download, and the next call continues it. Each
    attempt lasts at most 30 seconds. A file that differs from the digest is deleted with its bytes,
    so the next call begins anew. No lock is taken: two calls at once for one target disturb each
    other.

    Args:
        gateway: the vault's gateway.
        blob: id, size and digest of the ciphertext.
        target: the file to write, with mode 0600; an existing one is replaced. Its folder must
            exist.

    Raises:
        NotFoundError: the vault does not hold the blob.
        VerificationError: `blob` is malformed, or the bytes have another size or digest; also if
            the vault holds fewer bytes than TARGET.part, which is then deleted.
        NotPermittedError: the gateway refuses the token.
        UnavailableError: the download made no progress in five attempts, also because the local
            disk is full during it.
        CannotWriteError: the complete file cannot be renamed or synced.
        OSError: TARGET.part cannot be read.
    """
    check_blob(blob, gateway.address)
    part = target.with_name(f"{target.name}.part")
    standstills = 0
    while (position := part.stat().st_size if part.exists() else 0) < blob.size:
        try:
            _download(gateway, blob, position, part)
        except OutOfRangeError as error:
            durable.remove_tree(part)
            raise VerificationError(
                f"blob {blob.id}: expected {blob.size} bytes, the vault holds fewer than the "
                f"{position} bytes that an earlier pull received; the received part was deleted, "
                "so run `edge-client pull` again"
            ) from error
        except NobackfillError as error:
            if not is_transient(error):
                raise
        size = part.stat().st_size if part.exists() else 0
        standstills = 0 if size > position else standstills + 1
        if standstills == _STANDSTILLS:
            raise UnavailableError(
                f"{gateway.address}: the download stopped at {size} of {blob.size} bytes; "
                "pull again later"
            )
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != blob.sha256:
        durable.remove_tree(part)
        raise VerificationError(
            f"blob {blob.id}: the vault at {gateway.address} returned another ciphertext than the "
            "one that was pushed; tell the gateway's operator, who can restore a backup"
        )
    durable.replace_file(part, target)


def _download(gateway: Gateway, blob: vault_pb2.Blob, position: int, part: Path) -> None:
    for chunk in gateway.get_blob(blob.id, position, seconds=STREAM_SECONDS):
        position += len(chunk)
        if position > blob.size:
            durable.remove_tree(part)
            raise VerificationError(
                f"blob {blob.id}: expected {blob.size} bytes, the vault sends more; tell the "
                "gateway's operator, who can restore a backup"
            )
        durable.append_bytes(part, chunk, 0o600)
    if position < blob.size:
        durable.remove_tree(part)
        raise VerificationError(
            f"blob {blob.id}: expected {blob.size} bytes, the vault holds only {position}; tell "
            "the gateway's operator, who can restore a backup"
        )


def list_blobs(gateway: Gateway) -> list[vault_pb2.Blob]:
    """List every blob of the vault, ordered by id; the vault is not trusted.

    Reads all pages, each with the connection's time limit; nothing of them is stored.

    Returns:
        The blobs; at most about a million. Empty if the vault is.

    Raises:
        VerificationError: an id, digest or size is malformed, or the list is unordered or endless.
        NotPermittedError: the gateway refuses the token.
        UnavailableError: the vault does not answer.
        BusyError: the gateway has too much work.
        InvalidInputError: the vault refuses the token of its own page.
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
                    f"{blob.id[:8]}… after a greater or equal id; the vault at this address "
                    "cannot be used, tell its operator"
                )
            listing.append(blob)
        if not page.next_page_token:
            return listing
        if len(listing) >= _MOST_BLOBS or page.next_page_token <= token or not page.blobs:
            raise VerificationError(
                f"{gateway.address}: expected a list of at most {_MOST_BLOBS} blobs, got a list "
                f"that goes on after {len(listing)}; the vault at this address cannot be used, "
                "tell its operator"
            )
        token = page.next_page_token


def _chunks(source: Path, offset: int) -> Iterator[bytes]:
    with source.open("rb") as file:
        file.seek(offset)
        while chunk := file.read(_CHUNK):
            yield chunk


def check_blob(blob: vault_pb2.Blob, error_name: str) -> None:
    """Check that a blob's id and digest are 64 hex digits, and its size is possible.

    Nothing is fetched.

    Args:
        blob: a blob as an untrusted vault describes it.
        error_name: the vault's address, for the error.

    Raises:
        VerificationError: one of them is malformed: another id or digest than 64 lower-case
            hex digits, or a size outside 1 to LARGEST_BLOB.
    """
    if not (_HEX.fullmatch(blob.id) and _HEX.fullmatch(blob.sha256)):
        raise VerificationError(
            f"{error_name}: expected ids and digests of 64 hex digits, got {blob.id[:80]!r} and "
            f"{blob.sha256[:80]!r}; the vault at this address cannot be used, tell its operator"
        )
    if not 0 < blob.size <= LARGEST_BLOB:
        raise VerificationError(
            f"{error_name}: blob {blob.id}: expected a size of 1 to {LARGEST_BLOB} bytes, got "
            f"{blob.size}; the vault at this address cannot be used, tell its operator"
        )


def vault_address(device: GalleryFile, where: str | None = None) -> str:
    """Return the address of a gallery's vault.

    Nothing is connected, and the address is not stored.

    Args:
        device: the gallery.
        where: the address to use; None or empty: that of the last push, else the gallery's source.

    Raises:
        ConfigurationError: the address does not begin with grpc:// or grpcs://, or there is none.
        DamagedError: the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: the file cannot be opened, or the disk fails.
        NotFoundError: the gallery was closed.
    """
    address = str(where or device.state("vault") or device.state("source"))
    if not is_gateway_address(address):
        raise ConfigurationError(
            f"{address} is no gateway, so it holds no vault; name a gateway with `push --vault "
            "grpc://HOST:PORT`"
        )
    return address


def check_vault(device: GalleryFile, queue: VaultQueue, gateway: Gateway, address: str) -> set[str]:
    """List the blobs of a vault, and check that the gallery may push to it.

    The stored vault may have lost blobs, for example after a restored backup. A vault at another
    address must hold every pushed blob: otherwise blobs of removed images would stay in the old
    vault for ever. Nothing is written. If the gallery has stored blobs, only those are looked for
    in a new vault; else those that are to be removed.

    Args:
        device: the gallery.
        queue: its table of images in the vault.
        gateway: the vault's gateway.
        address: the address of that gateway.

    Returns:
        The ids of the vault's blobs, also of those that other galleries pushed.

    Raises:
        ConfigurationError: a new vault lacks pushed blobs.
        VerificationError: the vault's list is malformed, or the gallery file is damaged.
        NotPermittedError: the gateway refuses the token.
        UnavailableError: the vault does not answer.
        BusyError: another process holds the gallery file for 5 seconds, or the gateway has too much
            work.
        CannotWriteError: the file cannot be opened, or the disk fails.
        NotFoundError: the gallery was closed.
    """
    listed = {blob.id for blob in list_blobs(gateway)}
    stored_address = device.state("vault")
    if stored_address == address:
        return listed
    pushed = queue.entries("stored") or queue.entries("removing")
    lacking = sum(entry.blob_id not in listed for entry in pushed)
    if lacking:
        raise ConfigurationError(
            f"{address}: the vault there lacks {lacking} of the {len(pushed)} images that this "
            f"gallery pushed to {stored_address or 'another gateway'}; name the earlier gateway "
            "with --vault, or move its vault to the new gateway first (`gateway data move`)"
        )
    return listed


def explain_vault_problem(device: GalleryFile) -> str | None:
    """Describe how many pushed images the vault lacks.

    Args:
        device: the gallery.

    Returns:
        A sentence with advice. None if the vault holds all, or none was pushed.

    Raises:
        VerificationError: the vault's list is malformed, or the gallery file is damaged.
        ConfigurationError: the gateway's address, token or certificate is not valid.
        NotPermittedError: the gateway refuses the token.
        UnavailableError: the vault does not answer within 5 seconds.
        BusyError: another process holds the gallery file for 5 seconds, or the gateway has too much
            work.
        CannotWriteError: the file cannot be opened, or the disk fails.
        NotFoundError: the gallery was closed.
    """
    pushed = VaultQueue(device.store).entries("stored")
    address = device.state("vault")
    if not pushed or address is None:
        return None
    with Gateway(address, seconds=5) as gateway:
        listed = {blob.id for blob in list_blobs(gateway)}
    lacking = sum(entry.blob_id not in listed for entry in pushed)
    if not lacking:
        return None
    return (
        f"{address} lacks {lacking} of the {len(pushed)} images that were pushed to it; `push` "
        "sends again those whose files are here"
    )
