"""Encryption of images on the device in the age format, and the gallery's own key.

An image is encrypted to the device's own key and to any number of further recipients (a recovery
key kept elsewhere), each of whom can decrypt alone. Secret keys stay in files of mode 0600 and are
sent nowhere. age binds no name to a ciphertext: callers keep the digests of what they encrypted.

The public key is kept in the gallery file (`identity`), since the file of the secret key can be
lost, or be another's after a restore: what is pushed with a new key would hide that nothing which
was pushed before can be opened."""

from collections.abc import Sequence
from pathlib import Path

import pyrage
from pyrage.x25519 import Identity, Recipient

from nobackfill import durable
from nobackfill.client.gallery_file import GalleryFile, beside
from nobackfill.client.vault.queue import VaultQueue
from nobackfill.errors import (
    ConfigurationError,
    InvalidInputError,
    NobackfillError,
    VerificationError,
)
from nobackfill.images import read_file

MAGIC = b"age-encryption.org/v1\n"


def new_identity(path: Path) -> Identity:
    """Make a secret key and write it to `path` (mode 0600), unless one is there: then read that."""
    if path.exists():
        return read_identity(path)
    identity = Identity.generate()
    text = f"# public key: {identity.to_public()}\n{identity}\n"
    durable.write_file(path, text.encode("ascii"), 0o600)
    return identity


def read_identity(path: Path) -> Identity:
    """The secret key in `path`, in the form that `age-keygen` writes.

    Raises ConfigurationError where there is none, or where others may read the file.
    """
    try:
        mode = path.stat().st_mode
        lines = read_file(path).decode("ascii").splitlines()
    except (OSError, InvalidInputError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the age identity {path}: {error}") from error
    if mode & 0o077:
        raise ConfigurationError(f"{path} can be read by others: chmod 600 {path}")
    for line in lines:
        if line.startswith("AGE-SECRET-KEY-"):
            try:
                return Identity.from_str(line.strip())
            except pyrage.IdentityError:
                # The library's message would quote the line.
                break
    raise ConfigurationError(f"{path}: expected a line AGE-SECRET-KEY-1...; is it an age identity?")


def read_recipient(text: str) -> Recipient:
    """A recipient from its public key, age1... Raises ConfigurationError."""
    try:
        return Recipient.from_str(text.strip())
    except pyrage.RecipientError as error:
        raise ConfigurationError(f"expected a public key age1..., got {text!r}: {error}") from error


def encrypt(plain: bytes, recipients: Sequence[Recipient]) -> bytes:
    """age ciphertext of `plain` that any one of `recipients` opens. Never the same bytes twice."""
    return bytes(pyrage.encrypt(plain, list(recipients)))


def decrypt(source: Path, identities: Sequence[Identity]) -> bytes:
    """The plaintext of the age file `source`, in memory only.

    age authenticates chunk by chunk and the library hands out the good ones before it meets a bad
    end, so nothing is written before all of it is verified. Raises VerificationError.
    """
    try:
        return bytes(pyrage.decrypt(source.read_bytes(), list(identities)))
    except pyrage.DecryptError as error:
        raise VerificationError(
            f"damaged, truncated, or encrypted to another key ({error}); pull it again, or name "
            "the right key with --identity"
        ) from error


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
    identity = read_identity(path)
    if expected not in (None, str(identity.to_public())):
        raise ConfigurationError(
            f"{path} holds the key {identity.to_public()}, expected{_named(expected)}: copy the "
            "right file back, or go on with this one by `push --new-key`, which pushes again every "
            "image whose file is still there"
        )
    return identity


def key_problem(device: GalleryFile) -> str | None:
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
    identity = new_identity(path) if first or new_key else own_identity(device)
    public = str(identity.to_public())
    if device.state("identity") is None and not new_key:
        # Rows of an older version do not say which key opens them: it was this one.
        queue.adopt(public)
    device.store.state_set({"identity": public})
    return identity


def _named(public: str | None) -> str:
    return "" if public is None else f" {public}"
