"""Rank neighbours into hits: one list over all parts of a gallery, with calibrated scores."""

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

# Reads items by label and space, in the order of the labels; None for deleted ones.
ItemsOf = Callable[[list[int], str], list[StoredItem | None]]


@dataclass(frozen=True, eq=False)
class PlanPart:
    """Describe one space that a plan searches, and the queries that search it.

    Attributes:
        space: id of the space of the stored vectors.
        release: the release that made these vectors.
        query: manifest of the release that makes the queries.
        origin: origin of every hit, direct or old-model; None if each item has its own.
        curves: by origin of a vector, the calibration from distance to score.
        scale: how distances of migrated vectors compare with those of native ones; None if they
            compare as they are.
    """

    space: str
    release: int
    query: Manifest
    origin: Origin | None
    curves: Mapping[Origin, Scorer]
    scale: Scale | None = None


class RankedHit(NamedTuple):
    """Hold one hit.

    Attributes:
        item: the item.
        distance: its distance to the query.
        score: calibrated probability of a match, 0 to 1; None without a calibration.
        release: the release that made the vector.
        origin: how the vector was made.
        beyond_calibration: True if the calibration saw no such distance.
    """

    item: StoredItem
    distance: float
    score: float | None
    release: int
    origin: Origin
    beyond_calibration: bool = False


@dataclass(frozen=True)
class SearchResult:
    """Hold the hits of one query, nearest first, and the space that answered it.

    `request_id` identifies the answer for feedback; it is empty without a canary.
    """

    hits: list[RankedHit]
    release: int
    space: str
    request_id: str = ""


class Score(NamedTuple):
    """Hold a calibrated probability; `beyond` is True if the calibration saw no such distance."""

    value: float
    beyond: bool


def rank(
    parts: Sequence[PlanPart],
    neighbours: Sequence[Neighbours],
    row: int,
    k: int,
    items: ItemsOf,
    *,
    exact: bool,
    by_score: bool = False,
) -> list[RankedHit]:
    """Rank the hits of one query.

    Hits of one part are ranked by distance. Hits of several parts are ranked by score, because
    distances of different spaces do not compare. If a score is missing (a direct search without a
    calibration), they are ranked by distance, which the release then declares comparable. Ranking
    uses exact distances; the hits have rounded ones, unless `exact` is set.

    Args:
        parts: the searched parts.
        neighbours: neighbours of each part.
        row: row of the query in the neighbours.
        k: most hits to return.
        items: reads items by label.
        exact: return exact distances, and scores of them.
        by_score: rank one part by score, too, along its scale if it has one.

    Returns:
        At most `k` hits, best first; deleted items are left out.
    """
    # Pairs: the hit with exact distances, for ranking, and the hit to return.
    hits: list[tuple[RankedHit, RankedHit]] = []
    for part, nearest in zip(parts, neighbours, strict=True):
        hits += _hits(part, nearest, row, k, items, exact=exact)
    scale = parts[0].scale
    if by_score and scale is not None:
        hits.sort(key=lambda pair: _by_scale(scale, pair[0]))
    elif len(parts) > 1 or by_score:
        scored = all(hit.score is not None for hit, _ in hits)
        order = _by_score if scored else _by_distance
        hits.sort(key=lambda pair: order(pair[0]))
    return [shown for _, shown in hits[:k]]


def round_distances(distances: Vectors) -> Vectors:
    """Round distances to three significant digits.

    That is enough for ranking and thresholds, but too little to reconstruct a stored vector from
    its distances to some queries.

    Args:
        distances: float32 [n].

    Returns:
        float32 [n].
    """
    return np.array([float(f"{distance:.3g}") for distance in distances.tolist()], np.float32)


def _hits(
    part: PlanPart, neighbours: Neighbours, row: int, k: int, items: ItemsOf, *, exact: bool
) -> list[tuple[RankedHit, RankedHit]]:
    labels = neighbours.labels[row, :k].tolist()
    while labels and labels[-1] < 0:
        labels.pop()
    distances = neighbours.distances[row, : len(labels)]
    stored_items = items(labels, part.space)
    origins = [part.origin or (item.origin if item else None) for item in stored_items]

    def hits(distances: Vectors) -> list[RankedHit]:
        scores = scores_of(part, origins, distances)
        return [
            _hit(item, distance, score, part.release, origin)
            for item, origin, distance, score in zip(
                stored_items, origins, distances.tolist(), scores, strict=True
            )
            if item is not None and origin is not None
        ]

    exact_hits = hits(distances)
    return list(
        zip(exact_hits, exact_hits if exact else hits(round_distances(distances)), strict=True)
    )


def _hit(
    item: StoredItem, distance: float, score: Score | None, release: int, origin: Origin
) -> RankedHit:
    if score is None:
        return RankedHit(item, distance, None, release, origin)
    return RankedHit(item, distance, score.value, release, origin, score.beyond)


def scores_of(
    part: PlanPart, origins: Sequence[Origin | None], distances: Vectors
) -> list[Score | None]:
    """Return the calibrated score of each hit.

    Args:
        part: the part that was searched.
        origins: origin of each hit; None has no score.
        distances: float32 [n].

    Returns:
        One score for each hit; None if its origin has no calibration.
    """
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


def _by_scale(scale: Scale, hit: RankedHit) -> tuple[float, float, int]:
    """Return the sort key along a scale; nobackfill.gallery.search.index ranks in the same way."""
    scaled_distance = float(scale(hit.distance)) if hit.origin == "upgraded" else hit.distance
    return scaled_distance, hit.distance, hit.item.label


def _by_distance(hit: RankedHit) -> tuple[float, int]:
    return hit.distance, hit.item.label
