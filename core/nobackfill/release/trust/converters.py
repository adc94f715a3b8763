"""Converters of a publication, as far as they are signed."""

from pathlib import Path

from nobackfill.errors import NotFoundError, PreconditionError, UnfitError
from nobackfill.release.converter import (
    Converter,
    converter_manifest_path,
    number_of_converter,
    parse_converter,
)
from nobackfill.release.publishing.metadata import withdrawn
from nobackfill.release.trust.trust import Trust


def converter_numbers(trust: Trust) -> list[int]:
    """Of those that the trusted metadata name, ascending."""
    found = (number_of_converter(path) for path in trust.paths())
    return sorted(number for number in found if number is not None)


def known(trust: Trust) -> str:
    """Which there are, in words; of releases it says what carries by them."""
    if numbers := converter_numbers(trust):
        return ", ".join(map(str, numbers))
    releases = ", ".join(map(str, trust.releases()))
    return (
        "none"
        if not releases
        else (
            f"releases ({releases}), whose upgrades read what a gallery keeps beside its vectors: "
            "`gateway upgrade` and `edge-client sync` carry by them"
        )
    )


def refuse_withdrawn(trust: Trust, number: int) -> None:
    """Raises PreconditionError for one that its publisher has taken back."""
    reason = withdrawn(trust.target(converter_manifest_path(number)))
    if reason is not None:
        raise PreconditionError(f"converter {number} was withdrawn by its publisher: {reason}")


def read_converter(trust: Trust, number: int, folder: Path) -> Converter:
    """Its manifest, downloaded into `folder`, as it was signed.

    Raises NotFoundError, VerificationError, UnfitError, UnavailableError, CannotWriteError.
    """
    path = converter_manifest_path(number)
    try:
        trust.target(path)
    except NotFoundError as error:
        raise NotFoundError(
            f"converter {number} is not published there, only {known(trust)}"
        ) from error
    return parse_converter(trust.download(path, folder).read_bytes(), number)


def converter_file(trust: Trust, manifest: Converter, folder: Path) -> Path:
    """Its ONNX file, downloaded into `folder`. Raises as `read_converter`."""
    file, target = manifest.file, trust.target(manifest.file.path)
    if (target.length, target.hashes.get("sha256")) != (file.length, file.sha256):
        path = converter_manifest_path(manifest.converter)
        raise UnfitError(f"{path}: {file.path} is signed with another digest")
    return trust.download(file.path, folder)
