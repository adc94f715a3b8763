"""Revisited Oxford and Paris (Radenovic et al. 2018): easy, medium and hard, with junk left out.

`gnd_roxford5k.pkl`, `gnd_rparis6k.pkl`: {"imlist", "qimlist", "gnd": [{"bbx", "easy", "hard",
"junk"}]}, the last three as positions in imlist.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from nobackfill.errors import InvalidInputError
from nobackfill.metrics.ranking import Ints, Ranking, Relevance
from nobackfill.metrics.retrieval import PerQuery
from nobackfill.training.protocols.pickles import read_plain

Difficulty = Literal["easy", "medium", "hard"]
# What counts as an answer, and what is taken out of the ranking.
_SETUPS: Mapping[Difficulty, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "easy": (("easy",), ("junk", "hard")),
    "medium": (("easy", "hard"), ("junk",)),
    "hard": (("hard",), ("junk", "easy")),
}


@dataclass(frozen=True)
class Revisited:
    """Image names in the order of their vectors; queries are cut to `boxes` (x0, y0, x1, y1)."""

    queries: tuple[str, ...]
    boxes: tuple[tuple[float, float, float, float], ...]
    gallery: tuple[str, ...]
    relevance: Relevance


def read_revisited(path: Path, difficulty: Difficulty) -> Revisited:
    """The DMU paper reports medium. Raises NotFoundError, InvalidInputError."""
    if difficulty not in _SETUPS:
        raise InvalidInputError(f"expected easy, medium or hard, got {difficulty!r}")
    data = read_plain(path)
    try:
        gallery, queries = tuple(map(str, data["imlist"])), tuple(map(str, data["qimlist"]))
        truths = list(data["gnd"])
        boxes = tuple(_box(truth["bbx"]) for truth in truths)
        positive, ignored = _SETUPS[difficulty]
        relevance = Relevance(
            [_joined(truth, positive, len(gallery)) for truth in truths],
            [_joined(truth, ignored, len(gallery)) for truth in truths],
        )
    except (KeyError, TypeError) as error:
        raise InvalidInputError(
            f"{path}: expected imlist, qimlist and gnd with bbx, easy, hard, junk ({error!r})"
        ) from error
    if len(queries) != len(truths):
        raise InvalidInputError(f"{path}: {len(queries)} queries, {len(truths)} ground truths")
    return Revisited(queries, boxes, gallery, relevance)


def trapezoid_average_precision(ranking: Ranking) -> PerQuery:
    """Average precision as this benchmark's published code has it: the area under the
    precision-recall points by trapezia, which lies a little above
    `nobackfill.metrics.retrieval.average_precision`.
    """
    values = []
    for ranks, relevant in zip(ranking.ranks, ranking.relevant, strict=True):
        if not relevant:
            values.append(np.nan)
            continue
        found = np.arange(1, len(ranks) + 1)
        after = found / ranks
        before = np.where(ranks == 1, 1.0, (found - 1) / np.maximum(ranks - 1, 1))
        values.append(float((after + before).sum() / (2 * relevant)))
    return np.array(values)


def precision_at(ranking: Ranking, k: int) -> PerQuery:
    """mP@k: of the first k answers (or up to the last relevant one, if that comes earlier) the
    share that is relevant.
    """
    values = []
    for ranks in ranking.ranks:
        if not len(ranks):
            values.append(np.nan)
            continue
        depth = min(int(ranks[-1]), k)
        values.append(float((ranks <= depth).sum()) / depth)
    return np.array(values)


def _joined(truth: Mapping[str, object], kinds: tuple[str, ...], size: int) -> Ints:
    parts = [np.asarray(truth[kind], np.int64).reshape(-1) for kind in kinds]
    positions = np.unique(np.concatenate(parts))
    if len(positions) and not 0 <= positions[0] <= positions[-1] < size:
        raise InvalidInputError(f"a ground truth names image {positions[-1]} of {size}")
    return positions


def _box(values: object) -> tuple[float, float, float, float]:
    x0, y0, x1, y1 = (float(value) for value in np.asarray(values, np.float64).reshape(-1))
    return x0, y0, x1, y1
