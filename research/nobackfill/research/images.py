"""The images of a comparison, as class folders: train and test, the development split, and copies
that are divided, mislabelled or shifted.

Copies are links to the original images. Every folder is made under another name and then renamed,
so a folder that exists is complete.

The development split serves to select hyper-parameters, weights and defaults, and uses nothing that
the tables report. A table tests images that no model of its seeds was trained on, and classes that
no model knows. The development split consists of the tables' training images of known classes,
divided again, with the classes in another order for each seed. Its seeds differ from the tables'.

Images of another domain are the comparison's own test images, shifted, so that no second data set
is needed. (FCT appendix B uses real ones: ImageNet's models on Places.) Classes and pairs stay.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter, ImageOps

from nobackfill.class_folders import ImageListing, hash_file, list_images
from nobackfill.durable import make_dir, write_file
from nobackfill.errors import ConfigurationError, InvalidInputError, NotFoundError
from nobackfill.research.presets import Preset, Split
from nobackfill.training.data.allocations import allocate
from nobackfill.training.data.folders import hold_out


def write_digits(folder: Path) -> None:
    """Write scikit-learn's 1,797 scanned digits (8 x 8, 17 greys) as FOLDER/DIGIT/NUMBER.png.

    The 13 writers of its test set are not labelled, so no partition can separate writers.
    """
    if folder.is_dir():
        return
    # Imported here: it takes seconds.
    from sklearn.datasets import load_digits

    digits = load_digits()
    whole = begin(folder)
    for number, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = whole / str(digit) / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * (255 / 16)).astype(np.uint8)).save(path)
    whole.rename(folder)


def train_and_test(images: Path, into: Path, share: float | None, seed: int) -> None:
    """Make INTO/train and INTO/test; `share` of each class's images, drawn by the seed, is test.

    Without a share, IMAGES must hold `train` and `test`. Raises NotFoundError if it does not.
    """
    listings = _listed(images, share)
    if share is not None:
        (whole,) = listings
        listings = [whole.select(rows) for rows in hold_out(whole, share, seed)]
    for part, listing in zip(_PARTS, listings, strict=True):
        link(listing, (f"{name}" for name in _class_of(listing)), into / part)


_PARTS = ("train", "test")


def _listed(images: Path, share: float | None) -> list[ImageListing]:
    """List all images; without a share, those of `train` and of `test`."""
    if share is not None:
        return [list_images(images)]
    for part in _PARTS:
        if not (images / part).is_dir():
            raise NotFoundError(f"expected folders train and test in {images}")
    return [list_images(images / part) for part in _PARTS]


def require_same_images(images: Path, share: float | None, root: Path) -> None:
    """Raise ConfigurationError if ROOT belongs to other images than those of IMAGES.

    Its links and results would otherwise be used for them. ROOT/images.json identifies the images;
    older versions wrote none, and then any images are accepted. Other errors as `train_and_test`.
    """
    note = root / "images.json"
    told = json.dumps([_identity(listing) for listing in _listed(images, share)], indent=1)
    if not note.is_file():
        make_dir(root)
        write_file(note, told.encode())
    elif note.read_bytes() != told.encode():
        raise ConfigurationError(
            f"{root} holds a comparison of other images than those of {images} (their names, "
            f"lengths or contents are not those of {note}); choose another --out, or remove {root}"
        )


def _identity(listing: ImageListing) -> dict[str, int | str]:
    """Identify images independently of their folder: all names and lengths, and one content per
    class, because small images of equal length are common.

    Raises InvalidInputError for a missing file.
    """
    known = hashlib.sha256()
    before = -1
    for path, label in zip(listing.paths, listing.labels.tolist(), strict=True):
        file = listing.root / path
        content = hash_file(file) if label != before else ""
        before = label
        try:
            line = f"{path}\0{file.stat().st_size}\0{content}\n"
        except OSError as error:
            raise InvalidInputError(f"{file}: cannot be read ({error.strerror})") from error
        known.update(line.encode("utf-8", "surrogateescape"))
    return {
        "classes": len(listing.class_names),
        "images": len(listing),
        "sha256": known.hexdigest(),
    }


def allocated(train: Path, name: str, into: Path, seed: int) -> None:
    """Make INTO/old and INTO/new by UniBCT's allocation `name`."""
    listing = list_images(train)
    allocation = allocate(name, listing.labels, seed=seed)
    for part, rows in (("old", allocation.old), ("new", allocation.new)):
        chosen = listing.select(rows)
        link(chosen, _class_of(chosen), into / part)


def with_label_noise(train: Path, into: Path, share: float, seed: int) -> None:
    """Make a copy of TRAIN in which `share` of the images lie in a wrong class, drawn uniformly."""
    listing = list_images(train)
    rng = np.random.default_rng(seed)
    wrong = rng.permutation(len(listing))[: round(share * len(listing))]
    labels = listing.labels.copy()
    classes = len(listing.class_names)
    # A shift by 1 to classes - 1 never gives the true class.
    labels[wrong] = (labels[wrong] + rng.integers(1, classes, len(wrong))) % classes
    link(listing, [listing.class_names[label] for label in labels], into)


def later_classes(images: Path, into: Path, first: int) -> None:
    """Make a copy of IMAGES without its first `first` classes."""
    listing = list_images(images)
    chosen = listing.select(np.flatnonzero(listing.labels >= first))
    link(chosen, _class_of(chosen), into)


def link(listing: ImageListing, class_names: Iterable[str], into: Path) -> None:
    """Make the folder INTO with a link to each image below its class's name."""
    if into.is_dir():
        return
    whole = begin(into)
    for path, class_name in zip(listing.paths, class_names, strict=True):
        target = whole / class_name / f"{path.replace('/', '__')}"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to((listing.root / path).resolve())
    whole.rename(into)


def _class_of(listing: ImageListing) -> list[str]:
    return [listing.class_names[label] for label in listing.labels]


def begin(folder: Path) -> Path:
    """Make an empty folder next to FOLDER, to be renamed to it when complete."""
    whole = folder.with_name(f"{folder.name}.part")
    if whole.exists():
        shutil.rmtree(whole)
    whole.mkdir(parents=True)
    return whole


def check_classes(images: Path, needed: int) -> None:
    """Raise InvalidInputError if there are fewer classes than a preset needs."""
    found = len(list_images(images).class_names)
    if found < needed:
        raise InvalidInputError(f"{images}: expected {needed} class folders, got {found}")


# Tables use seeds from here on. Lower seeds serve selection: methods were developed on 0 to 9.
TABLE_SEEDS = 1000
# Seed of the tables' test images if the data has no test folder: one partition for all seeds.
TABLE_PARTITION = 1000
# Share of the tables' training images that the development split tests.
TEST_SHARE = 0.3


def seeds_of(preset: Preset, count: int) -> range:
    """Return `count` seeds of a table, or of its development split."""
    return range(count) if preset.development else range(TABLE_SEEDS, TABLE_SEEDS + count)


def development_of(preset: Preset) -> Preset:
    """Return the comparison for selecting the options of `preset`; rows and configurations stay."""
    # Further classes are the tables' unseen ones.
    known = min(split.new for split in preset.splits)
    unseen = max(2, known // 5)
    new = known - unseen
    half = known // 2
    splits = (
        Split("main", half, known, 0, known, max(2, known // 4), half),
        Split("unseen", (new + 1) // 2, new, new, known),
    )
    return replace(preset, splits=splits, development=True)


def development_images(train: Path, into: Path, classes: int, seed: int) -> None:
    """Make INTO/train and INTO/test from the first `classes` classes of TRAIN.

    TRAIN holds a table's training images. Class names start with their place in an order drawn by
    `seed`, so that each seed has other old, new and unseen classes.
    """
    listing = list_images(train, classes)
    order = np.random.default_rng(seed).permutation(classes)
    names = [f"{order[label]:04d}-{name}" for label, name in enumerate(listing.class_names)]
    for part, rows in zip(("train", "test"), hold_out(listing, TEST_SHARE, seed), strict=True):
        chosen = listing.select(rows)
        link(chosen, [names[label] for label in chosen.labels], into / part)


def known_names(classes: NDArray[np.str_]) -> NDArray[np.str_]:
    """Return the class names of `development_images` without their place, equal for all seeds."""
    return np.array([name.partition("-")[2] for name in classes.tolist()])


def place_images(preset: Preset, source: Path, root: Path, seed: int) -> Path:
    """Return the folder below ROOT with a seed's `train` and `test`; make it first if needed.

    Errors are those of `train_and_test`.
    """
    table = root / f"data-{TABLE_PARTITION}"
    train_and_test(source, table, preset.test_share, TABLE_PARTITION)
    if not preset.development:
        return table
    own = root / f"data-{seed}"
    development_images(table / "train", own, max(split.new for split in preset.splits), seed)
    return own


def blurred(image: Image.Image) -> Image.Image:
    """Average each pixel over its neighbourhood: 3 x 3 up to 32 pixels, wider in larger images."""
    return image.filter(ImageFilter.BoxBlur(max(1, image.width // 32)))


SHIFTS: Mapping[str, Callable[[Image.Image], Image.Image]] = {
    "blurred": blurred,
    "negative": ImageOps.invert,
}


def write_foreign(test: Path, into: Path) -> None:
    """Write the images of TEST as PNG in the same class folders, shifted as INTO's name says."""
    shift, listing = SHIFTS[into.name], list_images(test)
    whole = begin(into)
    for path in listing.paths:
        target = (whole / path).with_suffix(".png")
        target.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(test / path) as image:
            shift(image.convert("RGB")).save(target)
    whole.rename(into)
