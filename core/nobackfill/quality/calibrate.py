"""Calibration, fitted: distance -> probability of a match, from the pairs that a search retrieves.

Random pairs would be nearly all easy; what a user sees are the nearest few, so those are counted.
"""

import numpy as np
from numpy.typing import NDArray

from nobackfill.metrics.backfill import AS_THEY_ARE, Line
from nobackfill.metrics.ranking import Relevance
from nobackfill.quality.retrieval import Measured
from nobackfill.release.manifest import Calibration
from nobackfill.vectors import Origin

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
    for origin, (distances, _, rows) in enumerate(found):
        # Two slopes, what carried ones have beside, and the query twice.
        column = np.zeros((len(distances), 5))
        column[:, origin] = distances
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
