"""Decode image files into the pixels that a model reads.

Trainer, gateway and device share this module, so that a model sees the pixels it was trained on.
Files are untrusted: format, bytes and number of pixels are checked before anything is decoded.
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
from nobackfill.framing import Fit, Frame, Interpolation, MarginRounding

# Bounds on an image file. All are read from its bytes before any decoder sees them: a file of a few
# kilobytes can make a decoder use gigabytes or minutes, by its sides, by a thousand passes over the
# picture, or by a million empty pieces.

FORMATS = ("JPEG", "PNG", "WEBP")
# These need the extra `heic`; libheif and libavif decode them.
HEIF_FORMATS = ("HEIF", "AVIF")
LARGEST_PIXELS = 25_000_000
# A JPEG with one scan may have more pixels, as phones write them: it is decoded at an eighth of its
# size, row by row.
LARGEST_JPEG_PIXELS = 125_000_000
# Longest side in pixels: a picture of width 1 would first be widened at its whole height.
LONGEST_SIDE = 65_535
# libjpeg writes 10 passes for a colour picture and 18 for CMYK; each covers all pixels.
MOST_JPEG_SCANS = 64
# Chunks of a PNG or segments of a JPEG; Pillow reads each in Python.
MOST_FILE_SEGMENTS = 65_536

_PNG = b"\x89PNG\r\n\x1a\n"
_EXIF = b"Exif\0\0"
_SOF = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_EOI, _SOS, _APP0, _APP1, _APP14, _APP15, _COMMENT = 0xD9, 0xDA, 0xE0, 0xE1, 0xEE, 0xEF, 0xFE
# Brands of still pictures at the start of an ISO file; sequences have other brands. `_SIZES`
# matches its boxes of picture sizes.
_BRANDS = {
    b"heic": "HEIF", b"heix": "HEIF", b"heim": "HEIF", b"heis": "HEIF", b"mif1": "HEIF",
    b"avif": "AVIF",
}  # fmt: skip
_SIZES = re.compile(rb"\0\0\0\x14ispe")
# A marker: FF and no stuffed zero, no restart within a scan, no further FF as padding.
_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]", re.DOTALL)


@dataclass(frozen=True)
class ImageHeader:
    """The facts of an image file that are known before decoding.

    Attributes:
        format: JPEG, PNG, WEBP, HEIF or AVIF.
        width: Columns, before EXIF orientation.
        height: Rows, before EXIF orientation.
        scan_count: Passes of a JPEG over its picture, 1 for other formats.
        picture_bytes: The file without what decoders need not see: for a JPEG, without its
            metadata and without everything after its end, such as further pictures.
        exif: The EXIF data of a JPEG without its signature, None if there is none.
    """

    format: str
    width: int
    height: int
    scan_count: int
    picture_bytes: bytes
    exif: bytes | None

    @property
    def decoding_cost(self) -> int:
        """Estimate the cost of decoding, in pixels of a plain JPEG (about 7 ns each).

        The estimate also bounds memory: a PNG takes up to 8 bytes a pixel, a WebP, HEIC or AVIF up
        to 20. Each four further passes of a JPEG count like the first.
        """
        per_pixel = {"JPEG": 1 + self.scan_count // 4, "PNG": 3}.get(self.format, 8)
        return per_pixel * self.width * self.height


def read_header(data: bytes) -> ImageHeader:
    """Read the header of a JPEG, PNG, WebP, HEIC or AVIF file without decoding the picture.

    HEIC and AVIF need no extra here; their size is the largest that any picture or tile declares.

    Args:
        data: The bytes of the file; their number is not limited here.

    Returns:
        The header. `picture_bytes` is `data` itself except for a JPEG.

    Raises:
        InvalidInputError: Another format, a damaged header, or more pixels, passes or pieces than
            this module allows.
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
            f"image: expected a JPEG, PNG, WebP, HEIC or AVIF file, got {len(data)} bytes of "
            "another format; convert the picture"
        )
    width, height = header.width, header.height
    if not width * height:
        raise damage_error(f"it is {width} x {height}")
    one_scan = header.format == "JPEG" and header.scan_count == 1
    largest = LARGEST_JPEG_PIXELS if one_scan else LARGEST_PIXELS
    if width * height > largest or max(width, height) > LONGEST_SIDE:
        raise InvalidInputError(
            f"image: expected at most {largest} pixels and sides up to {LONGEST_SIDE}, "
            f"got {width} x {height}; send a smaller copy"
        )
    if header.scan_count > MOST_JPEG_SCANS:
        raise InvalidInputError(
            f"image: expected a JPEG of at most {MOST_JPEG_SCANS} scans, got {header.scan_count} "
            "or more; save it as a JPEG that is not progressive"
        )
    return header


def damage_error(why: object) -> InvalidInputError:
    """Return the error for a file that no decoder can read.

    Args:
        why: The reason; the message holds its first 200 characters.

    Returns:
        The error, not raised.
    """
    return InvalidInputError(
        f"image: cannot be decoded, it is damaged, truncated or too large ({str(why)[:200]}); "
        "save it again, or leave it out"
    )


def _jpeg(data: bytes) -> ImageHeader:
    """Drop the metadata, so that no decoder fails on it, and the padding."""
    parts, size, exif, scans = [b"\xff\xd8"], None, None, 0
    first_scan, end = 0, len(data)
    for start, marker, stop in _segments(data):
        if marker == _EOI:
            end = start + 2
            break
        if marker == _SOS:
            first_scan = first_scan or start
            scans += 1
            if scans > MOST_JPEG_SCANS:
                break
        elif scans:
            continue
        elif marker in _SOF:
            if size is not None or stop - start < 10:
                raise damage_error("its frame header is damaged")
            size = struct.unpack_from(">HH", data, start + 5)
        elif marker == _APP1 and exif is None and data.startswith(_EXIF, start + 4):
            exif = data[start + 4 + len(_EXIF) : stop]
        if not scans and not _is_metadata(marker):
            parts.append(data[start:stop])
    if size is None or not scans:
        raise damage_error("it ends before its picture")
    height, width = size
    picture = b"".join([*parts, memoryview(data)[first_scan:end]])
    return ImageHeader("JPEG", width, height, scans, picture, exif)


def _is_metadata(marker: int) -> bool:
    """Tell whether a JPEG segment is about something else than pixels; APP0 and APP14 define
    colours."""
    return marker == _COMMENT or (_APP0 < marker <= _APP15 and marker != _APP14)


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield start, marker and end of each segment, as libjpeg finds them.

    It searches after the last segment, after junk, and after the coded data of a scan.
    """
    stop = 2
    for _ in range(MOST_FILE_SEGMENTS):
        match = _MARKER.search(data, stop)
        if match is None:
            return
        start, marker = match.start(), data[match.start() + 1]
        stop = start + 2
        # Other markers have no length; libjpeg skips them, or refuses the file.
        if marker >= 0xC0 and marker not in (0xD8, _EOI):
            if stop + 2 > len(data):
                return
            stop += max(2, struct.unpack_from(">H", data, stop)[0])
            if stop > len(data):
                return
        yield start, marker, stop
    raise _too_many_pieces()


def _png(data: bytes) -> ImageHeader:
    if data[12:16] != b"IHDR" or len(data) < 33:
        raise damage_error("it does not begin with its header")
    width, height = struct.unpack_from(">II", data, 16)
    position, pieces = len(_PNG), 0
    while position + 8 <= len(data) and data[position + 4 : position + 8] != b"IEND":
        position += 12 + int.from_bytes(data[position : position + 4], "big")
        pieces += 1
        if pieces > MOST_FILE_SEGMENTS:
            raise _too_many_pieces()
    return ImageHeader("PNG", width, height, 1, data, None)


def _webp(data: bytes) -> ImageHeader:
    """Read the size of the canvas, for which libwebp allocates memory as soon as the file is
    opened."""
    kind, start = data[12:16], data[20:30]
    if len(start) < 10:
        raise damage_error("it ends within its header")
    if kind == b"VP8X":
        width = int.from_bytes(start[4:7], "little") + 1
        height = int.from_bytes(start[7:10], "little") + 1
    elif kind == b"VP8L":
        bits = int.from_bytes(start[1:5], "little")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"VP8 ":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", start, 6))
    else:
        raise damage_error("its first chunk is not one of a picture")
    return ImageHeader("WEBP", width, height, 1, data, None)


def _heif(data: bytes) -> ImageHeader:
    """Return the largest size that any picture or tile declares."""
    sizes = [struct.unpack_from(">II", data, at.end() + 4) for at in _SIZES.finditer(data[:-12])]
    if not sizes:
        raise damage_error("it has no picture with a size")
    width, height = max(sizes, key=lambda size: size[0] * size[1])
    return ImageHeader(_BRANDS[data[8:12]], width, height, 1, data, None)


def _too_many_pieces() -> InvalidInputError:
    return InvalidInputError(
        f"image: expected a file of at most {MOST_FILE_SEGMENTS} segments or chunks, got more; "
        "save it without metadata"
    )


LARGEST_IMAGE_BYTES = 32 * 2**20

Pixels = NDArray[np.uint8]

# A warning of Pillow about a file means damage, and one about EXIF means that there is none. The
# filter is set once: warnings.catch_warnings is not safe in the gateway's threads.
warnings.filterwarnings("error", category=UserWarning, module=r"PIL\.")

# Pixels that are converted to RGB at a time.
_STRIP_PIXELS = 2**20

# For each EXIF orientation, the operation that makes the image upright.
_TURNS: dict[object, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Orientations that swap width and height.
_SWAPS_SIDES = (5, 6, 7, 8)
_RESAMPLING: dict[Interpolation, Image.Resampling] = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


def decode_image(
    data: bytes, height: int, width: int, fit: Fit = "stretch", shortest: int | None = None,
    interpolation: Interpolation = "bilinear", margin: MarginRounding = "nearest",
) -> Pixels:  # fmt: skip
    """Decode a JPEG, PNG, WebP, HEIC or AVIF file, and resize it with antialiasing.

    EXIF orientation is applied, and transparent pixels become white. Unreadable EXIF data is
    ignored, and colour profiles are not applied. The first picture of a JPEG with several is used.
    Decoding takes at most about 500 MB (a WebP of 25 million pixels). HEIC and AVIF need the extra
    `heic`.

    Args:
        data: The bytes of the file.
        height: Rows of the result, at least 1.
        width: Columns of the result, at least 1.
        fit: How the picture is placed, see `Frame`; by default each side is scaled by itself.
        shortest: Length of the shorter side before a crop, in pixels; a crop without it stretches,
            other fits ignore it.
        interpolation: The resampling filter.
        margin: How a crop rounds its margin.

    Returns:
        uint8 RGB [height, width, 3]; it may be read-only.

    Raises:
        InvalidInputError: Another format, an animation, a damaged or truncated file, more than 32
            MiB, a header that `read_header` refuses, or HEIC or AVIF without the extra `heic`. Also
            for a height or width below 1, or an unknown filter; the message then blames the file.
    """
    return decode_with_header(
        check_header(data), height, width, fit, shortest, interpolation, margin
    )


def check_header(data: bytes) -> ImageHeader:
    """Read the header of an image file of at most 32 MiB that may be decoded.

    Args:
        data: The bytes of the file.

    Raises:
        InvalidInputError: The file is larger, or `read_header` refuses it.
    """
    if len(data) > LARGEST_IMAGE_BYTES:
        raise InvalidInputError(
            f"image: expected at most {LARGEST_IMAGE_BYTES} bytes, got {len(data)}; send a "
            "smaller copy"
        )
    return read_header(data)


def decode_with_header(
    header: ImageHeader, height: int, width: int, fit: Fit = "stretch", shortest: int | None = None,
    interpolation: Interpolation = "bilinear", margin: MarginRounding = "nearest",
) -> Pixels:  # fmt: skip
    """Decode a file whose header was read already; otherwise like `decode_image`.

    Args:
        header: Header of the file, from `check_header`.
        height: Rows of the result, at least 1.
        width: Columns of the result, at least 1.
        fit: As in `Frame`.
        shortest: As in `Frame`.
        interpolation: As in `Frame`.
        margin: As in `Frame`.

    Returns:
        uint8 RGB [height, width, 3]; it may be read-only.

    Raises:
        InvalidInputError: An animation, a damaged or truncated file, or HEIC or AVIF without the
            extra `heic`. Also for a height or width below 1, or an unknown filter.
    """
    upright = Frame(height, width, fit, shortest, interpolation, margin)
    try:
        with _open(header) as image:
            _check_still(image, header)
            _scale_transparency(image, header)
            # JPEG can be decoded at a half, a quarter or an eighth of its size for nothing.
            side = 2 * max(height, width, shortest or 0)
            image.draft("RGB", (side, side))
            orientation = _orientation(image, header)
            frame = upright.transpose() if orientation in _SWAPS_SIDES else upright
            resized = _resize(_to_rgb(image), frame)
    except InvalidInputError:
        raise
    except Exception as error:
        # Every Exception: the C code of Pillow's readers raises various classes on damaged files.
        raise damage_error(error) from error
    turn = _TURNS.get(orientation)
    return np.asarray(resized if turn is None else resized.transpose(turn), dtype=np.uint8)


def decode_for_display(data: bytes, longest_side: int) -> Pixels:
    """Decode an image for display, in proportion, with no side longer than `longest_side`.

    A smaller image keeps its size. Models need `decode_image` instead.

    Args:
        data: The bytes of the file.
        longest_side: The longest side of the result in pixels; less than 1 counts as 1.

    Returns:
        uint8 RGB [height, width, 3], with EXIF orientation applied; each side has at least 1 pixel.
        It may be read-only.

    Raises:
        InvalidInputError: Another format, an animation, a damaged or truncated file, more than 32
            MiB, a header that `read_header` refuses, or HEIC or AVIF without the extra `heic`.
    """
    header = check_header(data)
    try:
        with _open(header) as image:
            swap = _orientation(image, header) in _SWAPS_SIDES
            columns, rows = image.size
    except InvalidInputError:
        raise
    except Exception as error:
        raise damage_error(error) from error
    height, width = (columns, rows) if swap else (rows, columns)
    scale = min(1.0, longest_side / max(height, width))
    return decode_with_header(header, max(1, round(scale * height)), max(1, round(scale * width)))


def decode_file(
    path: Path, height: int, width: int, fit: Fit = "stretch", shortest: int | None = None,
    interpolation: Interpolation = "bilinear", margin: MarginRounding = "nearest",
) -> Pixels:  # fmt: skip
    """Decode an image file by its path; otherwise like `decode_image`.

    Args:
        path: The file; a link is followed.
        height: Rows of the result.
        width: Columns of the result.
        fit: As in `Frame`.
        shortest: As in `Frame`.
        interpolation: As in `Frame`.
        margin: As in `Frame`.

    Returns:
        uint8 RGB [height, width, 3]; it may be read-only.

    Raises:
        InvalidInputError: The file is missing, cannot be read, is no regular file, or
            `decode_image` refuses it; the message begins with its path.
    """
    try:
        return decode_image(read_file(path), height, width, fit, shortest, interpolation, margin)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from error


def read_file(path: Path) -> bytes:
    """Read the bytes of an image file.

    Args:
        path: A regular file. A pipe would block, and a device might never end.

    Returns:
        The bytes; empty for an empty file. Whether they are an image is not checked.

    Raises:
        InvalidInputError: A missing file, no regular file, not readable, or more than 32 MiB; or
            no file can have the name. The message lacks the path, which callers add.
    """
    try:
        # Open first and check then, so that the file cannot be replaced in between.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise InvalidInputError(
                    "expected a regular file, got a folder, pipe or device; name an image file"
                )
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(LARGEST_IMAGE_BYTES + 1)
        finally:
            # `open` leaves the descriptor of a folder open when it refuses it.
            os.close(descriptor)
    except OSError as error:
        raise InvalidInputError(
            f"cannot be read ({error.strerror}); check the name and permissions"
        ) from error
    except ValueError as error:
        # A zero byte, or half of a character.
        raise InvalidInputError("no file can have this name; name another") from error
    if len(data) > LARGEST_IMAGE_BYTES:
        size = max(len(data), status.st_size)
        raise InvalidInputError(
            f"expected a file of at most {LARGEST_IMAGE_BYTES} bytes, got {size}; use a smaller "
            "copy"
        )
    return data


def _resize(image: Image.Image, frame: Frame) -> Image.Image:
    box, size, position = frame.place_picture(*image.size)
    resized = image.resize(size, _RESAMPLING[frame.interpolation], box)
    if size == (frame.width, frame.height):
        return resized
    padded = Image.new("RGB", (frame.width, frame.height))
    padded.paste(resized, position)
    return padded


def _open(header: ImageHeader) -> Image.Image:
    """Open a picture without decoding it. Raises InvalidInputError without the extra `heic`."""
    if header.format in HEIF_FORMATS:
        try:
            import pillow_heif
        except ModuleNotFoundError as error:
            raise InvalidInputError(
                "image: HEIC and AVIF need the extra heic: pip install '.[heic]' in the folder of "
                "nobackfill's source"
            ) from error
        # Only its handler of HEIF files; Pillow reads AVIF itself.
        pillow_heif.register_heif_opener(thumbnails=False)
    return Image.open(io.BytesIO(header.picture_bytes), formats=(header.format,))


def _check_still(image: Image.Image, header: ImageHeader) -> None:
    if header.format == "HEIF":
        # libheif has rotated and cropped it already; the main picture is open.
        if image.width * image.height > LARGEST_PIXELS:
            raise damage_error("its sizes contradict each other")
        return
    if header.format != "AVIF" and image.size != (header.width, header.height):
        raise damage_error("its sizes contradict each other")
    if getattr(image, "n_frames", 1) != 1:
        raise InvalidInputError(
            "image: expected a still image, got an animation; save one of its frames"
        )


def _scale_transparency(image: Image.Image, header: ImageHeader) -> None:
    """Scale the transparent colour of a PNG with 16 bits a channel, as Pillow scales its pixels to
    8."""
    colour = image.info.get("transparency")
    if header.format == "PNG" and header.picture_bytes[24] == 16 and isinstance(colour, tuple):
        image.info["transparency"] = tuple(value >> 8 for value in colour)


def _orientation(image: Image.Image, header: ImageHeader) -> object:
    """Return the EXIF orientation, 1 to 8, or None: good photographs often have unreadable EXIF."""
    try:
        if header.format != "JPEG":
            return image.getexif().get(ExifTags.Base.Orientation)
        exif = Image.Exif()
        exif.load(header.exif or b"")
        return exif.get(ExifTags.Base.Orientation)
    except Exception:  # noqa: BLE001 - as above: any error of a reader is damage
        return None


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert to RGB in strips: converting a whole picture would hold it four times."""
    image.load()
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    rgb = Image.new("RGB", image.size)
    width, height = image.size
    rows = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, rows):
        box = (0, top, width, min(top + rows, height))
        rgb.paste(_convert_strip_to_rgb(image.crop(box)), box)
    return rgb


def _convert_strip_to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # 16-bit grey; Pillow's own conversion would clip instead of scale.
        values = np.asarray(image, dtype=np.int64)
        transparent = values == image.info.get("transparency", -1)
        values = np.where(transparent, 255, values // 257)
        return Image.fromarray(values.clip(0, 255).astype(np.uint8), "L").convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")
