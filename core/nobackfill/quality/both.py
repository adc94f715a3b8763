"""Both models together, while items are carried: weights fitted on held-out items, and judged.

A sum of two squared distances is the squared distance of both vectors beside each other, each times
the root of its weight, so that whatever measures one space measures both.
"""

from dataclasses import dataclass

import numpy as np

from nobackfill.metrics.backfill import Line
from nobackfill.metrics.bootstrap import Difference, paired_bootstrap
from nobackfill.metrics.distances import Metric, distances, unit
from nobackfill.metrics.ranking import Ints, Relevance
from nobackfill.metrics.retrieval import PerQuery, mean
from nobackfill.quality.calibrate import PAIRS_A_QUERY, same_scale
from nobackfill.quality.cells import CellName, alone
from nobackfill.quality.embedded import Embedded, cell_vectors
from nobackfill.quality.retrieval import Measured, measure
from nobackfill.release.calibration import Joint
from nobackfill.release.evidence import BothEvidence
from nobackfill.vectors import Vectors

# Of the new model in the score of a carried item, beside 1: none of the old one.
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8)
# Queries, and items that tell what is far in a space, at most.
_SOME = 1000


@dataclass(frozen=True)
class Asked:
    """Queries, items and what is relevant: of one half of what was held out. `classes`: of each
    query, where they are known."""

    queries: Embedded
    items: Embedded
    relevance: Relevance
    classes: Ints | None = None

    def gained(self, found: PerQuery, other: PerQuery) -> Difference:
        """By how much `found` is above `other`."""
        labels = None if self.classes is None else [self.classes]
        return paired_bootstrap([found], [other], classes=labels)


@dataclass(frozen=True)
class _Space:
    """Queries [q, d] and items [n, d]; their squared distances are those of a gallery."""

    queries: Vectors
    items: Vectors

    @property
    def spread(self) -> float:
        """By how much items differ in their distance to a query, on average."""
        return max(1e-12, float(distances(_some(self.queries), _some(self.items)).std(1).mean()))

    def times(self, weight: float) -> "_Space":
        """All squared distances times `weight`."""
        root = np.float32(np.sqrt(weight))
        return _Space(root * self.queries, root * self.items)

    def measured(self, relevance: Relevance) -> Measured:
        return measure(self.queries, self.items, relevance, neighbours=PAIRS_A_QUERY)


def both_evidence(
    cell: CellName, fitting: Asked, judging: Asked, *, int8: bool
) -> BothEvidence | None:
    """What both models find of a carried gallery: weights that find most (CMC-1 and mAP) of
    `fitting`, judged on `judging`. None where the new model alone does as well, or where both are
    measurably worse than it, or than staying, by either figure.
    """
    joint = _fitted(cell, fitting, int8=int8)
    if joint is None:
        return None
    carried, stayed = _spaces(cell, judging, int8=int8)
    found = _beside(carried.times(joint.new), stayed.times(joint.old)).measured(judging.relevance)
    gains = {}
    for name, one in (("carried", carried), ("stayed", stayed)):
        alone_ = one.measured(judging.relevance)
        gains[name] = (
            judging.gained(found.map, alone_.map),
            judging.gained(found.cmc1, alone_.cmc1),
        )
    if any(gain.high < 0 for pair in gains.values() for gain in pair):
        return None
    if all(gain.low <= 0 for gain in gains["carried"]):
        return None
    of_map, of_cmc1 = gains["stayed"]
    return BothEvidence(
        **joint._asdict(),
        map=mean(found.map),
        cmc1=mean(found.cmc1),
        map_gain_low=of_map.low,
        cmc1_gain_low=of_cmc1.low,
    )


def _fitted(cell: CellName, asked: Asked, *, int8: bool) -> Joint | None:
    """None: the new model alone finds most."""
    carried, stayed = _spaces(cell, asked, int8=int8)
    # As far as each model tells items apart, so that a share means the same of any two.
    unlike = carried.spread / stayed.spread
    best, share = carried.measured(asked.relevance), 1.0
    for one in SHARES:
        space = _beside(carried.times(one), stayed.times((1 - one) * unlike))
        found = space.measured(asked.relevance)
        if _figure(found) > _figure(best):
            best, share = found, one
    if share == 1.0:
        return None
    native = _space(alone(cell.query), asked, int8=int8).measured(asked.relevance)
    line: Line = same_scale(best, native, asked.relevance)
    return Joint(line.slope * share, line.slope * (1 - share) * unlike, line.offset)


def _figure(found: Measured) -> float:
    return mean(found.cmc1) + mean(found.map)


def _spaces(cell: CellName, asked: Asked, *, int8: bool) -> tuple[_Space, _Space]:
    """What was carried, and what stayed."""
    return _space(cell, asked, int8=int8), _space(alone(cell.gallery[0]), asked, int8=int8)


def _space(cell: CellName, asked: Asked, *, int8: bool) -> _Space:
    metric = asked.queries.metric(cell.query)
    queries, items = cell_vectors(cell, asked.queries, asked.items, int8=int8)
    return _Space(_squared(queries, metric), _squared(items, metric))


def _squared(vectors: Vectors, metric: Metric) -> Vectors:
    """1 - cosine is half the squared distance of vectors of norm 1."""
    if metric == "l2":
        return vectors
    return np.asarray(unit(vectors) * np.sqrt(0.5), np.float32)


def _some(rows: Vectors) -> Vectors:
    return rows[np.linspace(0, len(rows) - 1, min(len(rows), _SOME)).astype(np.int64)]


def _beside(carried: _Space, stayed: _Space) -> _Space:
    return _Space(
        np.concatenate([carried.queries, stayed.queries], axis=1),
        np.concatenate([carried.items, stayed.items], axis=1),
    )
