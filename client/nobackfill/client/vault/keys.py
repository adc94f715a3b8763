"""Encrypt images on the device in the age format, and manage the gallery's own key.

An image is encrypted to the device's own key and to any number of further recipients, for example a
recovery key. Each recipient can decrypt alone. Secret keys stay in files of mode 0600 and are sent
nowhere. age binds no name to a ciphertext, so callers store the digests of what they encrypted.

The public key is stored in the gallery file, under `identity`. It detects a lost or replaced key
file: pushing with a new key would hide that older ciphertext can no longer be opened.
"""

from collections.abc import Sequence
from pathlib import Path

import pyrage
from pyrage.x25519 import Identity, Recipient

from nobackfill import durable
from nobackfill.client.gallery_file import GalleryFile, sidecar
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
    """Read the secret key in `path`; generate and write it first (mode 0600) if there is none."""
    if path.exists():
        return read_identity(path)
    identity = Identity.generate()
    text = f"# public key: {identity.to_public()}\n{identity}\n"
    durable.write_file(path, text.encode("ascii"), 0o600)
    return identity


def read_identity(path: Path) -> Identity:
    """Read a secret key in the form that `age-keygen` writes.

    Raises:
        ConfigurationError: there is no key in `path`, or other users may read the file.
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
                # The library's message would quote the secret line.
                break
    raise ConfigurationError(f"{path}: expected a line AGE-SECRET-KEY-1...; is it an age identity?")


def read_recipient(text: str) -> Recipient:
    """Parse a public key, age1... Raises ConfigurationError."""
    try:
        return Recipient.from_str(text.strip())
    except pyrage.RecipientError as error:
        raise ConfigurationError(f"expected a public key age1..., got {text!r}: {error}") from error


def encrypt(plain: bytes, recipients: Sequence[Recipient]) -> bytes:
    """Encrypt to age ciphertext that each recipient can open; the bytes differ at every call."""
    return bytes(pyrage.encrypt(plain, list(recipients)))


def decrypt(source: Path, identities: Sequence[Identity]) -> bytes:
    """Decrypt the age file `source` in memory.

    The library hands out verified chunks before it meets a damaged one. Therefore this returns
    nothing before the whole file is verified.

    Raises:
        VerificationError: the file is damaged, truncated, or encrypted to other keys.
    """
    try:
        return bytes(pyrage.decrypt(source.read_bytes(), list(identities)))
    except pyrage.DecryptError as error:
        raise VerificationError(
            f"damaged, truncated, or encrypted to another key ({error}); pull it again, or name "
            "the right key with --identity"
        ) from error


def own_identity(device: GalleryFile) -> Identity:
    """Return the secret key that opens what this gallery pushed.

    Raises:
        ConfigurationError: the key file is missing or unreadable, or holds another key.
    """
    path = sidecar(device.path, "identity")
    expected = device.state("identity")
    if not path.exists():
        raise ConfigurationError(
            f"{path} is missing{_key_text(expected)}; only this key opens what the gallery pushed. "
            "Copy it back, name a recovery key with `pull --identity FILE`, or start again with "
            "`push --new-key`, which pushes every image again whose file still exists"
        )
    identity = read_identity(path)
    if expected not in (None, str(identity.to_public())):
        raise ConfigurationError(
            f"{path} holds the key {identity.to_public()}, expected{_key_text(expected)}: copy the "
            "right file back, or continue with this key by `push --new-key`, which pushes every "
            "image again whose file still exists"
        )
    return identity


def key_problem(device: GalleryFile) -> str | None:
    """Explain why pushed images cannot be opened here; None if they can, or none was pushed."""
    if device.state("identity") is None and not VaultQueue(device.store).entries():
        return None
    try:
        own_identity(device)
    except NobackfillError as error:
        return str(error)
    return None


def identity_for_push(device: GalleryFile, queue: VaultQueue, new_key: bool) -> Identity:
    """Return the key to encrypt with; the first push generates it, later only `new_key` does.

    Raises:
        ConfigurationError: images were pushed, and the key that opens them is missing.
    """
    path = sidecar(device.path, "identity")
    first = device.state("identity") is None and not queue.entries()
    identity = new_identity(path) if first or new_key else own_identity(device)
    public = str(identity.to_public())
    if device.state("identity") is None and not new_key:
        # Rows of an older version have no key column: this key sealed them.
        queue.adopt(public)
    device.store.state_set({"identity": public})
    return identity


def _key_text(public: str | None) -> str:
    return "" if public is None else f" {public}"
