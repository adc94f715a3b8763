"""The signed metadata of a publication folder, as its publisher reads and continues it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from securesystemslib.signer import Key, Signer
from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import (
    Metadata,
    MetaFile,
    Root,
    Snapshot,
    TargetFile,
    Targets,
    Timestamp,
)

from nobackfill.errors import NotFoundError, VerificationError
from nobackfill.release.publishing.keys import ROLES, Role

# Root and targets keys may lie in a safe; snapshot and timestamp are renewed by machines.
TERM = {
    "root": timedelta(days=365),
    "targets": timedelta(days=365),
    "snapshot": timedelta(days=30),
    "timestamp": timedelta(days=30),
}

# A share is signed as a number of millionths: canonical JSON has no fractions.
MILLION = 1_000_000
_SHARE = "share_in_a_million"

_S = TypeVar("_S", Root, Targets, Snapshot, Timestamp)


@dataclass(frozen=True)
class Ledger:
    """The committed metadata, every signature checked; expiry is not: it is renewed from here."""

    root: Root
    root_bytes: bytes
    timestamp: Timestamp
    snapshot: Snapshot
    targets: Targets


def read_root(repo: Path) -> tuple[Root, bytes] | None:
    """The newest root metadata of the chain 1, 2, 3 …, or None before the first.

    Raises VerificationError for a chain that breaks.
    """
    data = _read(repo / "1.root.json")
    if data is None:
        return None
    root = verified(Root, data, None, "1.root.json")
    while (following := _read(repo / f"{root.version + 1}.root.json")) is not None:
        name = f"{root.version + 1}.root.json"
        successor = verified(Root, following, root, name)
        if successor.version != root.version + 1:
            raise VerificationError(f"{name}: says it is version {successor.version}")
        root, data = verified(Root, following, successor, name), following
    return root, data


def read_ledger(repo: Path) -> Ledger | None:
    """The committed metadata; None where nothing ever was. Raises VerificationError."""
    found = read_root(repo)
    timestamp_data = _read(repo / "timestamp.json")
    if timestamp_data is None and (repo / "2.snapshot.json").exists():
        # No killed first publish leaves a second snapshot: somebody lost the file.
        raise VerificationError(f"{repo / 'timestamp.json'}: is missing; restore it from a mirror")
    if found is None or timestamp_data is None:
        return None
    root, root_bytes = found
    timestamp = verified(Timestamp, timestamp_data, root, "timestamp.json")
    name = f"{timestamp.snapshot_meta.version}.snapshot.json"
    snapshot_data = _matching(repo, name, timestamp.snapshot_meta)
    snapshot = verified(Snapshot, snapshot_data, root, name)
    name = f"{snapshot.meta['targets.json'].version}.targets.json"
    targets_data = _matching(repo, name, snapshot.meta["targets.json"])
    targets = verified(Targets, targets_data, root, name)
    return Ledger(root, root_bytes, timestamp, snapshot, targets)


def require_ledger(repo: Path) -> Ledger:
    """Like `read_ledger`. Raises NotFoundError where nothing was ever committed."""
    ledger = read_ledger(repo)
    if ledger is None:
        raise NotFoundError(f"{repo}: nothing is published here; run training/export.py")
    return ledger


def new_root(signers: dict[Role, Signer]) -> bytes:
    """The first root metadata, signed by its own root key."""
    root = Root(version=1, expires=_expiry("root"), consistent_snapshot=True)
    for role in ROLES:
        root.add_key(signers[role].public_key, role)
    return _signed(root, [signers["root"]])


def next_root(root: Root, keys: Mapping[Role, list[Key]], signers: list[Signer]) -> bytes:
    """The root metadata after `root`: renewed, and the roles in `keys` have just those keys."""
    following = Root.from_dict(root.to_dict())
    following.version += 1
    following.expires = _expiry("root")
    for role, wanted in keys.items():
        for keyid in list(following.roles[role].keyids):
            following.revoke_key(keyid, role)
        for key in wanted:
            following.add_key(key, role)
    return _signed(following, signers)


def next_metadata(
    ledger: Ledger | None, targets: dict[str, TargetFile] | None, signers: Mapping[Role, Signer]
) -> list[tuple[str, bytes]]:
    """New metadata files in the order in which they must appear; the last one commits.

    `targets` None: targets metadata stays as it is, snapshot and timestamp are renewed.
    """
    files: list[tuple[str, bytes]] = []
    if targets is not None:
        version = 1 if ledger is None else ledger.targets.version + 1
        data = _signed(
            Targets(version=version, expires=_expiry("targets"), targets=targets),
            [signers["targets"]],
        )
        files.append((f"{version}.targets.json", data))
        targets_meta = MetaFile.from_data(version, data, ["sha256"])
    elif ledger is not None:
        targets_meta = ledger.snapshot.meta["targets.json"]
    else:
        raise NotFoundError("expected published targets to renew")
    version = 1 if ledger is None else ledger.snapshot.version + 1
    snapshot = Snapshot(
        version=version, expires=_expiry("snapshot"), meta={"targets.json": targets_meta}
    )
    data = _signed(snapshot, [signers["snapshot"]])
    files.append((f"{version}.snapshot.json", data))
    timestamp = Timestamp(
        version=1 if ledger is None else ledger.timestamp.version + 1,
        expires=_expiry("timestamp"),
        snapshot_meta=MetaFile.from_data(version, data, ["sha256"]),
    )
    files.append(("timestamp.json", _signed(timestamp, [signers["timestamp"]])))
    return files


def withdrawn(target: TargetFile) -> str | None:
    """The reason why a manifest's release was withdrawn, or None."""
    custom = target.custom
    reason = custom.get("withdrawn") if isinstance(custom, dict) else None
    return None if reason is None else str(reason)


def share_of(target: TargetFile) -> float:
    """The share of devices that a manifest's release is for, 0 to 1; 1 where none is signed."""
    custom = target.custom
    parts = custom.get(_SHARE, MILLION) if isinstance(custom, dict) else MILLION
    # What is no share is for nobody: a publisher meant to hold it back.
    good = isinstance(parts, int) and not isinstance(parts, bool) and 0 < parts <= MILLION
    return parts / MILLION if good else 0.0


def for_share(target: TargetFile, path: str, share: float) -> TargetFile:
    """The same manifest, its release for a share of the devices, told to the millionth."""
    custom = {_SHARE: max(1, round(share * MILLION))}
    return TargetFile.from_dict({**target.to_dict(), "custom": custom}, path)


def leftovers(repo: Path, ledger: Ledger | None) -> list[Path]:
    """What a killed publish left behind: names of ours that no committed metadata knows.

    Names that are not ours, such as a README, are nobody's leftovers.
    """
    known = set() if ledger is None else {path.split("/")[0] for path in ledger.targets.targets}
    return sorted(
        path
        for path in repo.iterdir()
        if path.name not in known and _is_leftover(path.name, ledger)
    )


_MODEL = re.compile(
    r"^((embedder|side_encoder|text_encoder|query_encoder)_\d+|upgrade_\d+_to_\d+)\Z"
)
_FILE = re.compile(r"^(release-\d+\.json|probes-\d+\.npz|converter-\d+\.(json|onnx))\Z")
_VERSIONED = re.compile(r"^(\d+)\.(targets|snapshot)\.json\Z")


def _is_leftover(name: str, ledger: Ledger | None) -> bool:
    if _MODEL.match(name) or _FILE.match(name):
        return True
    found = _VERSIONED.match(name)
    if found is None:
        return False
    # Older metadata stays: a reader may be half-way through it.
    current = {
        "targets": ledger.targets.version if ledger else 0,
        "snapshot": ledger.snapshot.version if ledger else 0,
    }
    return int(found[1]) > current[found[2]]


def _expiry(role: Role) -> datetime:
    return datetime.now(UTC).replace(microsecond=0) + TERM[role]


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
        raise VerificationError(f"{path}: cannot be read ({error.strerror})") from error


def _matching(repo: Path, name: str, meta: MetaFile) -> bytes:
    data = _read(repo / name)
    if data is None:
        raise VerificationError(f"{repo / name}: the signed metadata names it, but it is missing")
    try:
        meta.verify_length_and_hashes(data)
    except RepositoryError as error:
        raise VerificationError(
            f"{repo / name}: is not the file that was signed ({error})"
        ) from error
    return data


def verified(kind: type[_S], data: bytes, root: Root | None, name: str) -> _S:
    """Metadata of a kind, signed as `root` demands (None: root metadata, by itself).

    Raises VerificationError, which names it `name`.
    """
    try:
        metadata = Metadata[_S].from_bytes(data)
        if metadata.signed.type != kind.type:
            raise RepositoryError(f"expected {kind.type} metadata, got {metadata.signed.type}")
        signed: _S = metadata.signed
        delegator = root if root is not None else signed
        if not isinstance(delegator, Root):
            raise RepositoryError("expected root metadata")
        delegator.verify_delegate(kind.type, metadata.signed_bytes, metadata.signatures)
    except RepositoryError as error:
        raise VerificationError(f"{name}: is not validly signed ({error})") from error
    return signed
