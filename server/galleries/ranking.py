"""From neighbours to hits: one ranking over all parts of a gallery, with calibrated scores."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gallery.index import Neighbours
from gallery.spec import Origin
from gallery.store import Item
from release.vectors import Vectors
from server.galleries.plan import Part

# Items as a space shows them, in the order of the labels; None for those deleted meanwhile.
ItemsOf = Callable[[list[int], str], list[Item | None]]


class Hit(NamedTuple):
    """`release` made the vector that was compared; `score` is None without a calibration."""

    item: Item
    distance: float
    score: float | None
    release: int
    origin: Origin


def rank(
    parts: Sequence[Part], found: Sequence[Neighbours], row: int, k: int, items: ItemsOf
) -> list[Hit]:
    """The `k` best hits of query `row`, `found` being each part's neighbours.

    One part: by distance. Several: by score, as distances of different spaces do not compare;
    where a score is missing (a direct search that was published without calibration), by distance,
    which the release then declares to compare.
    """
    hits: list[Hit] = []
    for part, neighbours in zip(parts, found, strict=True):
        hits += _hits(part, neighbours, row, k, items)
    if len(parts) > 1:
        scored = all(hit.score is not None for hit in hits)
        hits.sort(key=_by_score if scored else _by_distance)
    return hits[:k]


def _hits(part: Part, neighbours: Neighbours, row: int, k: int, items: ItemsOf) -> list[Hit]:
    labels = neighbours.labels[row, :k].tolist()
    while labels and labels[-1] < 0:
        labels.pop()
    distances = neighbours.distances[row, : len(labels)]
    found = items(labels, part.space)
    origins = [part.origin or (item.origin if item else None) for item in found]
    score = _scores(part, origins, distances)
    return [
        Hit(item, distance, score[i], part.release, origin)
        for i, (item, origin, distance) in enumerate(
            zip(found, origins, distances.tolist(), strict=True)
        )
        if item is not None and origin is not None
    ]


def _scores(part: Part, origins: list[Origin | None], distances: Vectors) -> list[float | None]:
    kinds = set(origins)
    if len(kinds) == 1:
        curve = part.curves.get(origins[0]) if origins[0] else None
        return [None] * len(origins) if curve is None else curve.scores(distances).tolist()
    result: list[float | None] = [None] * len(origins)
    for origin in kinds:
        curve = part.curves.get(origin) if origin else None
        if curve is not None:
            for i, score in enumerate(curve.scores(distances).tolist()):
                if origins[i] == origin:
                    result[i] = score
    return result


def _by_score(hit: Hit) -> tuple[float, float, int]:
    assert hit.score is not None
    return -hit.score, hit.distance, hit.item.label


def _by_distance(hit: Hit) -> tuple[float, int]:
    return hit.distance, hit.item.label
