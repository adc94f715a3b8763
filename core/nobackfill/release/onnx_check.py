"""The ONNX check: what a model file may be, decided before any session is made.

A crafted file may crash or fill whatever parses it: trial.py runs this in a child with limits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nobackfill.errors import VerificationError
from nobackfill.release.encoders import TEXT_ROLES
from nobackfill.release.manifest import Manifest, PublishedFile
from nobackfill.release.models import Files, locate
from nobackfill.release.tensors import (
    Ends,
    Tensor,
    embedder_ends,
    side_encoder_ends,
    text_encoder_ends,
    upgrade_ends,
)


@dataclass(frozen=True)
class OnnxFile:
    """A file to check, with the inputs and outputs that it must have."""

    path: Path
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    # Tokens of the longest text that it is given.
    longest: int = 1


def check_onnx(files: Mapping[str, OnnxFile]) -> None:
    """Check files, by the names to be used in messages. Raises VerificationError."""
    # onnx takes a while to load, and most readers of this module never check a file.
    from nobackfill.release.onnx_rules import RefusedError, inspect

    for name, file in files.items():
        try:
            inspect(file.path, file.inputs, file.outputs, file.longest)
        except RefusedError as error:
            raise VerificationError(f"{name}: {error}; refused") from error
        except (OSError, MemoryError, RecursionError) as error:
            raise VerificationError(
                f"{name}: cannot be checked ({type(error).__name__}: {error}); refused"
            ) from error


def check_release(files: Files, manifest: Manifest) -> None:
    """Check every ONNX file of a release that `files` holds. Raises VerificationError naming it."""
    wanted: list[tuple[PublishedFile, Ends]] = []
    if (images := manifest.embedder.file) is not None:
        wanted.append((images, embedder_ends(manifest)))
    if (text := manifest.text_encoder) is not None:
        ends = text_encoder_ends(manifest, text)
        wanted += [(text.read_by(role), ends) for role in TEXT_ROLES]
    if (encoder := manifest.side_encoder) is not None:
        wanted.append((encoder.file, side_encoder_ends(manifest, encoder)))
    for upgrade in manifest.upgrades:
        ends = upgrade_ends(manifest, upgrade)
        wanted.append((upgrade.file, ends))
        if upgrade.int8_file is not None:
            wanted.append((upgrade.int8_file, ends))
    longest = 1 if text is None else text.length
    check_onnx(
        {
            file.path: OnnxFile(locate(files, file.path), *ends, longest)
            for file, ends in wanted
            if _is_there(files, file)
        }
    )


def _is_there(files: Files, file: PublishedFile) -> bool:
    return not isinstance(files, Path) or (files / file.path).exists()
