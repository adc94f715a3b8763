"""The interface of protocols, and readers of their files.

A `Protocol` has images to embed, and a function that computes figures from their vectors. Errors
name the file, the line, and what was expected.
"""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nobackfill.class_folders import ImageListing
from nobackfill.errors import InvalidInputError, NotFoundError, join_few
from nobackfill.metrics.distances import Metric
from nobackfill.metrics.ranking import Ranking, Relevance, rank
from nobackfill.vectors import Vectors


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number, from 1, and the text of each line that is not blank.

    The file is read whole, at the first line. A line is ended as by `str.splitlines`; the number
    counts blank lines, too.

    Raises:
        NotFoundError: the file does not exist.
        InvalidInputError: it is no UTF-8 text, or cannot be read, such as a folder.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NotFoundError(
            f"no protocol file {path}; correct --root, or download the data set's files there"
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidInputError(
            f"the protocol file {path}: expected UTF-8 text, got other bytes; download it again"
        ) from error
    except OSError as error:
        raise unreadable_file_error(path, error) from error
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield number, line


def unreadable_file_error(path: Path, error: OSError) -> InvalidInputError:
    """Return, without raising it, the error for a file of a protocol that exists but cannot be
    read.
    """
    return InvalidInputError(
        f"{path}: this file of the protocol cannot be read ({error.strerror}); correct its name or "
        "permissions, or download the data set again"
    )


def first_existing_file(*paths: Path) -> Path:
    """Return the first path that is a file, else the first path, of which there is at least one.

    Links count as their targets.
    """
    return next((path for path in paths if path.is_file()), paths[0])


def read_words(path: Path, count: int) -> Iterator[list[str]]:
    """Yield the words of each line that is not blank, separated by spaces or tabs.

    A file without lines yields nothing. A faulty line is noticed when it is reached.

    Raises:
        NotFoundError: the file does not exist.
        InvalidInputError: it is no UTF-8 text, or cannot be read; or a line has not `count` words,
            and the message names the line.
    """
    for number, line in read_lines(path):
        columns = line.split()
        if len(columns) != count:
            raise InvalidInputError(
                f"{path} line {number}: expected {count} words, separated by spaces, got "
                f"{len(columns)}; download the file again"
            )
        yield columns


def read_table(path: Path, columns: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield the rows of a CSV file with a header, as texts by column.

    Only the given columns are returned. The header's letter case does not matter. A table without
    rows yields nothing. Values are not stripped, and blank lines are left out. If the header
    repeats a column, its last value counts. A short row is noticed when it is reached; cells beyond
    the header are ignored.

    Raises:
        NotFoundError: the file does not exist.
        InvalidInputError: it is no UTF-8 text, or cannot be read; the header lacks a column, a row
            is too short, or a field is longer than 131,072 characters; an empty file has no header.
    """
    try:
        yield from _rows(csv.DictReader(line for _, line in read_lines(path)), path, columns)
    except csv.Error as error:
        raise InvalidInputError(
            f"{path}: expected a table of comma-separated values ({error}); download the file again"
        ) from error


def _rows(
    reader: "csv.DictReader[str]", path: Path, columns: Sequence[str]
) -> Iterator[dict[str, str]]:
    lower = {column.lower(): column for column in columns}
    reader.fieldnames = [lower.get(name.strip().lower(), name) for name in reader.fieldnames or ()]
    missing = [name for name in columns if name not in reader.fieldnames]
    if missing:
        raise InvalidInputError(
            f"{path}: expected a header with the columns {', '.join(columns)}, got "
            f"{join_few(reader.fieldnames) or 'an empty file'}; download the file again"
        )
    for number, row in enumerate(reader, start=2):
        if any(row[name] is None for name in columns):
            raise InvalidInputError(
                f"{path} row {number}: expected values of {', '.join(columns)}, got too few; "
                "download the file again"
            )
        yield {name: row[name] for name in columns}


def parse_integer(text: str, path: Path) -> int:
    """Parse a whole number that was read from the file `path`, which is not opened here.

    A sign, spaces around it and underscores between digits are allowed.

    Raises:
        InvalidInputError: the text is no whole number of 64 bits; the message names the file.
    """
    try:
        return int(np.int64(int(text)))
    except (ValueError, OverflowError) as error:
        raise InvalidInputError(
            f"{path}: expected a whole number of 64 bits, got {text[:80]!r}; download the file "
            "again"
        ) from error


# Shares 0..1 by name.
Figures = Mapping[str, float]


@dataclass(frozen=True)
class Protocol:
    """The images of a protocol, and `measure`, a function of their vectors.

    Its arguments are vectors of the queries [q,dim] and of the gallery [n,dim], in listing order,
    and the metric. Queries and gallery may be the same listing.

    Attributes:
        queries, gallery: the images.
        measure: the function.
        gallery_classes: the person or class of each gallery image, int64 [n]; None: the protocol's
            files do not tell it.
    """

    queries: ImageListing
    gallery: ImageListing
    measure: Callable[[Vectors, Vectors, Metric], Figures]
    gallery_classes: NDArray[np.int64] | None = None


def list_protocol_images(root: Path, paths: Sequence[str]) -> ImageListing:
    """List images below `root`, in this order, as one class; no file is opened.

    Without paths the listing is empty. Paths may repeat.

    Raises:
        NotFoundError: an image is missing.
        InvalidInputError: no file can have the name of an image, or this user may not look into its
            folder.
    """
    try:
        missing = [path for path in paths if not (root / path).is_file()]
    except OSError as error:
        raise unreadable_file_error(Path(str(error.filename)[:300]), error) from error
    if missing:
        raise NotFoundError(
            f"{len(missing)} of the protocol's {len(paths)} images are missing, the first is "
            f"{root / missing[0]}; correct --root, or download the images"
        )
    return ImageListing(root, (root.name,), tuple(paths), np.zeros(len(paths), np.int64))


def check_answerable(relevance: Relevance, root: Path) -> None:
    """Check that at least one query of a protocol has an answer; its figures are means over these.

    Raises:
        InvalidInputError: no query has a relevant image that is not ignored.
    """
    pairs = zip(relevance.relevant, relevance.ignored, strict=True)
    if not any(len(np.setdiff1d(relevant, ignored)) for relevant, ignored in pairs):
        raise InvalidInputError(
            f"{root}: expected an image in the gallery that a query should find, found none for "
            f"any of {len(relevance.relevant)} queries; download all files of one version again"
        )


def ranking_protocol(
    queries: ImageListing,
    gallery: ImageListing,
    relevance: Relevance,
    compute_figures: Callable[[Ranking], Figures],
    classes: NDArray[np.int64] | None = None,
) -> Protocol:
    """Make a protocol whose figures depend on one ranking of the gallery per query.

    The figures raise ValueError if vectors do not fit the relevance, are not finite, or are zero
    with cosine, and IndexError if a position of the relevance lies outside the gallery. A gallery
    that is larger than the relevance expects is not noticed. A query without relevant images
    reaches `compute_figures` without a rank.

    Args:
        queries, gallery: the images.
        relevance: what each query should find, by positions in `gallery`.
        compute_figures: computes shares 0 to 1 by name from the ranking.
        classes: the person or class of each gallery image, int64 [n]; None: unknown.

    Raises:
        InvalidInputError: no query has a relevant image.
    """
    check_answerable(relevance, gallery.root)

    def measure(q: Vectors, g: Vectors, metric: Metric) -> Figures:
        return compute_figures(rank(q, g, relevance, metric))

    return Protocol(queries, gallery, measure, classes)
