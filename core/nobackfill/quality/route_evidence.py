"""Fit the facts about routes that a release publishes, on held-out items.

They are the probability of a match by distance, the weights of rank fusion, and the effect of a
backfill: quality while served vectors are replaced by re-embedded ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nobackfill.metrics.backfill import (
    IDENTITY_LINE,
    BackfillCurve,
    DistanceLine,
    ReembeddingOrder,
    class_order,
    class_shares,
    curves_by_order,
    gain_order,
    oracle_order,
    random_order,
    uncertainty_order,
)
from nobackfill.metrics.bootstrap import Difference, paired_bootstrap
from nobackfill.metrics.distances import Metric, distances, to_unit_norm
from nobackfill.metrics.ranking import Ints, Relevance
from nobackfill.metrics.retrieval import PerQuery, mean_of_answerable
from nobackfill.quality.cells import CellName, native_cell
from nobackfill.quality.embedded import (
    EmbeddedListing,
    PublishedListing,
    cell_vectors,
    query_vectors,
)
from nobackfill.quality.retrieval import CellFigures, search_and_measure
from nobackfill.release.calibration import JointDistance, find_curve
from nobackfill.release.manifest import Calibration, LazyReembeddingEvidence, RankFusionEvidence
from nobackfill.vectors import Origin, Vectors

# Retrieved pairs of each query that are used.
PAIRS_A_QUERY = 20
# Largest number of breakpoints, and smallest number of pairs for each.
BREAKPOINTS = 64
PAIRS_A_BREAKPOINT = 20


def retrieved_pairs(
    neighbours: NDArray[np.int64], distances: NDArray[np.float32], relevance: Relevance
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Return the nearest pairs of all queries, without ignored items.

    Positions of -1 are left out. A query without valid pairs has none.

    Args:
        neighbours: Gallery positions [q, k], nearest first.
        distances: Their distances [q, k].
        relevance: The relevant items of each query.

    Returns:
        For p pairs, at most PAIRS_A_QUERY of each query: distances float64 [p], matches float64 [p]
        (0 or 1) and query numbers int64 [p]. They go query by query, nearest first.

    Raises:
        ValueError: There are no queries, or relevance for another number.
    """
    kept_distances, matches, counts = [], [], []
    for row, row_distances, relevant, ignored in zip(
        neighbours, distances, relevance.relevant, relevance.ignored, strict=True
    ):
        valid = (row >= 0) & ~np.isin(row, ignored)
        kept_distances.append(row_distances[valid][:PAIRS_A_QUERY])
        matches.append(np.isin(row[valid][:PAIRS_A_QUERY], relevant))
        counts.append(len(matches[-1]))
    return (
        np.concatenate(kept_distances).astype(np.float64),
        np.concatenate(matches).astype(np.float64),
        np.repeat(np.arange(len(counts)), counts),
    )


def fit_curve(
    distances: NDArray[np.float64], matches: NDArray[np.float64]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Fit a strictly decreasing curve from distance to the probability of a match (isotonic
    regression).

    Pairs are pooled into bins of similar distance, each at its mean distance. A block of equal
    probability keeps its first and its last bin, so that the curve covers the observed distances
    except half a bin at each end. With a single bin, the curve has only a slight slope.

    Args:
        distances: [p], in any order, p at least 1. NaN is not checked, and spoils the curve.
        matches: 0 or 1, [p].

    Returns:
        Distances (increasing) and probabilities (decreasing, 0 to 1) of the breakpoints, at least
        two.

    Raises:
        ValueError: There are no pairs.
        ModuleNotFoundError: scikit-learn, of the extra `training`, is not installed.
    """
    # Imported here: the import takes a second, and only measuring a release needs it.
    from sklearn.isotonic import IsotonicRegression

    order = np.argsort(distances, kind="stable")
    distances, matches = distances[order], matches[order]
    bins = max(1, min(BREAKPOINTS, len(distances) // PAIRS_A_BREAKPOINT))
    parts = [part for part in np.array_split(np.arange(len(distances)), bins) if len(part)]
    centre = np.array([distances[part].mean() for part in parts])
    weight = np.array([len(part) for part in parts], np.float64)
    # Laplace's rule: a few pairs cannot show certainty.
    share = np.array([(matches[part].sum() + 1) / (len(part) + 2) for part in parts])
    curve = IsotonicRegression(increasing=False).fit(centre, share, sample_weight=weight)
    fitted = curve.predict(centre)
    return _strict(centre, np.asarray(fitted))


def _strict(
    centre: NDArray[np.float64], fitted: NDArray[np.float64]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    changes = np.diff(fitted) != 0
    starts, ends = np.r_[True, changes], np.r_[changes, True]
    # A manifest's curve must fall everywhere: a block falls by the smallest step of a float.
    y = np.where(starts, fitted, np.nextafter(fitted, 0))[starts | ends]
    x = centre[starts | ends]
    # Several bins may have the same distance (a gallery of copies).
    distinct = np.r_[True, (np.diff(x) > 0) & (np.diff(y) < 0)]
    x, y = x[distinct], y[distinct]
    if len(x) == 1:
        spread = max(abs(float(x[0])), 1e-3) * 0.5
        x = np.array([x[0] - spread, x[0] + spread])
        y = np.array([min(1.0, float(y[0]) + 1e-6), max(0.0, float(y[0]) - 1e-6)])
    return tuple(map(float, x)), tuple(map(float, y))


def fit_distance_line(
    migrated_figures: CellFigures, native_figures: CellFigures, relevance: Relevance
) -> DistanceLine:
    """Fit the line that converts migrated items' distances to those of re-embedded items.

    A converted distance means the same match probability for the same query. The fit is one
    logistic regression over the PAIRS_A_QUERY nearest items of each query in either origin, with a
    slope for each. It separates how near a query's hits are in general: a curve fitted across
    queries would bend towards the differences between queries, and the first hits would come from
    the origin in which queries differ more. Unlike the steps of `fit_curve`, it preserves the order
    within an origin.

    Args:
        migrated_figures: The cell with migrated vectors; its neighbours and distances are used.
        native_figures: The cell with the new model's own vectors.
        relevance: The relevant items of each query.

    Returns:
        IDENTITY_LINE if the pairs of one origin do not separate matches from others, or a smaller
        distance is not a likelier match.

    Raises:
        ValueError: There are no queries, or relevance for another number.
        ModuleNotFoundError: scikit-learn, of the extra `training`, is not installed.
    """
    pairs = [
        retrieved_pairs(m.neighbours, m.distances, relevance)
        for m in (migrated_figures, native_figures)
    ]
    if any(len(np.unique(matches)) < 2 for _, matches, _ in pairs):
        return IDENTITY_LINE
    means = [_means(distances, rows, len(relevance.relevant)) for distances, _, rows in pairs]
    columns = []
    for origin, (origin_distances, _, rows) in enumerate(pairs):
        # Two slopes, an offset for migrated items, and the query's mean distance in either origin.
        column = np.zeros((len(origin_distances), 5))
        column[:, origin] = origin_distances
        column[:, 2] = origin == 0
        column[:, 3], column[:, 4] = means[0][rows], means[1][rows]
        columns.append(column)
    slope, native_slope, offset, *_ = _logistic(
        np.concatenate(columns), np.concatenate([matches for _, matches, _ in pairs])
    )
    return (
        DistanceLine(slope / native_slope, offset / native_slope)
        if max(slope, native_slope) < 0
        else IDENTITY_LINE
    )


def _means(
    distances: NDArray[np.float64], rows: NDArray[np.int64], queries: int
) -> NDArray[np.float64]:
    """Return the mean distance of each query."""
    counts = np.maximum(1, np.bincount(rows, minlength=queries))
    return np.asarray(np.bincount(rows, distances, queries) / counts, np.float64)


def _logistic(columns: NDArray[np.float64], matches: NDArray[np.float64]) -> list[float]:
    """Return the weights of the log-odds of a match."""
    from sklearn.linear_model import LogisticRegression

    spread = columns.std(0)
    scale = np.where(spread > 0, spread, 1)
    # A weak prior: perfectly separated pairs have no finite slope.
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
    item_count: int,
) -> Calibration:
    """Fit the calibration of one (query space, gallery space, origin).

    Args:
        query_space: Id of the query's space.
        gallery_space: Id of the gallery's space.
        origin: How the gallery's vectors were made; it is only recorded.
        neighbours: Gallery positions [q, k] of a search, nearest first.
        distances: Their distances [q, k]; NaN is not allowed.
        relevance: The relevant items of each query.
        item_count: Number of items of the gallery, at least 1.

    Returns:
        The curve without a scale.

    Raises:
        ValueError: There are no pairs, or relevance for another number of queries. Or a space id
            or `item_count` is not valid (pydantic.ValidationError).
        ModuleNotFoundError: scikit-learn, of the extra `training`, is not installed.
    """
    x, y = fit_curve(*retrieved_pairs(neighbours, distances, relevance)[:2])
    return Calibration(
        query_space=query_space,
        gallery_space=gallery_space,
        origin=origin,
        distances=x,
        probabilities=y,
        items=item_count,
    )


# Weights of the new model in rank fusion that are tried; 1 is the new model alone.
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8)
# Largest number of queries and items for estimating the spread of a space.
_SOME = 1000


@dataclass(frozen=True)
class QuerySet:
    """Queries, items and relevance of one half of the held-out data.

    Attributes:
        queries: The queries.
        items: The items.
        relevance: The relevant items of each query.
        classes: Class of each query, [q]; None if unknown.
    """

    queries: EmbeddedListing
    items: EmbeddedListing
    relevance: Relevance
    classes: Ints | None = None

    def bootstrap_gain(self, values: PerQuery, other: PerQuery) -> Difference:
        """Bootstrap the mean of `values` - `other` over queries; classes are drawn where they are
        known.

        Args:
            values: A figure by query, [q], NaN where the query has no answer.
            other: The figure to compare it with, [q], NaN at the same queries.

        Raises:
            ValueError: The two do not answer the same queries, no query has an answer, or `classes`
                has another length.
        """
        labels = None if self.classes is None else [self.classes]
        return paired_bootstrap([values], [other], classes=labels)


@dataclass(frozen=True)
class _Space:
    """Queries [q, d] and items [n, d] whose squared distances are those of a gallery.

    A weighted sum of two squared distances is the squared distance of the concatenated vectors,
    each times the root of its weight. So the code that measures one space also measures both.
    """

    queries: Vectors
    items: Vectors

    @property
    def spread(self) -> float:
        """Return the mean standard deviation of the items' distances to a query."""
        return max(1e-12, float(distances(_some(self.queries), _some(self.items)).std(1).mean()))

    def times(self, weight: float) -> "_Space":
        """Multiply all squared distances by `weight`."""
        root = np.float32(np.sqrt(weight))
        return _Space(root * self.queries, root * self.items)

    def measure(self, relevance: Relevance) -> CellFigures:
        return search_and_measure(
            self.queries, self.items, relevance, neighbour_count=PAIRS_A_QUERY
        )


def measure_rank_fusion(
    cell: CellName, fitting_half: QuerySet, judging_half: QuerySet, *, int8: bool
) -> RankFusionEvidence | None:
    """Measure rank fusion by both models on a migrated gallery.

    The weights that find most (CMC-1 + mAP) are fitted on one half and judged on the other. Random
    numbers have a fixed seed, so the same data give the same result.

    Args:
        cell: The cell of the migrated gallery.
        fitting_half: The half for fitting the weights.
        judging_half: The half for the figures.
        int8: Use int8 files where they exist.

    Returns:
        None in three cases. The new model alone is as good on the fitting half. Or both models do
        not measurably beat it by any figure. Or they are measurably worse than it, or than staying,
        by either figure.

    Raises:
        InvalidInputError: The vectors of the two releases cannot be compared, the route reads
            side-information that the items lack, or a file is no image.
        ValueError: No query of a half has a relevant item, or vectors are not finite.
        NotFoundError: A release or an upgrade of the cell does not exist.
        VerificationError: A file differs from its manifest, cannot be loaded, or returns no usable
            vectors.
        NoEncoderError: A release has no model for this kind of item, images or texts.
        ConfigurationError: The library for a tokenizer is not installed.
        IndexError: Relevance names a position outside the gallery.
        ModuleNotFoundError: scikit-learn, of the extra `training`, is not installed.
    """
    joint = _fit_joint(cell, fitting_half, int8=int8)
    if joint is None:
        return None
    carried, stayed = _spaces(cell, judging_half, int8=int8)
    fused = _concatenate(carried.times(joint.new_weight), stayed.times(joint.old_weight)).measure(
        judging_half.relevance
    )
    gains = {}
    for name, one in (("carried", carried), ("stayed", stayed)):
        figures = one.measure(judging_half.relevance)
        gains[name] = (
            judging_half.bootstrap_gain(fused.map, figures.map),
            judging_half.bootstrap_gain(fused.cmc1, figures.cmc1),
        )
    if any(gain.high < 0 for pair in gains.values() for gain in pair):
        return None
    if all(gain.low <= 0 for gain in gains["carried"]):
        return None
    of_map, of_cmc1 = gains["stayed"]
    return RankFusionEvidence(
        new=joint.new_weight,
        old=joint.old_weight,
        offset=joint.offset,
        map=mean_of_answerable(fused.map),
        cmc1=mean_of_answerable(fused.cmc1),
        map_gain_low=of_map.low,
        cmc1_gain_low=of_cmc1.low,
    )


def _fit_joint(cell: CellName, half: QuerySet, *, int8: bool) -> JointDistance | None:
    """Fit the weights; None if the new model alone finds most."""
    carried, stayed = _spaces(cell, half, int8=int8)
    # Scaled by the spread of each model, so that a weight means the same for any two models.
    unlike = carried.spread / stayed.spread
    best, share = carried.measure(half.relevance), 1.0
    for one in SHARES:
        space = _concatenate(carried.times(one), stayed.times((1 - one) * unlike))
        fused = space.measure(half.relevance)
        if _objective(fused) > _objective(best):
            best, share = fused, one
    if share == 1.0:
        return None
    native = _space(native_cell(cell.query_release), half, int8=int8).measure(half.relevance)
    line: DistanceLine = fit_distance_line(best, native, half.relevance)
    return JointDistance(line.slope * share, line.slope * (1 - share) * unlike, line.offset)


def _objective(cell: CellFigures) -> float:
    return mean_of_answerable(cell.cmc1) + mean_of_answerable(cell.map)


def _spaces(cell: CellName, half: QuerySet, *, int8: bool) -> tuple[_Space, _Space]:
    """Return the space of the migrated vectors and that of the old ones."""
    return _space(cell, half, int8=int8), _space(
        native_cell(cell.gallery_releases[0]), half, int8=int8
    )


def _space(cell: CellName, half: QuerySet, *, int8: bool) -> _Space:
    metric = half.queries.metric(cell.query_release)
    queries, items = cell_vectors(cell, half.queries, half.items, int8=int8)
    return _Space(_squared(queries, metric), _squared(items, metric))


def _squared(vectors: Vectors, metric: Metric) -> Vectors:
    """Scale unit vectors so that their squared distance is 1 - cosine."""
    if metric == "l2":
        return vectors
    return np.asarray(to_unit_norm(vectors) * np.sqrt(0.5), np.float32)


def _some(rows: Vectors) -> Vectors:
    return rows[np.linspace(0, len(rows) - 1, min(len(rows), _SOME)).astype(np.int64)]


def _concatenate(carried: _Space, stayed: _Space) -> _Space:
    return _Space(
        np.concatenate([carried.queries, stayed.queries], axis=1),
        np.concatenate([carried.items, stayed.items], axis=1),
    )


# Random; by class in steps of 2 % of them (BCT's supplement); by the true error (a perfect
# uncertainty); by the upgrade's uncertainty; by uncertainty and number of searches.
ORDERS = ("random", "class", "oracle", "uncertainty", "gain")
# A shallower valley is no reason to rank migrated vectors other than by distance.
MOST_BELOW = 0.01


def backfill_curves(
    cell: CellName,
    queries: EmbeddedListing,
    gallery: EmbeddedListing,
    relevance: Relevance,
    orders: Sequence[str] = ORDERS,
    *,
    int8: bool = False,
    line: DistanceLine | None = None,
) -> dict[str, BackfillCurve]:
    """Measure the backfill curves of a cell of an older gallery, by order.

    Args:
        cell: The cell.
        queries: The queries.
        gallery: The gallery.
        relevance: The relevant items of each query.
        orders: Names of ORDERS; other names are ignored, and a repeated one counts once.
            uncertainty and gain are left out if the upgrade predicts no variance. Random orders and
            classes use the seed 0.
        int8: Use int8 files where they exist.
        line: Converts distances of migrated items; None: the release's own line, or none for
            listings that are not published.

    Returns:
        The curves by name, in the order of `orders`; empty without any.

    Raises:
        InvalidInputError: The vectors of the two releases cannot be compared, the route reads
            side-information that the items lack, or a file is no image.
        NotFoundError: A release or an upgrade of the cell does not exist.
        VerificationError: A file differs from its manifest, cannot be loaded, or returns no usable
            vectors.
        ValueError: No query has a relevant item, vectors are not finite, or `oracle` is asked for
            where the dimensions differ.
        NoEncoderError: A release has no model for this kind of item, images or texts.
        ConfigurationError: The library for a tokenizer is not installed.
        IndexError: Relevance is for fewer queries, or names a position outside the gallery.
    """
    line = declared_distance_line(cell, queries) if line is None else line
    served = gallery.vectors_along(cell.gallery_releases, int8=int8)
    native = gallery.native_vectors(cell.query_release)
    meets_served = query_vectors(cell, queries, served.embedding)
    uncertainty = served.uncertainty
    labels, metric = gallery.listing.labels, queries.metric(cell.query_release)
    makers: dict[str, Callable[[], Ints]] = {
        "random": lambda: random_order(len(native), 0),
        "class": lambda: class_order(labels, 0),
        "oracle": lambda: oracle_order(served.embedding, native),
    }
    if uncertainty is not None:
        makers["uncertainty"] = lambda: uncertainty_order(uncertainty)
        makers["gain"] = lambda: gain_order(served.embedding, uncertainty, metric)
    selected = {name: ReembeddingOrder(makers[name]()) for name in orders if name in makers}
    if "class" in selected:
        order = selected["class"].item_order
        selected["class"] = ReembeddingOrder(order, class_shares(labels, order))
    return curves_by_order(
        queries.native_vectors(cell.query_release),
        served.embedding,
        native,
        selected,
        relevance,
        metric=metric,
        served_queries=meets_served,
        distance_line=line,
    )


def declared_distance_line(cell: CellName, queries: EmbeddedListing) -> DistanceLine:
    """Return the line by which a release ranks the cell's migrated vectors among native ones.

    Args:
        cell: The cell.
        queries: The queries, which know the releases' manifests.

    Returns:
        IDENTITY_LINE if the cell has no migrated vectors, the queries are not published, or the
        release declares no line.

    Raises:
        NotFoundError: The query's release does not exist.
    """
    if len(cell.gallery_releases) == 1 or not isinstance(queries, PublishedListing):
        return IDENTITY_LINE
    manifest = queries.release_manifest(cell.query_release)
    curve = find_curve(manifest, manifest.space, manifest.space, "upgraded")
    return IDENTITY_LINE if curve is None or curve.scale is None else DistanceLine(*curve.scale)


def choose_distance_line(
    evidence: LazyReembeddingEvidence, gains: Sequence[Difference], line: DistanceLine
) -> DistanceLine:
    """Choose the line by which a release ranks migrated vectors.

    Args:
        evidence: The curves with and without the line.
        gains: Gains of the line over the whole curve; none give IDENTITY_LINE.
        line: The line.

    Returns:
        `line` if distances alone have a valley of more than a point that it reduces, and one of the
        gains is significant. Otherwise IDENTITY_LINE, which needs no second search.
    """
    closes = (
        evidence.valley_depth > MOST_BELOW and evidence.scaled_valley_depth < evidence.valley_depth
    )
    # A few queries may fall by more than a point without any valley.
    return line if closes and any(gain.low > 0 for gain in gains) else IDENTITY_LINE


def measure_lazy_reembedding(
    cell: CellName, half: QuerySet, line: DistanceLine, *, int8: bool
) -> tuple[LazyReembeddingEvidence, DistanceLine]:
    """Measure quality during lazy re-embedding, in random order, with and without a line.

    Random numbers have a fixed seed, so the same data give the same result.

    Args:
        cell: The cell of the migrated gallery.
        half: The data.
        line: Converts distances of migrated items.
        int8: Use int8 files where they exist.

    Returns:
        The curves at eleven shares, 0 to 100 %, and the line by which the release ranks: `line`, or
        IDENTITY_LINE where it does not help.

    Raises:
        InvalidInputError: The vectors of the two releases cannot be compared, the route reads
            side-information that the items lack, or a file is no image.
        ValueError: No query has a relevant item, or vectors are not finite.
        NotFoundError: A release or an upgrade of the cell does not exist.
        VerificationError: A file differs from its manifest, cannot be loaded, or returns no usable
            vectors.
        NoEncoderError: A release has no model for this kind of item, images or texts.
        ConfigurationError: The library for a tokenizer is not installed.
        IndexError: Relevance is for fewer queries, or names a position outside the gallery.
    """
    raw, scaled = (
        backfill_curves(
            cell, half.queries, half.items, half.relevance, ("random",), int8=int8, line=one
        )["random"]
        for one in (IDENTITY_LINE, line)
    )
    evidence = LazyReembeddingEvidence(
        map=tuple(raw.map.tolist()),
        cmc1=tuple(raw.cmc1.tolist()),
        scaled_map=tuple(scaled.map.tolist()),
        scaled_cmc1=tuple(scaled.cmc1.tolist()),
    )
    gains = [
        half.bootstrap_gain(scaled.map_areas, raw.map_areas),
        half.bootstrap_gain(scaled.cmc1_areas, raw.cmc1_areas),
    ]
    return evidence, choose_distance_line(evidence, gains, line)
