"""Five ways to go on with a gallery, measured on pairs that the maps judged were fitted without."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from nobackfill.adopt.figures import Figures, PerQuery, Queries, blocked, chosen_by, measure
from nobackfill.adopt.healing import Healing, Mixed
from nobackfill.adopt.joining import (
    ANCHORS,
    CROWD,
    HITS,
    Block,
    Joining,
    Mask,
    candidates,
    hubs,
    standardised,
)
from nobackfill.adopt.maps import normalised
from nobackfill.adopt.pairs import Pairs
from nobackfill.metrics.ranking import Ints
from nobackfill.vectors import Vectors

# Share of the new model's score in the joined one; 0 is the old model alone.
WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
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
class Judged:
    """`ways`: figures of "stay", "map", "both", "lazily", "re-embed". `joining`: how "both" is
    served, without the map's digest. `healing`: figures while items become native."""

    ways: dict[str, Figures]
    joining: Joining
    healing: Healing


def judge(gallery: Gallery, queries: Queries, apart: Block | None = None, seed: int = 0) -> Judged:
    """The joining's weight is chosen on one half of the queries and judged on the other, each in
    turn, and so are the lines that native and carried scores meet on; what is returned is fitted to
    all. `apart`: distances [q, g] of new/carried, where they are not those of the gallery's own
    vectors."""
    stay, carried, native = _blocks(gallery, queries, apart)
    figures, truth = measure(native, queries)
    anchors = _anchors(gallery, seed)
    halves = np.arange(len(queries.rows)) % 2 == 0
    near_old, near_new = standardised(stay, anchors), standardised(carried, anchors)
    # Hubs of either half of the queries are told by the other half.
    less = np.where(halves[:, None], *(_hubs(gallery, queries, half) for half in (~halves, halves)))
    near_crowd = standardised(carried + less, anchors)

    def joined(way: Way) -> Block:
        weight, crowded = way
        by_new = near_crowd if crowded else near_new
        return np.asarray(weight * by_new + (1 - weight) * near_old, np.float32)

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
    chosen = Mixed(joined(best), standardised(native, anchors), truth, queries).chosen(halves)
    healing = Healing(chosen.curves, Mixed(-carried, -native, truth, queries).raw())
    ways = {
        "stay": stay,
        "map": carried,
        "both": both,
        "lazily": _lazily(both, -chosen.native),
        "re-embed": native,
    }
    old, mapped, new = (
        normalised(part[anchors]) if queries.metric == "cosine" else part[anchors]
        for part in (gallery.old, gallery.carried, gallery.new)
    )
    joining = Joining(best[0], *chosen.lines, old, mapped, new, metric=queries.metric)
    if best[1]:
        joining = replace(joining, crowd=normalised(queries.new[:CROWD]))
    return Judged({name: figures(block) for name, block in ways.items()}, joining, healing)


def judge_joined(
    gallery: Gallery, queries: Queries, joining: Joining, apart: Block | None = None
) -> dict[str, Figures]:
    """Figures of the same ways where they are served by a joining that is given; `apart`: as in
    `judge`."""
    ways = served(gallery, queries, joining, apart)
    figures, _ = measure(ways["re-embed"], queries)
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
    near_new = standardised(carried + hubs(gallery.carried, joining.crowd)[None], anchors)
    near_old = standardised(stay, anchors)
    near = np.asarray(joining.weight * near_new + (1 - joining.weight) * near_old, np.float32)
    both = _ranked(stay, carried)(-near)
    lazily = _lazily(both, -joining.native(standardised(native, anchors), near))
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
    return hubs(gallery.carried, normalised(queries.new[some][:CROWD]))[None]


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
    return measure(blocked(queries.new, pairs.new, queries.metric), queries)[0](apart)


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
