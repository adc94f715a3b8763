"""Augment batches of pixels by tensor operations; one grid_sample does all geometry.

All random numbers come from torch's default generator.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from nobackfill.training.config import Augmentation


class Augment:
    """Augments pixels float32 [n,3,H,W] in 0..1 as configured; values and shape stay in range.

    Each image of a batch gets its own random change. Without any configured change, the call
    returns pixels clamped to 0..1.
    """

    def __init__(self, config: Augmentation) -> None:
        self.config = config
        self._moves = bool(
            config.rotate_degrees
            or config.scale
            or config.translate
            or config.shear
            or config.horizontal_flip
            or config.crop_area < 1
        )

    def __call__(self, pixels: Tensor) -> Tensor:
        if self._moves:
            size = (pixels.shape[2], pixels.shape[3])
            pixels = warp(pixels, _to(draw_affine_matrices(len(pixels), self.config), pixels), size)
        pixels = recolour(pixels, self.config)
        if self.config.erase:
            pixels = erase_square(pixels, self.config.erase)
        if self.config.noise:
            pixels = (pixels + self.config.noise * torch.randn_like(pixels)).clamp(0, 1)
        return pixels


def draw_small_crops(pixels: Tensor, config: Augmentation, largest_area: float) -> Tensor:
    """Return multi-crop's small views: random crops, scaled to half the side, and recoloured.

    The pixels are not changed. An odd side is halved downwards, so H and W are at least 2, else
    ValueError. Crops and colours are drawn from torch's default generator.

    Args:
        pixels: float32 [n,3,H,W] in 0..1.
        config: the augmentation. Its `crop_area` is replaced, and noise and erasing are left out.
        largest_area: a crop's largest share of the image, above 0; the least is a third of it.

    Returns:
        float32 [n,3,H//2,W//2] in 0..1.
    """
    size = (pixels.shape[2] // 2, pixels.shape[3] // 2)
    local = config.model_copy(update={"crop_area": largest_area / 3})
    matrices = _to(draw_affine_matrices(len(pixels), local, largest_area), pixels)
    return recolour(warp(pixels, matrices, size), config)


def draw_affine_matrices(n: int, config: Augmentation, largest_area: float = 1.0) -> Tensor:
    """Draw random affine maps [n,2,3] from output to input coordinates in -1..1, as affine_grid's.

    Angles are drawn evenly within their range, scales evenly in their logarithm, and a flip with a
    chance of a half. All come from torch's default generator.

    Args:
        n: the number of maps.
        config: the ranges of rotation, scale, shear, translation, crop and flip.
        largest_area: the largest share of the image that a crop keeps; the least is `crop_area`.

    Returns:
        float32 [n,2,3], on the CPU.
    """
    angle = _uniform(n) * math.radians(config.rotate_degrees)
    zoom = torch.exp(_uniform(n) * math.log1p(config.scale))
    shear = _uniform(n) * config.shear
    # A crop of area a is a zoom by sqrt(a), placed at random inside the image.
    area = config.crop_area + (largest_area - config.crop_area) * torch.rand(n)
    side = area.sqrt()
    shift = _uniform(n, 2) * (1 - side)[:, None] + _uniform(n, 2) * 2 * config.translate
    mirror = torch.ones(n)
    if config.horizontal_flip:
        mirror = torch.where(torch.rand(n) < 0.5, -1.0, 1.0)
    cos, sin, factor = torch.cos(angle), torch.sin(angle), zoom * side
    rows = [
        torch.stack((mirror * factor * cos, factor * (shear * cos - sin), shift[:, 0]), 1),
        torch.stack((mirror * factor * sin, factor * (shear * sin + cos), shift[:, 1]), 1),
    ]
    return torch.stack(rows, 1)


def warp(pixels: Tensor, matrices: Tensor, size: tuple[int, int]) -> Tensor:
    """Sample pixels [n,3,H,W] bilinearly to `size` (height, width); the border is repeated.

    `matrices` [n,2,3] map output to input coordinates in -1..1, as of `draw_affine_matrices`. The
    result is [n,3,height,width], on the device of the pixels, which are not changed. The matrices
    have their dtype, else RuntimeError.
    """
    grid = F.affine_grid(matrices, [len(pixels), pixels.shape[1], *size], align_corners=False)
    return F.grid_sample(pixels, grid, padding_mode="border", align_corners=False)


def apply_random_symmetry(pixels: Tensor) -> Tensor:
    """Rotate or mirror each square picture [n,3,S,S] by one of the eight symmetries, at random.

    The result is a copy of the same shape. Sides that are not equal may raise RuntimeError. The
    symmetries are drawn from torch's default generator.
    """
    symmetries = torch.randint(8, (len(pixels),))
    out = torch.empty_like(pixels)
    for symmetry in range(8):
        own = symmetries == symmetry
        picked = torch.rot90(pixels[own], symmetry % 4, (2, 3))
        out[own] = picked.flip(3) if symmetry >= 4 else picked
    return out


def mix_pictures(pixels: Tensor, others: Tensor) -> Tensor:
    """Mix each picture with another, after a random rotation or mirroring of both.

    The share of the first is drawn uniformly from 0..1 for each pair. This is mixup of pixels only
    (Zhang et al. 2018, alpha 1). The arguments are not changed. All random numbers come from
    torch's default generator.

    Args:
        pixels: float32 [n,3,S,S] in 0..1.
        others: the other pictures, of the same shape.

    Returns:
        float32 [n,3,S,S] in 0..1.
    """
    share = _to(torch.rand(len(pixels), 1, 1, 1), pixels)
    return share * apply_random_symmetry(pixels) + (1 - share) * apply_random_symmetry(others)


def recolour(pixels: Tensor, config: Augmentation) -> Tensor:
    """Change brightness, contrast, saturation and grey of pixels [n,3,H,W], in this order.

    Each image draws its own factors. The result is clamped to 0..1. A key of 0 changes nothing.
    Grey pictures are drawn with the chance `grayscale`. The argument is not changed. All random
    numbers come from torch's default generator.
    """
    n = len(pixels)
    if config.brightness:
        pixels = pixels * (1 + config.brightness * _column(n, pixels))
    if config.contrast:
        mean = pixels.mean((1, 2, 3), keepdim=True)
        pixels = mean + (pixels - mean) * (1 + config.contrast * _column(n, pixels))
    if config.saturation or config.grayscale:
        grey = pixels.mean(1, keepdim=True)
        factor = 1 + config.saturation * _column(n, pixels)
        drop = _to(torch.rand(n, 1, 1, 1), pixels) < config.grayscale
        pixels = grey + (pixels - grey) * torch.where(drop, 0.0, factor)
    return pixels.clamp(0, 1)


def erase_square(pixels: Tensor, share: float) -> Tensor:
    """Set one square of each picture [n,3,H,W] to mid-grey, at a random place.

    `share` is the largest side of the square, as a share of the picture's side; 0 erases nothing. A
    square at the border is cut off there. In a picture that is not square it is a rectangle of the
    same proportions. Each picture gets another square, whose size is drawn evenly from 0 to the
    largest. The argument is not changed. Size and place come from torch's default generator.
    """
    n, _, height, width = pixels.shape
    half = torch.rand(n, 1, 1) * share / 2
    centre_y, centre_x = torch.rand(n, 1, 1), torch.rand(n, 1, 1)
    y = ((torch.arange(height) + 0.5) / height)[None, :, None]
    x = ((torch.arange(width) + 0.5) / width)[None, None, :]
    hole = ((y - centre_y).abs() < half) & ((x - centre_x).abs() < half)
    return pixels.masked_fill(hole[:, None].to(pixels.device, non_blocking=True), 0.5)


def _uniform(*shape: int) -> Tensor:
    return 2 * torch.rand(*shape) - 1


def _column(n: int, like: Tensor) -> Tensor:
    return _to(_uniform(n, 1, 1, 1), like)


def _to(numbers: Tensor, like: Tensor) -> Tensor:
    """Copy random numbers to the device of `like`, without waiting for what that computes."""
    return numbers.to(like, non_blocking=True)
