"""The images that a report looks at: read from a folder of class folders, shown as small copies."""

import base64
import io
from pathlib import Path

import numpy as np
from PIL import Image

from nobackfill.class_folders import Listing, list_filled
from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.images import decode_file

# Larger folders are sampled: the report compares every image with every other.
MOST_IMAGES = 2000
# Sides of a small copy in pixels.
THUMBNAIL = 64
# Of a small copy of a photograph, JPEG is a tenth of the size that PNG is.
JPEG_QUALITY = 80


def read_folder(folder: Path, seed: int) -> tuple[Listing, int]:
    """Pictures of class folders, at most MOST_IMAGES drawn by seed; and how many there are in all.

    Raises NotFoundError for a missing folder, InvalidInputError where fewer than two classes have
    two images each: nothing could be found, or nothing confused.
    """
    if not folder.is_dir():
        raise NotFoundError(f"no folder {folder}; --images expects a folder of class folders")
    listing = list_filled(folder)
    if (np.bincount(listing.labels) >= 2).sum() < 2:
        raise InvalidInputError(
            f"{folder}: expected at least two class folders with two images each, found "
            f"{len(listing)} images in {len(listing.class_names)} class folders"
        )
    if len(listing) <= MOST_IMAGES:
        return listing, len(listing)
    drawn = np.random.default_rng(seed).choice(len(listing), MOST_IMAGES, replace=False)
    return listing.select(np.sort(drawn)), len(listing)


def thumbnail(file: Path) -> str:
    """A small copy as a data URI, so that the report needs no other file."""
    image = Image.fromarray(decode_file(file, THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=JPEG_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
