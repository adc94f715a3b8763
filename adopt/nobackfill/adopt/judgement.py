"""Five ways to go on with a gallery, measured on pairs that the maps judged were fitted without.

For known items (queries whose answer is known) the figures are R@1, R@10 and MRR. For similar
things each item asks for its neighbours, itself left out; the figure is agreement@10, the share of
the new model's own ten neighbours.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from nobackfill.adopt.joining import fit_line
from nobackfill.adopt.pairs import Pairs
from nobackfill.metrics.distances import Metric, distances
from nobackfill.metrics.ranking import Ints
from nobackfill.serving.fusion import (
    HITS,
    Block,
    Joining,
    Mask,
    OddsLine,
    candidates,
    fuse,
    hubs,
    standardise,
)
from nobackfill.vectors import Vectors, normalise

NEIGHBOURS = 10

PerQuery = NDArray[np.float64]
# Figures by name, one number a query.
Figures = dict[str, PerQuery]


@dataclass(frozen=True)
class Queries:
    """Queries by both models, old [q, a] and new [q, b], and a gallery row for each: what it should
    find, or, with `own`, the query's own item, which is left out. `metric`: the store's."""

    old: Vectors
    new: Vectors
    rows: Ints
    own: bool
    metric: Metric = "cosine"

    def part(self, rows: Ints) -> "Queries":
        return Queries(self.old[rows], self.new[rows], self.rows[rows], self.own, self.metric)


def blocked(queries: Vectors, items: Vectors, metric: Metric = "cosine") -> Block:
    """Distances [q, g]."""
    return distances(queries, items, metric).astype(np.float32)


def measure_figures(native: Block, queries: Queries) -> tuple[Callable[[Block], Figures], Mask]:
    """What turns a block of distances [q, g] into figures; the new model's own neighbours."""
    rows = np.arange(len(queries.rows))

    def top(block: Block) -> Ints:
        shown = block.copy() if queries.own else block
        if queries.own:
            shown[rows, queries.rows] = np.inf
        count = min(NEIGHBOURS, block.shape[1] - queries.own)
        return np.argpartition(shown, count - 1, axis=1)[:, :count].astype(np.int64)

    truth = np.zeros(native.shape, bool)
    np.put_along_axis(truth, top(native), True, 1)

    def figures(block: Block) -> Figures:
        found = top(block)
        agreement = np.take_along_axis(truth, found, 1).mean(1)
        if queries.own:
            return {"agreement@10": agreement}
        # As nobackfill.metrics.ranking has it: whatever is as near stands before what is asked for.
        place = (block <= block[rows, queries.rows][:, None]).sum(1)
        return {
            "R@1": (place <= 1).astype(np.float64),
            "R@10": (place <= 10).astype(np.float64),
            "MRR": 1 / place,
            "agreement@10": agreement,
        }

    return figures, truth


def chosen_by(figures: Mapping[str, PerQuery], own: bool) -> PerQuery:
    return figures["agreement@10" if own else "MRR"]


# Queries by which the curves are measured, and random orders of the items that they are means of.
MOST_HEALING = 500
ORDERS = 3
SHARES = np.linspace(0, 1, 11)
# A valley of less is within the noise of a few hundred queries.
MOST_BELOW = 0.01

# By figure, a value for each of SHARES.
Curves = dict[str, list[float]]
# Of carried and of native items.
Lines = tuple[OddsLine, OddsLine]
# Standardised scores as they are; log-odds of a match; these, native items' of both their scores.
Scale = Literal["plain", "odds", "shared"]


@dataclass(frozen=True)
class HealingCurves:
    """`calibrated`: by the scores that `nobackfill.serve` ranks by; `raw`: carried and native
    vectors in one index, by distance."""

    calibrated: Curves
    raw: Curves


@dataclass(frozen=True)
class ScaleChoice:
    """`lines`: fitted to all queries. `native`: scores [q, g] of native items, each query's by
    lines that were fitted without its half."""

    lines: Lines
    curves: Curves
    native: Block


@dataclass(frozen=True)
class Mixed:
    """A gallery on its way: nearness [q, g] of carried items, and of the same as native ones.

    Carried and native distances do not compare: sorted as they are, a gallery can answer worse
    half-way than at either end (the valley). Scores on one scale of relevance close it; most of
    all where a native item keeps a share of its score as a carried one, which all items have.
    """

    joined: Block
    native: Block
    truth: Mask
    queries: Queries

    def chosen(self, halves: Mask) -> ScaleChoice:
        """The scale whose figures fall least, over the whole way, below the lower of the two ends
        that each origin alone has; of those that fall less than MOST_BELOW the one that finds most
        on the way. Each is fitted to either half and judged on the other. A match is what is asked
        for, or one of the new model's own ten neighbours.
        """
        some = slice(MOST_HEALING)
        lines = {
            scale: (self._lines(scale, ~halves), self._lines(scale, halves))
            for scale in get_args(Scale)
        }
        curves = {
            scale: self._curves(*self._held_out(fitted, halves, some))
            for scale, fitted in lines.items()
        }
        # Within an origin that keeps no share no scale changes the order.
        ends = {name: min(curve[0], curve[-1]) for name, curve in curves["plain"].items()}

        def cost(scale: Scale) -> tuple[float, float]:
            found = curves[scale]
            deepest = max(ends[name] - min(curve) for name, curve in found.items())
            on_the_way = found["agreement@10" if self.queries.own else "MRR"]
            return max(MOST_BELOW, deepest), -float(np.mean(on_the_way))

        best = min(curves, key=cost)
        native = self._held_out(lines[best], halves, slice(None))[1]
        return ScaleChoice(self._lines(best, np.ones(len(halves), bool)), curves[best], native)

    def raw(self) -> Curves:
        """The curves of the same queries, of both as they are."""
        return self._curves(self.joined[:MOST_HEALING], self.native[:MOST_HEALING])

    def _lines(self, scale: Scale, some: Mask) -> Lines:
        if scale == "plain":
            return OddsLine(), OddsLine()
        kept = np.repeat(some[:, None], self.native.shape[1], 1)
        matches = self.truth.copy()
        rows = np.arange(len(some))
        if self.queries.own:
            kept[rows, self.queries.rows] = False
        else:
            matches[:] = False
            matches[rows, self.queries.rows] = True
        hits, rest = matches & kept, ~matches & kept

        def line(*blocks: Block) -> OddsLine:
            near, others = (np.stack([one[part] for one in blocks], 1) for part in (hits, rest))
            return fit_line(near, others)

        shared = [self.joined] if scale == "shared" else []
        return line(self.joined), line(self.native, *shared)

    def _held_out(
        self, lines: tuple[Lines, Lines], halves: Mask, some: slice
    ) -> tuple[Block, Block]:
        """Scores of some queries' items as carried and as native ones: `lines` of the half itself
        are for the queries in `halves`, then those of the others."""
        joined, native = self.joined[some].copy(), self.native[some].copy()
        for (by_joined, by_native), half in zip(lines, (halves[some], ~halves[some]), strict=True):
            near = self.joined[some][half]
            joined[half] = by_joined(near, near)
            native[half] = by_native(native[half], near)
        return joined, native

    def _curves(self, joined: Block, native: Block) -> Curves:
        rows = np.arange(len(joined))
        figures, _ = measure_figures(-self.native[rows], self.queries.part(rows))
        curves: dict[str, list[list[float]]] = {}
        for seed in range(ORDERS):
            order = np.random.default_rng(seed).random(native.shape[1])
            found = [figures(-np.where(order < one, native, joined)) for one in SHARES]
            for name in found[0]:
                curves.setdefault(name, []).append([float(one[name].mean()) for one in found])
        return {name: np.mean(ones, axis=0).tolist() for name, ones in curves.items()}


def valley(curve: list[float]) -> float:
    """How far it falls below the lower of its ends."""
    return max(0.0, min(curve[0], curve[-1]) - min(curve))


# Share of the new model's score in the joined one; 0 is the old model alone.
WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
# Items by which a query's distances are standardised, and queries that a hub is told by.
ANCHORS, CROWD = 1000, 1000
# Queries that are judged, and distances that are held for one way.
MOST_QUERIES = 2000
MOST_DISTANCES = 20_000_000


# Of joining: the new model's weight, and whether hubs are corrected.
Way = tuple[float, bool]


@dataclass(frozen=True)
class Gallery:
    """The judged items in three forms, row by row: old [g, a], carried [g, b], new [g, b]."""

    old: Vectors
    carried: Vectors
    new: Vectors


def sampled(queries: Queries, items: int, seed: int = 0) -> Queries:
    """As many of them as are judged against a gallery of `items`."""
    most = max(1, min(MOST_QUERIES, MOST_DISTANCES // items))
    if len(queries.rows) <= most:
        return queries
    rng = np.random.default_rng(seed)
    return queries.part(np.sort(rng.choice(len(queries.rows), most, replace=False)))


def among_items(pairs: Pairs, seed: int = 0) -> Queries:
    """Each item asks for its neighbours."""
    rows = np.arange(len(pairs), dtype=np.int64)
    queries = Queries(pairs.old, pairs.new, rows, own=True, metric=pairs.metric)
    return sampled(queries, len(pairs), seed)


@dataclass(frozen=True)
class Judgement:
    """`ways`: figures of "stay", "map", "both", "lazily", "re-embed". `joining`: how "both" is
    served, without the map's digest. `healing`: figures while items become native."""

    ways: dict[str, Figures]
    joining: Joining
    healing: HealingCurves


def judge(
    gallery: Gallery, queries: Queries, apart: Block | None = None, seed: int = 0
) -> Judgement:
    """The joining's weight is chosen on one half of the queries and judged on the other, each in
    turn, and so are the lines that native and carried scores meet on; what is returned is fitted to
    all. `apart`: distances [q, g] of new/carried, where they are not those of the gallery's own
    vectors."""
    stay, carried, native = _blocks(gallery, queries, apart)
    figures, truth = measure_figures(native, queries)
    anchors = _anchors(gallery, seed)
    halves = np.arange(len(queries.rows)) % 2 == 0
    near_old, near_new = standardise(stay, anchors), standardise(carried, anchors)
    # Hubs of either half of the queries are told by the other half.
    less = np.where(halves[:, None], *(_hubs(gallery, queries, half) for half in (~halves, halves)))
    near_crowd = standardise(carried + less, anchors)

    def joined(way: Way) -> Block:
        weight, crowded = way
        by_new = near_crowd if crowded else near_new
        return fuse(weight, near_old, by_new)

    ranked = _ranked(stay, carried)
    # Hubs are told by what people ask, which items that ask for their neighbours do not say.
    told = not queries.own and queries.metric == "cosine"
    choices = [(one, crowded) for one in WEIGHTS for crowded in (False, told)]
    scores = {one: figures(ranked(-joined(one))) for one in dict.fromkeys(choices)}
    both = np.empty_like(stay)
    for half in (halves, ~halves):
        both[half] = -joined(_best(scores, queries.own, ~half))[half]
    both = ranked(both)
    best = _best(scores, queries.own, np.ones(len(halves), bool))
    chosen = Mixed(joined(best), standardise(native, anchors), truth, queries).chosen(halves)
    healing = HealingCurves(chosen.curves, Mixed(-carried, -native, truth, queries).raw())
    ways = {
        "stay": stay,
        "map": carried,
        "both": both,
        "lazily": _lazily(both, -chosen.native),
        "re-embed": native,
    }
    old, mapped, new = (
        normalise(part[anchors]) if queries.metric == "cosine" else part[anchors]
        for part in (gallery.old, gallery.carried, gallery.new)
    )
    joining = Joining(best[0], *chosen.lines, old, mapped, new, metric=queries.metric)
    if best[1]:
        joining = replace(joining, crowd=normalise(queries.new[:CROWD]))
    return Judgement({name: figures(block) for name, block in ways.items()}, joining, healing)


def judge_joined(
    gallery: Gallery, queries: Queries, joining: Joining, apart: Block | None = None
) -> dict[str, Figures]:
    """Figures of the same ways where they are served by a joining that is given; `apart`: as in
    `judge`."""
    ways = served(gallery, queries, joining, apart)
    figures, _ = measure_figures(ways["re-embed"], queries)
    return {name: figures(block) for name, block in ways.items()}


def served(
    gallery: Gallery,
    queries: Queries,
    joining: Joining,
    apart: Block | None = None,
    seed: int = 0,
) -> dict[str, Block]:
    """What each of these ways ranks the gallery by: [q, g], smaller is nearer."""
    stay, carried, native = _blocks(gallery, queries, apart)
    anchors = _anchors(gallery, seed)
    near_new = standardise(carried + hubs(gallery.carried, joining.crowd)[None], anchors)
    near_old = standardise(stay, anchors)
    near = fuse(joining.weight, near_old, near_new)
    both = _ranked(stay, carried)(-near)
    lazily = _lazily(both, -joining.native(standardise(native, anchors), near))
    return {"stay": stay, "map": carried, "both": both, "lazily": lazily, "re-embed": native}


def _blocks(gallery: Gallery, queries: Queries, apart: Block | None) -> tuple[Block, Block, Block]:
    """Distances [q, g] of old/old, new/carried and new/new."""
    sides = ((queries.old, gallery.old), (queries.new, gallery.carried), (queries.new, gallery.new))
    stay, carried, native = (blocked(*side, queries.metric) for side in sides)
    return stay, carried if apart is None else apart, native


def _anchors(gallery: Gallery, seed: int) -> Ints:
    """Rows by which distances are standardised."""
    drawn = np.random.default_rng(seed).permutation(len(gallery.old))[:ANCHORS]
    return np.sort(drawn.astype(np.int64))


def _hubs(gallery: Gallery, queries: Queries, some: Mask) -> Block:
    """[1, g], by some of the queries."""
    return hubs(gallery.carried, normalise(queries.new[some][:CROWD]))[None]


def _ranked(stay: Block, carried: Block) -> Callable[[Block], Block]:
    """Leave the candidates of each query alone in a block [q, g], by old/old and new/carried."""
    shown = np.zeros(stay.shape, bool)
    for query, by_model in enumerate(zip(stay, carried, strict=True)):
        shown[query, candidates(*(partial(_nearest, one) for one in by_model))] = True
    return lambda block: np.where(shown, block, np.float32(np.inf))


def _nearest(row: Block, count: int) -> list[int]:
    found: list[int] = np.argpartition(row, min(count, len(row)) - 1)[:count].tolist()
    return found


def _lazily(both: Block, native: Block) -> Block:
    """The first hits in the order of `native`; nothing else is shown."""
    lazily = np.full_like(both, np.inf)
    hits = np.argpartition(both, min(HITS, both.shape[1]) - 1, axis=1)[:, :HITS]
    np.put_along_axis(lazily, hits, np.take_along_axis(native, hits, 1), 1)
    return lazily


def figures_of(apart: Block, pairs: Pairs, queries: Queries) -> Figures:
    """Figures of one map, from distances [q, n] of queries to carried items."""
    return measure_figures(blocked(queries.new, pairs.new, queries.metric), queries)[0](apart)


def figure_of(vectors: Vectors, pairs: Pairs, queries: Queries) -> Figures:
    """The same from the carried vectors [n, b]."""
    return figures_of(blocked(queries.new, vectors, queries.metric), pairs, queries)


def _best(scores: Mapping[Way, Figures], own: bool, some: Mask) -> Way:
    """Of the ways that find as much as the best one, within a standard error, the one that keeps
    most of the new model's own neighbours. Hubs are corrected only where that keeps no fewer of
    them: hubs that the new model has, too, are no fault of the map."""

    def figure(way: Way, by_neighbours: bool) -> PerQuery:
        return chosen_by(scores[way], by_neighbours)[some]

    def neighbours(way: Way) -> float:
        return float(figure(way, True).mean())

    open_ways = [
        (weight, crowded)
        for weight, crowded in scores
        if not crowded or neighbours((weight, True)) >= neighbours((weight, False))
    ]
    best = max(open_ways, key=lambda way: float(figure(way, own).mean()))

    def as_good(way: Way) -> bool:
        lost = figure(best, own) - figure(way, own)
        return bool(lost.mean() <= lost.std() / np.sqrt(len(lost)))

    return max(filter(as_good, open_ways), key=neighbours)
