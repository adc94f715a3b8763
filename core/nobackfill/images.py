"""Image input: the one function that turns an image file into a model's pixels.

Trainer, gateway and device call it alike, so what a model was trained on is what it sees. A file is
untrusted: its format, byte and pixel counts are checked before anything is decoded.
"""

import io
import os
import stat
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

from nobackfill.errors import InvalidInputError
from nobackfill.framing import Fit, Frame, Interpolation, Margin
from nobackfill.image_header import (
    HEIF_FORMATS,
    LARGEST_PIXELS,
    Header,
    damaged,
    read_header,
)

LARGEST_BYTES = 32 * 2**20

Pixels = NDArray[np.uint8]

# Whatever Pillow warns of in a file is damage; in EXIF, it means none. Set once, as
# warnings.catch_warnings is not safe in the gateway's threads.
warnings.filterwarnings("error", category=UserWarning, module=r"PIL\.")

# Rows that are brought to RGB at a time.
_STRIP_PIXELS = 2**20

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
# Those that make columns of rows.
_SIDEWAYS = (5, 6, 7, 8)
_RESAMPLING: dict[Interpolation, Image.Resampling] = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


def decode(
    data: bytes, height: int, width: int, fit: Fit = "stretch", shortest: int | None = None,
    interpolation: Interpolation = "bilinear", margin: Margin = "nearest",
) -> Pixels:  # fmt: skip
    """Decode JPEG, PNG, WebP, HEIC or AVIF into uint8 RGB [height, width, 3], resized with
    antialiasing. HEIC and AVIF need the extra `heic`.

    `fit`, `shortest`, `interpolation`, `margin`: as in `Frame`; by default the whole image is kept,
    its sides scaled separately. Of a JPEG with several pictures the first is taken. EXIF
    orientation is applied, transparency shows white. Takes at most some 500 MB (a WebP of 25
    million pixels). Raises InvalidInputError for other formats, animations, damaged or truncated
    files, more than 32 MiB, and what `read_header` refuses.
    """
    return decode_picture(checked_header(data), height, width, fit, shortest, interpolation, margin)


def checked_header(data: bytes) -> Header:
    """The header of an image that may be decoded. Raises InvalidInputError."""
    if len(data) > LARGEST_BYTES:
        raise InvalidInputError(
            f"image: expected at most {LARGEST_BYTES} bytes, got {len(data)}; send a smaller copy"
        )
    return read_header(data)


def decode_picture(
    header: Header, height: int, width: int, fit: Fit = "stretch", shortest: int | None = None,
    interpolation: Interpolation = "bilinear", margin: Margin = "nearest",
) -> Pixels:  # fmt: skip
    """Like `decode`, of a file whose header was read. Raises InvalidInputError."""
    upright = Frame(height, width, fit, shortest, interpolation, margin)
    try:
        with _opened(header) as image:
            _check_still(image, header)
            _scale_transparency(image, header)
            # JPEG can be decoded at a half, a quarter or an eighth of its size for nothing.
            side = 2 * max(height, width, shortest or 0)
            image.draft("RGB", (side, side))
            orientation = _orientation(image, header)
            frame = upright.sideways() if orientation in _SIDEWAYS else upright
            resized = _framed(_to_rgb(image), frame)
    except InvalidInputError:
        raise
    except Exception as error:
        # Not a list of classes: Pillow's readers raise what their C code and the damage make of it.
        raise damaged(error) from error
    turn = _TURNS.get(orientation)
    return np.asarray(resized if turn is None else resized.transpose(turn), dtype=np.uint8)


def decode_within(data: bytes, side: int) -> Pixels:
    """Like `decode`, its sides in proportion and none longer than `side`; a smaller image keeps
    its size. For people to look at, not for models. Raises InvalidInputError."""
    header = checked_header(data)
    try:
        with _opened(header) as image:
            sideways = _orientation(image, header) in _SIDEWAYS
            across, down = image.size
    except InvalidInputError:
        raise
    except Exception as error:
        raise damaged(error) from error
    height, width = (across, down) if sideways else (down, across)
    scale = min(1.0, side / max(height, width))
    return decode_picture(header, max(1, round(scale * height)), max(1, round(scale * width)))


def decode_file(
    path: Path, height: int, width: int, fit: Fit = "stretch", shortest: int | None = None,
    interpolation: Interpolation = "bilinear", margin: Margin = "nearest",
) -> Pixels:  # fmt: skip
    """Like `decode`, from a file. Raises InvalidInputError that names it, also if unreadable."""
    try:
        return decode(read_file(path), height, width, fit, shortest, interpolation, margin)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from error


def read_file(path: Path) -> bytes:
    """The bytes of an image file.

    Raises InvalidInputError for what is no regular file (a pipe would be waited for, a device never
    ends), cannot be read, or has more than 32 MiB; without the path, which callers know.
    """
    try:
        # Opened first and looked at then, so that nobody can exchange it in between.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InvalidInputError("expected a regular file")
            data = file.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise InvalidInputError(f"cannot be read ({error.strerror})") from error
    if len(data) > LARGEST_BYTES:
        size = max(len(data), status.st_size)
        raise InvalidInputError(f"expected at most {LARGEST_BYTES} bytes, got {size}")
    return data


def _framed(image: Image.Image, frame: Frame) -> Image.Image:
    box, size, at = frame.placed(*image.size)
    resized = image.resize(size, _RESAMPLING[frame.interpolation], box)
    if size == (frame.width, frame.height):
        return resized
    framed = Image.new("RGB", (frame.width, frame.height))
    framed.paste(resized, at)
    return framed


def _opened(header: Header) -> Image.Image:
    """The picture, opened and not decoded yet. Raises InvalidInputError without the extra."""
    if header.format in HEIF_FORMATS:
        try:
            import pillow_heif
        except ModuleNotFoundError as error:
            raise InvalidInputError(
                "image: HEIC and AVIF need the extra heic: pip install '.[heic]'"
            ) from error
        # Its file handler, once; AVIF is Pillow's own.
        pillow_heif.register_heif_opener(thumbnails=False)
    return Image.open(io.BytesIO(header.picture), formats=(header.format,))


def _check_still(image: Image.Image, header: Header) -> None:
    if header.format == "HEIF":
        # Turned and cropped already; of several pictures the main one is open.
        if image.width * image.height > LARGEST_PIXELS:
            raise damaged("its sizes contradict each other")
        return
    if header.format != "AVIF" and image.size != (header.width, header.height):
        raise damaged("its sizes contradict each other")
    if getattr(image, "n_frames", 1) != 1:
        raise InvalidInputError("image: expected a still image, got an animation")


def _scale_transparency(image: Image.Image, header: Header) -> None:
    """The transparent colour of a PNG of 16 bits a channel, whose pixels Pillow brings to 8."""
    colour = image.info.get("transparency")
    if header.format == "PNG" and header.picture[24] == 16 and isinstance(colour, tuple):
        image.info["transparency"] = tuple(value >> 8 for value in colour)


def _orientation(image: Image.Image, header: Header) -> object:
    """The EXIF orientation, 1 to 8; unreadable EXIF is common in good photos and says nothing."""
    try:
        if header.format != "JPEG":
            return image.getexif().get(ExifTags.Base.Orientation)
        exif = Image.Exif()
        exif.load(header.exif or b"")
        return exif.get(ExifTags.Base.Orientation)
    except Exception:  # noqa: BLE001 - as above: any error of a reader is damage
        return None


def _to_rgb(image: Image.Image) -> Image.Image:
    """In strips: a conversion of the whole holds the picture four times."""
    image.load()
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    rgb = Image.new("RGB", image.size)
    width, height = image.size
    rows = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, rows):
        box = (0, top, width, min(top + rows, height))
        rgb.paste(_strip_to_rgb(image.crop(box)), box)
    return rgb


def _strip_to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # 16-bit grey; Pillow's own conversion would clip instead of scale.
        values = np.asarray(image, dtype=np.int64)
        transparent = values == image.info.get("transparency", -1)
        values = np.where(transparent, 255, values // 257)
        return Image.fromarray(values.clip(0, 255).astype(np.uint8), "L").convert("RGB")
    if image.has_transparency_data:
        coloured = image.convert("RGBA")
        white = Image.new("RGBA", coloured.size, "white")
        return Image.alpha_composite(white, coloured).convert("RGB")
    return image.convert("RGB")
