"""The interface of protocols, and readers of their files.

A `Protocol` has images to embed, and a function that computes figures from their vectors. Errors
name the file, the line, and what was expected.
"""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nobackfill.class_folders import ImageListing
from nobackfill.errors import InvalidInputError, NotFoundError, join_few
from nobackfill.metrics.distances import Metric
from nobackfill.metrics.ranking import Ranking, Relevance, rank
from nobackfill.vectors import Vectors


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield numbered lines that are not blank. Raises NotFoundError, or InvalidInputError for bytes
    that are no text."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NotFoundError(f"no protocol file {path}") from error
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path}: expected text, got other bytes") from error
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield number, line


def either(*paths: Path) -> Path:
    """Return the first existing path, else the first one."""
    return next((path for path in paths if path.is_file()), paths[0])


def words(path: Path, count: int) -> Iterator[list[str]]:
    """Yield the space-separated words of each line. Raises InvalidInputError unless there are
    `count`."""
    for number, line in lines(path):
        found = line.split()
        if len(found) != count:
            raise InvalidInputError(
                f"{path} line {number}: expected {count} words, got {len(found)}"
            )
        yield found


def table(path: Path, columns: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield rows of a CSV file with a header as the given columns; case and other columns are
    ignored."""
    reader = csv.DictReader(line for _, line in lines(path))
    lower = {column.lower(): column for column in columns}
    reader.fieldnames = [lower.get(name.strip().lower(), name) for name in reader.fieldnames or ()]
    missing = [name for name in columns if name not in reader.fieldnames]
    if missing:
        raise InvalidInputError(
            f"{path}: expected the columns {', '.join(columns)}, got {join_few(reader.fieldnames)}"
        )
    for number, row in enumerate(reader, start=2):
        if any(row[name] is None for name in columns):
            raise InvalidInputError(f"{path} row {number}: expected {', '.join(columns)}")
        yield {name: row[name] for name in columns}


def integer(text: str, path: Path) -> int:
    """Parse an integer. Raises InvalidInputError, which names the file."""
    try:
        return int(text)
    except ValueError as error:
        raise InvalidInputError(f"{path}: expected a whole number, got {text!r}") from error


# Shares 0..1 by name.
Figures = Mapping[str, float]


@dataclass(frozen=True)
class Protocol:
    """The images of a protocol, and `figures`, a function of their vectors.

    Its arguments are vectors of the queries [q,dim] and of the gallery [n,dim], in listing order,
    and the metric. Queries and gallery may be the same listing.
    """

    queries: ImageListing
    gallery: ImageListing
    figures: Callable[[Vectors, Vectors, Metric], Figures]


def images(root: Path, paths: Sequence[str]) -> ImageListing:
    """List images below `root`, in this order. Raises NotFoundError for missing ones."""
    missing = [path for path in paths if not (root / path).is_file()]
    if missing:
        raise NotFoundError(
            f"{len(missing)} of the protocol's {len(paths)} images are missing, the first is "
            f"{root / missing[0]}"
        )
    return ImageListing(root, (root.name,), tuple(paths), np.zeros(len(paths), np.int64))


def ranked(
    queries: ImageListing,
    gallery: ImageListing,
    relevance: Relevance,
    figures: Callable[[Ranking], Figures],
) -> Protocol:
    """Make a protocol whose figures depend on one ranking of the gallery per query."""
    return Protocol(queries, gallery, lambda q, g, metric: figures(rank(q, g, relevance, metric)))
