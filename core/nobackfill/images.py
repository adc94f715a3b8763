"""Image input: the one function that turns an image file into a model's pixels.

Trainer, gateway and device call it alike, so what a model was trained on is what it sees. A file is
untrusted: its format, byte and pixel counts are checked before anything is decoded.
"""

import io
import os
import re
import stat
import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

from nobackfill.errors import InvalidInputError
from nobackfill.framing import Fit, Frame, Interpolation, Margin

# What an image file says of itself, read from its bytes before any decoder sees them.
#
# A file of a few kilobytes may ask a decoder for gigabytes or for minutes: by its sides, by a
# thousand passes over the picture, by a million empty pieces. All of it is counted here.

FORMATS = ("JPEG", "PNG", "WEBP")
# They need the extra `heic`, and are decoded by libheif and libavif.
HEIF_FORMATS = ("HEIF", "AVIF")
LARGEST_PIXELS = 25_000_000
# Of a JPEG of one scan, which is decoded at an eighth of its size, row by row: a telephone's.
LARGEST_JPEG_PIXELS = 125_000_000
# A picture one pixel wide would be widened first, at its whole height.
LONGEST_SIDE = 65_535
# libjpeg writes 10 passes for a colour picture, 18 for one in CMYK; each goes over all its pixels.
MOST_SCANS = 64
# Chunks of a PNG, segments of a JPEG. Pillow reads each in Python.
MOST_PIECES = 65_536

_PNG = b"\x89PNG\r\n\x1a\n"
_EXIF = b"Exif\0\0"
_SOF = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_EOI, _SOS, _APP0, _APP1, _APP14, _APP15, _COMMENT = 0xD9, 0xDA, 0xE0, 0xE1, 0xEE, 0xEF, 0xFE
# The brands at the start of an ISO file, and its boxes of picture sizes. Sequences have other
# brands.
_BRANDS = {
    b"heic": "HEIF", b"heix": "HEIF", b"heim": "HEIF", b"heis": "HEIF", b"mif1": "HEIF",
    b"avif": "AVIF",
}  # fmt: skip
_SIZES = re.compile(rb"\0\0\0\x14ispe")
# Behind FF: neither a stuffed zero, nor a restart within a scan, nor one more FF as padding.
_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]", re.DOTALL)


@dataclass(frozen=True)
class Header:
    """`picture` is the file without what decoders need not see: of a JPEG its metadata and what
    follows its end, further pictures included. `exif` is a JPEG's, without its signature.
    """

    format: str
    width: int
    height: int
    scans: int
    picture: bytes
    exif: bytes | None

    @property
    def cost(self) -> int:
        """What decoding takes, in pixels of a plain JPEG: in time (some 7 ns each) and, beyond
        that, in memory, of which a PNG takes up to 8 bytes a pixel and a WebP, HEIC or AVIF 20.
        """
        per_pixel = {"JPEG": 1 + self.scans // 4, "PNG": 3}.get(self.format, 8)
        return per_pixel * self.width * self.height


def read_header(data: bytes) -> Header:
    """The header of a JPEG, PNG, WebP, HEIC or AVIF file.

    Raises InvalidInputError for other formats, for a damaged header, and for more pixels, passes or
    pieces than this module's limits.
    """
    if data.startswith(b"\xff\xd8\xff"):
        header = _jpeg(data)
    elif data.startswith(_PNG):
        header = _png(data)
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        header = _webp(data)
    elif data[4:8] == b"ftyp" and data[8:12] in _BRANDS:
        header = _heif(data)
    else:
        raise InvalidInputError(
            f"image: expected {', '.join(FORMATS)}, got {len(data)} bytes of something else"
        )
    width, height = header.width, header.height
    if not width * height:
        raise damaged(f"it is {width} x {height}")
    one_scan = header.format == "JPEG" and header.scans == 1
    largest = LARGEST_JPEG_PIXELS if one_scan else LARGEST_PIXELS
    if width * height > largest or max(width, height) > LONGEST_SIDE:
        raise InvalidInputError(
            f"image: expected at most {largest} pixels and sides up to {LONGEST_SIDE}, "
            f"got {width} x {height}; send a smaller copy"
        )
    if header.scans > MOST_SCANS:
        raise InvalidInputError(
            f"image: expected a JPEG of at most {MOST_SCANS} scans, got {header.scans} or more; "
            "save it again"
        )
    return header


def damaged(why: object) -> InvalidInputError:
    """The one refusal of files that no decoder can read."""
    return InvalidInputError(
        f"image: cannot be decoded, it is damaged, truncated or too large ({str(why)[:200]})"
    )


def _jpeg(data: bytes) -> Header:
    """Metadata is left out, so that no decoder trips over it, and so is padding."""
    kept, size, exif, scans = [b"\xff\xd8"], None, None, 0
    first_scan, end = 0, len(data)
    for start, marker, stop in _segments(data):
        if marker == _EOI:
            end = start + 2
            break
        if marker == _SOS:
            first_scan = first_scan or start
            scans += 1
            if scans > MOST_SCANS:
                break
        elif scans:
            continue
        elif marker in _SOF:
            if size is not None or stop - start < 10:
                raise damaged("its frame header is not one")
            size = struct.unpack_from(">HH", data, start + 5)
        elif marker == _APP1 and exif is None and data.startswith(_EXIF, start + 4):
            exif = data[start + 4 + len(_EXIF) : stop]
        if not scans and not _is_metadata(marker):
            kept.append(data[start:stop])
    if size is None or not scans:
        raise damaged("it ends before its picture")
    height, width = size
    picture = b"".join([*kept, memoryview(data)[first_scan:end]])
    return Header("JPEG", width, height, scans, picture, exif)


def _is_metadata(marker: int) -> bool:
    """APP0 and APP14 tell how colours are kept; the others are not about the pixels."""
    return marker == _COMMENT or (_APP0 < marker <= _APP15 and marker != _APP14)


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Each segment's start, marker and end, as libjpeg finds them: behind the last one, behind
    junk, behind the coded data of a scan.
    """
    stop = 2
    for _ in range(MOST_PIECES):
        found = _MARKER.search(data, stop)
        if found is None:
            return
        start, marker = found.start(), data[found.start() + 1]
        stop = start + 2
        # Those without a length; libjpeg skips them, or refuses the file.
        if marker >= 0xC0 and marker not in (0xD8, _EOI):
            if stop + 2 > len(data):
                return
            stop += max(2, struct.unpack_from(">H", data, stop)[0])
            if stop > len(data):
                return
        yield start, marker, stop
    raise _too_many_pieces()


def _png(data: bytes) -> Header:
    if data[12:16] != b"IHDR" or len(data) < 33:
        raise damaged("it does not begin with its header")
    width, height = struct.unpack_from(">II", data, 16)
    position, pieces = len(_PNG), 0
    while position + 8 <= len(data) and data[position + 4 : position + 8] != b"IEND":
        position += 12 + int.from_bytes(data[position : position + 4], "big")
        pieces += 1
        if pieces > MOST_PIECES:
            raise _too_many_pieces()
    return Header("PNG", width, height, 1, data, None)


def _webp(data: bytes) -> Header:
    """The canvas, which libwebp fills with memory when a file is merely opened."""
    kind, start = data[12:16], data[20:30]
    if len(start) < 10:
        raise damaged("it ends within its header")
    if kind == b"VP8X":
        width = int.from_bytes(start[4:7], "little") + 1
        height = int.from_bytes(start[7:10], "little") + 1
    elif kind == b"VP8L":
        bits = int.from_bytes(start[1:5], "little")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"VP8 ":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", start, 6))
    else:
        raise damaged("its first chunk is none of a picture")
    return Header("WEBP", width, height, 1, data, None)


def _heif(data: bytes) -> Header:
    """The largest size that a picture or a tile is said to have."""
    sizes = [struct.unpack_from(">II", data, at.end() + 4) for at in _SIZES.finditer(data[:-12])]
    if not sizes:
        raise damaged("it has no picture with a size")
    width, height = max(sizes, key=lambda size: size[0] * size[1])
    return Header(_BRANDS[data[8:12]], width, height, 1, data, None)


def _too_many_pieces() -> InvalidInputError:
    return InvalidInputError(
        f"image: expected at most {MOST_PIECES} segments or chunks, got more; save it again"
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
