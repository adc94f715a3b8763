"""Market-1501: who it is and which camera saw them are in the file's name.

`0002_c1s1_000451_03.jpg` is person 2 by camera 1. Person 0000 is a distractor, which no query asks
for; -1 is a bad detection and counts for nothing. A query's own person by the same camera counts
for nothing either.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.metrics.ranking import Ranking, Relevance
from nobackfill.metrics.retrieval import average_precision, cmc, mean
from nobackfill.training.protocols.protocol import Figures, Protocol, images, ranked

_NAME = re.compile(r"^(-1|\d{4})_c(\d)s\d_\d{6}_\d{2}\.jpg(\.jpg)?\Z")
_BAD = -1


@dataclass(frozen=True)
class Sightings:
    """Images of a folder, ordered by name: paths, persons and cameras."""

    paths: tuple[Path, ...]
    persons: NDArray[np.int64]
    cameras: NDArray[np.int64]


def read_sightings(folder: Path) -> Sightings:
    """`query`, `bounding_box_test` or `bounding_box_train`. Raises NotFoundError; InvalidInputError
    for a name of another form, or for no image."""
    if not folder.is_dir():
        raise NotFoundError(f"no folder {folder}; expected Market-1501's")
    paths = sorted(path for path in folder.iterdir() if path.suffix == ".jpg")
    if not paths:
        raise InvalidInputError(f"{folder}: expected images like 0002_c1s1_000451_03.jpg, got none")
    persons, cameras = [], []
    for path in paths:
        match = _NAME.match(path.name)
        if match is None:
            raise InvalidInputError(f"{path}: expected a name like 0002_c1s1_000451_03.jpg")
        persons.append(int(match[1]))
        cameras.append(int(match[2]))
    return Sightings(tuple(paths), np.array(persons), np.array(cameras))


def relevance(queries: Sightings, gallery: Sightings) -> Relevance:
    """The same person by another camera; bad detections and the same camera are ignored."""
    bad = gallery.persons == _BAD
    relevant, ignored = [], []
    for person, camera in zip(queries.persons, queries.cameras, strict=True):
        same = gallery.persons == person
        here = gallery.cameras == camera
        relevant.append(np.flatnonzero(same & ~here & ~bad))
        ignored.append(np.flatnonzero(bad | (same & here)))
    return Relevance(relevant, ignored)


def protocol(root: Path, _scratch: Path) -> Protocol:
    """Rank-1 and mAP of `query` in `bounding_box_test`."""
    queries, gallery = (read_sightings(root / part) for part in ("query", "bounding_box_test"))
    asked, searched = (
        images(sightings.paths[0].parent, [path.name for path in sightings.paths])
        for sightings in (queries, gallery)
    )
    return ranked(asked, searched, relevance(queries, gallery), _figures)


def _figures(ranking: Ranking) -> Figures:
    return {"rank-1": mean(cmc(ranking, 1)), "map": mean(average_precision(ranking))}
