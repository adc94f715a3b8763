"""The images of a comparison, as class folders: train and test, the development split, and copies
that are divided, mislabelled or shifted.

Copies are links to the original images. Every folder is made under another name and then renamed,
so a folder that exists is complete.

The development split serves to select hyper-parameters, weights and defaults, and uses nothing that
the tables report. A table tests images that no model of its seeds was trained on, and classes that
no model knows. The development split consists of the tables' training images of known classes,
divided again, with the classes in another order for each seed. Its seeds differ from the tables'.

Images of another domain are the comparison's own test images, shifted, so that no second data set
is needed. Classes and pairs stay. (FCT appendix B tests ImageNet's models on Places: that is
`compare.py --data places365 --methods foreign`.)
"""

import hashlib
import json
import shutil
import sys
import tempfile
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
from nobackfill.research.published import TRAIN, PublishedSet
from nobackfill.training.data.allocations import allocate_images
from nobackfill.training.data.folders import hold_out
from nobackfill.training.protocols.evaluation import protocol_named


def write_digits(folder: Path) -> None:
    """Write scikit-learn's 1,797 scanned digits (8 x 8, 17 greys) as FOLDER/DIGIT/NUMBER.png.

    An existing folder stays as it is. The 13 writers of the data set are not labelled, so no
    partition can separate writers. The folder appears when it is complete.

    Raises:
        OSError: the folder cannot be written; FOLDER.part may stay, and the next call removes it.
    """
    if folder.is_dir():
        return
    # Imported here: it takes seconds.
    from sklearn.datasets import load_digits

    digits = load_digits()
    incomplete = make_partial_folder(folder)
    for number, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = incomplete / str(digit) / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * (255 / 16)).astype(np.uint8)).save(path)
    incomplete.rename(folder)


def link_train_and_test(images: Path, into: Path, share: float | None, seed: int) -> None:
    """Link images as INTO/train/CLASS and INTO/test/CLASS; existing folders stay as they are.

    The number of test images of a class is rounded down: a small class may have none. Existing
    folders stay also for another share or seed.

    Args:
        images: a folder of class folders; without a share, one with `train` and `test` in it.
        into: the folder.
        share: the share of each class's images that is test, 0 to 1; other numbers are not refused.
            None: IMAGES is divided already.
        seed: chooses the test images, any whole number; a seed gives the same division again.

    Raises:
        NotFoundError: without a share, IMAGES lacks `train` or `test`.
        ConfigurationError: IMAGES cannot be read.
        InvalidInputError: there is no class folder, or a class is empty.
        OSError: INTO cannot be written.
        PermissionError: this user may not list IMAGES.
    """
    listings = _listed(images, share)
    if share is not None:
        (listing,) = listings
        listings = [listing.select(rows) for rows in hold_out(listing, share, seed)]
    for part, listing in zip(_PARTS, listings, strict=True):
        link_images(listing, into / part)


_PARTS = ("train", "test")


def _listed(images: Path, share: float | None) -> list[ImageListing]:
    """List all images; without a share, those of `train` and of `test`."""
    if share is not None:
        return [list_images(images)]
    for part in _PARTS:
        if not (images / part).is_dir():
            raise NotFoundError(
                f"--images {images}: expected the folders train and test in it, {part} is missing"
            )
    return [list_images(images / part) for part in _PARTS]


def require_same_images(images: Path, share: float | None, root: Path) -> None:
    """Check that ROOT belongs to the images of IMAGES, or is new.

    Its links and results would otherwise be used for other images. ROOT/images.json identifies
    them, by names, lengths and the content of one image of each class. Without this file, as in a
    new folder and in those of older versions, any images are accepted, and it is written. A change
    of another image that keeps its length is not noticed.

    Args:
        images: the images, as in `link_train_and_test`.
        share: as in `link_train_and_test`; only whether it is None counts.
        root: the folder of the comparison, made if missing.

    Raises:
        ConfigurationError: ROOT belongs to other images, or IMAGES cannot be read.
        CannotWriteError: the file cannot be written.
        NotFoundError: without a share, IMAGES lacks `train` or `test`.
        InvalidInputError: there is no class folder, a class is empty, or an image cannot be read.
        OSError: ROOT/images.json cannot be read.
        PermissionError: this user may not list IMAGES.
    """
    _require_same(_listed(images, share), images, root)


def _require_same(listings: Iterable[ImageListing], images: Path, root: Path) -> None:
    note = root / "images.json"
    content = json.dumps([_identity(listing) for listing in listings], indent=1)
    if not note.is_file():
        make_dir(root)
        write_file(note, content.encode())
    elif note.read_bytes() != content.encode():
        raise ConfigurationError(
            f"{root} holds a comparison of other images than those of {images} (their names, "
            f"lengths or contents are not those of {note}); choose another --out, or remove {root}"
        )


def _identity(listing: ImageListing) -> dict[str, int | str]:
    """Identify images independently of their folder: all names and lengths, and one content per
    class, because small images of equal length are common.

    Raises InvalidInputError for a missing file.
    """
    content_digest = hashlib.sha256()
    before = -1
    for path, label in zip(listing.paths, listing.labels.tolist(), strict=True):
        file = listing.root / path
        content = hash_file(file) if label != before else ""
        before = label
        try:
            line = f"{path}\0{file.stat().st_size}\0{content}\n"
        except OSError as error:
            raise InvalidInputError(
                f"the image {file} cannot be read ({error.strerror}); restore it, and run again"
            ) from error
        content_digest.update(line.encode("utf-8", "surrogateescape"))
    return {
        "classes": len(listing.class_names),
        "images": len(listing),
        "sha256": content_digest.hexdigest(),
    }


# The link to the folder of --images, for protocols that read their own files.
PROTOCOLS = "protocols"


def read_published(data: PublishedSet, images: Path) -> dict[str, ImageListing]:
    """List the parts of a published data set, and check that its test protocols can be read.

    The metadata of each protocol is read, and all its images must exist. A protocol other than the
    first is left out, with a line on stderr, if its folder does not exist.

    Args:
        data: the set.
        images: the folder of its files.

    Returns:
        The images by part, a key of `PublishedSet.part_listings`.

    Raises:
        NotFoundError: the folder has another layout; the message names the expected one.
        PermissionError: this user may not list a folder.
    """
    try:
        parts = {name: read(images) for name, read in data.part_listings.items()}
        for protocol in available_protocols(data, images):
            with tempfile.TemporaryDirectory(prefix="nobackfill-protocol-") as scratch:
                protocol_named(protocol)(images / data.protocol_folders[protocol], Path(scratch))
    except (ConfigurationError, InvalidInputError, NotFoundError) as error:
        raise NotFoundError(
            f"--images {images}: expected {data.expected_layout} in it; {error}"
        ) from error
    for protocol in data.protocol_folders.keys() - set(available_protocols(data, images)):
        print(
            f"compare.py: {images / data.protocol_folders[protocol]} does not exist, so nothing is "
            f"measured by {protocol}",
            file=sys.stderr,
        )
    return parts


def available_protocols(data: PublishedSet, images: Path) -> list[str]:
    """Return the test protocols whose folder exists, and the first one in any case."""
    return [
        name
        for number, (name, folder) in enumerate(data.protocol_folders.items())
        if not number or (images / folder).is_dir()
    ]


def link_published(
    data: PublishedSet,
    images: Path,
    parts: Mapping[str, ImageListing],
    class_count: int,
    root: Path,
) -> Path:
    """Link the parts of a published data set as ROOT/published/PART/CLASS; return ROOT/published.

    Existing folders stay as they are. ROOT belongs to the images of its first call.

    Args:
        data: the set.
        images: the folder of its files, to which ROOT/published/protocols links.
        parts: its images, as of `read_published`.
        class_count: the number of classes that the models learn.
        root: the folder of the comparison.

    Raises:
        InvalidInputError: the training images have fewer classes, or an image is missing.
        ConfigurationError: ROOT belongs to other images.
        CannotWriteError, OSError: ROOT cannot be written.
    """
    found = len(parts[TRAIN].class_names)
    if found < class_count:
        raise InvalidInputError(
            f"--images {images}: expected {data.expected_layout} in it, and so {class_count} "
            f"classes to train on; got {found}. For a part of the set, compare its folder of class "
            "folders by --data"
        )
    _require_same(parts.values(), images, root)
    linked = root / "published"
    for name, listing in parts.items():
        link_images(listing, linked / name)
    if data.protocol_folders and not (linked / PROTOCOLS).is_dir():
        (linked / PROTOCOLS).unlink(missing_ok=True)
        (linked / PROTOCOLS).symlink_to(images.resolve())
    return linked


def link_allocation(train: Path, name: str, into: Path, seed: int) -> None:
    """Link the images of TRAIN as INTO/old and INTO/new by UniBCT's allocation `name`.

    Existing folders stay as they are, also for another name or seed.

    Args:
        train: the training images, as class folders.
        name: a name of ALLOCATIONS.
        into: the folder.
        seed: chooses the images, at least 0; a seed gives the same allocation again.

    Raises:
        ValueError: the seed is negative.
        ConfigurationError: the name is unknown, TRAIN cannot be read, there is a single class, or a
            class has one image.
        InvalidInputError: TRAIN has no class folder, or an empty one.
        OSError: INTO cannot be written.
        PermissionError: this user may not list TRAIN.
    """
    listing = list_images(train)
    allocation = allocate_images(name, listing.labels, seed=seed)
    for part, rows in (("old", allocation.old_rows), ("new", allocation.new_rows)):
        link_images(listing.select(rows), into / part)


def link_share(train: Path, into: Path, share: float, seed: int) -> None:
    """Link a share of each class's images of TRAIN below INTO; larger shares contain smaller ones.

    An existing folder stays as it is, also for another share or seed.

    Args:
        train: the training images, as class folders.
        into: the folder.
        share: above 0 and below 1. The number is rounded; at least one image of a class is linked,
            and one is not.
        seed: chooses the images, at least 0; a seed gives the same again.

    Raises:
        ValueError: the seed is negative.
        ConfigurationError: TRAIN cannot be read, or a class has one image.
        InvalidInputError: TRAIN has no class folder, or an empty one.
        OSError: INTO cannot be written.
        PermissionError: this user may not list TRAIN.
    """
    listing = list_images(train)
    # One seed permutes a class in one way, so every share is the beginning of one order.
    allocation = allocate_images("extended-data", listing.labels, share, seed)
    link_images(listing.select(allocation.old_rows), into)


def link_with_label_noise(train: Path, into: Path, share: float, seed: int) -> None:
    """Link the images of TRAIN below INTO, with `share` of them in a wrong class drawn uniformly.

    TRAIN has at least two classes. An existing folder stays as it is, also for another share or
    seed.

    Args:
        train: the training images, as class folders.
        into: the folder.
        share: the share of images with a wrong label, 0 to 1; the number is rounded.
        seed: chooses the images and their labels, at least 0; a seed gives the same again.

    Raises:
        ValueError: TRAIN has a single class, or the seed is negative.
        ConfigurationError: TRAIN cannot be read.
        InvalidInputError: TRAIN has no class folder, or an empty one.
        OSError: INTO cannot be written.
        PermissionError: this user may not list TRAIN.
    """
    listing = list_images(train)
    rng = np.random.default_rng(seed)
    wrong = rng.permutation(len(listing))[: round(share * len(listing))]
    labels = listing.labels.copy()
    classes = len(listing.class_names)
    # A shift by 1 to classes - 1 never gives the true class.
    labels[wrong] = (labels[wrong] + rng.integers(1, classes, len(wrong))) % classes
    link_images(replace(listing, labels=labels), into)


def link_later_classes(images: Path, into: Path, first_class: int) -> None:
    """Link the images of IMAGES below INTO, without its first `first_class` classes by name.

    An existing folder stays as it is, also for another `first_class`.

    Args:
        images: the images, as class folders.
        into: the folder.
        first_class: the number of classes to leave out; 0 or less leaves out none, and with all of
            them, or more, INTO is empty.

    Raises:
        ConfigurationError: IMAGES cannot be read.
        InvalidInputError: IMAGES has no class folder, or an empty one.
        OSError: INTO cannot be written.
        PermissionError: this user may not list IMAGES.
    """
    listing = list_images(images)
    link_images(listing.select(np.flatnonzero(listing.labels >= first_class)), into)


def link_images(listing: ImageListing, into: Path) -> None:
    """Make the folder INTO/CLASS with a symbolic link to each image; do nothing if INTO exists.

    Links are absolute. A path with folders becomes one name, with __ for each slash. INTO appears
    at once, when it is complete.

    Args:
        listing: the images.
        into: the folder.

    Raises:
        OSError: the folder cannot be written, or two images would have one name; INTO.part may
            stay.
    """
    if into.is_dir():
        return
    incomplete = make_partial_folder(into)
    for row, path in enumerate(listing.paths):
        target = incomplete / listing.class_of(row) / path.replace("/", "__")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to((listing.root / path).resolve())
    incomplete.rename(into)


def make_partial_folder(folder: Path) -> Path:
    """Make an empty folder FOLDER.part, which the caller renames to FOLDER when it is complete.

    A folder of this name that an earlier process left is removed. Two processes must not make one
    folder at once: each would remove the other's.

    Args:
        folder: the folder; its parents are made.

    Returns:
        FOLDER.part.

    Raises:
        OSError: the folder cannot be made, or an earlier one cannot be removed.
    """
    incomplete = folder.with_name(f"{folder.name}.part")
    if incomplete.exists():
        shutil.rmtree(incomplete)
    incomplete.mkdir(parents=True)
    return incomplete


def check_classes(images: Path, min_class_count: int) -> None:
    """Check that a folder has the classes of a preset.

    Args:
        images: the folder of class folders.
        min_class_count: the number of classes that the preset needs.

    Raises:
        InvalidInputError: there are fewer than `min_class_count` class folders, or one is empty.
        ConfigurationError: the folder cannot be read.
        PermissionError: this user may not list the folder.
    """
    count = len(list_images(images).class_names)
    if count < min_class_count:
        raise InvalidInputError(
            f"{images}: expected at least {min_class_count} class folders for this comparison, got "
            f"{count}; add folders"
        )


# Tables use seeds from here on. Lower seeds serve selection: methods were developed on 0 to 9.
TABLE_SEEDS = 1000
# Seed of the tables' test images if the data has no test folder: one partition for all seeds.
TABLE_PARTITION = 1000
# Share of the tables' training images that the development split tests.
TEST_SHARE = 0.3


def comparison_seeds(preset: Preset, count: int) -> range:
    """Return the seeds of a table (1000, 1001, …), or of its development split (0, 1, …).

    Args:
        preset: the comparison.
        count: the number of seeds; 0 gives none.
    """
    return range(count) if preset.is_development else range(TABLE_SEEDS, TABLE_SEEDS + count)


def development_preset(preset: Preset) -> Preset:
    """Return the comparison for selecting the options of `preset`; rows and configurations stay.

    Its classes are those that every model of the preset knows, divided again. Published test
    protocols are not used.

    Results get a title of their own. A preset with few classes gives splits that cannot be trained;
    this is not checked.
    """
    # Further classes are the tables' unseen ones.
    known = min(split.new_class_count for split in preset.splits)
    unseen = max(2, known // 5)
    new = known - unseen
    half = known // 2
    splits = (
        Split("main", half, known, 0, known, (max(2, known // 4), half)),
        Split("unseen", (new + 1) // 2, new, new, known),
    )
    published = preset.published_set and replace(preset.published_set, protocol_folders={})
    return replace(preset, splits=splits, is_development=True, published_set=published)


def link_development_images(train: Path, into: Path, class_count: int, seed: int) -> None:
    """Link images as INTO/train and INTO/test from the first `class_count` classes of TRAIN.

    TRAIN's images are divided again: 30 % of each class become test images. Class names start with
    their place in an order drawn by `seed`, so that each seed has other old, new and unseen
    classes. Existing folders stay as they are, also for another seed.

    The number of test images of a class is rounded down: a small class may have none.

    Args:
        train: a table's training images.
        into: the folder.
        class_count: the number of first classes to use, at least 1.
        seed: chooses the order of the classes and the test images, at least 0; a seed gives the
            same again.

    Raises:
        ValueError: the seed is negative.
        ConfigurationError: TRAIN cannot be read.
        InvalidInputError: TRAIN has fewer classes, or an empty one.
        OSError: INTO cannot be written.
        PermissionError: this user may not list TRAIN.
    """
    listing = list_images(train, class_count)
    order = np.random.default_rng(seed).permutation(class_count)
    names = (f"{order[label]:04d}-{name}" for label, name in enumerate(listing.class_names))
    renamed = replace(listing, class_names=tuple(names))
    for part, rows in zip(_PARTS, hold_out(listing, TEST_SHARE, seed), strict=True):
        link_images(renamed.select(rows), into / part)


def remove_name_places(classes: NDArray[np.str_]) -> NDArray[np.str_]:
    """Remove the place in front of class names, which `link_development_images` adds.

    "0003-cat" gives "cat".

    The results of all seeds are therefore equal. A name without a hyphen gives an empty one. No
    names give an empty array of float64.
    """
    return np.array([name.partition("-")[2] for name in classes.tolist()])


def prepare_seed_images(preset: Preset, source: Path, root: Path, seed: int) -> Path:
    """Return the folder below ROOT with a seed's `train` and `test`; make it first if needed.

    All seeds of a table share one folder. A development split has one for each seed. Folders that
    exist are not made again.

    Args:
        preset: the comparison.
        source: the images, as in `link_train_and_test`; of a published set those of
            `link_published`, which all seeds of a table use as they are.
        root: the folder of the comparison.
        seed: the seed of the place, at least 0.

    Raises:
        ValueError: the preset is a development split, and the seed is negative.
        NotFoundError: SOURCE lacks `train` or `test`, where the preset does not divide the images.
        ConfigurationError: SOURCE cannot be read.
        InvalidInputError: there is no class folder, there are too few, or a class is empty.
        OSError: ROOT cannot be written.
        PermissionError: this user may not list SOURCE.
    """
    table = source
    if preset.published_set is None:
        table = root / f"data-{TABLE_PARTITION}"
        link_train_and_test(source, table, preset.test_share, TABLE_PARTITION)
    if not preset.is_development:
        return table
    own = root / f"data-{seed}"
    link_development_images(
        table / "train", own, max(split.new_class_count for split in preset.splits), seed
    )
    return own


def blur_image(image: Image.Image) -> Image.Image:
    """Average each pixel over its neighbourhood: 3 x 3 in images below 64 pixels, then wider."""
    return image.filter(ImageFilter.BoxBlur(max(1, image.width // 32)))


SHIFTS: Mapping[str, Callable[[Image.Image], Image.Image]] = {
    "blurred": blur_image,
    "negative": ImageOps.invert,
}


def write_shifted_images(test: Path, into: Path) -> None:
    """Write the images of TEST as PNG below INTO, in the same class folders, blurred or negated.

    The name of INTO selects the change. INTO must not exist, which only the last step notices; an
    empty folder there is replaced. It appears when it is complete.

    An earlier INTO.part is removed; after an error, the new one stays. If names differ only in the
    suffix, the last image stays.

    Args:
        test: the images, as class folders.
        into: the folder; its name is a key of SHIFTS.

    Raises:
        KeyError: the name of INTO is no key of SHIFTS.
        ConfigurationError: TEST cannot be read.
        InvalidInputError: TEST has no class folder, or an empty one.
        OSError: an image cannot be decoded, or INTO cannot be written.
        PermissionError: this user may not list TEST.
    """
    shift, listing = SHIFTS[into.name], list_images(test)
    incomplete = make_partial_folder(into)
    for path in listing.paths:
        target = (incomplete / path).with_suffix(".png")
        target.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(test / path) as image:
            shift(image.convert("RGB")).save(target)
    incomplete.rename(into)
