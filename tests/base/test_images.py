"""Image input: what is decoded, how, and what is refused before it costs anything."""

import contextlib
import io
import os
import resource
import struct
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pillow_heif
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from nobackfill.errors import InvalidInputError
from nobackfill.images import LARGEST_IMAGE_BYTES, decode_file, decode_image, read_file
from tests.support import pictures
from tests.support.pictures import encoded


def pixels(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)


def bomb(width: int, height: int) -> bytes:
    """A PNG of one colour: a few kilobytes that unpack to width * height pixels."""
    return pictures.png(width, height, b"\0" * min((width // 8 + 1) * height, 2**25))


KINDS = pictures.kinds()


def test_a_transparent_colour_of_16_bits_shows_white() -> None:
    grey = np.array([[25_700, 0], [65_535, 25_701]], np.uint16)
    got = decode_image(encoded(Image.fromarray(grey), transparency=25_700), 2, 2)
    assert got[..., 0].tolist() == [[255, 0], [255, 100]]
    # Of a colour picture: Pillow brings pixels to 8 bits, and not what is transparent.
    rows = b"".join(b"\0" + bytes([0x12, 0x34] * 3 + [0x56, 0x78] * 3) for _ in range(2))
    made = pictures.png(2, 2, rows, depth=16, colours=2)
    colour = b"tRNS" + bytes([0x12, 0x34] * 3)
    chunk = struct.pack(">I", 6) + colour + struct.pack(">I", zlib.crc32(colour))
    got = decode_image(made[:33] + chunk + made[33:], 2, 2)
    assert got.tolist() == [[[255] * 3, [0x56] * 3]] * 2


@pytest.mark.slow
def test_a_jpeg_of_one_scan_may_be_larger() -> None:
    large = Image.new("RGB", (8160, 6120), "red")
    assert (decode_image(encoded(large, "JPEG"), 8, 8)[..., 0] > 250).all()
    with pytest.raises(InvalidInputError, match="at most 25000000 pixels"):
        decode_image(encoded(large, "JPEG", progressive=True), 8, 8)
    with pytest.raises(InvalidInputError, match="at most 125000000 pixels"):
        decode_image(encoded(Image.new("L", (12_000, 12_000)), "JPEG"), 8, 8)


@pytest.mark.parametrize("cut", [12, 40, 200, 400])
def test_damaged_telephones_pictures_are_refused(cut: int) -> None:
    heic = io.BytesIO()
    pillow_heif.from_pillow(Image.fromarray(pixels(64, 64))).save(heic)
    with pytest.raises(InvalidInputError):
        decode_image(heic.getvalue()[:cut], 8, 8)
    with pytest.raises(InvalidInputError):
        decode_image(encoded(Image.fromarray(pixels(64, 64)), "AVIF")[:cut], 8, 8)
    large = heic.getvalue().replace(struct.pack(">II", 64, 64), struct.pack(">II", 9999, 9999))
    with pytest.raises(InvalidInputError, match="at most 25000000 pixels"):
        decode_image(large, 8, 8)


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("WEBP", {"lossless": True})])
def test_lossless_formats_give_their_pixels(kind: str, options: dict[str, object]) -> None:
    expected = pixels(7, 5)
    got = decode_image(encoded(Image.fromarray(expected), kind, **options), 7, 5)
    assert got.dtype == np.uint8
    assert got.flags.c_contiguous
    np.testing.assert_array_equal(got, expected)


def test_jpeg_is_decoded_at_any_size() -> None:
    smooth = np.linspace(0, 255, 640 * 480 * 3).reshape(480, 640, 3).astype(np.uint8)
    data = encoded(Image.fromarray(smooth), "JPEG", quality=95)
    small = decode_image(data, 24, 32)
    assert small.shape == (24, 32, 3)
    # Decoding at a fraction of the size must not move what is seen.
    blocks = smooth.reshape(24, 20, 32, 20, 3).mean(axis=(1, 3))
    assert np.abs(small - blocks).max() < 8


def test_shrinking_averages_instead_of_picking() -> None:
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, ::2] = 255
    shrunk = decode_image(encoded(Image.fromarray(stripes)), 8, 8)
    assert np.abs(shrunk.astype(int) - 127).max() <= 16


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int) -> None:
    upright = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3) * 3
    turned = {
        1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1],
        5: upright.transpose(1, 0, 2), 6: np.rot90(upright),
        7: upright[::-1, ::-1].transpose(1, 0, 2), 8: np.rot90(upright, -1),
    }[orientation]  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(np.ascontiguousarray(turned)), exif=exif)
    np.testing.assert_array_equal(decode_image(data, 4, 6), upright)


def test_broken_exif_does_not_lose_the_image() -> None:
    expected = pixels(4, 4)
    data = encoded(Image.fromarray(expected), exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff")
    np.testing.assert_array_equal(decode_image(data, 4, 4), expected)


def test_transparency_shows_white_not_what_is_hidden_below() -> None:
    hidden = np.zeros((2, 2, 4), np.uint8)
    hidden[..., 0] = 200
    assert (decode_image(encoded(Image.fromarray(hidden)), 2, 2) == 255).all()
    palette = Image.new("P", (2, 2), 0)
    palette.putpalette([10, 20, 30])
    assert (decode_image(encoded(palette, transparency=0), 2, 2) == 255).all()
    assert (decode_image(encoded(palette), 2, 2) == [10, 20, 30]).all()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    image = Image.fromarray(pixels(6, 6)).convert(mode)
    assert decode_image(encoded(image, "JPEG" if mode == "CMYK" else "PNG"), 3, 3).shape == (
        3,
        3,
        3,
    )


def test_sixteen_bit_grey_is_scaled_not_clipped() -> None:
    grey = np.array([[0, 257 * 100], [257 * 200, 65535]], np.uint16)
    got = decode_image(encoded(Image.fromarray(grey)), 2, 2)
    np.testing.assert_array_equal(got[..., 0], [[0, 100], [200, 255]])


def test_bombs_are_refused_from_the_header() -> None:
    data = bomb(13_300, 13_300)
    assert len(data) < 200_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidInputError, match=r"pixels|large"):
        decode_image(data, 8, 8)
    with pytest.raises(InvalidInputError):
        decode_image(bomb(60_000, 60_000), 8, 8)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 150_000, f"{grown} kB more"


def test_bombs_between_pillows_warning_and_error_do_not_warn() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("error", category=Image.DecompressionBombWarning)
        with pytest.raises(InvalidInputError):
            decode_image(bomb(11_000, 9_000), 8, 8)
    assert caught == []


def test_a_thin_image_of_few_pixels_is_fine() -> None:
    assert decode_image(encoded(Image.new("RGB", (1, 4000), "red")), 8, 8).shape == (8, 8, 3)


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "BMP", "PPM", "ICO", "TGA", "PDF", "EPS"])
def test_other_formats_are_refused(kind: str) -> None:
    data = encoded(Image.fromarray(pixels(16, 16)), kind)
    with pytest.raises(InvalidInputError, match="expected a JPEG, PNG, WebP"):
        decode_image(data, 8, 8)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_animations_are_refused(kind: str) -> None:
    frames = [Image.fromarray(pixels(8, 8, seed)) for seed in range(3)]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    with pytest.raises(InvalidInputError, match="animation"):
        decode_image(data, 8, 8)


def test_of_a_phones_jpeg_with_several_pictures_the_first_is_taken() -> None:
    first, second = Image.new("RGB", (16, 16), "red"), Image.new("RGB", (8, 8), "blue")
    data = encoded(first, "MPO", save_all=True, append_images=[second])
    assert Image.open(io.BytesIO(data)).format == "MPO"
    assert decode_image(data, 8, 8)[..., 0].min() > 250


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_truncated_files_are_refused(kind: str, share: float) -> None:
    data = encoded(Image.fromarray(pixels(64, 64)), kind)
    with pytest.raises(InvalidInputError):
        decode_image(data[: int(len(data) * share)], 8, 8)


def test_too_many_bytes_are_refused_unread() -> None:
    with pytest.raises(InvalidInputError, match="bytes"):
        decode_image(b"\0" * (LARGEST_IMAGE_BYTES + 1), 8, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_decoded_or_refused_never_more(kind: str) -> None:
    decoded = 0
    for data in pictures.damaged(KINDS[kind], 200, seed=0):
        with contextlib.suppress(InvalidInputError):
            assert decode_image(data, 8, 8).shape == (8, 8, 3)
            decoded += 1
    assert decoded < 200


@pytest.mark.parametrize("kind", KINDS)
def test_whole_files_are_decoded_unless_they_move(kind: str) -> None:
    if "animation" in kind:
        with pytest.raises(InvalidInputError, match="animation"):
            decode_image(KINDS[kind], 8, 8)
    else:
        assert decode_image(KINDS[kind], 8, 8).shape == (8, 8, 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_cut_anywhere_does_not_lose_the_image(kind: str) -> None:
    image, exif = Image.fromarray(pixels(8, 8)), pictures.exif(1).tobytes()
    whole = decode_image(encoded(image, kind, exif=exif), 8, 8)
    for length in range(len(exif)):
        cut = encoded(image, kind, exif=exif[:length])
        np.testing.assert_array_equal(decode_image(cut, 8, 8), whole)


@pytest.mark.parametrize("damage", [b"\0", b"\xff", b"\x7f"])
def test_exif_of_nonsense_does_not_lose_the_image(damage: bytes) -> None:
    image, exif = Image.fromarray(pixels(8, 8)), pictures.exif(1).tobytes()
    for at in range(6, len(exif) - 4):
        torn = exif[:at] + 4 * damage + exif[at + 4 :]
        assert decode_image(encoded(image, "JPEG", exif=torn), 8, 8).shape == (8, 8, 3)


@pytest.mark.parametrize(
    ("mode", "depth", "most"), [("RGBA", 16, 260), ("RGBA", 8, 260), ("L", 16, 220)]
)
def test_the_largest_pictures_take_two_copies_of_memory_not_five(
    mode: str, depth: int, most: int, tmp_path: Path
) -> None:
    path = tmp_path / "large.png"
    path.write_bytes(pictures.blank_png(5000, 5000, mode, depth))
    program = (
        "import sys, pathlib\nfrom nobackfill.images import decode_image\n"
        "def peak(): return int(next(line for line in open('/proc/self/status') "
        "if line.startswith('VmHWM')).split()[1]) // 1000\n"
        "before = peak()\ndecode_image(pathlib.Path(sys.argv[1]).read_bytes(), 224, 224)\n"
        "print(peak() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, path], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < most


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=500))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidInputError):
        decode_image(data, 8, 8)


def test_files_are_named_in_refusals(tmp_path: Path) -> None:
    good, text, pipe = tmp_path / "good.png", tmp_path / "text.png", tmp_path / "pipe"
    good.write_bytes(encoded(Image.fromarray(pixels(8, 8))))
    text.write_text("no image")
    os.mkfifo(pipe)
    np.testing.assert_array_equal(decode_file(good, 8, 8), pixels(8, 8))
    for path in (text, pipe, tmp_path, tmp_path / "missing"):
        with pytest.raises(InvalidInputError, match=str(path)) as caught:
            decode_file(path, 8, 8)
        assert str(caught.value).count(str(path)) == 1
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(LARGEST_IMAGE_BYTES + 1)
    with pytest.raises(InvalidInputError, match="bytes"):
        decode_file(large, 8, 8)


def test_only_regular_files_are_read_and_no_descriptor_stays_open(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "image").write_bytes(b"data")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for path in (tmp_path, pipe, Path("/dev/zero")):
        with pytest.raises(InvalidInputError, match="expected a regular file, got a folder, pipe"):
            read_file(path)
    with pytest.raises(InvalidInputError, match="No such file"):
        read_file(tmp_path / "nowhere")
    assert read_file(tmp_path / "image") == b"data"
    assert len(list(Path("/proc/self/fd").iterdir())) == before
