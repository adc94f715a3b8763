"""From neighbours to hits: one ranking over all parts of a gallery, with calibrated scores."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nobackfill.gallery.reading import StoredItem
from nobackfill.gallery.search.index import Neighbours
from nobackfill.gallery.spec import Origin
from nobackfill.release.calibration import Scale, Scorer
from nobackfill.release.manifest import Manifest
from nobackfill.vectors import Vectors

# Items as a space shows them, in the order of the labels; None for those deleted meanwhile.
ItemsOf = Callable[[list[int], str], list[StoredItem | None]]


@dataclass(frozen=True, eq=False)
class PlanPart:
    """Vectors of one space, searched by queries of one space.

    `release` made the vectors. `origin` None: each hit has its item's own; direct and old-model
    hold for the part. `curves` turn distances into scores, by the origin of the vector. `scale`:
    where carried vectors stand among native ones; None: where their distances say.
    """

    space: str
    release: int
    query: Manifest
    origin: Origin | None
    curves: Mapping[Origin, Scorer]
    scale: Scale | None = None


class RankedHit(NamedTuple):
    """`release` made the vector that was compared; `score` is None without a calibration, and
    `beyond_calibration` where that saw no such distance."""

    item: StoredItem
    distance: float
    score: float | None
    release: int
    origin: Origin
    beyond_calibration: bool = False


@dataclass(frozen=True)
class SearchResult:
    """Hits of one query, nearest first, and what answered it."""

    hits: list[RankedHit]
    release: int
    space: str
    # What a feedback about it names, where somebody asks for that.
    request_id: str = ""


class Score(NamedTuple):
    """A calibrated probability, and whether it lies `beyond` the distances of the calibration."""

    value: float
    beyond: bool


def rank(
    parts: Sequence[PlanPart],
    found: Sequence[Neighbours],
    row: int,
    k: int,
    items: ItemsOf,
    *,
    exact: bool,
    by_score: bool = False,
) -> list[RankedHit]:
    """The `k` best hits of query `row`, `found` being each part's neighbours.

    One part: by distance. Several: by score, as distances of different spaces do not compare;
    where a score is missing (a direct search that was published without calibration), by distance,
    which the release then declares to compare. `by_score`: one part, too, whose vectors are of
    several origins: along its scale, if it has one. Always by what was computed; the hits show it
    rounded, score and all, unless `exact`.
    """
    # What is ranked, with what is shown.
    hits: list[tuple[RankedHit, RankedHit]] = []
    for part, neighbours in zip(parts, found, strict=True):
        hits += _hits(part, neighbours, row, k, items, exact=exact)
    scale = parts[0].scale
    if by_score and scale is not None:
        hits.sort(key=lambda pair: _along(scale, pair[0]))
    elif len(parts) > 1 or by_score:
        scored = all(hit.score is not None for hit, _ in hits)
        order = _by_score if scored else _by_distance
        hits.sort(key=lambda pair: order(pair[0]))
    return [shown for _, shown in hits[:k]]


def rounded(distances: Vectors) -> Vectors:
    """To three significant digits: enough to rank by and to draw a line at, too little to copy a
    stored vector exactly from its distances to some queries."""
    return np.array([float(f"{distance:.3g}") for distance in distances.tolist()], np.float32)


def _hits(
    part: PlanPart, neighbours: Neighbours, row: int, k: int, items: ItemsOf, *, exact: bool
) -> list[tuple[RankedHit, RankedHit]]:
    labels = neighbours.labels[row, :k].tolist()
    while labels and labels[-1] < 0:
        labels.pop()
    distances = neighbours.distances[row, : len(labels)]
    found = items(labels, part.space)
    origins = [part.origin or (item.origin if item else None) for item in found]

    def hits(distances: Vectors) -> list[RankedHit]:
        scores = scores_of(part, origins, distances)
        return [
            _hit(item, distance, score, part.release, origin)
            for item, origin, distance, score in zip(
                found, origins, distances.tolist(), scores, strict=True
            )
            if item is not None and origin is not None
        ]

    true = hits(distances)
    return list(zip(true, true if exact else hits(rounded(distances)), strict=True))


def _hit(
    item: StoredItem, distance: float, score: Score | None, release: int, origin: Origin
) -> RankedHit:
    if score is None:
        return RankedHit(item, distance, None, release, origin)
    return RankedHit(item, distance, score.value, release, origin, score.beyond)


def scores_of(
    part: PlanPart, origins: Sequence[Origin | None], distances: Vectors
) -> list[Score | None]:
    """Of each hit, None where its origin has no calibration."""
    kinds = set(origins)
    if len(kinds) == 1:
        curve = part.curves.get(origins[0]) if origins[0] else None
        return [None] * len(origins) if curve is None else _scores(curve, distances)
    result: list[Score | None] = [None] * len(origins)
    for origin in kinds:
        curve = part.curves.get(origin) if origin else None
        if curve is not None:
            for i, score in enumerate(_scores(curve, distances)):
                if origins[i] == origin:
                    result[i] = score
    return result


def _scores(curve: Scorer, distances: Vectors) -> list[Score | None]:
    values, beyond = curve.scores(distances).tolist(), curve.beyond(distances).tolist()
    return [Score(*one) for one in zip(values, beyond, strict=True)]


def _by_score(hit: RankedHit) -> tuple[float, float, int]:
    assert hit.score is not None
    return -hit.score, hit.distance, hit.item.label


def _along(scale: Scale, hit: RankedHit) -> tuple[float, float, int]:
    """As nobackfill.gallery.search.index ranks."""
    apart = float(scale(hit.distance)) if hit.origin == "upgraded" else hit.distance
    return apart, hit.distance, hit.item.label


def _by_distance(hit: RankedHit) -> tuple[float, int]:
    return hit.distance, hit.item.label
