"""What embedding an image takes of a manifest.

`read` takes it from the text of a manifest that was checked when it came and whose digest was
compared since: pydantic loads for longer than a device's whole search may take.
"""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from nobackfill.framing import Frame
from nobackfill.release.paths import NEWEST_FORMAT

if TYPE_CHECKING:
    from nobackfill.release.manifest import Manifest


# What this program knows of an embedder: a key that it does not may change what a picture becomes.
KEYS = frozenset(
    (
        "file", "height", "width", "dim", "metric", "unit", "fit", "shortest", "interpolation",
        "vectors_of",
    )
)  # fmt: skip


class File(Protocol):
    """A file of the publication folder; nobackfill.release.manifest.PublishedFile is one."""

    @property
    def path(self) -> str:
        """Plain and relative."""
        ...

    @property
    def sha256(self) -> str:
        """64 hex digits."""
        ...

    @property
    def length(self) -> int:
        """Bytes."""
        ...


@dataclass(frozen=True)
class ModelFile:
    """A File that was read without pydantic."""

    path: str
    sha256: str
    length: int


@dataclass(frozen=True)
class ImageModel:
    """phi_N of a release: its file, the pixels that it reads, and what its vectors are."""

    release: int
    file: ModelFile
    frame: Frame
    dim: int
    unit: bool

    @classmethod
    def of(cls, manifest: "Manifest") -> Self:
        """Raises NoEncoderError where the release embeds no images."""
        spec = manifest.embedder
        if spec.file is None:
            raise manifest.no_images()
        file = ModelFile(spec.file.path, spec.file.sha256, spec.file.length)
        return cls(manifest.release, file, manifest.frame, spec.dim, spec.unit)

    @classmethod
    def read(cls, text: bytes) -> Self:
        """The same of a manifest that passed `parse_manifest`, byte for byte. Raises
        NoEncoderError, UnfitError where a newer program checked it."""
        manifest = json.loads(text)
        spec = manifest["embedder"]
        file = spec.get("file") or {}
        numbers = (
            manifest["release"], spec["dim"], spec.get("height"), spec.get("width"),
            file.get("length"),
        )  # fmt: skip
        if (
            not all(type(number) is int for number in numbers)
            or type(spec["unit"]) is not bool
            or manifest.get("format", 1) not in range(1, NEWEST_FORMAT + 1)
            or not spec.keys() <= KEYS
        ):
            # It embeds no images, is newer than this program, or writes a number as pydantic alone
            # would read it.
            from nobackfill.release.manifest import parse_manifest

            return cls.of(parse_manifest(text))
        frame = Frame(
            spec["height"], spec["width"], spec.get("fit", "stretch"), spec.get("shortest"),
            spec.get("interpolation", "bilinear"),
        )  # fmt: skip
        return cls(manifest["release"], ModelFile(**file), frame, spec["dim"], spec["unit"])
