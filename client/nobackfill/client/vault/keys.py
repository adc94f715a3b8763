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
from nobackfill.client.gallery_file import GalleryFile, sidecar_path
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
    """Read a secret key; generate and write it first, with mode 0600, if the file does not exist.

    A link without a target is replaced. Two callers at once may both write a key, and the later one
    stays.

    Args:
        path: the file of the key; its folder must exist.

    Raises:
        ConfigurationError: the existing file cannot be read, holds no key, or may be read by other
            users. It is never replaced.
        CannotWriteError: the file cannot be written.
    """
    if path.exists():
        return read_identity(path)
    identity = Identity.generate()
    text = f"# public key: {identity.to_public()}\n{identity}\n"
    durable.write_file(path, text.encode("ascii"), 0o600)
    return identity


def read_identity(path: Path) -> Identity:
    """Read a secret key in the form that `age-keygen` writes; the first key of the file counts.

    Raises:
        ConfigurationError: the file is missing, unreadable or no ASCII text, holds no key, or other
            users may read it. The error does not quote the key.
    """
    try:
        mode = path.stat().st_mode
        lines = read_file(path).decode("ascii").splitlines()
    except (OSError, InvalidInputError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path}: this file of a secret key (an age identity) cannot be read: {error}; check "
            "its name and permissions"
        ) from error
    if mode & 0o077:
        raise ConfigurationError(
            f"{path}: expected a secret key that only its owner can read; run chmod 600 {path}"
        )
    for line in lines:
        if line.startswith("AGE-SECRET-KEY-"):
            try:
                return Identity.from_str(line.strip())
            except pyrage.IdentityError:
                # The library's message would quote the secret line.
                break
    raise ConfigurationError(
        f"{path}: expected a line with a valid secret key, AGE-SECRET-KEY-1..., found none; give a "
        "file that age-keygen or edge-client wrote"
    )


def read_recipient(text: str) -> Recipient:
    """Parse a public key, age1...; blanks around it are ignored.

    Raises:
        ConfigurationError: the text is no such key; the error quotes it.
    """
    try:
        return Recipient.from_str(text.strip())
    except pyrage.RecipientError as error:
        raise ConfigurationError(
            f"--recipient: expected a public key age1..., got {text!r} ({error}); `age-keygen -y "
            "FILE` prints the public key of a secret key in FILE"
        ) from error


def encrypt(plain: bytes, recipients: Sequence[Recipient]) -> bytes:
    """Encrypt bytes in the age format, so that each recipient alone can decrypt them.

    Args:
        plain: the plaintext; it may be empty.
        recipients: one or more public keys.

    Returns:
        The ciphertext; its bytes differ at every call.

    Raises:
        pyrage.EncryptError: `recipients` is empty.
    """
    return bytes(pyrage.encrypt(plain, list(recipients)))


def decrypt(source: Path, identities: Sequence[Identity]) -> bytes:
    """Decrypt an age file in memory, once the whole file is verified.

    Args:
        source: the file.
        identities: secret keys; one of them must open it.

    Returns:
        The plaintext.

    Raises:
        VerificationError: the file is no age file, damaged, truncated, or encrypted to other keys;
            also without any identity.
        OSError: the file is missing or cannot be read.
    """
    try:
        return bytes(pyrage.decrypt(source.read_bytes(), list(identities)))
    except pyrage.DecryptError as error:
        raise VerificationError(
            f"the ciphertext is damaged, truncated, or encrypted to another key ({error}); run "
            "`edge-client pull` again, or name the right key with --identity"
        ) from error


def own_identity(device: GalleryFile) -> Identity:
    """Return the secret key that decrypts what this gallery pushed, from its identity file.

    Raises:
        ConfigurationError: the key file is missing or unreadable, or holds another key than the
            gallery's state names. Before the first push, any key is accepted.
        DamagedError: the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: the file cannot be opened, or the disk fails.
        NotFoundError: the gallery was closed.
    """
    path = sidecar_path(device.path, "identity")
    public = device.state("identity")
    if not path.exists():
        raise ConfigurationError(
            f"{path}: the file with the gallery's secret key{_key_text(public)} is missing; only "
            "this key opens the images that the gallery pushed. Copy it back, name a recovery key "
            "with `pull --identity FILE`, or start again with `push --new-key`, which pushes every "
            "image again whose file still exists"
        )
    identity = read_identity(path)
    if public not in (None, str(identity.to_public())):
        raise ConfigurationError(
            f"{path}: expected the gallery's secret key{_key_text(public)}, found the one of "
            f"{identity.to_public()}. Copy the right file back, or continue with this key by `push "
            "--new-key`, which pushes every image again whose file still exists"
        )
    return identity


def explain_key_problem(device: GalleryFile) -> str | None:
    """Explain why the gallery's own key does not decrypt what it pushed.

    Returns:
        A sentence with advice. None if the key fits, or if nothing was pushed. An error of the
        gallery file that comes only later is returned as a sentence, too.

    Raises:
        DamagedError: the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: the file cannot be opened, or the disk fails.
        NotFoundError: the gallery was closed.
    """
    if device.state("identity") is None and not VaultQueue(device.store).entries():
        return None
    try:
        own_identity(device)
    except NobackfillError as error:
        return str(error)
    return None


def identity_for_push(device: GalleryFile, queue: VaultQueue, new_key: bool) -> Identity:
    """Return the secret key to encrypt with, and store its public key in the gallery.

    The first push takes the key in the identity file, and generates it if there is none. A
    generated file stays after an error. The gallery's file is written also if the key is the same.
    Rows of versions without a key column get this key, unless `new_key` is set.

    Args:
        device: the gallery.
        queue: its table of images in the vault.
        new_key: use the key in the identity file, whichever it is; generate it if there is none.

    Returns:
        The secret key.

    Raises:
        ConfigurationError: images were pushed, and the key that opens them is missing; or the
            identity file holds no key, or other users may read it.
        DamagedError: the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: the disk is full or read-only.
        NotFoundError: the gallery was closed.
    """
    path = sidecar_path(device.path, "identity")
    first = device.state("identity") is None and not queue.entries()
    identity = new_identity(path) if first or new_key else own_identity(device)
    public = str(identity.to_public())
    if device.state("identity") is None and not new_key:
        # Rows of an older version have no key column: this key sealed them.
        queue.set_missing_keys(public)
    device.store.update_state({"identity": public})
    return identity


def _key_text(public: str | None) -> str:
    return "" if public is None else f" of the public key {public}"
