"""The gallery's age key: which one opens its images, and what is said when that is not there.

The public key is kept in the gallery file (`identity`), since the file of the secret key can be
lost, or be another's after a restore: what is pushed with a new key would hide that nothing which
was pushed before can be opened.
"""

from pyrage.x25519 import Identity

from nobackfill.client.gallery_file import GalleryFile, beside
from nobackfill.client.vault import encryption
from nobackfill.client.vault.queue import VaultQueue
from nobackfill.errors import ConfigurationError, NobackfillError


def own_identity(device: GalleryFile) -> Identity:
    """The secret key that opens what this gallery pushed.

    Raises ConfigurationError if its file is missing, unreadable, or holds another key.
    """
    path = beside(device.path, "identity")
    expected = device.state("identity")
    if not path.exists():
        raise ConfigurationError(
            f"{path} is missing{_named(expected)}, and only it opens what this gallery pushed: "
            "copy it back, name a recovery key with `pull --identity FILE`, or begin anew with "
            "`push --new-key`, which pushes again every image whose file is still there"
        )
    identity = encryption.read_identity(path)
    if expected not in (None, str(identity.to_public())):
        raise ConfigurationError(
            f"{path} holds the key {identity.to_public()}, expected{_named(expected)}: copy the "
            "right file back, or go on with this one by `push --new-key`, which pushes again every "
            "image whose file is still there"
        )
    return identity


def problem(device: GalleryFile) -> str | None:
    """Why what was pushed cannot be opened here, in a sentence; None where it can, or was never."""
    if device.state("identity") is None and not VaultQueue(device.store).entries():
        return None
    try:
        own_identity(device)
    except NobackfillError as error:
        return str(error)
    return None


def identity_for_push(device: GalleryFile, queue: VaultQueue, new_key: bool) -> Identity:
    """The key to seal with: made by the first push, a new one only with `new_key`.

    Raises ConfigurationError where what was pushed needs a key that is not there.
    """
    path = beside(device.path, "identity")
    first = device.state("identity") is None and not queue.entries()
    identity = encryption.new_identity(path) if first or new_key else own_identity(device)
    public = str(identity.to_public())
    if device.state("identity") is None and not new_key:
        # Rows of an older version do not say which key opens them: it was this one.
        queue.adopt(public)
    device.store.state_set({"identity": public})
    return identity


def _named(public: str | None) -> str:
    return "" if public is None else f" {public}"
