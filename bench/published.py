"""A real, signed publication of two releases with an upgrade of FCT's size between them."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from nobackfill.release.manifest import Manifest, parse_manifest
from nobackfill.release.paths import manifest_path
from nobackfill.release.publishing.draft import Draft
from nobackfill.release.publishing.publish import publish

SIZE = 32
# Inner widths of the upgrade: FCT's (D.1), and a cheap one.
INNER = 2048
NARROW = 512


@dataclass(frozen=True)
class Publication:
    """`repo`: the publication folder of releases 1 and 2; `manifests` by release."""

    folder: Path
    manifests: dict[int, Manifest]

    @property
    def repo(self) -> Path:
        return self.folder / "both"

    def copy_first(self, repo: Path) -> Path:
        """A publication of release 1 alone at `repo`; `publish_second` brings the other."""
        _copy(self.folder / "first", repo)
        return repo

    def publish_second(self, repo: Path) -> None:
        """Publish release 2 into a copy of the first."""
        manifest = self.manifests[2]
        drafts = self.folder / "draft"
        files = {f.path: drafts / f.path for f in manifest.files() if (drafts / f.path).exists()}
        encoder = manifest.side_encoder
        if encoder is not None:
            files.pop(encoder.file.path)
        publish(repo, Draft(manifest, files))


def make_publication(
    shared: Path, *, inner: int = INNER, backbone: str | None = None, size: int = SIZE
) -> Publication:
    """Releases 1 and 2, 128 + 128 dims; 2 keeps the side encoder of 1 and has an int8 upgrade.

    Embedders are cheap projections, or torchvision's `backbone`, at `size` pixels. Made once below
    `shared`.
    """
    folder = shared / f"{backbone or 'projection'}-{size}-{inner}"
    first, both, done = folder / "first", folder / "both", folder / "done"
    if not done.exists():
        # It loads torch, seconds that a topic which finds the publication made need not spend.
        from bench.drafts import make_draft

        shutil.rmtree(folder, ignore_errors=True)
        one = make_draft(folder / "draft", 1, [], inner, backbone, size)
        publish(first, one)
        _copy(first, both)
        publish(both, make_draft(folder / "draft", 2, [one.manifest], inner, backbone, size))
        done.touch()
    manifests = {n: parse_manifest((both / manifest_path(n)).read_bytes()) for n in (1, 2)}
    return Publication(folder, manifests)


def _copy(source: Path, target: Path) -> None:
    for suffix in ("", ".keys"):
        shutil.copytree(f"{source}{suffix}", f"{target}{suffix}")
