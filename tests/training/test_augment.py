import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from nobackfill.training.config import Augmentation
from nobackfill.training.data.augment import (
    Augment,
    apply_random_symmetry,
    draw_affine_matrices,
    draw_small_crops,
    erase_square,
    mix_pictures,
    recolour,
    warp,
)


@pytest.fixture
def pixels() -> Tensor:
    return torch.rand(5, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def rotation(degrees: float) -> Tensor:
    angle = math.radians(degrees)
    cos, sin = math.cos(angle), math.sin(angle)
    return torch.tensor([[[cos, -sin, 0.0], [sin, cos, 0.0]]])


def test_nothing_configured_changes_nothing(pixels: Tensor) -> None:
    assert torch.equal(Augment(Augmentation())(pixels), pixels)


def test_a_quarter_turn_is_a_quarter_turn(pixels: Tensor) -> None:
    turned = warp(pixels, rotation(90).expand(5, 2, 3), (12, 12))
    either = [torch.rot90(pixels, k, (2, 3)) for k in (1, 3)]
    assert any(torch.allclose(turned, turn, atol=1e-4) for turn in either)


def test_a_turned_picture_is_one_of_its_eight_symmetries(pixels: Tensor) -> None:
    torch.manual_seed(0)
    many = pixels[:1].expand(200, -1, -1, -1)
    symmetries = [
        picture
        for turn in range(4)
        for whole in [torch.rot90(pixels[0], turn, (1, 2))]
        for picture in (whole, whole.flip(2))
    ]
    found = [
        [number for number, symmetry in enumerate(symmetries) if torch.equal(picture, symmetry)]
        for picture in apply_random_symmetry(many)
    ]
    counts = Counter(number for (number,) in found)
    # 25 of each are expected.
    assert set(counts) == set(range(8)) and min(counts.values()) > 8


def test_a_mixed_picture_lies_on_the_line_between_two_turned_ones() -> None:
    torch.manual_seed(0)
    one, other = torch.zeros(300, 3, 4, 4), torch.ones(300, 3, 4, 4)
    shares = mix_pictures(one, other)
    assert torch.equal(shares.amin((1, 2, 3)), shares.amax((1, 2, 3)))
    drawn = shares[:, 0, 0, 0]
    assert float(drawn.min()) < 0.05 and float(drawn.max()) > 0.95
    assert float(drawn.mean()) == pytest.approx(0.5, abs=0.06)
    # Both are turned: of two gradients along one axis some mixtures vary along the other.
    slope = torch.linspace(0, 1, 4).expand(300, 3, 4, 4)
    across = mix_pictures(slope, slope).diff(dim=2).abs().amax((1, 2, 3)) > 0
    assert 0.5 < float(across.float().mean()) < 0.95


def test_flipping_mirrors_about_half_of_the_pictures(pixels: Tensor) -> None:
    torch.manual_seed(3)
    many = pixels[:1].expand(400, 3, 12, 12)
    flipped = Augment(Augmentation(horizontal_flip=True))(many)
    mirror = pixels[0].flip(2)
    mirrored = sum(bool(torch.allclose(p, mirror, atol=1e-4)) for p in flipped)
    same = sum(bool(torch.allclose(p, pixels[0], atol=1e-4)) for p in flipped)
    assert mirrored + same == 400
    assert 140 < mirrored < 260


def test_translation_moves_by_at_most_its_share() -> None:
    torch.manual_seed(0)
    shift = draw_affine_matrices(500, Augmentation(translate=0.25))[:, :, 2]
    # The grid's coordinates span 2, so a quarter of the side is 0.5.
    assert shift.abs().max() <= 0.5
    assert shift.abs().max() > 0.45


def test_a_crop_stays_inside_the_picture() -> None:
    torch.manual_seed(0)
    matrices = draw_affine_matrices(500, Augmentation(crop_area=0.25))
    side = matrices[:, 0, 0]
    reach = matrices[:, :, 2].abs().amax(1) + side
    assert (side >= 0.5 - 1e-6).all()
    assert (reach <= 1 + 1e-6).all()


def test_the_range_0_to_1_is_kept(pixels: Tensor) -> None:
    strong = Augmentation(
        rotate_degrees=90, scale=0.5, shear=0.5, brightness=0.9, contrast=0.9, saturation=1,
        grayscale=0.5, noise=0.5, erase=0.5, crop_area=0.3,
    )  # fmt: skip
    out = Augment(strong)(pixels)
    assert out.shape == pixels.shape
    assert out.min() >= 0
    assert out.max() <= 1


def test_grey_pictures_have_equal_channels(pixels: Tensor) -> None:
    grey = recolour(pixels, Augmentation(grayscale=1))
    assert torch.allclose(grey[:, 0], grey[:, 2])
    assert torch.allclose(grey[:, 0], pixels.mean(1))


def test_erasing_blanks_one_square_up_to_its_share(pixels: Tensor) -> None:
    torch.manual_seed(0)
    blank = (erase_square(pixels.expand(5, 3, 12, 12), 0.5) == 0.5).all(1)
    assert blank.any()
    for hole in blank:
        height, width = hole.any(1).sum(), hole.any(0).sum()
        assert height <= 6
        assert width <= 6
        assert hole.sum() == height * width


def test_small_crops_have_half_the_side(pixels: Tensor) -> None:
    assert draw_small_crops(pixels, Augmentation(), 0.3).shape == (5, 3, 6, 6)


def test_draws_come_from_the_default_generator(pixels: Tensor) -> None:
    augment = Augment(Augmentation(rotate_degrees=30, noise=0.1, erase=0.3, brightness=0.2))
    torch.manual_seed(4)
    first = augment(pixels)
    torch.manual_seed(4)
    assert torch.equal(augment(pixels), first)
    assert not torch.equal(augment(pixels), first)
