"""The trusted state of a reader: one file, replaced as a whole."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError
from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import Root, Snapshot, Targets, Timestamp

from nobackfill import durable
from nobackfill.digests import sha256_bytes
from nobackfill.errors import VerificationError
from nobackfill.release.publishing.metadata import verified
from nobackfill.release.trust.minimum_versions import Floor

ROLE_FILES = ("timestamp", "snapshot", "targets")


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: int
    anchor: str
    seen: datetime
    root: str
    timestamp: str
    snapshot: str
    targets: str


class State:
    """Root, timestamp, snapshot and targets metadata that were verified together.

    `anchor` is the digest of the root metadata that was trusted first, `seen` the latest time of a
    refresh that succeeded: a clock that is set back does not make expired metadata fresh.
    """

    def __init__(self, anchor: str, seen: datetime, texts: dict[str, bytes]) -> None:
        """Raises VerificationError unless the metadata is signed and fits together."""
        self.anchor = anchor
        self.seen = seen
        self.texts = texts
        self.root = verified(Root, texts["root"], None, "trusted root metadata")
        self.timestamp = verified(Timestamp, texts["timestamp"], self.root, "trusted timestamp")
        self.snapshot = verified(Snapshot, texts["snapshot"], self.root, "trusted snapshot")
        self.targets = verified(Targets, texts["targets"], self.root, "trusted targets")
        try:
            self.timestamp.snapshot_meta.verify_length_and_hashes(texts["snapshot"])
            self.snapshot.meta["targets.json"].verify_length_and_hashes(texts["targets"])
        except (RepositoryError, KeyError) as error:
            raise VerificationError(f"trusted metadata does not fit together ({error})") from error

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """None if there is none. Raises VerificationError for a damaged one."""
        try:
            stored = _Stored.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError, UnicodeDecodeError) as error:
            raise VerificationError(
                f"{path}: is damaged ({error}); remove it to begin anew from the root metadata"
            ) from error
        roles = ("root", *ROLE_FILES)
        # What is no text was not written by us; it fails its signature.
        texts = {role: str(getattr(stored, role)).encode(errors="replace") for role in roles}
        return cls(stored.anchor, stored.seen, texts)

    def save(self, path: Path) -> None:
        """Replace the file durably. Raises CannotWriteError."""
        texts = {role: data.decode() for role, data in self.texts.items()}
        stored = {"format": 1, "anchor": self.anchor, "seen": self.seen.isoformat(), **texts}
        durable.write_file(path, json.dumps(stored, indent=1).encode())

    def expiries(self) -> dict[str, datetime]:
        """When the metadata of each role expires."""
        return {
            "root": self.root.expires,
            "timestamp": self.timestamp.expires,
            "snapshot": self.snapshot.expires,
            "targets": self.targets.expires,
        }

    def floor(self) -> Floor:
        """The versions of this state, with the keys that they were signed by."""
        return Floor(
            root=self.root.version,
            timestamp=self.timestamp.version,
            snapshot=self.snapshot.version,
            targets=self.targets.version,
            keys={
                role: sha256_bytes(",".join(sorted(self.root.roles[role].keyids)).encode())
                for role in ROLE_FILES
            },
        )

    def check_floor(self, floor: Floor) -> None:
        """Raises VerificationError if anything is older than `floor`."""
        own = self.floor()
        kept = {role for role in ROLE_FILES if own.keys[role] == floor.keys.get(role)}
        compared = [("root", own.root, floor.root)]
        if "timestamp" in kept:
            compared.append(("timestamp", own.timestamp, floor.timestamp))
        if "snapshot" in kept:
            compared.append(("snapshot", own.snapshot, floor.snapshot))
        # The snapshot is what pins the targets' version, so new keys for it free that, too.
        if {"snapshot", "targets"} <= kept:
            compared.append(("targets", own.targets, floor.targets))
        for role, got, least in compared:
            if got < least:
                raise VerificationError(
                    f"expected {role} metadata of version {least} or later, got {got}: this "
                    "publication was rolled back; nothing was changed"
                )

    def check_expiry(self, now: datetime) -> None:
        """Raises VerificationError if any of the metadata has expired by `now`."""
        for name, signed in (
            ("root", self.root), ("timestamp", self.timestamp),
            ("snapshot", self.snapshot), ("targets", self.targets),
        ):  # fmt: skip
            if signed.is_expired(now):
                raise VerificationError(
                    expired(f"{name} metadata expired on {signed.expires:%Y-%m-%d}")
                )


def expired(what: str) -> str:
    """What to do about expired metadata."""
    return (
        f"{what}; this machine's clock says {datetime.now(UTC):%Y-%m-%d}. If the clock is and was "
        "right, the publisher has to run `publication resign`; nothing was changed"
    )
