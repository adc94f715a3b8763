"""Measure figures of the options for a gallery whose model changes.

Maps are judged on pairs that they were not fitted to. Queries for known items are judged by R@1,
R@10 and MRR. For similar items, each item is a query for its neighbours, without itself. The figure
is then agreement@10, the share of the new model's own ten neighbours that are found.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from nobackfill.adopt.joining import fit_odds_line
from nobackfill.adopt.pairs import Pairs
from nobackfill.metrics.distances import Metric, distances
from nobackfill.metrics.ranking import Ints
from nobackfill.serving.fusion import (
    CANDIDATES_PER_SEARCH,
    Block,
    FittedRankFusion,
    Mask,
    OddsLine,
    collect_candidates,
    fuse_nearness,
    measure_hubs,
    standardise_distances,
)
from nobackfill.vectors import Vectors, normalise

NEIGHBOURS = 10

PerQuery = NDArray[np.float64]
# Figures by name, each with one number for each query.
Figures = dict[str, PerQuery]


@dataclass(frozen=True)
class Queries:
    """Queries that both models embedded.

    Attributes:
        old: Vectors of the q queries by the old model [q, a].
        new: Vectors of the same queries by the new model [q, b].
        gallery_rows: The gallery row of each query [q]: the item to find, or its own item if
            `are_gallery_items`.
        are_gallery_items: Whether the queries are items themselves, each left out of its own
            answer.
        metric: The metric of the store.
    """

    old: Vectors
    new: Vectors
    gallery_rows: Ints
    are_gallery_items: bool
    metric: Metric = "cosine"

    def select(self, rows: Ints) -> "Queries":
        """Select queries by their numbers, 0 to q - 1.

        Vectors and rows are copies, in the order of `gallery_rows`.

        Raises:
            IndexError: There is no such query.
        """
        return Queries(
            self.old[rows],
            self.new[rows],
            self.gallery_rows[rows],
            self.are_gallery_items,
            self.metric,
        )

    @property
    def exchange_models(self) -> "Queries":
        """Return the same queries with the roles of both models exchanged, for a query adapter.
        Arrays are shared.
        """
        return Queries(self.new, self.old, self.gallery_rows, self.are_gallery_items, self.metric)


def query_item_distances(queries: Vectors, items: Vectors, metric: Metric = "cosine") -> Block:
    """Compute distances of queries [q, d] to items [g, d]; smaller is nearer.

    Args:
        queries: float32 [q, d].
        items: float32 [g, d]; g or q may be 0.
        metric: "cosine", "l2" (squared) or "inner_product" (negative).

    Returns:
        float32 [q, g].

    Raises:
        ValueError: The dimensions differ, a value is not finite, or with cosine a vector is zero.
    """
    return distances(queries, items, metric).astype(np.float32)


def measure_figures(native: Block, queries: Queries) -> tuple[Callable[[Block], Figures], Mask]:
    """Prepare the figures of a set of queries.

    With fewer than ten other items, all of them are the true neighbours. Among items at an equal
    distance, which ones are neighbours is arbitrary.

    Args:
        native: Distances [q, g] by the new model alone, which define the true neighbours. At least
            one item; with `are_gallery_items` at least two, because a single item has agreement@10
            NaN.
        queries: The q queries.

    Returns:
        A function from distances [q, g] to figures, and the true neighbours, bool [q, g]. The
        figures are "agreement@10", and for known items also "R@1", "R@10" and "MRR". An item at the
        same distance as the item to find counts as nearer.

    Raises:
        IndexError: There are no items, or a query has a gallery row that does not exist; for known
            items the function raises it.
    """
    rows = np.arange(len(queries.gallery_rows))

    def top(block: Block) -> Ints:
        others = block.copy() if queries.are_gallery_items else block
        if queries.are_gallery_items:
            others[rows, queries.gallery_rows] = np.inf
        count = min(NEIGHBOURS, block.shape[1] - queries.are_gallery_items)
        return np.argpartition(others, count - 1, axis=1)[:, :count].astype(np.int64)

    truth = np.zeros(native.shape, bool)
    np.put_along_axis(truth, top(native), True, 1)

    def figures(block: Block) -> Figures:
        agreement = np.take_along_axis(truth, top(block), 1).mean(1)
        if queries.are_gallery_items:
            return {"agreement@10": agreement}
        # Items at the same distance rank before the item to find, as in nobackfill.metrics.ranking.
        place = (block <= block[rows, queries.gallery_rows][:, None]).sum(1)
        return {
            "R@1": (place <= 1).astype(np.float64),
            "R@10": (place <= 10).astype(np.float64),
            "MRR": 1 / place,
            "agreement@10": agreement,
        }

    return figures, truth


def deciding_figure(figures: Mapping[str, PerQuery], queries_are_items: bool) -> PerQuery:
    """Return the figure that decides a verdict, for each of q queries.

    Args:
        figures: Figures by name.
        queries_are_items: Whether the queries are items themselves.

    Returns:
        [q]: agreement@10 if `queries_are_items`, else MRR.

    Raises:
        KeyError: The figure is missing.
    """
    return figures["agreement@10" if queries_are_items else "MRR"]


# Queries that the curves are measured on, and random orders of the items that they are means of.
MOST_HEALING = 500
ORDERS = 3
# Shares of the items that are native.
SHARES = np.linspace(0, 1, 11)
# A valley that is not deeper is within the noise of a few hundred queries.
MOST_BELOW = 0.01

# For each figure, its mean at each of SHARES.
Curves = dict[str, list[float]]
# The line of migrated items, and that of native ones.
Lines = tuple[OddsLine, OddsLine]
# How scores of both origins are made comparable. "plain": as they are. "odds": as log-odds of a
# match. "shared": as log-odds, where a native item keeps a share of its score as a migrated one.
Scale = Literal["plain", "odds", "shared"]


@dataclass(frozen=True)
class LazyReembeddingCurves:
    """Figures while items become native at random.

    Attributes:
        curves_by_score: Ranked by the scores of `nobackfill.serve`.
        curves_by_distance: Ranked by distance, migrated and native vectors in one index.
    """

    curves_by_score: Curves
    curves_by_distance: Curves


@dataclass(frozen=True)
class ScaleChoice:
    """The scale that scores of both origins are compared on.

    Attributes:
        odds_lines: Fitted to all queries.
        curves: Figures while items become native, each query by lines that were fitted without it.
        native_scores: Scores [q, g] of native items, each query by lines that were fitted without
            it.
        half_odds_lines: The lines for the first half of the queries, and for the others.
    """

    odds_lines: Lines
    curves: Curves
    half_odds_lines: tuple[Lines, Lines]
    native_scores: Block


@dataclass(frozen=True)
class MixedGallery:
    """A gallery with migrated and native items.

    Distances of both origins are not comparable. Ranked by distance, a gallery may be worse
    half-way than at either end (a valley). A common scale of relevance closes the valley.

    Attributes:
        migrated_nearness: Nearness [q, g] of each item as a migrated one; larger is nearer.
        native_nearness: Nearness [q, g] of each item as a native one.
        true_neighbours: The true neighbours, bool [q, g].
        queries: The q queries.
    """

    migrated_nearness: Block
    native_nearness: Block
    true_neighbours: Mask
    queries: Queries

    def choose_scale(self, halves: Mask) -> ScaleChoice:
        """Choose the scale whose figures have the shallowest valley.

        Valleys of less than MOST_BELOW count as equal; among these the highest mean figure wins. A
        match is the item to find, or one of the new model's own ten neighbours.

        It measures at most 500 queries. Scales that are equal in both respects keep the order
        plain, odds, shared.

        Args:
            halves: Bool [q]. Each half of the queries is judged by lines of the other half; lines
                of a half without queries leave nearness as it is.

        Raises:
            IndexError: A query has a gallery row that does not exist.
        """
        some = slice(MOST_HEALING)
        lines = {
            scale: (self._lines(scale, ~halves), self._lines(scale, halves))
            for scale in get_args(Scale)
        }
        curves = {
            scale: self._curves(*self._scores(pair, halves, some)) for scale, pair in lines.items()
        }
        # A line changes no order among items of one origin: all scales have the same ends.
        ends = {name: min(curve[0], curve[-1]) for name, curve in curves["plain"].items()}

        def cost(scale: Scale) -> tuple[float, float]:
            depth = max(ends[name] - min(curve) for name, curve in curves[scale].items())
            deciding = curves[scale]["agreement@10" if self.queries.are_gallery_items else "MRR"]
            return max(MOST_BELOW, depth), -float(np.mean(deciding))

        best = min(curves, key=cost)
        native = self._scores(lines[best], halves, slice(None))[1]
        every = np.ones(len(halves), bool)
        return ScaleChoice(self._lines(best, every), curves[best], lines[best], native)

    def curves_by_distance(self) -> Curves:
        """Measure the curves of the nearness as it is.

        At most 500 queries count, and each curve is the mean over three random orders of the items.

        Returns:
            For each figure its mean at each of SHARES, 0 to 1.

        Raises:
            IndexError: A query has a gallery row that does not exist.
        """
        return self._curves(
            self.migrated_nearness[:MOST_HEALING], self.native_nearness[:MOST_HEALING]
        )

    def _lines(self, scale: Scale, some: Mask) -> Lines:
        """Fit the lines of a scale to some of the queries, bool [q]."""
        if scale == "plain":
            return OddsLine(), OddsLine()
        used = np.repeat(some[:, None], self.native_nearness.shape[1], 1)
        matches = self.true_neighbours.copy()
        rows = np.arange(len(some))
        if self.queries.are_gallery_items:
            used[rows, self.queries.gallery_rows] = False
        else:
            matches[:] = False
            matches[rows, self.queries.gallery_rows] = True
        masks = matches & used, ~matches & used

        def line(*blocks: Block) -> OddsLine:
            hits, others = (np.stack([block[mask] for block in blocks], 1) for mask in masks)
            return fit_odds_line(hits, others)

        shared = [self.migrated_nearness] if scale == "shared" else []
        return line(self.migrated_nearness), line(self.native_nearness, *shared)

    def _scores(self, lines: tuple[Lines, Lines], halves: Mask, some: slice) -> tuple[Block, Block]:
        """Score the items of some queries as migrated and as native ones.

        Args:
            lines: The lines for queries in `halves`, then those for the others.
            halves: Bool [q].
            some: The queries to score.
        """
        migrated, native = self.migrated_nearness[some].copy(), self.native_nearness[some].copy()
        for (of_migrated, of_native), half in zip(
            lines, (halves[some], ~halves[some]), strict=True
        ):
            nearness = self.migrated_nearness[some][half]
            migrated[half] = of_migrated(nearness, nearness)
            native[half] = of_native(native[half], nearness)
        return migrated, native

    def _curves(self, migrated: Block, native: Block) -> Curves:
        rows = np.arange(len(migrated))
        figures, _ = measure_figures(-self.native_nearness[rows], self.queries.select(rows))
        curves: dict[str, list[list[float]]] = {}
        for seed in range(ORDERS):
            order = np.random.default_rng(seed).random(native.shape[1])
            steps = [figures(-np.where(order < share, native, migrated)) for share in SHARES]
            for name in steps[0]:
                curves.setdefault(name, []).append([float(step[name].mean()) for step in steps])
        return {name: np.mean(ones, axis=0).tolist() for name, ones in curves.items()}


def valley_depth(curve: list[float]) -> float:
    """Return how far a curve of at least one point falls below the lower of its ends; 0 if not.

    Raises:
        ValueError: The curve is empty.
    """
    return max(0.0, min(curve[0], curve[-1]) - min(curve))


# Weights of the new model's score to try in rank fusion; 0 is the old model alone.
FUSION_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
# Items that a query's distances are standardised by, and queries that hubs are measured by.
ANCHORS, CROWD = 1000, 1000
# Most queries that are judged, and most distances that one way holds in memory.
MOST_QUERIES = 2000
MOST_DISTANCES = 20_000_000


# Parameters of rank fusion: the new model's weight, and whether hubs are corrected.
FusionChoice = tuple[float, bool]


@dataclass(frozen=True)
class JudgedGallery:
    """The g items that are judged, row by row in three forms.

    Attributes:
        old: Vectors by the old model [g, a].
        migrated: Migrated vectors [g, b].
        new: Vectors by the new model [g, b].
    """

    old: Vectors
    migrated: Vectors
    new: Vectors


def sample_queries(queries: Queries, item_count: int, seed: int = 0) -> Queries:
    """Draw a random sample of queries, so that their distances to all items fit into memory.

    Args:
        queries: The q queries.
        item_count: Number of items that they are judged among.
        seed: Seed of the random choice.

    Returns:
        At most 2,000 queries and at most 20,000,000 distances, but at least one query, in their
        order; the same object if there are no more.

    Raises:
        ValueError: There are more queries, and `seed` is below 0.
    """
    most = max(1, min(MOST_QUERIES, MOST_DISTANCES // max(1, item_count)))
    if len(queries.gallery_rows) <= most:
        return queries
    rng = np.random.default_rng(seed)
    return queries.select(np.sort(rng.choice(len(queries.gallery_rows), most, replace=False)))


def sample_item_queries(pairs: Pairs, seed: int = 0) -> Queries:
    """Make queries for neighbours from a random sample of the items (see `sample_queries`).

    Returns:
        Queries with `are_gallery_items`: each item's own answer leaves it out. At most 2,000, in
        the order of the pairs; the same for the same seed.

    Raises:
        ValueError: There are more than 2,000 pairs, and `seed` is below 0.
    """
    rows = np.arange(len(pairs), dtype=np.int64)
    queries = Queries(pairs.old, pairs.new, rows, are_gallery_items=True, metric=pairs.metric)
    return sample_queries(queries, len(pairs), seed)


@dataclass(frozen=True)
class Judgement:
    """Figures of all ways.

    Attributes:
        figures_by_option: Figures of "stay", "map", "both", "lazily" and "re-embed".
        rank_fusion: The rank fusion of "both", without the map's digest.
        half_rank_fusions: The rank fusion that judges the even queries, fitted to the odd ones;
            and that of the odd queries.
        lazy_reembedding: Figures while items become native.
    """

    figures_by_option: dict[str, Figures]
    rank_fusion: FittedRankFusion
    half_rank_fusions: tuple[FittedRankFusion, FittedRankFusion]
    lazy_reembedding: LazyReembeddingCurves


def judge_options(
    gallery: JudgedGallery, queries: Queries, migrated_distances: Block | None = None, seed: int = 0
) -> Judgement:
    """Fit rank fusion and measure the figures of all ways.

    The weight, the correction of hubs and the lines are chosen on one half of the queries and
    judged on the other, each half in turn. The returned fusion is fitted to all queries.

    Needs at least 2 queries and 2 items. Only the anchors are random: the same seed gives the same
    judgement.

    Args:
        gallery: The g items.
        queries: The q queries.
        migrated_distances: Distances [q, g] of new queries to migrated items, by maps that were
            fitted without both; None for those of the gallery's migrated vectors.
        seed: Seed of the random choice of anchor items.

    Raises:
        ValueError: A vector is not finite, or with cosine is zero; or dimensions differ; or `seed`
            is below 0.
        IndexError: A query has a gallery row that does not exist.
    """
    stay, migrated_distances, native = _blocks(gallery, queries, migrated_distances)
    figures, truth = measure_figures(native, queries)
    anchors = anchor_rows(gallery, seed)
    halves = np.arange(len(queries.gallery_rows)) % 2 == 0
    near_old, near_new = (
        standardise_distances(stay, anchors),
        standardise_distances(migrated_distances, anchors),
    )
    # Hubs for either half of the queries are measured by the other half.
    hubness = np.where(
        halves[:, None], *(_hubs(gallery, queries, half) for half in (~halves, halves))
    )
    near_corrected = standardise_distances(migrated_distances + hubness, anchors)

    def fused(choice: FusionChoice) -> Block:
        weight, corrected = choice
        return fuse_nearness(weight, near_old, near_corrected if corrected else near_new)

    candidates_alone = _candidate_filter(stay, migrated_distances)
    # Hubs are measured by the queries of users; items that query their neighbours say nothing.
    correctable = not queries.are_gallery_items and queries.metric == "cosine"
    choices = [
        (weight, corrected) for weight in FUSION_WEIGHTS for corrected in (False, correctable)
    ]
    scores = {one: figures(candidates_alone(-fused(one))) for one in dict.fromkeys(choices)}
    both = np.empty_like(stay)
    by_half = [_best(scores, queries.are_gallery_items, ~half) for half in (halves, ~halves)]
    for half, choice in zip((halves, ~halves), by_half, strict=True):
        both[half] = -fused(choice)[half]
    both = candidates_alone(both)
    best = _best(scores, queries.are_gallery_items, np.ones(len(halves), bool))
    mixed = MixedGallery(fused(best), standardise_distances(native, anchors), truth, queries)
    scale = mixed.choose_scale(halves)
    raw = MixedGallery(-migrated_distances, -native, truth, queries).curves_by_distance()
    ways = {
        "stay": stay,
        "map": migrated_distances,
        "both": both,
        "lazily": _rerank_hits(both, -scale.native_scores),
        "re-embed": native,
    }
    old, mapped, new = (
        normalise(part[anchors]) if queries.metric == "cosine" else part[anchors]
        for part in (gallery.old, gallery.migrated, gallery.new)
    )

    def joining(choice: FusionChoice, lines: Lines, crowd: Mask) -> FittedRankFusion:
        weight, corrected = choice
        fusion = FittedRankFusion(weight, *lines, old, mapped, new, metric=queries.metric)
        if not corrected:
            return fusion
        return replace(fusion, hub_queries=normalise(queries.new[crowd][:CROWD]))

    by_way = {name: figures(block) for name, block in ways.items()}
    even, odd = (
        joining(choice, lines, crowd)
        for choice, lines, crowd in zip(
            by_half, scale.half_odds_lines, (~halves, halves), strict=True
        )
    )
    whole = joining(best, scale.odds_lines, np.ones(len(halves), bool))
    return Judgement(by_way, whole, (even, odd), LazyReembeddingCurves(scale.curves, raw))


def judge_switch(pairs: Pairs, queries: Queries) -> Figures:
    """Measure the figures of searches with the new model's queries in the old model's vectors.

    Args:
        pairs: Pairs of vectors with the same dimension.
        queries: Queries whose items are rows of `pairs`; with `are_gallery_items`, each is left out
            of its own answer.

    Returns:
        For each query its figures, as of `measure_figures`: agreement@10, and without
        `are_gallery_items` also R@1, R@10 and MRR.

    Raises:
        ValueError: The dimensions of the two models differ, a value is not finite, or with cosine a
            vector is zero.
        IndexError: A query has a gallery row that does not exist.
    """
    figures, _ = measure_figures(
        query_item_distances(queries.new, pairs.new, queries.metric), queries
    )
    return figures(query_item_distances(queries.new, pairs.old, queries.metric))


def judge_fusion(
    gallery: JudgedGallery,
    queries: Queries,
    rank_fusion: FittedRankFusion,
    migrated_distances: Block | None = None,
) -> dict[str, Figures]:
    """Measure the figures of all options with a rank fusion that is fitted already.

    The anchor items are those of seed 0, so equal arguments give equal figures.

    Args:
        gallery: The g items.
        queries: The q queries.
        rank_fusion: The rank fusion.
        migrated_distances: As in `judge_options`.

    Returns:
        Figures of "stay", "map", "both", "lazily" and "re-embed".

    Raises:
        ValueError: A vector is not finite, or with cosine is zero; or dimensions differ.
        IndexError: A query has a gallery row that does not exist.
    """
    ways = ranking_values_by_option(gallery, queries, rank_fusion, migrated_distances)
    figures, _ = measure_figures(ways["re-embed"], queries)
    return {name: figures(block) for name, block in ways.items()}


def ranking_values_by_option(
    gallery: JudgedGallery,
    queries: Queries,
    rank_fusion: FittedRankFusion,
    migrated_distances: Block | None = None,
    seed: int = 0,
) -> dict[str, Block]:
    """Compute the values by which each option ranks the gallery.

    "both" ranks the candidates of both models only, and "lazily" the first hits among them.

    Args:
        gallery: The g items.
        queries: The q queries.
        rank_fusion: The rank fusion.
        migrated_distances: As in `judge_options`.
        seed: Seed of the random choice of anchor items.

    Returns:
        For "stay", "map", "both", "lazily" and "re-embed" a block [q, g]: the smallest value ranks
        first, and infinity is not in the answer.

    Raises:
        ValueError: A vector is not finite, or with cosine is zero; or dimensions differ; or `seed`
            is below 0.
    """
    stay, migrated_distances, native = _blocks(gallery, queries, migrated_distances)
    anchors = anchor_rows(gallery, seed)
    near_new = standardise_distances(
        migrated_distances + measure_hubs(gallery.migrated, rank_fusion.hub_queries)[None], anchors
    )
    near_old = standardise_distances(stay, anchors)
    near = fuse_nearness(rank_fusion.new_weight, near_old, near_new)
    both = _candidate_filter(stay, migrated_distances)(-near)
    lazily = _rerank_hits(
        both, -rank_fusion.native_line(standardise_distances(native, anchors), near)
    )
    return {
        "stay": stay,
        "map": migrated_distances,
        "both": both,
        "lazily": lazily,
        "re-embed": native,
    }


def _blocks(
    gallery: JudgedGallery, queries: Queries, migrated: Block | None
) -> tuple[Block, Block, Block]:
    """Compute the distances [q, g] of old/old, new/migrated (unless given) and new/new."""
    sides = (
        (queries.old, gallery.old),
        (queries.new, gallery.migrated),
        (queries.new, gallery.new),
    )
    stay, own, native = (query_item_distances(*side, queries.metric) for side in sides)
    return stay, own if migrated is None else migrated, native


def anchor_rows(gallery: JudgedGallery, seed: int = 0) -> Ints:
    """Draw up to 1,000 rows of a gallery at random, by which distances are standardised.

    Returns:
        Increasing numbers of rows; the same for the same seed. All rows of a smaller gallery; none
        of an empty one.

    Raises:
        ValueError: `seed` is below 0.
    """
    rows = np.random.default_rng(seed).permutation(len(gallery.old))[:ANCHORS]
    return np.sort(rows.astype(np.int64))


def _hubs(gallery: JudgedGallery, queries: Queries, some: Mask) -> Block:
    """Measure the hubness [1, g] of migrated items by some of the queries, bool [q]."""
    return measure_hubs(gallery.migrated, normalise(queries.new[some][:CROWD]))[None]


def _candidate_filter(stay: Block, migrated: Block) -> Callable[[Block], Block]:
    """Return a function that sets a block [q, g] to infinity except at each query's candidates.

    Args:
        stay: Distances [q, g] of old/old.
        migrated: Distances [q, g] of new/migrated.
    """
    mask = np.zeros(stay.shape, bool)
    for query, by_model in enumerate(zip(stay, migrated, strict=True)):
        mask[query, collect_candidates(*(partial(_nearest, one) for one in by_model))] = True
    return lambda block: np.where(mask, block, np.float32(np.inf))


def _nearest(row: Block, count: int) -> list[int]:
    items: list[int] = np.argpartition(row, min(count, len(row)) - 1)[:count].tolist()
    return items


def _rerank_hits(both: Block, native: Block) -> Block:
    """Rank the first hits of `both` [q, g] by `native` [q, g]; all other items are infinity."""
    ranking = np.full_like(both, np.inf)
    hits = np.argpartition(both, min(CANDIDATES_PER_SEARCH, both.shape[1]) - 1, axis=1)[
        :, :CANDIDATES_PER_SEARCH
    ]
    np.put_along_axis(ranking, hits, np.take_along_axis(native, hits, 1), 1)
    return ranking


def figures_from_distances(migrated_distances: Block, pairs: Pairs, queries: Queries) -> Figures:
    """Measure the figures of one map from distances.

    Args:
        migrated_distances: Distances [q, n] of the new model's queries to the migrated items.
        pairs: The n items; their new vectors define the true neighbours.
        queries: The q queries.

    Returns:
        Figures by name, each [q]; see `measure_figures`.

    Raises:
        ValueError: A new vector is not finite, or with cosine is zero; or dimensions differ.
        IndexError: A query has a gallery row that does not exist.
    """
    return measure_figures(query_item_distances(queries.new, pairs.new, queries.metric), queries)[
        0
    ](migrated_distances)


def figures_from_vectors(vectors: Vectors, pairs: Pairs, queries: Queries) -> Figures:
    """Measure the figures of one map from migrated vectors.

    Args:
        vectors: The migrated vectors of the n items [n, b].
        pairs: The n items; their new vectors define the true neighbours.
        queries: The queries.

    Returns:
        Figures by name, each [q]; see `measure_figures`.

    Raises:
        ValueError: A vector is not finite, or with cosine is zero; or dimensions differ.
        IndexError: A query has a gallery row that does not exist.
    """
    return figures_from_distances(
        query_item_distances(queries.new, vectors, queries.metric), pairs, queries
    )


def _best(scores: Mapping[FusionChoice, Figures], own: bool, some: Mask) -> FusionChoice:
    """Choose rank fusion by some of the queries, bool [q].

    Among the choices within a standard error of the best figure, the one with the most of the new
    model's own neighbours wins. Hubs are corrected only where as many of these neighbours are left
    as without, or as the better of old vectors and map keeps alone: hubs that the new model has,
    too, are no fault of the map.
    """

    def figure(choice: FusionChoice, own: bool) -> PerQuery:
        return deciding_figure(scores[choice], own)[some]

    def agreement(choice: FusionChoice) -> float:
        return float(figure(choice, True).mean())

    # The old vectors alone keep so many of these neighbours, or the map alone does.
    least = max(agreement((weight, False)) for weight in (min(FUSION_WEIGHTS), max(FUSION_WEIGHTS)))
    choices = [
        (weight, corrected)
        for weight, corrected in scores
        if not corrected or agreement((weight, True)) >= min(least, agreement((weight, False)))
    ]
    best = max(choices, key=lambda choice: float(figure(choice, own).mean()))

    def as_good(choice: FusionChoice) -> bool:
        loss = figure(best, own) - figure(choice, own)
        return bool(loss.mean() <= loss.std() / np.sqrt(len(loss)))

    return max(filter(as_good, choices), key=agreement)
