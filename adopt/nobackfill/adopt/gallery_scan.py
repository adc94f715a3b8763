"""Measure the ways to go on over the whole gallery, from a sample of native vectors.

The old vectors of the whole gallery are stored. One pass over them measures every ranking of old
and migrated vectors, and the candidates that searches by both models will have. The new model's own
vectors exist for the sample alone. Figures that need more of them are estimates:

1. On the sample, the nearness of an item by the new model is regressed on its nearness by the old
   model and by the map. The residuals of all queries together give its distribution.
2. The pass counts, for each query, the items at each predicted nearness. The sum over these counts
   is the expected number of items that the new model would rank before a given one.
3. Draws from the distribution give the native nearness of candidates outside the sample.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from nobackfill.adopt.judgement import (
    NEIGHBOURS,
    Figures,
    PerQuery,
    Queries,
    query_item_distances,
)
from nobackfill.adopt.maps import Map
from nobackfill.adopt.pairs import WINDOW_ITEMS, Pairs
from nobackfill.adopt.sources.source import Source, check_rows
from nobackfill.metrics.distances import Metric
from nobackfill.metrics.ranking import Ints
from nobackfill.serving.fusion import (
    CANDIDATES_PER_SEARCH,
    Block,
    FittedRankFusion,
    Mask,
    collect_candidates,
    fuse_nearness,
    measure_hubs,
)
from nobackfill.vectors import Vectors

# Numbers of either precision.
Values = NDArray[np.floating[Any]]
Number = TypeVar("Number", np.float32, np.int64)

# Distances that one step of the pass holds, and those that all of it computes at most.
STEP_DISTANCES = 3_000_000
MOST_DISTANCES = 6_000_000_000
# Queries whose features are held at once while the model of nearness is fitted.
FIT_QUERIES = 100
# Fewest queries of a set that the pass takes, however large the gallery is.
FEWEST_QUERIES = 200
# Bins of predicted nearness, and pairs that share a distribution of residuals, at least.
BINS = 160
FEWEST_PAIRS = 300
# Shares of the pairs with the largest predictions that have a shape of their own.
TIERS = (0.01, 0.1)
# Shares of residuals above a knot of their distribution.
LEVELS = (
    0.9999, 0.999, 0.99, 0.97, 0.9, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 3e-3,
    1e-3, 3e-4, 1e-4, 3e-5, 1e-5,
)  # fmt: skip
# A query's own slope is shrunk as by this many distances at one deviation.
PRIOR = 5.0
# With fewer knots, a distribution is taken as normal.
FEWEST_KNOTS = 5
# Draws of the native nearness of each candidate.
NEARNESS_DRAWS = 8
# Least error of the model of nearness, as a share of p (1 - p): a back test may be right by chance.
MODEL_ERROR = 0.2
# Parts of the sample that are left out in turn for the interval of an estimate.
LEFT_OUT_PARTS = 10


@dataclass(frozen=True)
class ScanQueries:
    """A set of q queries, with what the sample has shown of them.

    Attributes:
        queries: Their vectors by both models; rows are those of the n pairs.
        migrated_distances: Distances [q, n] to the migrated pairs, by maps that were fitted
            without both.
        rank_fusions: Rank fusion of the queries in `in_first_half`, and that of the others.
        in_first_half: Bool [q].
        old_space_queries: More forms of the queries in the old space [q, a], by the name of their
            way.
        old_space_distances: Their distances [q, n] to the pairs, by the name of their way.
    """

    queries: Queries
    migrated_distances: Block
    rank_fusions: tuple[FittedRankFusion, FittedRankFusion]
    in_first_half: Mask
    old_space_queries: Mapping[str, Vectors]
    old_space_distances: Mapping[str, Block]

    def select(self, rows: Ints) -> "ScanQueries":
        """Select queries by their numbers, 0 to q - 1.

        Their order is that of `rows`; the rank fusions stay.

        Raises:
            IndexError: There is no such query.
        """
        return ScanQueries(
            self.queries.select(rows),
            self.migrated_distances[rows],
            self.rank_fusions,
            self.in_first_half[rows],
            {name: vectors[rows] for name, vectors in self.old_space_queries.items()},
            {name: block[rows] for name, block in self.old_space_distances.items()},
        )

    def distances(self, items: Vectors, migrated: Block) -> dict[str, Block]:
        """Compute the distances [q, w] of each way to items outside the sample.

        Args:
            items: Their old vectors [w, a].
            migrated: Distances [q, w] of new queries to the migrated items.

        Returns:
            "stay", "map" and each way of `old_space_queries`; smaller is nearer. The block of "map"
            is `migrated` itself.

        Raises:
            ValueError: An item has another dimension, or with cosine is zero. An item is not
                finite.
        """
        metric = self.queries.metric
        return {
            "stay": query_item_distances(self.queries.old, items, metric),
            "map": migrated,
            **{
                name: query_item_distances(side, items, metric)
                for name, side in self.old_space_queries.items()
            },
        }


class _Nearest:
    """The k nearest items of each of q queries, so far.

    Attributes:
        order: Their distances [q, k], unordered; infinity where there are fewer.
        numbers: Their numbers [q, k]; -1 where there are fewer.
        values: Further values of each, float32 [v, q, k].
    """

    def __init__(self, queries: int, count: int, values: int) -> None:
        self.order = np.full((queries, count), np.inf, np.float32)
        self.numbers = np.full((queries, count), -1, np.int64)
        self.values = np.zeros((values, queries, count), np.float32)

    def add(self, order: Block, values: Sequence[Block], first: int) -> None:
        """Add items with the numbers first, first + 1, …

        Args:
            order: Their distances [q, w]; infinity leaves an item out.
            values: Blocks [q, w] of further values.
            first: The number of the first item.
        """
        rows, columns = np.nonzero(order < self.order.max(1)[:, None])
        if not len(rows):
            return
        sizes = np.bincount(rows, minlength=len(order))
        position = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)

        def append(block: NDArray[Number], added: NDArray[Number], fill: float) -> NDArray[Number]:
            wide = np.full((len(order), sizes.max()), fill, block.dtype)
            wide[rows, position] = added
            return np.concatenate([block, wide], 1)

        count = self.order.shape[1]
        distances = append(self.order, order[rows, columns], np.inf)
        best = np.argpartition(distances, count - 1, axis=1)[:, :count]
        self.order = np.take_along_axis(distances, best, 1)
        numbers = append(self.numbers, columns + first, -1)
        self.numbers = np.take_along_axis(numbers, best, 1)
        for number, block in enumerate(values):
            whole = append(self.values[number], block[rows, columns], 0)
            self.values[number] = np.take_along_axis(whole, best, 1)


@dataclass(frozen=True)
class _Scale:
    """Mean and deviation of each query's distances to the anchors [q, 1]."""

    mean: Block
    spread: Block

    @classmethod
    def of(cls, block: Block, anchors: Ints) -> "_Scale":
        part = block[:, anchors]
        spread = np.maximum(part.std(1, keepdims=True), 1e-12)
        return cls(part.mean(1, keepdims=True), spread)

    def __call__(self, block: Values) -> Block:
        return np.asarray((self.mean - block) / self.spread, np.float32)

    def part(self, rows: slice) -> "_Scale":
        return _Scale(self.mean[rows], self.spread[rows])


class _Residuals:
    """The distribution of residuals: a mean and a deviation for each bin, a shape for each tier."""

    def __init__(
        self, centres: Values, deviations: Values, tiers: Ints, shapes: list[tuple[Values, Values]]
    ) -> None:
        """Take the parts.

        Args:
            centres: The mean of the residuals in each bin [BINS].
            deviations: Their standard deviation [BINS].
            tiers: The tier of each bin [BINS].
            shapes: For each tier, standardised residuals and their tail scores.
        """
        self._means, self._deviations = centres, deviations
        self._tiers, self._shapes = tiers, shapes

    def share_above(self, residual: Values, bins: Ints) -> PerQuery:
        """Return the probability that a residual is larger, for values and their bins."""
        values = (residual - self._means[bins]) / self._deviations[bins]
        return _share(self._by_tier(values, bins, inverse=False))

    def draw(self, bins: Ints, rng: np.random.Generator) -> PerQuery:
        """Draw a residual for each bin."""
        score = _score(rng.random(bins.shape))
        values = self._by_tier(score, bins, inverse=True)
        residuals: PerQuery = self._means[bins] + self._deviations[bins] * values
        return residuals

    def _by_tier(self, values: Values, bins: Ints, *, inverse: bool) -> PerQuery:
        results: PerQuery = np.empty(values.shape)
        tier = self._tiers[bins]
        for number, (knots, scores) in enumerate(self._shapes):
            some = tier == number
            sides = (scores, knots) if inverse else (knots, scores)
            results[some] = np.interp(values[some], *sides)
        return results


def _score(share: Values) -> PerQuery:
    """Turn the share above a value into a score in which the tail of a normal is straight."""
    lower = np.minimum(share, 1 - share)
    score = np.sqrt(-2 * np.log(np.maximum(2 * lower, 1e-300)))
    signed: PerQuery = np.where(share <= 0.5, score, -score)
    return signed


def _share(score: Values) -> PerQuery:
    """Invert `_score`."""
    half = 0.5 * np.exp(-np.square(score) / 2)
    share: PerQuery = np.where(score >= 0, half, 1 - half)
    return share


def _knots(residuals: Values) -> tuple[Values, Values]:
    """Describe the distribution of residuals [m] by quantiles, with straight ends."""
    levels = [one for one in LEVELS if min(one, 1 - one) * len(residuals) >= 3]
    if len(levels) < FEWEST_KNOTS:
        # Too few residuals: about those of a normal distribution.
        return np.array([-9.0, 9.0]), np.array([-12.0, 12.0])
    values = np.quantile(residuals, 1 - np.asarray(levels))
    values = np.maximum.accumulate(values) + 1e-9 * np.arange(len(values))
    scores = _score(np.asarray(levels))
    low = (values[1] - values[0]) / (scores[1] - scores[0])
    high = (values[-1] - values[-3]) / (scores[-1] - scores[-3])
    far = 12.0
    return (
        np.r_[values[0] - far * low, values, values[-1] + far * high],
        np.r_[scores[0] - far, scores, scores[-1] + far],
    )


class NativeNearnessPredictor:
    """Predicts the native nearness of items from their old and migrated nearness."""

    def __init__(self, old: Block, migrated: Block, native: Block, usable: Mask) -> None:
        """Fit to the sample.

        Args:
            old: Standardised nearness [q, n] of the n sampled items by the old model.
            migrated: The same by the map.
            native: The same by the new model.
            usable: Bool [q, n]: neither a query's own item nor the item to find.

        Raises:
            ValueError: Nothing is usable.
        """
        weights = np.where(usable & (np.maximum(old, migrated) > 1.5), 1.0, 0.02) * usable
        features = len(_features(old[:0], migrated[:0]))
        gram, product = 1e-6 * np.eye(features), np.zeros(features)
        # A part of the queries at a time: all features at once would be the peak of a verdict.
        for first in range(0, len(old), FIT_QUERIES):
            part = slice(first, first + FIT_QUERIES)
            root = np.sqrt(weights[part]).ravel()
            columns = [one.ravel() for one in _features(old[part], migrated[part])]
            design = np.stack(columns, 1) * root[:, None]
            gram += design.T @ design
            product += design.T @ (root * native[part].ravel())
        self._line = np.linalg.lstsq(gram, product, rcond=None)[0].astype(np.float32)
        # How much the old model says of the new one differs from query to query.
        self._shift, self._slope = np.zeros((len(old), 1), np.float32), np.ones(1, np.float32)
        pooled = self.predict(old, migrated)
        total = weights.sum(1, keepdims=True) + 1e-9
        middles = [(weights * one).sum(1, keepdims=True) / total for one in (pooled, native)]
        offsets = [one - middle for one, middle in zip((pooled, native), middles, strict=True)]
        spread = (weights * np.square(offsets[0])).sum(1, keepdims=True)
        slope = ((weights * offsets[0] * offsets[1]).sum(1, keepdims=True) + PRIOR) / (
            spread + PRIOR
        )
        self._slope = slope.astype(np.float32)
        self._shift = (middles[1] - slope * middles[0]).astype(np.float32)
        predicted = self.predict(old, migrated)
        residual = np.where(usable, native - predicted, 0)
        count = np.maximum(1, usable.sum(1, keepdims=True))
        self.residual_deviation = np.sqrt(np.square(residual).sum(1, keepdims=True) / count) + 1e-9
        low, high = float(predicted[usable].min()), float(predicted[usable].max())
        self._low, self._width = low, max(1e-6, (high - low) / (BINS - 2))
        self._bins = self.bin_numbers(predicted)
        self._residual = (residual / self.residual_deviation).astype(np.float32)
        self._usable = usable
        self.bin_centres = self._low + self._width * (np.arange(BINS) + 0.5)

    def predict(self, old: Block, migrated: Block) -> Block:
        """Return the expected native nearness, float32 of the shape of both arguments.

        Both are standardised as in the constructor, [q, w], for the same q queries.

        Raises:
            ValueError: The numbers of queries or items differ.
        """
        predicted = np.full(old.shape, self._line[0], np.float32)
        for weight, feature in zip(self._line[1:], _features(old, migrated)[1:], strict=True):
            predicted += weight * feature
        own: Block = self._slope * predicted + self._shift
        return own

    def bin_numbers(self, predicted: Block) -> Ints:
        """Return the bin of each predicted nearness, 0 to BINS - 1.

        Predictions beyond those of the sample belong to the first or the last bin.
        """
        bins: Ints = np.clip((predicted - self._low) / self._width, 0, BINS - 1).astype(np.int64)
        return bins

    def residuals(self, left_out: Mask | None = None) -> _Residuals:
        """Estimate the distribution of residuals.

        If all items are left out, the result is not usable. Nothing is changed.

        Args:
            left_out: Bool [n] of items to leave out; None for all items.

        Raises:
            ValueError: `left_out` has another length.
        """
        usable = self._usable if left_out is None else self._usable & ~left_out
        bins, residual = self._bins[usable], self._residual[usable]
        sizes = np.bincount(bins, minlength=BINS)
        groups, group, size = np.zeros(BINS, np.int64), 0, 0
        for number in range(BINS - 1, -1, -1):
            groups[number] = group
            size += sizes[number]
            if size >= FEWEST_PAIRS and sizes[:number].sum() >= FEWEST_PAIRS:
                group, size = group + 1, 0
        of = groups[bins]
        count = np.bincount(of, minlength=group + 1)
        # Between the middles of groups, means and deviations change evenly.
        middles = (np.bincount(of, bins) / count)[::-1]
        every = np.arange(BINS)
        means = np.interp(every, middles, (np.bincount(of, residual) / count)[::-1])
        centred = residual - means[bins]
        squares = np.bincount(of, np.square(centred)) / count
        deviations = np.interp(every, middles, np.sqrt(squares + 1e-12)[::-1])
        # Bins of the largest predictions are the first tier.
        above = np.cumsum(sizes[::-1])[::-1] / len(bins)
        tiers = np.searchsorted(TIERS, above)
        scaled, tier = centred / deviations[bins], tiers[bins]
        shapes = [_knots(scaled[tier == one]) for one in range(len(TIERS) + 1)]
        return _Residuals(means, deviations, tiers, shapes)


def _straighten(distances: Block, metric: Metric) -> Block:
    """Stretch cosine distances such that their tail is that of a normal distribution.

    A cosine c of random vectors in d dimensions exceeds t with a probability near
    (1 - t²)^(d / 2). Other metrics stay as they are.
    """
    if metric != "cosine":
        return distances
    cosine = np.clip(1 - distances, -0.999999, 0.999999)
    return np.asarray(-np.sign(cosine) * np.sqrt(-np.log(1 - np.square(cosine))), np.float32)


def _bend(straight: Values, metric: Metric) -> Values:
    """Invert `_straighten`."""
    if metric != "cosine":
        return straight
    distances: Values = 1 + np.sign(straight) * np.sqrt(1 - np.exp(-np.square(straight)))
    return distances


def _features(old: Block, migrated: Block) -> list[Block]:
    return [np.ones_like(old), old, migrated, old * old, old * migrated, migrated * migrated]


@dataclass(frozen=True)
class _Items:
    """Some items of each of q queries, [q, c] each.

    Attributes:
        numbers: Their numbers, those of the sample first; -1 fills up.
        old: Their nearness by the old model, standardised.
        migrated: The same by the map.
        joint: Their score by rank fusion; -infinity where there is no item.
    """

    numbers: Ints
    old: Block
    migrated: Block
    joint: Block

    def first(self, order: Block, count: int) -> "_Items":
        """Return the `count` items of each query that have the largest `order` [q, c]."""
        best = np.argsort(-order, axis=1, kind="stable")[:, :count]
        old, migrated, joint = (
            np.take_along_axis(part, best, 1) for part in (self.old, self.migrated, self.joint)
        )
        return _Items(np.take_along_axis(self.numbers, best, 1), old, migrated, joint)


@dataclass(frozen=True)
class ScanResult:
    """Figures of one set of queries in the whole gallery.

    Attributes:
        figures_by_option: Figures of each way.
        candidate_recall: Recall of a search that ranks only each model's best candidates [q], 0 to
            1: the share of the right items that are among these candidates. It is measured for
            items to find, and estimated for the new model's ten neighbours.
        agreement_intervals: For each way the 95 % interval of the mean agreement@10.
    """

    figures_by_option: dict[str, Figures]
    candidate_recall: PerQuery
    agreement_intervals: dict[str, tuple[float, float]]


class SetScan:
    """The pass over the gallery for one set of queries."""

    def __init__(
        self, scan_queries: ScanQueries, pairs: Pairs, migrated: Vectors, anchors: Ints
    ) -> None:
        """Begin with the items of the sample, whose numbers are 0 to n - 1.

        Args:
            scan_queries: The queries.
            pairs: The n items with native vectors.
            migrated: Their migrated vectors [n, b], by maps that were fitted without each.
            anchors: Rows of the pairs that distances are standardised by.

        Raises:
            ValueError: A vector is not finite, or with cosine is zero. There is only one pair.
            IndexError: A query has a gallery row that does not exist.
        """
        queries = scan_queries.queries
        self._one, self._queries, self._sample = scan_queries, queries, len(pairs)
        self._rows = np.arange(len(queries.gallery_rows))
        old = query_item_distances(queries.old, pairs.old, queries.metric)
        native = query_item_distances(queries.new, pairs.new, queries.metric)
        self._of_old, self._of_new = (
            _Scale.of(old, anchors),
            _Scale.of(scan_queries.migrated_distances, anchors),
        )
        straight = _straighten(native, queries.metric)
        self._of_native = _Scale.of(straight, anchors)
        self._plain_native = _Scale.of(native, anchors)
        self.native_nearness = self._of_native(straight)
        hub = self.measure_hubness(migrated)
        self._of_corrected = _Scale.of(scan_queries.migrated_distances + hub, anchors)
        self._itself = np.zeros(old.shape, bool)
        self._itself[self._rows, queries.gallery_rows] = True
        self.nearness_predictor = NativeNearnessPredictor(
            self._of_old(old),
            self._of_new(scan_queries.migrated_distances),
            self.native_nearness,
            ~self._itself,
        )
        if queries.are_gallery_items:
            self.native_nearness = np.where(self._itself, np.float32(-40), self.native_nearness)
        blocks = {
            "stay": old,
            "map": scan_queries.migrated_distances,
            **scan_queries.old_space_distances,
        }
        bound = np.float32(-np.inf)
        self._bounds = {
            name: np.full((len(old), 1), bound) if queries.are_gallery_items
            else block[self._rows, queries.gallery_rows][:, None]
            for name, block in blocks.items()
        }  # fmt: skip
        self.nearer_counts = {name: np.zeros(len(old), np.int64) for name in blocks}
        self._nearest = {
            name: _Nearest(
                len(old), CANDIDATES_PER_SEARCH if name in ("stay", "map") else NEIGHBOURS, 3
            )
            for name in blocks
        }
        self._counts = np.zeros((len(old), BINS), np.int64)
        out = self._itself if queries.are_gallery_items else np.zeros_like(self._itself)
        self._add({name: np.where(out, np.inf, block) for name, block in blocks.items()}, hub, 0)

    def measure_hubness(self, migrated: Vectors) -> Block:
        """Measure the hubness [q, w] of migrated items [w, b] for each query's rank fusion.

        Returns:
            Zeros where a rank fusion corrects no hubs. Without items [q, 0].

        Raises:
            ValueError: A rank fusion corrects hubs, and the items have another dimension than its
                queries.
        """
        first, second = (
            measure_hubs(migrated, joining.hub_queries)[None] for joining in self._one.rank_fusions
        )
        return np.where(self._one.in_first_half[:, None], first, second)

    @property
    def _halves(self) -> list[tuple[FittedRankFusion, Mask]]:
        """The rank fusions, each with its queries, bool [q]."""
        first = self._one.in_first_half
        return list(zip(self._one.rank_fusions, (first, ~first), strict=True))

    @property
    def corrects_hubs(self) -> bool:
        """Tell whether a rank fusion of these queries corrects hubs, so that `measure_hubness` is
        needed.

        If False, `measure_hubness` gives zeros.
        """
        return any(len(joining.hub_queries) for joining in self._one.rank_fusions)

    def add(self, blocks: Mapping[str, Block], hub: Block, first_number: int) -> None:
        """Add items outside the sample.

        The blocks are not changed. An item must be added once. Items may come in any order.

        Args:
            blocks: For each way their distances [q, w], as `ScanQueries.distances` has them.
            hub: Their hubness [q, w] or [1, 1]. [1, 1] if no rank fusion corrects hubs.
            first_number: The number of the first; the sample has 0 to n - 1.

        Raises:
            KeyError: `blocks` lacks "stay" or "map", or has an unknown way.
        """
        old = blocks["stay"]
        predicted = self.nearness_predictor.predict(self._of_old(old), self._of_new(blocks["map"]))
        bins = self.nearness_predictor.bin_numbers(predicted)
        flat = bins + BINS * self._rows[:, None]
        self._counts += np.bincount(flat.ravel(), minlength=self._counts.size).reshape(-1, BINS)
        self._add(blocks, np.broadcast_to(hub, old.shape), first_number)

    def _add(self, blocks: Mapping[str, Block], hub: Block, first: int) -> None:
        values = (blocks["stay"], blocks["map"], hub)
        for name, block in blocks.items():
            self.nearer_counts[name] += (block <= self._bounds[name]).sum(1)
            self._nearest[name].add(block, values, first)

    def result(self, item_count: int, errors: Mapping[str, float] | None = None) -> ScanResult:
        """Compute the figures, once all items are added.

        Args:
            item_count: Items of the gallery, those of the sample too.
            errors: The error of agreement@10 that each way showed in `back_test`; None leaves the
                intervals out.

        Returns:
            Figures of "stay", "map", "both", "lazily", "re-embed" and each way of
            `old_space_queries`. Nothing is changed, so that more items may follow. The same items
            give the same figures again.
        """
        model, queries = self.nearness_predictor, self._queries
        both = self._candidates()
        lists = {
            name: self._items(nearest).first(
                np.where(nearest.numbers < 0, -np.inf, -nearest.order), NEIGHBOURS
            )
            for name, nearest in self._nearest.items()
        }
        lists["both"] = both.first(both.joint, NEIGHBOURS)
        hits = both.first(both.joint, CANDIDATES_PER_SEARCH)
        lists |= {"lazily": hits, "candidates": both}
        residuals = model.residuals()
        agreement = self._agreement(residuals, lists)
        recall = agreement.pop("candidates")
        agreement["lazily"] = self._lazily(residuals, hits)
        ways = {name: {"agreement@10": one} for name, one in agreement.items()}
        ways["re-embed"] = {"agreement@10": np.ones(len(self._rows))}
        if not queries.are_gallery_items:
            places: dict[str, NDArray[np.float64]] = {
                name: place[None].astype(np.float64) for name, place in self.nearer_counts.items()
            }
            found = both.numbers == queries.gallery_rows[:, None]
            recall = found.any(1).astype(np.float64)
            score = np.where(found, both.joint, -np.inf).max(1, keepdims=True)
            rank = (both.joint >= score).sum(1)
            places["both"] = np.where(np.isfinite(score[:, 0]), rank, item_count)[None]
            places |= self._native_places(residuals, hits, both, item_count)
            for name, place in places.items():
                ways[name] |= {
                    "R@1": (place <= 1).mean(0),
                    "R@10": (place <= 10).mean(0),
                    "MRR": (1 / place).mean(0),
                }
        intervals = {} if errors is None else self._intervals(agreement, lists, errors)
        return ScanResult(ways, recall, intervals)

    def _items(self, nearest: _Nearest) -> _Items:
        old, new, hub = nearest.values
        near_old, near_new = self._of_old(old), self._of_new(new)
        corrected = self._of_corrected(new + hub)
        joint = np.empty_like(near_old)
        for joining, half in self._halves:
            by_new = corrected if len(joining.hub_queries) else near_new
            joint[half] = fuse_nearness(joining.new_weight, near_old, by_new)[half]
        joint = np.where(nearest.numbers < 0, -np.inf, joint)
        return _Items(nearest.numbers, near_old, near_new, joint)

    def _candidates(self) -> _Items:
        """Return each query's candidates, by the rule that searches use."""
        sides = [self._nearest["stay"], self._nearest["map"]]
        orders = [np.argsort(side.order, axis=1, kind="stable") for side in sides]
        ranked = [self._items(side) for side in sides]
        parts = [
            np.concatenate([np.take_along_axis(getattr(one, name), order, 1)
                            for one, order in zip(ranked, orders, strict=True)], 1)
            for name in ("numbers", "old", "migrated", "joint")
        ]  # fmt: skip
        everything = _Items(*parts)
        mask = np.zeros(everything.numbers.shape, bool)
        for query, numbers in enumerate(everything.numbers):
            place = {number: at for at, number in reversed(list(enumerate(numbers.tolist())))}
            halves = (
                numbers[:CANDIDATES_PER_SEARCH].tolist(),
                numbers[CANDIDATES_PER_SEARCH:].tolist(),
            )
            found = collect_candidates(*(lambda count, half=half: half[:count] for half in halves))
            mask[query, [place[number] for number in found if number >= 0]] = True
        return _Items(
            np.where(mask, everything.numbers, -1), everything.old, everything.migrated,
            np.where(mask, everything.joint, -np.inf),
        )  # fmt: skip

    def _native(self, items: _Items) -> tuple[Block, Mask]:
        """Return the native nearness [q, c] of items, and whether the sample has it."""
        known = (items.numbers >= 0) & (items.numbers < self._sample)
        rows = np.where(known, items.numbers, 0)
        return np.where(known, np.take_along_axis(self.native_nearness, rows, 1), -40.0), known

    def _shares_above(self, residuals: _Residuals, items: _Items, bound: PerQuery) -> PerQuery:
        """Return the probability that items are natively nearer than a bound [q]."""
        native, known = self._native(items)
        predicted = self.nearness_predictor.predict(items.old, items.migrated)
        bins = self.nearness_predictor.bin_numbers(predicted)
        unknown = residuals.share_above(
            (bound[:, None] - predicted) / self.nearness_predictor.residual_deviation, bins
        )
        share = np.where(known, native >= bound[:, None], unknown)
        return np.where(items.numbers < 0, 0.0, share)

    def _nearer(self, residuals: _Residuals, bound: PerQuery) -> PerQuery:
        """Return how many items outside the sample are expected natively nearer than a bound."""
        some = np.flatnonzero(self._counts.any(0))
        bins = np.broadcast_to(some, (len(bound), len(some)))
        over = (
            bound[:, None] - self.nearness_predictor.bin_centres[some]
        ) / self.nearness_predictor.residual_deviation
        count: PerQuery = (self._counts[:, some] * residuals.share_above(over, bins)).sum(1)
        return count

    def _neighbourhood(self, residuals: _Residuals) -> PerQuery:
        """Return the nearness [q] above which the new model has ten items, as expected."""
        low, high = np.full(len(self._rows), -4.0), np.full(len(self._rows), 40.0)
        for _ in range(20):
            half = (low + high) / 2
            count = (self.native_nearness >= half[:, None]).sum(1) + self._nearer(residuals, half)
            many = count > NEIGHBOURS
            low, high = np.where(many, half, low), np.where(many, high, half)
        middle: PerQuery = (low + high) / 2
        return middle

    def _draws(self, residuals: _Residuals, items: _Items, seed: int = 0) -> PerQuery:
        """Draw the native nearness of items, [d, q, c]."""
        native, known = self._native(items)
        predicted = self.nearness_predictor.predict(items.old, items.migrated)
        bins = np.broadcast_to(
            self.nearness_predictor.bin_numbers(predicted), (NEARNESS_DRAWS, *predicted.shape)
        )
        rng = np.random.default_rng(seed)
        drawn = predicted + self.nearness_predictor.residual_deviation * residuals.draw(bins, rng)
        drawn = np.where(known, native, drawn)
        return np.where(items.numbers < 0, -40.0, drawn)

    def _odds(self, native: PerQuery, items: _Items) -> PerQuery:
        """Score items as native ones, [d, q, c]."""
        distances = self._of_native.mean - native * self._of_native.spread
        plain = self._plain_native(_bend(distances, self._queries.metric))
        odds: PerQuery = np.empty(native.shape)
        joint = np.where(items.numbers < 0, 0, items.joint)
        for joining, half in self._halves:
            line = joining.native_line
            odds[:, half] = line.slope * plain[:, half] + line.migrated_weight * joint[half]
        return odds

    def _agreement(self, residuals: _Residuals, lists: Mapping[str, _Items]) -> dict[str, PerQuery]:
        """Estimate the share [q] of the new model's ten neighbours that is among some items."""
        bound = self._neighbourhood(residuals)
        found = {
            name: self._shares_above(residuals, one, bound).sum(1) / NEIGHBOURS
            for name, one in lists.items()
        }
        return {name: np.minimum(1.0, one) for name, one in found.items()}

    def _lazily(self, residuals: _Residuals, hits: _Items) -> PerQuery:
        """Estimate agreement@10 [q] of hits that are embedded again and ranked as native ones."""
        bound = self._neighbourhood(residuals)
        native = self._draws(residuals, hits)
        best = np.argsort(-self._odds(native, hits), axis=2)[:, :, :NEIGHBOURS]
        among = np.take_along_axis(native >= bound[None, :, None], best, 2)
        share: PerQuery = among.sum(2).mean(0) / NEIGHBOURS
        return share

    def _native_places(
        self, residuals: _Residuals, hits: _Items, both: _Items, items: int
    ) -> dict[str, NDArray[np.float64]]:
        """Draw the places [d, q] of the items to find by the two ways that embed items again."""
        rows = self._queries.gallery_rows
        answer = self.native_nearness[self._rows, rows].astype(np.float64)
        nearer = (self.native_nearness >= answer[:, None]).sum(1)
        native = self._draws(residuals, hits)
        unknown = (hits.numbers < 0) | (hits.numbers >= self._sample)
        among = (native >= answer[None, :, None]) & unknown
        expected = self._nearer(residuals, answer)
        expected -= (self._shares_above(residuals, hits, answer) * unknown).sum(1)
        others = np.random.default_rng(1).poisson(np.maximum(0, expected), among.shape[:2])
        odds = self._odds(native, hits)
        found = hits.numbers == rows[:, None]
        own = np.where(found, odds, -np.inf).max(2)
        rank = (odds >= own[:, :, None]).sum(2)
        return {
            "lazily": np.where(found.any(1), rank, items).astype(np.float64),
            "re-embed": (nearer + among.sum(2) + others).astype(np.float64),
        }

    def _intervals(
        self,
        agreement: Mapping[str, PerQuery],
        lists: Mapping[str, _Items],
        errors: Mapping[str, float],
    ) -> dict[str, tuple[float, float]]:
        """Compute the 95 % interval of each mean agreement@10.

        Three sources of error: the choice of the queries, that of the sampled items (jackknife over
        PARTS of them), and the model of nearness (`errors`).
        """
        part = np.random.default_rng(2).permutation(np.arange(self._sample) % LEFT_OUT_PARTS)
        parts = [
            self._agreement(self.nearness_predictor.residuals(part == one), lists)
            for one in range(LEFT_OUT_PARTS)
        ]
        intervals = {}
        for name, one in agreement.items():
            means = np.array([float(found[name].mean()) for found in parts])
            variance = (
                (LEFT_OUT_PARTS - 1) / LEFT_OUT_PARTS * float(np.square(means - means.mean()).sum())
            )
            middle = float(one.mean())
            model = max(abs(errors.get(name, 0.0)), MODEL_ERROR * middle * (1 - middle))
            variance += float(one.var()) / len(one) + model**2
            error = 1.96 * float(np.sqrt(variance))
            intervals[name] = (max(0.0, middle - error), min(1.0, middle + error))
        return intervals


def back_test(
    scan_queries: ScanQueries, pairs: Pairs, migrated: Vectors, figures: Mapping[str, Figures]
) -> dict[str, float]:
    """Estimate figures of the sample from a quarter of it, and compare them with its own.

    The same arguments give the same quarter.

    Args:
        scan_queries: The queries.
        pairs: The n items with native vectors.
        migrated: Their migrated vectors [n, b], by maps that were fitted without each.
        figures: Figures of each way among the pairs.

    Returns:
        For each way, how far its mean agreement@10 was off. Empty if the quarter has at most 10
        items, or fewer than 2 queries. Positive: the estimate was too high.

    Raises:
        ValueError: A vector is not finite, or with cosine is zero.
    """
    order = np.random.default_rng(3).permutation(len(pairs))
    quarter, others = np.sort(order[: len(pairs) // 4]), np.sort(order[len(pairs) // 4 :])
    queries = np.flatnonzero(np.isin(scan_queries.queries.gallery_rows, quarter))
    if len(quarter) <= NEIGHBOURS or len(queries) < 2:
        return {}
    part = scan_queries.select(queries)
    rows = np.searchsorted(quarter, part.queries.gallery_rows)
    small = replace(
        part,
        queries=replace(part.queries, gallery_rows=rows),
        migrated_distances=part.migrated_distances[:, quarter],
        old_space_distances={
            name: one[:, quarter] for name, one in part.old_space_distances.items()
        },
    )
    ids = [pairs.ids[row] for row in quarter]
    few = Pairs(ids, pairs.old[quarter], pairs.new[quarter], pairs.metric)
    scan = SetScan(small, few, migrated[quarter], np.arange(len(quarter)))
    hub = scan.measure_hubness(migrated[others])
    blocks = {"stay": query_item_distances(part.queries.old, pairs.old[others], pairs.metric)}
    blocks |= {"map": part.migrated_distances[:, others]}
    blocks |= {name: one[:, others] for name, one in part.old_space_distances.items()}
    scan.add(blocks, hub, len(quarter))
    ways = scan.result(len(pairs)).figures_by_option
    return {
        name: float(ways[name]["agreement@10"].mean() - by_way["agreement@10"][queries].mean())
        for name, by_way in figures.items()
        if name in ways
    }


def scan_gallery(
    source: Source,
    pairs: Pairs,
    query_sets: Sequence[ScanQueries],
    figures: Sequence[Mapping[str, Figures]],
    migrated: Vectors,
    anchors: Ints,
    maps: Sequence[Map],
    left_out_by: Ints,
) -> tuple[int, list[ScanResult]]:
    """Read the gallery once, and compute the figures of each set of queries.

    Holds one window of the store and STEP_DISTANCES distances of each kind at a time.

    Vectors of zeros outside of the sample do not count. Items of the sample that the store lacks
    count nevertheless.

    Args:
        source: The store of the old vectors.
        pairs: The n items with native vectors.
        query_sets: Sets of queries.
        figures: For each set the figures of each way among the pairs.
        migrated: Migrated vectors of the pairs [n, b], by maps that were fitted without each.
        anchors: Rows of the pairs that distances are standardised by.
        maps: Maps, each fitted without one fold of the pairs.
        left_out_by: For each pair the map that was fitted without it [n].

    Returns:
        The number of items, and for each set its figures.

    Raises:
        InvalidInputError: A vector of the store has another dimension than the pairs, NaN, infinity
            or a norm above 1e15.
        UnavailableError: The store's server does not answer.
        NotPermittedError: The server refuses the user, or may hide rows from this role.
        ValueError: A vector of the pairs or the queries is not finite, or with cosine is zero; or
            there is no set of queries.
        BusyError: Others hold the store, or its server has too many requests.
        NotFoundError: The table or the collection was deleted meanwhile.
        IncompatibleSpaceError: Files of one folder record different models.
        ConfigurationError: The process was forked after the source was opened (LanceDB).
        IndexError: A query has a gallery row that does not exist.
    """
    errors = [
        back_test(one, pairs, migrated, ways) for one, ways in zip(query_sets, figures, strict=True)
    ]
    scans = [SetScan(one, pairs, migrated, anchors) for one in query_sets]
    sampled, number = set(pairs.ids), len(pairs)
    corrects = any(one.corrects_hubs for one in scans)
    for items in _blocks(source, pairs.old.shape[1], sampled, query_sets):
        by_map = [mapping(items) for mapping in maps]
        for one, scan in zip(query_sets, scans, strict=True):
            block = np.empty((len(one.queries.gallery_rows), len(items)), np.float32)
            of = left_out_by[one.queries.gallery_rows]
            for which, vectors in enumerate(by_map):
                rows = np.flatnonzero(of == which)
                if len(rows):
                    block[rows] = query_item_distances(
                        one.queries.new[rows], vectors, one.queries.metric
                    )
            hub = scan.measure_hubness(by_map[0]) if corrects else np.zeros((1, 1), np.float32)
            scan.add(one.distances(items, block), hub, number)
        number += len(items)
    results = [scan.result(number, error) for scan, error in zip(scans, errors, strict=True)]
    return number, results


def _blocks(
    source: Source, dim: int, sampled: set[str], sets: Sequence[ScanQueries]
) -> Iterator[Vectors]:
    """Yield the old vectors [w, a] of items outside the sample, a step at a time."""
    step = max(1, STEP_DISTANCES // max(len(one.queries.gallery_rows) for one in sets))
    name = source.facts().name
    for window in source.windows(WINDOW_ITEMS):
        rows = check_rows(source.read(window), dim, name)
        others = [row for row, one in enumerate(rows.ids) if one not in sampled]
        for first in range(0, len(others), step):
            vectors = rows.vectors[others[first : first + step]]
            # A vector of zeros has no direction: no search finds it.
            vectors = vectors[vectors.any(1)]
            if len(vectors):
                yield vectors
