"""A protocol as evaluate.py runs it, and the files of protocols.

A `Protocol` is images to embed, and figures of their vectors. Every refusal of a file names the
file, the line and what was expected.
"""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nobackfill.class_folders import Listing
from nobackfill.errors import InvalidInputError, NotFoundError, few
from nobackfill.metrics.distances import Metric
from nobackfill.metrics.ranking import Ranking, Relevance, rank
from nobackfill.vectors import Vectors


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank. Raises NotFoundError, InvalidInputError (not text)."""
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
    """The first that is there, else the first."""
    return next((path for path in paths if path.is_file()), paths[0])


def words(path: Path, count: int) -> Iterator[list[str]]:
    """The space-separated words of each line, `count` of them."""
    for number, line in lines(path):
        found = line.split()
        if len(found) != count:
            raise InvalidInputError(
                f"{path} line {number}: expected {count} words, got {len(found)}"
            )
        yield found


def table(path: Path, columns: Sequence[str]) -> Iterator[dict[str, str]]:
    """Rows of a CSV file with a header, as the named columns, in capitals or not; others are
    ignored.
    """
    reader = csv.DictReader(line for _, line in lines(path))
    lower = {column.lower(): column for column in columns}
    reader.fieldnames = [lower.get(name.strip().lower(), name) for name in reader.fieldnames or ()]
    missing = [name for name in columns if name not in reader.fieldnames]
    if missing:
        raise InvalidInputError(
            f"{path}: expected the columns {', '.join(columns)}, got {few(reader.fieldnames)}"
        )
    for number, row in enumerate(reader, start=2):
        if any(row[name] is None for name in columns):
            raise InvalidInputError(f"{path} row {number}: expected {', '.join(columns)}")
        yield {name: row[name] for name in columns}


def integer(text: str, path: Path) -> int:
    """`text` as a number. Raises InvalidInputError naming the file."""
    try:
        return int(text)
    except ValueError as error:
        raise InvalidInputError(f"{path}: expected a whole number, got {text!r}") from error


# By name, shares 0..1.
Figures = Mapping[str, float]


@dataclass(frozen=True)
class Protocol:
    """`figures`: of vectors of the queries [q,dim] and of the gallery [n,dim], in the order of the
    listings, and the metric that they are searched by. One listing may be both.
    """

    queries: Listing
    gallery: Listing
    figures: Callable[[Vectors, Vectors, Metric], Figures]


def images(root: Path, paths: Sequence[str]) -> Listing:
    """Images below `root`, in this order. Raises NotFoundError naming the first that is missing."""
    missing = [path for path in paths if not (root / path).is_file()]
    if missing:
        raise NotFoundError(
            f"{len(missing)} of the protocol's {len(paths)} images are missing, the first is "
            f"{root / missing[0]}"
        )
    return Listing(root, (root.name,), tuple(paths), np.zeros(len(paths), np.int64))


def ranked(
    queries: Listing,
    gallery: Listing,
    relevance: Relevance,
    figures: Callable[[Ranking], Figures],
) -> Protocol:
    """A protocol whose figures follow from one ranking of the gallery for each query."""
    return Protocol(queries, gallery, lambda q, g, metric: figures(rank(q, g, relevance, metric)))
