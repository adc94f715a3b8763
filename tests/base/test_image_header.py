"""What a file asks of a decoder is counted before one sees it: sides, passes, pieces."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from nobackfill.errors import InvalidInputError
from nobackfill.images import (
    LONGEST_SIDE,
    MOST_FILE_SEGMENTS,
    MOST_JPEG_SCANS,
    decode_image,
    read_header,
)
from tests.support import pictures
from tests.support.pictures import encoded

JPEG = pictures.kinds()["jpeg"]


def passes(count: int) -> bytes:
    """A progressive JPEG of 3000 x 3000 that goes over its picture `count` times."""
    data = encoded(Image.new("RGB", (3000, 3000), "gray"), "JPEG", progressive=True)
    last = data.rfind(b"\xff\xda")
    scans = read_header(data).scan_count
    return data[:last] + (data[last:-2]) * (count - scans + 1) + data[-2:]


@pytest.mark.slow
def test_a_jpeg_of_a_thousand_scans_is_refused_before_it_is_decoded() -> None:
    assert decode_image(passes(MOST_JPEG_SCANS), 8, 8).shape == (8, 8, 3)
    assert read_header(passes(MOST_JPEG_SCANS)).scan_count == MOST_JPEG_SCANS
    for count in (MOST_JPEG_SCANS + 1, 1000):
        data = passes(count)
        assert len(data) < 100_000
        with pytest.raises(InvalidInputError, match="scans"):
            read_header(data)


def test_a_file_of_a_million_pieces_is_refused_before_it_is_decoded() -> None:
    jpeg, png = encoded(Image.new("RGB", (8, 8)), "JPEG"), encoded(Image.new("RGB", (8, 8)))
    nothing = struct.pack(">I4sI", 0, b"abCd", zlib.crc32(b"abCd"))
    for start, piece, rest in (
        (jpeg[:2], b"\xff\xfe\0\2", jpeg[2:]),
        (jpeg[:2], b"\xff\xe2\0\2", jpeg[2:]),
        (jpeg[:-2], b"\xff\xfe\0\2", jpeg[-2:]),
        (png[:33], nothing, png[33:]),
    ):
        assert decode_image(start + 1000 * piece + rest, 8, 8).shape == (8, 8, 3)
        with pytest.raises(InvalidInputError, match="segments or chunks"):
            read_header(start + 10 * MOST_FILE_SEGMENTS * piece + rest)


def test_a_jpegs_metadata_and_what_follows_it_cost_no_decoding() -> None:
    expected = decode_image(JPEG, 8, 8)
    noted = encoded(Image.open(io.BytesIO(JPEG)), "JPEG", comment=b"x" * 60_000)
    assert len(read_header(noted).picture_bytes) < 2000
    followed = JPEG + b"\xff\xda\0\2" * 1000
    assert read_header(followed).scan_count == 1
    np.testing.assert_array_equal(decode_image(followed, 8, 8), expected)
    padded = JPEG[:2] + b"\xff" * 2**22 + JPEG[2:]
    assert len(read_header(padded).picture_bytes) < 2000
    np.testing.assert_array_equal(decode_image(padded, 8, 8), expected)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_sides_are_known_before_a_decoder_makes_room_for_them(kind: str) -> None:
    for size in ((1, 4000), (4000, 1), (300, 200)):
        header = read_header(encoded(Image.new("RGB", size), kind))
        assert (header.width, header.height) == size
    with pytest.raises(InvalidInputError, match="sides"):
        read_header(pictures.png(1, LONGEST_SIDE + 1, b""))
    canvas = b"VP8X" + struct.pack("<IB3x", 10, 0) + b"\xff\x3f\0" * 2
    with pytest.raises(InvalidInputError, match="16384 x 16384"):
        read_header(b"RIFF" + struct.pack("<I", 100) + b"WEBP" + canvas)
