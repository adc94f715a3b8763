"""The ONNX gate: what a model file may be, decided before any session is made."""

from dataclasses import dataclass
from pathlib import Path

from release.manifest import Manifest
from release.models import Files


@dataclass(frozen=True)
class Tensor:
    """A declared input or output; the first axis is the number of items and stays free."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def check_onnx(path: Path, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
    """Check one file in a subprocess with limits on memory and time. Raises VerificationError."""
    raise NotImplementedError


def check_release(files: Files, manifest: Manifest) -> None:
    """Check every ONNX file of a release that `files` holds. Raises VerificationError naming it."""
    raise NotImplementedError
