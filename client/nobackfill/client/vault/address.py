"""Which gateway holds this gallery's vault: the one that it was first pushed to, wherever the
gallery follows releases from later on, until `push --vault` names another that holds the same."""

from nobackfill.client.device import Device
from nobackfill.client.sync.sources import is_gateway
from nobackfill.client.vault.queue import VaultQueue
from nobackfill.client.vault.transport import blobs
from nobackfill.errors import ConfigurationError
from nobackfill.wire.gateway import Gateway


def address_of(device: Device, where: str | None = None) -> str:
    """`where`, else the vault that is remembered, else what the gallery follows. Raises
    ConfigurationError for what is no gateway."""
    found = str(where or device.state("vault") or device.state("source"))
    if not is_gateway(found):
        raise ConfigurationError(
            f"{found} holds no vault: name a gateway once, `push --vault grpc://HOST:PORT`"
        )
    return found


def check_vault(device: Device, queue: VaultQueue, gateway: Gateway, address: str) -> None:
    """See that a vault that is not the one remembered answers, and holds what was pushed.

    Elsewhere images would pass for pushed that are not there, and removed ones would stay for ever.
    Raises ConfigurationError, UnavailableError.
    """
    before = device.state("vault")
    if before == address:
        return
    listed = {blob.id for blob in blobs(gateway)}
    pushed = queue.entries("stored") or queue.entries("removing")
    lacking = sum(entry.blob not in listed for entry in pushed)
    if lacking:
        raise ConfigurationError(
            f"{address} lacks {lacking} of the {len(pushed)} images that were pushed to "
            f"{before or 'another gateway'}; name that one with --vault, or bring its vault to "
            "this one first (gateway backup, gateway restore)"
        )
