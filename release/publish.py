"""Publishing: a release becomes visible wholly or not at all.

Everything is staged beside the publication folder, model folders are renamed into it, then targets
and snapshot metadata, and timestamp.json last: its replacement is the commit point. Under the lock,
whatever no committed metadata names is the leftover of a killed publish and is removed first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from release.keys import Keys
from release.manifest import Manifest


@dataclass(frozen=True)
class Draft:
    """A release to publish: its manifest, and the local file of every path the manifest names.

    A side encoder that was published before (`origin_release` is older) needs no local file.
    """

    manifest: Manifest
    files: Mapping[str, Path]


@dataclass(frozen=True)
class Published:
    """What was published, or with dry_run would have been: paths with their bytes."""

    release: int
    files: Mapping[str, int]
    new_keys: bool
    written: bool


def publish(repo: Path, draft: Draft, keys: Keys | None = None, dry_run: bool = False) -> Published:
    """Check, sign and publish a release into `repo` (made if missing); None: keys beside it.

    Checks digests, spaces, predecessors, the gate's verdict, every ONNX file (onnx_check) and the
    golden probes. Raises AlreadyExistsError (releases are immutable, numbers only grow),
    GateFailedError, VerificationError, ConfigurationError (a key is missing), BusyError (another
    publisher), CannotWriteError. After a kill, running it again converges.
    """
    raise NotImplementedError
