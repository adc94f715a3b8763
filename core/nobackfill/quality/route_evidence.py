"""What a release says of its routes, fitted on held-out items.

These are the probability of a match by distance, the weights of a score by both models, and what a
backfill would bring: quality while served vectors are replaced by re-embedded ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nobackfill.metrics.backfill import (
    AS_THEY_ARE,
    BackfillCurve,
    Line,
    Order,
    class_order,
    class_shares,
    curves_by_order,
    gain_order,
    oracle_order,
    random_order,
    uncertainty_order,
)
from nobackfill.metrics.bootstrap import Difference, paired_bootstrap
from nobackfill.metrics.distances import Metric, distances, unit
from nobackfill.metrics.ranking import Ints, Relevance
from nobackfill.metrics.retrieval import PerQuery, mean
from nobackfill.quality.cells import CellName, alone
from nobackfill.quality.embedded import Embedded, Published, asking, cell_vectors
from nobackfill.quality.retrieval import Measured, measure
from nobackfill.release.calibration import Joint, find
from nobackfill.release.manifest import BothEvidence, Calibration, HealingEvidence
from nobackfill.vectors import Origin, Vectors

# Retrieved pairs of each query that are counted.
PAIRS_A_QUERY = 20
# Breakpoints at most, and pairs a breakpoint stands for at least.
BREAKPOINTS = 64
PAIRS_A_BREAKPOINT = 20


def retrieved_pairs(
    neighbours: NDArray[np.int64], distances: NDArray[np.float32], relevance: Relevance
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Distances [p], matches [p] (0 or 1) and queries [p] of each query's nearest pairs, the query
    itself left out."""
    kept_distances, matches, counts = [], [], []
    for row, near, relevant, ignored in zip(
        neighbours, distances, relevance.relevant, relevance.ignored, strict=True
    ):
        kept = (row >= 0) & ~np.isin(row, ignored)
        kept_distances.append(near[kept][:PAIRS_A_QUERY])
        matches.append(np.isin(row[kept][:PAIRS_A_QUERY], relevant))
        counts.append(len(matches[-1]))
    return (
        np.concatenate(kept_distances).astype(np.float64),
        np.concatenate(matches).astype(np.float64),
        np.repeat(np.arange(len(counts)), counts),
    )


def fit_curve(
    distances: NDArray[np.float64], matches: NDArray[np.float64]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Breakpoints of a strictly decreasing curve through isotonic regression.

    Pairs are pooled into bins of near distances first, each at its mean distance. A block of equal
    probability keeps its first and its last bin, so that the curve covers the distances that were
    seen: at each end half a bin lies outside. With one bin the curve is a hint of a slope.
    """
    # Imported here: it takes a second, and only a release that is measured is calibrated.
    from sklearn.isotonic import IsotonicRegression

    order = np.argsort(distances, kind="stable")
    distances, matches = distances[order], matches[order]
    bins = max(1, min(BREAKPOINTS, len(distances) // PAIRS_A_BREAKPOINT))
    parts = [part for part in np.array_split(np.arange(len(distances)), bins) if len(part)]
    centre = np.array([distances[part].mean() for part in parts])
    weight = np.array([len(part) for part in parts], np.float64)
    # Laplace's rule keeps certainty out of what a few pairs can show.
    share = np.array([(matches[part].sum() + 1) / (len(part) + 2) for part in parts])
    curve = IsotonicRegression(increasing=False).fit(centre, share, sample_weight=weight)
    fitted = curve.predict(centre)
    return _strict(centre, np.asarray(fitted))


def _strict(
    centre: NDArray[np.float64], fitted: NDArray[np.float64]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    changes = np.diff(fitted) != 0
    starts, ends = np.r_[True, changes], np.r_[changes, True]
    # A manifest's curve falls everywhere: a block does by the smallest step of a float.
    y = np.where(starts, fitted, np.nextafter(fitted, 0))[starts | ends]
    x = centre[starts | ends]
    # Bins at one distance (a gallery of copies) have one block or several.
    apart = np.r_[True, (np.diff(x) > 0) & (np.diff(y) < 0)]
    x, y = x[apart], y[apart]
    if len(x) == 1:
        spread = max(abs(float(x[0])), 1e-3) * 0.5
        x = np.array([x[0] - spread, x[0] + spread])
        y = np.array([min(1.0, float(y[0]) + 1e-6), max(0.0, float(y[0]) - 1e-6)])
    return tuple(map(float, x)), tuple(map(float, y))


def same_scale(carried: Measured, embedded: Measured, relevance: Relevance) -> Line:
    """The line on which a carried item's distance means what a re-embedded one's does, for the same
    query: one logistic regression over the PAIRS_A_QUERY nearest of each query that were measured
    in either origin, with a slope for each.

    How near a query's hits are at all, in either origin, is told apart from that: a curve fitted
    across queries bends towards what makes queries differ, and the first hits were then those of
    the origin in which queries differ more. Unlike `fit_curve`'s steps it keeps the order within an
    origin. The line of distances as they are where one origin's pairs do not tell matches from
    others.
    """
    found = [retrieved_pairs(m.neighbours, m.distances, relevance) for m in (carried, embedded)]
    if any(len(np.unique(matches)) < 2 for _, matches, _ in found):
        return AS_THEY_ARE
    means = [_means(distances, rows, len(relevance.relevant)) for distances, _, rows in found]
    columns = []
    for origin, (apart, _, rows) in enumerate(found):
        # Two slopes, what carried ones have beside, and the query twice.
        column = np.zeros((len(apart), 5))
        column[:, origin] = apart
        column[:, 2] = origin == 0
        column[:, 3], column[:, 4] = means[0][rows], means[1][rows]
        columns.append(column)
    its, own, beside, *_ = _logistic(
        np.concatenate(columns), np.concatenate([matches for _, matches, _ in found])
    )
    return Line(its / own, beside / own) if max(its, own) < 0 else AS_THEY_ARE


def _means(
    distances: NDArray[np.float64], rows: NDArray[np.int64], queries: int
) -> NDArray[np.float64]:
    """Of each query's distances."""
    counts = np.maximum(1, np.bincount(rows, minlength=queries))
    return np.asarray(np.bincount(rows, distances, queries) / counts, np.float64)


def _logistic(columns: NDArray[np.float64], matches: NDArray[np.float64]) -> list[float]:
    """Weights of log-odds of a match."""
    from sklearn.linear_model import LogisticRegression

    spread = columns.std(0)
    scale = np.where(spread > 0, spread, 1)
    # A weak prior: pairs that are told apart without error have no finite slope.
    curve = LogisticRegression(C=1e3, max_iter=1000).fit(columns / scale, matches)
    weights: list[float] = (curve.coef_[0] / scale).tolist()
    return weights


def fit_calibration(
    query_space: str,
    gallery_space: str,
    origin: Origin,
    neighbours: NDArray[np.int64],
    distances: NDArray[np.float32],
    relevance: Relevance,
    items: int,
) -> Calibration:
    """The calibration of one (query space, gallery space, origin) from what a search retrieved in a
    gallery of `items`.
    """
    x, y = fit_curve(*retrieved_pairs(neighbours, distances, relevance)[:2])
    return Calibration(
        query_space=query_space,
        gallery_space=gallery_space,
        origin=origin,
        distances=x,
        probabilities=y,
        items=items,
    )


# Of the new model in the score of a carried item, beside 1: none of the old one.
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8)
# Queries, and items that tell what is far in a space, at most.
_SOME = 1000


@dataclass(frozen=True)
class QuerySet:
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
    """Queries [q, d] and items [n, d]; their squared distances are those of a gallery.

    A sum of two squared distances is the squared distance of both vectors beside each other, each
    times the root of its weight, so that whatever measures one space measures both.
    """

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
    cell: CellName, fitting: QuerySet, judging: QuerySet, *, int8: bool
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


def _fitted(cell: CellName, asked: QuerySet, *, int8: bool) -> Joint | None:
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


def _spaces(cell: CellName, asked: QuerySet, *, int8: bool) -> tuple[_Space, _Space]:
    """What was carried, and what stayed."""
    return _space(cell, asked, int8=int8), _space(alone(cell.gallery[0]), asked, int8=int8)


def _space(cell: CellName, asked: QuerySet, *, int8: bool) -> _Space:
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


# Random; by class in steps of 2 % of them (BCT's supplement); by the true error (what a perfect
# uncertainty would reach); by the upgrade's uncertainty; by that and by how many searches meet it.
ORDERS = ("random", "class", "oracle", "uncertainty", "gain")
# A valley of less is no reason to rank carried vectors otherwise than by distance.
MOST_BELOW = 0.01


def backfill_curves(
    cell: CellName,
    queries: Embedded,
    gallery: Embedded,
    relevance: Relevance,
    orders: Sequence[str] = ORDERS,
    *,
    int8: bool = False,
    line: Line | None = None,
) -> dict[str, BackfillCurve]:
    """The curves of a cell of an older gallery, searched as it is or carried along a route, by
    order; by uncertainty and gain where the upgrade predicts a variance. `line`: of what is
    carried; None: the one that the release ranks it along."""
    line = served_line(cell, queries) if line is None else line
    served, whole = gallery.along(cell.gallery, int8=int8), gallery.native(cell.query)
    meets_served = asking(cell, queries, served.embedding)
    uncertainty = served.uncertainty
    made: dict[str, Callable[[], Ints]] = {
        "random": lambda: random_order(len(whole), 0),
        "class": lambda: class_order(gallery.listing.labels, 0),
        "oracle": lambda: oracle_order(served.embedding, whole),
    }
    if uncertainty is not None:
        made["uncertainty"] = lambda: uncertainty_order(uncertainty)
        metric = queries.metric(cell.query)
        made["gain"] = lambda: gain_order(served.embedding, uncertainty, metric)
    wanted = {}
    for name in orders:
        if name in made:
            order = made[name]()
            labels = gallery.listing.labels
            wanted[name] = (
                Order(order, class_shares(labels, order)) if name == "class" else Order(order)
            )
    return curves_by_order(
        queries.native(cell.query),
        served.embedding,
        whole,
        wanted,
        relevance,
        metric=queries.metric(cell.query),
        served_queries=meets_served,
        line=line,
    )


def served_line(cell: CellName, queries: Embedded) -> Line:
    """The line that the cell's carried vectors are ranked along beside embedded ones, if a release
    says so."""
    if len(cell.gallery) == 1 or not isinstance(queries, Published):
        return AS_THEY_ARE
    manifest = queries.manifest(cell.query)
    curve = find(manifest, manifest.space, manifest.space, "upgraded")
    return AS_THEY_ARE if curve is None or curve.scale is None else Line(*curve.scale)


def ranked_along(healing: HealingEvidence, gains: Sequence[Difference], line: Line) -> Line:
    """`line` where distances fall into a valley that it closes, at least in part, and one of its
    `gains` over the way is more than chance; else distances as they are, which need no second
    search."""
    closes = healing.valley > MOST_BELOW and healing.scaled_valley < healing.valley
    # A few queries fall by more than a point without any valley.
    return line if closes and any(gain.low > 0 for gain in gains) else AS_THEY_ARE


def healing_evidence(
    cell: CellName, asked: QuerySet, line: Line, *, int8: bool
) -> tuple[HealingEvidence, Line]:
    """What a release says of its galleries on the way, the curves in random order, and the line
    that it ranks them along; `line` as in `backfill_curves`."""
    raw, scaled = (
        backfill_curves(
            cell, asked.queries, asked.items, asked.relevance, ("random",), int8=int8, line=one
        )["random"]
        for one in (AS_THEY_ARE, line)
    )
    evidence = HealingEvidence(
        map=tuple(raw.map.tolist()),
        cmc1=tuple(raw.cmc1.tolist()),
        scaled_map=tuple(scaled.map.tolist()),
        scaled_cmc1=tuple(scaled.cmc1.tolist()),
    )
    gains = [
        asked.gained(scaled.map_areas, raw.map_areas),
        asked.gained(scaled.cmc1_areas, raw.cmc1_areas),
    ]
    return evidence, ranked_along(evidence, gains, line)
