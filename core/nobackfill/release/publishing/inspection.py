"""Inspect a publication folder as a whole: list its releases, and check everything in it."""

import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from nobackfill.errors import UnfitError, VerificationError
from nobackfill.release.paths import release_of_manifest
from nobackfill.release.publishing.draft import read_manifest
from nobackfill.release.publishing.metadata import (
    Role,
    SignedMetadata,
    list_leftovers,
    require_signed_metadata,
)
from nobackfill.release.publishing.renew import metadata_expiries
from nobackfill.release.trial import try_release
from nobackfill.release.trust.trust import (
    TrustedFolder,
    converter_numbers,
    download_converter_file,
    download_converter_manifest,
    read_offered_share,
    withdrawal_reason,
)


@dataclass(frozen=True)
class PublicationEntry:
    """A published release, for a list.

    Attributes:
        release: Its number.
        withdrawn: The reason of its withdrawal, None while it is offered.
        size: Bytes of the files that it added.
        created: When it was made, ISO 8601.
        method: The method that trained it.
        gate: The verdict of the gate.
        upgrades_from: Releases from which it has an upgrade.
        space: The id of its space.
        unfit: Why this program cannot read its manifest, which leaves the other fields empty; or
            None.
        share: Share of the devices that it is offered to, 0 to 1.
    """

    release: int
    withdrawn: str | None
    size: int
    created: str = ""
    method: str = ""
    gate: str = ""
    upgrades_from: tuple[int, ...] = ()
    space: str = ""
    unfit: str | None = None
    share: float = 1.0


@dataclass(frozen=True)
class PublicationHealth:
    """The result of checking a publication without finding an error.

    Attributes:
        releases: Numbers of the checked releases.
        expiry_by_role: When the metadata of each role expires, UTC.
        leftover_files: Files of an interrupted publish.
    """

    releases: tuple[int, ...]
    expiry_by_role: dict[Role, datetime]
    leftover_files: tuple[str, ...]


def list_releases(repo: Path) -> list[PublicationEntry]:
    """List the published releases, ascending by number.

    Models are not read. Withdrawn releases are listed, too, and so are those that this program
    cannot use. Expiry is not checked.

    Returns:
        The releases; empty if the publication has none yet.

    Raises:
        NotFoundError: Nothing is published in the folder.
        VerificationError: A signature or digest is wrong, or a manifest or metadata file is
            missing or cannot be read.
    """
    ledger = require_signed_metadata(repo)
    entries = [_entry(repo, ledger, path) for path in ledger.targets.targets]
    return sorted((e for e in entries if e is not None), key=lambda entry: entry.release)


def verify_publication(
    repo: Path, root: bytes | None = None, release: int | None = None
) -> PublicationHealth:
    """Check a publication as a new device would, and run the golden probes of every model.

    Reads every file, and runs each release in a child for up to two minutes. It checks the digests
    and manifests of converters, but does not run their maps. Withdrawn releases and converters are
    checked, too. Nothing is written but a temporary folder.

    Args:
        repo: The publication folder.
        root: The root metadata to trust; None: the folder's own.
        release: Check only this release; None: all releases and converters.

    Returns:
        The numbers and dates of a publication without an error. Leftovers are no error; they are
        listed.

    Raises:
        NotFoundError: Nothing is published, a part of it is missing, or no such release.
        VerificationError: The first file, signature or probe that fails, metadata that has expired,
            or another root than `root`. UnfitError if this program cannot use a release or
            converter.
        UnavailableError: The folder cannot be read.
        CannotWriteError: The temporary folder cannot be written.
        OSError: The child process cannot be started, or no temporary folder can be made.
    """
    with tempfile.TemporaryDirectory(prefix="nobackfill-") as temporary:
        trust = TrustedFolder(repo, Path(temporary), root)
        trust.refresh()
        numbers = tuple(trust.releases()) if release is None else (release,)
        for number in numbers:
            folder = trust.verify_files(number)
            manifest = trust.manifest(number)
            try:
                try_release(folder, manifest)
            except VerificationError as error:
                raise VerificationError(f"release {number}: {error}") from error
        for number in converter_numbers(trust) if release is None else ():
            folder = Path(temporary) / "converters"
            download_converter_file(
                trust, download_converter_manifest(trust, number, folder), folder
            )
    ledger = require_signed_metadata(repo)
    unpublished = tuple(path.name for path in list_leftovers(repo, ledger))
    return PublicationHealth(numbers, metadata_expiries(ledger), unpublished)


def _entry(repo: Path, ledger: SignedMetadata, path: str) -> PublicationEntry | None:
    number = release_of_manifest(path)
    if number is None:
        return None
    target = ledger.targets.targets[path]
    try:
        manifest = read_manifest(repo, target, number)
    except UnfitError as error:
        return PublicationEntry(
            number,
            withdrawn=withdrawal_reason(target),
            size=target.length,
            unfit=str(error),
            share=read_offered_share(target),
        )
    own = {file.path: file.length for file in manifest.files()}
    encoder = manifest.side_encoder
    if encoder is not None and encoder.origin_release != number:
        del own[encoder.file.path]
    return PublicationEntry(
        release=number,
        created=manifest.created,
        method=manifest.method,
        gate=f"{manifest.gate.verdict}{' (forced)' if manifest.gate.forced else ''}",
        withdrawn=withdrawal_reason(target),
        upgrades_from=tuple(upgrade.from_release for upgrade in manifest.upgrades),
        space=manifest.space,
        size=sum(own.values()) + target.length,
        share=read_offered_share(target),
    )
