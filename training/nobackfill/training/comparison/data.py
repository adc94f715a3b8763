"""The images of a comparison, as folders of class folders: train, test, and divided or spoiled
copies.

Copies are links to the images where they lie. Every folder is made whole under another name and
then renamed, so a folder that exists is complete.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from nobackfill.class_folders import Listing, list_images
from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.training.data.allocations import allocate
from nobackfill.training.data.folders import hold_out


def write_digits(folder: Path) -> None:
    """scikit-learn's 1,797 scanned digits (8 x 8, 17 greys) as FOLDER/DIGIT/NUMBER.png.

    Its 13 test writers are not labelled, so that no partition can keep writers apart.
    """
    if folder.is_dir():
        return
    digits = load_digits()
    whole = begin(folder)
    for number, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = whole / str(digit) / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * (255 / 16)).astype(np.uint8)).save(path)
    whole.rename(folder)


def train_and_test(images: Path, into: Path, share: float | None, seed: int) -> None:
    """Make INTO/train and INTO/test: of each class `share` of the images, drawn by seed, are
    tested.

    With no share, IMAGES holds `train` and `test` itself. Raises NotFoundError where it does not.
    """
    if share is None:
        for part in ("train", "test"):
            if not (images / part).is_dir():
                raise NotFoundError(f"expected folders train and test in {images}")
        listings = [list_images(images / part) for part in ("train", "test")]
    else:
        whole = list_images(images)
        listings = [whole.select(rows) for rows in hold_out(whole, share, seed)]
    for part, listing in zip(("train", "test"), listings, strict=True):
        link(listing, (f"{name}" for name in _class_of(listing)), into / part)


def allocated(train: Path, name: str, into: Path, seed: int) -> None:
    """Make INTO/old and INTO/new by one of UniBCT's allocations, INTO named after it."""
    listing = list_images(train)
    allocation = allocate(name, listing.labels, seed=seed)
    for part, rows in (("old", allocation.old), ("new", allocation.new)):
        chosen = listing.select(rows)
        link(chosen, _class_of(chosen), into / part)


def with_label_noise(train: Path, into: Path, share: float, seed: int) -> None:
    """A copy of TRAIN in which `share` of the images lie in a wrong class, drawn evenly."""
    listing = list_images(train)
    rng = np.random.default_rng(seed)
    wrong = rng.permutation(len(listing))[: round(share * len(listing))]
    labels = listing.labels.copy()
    classes = len(listing.class_names)
    # A shift by 1 to classes - 1: never the true class.
    labels[wrong] = (labels[wrong] + rng.integers(1, classes, len(wrong))) % classes
    link(listing, [listing.class_names[label] for label in labels], into)


def later_classes(images: Path, into: Path, first: int) -> None:
    """A copy of IMAGES without its first `first` classes."""
    listing = list_images(images)
    chosen = listing.select(np.flatnonzero(listing.labels >= first))
    link(chosen, _class_of(chosen), into)


def link(listing: Listing, class_names: Iterable[str], into: Path) -> None:
    """Make the folder INTO with a link to each image below its class's name."""
    if into.is_dir():
        return
    whole = begin(into)
    for path, class_name in zip(listing.paths, class_names, strict=True):
        target = whole / class_name / f"{path.replace('/', '__')}"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to((listing.root / path).resolve())
    whole.rename(into)


def _class_of(listing: Listing) -> list[str]:
    return [listing.class_names[label] for label in listing.labels]


def begin(folder: Path) -> Path:
    """An empty folder beside FOLDER, to be renamed to it when it is whole."""
    whole = folder.with_name(f"{folder.name}.part")
    if whole.exists():
        shutil.rmtree(whole)
    whole.mkdir(parents=True)
    return whole


def check_classes(images: Path, needed: int) -> None:
    """Raise InvalidInputError where there are fewer classes than a preset asks for."""
    found = len(list_images(images).class_names)
    if found < needed:
        raise InvalidInputError(f"{images}: expected {needed} class folders, got {found}")
