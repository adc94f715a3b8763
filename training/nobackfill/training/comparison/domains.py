"""Test images carried into another domain: pictures that no model of a comparison trained on.

Not photographs from elsewhere, as in FCT appendix B (ImageNet's models on Places): the comparison's
own test images, shifted, so that it needs no second data set. Classes and pairs stay the same.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from PIL import Image, ImageFilter, ImageOps

from nobackfill.class_folders import list_images
from nobackfill.training.comparison.data import begin


def blurred(image: Image.Image) -> Image.Image:
    """Each pixel the mean of its neighbourhood: 3 x 3 up to 32 pixels, wider in larger images."""
    return image.filter(ImageFilter.BoxBlur(max(1, image.width // 32)))


SHIFTS: Mapping[str, Callable[[Image.Image], Image.Image]] = {
    "blurred": blurred,
    "negative": ImageOps.invert,
}


def write_foreign(test: Path, into: Path) -> None:
    """Write the images of TEST, shifted as INTO's name says, as PNG in the same class folders."""
    shift, listing = SHIFTS[into.name], list_images(test)
    whole = begin(into)
    for path in listing.paths:
        target = (whole / path).with_suffix(".png")
        target.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(test / path) as image:
            shift(image.convert("RGB")).save(target)
    whole.rename(into)
