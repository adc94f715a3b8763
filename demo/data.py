"""The demo's images as folders of class folders, cut by seed into parts that never overlap."""

import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

from demo.recipes import SIZES
from nobackfill.errors import InvalidInputError

# What each part of the images is for, and its share of every class.
PARTS = {
    "train": 0.5,  # both releases are trained here
    "eval": 0.16,  # the gate and the calibration of a release, before it is published
    "server": 0.19,  # the server's gallery
    "device": 0.06,  # the device's gallery
    "queries": 0.09,  # asked of both; nothing is trained or tuned on them
}
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp"}
MIN_CLASSES = 4
MIN_IMAGES = 13  # of one class, so that every part gets one


@dataclass(frozen=True)
class ImageSplit:
    """What was cut: classes that the old model learns, the first half of them, and all, which the
    new one learns; images of the old ones, and of all, to train on; the largest side for the
    models' input."""

    old: list[str]
    new: list[str]
    old_images: int
    new_images: int
    image_size: int


def write_digits(folder: Path) -> None:
    """Write scikit-learn's 1,797 scanned digits (8 x 8, 16 greys) as FOLDER/DIGIT/NUMBER.png."""
    digits = load_digits()
    for number, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = folder / str(digit) / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * (255 / 16)).astype("uint8")).save(path)


def classes_of(images: Path, limit: int | None) -> dict[str, list[Path]]:
    """Image files of each class folder, in alphabetical order, at most `limit` a class.

    Raises InvalidInputError for no such folder, too few classes, or too few images of some.
    """
    if not images.is_dir():
        raise InvalidInputError(f"--images: expected a folder of class folders, {images} is none")
    classes = {
        folder.name: [p for p in sorted(folder.iterdir()) if p.suffix.lower() in SUFFIXES][:limit]
        for folder in sorted(images.iterdir())
        if folder.is_dir() and not folder.name.startswith(".")
    }
    if len(classes) < MIN_CLASSES:
        raise InvalidInputError(
            f"{images}: expected at least {MIN_CLASSES} class folders, found {len(classes)}: "
            "the old model learns the first half of them, the new model all",
        )
    small = [f"{name}: {len(files)}" for name, files in classes.items() if len(files) < MIN_IMAGES]
    if small:
        more = f" and {len(small) - 3} more" if len(small) > 3 else ""
        raise InvalidInputError(
            f"{images}: {len(small)} of {len(classes)} class folders hold fewer than {MIN_IMAGES} "
            f"PNG, JPEG or WebP images ({', '.join(small[:3])}{more}); training, gate, both "
            "galleries and queries need some of each: add images, or move these folders away",
        )
    return classes


def split_files(files: Sequence[Path], seed: int) -> Iterator[tuple[str, list[Path]]]:
    """Deal the files of one class out to PARTS, shuffled by seed.

    Every part gets at least one, and "eval", which is halved into calibration and gate, at least
    three, or four where there are 16.
    """
    least = dict.fromkeys(PARTS, 1) | {"eval": 4 if len(files) >= 16 else 3}
    shuffled = random.Random(seed).sample(list(files), len(files))  # noqa: S311 - no secret
    ends = [0]
    share = 0.0
    for part, part_share in PARTS.items():
        share += part_share
        ends.append(max(ends[-1] + least[part], round(share * len(shuffled))))
    for part, start, end in zip(PARTS, ends, ends[1:], strict=False):
        yield part, shuffled[start:end]


def prepare_images(into: Path, images: Path | None, *, seed: int, limit: int | None) -> ImageSplit:
    """Copy images (None: the digits) to INTO/PART/CLASS/NAME.

    A file that Pillow cannot read is refused by name. The images given are only read.
    """
    shutil.rmtree(into, ignore_errors=True)
    source = images
    if source is None:
        source = into / "all"
        write_digits(source)
    classes = classes_of(source, limit)
    sides: list[int] = []
    trained: dict[str, int] = {}
    for name, files in classes.items():
        for part, chosen in split_files(files, seed):
            if part == "train":
                trained[name] = len(chosen)
            target = into / part / name
            target.mkdir(parents=True)
            for file in chosen:
                sides.append(check_image(file))
                shutil.copyfile(file, target / file.name)
    new = list(trained)
    old = new[: len(new) // 2]
    return ImageSplit(
        old,
        new,
        sum(trained[name] for name in old),
        sum(trained.values()),
        choose_image_size(sides),
    )


def choose_image_size(sides: Sequence[int]) -> int:
    """The models' input for pictures of which half are no smaller."""
    middle = sorted(sides)[len(sides) // 2]
    return max((size for size in SIZES if size <= middle), default=SIZES[0])


def check_image(path: Path) -> int:
    """The shorter side in pixels. Raises InvalidInputError unless Pillow reads all of it."""
    try:
        with Image.open(path, formats=("PNG", "JPEG", "WEBP")) as image:
            image.load()
            return min(image.size)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InvalidInputError(
            f"{path} is no image that can be read ({error}); remove it"
        ) from error
