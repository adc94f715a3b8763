"""Pictures of any aspect as a model declares them."""

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from nobackfill.class_folders import decode_listing as decode_listing
from nobackfill.class_folders import list_images
from nobackfill.framing import Fit, Frame, Interpolation
from nobackfill.images import decode_image


def picture(width: int, height: int) -> bytes:
    """Smooth colours, so that pixels show where they come from."""
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    pixels = np.stack([across, down, np.full_like(across, 200)], axis=2).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("width", "height"),
    [(300, 200), (120, 310), (64, 64), (65, 97), (500, 375), (1, 90), (700, 3)],
)
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
def test_a_crop_is_that_of_torchvision(
    width: int, height: int, interpolation: Interpolation
) -> None:
    """Shortest side, then the middle, of noise: any other rounding shows."""
    noise = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    how = InterpolationMode(interpolation)
    steps = transforms.Compose([transforms.Resize(64, how), transforms.CenterCrop((48, 56))])
    expected = np.asarray(steps(Image.fromarray(noise)), np.int64)
    got = decode_image(buffer.getvalue(), 48, 56, "crop", 64, interpolation).astype(np.int64)
    away = np.abs(got - expected)
    # Beyond bilinear, what overshoots black or white is cut off after each of Pillow's two passes,
    # and a part of the picture may have them in the other order.
    assert (away > 1).mean() <= (0 if interpolation == "bilinear" else 0.1)
    assert away.mean() < 1


def test_a_pad_shows_the_whole_on_black() -> None:
    got = decode_image(picture(100, 50), 40, 40, "pad")
    assert not got[:10].any() and not got[30:].any()
    assert got[10:30, :, 2].min() == got[10:30, :, 2].max() == 200


def test_a_turned_picture_is_framed_upright() -> None:
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = Image.open(io.BytesIO(picture(200, 100))).transpose(Image.Transpose.ROTATE_90)
    turned.save(buffer, "PNG", exif=exif)
    for fit, shortest in (("crop", 50), ("pad", None)):
        upright = decode_image(picture(200, 100), 30, 40, fit, shortest)  # type: ignore[arg-type]
        got = decode_image(buffer.getvalue(), 30, 40, fit, shortest)  # type: ignore[arg-type]
        assert np.abs(got.astype(int) - upright.astype(int)).max() <= 1


@given(
    width=st.integers(1, 10**7), height=st.integers(1, 10**7),
    frame=st.builds(
        Frame, st.integers(1, 512), st.integers(1, 512),
        st.sampled_from(["stretch", "crop", "pad"]), st.integers(512, 600),
    ),
)  # fmt: skip
def test_nothing_larger_than_the_frame_is_made(width: int, height: int, frame: Frame) -> None:
    """A line of millions of pixels shall not fill the memory."""
    (left, top, right, bottom), size, at = frame.place_picture(width, height)
    assert 0 <= left < right <= width and 0 <= top < bottom <= height
    assert 1 <= size[0] <= frame.width and 1 <= size[1] <= frame.height
    assert 0 <= at[0] <= frame.width - size[0] and 0 <= at[1] <= frame.height - size[1]


@pytest.mark.parametrize("fit", ["stretch", "crop", "pad"])
def test_the_gate_sees_the_pixels_that_the_gateway_does(fit: Fit, tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "one.png").write_bytes(picture(33, 70))
    frame = Frame(20, 16, fit, 24 if fit == "crop" else None)
    (seen,) = decode_listing(list_images(tmp_path), *frame)
    assert seen.tobytes() == decode_image(picture(33, 70), *frame).tobytes()
