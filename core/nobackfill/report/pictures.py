"""The images that a report looks at: read from a folder of class folders, shown as small copies."""

import base64
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.images import decode_file

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp"}
# Larger folders are sampled: the report compares every image with every other.
MOST_IMAGES = 2000
# Sides of a small copy in pixels.
THUMBNAIL = 64
# Of a small copy of a photograph, JPEG is a tenth of the size that PNG is.
JPEG_QUALITY = 80


@dataclass(frozen=True)
class Picture:
    """An image file and its class, the name of its folder."""

    path: Path
    label: str

    @property
    def name(self) -> str:
        return f"{self.label}/{self.path.name}"


def read_folder(folder: Path, seed: int) -> tuple[list[Picture], int]:
    """Pictures of FOLDER/CLASS/FILE sorted by name, at most MOST_IMAGES drawn by seed; and how many
    there are in all.

    Raises NotFoundError for a missing folder, InvalidInputError where fewer than two classes have
    two images each: nothing could be found, or nothing confused.
    """
    if not folder.is_dir():
        raise NotFoundError(f"no folder {folder}; --images expects a folder of class folders")
    pictures = [
        Picture(path, path.parent.name)
        for path in sorted(folder.glob("*/*"))
        if path.suffix.lower() in SUFFIXES
    ]
    labels, counts = np.unique([picture.label for picture in pictures], return_counts=True)
    if (counts >= 2).sum() < 2:
        raise InvalidInputError(
            f"{folder}: expected at least two class folders with two images each, found "
            f"{len(pictures)} images in {len(labels)} class folders"
        )
    if len(pictures) <= MOST_IMAGES:
        return pictures, len(pictures)
    drawn = np.random.default_rng(seed).choice(len(pictures), MOST_IMAGES, replace=False)
    return [pictures[i] for i in sorted(drawn)], len(pictures)


def pixels(pictures: list[Picture], height: int, width: int) -> NDArray[np.uint8]:
    """uint8 [n,H,W,3], decoded as everywhere. Raises InvalidInputError naming a file."""
    return np.stack([decode_file(picture.path, height, width) for picture in pictures])


def thumbnail(picture: Picture) -> str:
    """A small copy as a data URI, so that the report needs no other file."""
    image = Image.fromarray(decode_file(picture.path, THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=JPEG_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
