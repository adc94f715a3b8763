"""Image input: the one function that turns an image file into a model's pixels.

Trainer, gateway and device call it alike, so what a model was trained on is what it sees. A file is
untrusted: its format, byte and pixel counts are checked before anything is decoded.
"""

import io
import stat
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from release.errors import InvalidInputError

FORMATS = ("JPEG", "PNG", "WEBP")
LARGEST_BYTES = 32 * 2**20
LARGEST_PIXELS = 25_000_000

Pixels = NDArray[np.uint8]

# Pillow only warns between one and two times its own limit; here that is a refusal. Set once, as
# warnings.catch_warnings is not safe in the gateway's threads.
warnings.filterwarnings("error", category=Image.DecompressionBombWarning)

# On damaged EXIF it warns, a line for each photo; here that is an error, too, and means no EXIF.
warnings.filterwarnings("error", category=UserWarning, module=r"PIL\.TiffImagePlugin")

# EXIF orientation to what makes the image upright.
_TURNS: dict[object, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# What Pillow's readers raise on damaged files.
_DAMAGED = (
    OSError, SyntaxError, ValueError, TypeError, IndexError, KeyError, OverflowError, EOFError,
    MemoryError, struct.error, zlib.error, Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)  # fmt: skip


def decode(data: bytes, height: int, width: int) -> Pixels:
    """Decode JPEG, PNG or WebP into uint8 RGB [height, width, 3], resized with antialiasing.

    The whole image is kept, its sides scaled separately. Of a JPEG with several pictures the first
    is taken. EXIF orientation is applied, transparency
    shows white. Raises InvalidInputError for other formats, animations, damaged or truncated files,
    more than 32 MiB or 25 million pixels.
    """
    if len(data) > LARGEST_BYTES:
        raise InvalidInputError(
            f"image: expected at most {LARGEST_BYTES} bytes, got {len(data)}; send a smaller copy"
        )
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_header(image)
            # JPEG can be decoded at a half, a quarter or an eighth of its size for nothing.
            image.draft("RGB", (2 * max(height, width), 2 * max(height, width)))
            upright = _TURNS.get(_orientation(image))
            turned = image if upright is None else image.transpose(upright)
            resized = _to_rgb(turned).resize((width, height), Image.Resampling.BILINEAR)
            return np.asarray(resized, dtype=np.uint8)
    except UnidentifiedImageError:
        raise InvalidInputError(
            f"image: expected {', '.join(FORMATS)}, got {len(data)} bytes of something else"
        ) from None
    except _DAMAGED as error:
        raise InvalidInputError(
            f"image: cannot be decoded, it is damaged, truncated or too large ({error})"
        ) from error


def decode_file(path: Path, height: int, width: int) -> Pixels:
    """Like `decode`, from a file. Raises InvalidInputError that names it, also if unreadable."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InvalidInputError(f"{path}: expected a regular file")
        if status.st_size > LARGEST_BYTES:
            raise InvalidInputError(
                f"{path}: expected at most {LARGEST_BYTES} bytes, got {status.st_size}"
            )
        return decode(path.read_bytes(), height, width)
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read ({error.strerror})") from error
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error


def _check_header(image: Image.Image) -> None:
    width, height = image.size
    if width * height > LARGEST_PIXELS:
        raise InvalidInputError(
            f"image: expected at most {LARGEST_PIXELS} pixels, got {width} x {height}; "
            "send a smaller copy"
        )
    # Phones append further pictures to a JPEG (MPO, gain maps); the first is the photo.
    if image.format in ("PNG", "WEBP") and getattr(image, "n_frames", 1) != 1:
        raise InvalidInputError("image: expected a still image, got an animation")


def _orientation(image: Image.Image) -> object:
    """The EXIF orientation, 1 to 8; unreadable EXIF is common in good photos and says nothing."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation)
    except (*_DAMAGED, UserWarning):
        return None


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # 16-bit grey; Pillow's own conversion would clip instead of scale.
        values = np.asarray(image, dtype=np.int64) // 257
        return Image.fromarray(values.clip(0, 255).astype(np.uint8), "L").convert("RGB")
    if image.has_transparency_data:
        coloured = image.convert("RGBA")
        white = Image.new("RGBA", coloured.size, "white")
        return Image.alpha_composite(white, coloured).convert("RGB")
    return image.convert("RGB")
