"""Published data sets in the folder layouts of their makers: what is read, and how it is tested.

Nothing is written here. `nobackfill.research.images.link_published` links the images as class
folders `train` and `test`, as all comparisons have them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from nobackfill.class_folders import ImageListing, list_images
from nobackfill.errors import InvalidInputError
from nobackfill.training.protocols.landmarks import image_path
from nobackfill.training.protocols.persons import draw_per_class, read_person_images
from nobackfill.training.protocols.protocol import first_existing_file, read_table

# The keys of `PublishedSet.part_listings`, and the folders of their links. SIDE is the `train` of a
# folder of its own, because whole models are trained on it, too (FCT Tables 9 and 14).
TRAIN, TEST, SIDE = "train", "test", "side/train"


@dataclass(frozen=True)
class PublishedSet:
    """Where a data set has its images below the folder of --images, and how it is tested.

    Attributes:
        expected_layout: the files and folders that are expected there, for error messages.
        part_listings: lists the images of `train`, of `test` if they lie in class folders, and of
            SIDE, on which SimCLR learns if that is another data set.
        protocol_folders: the folder of each published test protocol; the first must be there.
        requires_all_classes: the set can be had whole, so fewer classes are refused; false: the
            classes of the models keep their shares of those that are there.
    """

    expected_layout: str
    part_listings: Mapping[str, Callable[[Path], ImageListing]]
    protocol_folders: Mapping[str, str] = field(default_factory=dict)
    requires_all_classes: bool = True


def list_class_folders(part: str, root: Path) -> ImageListing:
    """List the class folders of ROOT/PART.

    Raises:
        ConfigurationError: the folder cannot be read.
        InvalidInputError: it has no class folder, or an empty one.
        PermissionError: this user may not list it.
    """
    return list_images(root / part)


def list_fifty_images_per_subject(root: Path) -> ImageListing:
    """List 50 images of each subject of ROOT/test, VGGFace2's test set (fct.txt section 4.2).

    They are the same at every call.

    Raises:
        ConfigurationError: the folder cannot be read.
        InvalidInputError: there is no class folder, or a subject has fewer than 50 images.
        PermissionError: this user may not list it.
    """
    listing = list_images(root / "test")
    return listing.select(draw_per_class(listing))


def list_market1501_persons(root: Path) -> ImageListing:
    """List ROOT/bounding_box_train of Market-1501, a class for each person.

    Raises:
        NotFoundError: the folder does not exist.
        InvalidInputError: it has no images, or one with another name than Market-1501's.
        PermissionError: this user may not list it.
    """
    folder = root / "bounding_box_train"
    people = read_person_images(folder)
    numbers, labels = np.unique(people.person_ids, return_inverse=True)
    names = tuple(f"{number:04d}" for number in numbers.tolist())
    paths = tuple(path.name for path in people.paths)
    return ImageListing(folder, names, paths, np.asarray(labels, np.int64))


def list_clean_landmarks(root: Path) -> ImageListing:
    """List the images of Google Landmarks v2's train_clean.csv, a class for each landmark.

    The file has the columns landmark_id and images. The images lie in ROOT/train by the first three
    characters of their ids; none is opened.

    Raises:
        NotFoundError: the file does not exist.
        InvalidInputError: it is no UTF-8 text, cannot be read, lacks a column, has a field longer
            than 131,072 characters, a landmark's number that is none, or an id of fewer than three
            characters.
    """
    path = first_existing_file(root / "train_clean.csv", root / "train" / "train_clean.csv")
    names: list[str] = []
    paths: list[str] = []
    labels: list[int] = []
    for row in read_table(path, ("landmark_id", "images")):
        if not row["landmark_id"].isdecimal():
            raise InvalidInputError(
                f"{path}: expected a number as landmark_id, got {row['landmark_id']!r}; download "
                "the file again"
            )
        ids = row["images"].split()
        paths += [image_path(image) for image in ids]
        labels += [len(names)] * len(ids)
        # With equal lengths, names have the order of the numbers.
        names.append(f"{int(row['landmark_id']):06d}")
    return ImageListing(root / "train", tuple(names), tuple(paths), np.array(labels, np.int64))


_TRAIN = partial(list_class_folders, "train")
IMAGENET = PublishedSet(
    "train/SYNSET/*.JPEG and val/SYNSET/*.JPEG, 1,000 synsets",
    {TRAIN: _TRAIN, TEST: partial(list_class_folders, "val")},
)
PLACES365 = PublishedSet(
    "train/CLASS/*.jpg and val/CLASS/*.jpg, 365 classes, and imagenet/train/SYNSET/*.JPEG, on "
    "which SimCLR learns (a link will do)",
    {
        TRAIN: _TRAIN,
        TEST: partial(list_class_folders, "val"),
        SIDE: partial(list_class_folders, "imagenet/train"),
    },
)
VGGFACE2 = PublishedSet(
    "train/SUBJECT/*.jpg, 8,631 subjects, and test/SUBJECT/*.jpg, 50 or more images each",
    {TRAIN: _TRAIN, TEST: list_fifty_images_per_subject},
)
GLDV2 = PublishedSet(
    "train_clean.csv, train/0/1/2/012….jpg, index/ and test/ as for evaluate.py --protocol gldv2, "
    "and for two more test sets roxford5k/ and rparis6k/",
    {TRAIN: list_clean_landmarks},
    {"gldv2": ".", "roxford5k": "roxford5k", "rparis6k": "rparis6k"},
)
_FACES = (
    "train/PERSON/*.jpg ({}), and IJB-C's meta/ and loose_crop/ as for evaluate.py --protocol ijbc"
)
IJBC = PublishedSet(
    _FACES.format("IMDB-Face, cropped"), {TRAIN: _TRAIN}, {"ijbc": "."}, requires_all_classes=False
)
MS1MV3 = PublishedSet(_FACES.format("MS1Mv3, 93,431 people"), {TRAIN: _TRAIN}, {"ijbc": "."})
MARKET1501 = PublishedSet(
    "bounding_box_train/, query/ and bounding_box_test/ with *.jpg",
    {TRAIN: list_market1501_persons},
    {"market1501": "."},
)
