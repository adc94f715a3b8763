"""A release that is not published yet, and all that must hold before it may be."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tuf.api.exceptions import LengthOrHashMismatchError
from tuf.api.metadata import TargetFile

from nobackfill.digests import sha256_file
from nobackfill.errors import GateFailedError, VerificationError, few
from nobackfill.release.manifest import Manifest, PublishedFile, Upgrade, parse_manifest
from nobackfill.release.paths import release_of_manifest
from nobackfill.release.routes import twin_of
from nobackfill.release.trial import try_release


@dataclass(frozen=True)
class Draft:
    """A release to publish: its manifest, and the local file of every path the manifest names.

    A side encoder that was published before (`origin_release` is older) needs no local file.
    """

    manifest: Manifest
    files: Mapping[str, Path]


def described(path: str, local: Path) -> PublishedFile:
    """What a manifest says of a local file that is to be published as `path`."""
    return PublishedFile(path=path, sha256=sha256_file(local), length=local.stat().st_size)


def check_draft(draft: Draft, repo: Path, published: Mapping[str, TargetFile]) -> None:
    """Check a draft against what is published already.

    In order: gate verdict, the rules of a manifest, predecessors, ONNX files, golden probes. Raises
    GateFailedError, VerificationError.
    """
    manifest = draft.manifest
    predecessors = {
        number: read_manifest(repo, target, number)
        for path, target in published.items()
        if (number := release_of_manifest(path)) is not None
    }
    _check_gate(manifest, first=not predecessors)
    parse_manifest(manifest.model_dump_json(), manifest.release)
    for upgrade in manifest.upgrades:
        _check_source(upgrade, predecessors)
    _check_carried(manifest, predecessors)
    if (twin := twin_of(manifest, predecessors.values())) is not None:
        raise VerificationError(twin)
    known = {predecessor.space for predecessor in predecessors.values()}
    if strangers := set(manifest.searches_directly) - known:
        raise VerificationError(
            f"release {manifest.release}: searches_directly names spaces that no published release "
            f"has: {few(sorted(strangers))}"
        )
    try_release(draft.files, manifest)


def read_manifest(repo: Path, target: TargetFile, release: int) -> Manifest:
    """The manifest of a published release. Raises VerificationError unless it is the one that was
    signed, UnfitError."""
    try:
        data = (repo / target.path).read_bytes()
        target.verify_length_and_hashes(data)
    except (OSError, LengthOrHashMismatchError) as error:
        raise VerificationError(f"{target.path}: is not the manifest that was signed") from error
    return parse_manifest(data, release)


def _check_gate(manifest: Manifest, *, first: bool) -> None:
    gate = manifest.gate
    if gate.verdict == "first" and not first:
        raise GateFailedError(
            f"release {manifest.release}: says it is the first, but there are published ones; "
            "measure it against them"
        )
    if gate.verdict in ("failed", "not_measured") and not gate.forced:
        raise GateFailedError(
            f"release {manifest.release}: the gate says {gate.verdict} "
            f"({gate.detail or 'no detail'}); train a better one, or force it and "
            f"the manifest will say so"
        )


def _check_source(upgrade: Upgrade, predecessors: Mapping[int, Manifest]) -> None:
    name = f"upgrade from release {upgrade.from_release}"
    source = predecessors.get(upgrade.from_release)
    if source is None:
        raise VerificationError(f"{name}: is not published, so nothing can be upgraded from it")
    if (upgrade.from_space, upgrade.from_dim) != (source.space, source.embedder.dim):
        raise VerificationError(f"{name}: was made for another space than the published one")
    if not upgrade.reads_side:
        return
    side_dim = source.side_encoder.dim if source.side_encoder is not None else 0
    if (upgrade.from_side_space, upgrade.from_side_dim) != (source.side_space, side_dim):
        raise VerificationError(f"{name}: reads other side-information than the published one")


def _check_carried(manifest: Manifest, predecessors: Mapping[int, Manifest]) -> None:
    encoder = manifest.side_encoder
    for upgrade in manifest.upgrades:
        source = predecessors[upgrade.from_release]
        if upgrade.side == "maps" and encoder is None:
            raise VerificationError(
                f"release {manifest.release}: an upgrade writes side-information, but there is no "
                "side encoder whose space it would be in"
            )
        if upgrade.side == "carries" and source.side_space != manifest.side_space:
            raise VerificationError(
                f"release {manifest.release}: side-information of release {source.release} cannot "
                "be carried, as the two have different side spaces"
            )
    if encoder is None or encoder.origin_release == manifest.release:
        return
    origin = predecessors.get(encoder.origin_release)
    if origin is None or origin.side_encoder != encoder:
        raise VerificationError(
            f"release {manifest.release}: release {encoder.origin_release} has not published this "
            "side encoder"
        )
