"""A TUF repository in memory that can be made to lie: for attacks on a reader (tests/release).

It signs whatever it is told with whatever keys it is given, so that a test can publish each kind of
wrong metadata. The fetcher serves its files and can be slow, endless or cut short.
"""

import copy
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

from securesystemslib.signer import CryptoSigner
from tuf.api.exceptions import DownloadHTTPError
from tuf.api.metadata import (
    Metadata,
    MetaFile,
    Root,
    Snapshot,
    TargetFile,
    Targets,
    Timestamp,
)

BASE = "memory:/"
ROLES = ("root", "targets", "snapshot", "timestamp")


class Simulator:
    """Current metadata objects, keys and files. Change them, then `publish` what should be seen."""

    def __init__(self) -> None:
        soon = datetime.now(UTC).replace(microsecond=0) + timedelta(days=30)
        self.signers: dict[str, list[CryptoSigner]] = {
            role: [CryptoSigner.generate_ed25519()] for role in ROLES
        }
        self.root = Root(expires=soon, consistent_snapshot=True)
        for role in ROLES:
            self.root.add_key(self.signers[role][0].public_key, role)
        self.targets = Targets(expires=soon)
        self.snapshot = Snapshot(expires=soon)
        self.timestamp = Timestamp(expires=soon)
        self.files: dict[str, bytes] = {}
        self.reads: list[str] = []
        # Replaces the pieces of a file on their way to the reader.
        self.tamper: dict[str, Callable[[bytes], Iterator[bytes]]] = {}
        self.put_root()
        self.publish()

    def put_root(self, *signers: CryptoSigner) -> None:
        """Publish the root metadata as it is, signed by the root keys or by `signers`."""
        name = f"{self.root.version}.root.json"
        self.files[name] = signed(self.root, signers or self.signers["root"])

    def next_root(self) -> None:
        """Go on to the next version of root metadata; change it, then put_root."""
        self.root = copy.deepcopy(self.root)
        self.root.version += 1

    def replace_key(self, role: str) -> CryptoSigner:
        """Give a role another key in the root metadata; its old one is returned."""
        old = self.signers[role][0]
        self.root.revoke_key(old.public_key.keyid, role)
        self.signers[role] = [CryptoSigner.generate_ed25519()]
        self.root.add_key(self.signers[role][0].public_key, role)
        return old

    def publish(self) -> None:
        """Publish targets, snapshot and timestamp as they are, each pinned by the next."""
        self.put_targets()
        self.put_snapshot()
        self.put_timestamp()

    def advance(self) -> None:
        """Publish honest news: every version one higher."""
        self.targets.version += 1
        self.snapshot.version += 1
        self.timestamp.version += 1
        self.publish()

    def put_targets(self) -> None:
        """Publish the targets metadata and let the snapshot name it."""
        data = signed(self.targets, self.signers["targets"])
        self.files[f"{self.targets.version}.targets.json"] = data
        meta = MetaFile.from_data(self.targets.version, data, ["sha256"])
        self.snapshot.meta["targets.json"] = meta

    def put_snapshot(self) -> None:
        """Publish the snapshot and let the timestamp name it."""
        data = signed(self.snapshot, self.signers["snapshot"])
        self.files[f"{self.snapshot.version}.snapshot.json"] = data
        self.timestamp.snapshot_meta = MetaFile.from_data(self.snapshot.version, data, ["sha256"])

    def put_timestamp(self) -> None:
        """Publish the timestamp."""
        self.files["timestamp.json"] = signed(self.timestamp, self.signers["timestamp"])

    def add_file(self, path: str, data: bytes) -> None:
        """Publish a file as a target."""
        self.files[path] = data
        self.targets.targets[path] = TargetFile.from_data(path, data, ["sha256"])

    def fetch_from(self, url: str, offset: int) -> Iterator[bytes]:
        """See nobackfill.release.trust.trust.Fetcher."""
        name = url.removeprefix(BASE)
        self.reads.append(name)
        if name not in self.files:
            raise DownloadHTTPError(f"{name}: not found", 404)
        data = self.files[name][offset:]
        if name in self.tamper:
            yield from self.tamper[name](data)
        else:
            yield data


def signed(
    content: Root | Targets | Snapshot | Timestamp,
    signers: list[CryptoSigner] | tuple[CryptoSigner, ...],
) -> bytes:
    """Metadata as bytes, with a signature of each signer."""
    metadata: Metadata[Root | Targets | Snapshot | Timestamp] = Metadata(copy.deepcopy(content))  # type: ignore[type-var]
    for signer in signers:
        metadata.sign(signer, append=True)
    return metadata.to_bytes()
