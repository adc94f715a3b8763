"""What an image file says of itself, read from its bytes before any decoder sees them.

A file of a few kilobytes may ask a decoder for gigabytes or for minutes: by its sides, by a
thousand passes over the picture, by a million empty pieces. All of it is counted here.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from nobackfill.errors import InvalidInputError

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
