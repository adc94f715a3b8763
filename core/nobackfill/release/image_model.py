"""Read the parts of a manifest that embedding an image needs, without pydantic.

`ImageModel.read` reads the text of a manifest that was verified before. Importing pydantic may take
longer than a whole search on a device.
"""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from nobackfill.framing import Frame
from nobackfill.release.paths import NEWEST_FORMAT

if TYPE_CHECKING:
    from nobackfill.release.manifest import Manifest


# Keys of an embedder that this program knows; an unknown key may change the pixels.
EMBEDDER_KEYS = frozenset(
    (
        "file", "height", "width", "dim", "metric", "unit", "fit", "shortest", "interpolation",
        "vectors_of",
    )
)  # fmt: skip


class File(Protocol):
    """A file of the publication folder, such as nobackfill.release.manifest.PublishedFile."""

    @property
    def path(self) -> str:
        """Return the published path of the file, plain and relative."""

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the file as 64 hex digits."""

    @property
    def length(self) -> int:
        """Return the number of bytes of the file."""


@dataclass(frozen=True)
class ModelFile:
    """A `File` that was read without pydantic."""

    path: str
    sha256: str
    length: int


@dataclass(frozen=True)
class ImageModel:
    """The image embedder of a release (phi_N).

    Attributes:
        release: Number of the release.
        file: Its ONNX file.
        frame: The pixels that it reads.
        dim: Dimension of its vectors.
        unit_norm: Whether its vectors have norm 1.
    """

    release: int
    file: ModelFile
    frame: Frame
    dim: int
    unit_norm: bool

    @classmethod
    def of(cls, manifest: "Manifest") -> Self:
        """Take the image embedder from a manifest.

        Raises:
            NoEncoderError: The release embeds no images.
        """
        spec = manifest.embedder
        if spec.file is None:
            raise manifest.no_images_error()
        file = ModelFile(spec.file.path, spec.file.sha256, spec.file.length)
        return cls(manifest.release, file, manifest.frame, spec.dim, spec.unit)

    @classmethod
    def read(cls, text: bytes) -> Self:
        """Take the image embedder from the text of a manifest.

        pydantic is imported only where the manifest has no image embedder, or a key or number that
        this reader does not know.

        Args:
            text: A manifest that passed `parse_manifest`, byte for byte. Other text is not checked
                here; it may raise ValueError, KeyError or TypeError.

        Raises:
            NoEncoderError: The release embeds no images.
            UnfitError: A newer program accepted it, and this one cannot use it: another format, or
                unknown keys.
        """
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
            or not spec.keys() <= EMBEDDER_KEYS
        ):
            # The release embeds no images, is newer than this program, or writes a number in a way
            # that only pydantic reads.
            from nobackfill.release.manifest import parse_manifest

            return cls.of(parse_manifest(text))
        frame = Frame(
            spec["height"], spec["width"], spec.get("fit", "stretch"), spec.get("shortest"),
            spec.get("interpolation", "bilinear"),
        )  # fmt: skip
        return cls(manifest["release"], ModelFile(**file), frame, spec["dim"], spec["unit"])
