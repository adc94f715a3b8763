"""Class figures while carried items become native: by distance, and along the gate's scale."""

import numpy as np
from numpy.typing import NDArray

from bench.adoption.trial import Trial, best
from bench.harness import Row
from nobackfill.adopt.figures import blocked
from nobackfill.metrics.backfill import (
    AS_THEY_ARE,
    BackfillCurve,
    Line,
    backfill_curve,
    random_order,
)
from nobackfill.metrics.ranking import Ranking, Relevance, same_label
from nobackfill.quality.calibrate import same_scale
from nobackfill.quality.retrieval import Measured
from nobackfill.vectors import Vectors

# Neighbours whose distances and matches a line is fitted to.
_NEAR = 100
ORDERS = 3


def classes(trial: Trial, labels: NDArray[np.str_]) -> list[Row]:
    """Class figures of other items while they are embedded again, by distance and along a line that
    was fitted to one half of them; curves of the other half."""
    rest = np.arange(trial.pairs, len(trial.old.bodies))
    fitted, judged = np.array_split(np.random.default_rng(0).permutation(rest), 2)
    mapping = best(trial.pairs_of(slice(0, trial.pairs)))
    native = trial.new.bodies[fitted]
    line = same_scale(
        _nearest(native, mapping(trial.old.bodies[fitted])),
        _nearest(native, native),
        _of_class(labels[fitted]),
    )
    new = trial.new.bodies[judged]
    carried = mapping(trial.old.bodies[judged])
    rows: list[Row] = []
    old = trial.old.bodies[judged]
    stay = _curve(old, old, labels[judged], AS_THEY_ARE, 0)
    for ranked, one in (("distance", AS_THEY_ARE), ("scale", line)):
        curves = [_curve(new, carried, labels[judged], one, seed) for seed in range(ORDERS)]
        for figure in ("cmc1", "map"):
            points = np.mean([getattr(curve, figure) for curve in curves], axis=0)
            below = max(0.0, min(points[0], points[-1]) - points.min())
            rows.append(
                {
                    "pair": trial.name, "ranked by": ranked, "figure": figure,
                    **{f"{10 * n} %": 100 * float(share) for n, share in enumerate(points)},
                    "valley": 100 * below,
                    "old model": 100 * float(getattr(stay, figure)[0]),
                }
            )  # fmt: skip
    return rows


def _curve(
    new: Vectors, carried: Vectors, labels: NDArray[np.str_], line: Line, seed: int
) -> BackfillCurve:
    order, relevance = random_order(len(new), seed), _of_class(labels)
    return backfill_curve(new, carried, new, order, relevance, metric="cosine", line=line)


def _of_class(labels: NDArray[np.str_]) -> Relevance:
    own = np.arange(len(labels))
    return same_label(labels, labels, own, own)


def _nearest(queries: Vectors, items: Vectors) -> Measured:
    apart = blocked(queries, items)
    near = np.argsort(apart, axis=1)[:, :_NEAR]
    none, nothing = np.empty(0), Ranking([], np.empty(0, np.int64))
    return Measured(none, none, none, nothing, near, np.take_along_axis(apart, near, 1))
