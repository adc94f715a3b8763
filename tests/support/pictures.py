"""Picture files of every kind that is read, and damage of every kind that is met."""

import io
import random
import struct
import zlib
from collections.abc import Iterator, Mapping

import numpy as np
from PIL import ExifTags, Image


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    """The bytes of an image file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(width: int, height: int, rows: bytes, depth: int = 1, colours: int = 0) -> bytes:
    """A PNG of these rows, each behind its filter byte, whatever its header says of their size."""
    header = struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def blank_png(width: int, height: int, mode: str = "RGB", depth: int = 8) -> bytes:
    """A black or transparent PNG, a thousandth of the size of its pixels."""
    channels, colours = {"L": (1, 0), "RGB": (3, 2), "RGBA": (4, 6)}[mode]
    rows = bytes((1 + width * channels * depth // 8) * height)
    return png(width, height, rows, depth, colours)


def exif(orientation: int = 6) -> Image.Exif:
    """As a camera writes it: numbers, texts, a second directory."""
    tags = Image.Exif()
    tags[ExifTags.Base.Orientation] = orientation
    tags[ExifTags.Base.Make] = "a camera's maker"
    tags[ExifTags.Base.XResolution] = 72.0
    tags.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.DateTimeOriginal] = "2026:11:22 01:02:03"
    return tags


def kinds() -> Mapping[str, bytes]:
    """Small files, by a name that says what is in them."""
    rgb = Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (24, 20, 3), dtype=np.uint8), "RGB"
    )
    palette = rgb.quantize(16)
    grey = Image.fromarray(np.arange(24 * 20, dtype=np.uint16).reshape(24, 20) * 100)
    rgba = rgb.convert("RGBA")
    rgba.putalpha(rgb.convert("L"))
    mpo = encoded(rgb, "MPO", save_all=True, append_images=[rgb.resize((8, 8))])
    return {
        "jpeg": encoded(rgb, "JPEG", exif=exif(), comment=b"said"),
        "jpeg progressive": encoded(rgb, "JPEG", progressive=True),
        "jpeg restarts": encoded(rgb, "JPEG", restart_marker_blocks=1),
        "jpeg grey": encoded(rgb.convert("L"), "JPEG"),
        "jpeg cmyk": encoded(rgb.convert("CMYK"), "JPEG", progressive=True),
        "jpeg of several": mpo,
        "png": encoded(rgb, exif=exif()),
        "png alpha": encoded(rgba),
        "png palette": encoded(palette, transparency=bytes(range(16))),
        "png grey 16": encoded(grey),
        "png bits": encoded(rgb.convert("1")),
        "png animation": encoded(rgb, save_all=True, append_images=[rgba]),
        "webp": encoded(rgb, "WEBP", exif=exif()),
        "webp lossless": encoded(rgb, "WEBP", lossless=True),
        "webp alpha": encoded(rgba, "WEBP", exif=exif()),
        "webp animation": encoded(rgb, "WEBP", save_all=True, append_images=[rgb.rotate(90)]),
    }  # fmt: skip


KINDS = kinds()


def damaged(data: bytes, count: int, seed: int) -> Iterator[bytes]:
    """`count` cuts, flips, overwritten, lost, repeated and inserted stretches of one file."""
    chance = random.Random(seed)
    for _ in range(count):
        torn = bytearray(data)
        for _ in range(chance.choice((1, 1, 2, 8))):
            at = chance.randrange(len(torn) + 1)
            length = chance.choice((1, 2, 4, 16, 64))
            match chance.randrange(6):
                case 0:
                    del torn[max(1, at) :]
                case 1 if at < len(torn):
                    torn[at] ^= 1 << chance.randrange(8)
                case 2:
                    torn[at : at + length] = chance.choice((b"\0", b"\xff")) * length
                case 3 if len(torn) > length:
                    del torn[at : at + length]
                case 4:
                    torn[at:at] = torn[at : at + length]
                case _:
                    torn[at:at] = chance.randbytes(length)
        yield bytes(torn)
