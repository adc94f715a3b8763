"""Manage the keys and the signed metadata of a publication folder, for its publisher."""

import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, TypeVar

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from securesystemslib.signer import CryptoSigner, Key, Signer
from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import Metadata, MetaFile, Root, Snapshot, TargetFile, Targets, Timestamp

from nobackfill import durable
from nobackfill.errors import ConfigurationError, NotFoundError, VerificationError
from nobackfill.release.trust.trust import verify_metadata

# Signing keys: ed25519, one PEM file for each role, in `<publication folder>.keys/` or where their
# owner stores them.
# The root and targets keys may stay offline: name their files when they are needed. The snapshot
# and timestamp keys are online, since they sign every month. Without any preparation, the first
# publish makes all four in `<publication folder>.keys/` and says so; they are development keys.

Role = Literal["root", "targets", "snapshot", "timestamp"]
ROLES: tuple[Role, ...] = ("root", "targets", "snapshot", "timestamp")


@dataclass(frozen=True)
class SigningKeys:
    """The files of the signing keys.

    During a rotation, the new key lies next to the old one as ROLE.next.pem; the root metadata
    decides which of the two signs.

    Attributes:
        folder: Holds ROLE.pem for each role.
        files_by_role: Files of single roles that lie elsewhere.
    """

    folder: Path
    files_by_role: Mapping[Role, Path] = field(default_factory=dict)

    @classmethod
    def of_publication(cls, repo: Path, files: Mapping[Role, Path] | None = None) -> "SigningKeys":
        """Return the keys of a publication folder: `<repo>.keys/`, except for `files`.

        Nothing is read or made.

        Args:
            repo: The publication folder.
            files: Files of single roles that lie elsewhere; None: all lie in `<repo>.keys/`.
        """
        repo = repo.absolute()
        return cls(repo.parent / f"{repo.name}.keys", files or {})

    def key_path(self, role: Role) -> Path:
        """Return the key file of a role, whether it exists or not."""
        return self.files_by_role.get(role, self.folder / f"{role}.pem")

    def next_key_path(self, role: Role) -> Path:
        """Return the file of a role's new key during a rotation, whether it exists or not."""
        path = self.key_path(role)
        return path.with_name(f"{path.name.removesuffix('.pem')}.next.pem")

    def create(self) -> dict[Role, CryptoSigner]:
        """Make the four keys, except those that exist, with mode 0600; return all four.

        Missing folders are made with mode 0700. Call it under the publication's lock.

        Raises:
            CannotWriteError: A file cannot be written; keys of other roles may exist then.
            ConfigurationError: An existing file is no key, or others may read it.
        """
        return {role: _load_or_make(self.key_path(role)) for role in ROLES}

    def is_complete(self) -> bool:
        """Tell whether all four key files exist. Their content is not checked.

        Raises:
            ConfigurationError: This user may not look into the folder of a key.
        """
        return all(_exists(self.key_path(role)) for role in ROLES)

    def create_next(self, role: Role) -> CryptoSigner:
        """Make the new key of a role, or return the one of an interrupted rotation.

        The role's present key stays in its file. The file has mode 0600; missing folders are made.
        Call it under the publication's lock.

        Raises:
            CannotWriteError: The file cannot be written.
            ConfigurationError: The existing file is no key, or others may read it.
        """
        return _load_or_make(self.next_key_path(role))

    def find_key(self, role: Role, root: Root) -> CryptoSigner | None:
        """Find the private key of a role that root metadata accepts.

        The role's own file counts first, then that of a rotation.

        Args:
            role: The role.
            root: The root metadata, which must have the role.

        Returns:
            The key, ready to sign; None if no file has it. Files that are missing are passed over.

        Raises:
            ConfigurationError: A file that was read is no ed25519 key in PEM without a password,
                or others may read it. Or this user may not read it, or look into its folder.
        """
        trusted = root.get_delegated_role(role).keyids
        for path in (self.key_path(role), self.next_key_path(role)):
            signer = _load(path) if _exists(path) else None
            if signer is not None and signer.public_key.keyid in trusted:
                return signer
        return None

    def require_key(self, role: Role, root: Root) -> CryptoSigner:
        """Return the private key of a role that root metadata accepts.

        Args:
            role: The role.
            root: The root metadata.

        Raises:
            ConfigurationError: No file has the key; a file is no key, cannot be read, or others may
                read it. The message says how to name the file.
        """
        signer = self.find_key(role, root)
        if signer is None:
            raise ConfigurationError(
                f"the {role} key that this publication trusts is not in {self.key_path(role)}; "
                + (
                    f"name its file with --{role}-key"
                    if role in ("root", "targets")
                    else "restore that file, or make new keys with `publication rotate`"
                )
            )
        return signer

    def finish_rotation(self, role: Role, root: Root) -> None:
        """Move the new key of a role over the old one, once root metadata accepts only the new one.

        Otherwise it does nothing. The old key is lost. Call it under the publication's lock.

        Args:
            role: The role.
            root: The root metadata.

        Raises:
            ConfigurationError: The new key's file is no key, cannot be read, or others may read it.
            CannotWriteError: The file cannot be moved.
        """
        following = self.next_key_path(role)
        trusted = root.get_delegated_role(role).keyids
        if _exists(following) and trusted == [_load(following).public_key.keyid]:
            durable.replace_file(following, self.key_path(role))


def _load_or_make(path: Path) -> CryptoSigner:
    durable.remove_temporary_files(path.parent, path.name)
    if not _exists(path):
        if not path.parent.is_dir():
            durable.make_dir(path.parent, mode=0o700)
        durable.write_file(path, CryptoSigner.generate_ed25519().private_bytes, mode=0o600)
    return _load(path)


def _exists(path: Path) -> bool:
    """Tell whether a key file exists; a folder that this user may not enter is a wrong setting."""
    try:
        return path.exists()
    except OSError as error:
        raise ConfigurationError(
            f"{path}: this signing key cannot be read ({error.strerror}); check its name and "
            "permissions"
        ) from error


def _load(path: Path) -> CryptoSigner:
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ConfigurationError(
                f"{path}: other users may read this signing key; run `chmod 600 {path}`"
            )
        key = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigurationError(
            f"{path}: expected a signing key, an ed25519 private key in PEM without a password "
            f"({error}); `publication keys` makes one"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigurationError(
            f"{path}: expected a signing key of the kind ed25519, got another kind; `publication "
            "keys` makes one"
        )
    return CryptoSigner(key)


# Term of validity. Root and targets keys may lie in a safe; machines renew snapshot and timestamp.
VALIDITY = {
    "root": timedelta(days=365),
    "targets": timedelta(days=365),
    "snapshot": timedelta(days=30),
    "timestamp": timedelta(days=30),
}

_S = TypeVar("_S", Root, Targets, Snapshot, Timestamp)


@dataclass(frozen=True)
class SignedMetadata:
    """The committed metadata, with valid signatures. Expiry is not checked, since the publisher
    renews it."""

    root: Root
    root_bytes: bytes
    timestamp: Timestamp
    snapshot: Snapshot
    targets: Targets


def read_root(repo: Path) -> tuple[Root, bytes] | None:
    """Read the newest root metadata, following the chain of versions 1, 2, 3 ...

    Expiry is not checked. Without version 1, later versions do not count.

    Args:
        repo: The publication folder.

    Returns:
        The metadata and its bytes; None before the first version, also without the folder.

    Raises:
        VerificationError: A version is not signed by its predecessor or by itself, has another
            number, or cannot be read.
    """
    data = _read(repo / "1.root.json")
    if data is None:
        return None
    root = verify_metadata(Root, data, None, "1.root.json")
    while (following := _read(repo / f"{root.version + 1}.root.json")) is not None:
        name = f"{root.version + 1}.root.json"
        successor = verify_metadata(Root, following, root, name)
        if successor.version != root.version + 1:
            raise VerificationError(
                f"{name}: expected root metadata of version {root.version + 1}, got version "
                f"{successor.version}; restore the file from a copy"
            )
        root, data = verify_metadata(Root, following, successor, name), following
    return root, data


def read_signed_metadata(repo: Path) -> SignedMetadata | None:
    """Read the committed metadata.

    Expiry is not checked. Release files are not read.

    Args:
        repo: The publication folder.

    Returns:
        None where nothing was ever committed, also if there is only root metadata or no folder. A
        lost timestamp.json looks the same until 2.snapshot.json exists.

    Raises:
        VerificationError: A file is missing, cannot be read, or has a wrong signature or digest.
    """
    newest = read_root(repo)
    timestamp_data = _read(repo / "timestamp.json")
    if timestamp_data is None and (repo / "2.snapshot.json").exists():
        # An interrupted first publish leaves no second snapshot: the file was lost.
        raise VerificationError(
            f"{repo / 'timestamp.json'}: the publication's signed metadata is missing; restore "
            "this file from a copy"
        )
    if newest is None or timestamp_data is None:
        return None
    root, root_bytes = newest
    timestamp = verify_metadata(Timestamp, timestamp_data, root, "timestamp.json")
    name = f"{timestamp.snapshot_meta.version}.snapshot.json"
    snapshot_data = _read_matching(repo, name, timestamp.snapshot_meta)
    snapshot = verify_metadata(Snapshot, snapshot_data, root, name)
    name = f"{snapshot.meta['targets.json'].version}.targets.json"
    targets_data = _read_matching(repo, name, snapshot.meta["targets.json"])
    targets = verify_metadata(Targets, targets_data, root, name)
    return SignedMetadata(root, root_bytes, timestamp, snapshot, targets)


def require_signed_metadata(repo: Path) -> SignedMetadata:
    """Read the committed metadata of a folder that must have some.

    Raises:
        NotFoundError: Nothing was ever committed, or the folder does not exist.
        VerificationError: A file is missing, cannot be read, or has a wrong signature or digest.
    """
    ledger = read_signed_metadata(repo)
    if ledger is None:
        raise NotFoundError(
            f"{repo}: nothing is published in this folder; publish a release with "
            "training/export.py, or name another folder with --model-repo"
        )
    return ledger


def make_first_root(signers: dict[Role, Signer]) -> bytes:
    """Make the first root metadata, signed by its own root key.

    Its version is 1; it expires after 365 days. Nothing is written.

    Args:
        signers: The key of each role; all four.

    Returns:
        The metadata as JSON.

    Raises:
        KeyError: A role is missing.
    """
    root = Root(version=1, expires=_expiry("root"), consistent_snapshot=True)
    for role in ROLES:
        root.add_key(signers[role].public_key, role)
    return _signed(root, [signers["root"]])


def make_next_root(root: Root, keys: Mapping[Role, list[Key]], signers: list[Signer]) -> bytes:
    """Make the root metadata that follows `root`, with a new expiry.

    `root` is not changed, and nothing is written.

    Args:
        root: The present root metadata.
        keys: The new keys of some roles; other roles keep theirs. A role with an empty list has no
            key left.
        signers: Keys that sign it. Readers need signatures of the present and of the new root keys;
            this is not checked.

    Returns:
        The metadata as JSON, with the next version.

    Raises:
        KeyError: `root` lacks a role of `keys`.
    """
    following = Root.from_dict(root.to_dict())
    following.version += 1
    following.expires = _expiry("root")
    for role, role_keys in keys.items():
        for keyid in list(following.roles[role].keyids):
            following.revoke_key(keyid, role)
        for key in role_keys:
            following.add_key(key, role)
    return _signed(following, signers)


def make_next_metadata(
    metadata: SignedMetadata | None,
    targets: dict[str, TargetFile] | None,
    signers: Mapping[Role, Signer],
) -> list[tuple[str, bytes]]:
    """Make new metadata files, in the order in which they must be written; the last one commits.

    Nothing is written. Versions grow by one, from 1. Targets metadata expires after 365 days,
    snapshot and timestamp after 30.

    Args:
        metadata: The present metadata; None before the first commit.
        targets: The published files; None: keep the targets metadata, renew snapshot and timestamp.
        signers: Keys of the roles that sign.

    Returns:
        Name and content of each file: targets if `targets` is given, snapshot, and timestamp last.

    Raises:
        NotFoundError: Both `metadata` and `targets` are None.
        KeyError: `signers` lacks a role that must sign: snapshot, timestamp, and targets if
            `targets` is given.
    """
    files: list[tuple[str, bytes]] = []
    if targets is not None:
        version = 1 if metadata is None else metadata.targets.version + 1
        data = _signed(
            Targets(version=version, expires=_expiry("targets"), targets=targets),
            [signers["targets"]],
        )
        files.append((f"{version}.targets.json", data))
        targets_meta = MetaFile.from_data(version, data, ["sha256"])
    elif metadata is not None:
        targets_meta = metadata.snapshot.meta["targets.json"]
    else:
        raise NotFoundError(
            "there is no metadata to renew, because nothing is published in this folder; publish a "
            "release with training/export.py first"
        )
    version = 1 if metadata is None else metadata.snapshot.version + 1
    snapshot = Snapshot(
        version=version, expires=_expiry("snapshot"), meta={"targets.json": targets_meta}
    )
    data = _signed(snapshot, [signers["snapshot"]])
    files.append((f"{version}.snapshot.json", data))
    timestamp = Timestamp(
        version=1 if metadata is None else metadata.timestamp.version + 1,
        expires=_expiry("timestamp"),
        snapshot_meta=MetaFile.from_data(version, data, ["sha256"]),
    )
    files.append(("timestamp.json", _signed(timestamp, [signers["timestamp"]])))
    return files


def list_leftovers(repo: Path, metadata: SignedMetadata | None) -> list[Path]:
    """List the files that an interrupted publish left: files with our names that no metadata lists.

    Other files, such as a README, are not listed.

    Root metadata and files that are being staged are not listed. Nothing is removed.

    Args:
        repo: The publication folder.
        metadata: The committed metadata; None before the first commit.

    Returns:
        Files and model folders at the top of the folder, sorted.

    Raises:
        OSError: The folder is missing or cannot be read.
    """
    published = (
        set() if metadata is None else {path.split("/")[0] for path in metadata.targets.targets}
    )
    return sorted(
        path
        for path in repo.iterdir()
        if path.name not in published and _is_leftover(path.name, metadata)
    )


_MODEL = re.compile(
    r"^((embedder|side_encoder|text_encoder|query_encoder)_\d+|(upgrade|adapter)_\d+_to_\d+)\Z"
)
_FILE = re.compile(r"^(release-\d+\.json|probes-\d+\.npz|converter-\d+\.(json|onnx))\Z")
_VERSIONED = re.compile(r"^(\d+)\.(targets|snapshot)\.json\Z")


def _is_leftover(name: str, ledger: SignedMetadata | None) -> bool:
    if _MODEL.match(name) or _FILE.match(name):
        return True
    match = _VERSIONED.match(name)
    if match is None:
        return False
    # Older metadata stays: a reader may be reading it.
    current = {
        "targets": ledger.targets.version if ledger else 0,
        "snapshot": ledger.snapshot.version if ledger else 0,
    }
    return int(match[1]) > current[match[2]]


def _expiry(role: Role) -> datetime:
    return datetime.now(UTC).replace(microsecond=0) + VALIDITY[role]


def _signed(signed: _S, signers: list[Signer]) -> bytes:
    metadata = Metadata(signed)
    for signer in signers:
        metadata.sign(signer, append=True)
    return metadata.to_bytes()


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise VerificationError(
            f"{path}: this metadata of the publication cannot be read ({error.strerror}); check "
            "its permissions and the disk"
        ) from error


def _read_matching(repo: Path, name: str, meta: MetaFile) -> bytes:
    data = _read(repo / name)
    if data is None:
        raise VerificationError(
            f"{repo / name}: the signed metadata names this file, but it is missing; restore it "
            "from a copy"
        )
    try:
        meta.verify_length_and_hashes(data)
    except RepositoryError as error:
        raise VerificationError(
            f"{repo / name}: this file differs from the one that was signed ({error}); restore it "
            "from a copy"
        ) from error
    return data
