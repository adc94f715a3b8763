"""Candidates on pairs that their map has not seen: neither what is asked for nor any rival.

The rows are dealt into folds, and for every two folds a map is fitted without both; whoever is
compared within the two is carried by it. To leave out an item's own fold alone is not enough: its
rivals' maps have then seen it, and bend them towards the query that asks for it, the more the fewer
pairs there are for each dimension. To subtract a query's distance to its own item by the same map,
so that each comparison is within one map, is wrong, too: it is then sought by as many maps as
there are folds, and one that misses it is enough.

A published converter is a candidate as it is, and improved by the pairs.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from nobackfill import ridge
from nobackfill.adopt.judgement import Queries, blocked
from nobackfill.adopt.maps import (
    KINDS,
    LEFT_OUT,
    RESIDUAL,
    Map,
    Solver,
    Strength,
    Trainer,
    is_unit,
    needs_strength,
    trained,
)
from nobackfill.adopt.pairs import Pairs
from nobackfill.errors import IncompatibleSpaceError, InvalidInputError
from nobackfill.metrics.ranking import Ints
from nobackfill.ridge import Moments, in_blocks
from nobackfill.serving.fusion import Block
from nobackfill.vectors import Vectors, normalise

CONVERTER, CORRECTED = "converter", "corrected"


def corrected(prior: Map, pairs: Pairs) -> Map:
    """Improve a converter by pairs of one's own: ridge towards the converter in place of zero.

    Minimises the squared error plus lambda |W - W0|²: with few pairs it stays the converter, with
    many it becomes the map of one's own; lambda by leave-one-out, as everywhere.
    """
    rest = left_over(prior, pairs)
    more = ridge.fit(in_blocks(rest.old, rest.new), sample=LEFT_OUT)
    weight = (prior.weight + more.weight).astype(np.float32)
    bias = (prior.bias + more.bias).astype(np.float32)
    facts = {**prior.facts, "own_pairs": str(len(pairs)), "penalty": f"{more.penalty:.3g}"}
    return replace(prior, kind=CORRECTED, weight=weight, bias=bias, facts=facts)


def left_over(prior: Map, pairs: Pairs) -> Pairs:
    """The same items, with what the converter's linear part misses as the new side. Raises
    IncompatibleSpaceError for pairs of other dimensions."""
    dims = (pairs.old.shape[1], pairs.new.shape[1])
    if dims != prior.dims:
        raise IncompatibleSpaceError(
            f"the converter maps dimensions {prior.dims}, the pairs have {dims}; are these its "
            "two models' vectors?"
        )
    linear = replace(prior, unit=False)
    return Pairs(pairs.ids, pairs.old, (pairs.new - linear(pairs.old)).astype(np.float32))


def added(prior: Map, old: Vectors, more: Vectors) -> Vectors:
    """The converter's vectors with a correction [n, b] of its linear part."""
    mapped = replace(prior, unit=False)(old) + more
    return normalise(mapped) if prior.unit else mapped


# The more folds, the nearer is each map to that of all pairs, and the more maps there are: 45 of 10
# folds, 10 of 5. A map of many dimensions takes seconds.
FOLDS, FEW = 10, 5
MANY_DIMS = 1000
LEAST = 10


def folds_of(pairs: Pairs) -> int:
    dims = max(pairs.old.shape[1], pairs.new.shape[1])
    return FOLDS if dims < MANY_DIMS else FEW


def seen(folds: int) -> float:
    """Of the pairs, the share that each map is fitted on."""
    return (folds - 2) / folds


@dataclass(frozen=True)
class Held:
    """One candidate. `vectors` [n, b]: each row by a map that was fitted without it. `apart`: for
    each set of queries the distances [q, n] to carried items, by maps that were fitted without that
    item and without the query's own."""

    vectors: Vectors
    apart: list[Block]


def candidates(
    pairs: Pairs,
    asked: Sequence[Queries],
    prior: Map | None = None,
    *,
    kinds: Collection[str] | None = None,
    subset: float = 1.0,
    folds: int | None = None,
    more: Queries | None = None,
    also: Trainer | None = None,
) -> dict[str, Held]:
    """Those of `kinds`, else all: with a converter `prior` also what it gives, and what its
    correction by the other folds' pairs gives; with a trainer `also` a residual map. Other
    arguments and errors: as `cross_fitted`."""
    foreign = () if prior is None else (CORRECTED, CONVERTER)
    learnt = () if also is None else (RESIDUAL,)
    wanted = (*KINDS, *learnt, *foreign) if kinds is None else kinds
    found: dict[str, Held] = {}
    if own := [kind for kind in wanted if kind in (*KINDS, RESIDUAL)]:
        found = cross_fitted(pairs, asked, own, subset=subset, folds=folds, more=more, also=also)
    if prior is not None and CORRECTED in wanted:
        found[CORRECTED] = cross_fitted(
            pairs, asked, ["affine"], prior=prior, subset=subset, folds=folds
        )["affine"]
    if prior is not None and CONVERTER in wanted:
        vectors = prior(pairs.old)
        found[CONVERTER] = Held(vectors, [blocked(q.new, vectors, q.metric) for q in asked])
    return found


def cross_fitted(
    pairs: Pairs,
    asked: Sequence[Queries],
    kinds: Collection[str] = KINDS,
    *,
    prior: Map | None = None,
    subset: float = 1.0,
    folds: int | None = None,
    more: Queries | None = None,
    also: Trainer | None = None,
) -> dict[str, Held]:
    """Each kind of map, for each set of queries `asked`. All that its maps share is their strength,
    which is chosen by leave-one-out.

    `prior`: a converter to which maps of what it leaves over are added. `subset`: the share of the
    other folds' pairs that is fitted on, for the learning curve. `folds`: `folds_of` the pairs by
    default. `more`: queries that are fitted on, too, each left out with its item. `also`: who
    trains "residual", if among `kinds`. Raises InvalidInputError for fewer than 10 pairs.
    """
    folds = folds_of(pairs) if folds is None else folds
    if len(pairs) < LEAST:
        raise InvalidInputError(f"expected at least {LEAST} pairs, got {len(pairs)}")
    rng = np.random.default_rng(0)
    fold = rng.permutation(np.arange(len(pairs)) % folds)
    drawn = np.concatenate([_drawn(np.flatnonzero(fold == n), subset, rng) for n in range(folds)])
    fitted = with_queries(pairs if prior is None else left_over(prior, pairs), more)
    # Of each row that can be fitted on, the item that it is left out with.
    item = np.arange(len(pairs)) if more is None else np.r_[: len(pairs), more.rows]
    used = np.flatnonzero(np.isin(item, drawn))
    blocks = in_blocks(fitted.old[used], fitted.new[used])
    whole = Moments.of(blocks())
    chosen = strength(fitted, used[used < len(pairs)], whole) if needs_strength(kinds) else None
    if prior is not None and chosen is not None:
        chosen = chosen.straight
    unit = prior is None and is_unit(pairs.new)
    parts = [Moments(whole) for _ in range(folds)]
    for number, part in enumerate(parts):
        mine = used[fold[item[used]] == number]
        part.add(fitted.old[mine], fitted.new[mine])
    found = {kind: _unfilled(pairs, asked) for kind in kinds}
    for one, other in combinations(range(folds), 2):
        rows = np.flatnonzero((fold == one) | (fold == other))
        within = [np.flatnonzero(np.isin(queries.rows, rows)) for queries in asked]
        rest = Solver(whole.subtract(parts[one]).subtract(parts[other]))
        maps = rest.maps(chosen, unit, [kind for kind in kinds if kind != RESIDUAL])
        if also is not None and RESIDUAL in kinds:
            others = used[~np.isin(item[used], rows)]
            straight = rest.maps(chosen, unit, ["affine"])["affine"]
            maps[RESIDUAL] = trained(straight, fitted.old[others], fitted.new[others], also)
        for kind, mapping in maps.items():
            carried = mapping(pairs.old[rows])
            if prior is not None:
                carried = added(prior, pairs.old[rows], carried)
            # What lies within one fold is filled by each of its maps: any would do, the last stays.
            found[kind].vectors[rows] = carried
            for queries, here, apart in zip(asked, within, found[kind].apart, strict=True):
                if len(here):
                    apart[np.ix_(here, rows)] = blocked(queries.new[here], carried, queries.metric)
    return found


def strength(pairs: Pairs, rows: Ints, whole: Moments) -> Strength:
    """By leave-one-out among some rows of pairs: items alone, as an item and its query, left out in
    turn, would tell of one another. `whole`: what the maps are solved from, whose variance
    penalties are multiples of."""
    blocks = in_blocks(pairs.old[rows], pairs.new[rows])
    alone = Moments.of(blocks())
    chosen = Solver(alone).strength(blocks)
    if alone.rows == whole.rows:
        return chosen
    share = float(np.trace(alone.gram)) / max(1e-300, float(np.trace(whole.gram)))
    return replace(chosen, penalty=share * chosen.penalty)


def with_queries(pairs: Pairs, queries: Queries | None) -> Pairs:
    """Queries as further pairs, moved to the items' means: what asks lies elsewhere than what is
    asked for, by either model, which is not for a map to follow."""
    if queries is None:
        return pairs
    sides = []
    for items, asked in ((pairs.old, queries.old), (pairs.new, queries.new)):
        moved = asked - asked.mean(0) + items.mean(0)
        sides.append(np.concatenate([items, moved.astype(np.float32)]))
    ids = [*pairs.ids, *(f"query {row}" for row in range(len(queries.rows)))]
    return replace(pairs, ids=ids, old=sides[0], new=sides[1])


def _unfilled(pairs: Pairs, asked: Sequence[Queries]) -> Held:
    apart = [np.empty((len(queries.rows), len(pairs)), np.float32) for queries in asked]
    return Held(np.empty_like(pairs.new), apart)


def _drawn(rows: Ints, share: float, rng: np.random.Generator) -> Ints:
    drawn: Ints = rng.choice(rows, max(1, round(share * len(rows))), replace=False)
    return drawn
