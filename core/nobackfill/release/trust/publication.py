"""A publication folder that is read in place: verified manifests of every release."""

import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from nobackfill.errors import ConfigurationError, few
from nobackfill.release.manifest import Manifest
from nobackfill.release.trust.trust import TrustedFolder


@dataclass(frozen=True)
class Publication:
    """Verified manifests of every release, and which of them were withdrawn."""

    manifests: Mapping[int, Manifest]
    withdrawn: frozenset[int]


def read_publication(model_repo: Path, state: Path | None = None) -> Publication:
    """What is published, every file checked in place; empty where nothing is.

    `state` holds what is found trustworthy; None: a temporary folder. Raises VerificationError.
    """
    if not (model_repo / "timestamp.json").is_file():
        return Publication({}, frozenset())
    with nullcontext(state) if state else tempfile.TemporaryDirectory() as place:
        folder = TrustedFolder(model_repo, Path(place))
        folder.refresh()
        reasons = folder.releases()
        for release in reasons:
            folder.verified(release)
        manifests = {release: folder.manifest(release) for release in reasons}
    return Publication(manifests, frozenset(n for n, why in reasons.items() if why is not None))


def require_release(number: int, published: Mapping[int, Manifest]) -> Manifest:
    """A published release by number. Raises ConfigurationError naming those there are."""
    if number not in published:
        raise ConfigurationError(
            f"release {number} is not published; published: "
            f"{few(sorted(published, reverse=True)) or 'none'}"
        )
    return published[number]
