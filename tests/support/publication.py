"""A publication in a folder of its own, to be broken and looked at by crash sweeps."""

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tuf.api.metadata import TargetFile

from nobackfill.release.manifest import Manifest
from nobackfill.release.paths import manifest_path
from nobackfill.release.publishing.draft import Draft
from nobackfill.release.publishing.inspection import list_releases
from nobackfill.release.publishing.metadata import (
    SigningKeys,
    list_leftovers,
    make_next_metadata,
    read_signed_metadata,
    require_signed_metadata,
)
from nobackfill.release.publishing.publish import (
    load_signers,
    publish,
    put_metadata,
    staging_folder,
)
from nobackfill.release.trust.trust import TrustedFolder
from tests.support.releases import draft


@dataclass(frozen=True)
class Workshop:
    """`top` holds `repo`, its keys and its staging; drafts and the pristine copy lie outside."""

    top: Path
    drafts: Path
    pristine: Path

    @property
    def repo(self) -> Path:
        return self.top / "repo"

    def keep(self) -> None:
        """Remember what `top` holds now."""
        shutil.rmtree(self.pristine, ignore_errors=True)
        shutil.copytree(self.top, self.pristine, symlinks=True)

    def restore(self) -> None:
        """Bring `top` back to what was kept."""
        shutil.rmtree(self.top)
        shutil.copytree(self.pristine, self.top, symlinks=True)

    def stale(self) -> list[str]:
        """Temporary files, staging and leftovers that a finished run must not leave."""
        found = [str(path) for path in self.top.rglob(".tmp-*")]
        if staging_folder(self.repo).exists():
            found.append(staging_folder(self.repo).name)
        return found + [
            path.name for path in list_leftovers(self.repo, read_signed_metadata(self.repo))
        ]

    def names(self) -> set[str]:
        """Every file of the publication."""
        return {path.relative_to(self.repo).as_posix() for path in self.repo.rglob("*")}


def workshop(folder: Path) -> tuple[Workshop, Draft, Draft]:
    """A publication of release 1, and the drafts of releases 1 and 2."""
    shop = Workshop(folder / "top", folder / "drafts", folder / "pristine")
    shop.top.mkdir()
    first = draft(shop.drafts, 1)
    second = draft(shop.drafts, 2, [first.manifest], int8=True)
    publish(shop.repo, first)
    shop.keep()
    return shop, first, second


def manifests_of(repo: Path, state: Path) -> dict[int, Manifest]:
    """The manifests that a reader with `state` trusts."""
    trust = TrustedFolder(repo, state)
    trust.refresh()
    return trust.manifests()


def seen(repo: Path, state: Path) -> dict[int, str | None]:
    """What a new reader sees, each release verified in place."""
    shutil.rmtree(state, ignore_errors=True)
    trust = TrustedFolder(repo, state)
    trust.refresh()
    for number in trust.releases():
        trust.verify_files(number)
    return trust.releases()


def files_of(repo: Path, release: int) -> Callable[[], dict[str, tuple[int, str]]]:
    """A look at a release's files: path -> (inode, digest), as they must never change."""
    entry = next(e for e in list_releases(repo) if e.release == release)
    prefixes = (f"embedder_{entry.release}", f"side_encoder_{entry.release}")

    def look() -> dict[str, tuple[int, str]]:
        found = [repo / f"release-{release}.json", repo / f"probes-{release}.npz"]
        found += [p for prefix in prefixes for p in (repo / prefix).rglob("*") if p.is_file()]
        return {
            str(path): (path.stat().st_ino, hashlib.sha256(path.read_bytes()).hexdigest())
            for path in found
        }

    return look


def publish_manifest(repo: Path, number: int, text: bytes) -> None:
    """Sign any bytes as the manifest of a release, as somebody who holds the keys can."""
    ledger, keys = require_signed_metadata(repo), SigningKeys.of_publication(repo)
    path = manifest_path(number)
    (repo / path).write_bytes(text)
    targets = {**ledger.targets.targets, path: TargetFile.from_data(path, text, ["sha256"])}
    put_metadata(repo, make_next_metadata(ledger, targets, load_signers(keys, ledger.root)))
