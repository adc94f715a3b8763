"""Check a draft, a release that is not published yet, by the rules of releases."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tuf.api.exceptions import LengthOrHashMismatchError
from tuf.api.metadata import TargetFile

from nobackfill.digests import sha256_file
from nobackfill.errors import GateFailedError, VerificationError, join_few
from nobackfill.release.manifest import (
    Manifest,
    PublishedFile,
    QueryAdapter,
    Upgrade,
    parse_manifest,
)
from nobackfill.release.paths import release_of_manifest
from nobackfill.release.routes import explain_duplicate_space
from nobackfill.release.trial import try_release


@dataclass(frozen=True)
class Draft:
    """A release to publish.

    Attributes:
        manifest: Its manifest.
        local_files: The local file of each path that the manifest names. A side encoder that an
            older release published (`origin_release`) needs none.
    """

    manifest: Manifest
    local_files: Mapping[str, Path]


def describe_file(path: str, local_file: Path) -> PublishedFile:
    """Return the entry of a manifest for a local file.

    Args:
        path: The path under which it is to be published.
        local_file: The file.

    Raises:
        OSError: It cannot be read.
        pydantic.ValidationError: The path is not plain, or the file is empty.
    """
    return PublishedFile(
        path=path, sha256=sha256_file(local_file), length=local_file.stat().st_size
    )


def check_draft(draft: Draft, repo: Path, published: Mapping[str, TargetFile]) -> None:
    """Check a draft against the published releases.

    In order: the verdict of the gate, the rules of a manifest, predecessors, ONNX files, golden
    probes. The first failure ends it. Nothing is written. ONNX files and probes are checked in a
    child process, which has limits of 4 GiB and 120 s.

    Args:
        draft: The release to publish. Its number is not compared with the published ones here.
        repo: The publication folder.
        published: The signed entries of all published files, by path; empty for the first release.

    Raises:
        GateFailedError: The gate failed or did not measure, and the draft is not forced. Also a
            draft that was gated as a first release although others are published.
        VerificationError: Any other check failed. UnfitError: also where this program cannot use a
            published release or the draft.
        OSError: The child process cannot be started.
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
    for adapter in manifest.adapters:
        _check_target(adapter, predecessors)
    _check_side_spaces(manifest, predecessors)
    if (twin := explain_duplicate_space(manifest, predecessors.values())) is not None:
        raise VerificationError(twin)
    spaces = {predecessor.space for predecessor in predecessors.values()}
    if strangers := set(manifest.searches_directly) - spaces:
        raise VerificationError(
            f"release {manifest.release}: its manifest declares (searches_directly) that its "
            "queries may search vectors of spaces that no published release has: "
            f"{join_few(sorted(strangers))}; export the release again"
        )
    try_release(draft.local_files, manifest)


def read_manifest(repo: Path, target: TargetFile, release: int) -> Manifest:
    """Read the manifest of a published release, and check it against its signed digest.

    Args:
        repo: The publication folder.
        target: The signed entry of the manifest.
        release: The number that it must have.

    Raises:
        VerificationError: It cannot be read or differs from the signed one.
        UnfitError: This program cannot use it, or it has another number.
    """
    try:
        data = (repo / target.path).read_bytes()
        target.verify_length_and_hashes(data)
    except (OSError, LengthOrHashMismatchError) as error:
        raise VerificationError(
            f"{target.path}: expected the release manifest that was signed, got another, a damaged "
            "or no file; restore the publication folder from a copy"
        ) from error
    return parse_manifest(data, release)


def _check_gate(manifest: Manifest, *, first: bool) -> None:
    gate = manifest.gate
    if gate.verdict == "first" and not first:
        raise GateFailedError(
            f"release {manifest.release}: the gate, the test against older releases, was measured "
            "for a first release, but other releases are published; export this release again, "
            "so that the gate compares it with them"
        )
    if gate.verdict in ("failed", "not_measured") and not gate.forced:
        raise GateFailedError(
            f"release {manifest.release}: the gate, the test against its predecessor, has the "
            f"verdict {gate.verdict} ({gate.detail or 'no detail'}); train a better model, or "
            "publish with --force, which the manifest records"
        )


def _check_source(upgrade: Upgrade, predecessors: Mapping[int, Manifest]) -> None:
    name = f"upgrade from release {upgrade.from_release}"
    source = predecessors.get(upgrade.from_release)
    if source is None:
        raise VerificationError(
            f"{name}: release {upgrade.from_release} is not published in this folder; leave the "
            "upgrade out, or publish that release first"
        )
    if (upgrade.from_space, upgrade.from_dim) != (source.space, source.embedder.dim):
        raise VerificationError(
            f"{name}: it was trained for another space than that of the published release; train "
            "it again with the published embedder"
        )
    if not upgrade.reads_side:
        return
    side_dim = source.side_encoder.dim if source.side_encoder is not None else 0
    if (upgrade.from_side_space, upgrade.from_side_dim) != (source.side_space, side_dim):
        raise VerificationError(
            f"{name}: it reads other side-information than the published release stores; train it "
            "again with the published side encoder"
        )


def _check_target(adapter: QueryAdapter, predecessors: Mapping[int, Manifest]) -> None:
    name = f"query adapter to release {adapter.to_release}"
    target = predecessors.get(adapter.to_release)
    if target is None:
        raise VerificationError(
            f"{name}: release {adapter.to_release} is not published in this folder; leave the "
            "adapter out, or publish that release first"
        )
    spec = target.embedder
    if (adapter.to_space, adapter.to_dim, adapter.to_unit) != (target.space, spec.dim, spec.unit):
        raise VerificationError(
            f"{name}: it was fitted for another space than that of the published release; fit it "
            "again on vectors of the published release"
        )


def _check_side_spaces(manifest: Manifest, predecessors: Mapping[int, Manifest]) -> None:
    encoder = manifest.side_encoder
    for upgrade in manifest.upgrades:
        source = predecessors[upgrade.from_release]
        if upgrade.side == "maps" and encoder is None:
            raise VerificationError(
                f"release {manifest.release}: an upgrade writes side-information, but the release "
                "has no side encoder to compute the same for new items; publish the release with "
                "one, or leave the upgrade out"
            )
        if upgrade.side == "carries" and source.side_space != manifest.side_space:
            raise VerificationError(
                f"release {manifest.release}: its upgrade keeps the side-information of release "
                f"{source.release}, but the two releases have different side encoders; export "
                f"release {manifest.release} again with --keep-side-encoder"
            )
    if encoder is None or encoder.origin_release == manifest.release:
        return
    origin = predecessors.get(encoder.origin_release)
    if origin is None or origin.side_encoder != encoder:
        raise VerificationError(
            f"release {manifest.release}: its manifest takes the side encoder from release "
            f"{encoder.origin_release}, which has not published this encoder; export release "
            f"{manifest.release} again"
        )
