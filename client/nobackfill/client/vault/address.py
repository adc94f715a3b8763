"""Which gateway holds this gallery's vault: the one that it was first pushed to, wherever the
gallery follows releases from later on, until `push --vault` names another that holds the same."""

from nobackfill.client.gallery_file import GalleryFile
from nobackfill.client.sync.sources import is_gateway
from nobackfill.client.vault.queue import VaultQueue
from nobackfill.client.vault.transport import blobs
from nobackfill.errors import ConfigurationError
from nobackfill.wire.gateway import Gateway


def address_of(device: GalleryFile, where: str | None = None) -> str:
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
    listed = {blob.id for blob in blobs(gateway)}
    before = device.state("vault")
    if before == address:
        return listed
    pushed = queue.entries("stored") or queue.entries("removing")
    lacking = sum(entry.blob not in listed for entry in pushed)
    if lacking:
        raise ConfigurationError(
            f"{address} lacks {lacking} of the {len(pushed)} images that were pushed to "
            f"{before or 'another gateway'}; name that one with --vault, or bring its vault to "
            "this one first (gateway move)"
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
        listed = {blob.id for blob in blobs(gateway)}
    lacking = sum(entry.blob not in listed for entry in stored)
    if not lacking:
        return None
    return (
        f"{address} lacks {lacking} of the {len(stored)} images that were pushed to it; `push` "
        "sends those again whose files are here"
    )
