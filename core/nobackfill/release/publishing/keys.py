"""Signing keys: ed25519, one PEM file a role, in `<publication folder>.keys/` or where their owner
keeps them.

The root and targets keys may stay offline: their files are then given where they are needed. The
snapshot and timestamp keys are online, as they sign every month. With nothing prepared, the first
publish makes all four beside the publication folder: development keys, and it says so.
"""

import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Root

from nobackfill import durable
from nobackfill.errors import ConfigurationError

Role = Literal["root", "targets", "snapshot", "timestamp"]
ROLES: tuple[Role, ...] = ("root", "targets", "snapshot", "timestamp")


@dataclass(frozen=True)
class Keys:
    """Where signing keys are: a folder of ROLE.pem files, and files named one by one.

    While a key is being rotated its successor lies beside it as ROLE.next.pem; which of the two
    signs is in the root metadata.
    """

    folder: Path
    files: Mapping[Role, Path] = field(default_factory=dict)

    @classmethod
    def beside(cls, repo: Path, files: Mapping[Role, Path] | None = None) -> "Keys":
        """The keys of a publication folder by default, `<repo>.keys/`, but for `files`."""
        repo = repo.absolute()
        return cls(repo.parent / f"{repo.name}.keys", files or {})

    def path(self, role: Role) -> Path:
        """The key file of a role, whether it exists or not."""
        return self.files.get(role, self.folder / f"{role}.pem")

    def next_path(self, role: Role) -> Path:
        """Where a role's new key lies while it is being rotated."""
        path = self.path(role)
        return path.with_name(f"{path.name.removesuffix('.pem')}.next.pem")

    def create(self) -> dict[Role, CryptoSigner]:
        """Make the four keys. Those that an interrupted run has made already are kept.

        Raises CannotWriteError, ConfigurationError for a file that is no key.
        """
        return {role: _load_or_make(self.path(role)) for role in ROLES}

    def complete(self) -> bool:
        """Whether all four key files are there."""
        return all(self.path(role).exists() for role in ROLES)

    def create_next(self, role: Role) -> CryptoSigner:
        """Make a role's new key, or go on with the one of an interrupted rotation."""
        return _load_or_make(self.next_path(role))

    def find(self, role: Role, root: Root) -> CryptoSigner | None:
        """The private key that `root` accepts for the role, if it is at hand.

        Raises ConfigurationError for a file that is no key, or that others may read.
        """
        trusted = root.get_delegated_role(role).keyids
        for path in (self.path(role), self.next_path(role)):
            signer = _load(path) if path.exists() else None
            if signer is not None and signer.public_key.keyid in trusted:
                return signer
        return None

    def signer(self, role: Role, root: Root) -> CryptoSigner:
        """Like `find`. Raises ConfigurationError if the key is not at hand."""
        signer = self.find(role, root)
        if signer is None:
            raise ConfigurationError(
                f"the {role} key that this publication trusts is not in {self.path(role)}; "
                f"give its file with --{role}-key"
            )
        return signer

    def settle(self, role: Role, root: Root) -> None:
        """Let a rotated key take its predecessor's place, once `root` accepts no other."""
        following = self.next_path(role)
        trusted = root.get_delegated_role(role).keyids
        if following.exists() and trusted == [_load(following).public_key.keyid]:
            durable.replace(following, self.path(role))


def _load_or_make(path: Path) -> CryptoSigner:
    durable.sweep(path.parent, path.name)
    if not path.exists():
        if not path.parent.is_dir():
            durable.make_dir(path.parent, mode=0o700)
        durable.write_file(path, CryptoSigner.generate_ed25519().private_bytes, mode=0o600)
    return _load(path)


def _load(path: Path) -> CryptoSigner:
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ConfigurationError(f"{path}: others may read this key; run chmod 600 on it")
        key = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigurationError(
            f"{path}: expected an ed25519 private key in PEM ({error})"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigurationError(f"{path}: expected an ed25519 key, got another kind")
    return CryptoSigner(key)
