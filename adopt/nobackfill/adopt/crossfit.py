"""Cross-fitting: judge each candidate map on pairs that it was not fitted on.

The pairs are dealt into folds. For every two folds a map is fitted without both, and it migrates
the items of the two that are compared. Two simpler ways are biased:

- To leave out the fold of the queried item alone: the maps of its rivals were fitted on it, and
  pull them towards its query, more so with few pairs for each dimension.
- To compare each query only by the map that left its own item out: the item is then searched by as
  many maps as there are folds, and one that misses it is enough to lose it.

A published converter is a candidate as it is, and a second one corrected by the pairs.

A query adapter is fitted by the same code, to pairs with the roles of both models exchanged. Its
maps migrate the queries, and the items stay as they are.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from nobackfill import ridge
from nobackfill.adopt.judgement import Queries, query_item_distances
from nobackfill.adopt.maps import (
    LEAVE_ONE_OUT_ROWS,
    MAP_KINDS,
    RESIDUAL_KIND,
    AffineStrength,
    Map,
    MapSolver,
    Trainer,
    is_unit,
    needs_strength,
    train_residual,
)
from nobackfill.adopt.pairs import Pairs
from nobackfill.errors import IncompatibleSpaceError, InvalidInputError
from nobackfill.metrics.ranking import Ints
from nobackfill.ridge import Moments, split_into_blocks
from nobackfill.serving.fusion import Block
from nobackfill.vectors import Vectors, normalise

CONVERTER, CORRECTED = "converter", "corrected"


def correct_converter(converter: Map, pairs: Pairs) -> Map:
    """Correct a converter by the user's own pairs.

    Ridge shrinks towards the converter's weights W0 in place of zero: it minimises the squared
    error plus lambda |W - W0|². With few pairs the result stays near the converter; with many it is
    nearly the map of these pairs alone. Leave-one-out chooses lambda. The same pairs give the same
    map.

    Args:
        converter: A map with the dimensions of the pairs; its layers stay as they are.
        pairs: Old vectors [n, a] and new vectors [n, b], at least 2.

    Returns:
        A new map of the kind "corrected", which normalises as the converter does. Its facts are the
        converter's, with the number of pairs and lambda.

    Raises:
        IncompatibleSpaceError: The pairs have other dimensions.
        ValueError: Fewer than 2 pairs, or a new vector holds NaN or infinity.
        InvalidInputError: An old vector holds NaN or infinity.
        numpy.linalg.LinAlgError: The equations cannot be solved.
    """
    residual = residual_pairs(converter, pairs)
    correction = ridge.fit_ridge(
        split_into_blocks(residual.old, residual.new), most_sampled_rows=LEAVE_ONE_OUT_ROWS
    )
    weight = (converter.weight + correction.weight).astype(np.float32)
    bias = (converter.bias + correction.bias).astype(np.float32)
    facts = {"own_pairs": str(len(pairs)), "penalty": f"{correction.penalty:.3g}"}
    facts = {**converter.facts, **facts}
    return replace(converter, kind=CORRECTED, weight=weight, bias=bias, facts=facts)


def residual_pairs(converter: Map, pairs: Pairs) -> Pairs:
    """Return pairs whose new vectors are the error of the converter before its normalisation.

    Returns:
        The ids and the old vectors are shared. The metric is cosine. NaN in new vectors stays.

    Raises:
        IncompatibleSpaceError: The pairs have other dimensions than the converter.
        InvalidInputError: An old vector holds NaN or infinity.
        ValueError: The pairs have different numbers of old and new vectors.
    """
    dims = (pairs.old.shape[1], pairs.new.shape[1])
    if dims != converter.dims:
        raise IncompatibleSpaceError(
            f"the converter maps vectors of {converter.dims[0]} dims to {converter.dims[1]}, but "
            f"the pairs have {dims[0]} and {dims[1]}; give --old and --new vectors of the "
            "converter's two models"
        )
    linear = replace(converter, unit_norm=False)
    return Pairs(pairs.ids, pairs.old, (pairs.new - linear(pairs.old)).astype(np.float32))


def add_correction(converter: Map, old: Vectors, correction: Vectors) -> Vectors:
    """Migrate vectors by a converter, and add a correction before its normalisation.

    A sum of zero stays zero.

    Args:
        converter: The converter; if its `unit_norm` is set, the sums are normalised.
        old: Old vectors [n, a].
        correction: Vectors to add to the converter's output [n, b].

    Returns:
        float32 [n, b].

    Raises:
        InvalidInputError: `old` has another dimension than the converter, or NaN or infinity.
        ValueError: `correction` has another shape.
    """
    sums = replace(converter, unit_norm=False)(old) + correction
    return normalise(sums) if converter.unit_norm else sums


# More folds fit each map on more of the pairs, and need more maps: 45 of 10 folds, 10 of 5. A map
# of many dimensions takes seconds, so these get few folds.
FOLDS, FEW = 10, 5
MANY_DIMS = 1000
LEAST = 10


def fold_count(pairs: Pairs) -> int:
    """Return the number of folds for pairs: 10, or 5 if a side has 1,000 dimensions or more.

    It does not look at the number of pairs.
    """
    dims = max(pairs.old.shape[1], pairs.new.shape[1])
    return FOLDS if dims < MANY_DIMS else FEW


def share_fitted_per_map(folds: int) -> float:
    """Return the share of the pairs, 0 to 1, that each map of a cross-fit is fitted to.

    Each map leaves two of the `folds` out.

    Args:
        folds: At least 3.

    Raises:
        ZeroDivisionError: `folds` is 0.
    """
    return (folds - 2) / folds


@dataclass(frozen=True)
class HeldOutResult:
    """One candidate, judged on pairs that its maps were not fitted on.

    Attributes:
        migrated_vectors: The n items [n, b], each migrated by a map that was fitted without it.
        query_distances: For each set of q queries the distances [q, n] to the migrated items, by
            maps that were fitted without that item and without the query's own item. For a query
            adapter, the distances of the migrated queries to the items.
    """

    migrated_vectors: Vectors
    query_distances: list[Block]


def cross_fit_candidates(
    pairs: Pairs,
    query_sets: Sequence[Queries],
    converter: Map | None = None,
    *,
    kinds: Collection[str] | None = None,
    fitted_share: float = 1.0,
    folds: int | None = None,
    fitted_queries: Queries | None = None,
    trainer: Trainer | None = None,
) -> dict[str, HeldOutResult]:
    """Cross-fit every candidate: each kind of map, a trained map, and a converter.

    An unknown name in `kinds` is ignored. Without any candidate the result is empty.

    Args:
        pairs: At least 10 pairs of old vectors [n, a] and new vectors [n, b].
        query_sets: Sets of queries with rows among the pairs.
        converter: Adds two candidates: "converter", as it is, and "corrected", by the pairs.
        kinds: Names of the candidates; None for all. Candidates that need a converter or a trainer
            are left out without one.
        fitted_share: Share of the other folds' pairs that maps are fitted to, above 0 and up to 1.
        folds: Number of folds, at least 3; None for `fold_count`.
        fitted_queries: Queries that maps of the pairs are fitted to as well; a converter is not.
        trainer: Adds the candidate "residual"; it is called once for every two folds.

    Returns:
        The cross-fit of each candidate by its name: maps of the pairs first, then "corrected" and
        "converter".

    Raises:
        InvalidInputError: Fewer than 10 pairs, or unusable layers of the trainer. The candidate
            "converter" alone accepts any number of pairs.
        IncompatibleSpaceError: The converter has other dimensions than the pairs. With the
            candidate "converter" alone it is InvalidInputError or ValueError instead.
        ValueError: A vector holds NaN or infinity or, with cosine, is zero; or `folds` is too
            small.
        numpy.linalg.LinAlgError: The equations cannot be solved.
        Exception: Any error of the trainer.
    """
    of_converter = () if converter is None else (CORRECTED, CONVERTER)
    of_trainer = () if trainer is None else (RESIDUAL_KIND,)
    names = (*MAP_KINDS, *of_trainer, *of_converter) if kinds is None else kinds
    candidates: dict[str, HeldOutResult] = {}
    if own := [kind for kind in names if kind in (*MAP_KINDS, *of_trainer)]:
        candidates = cross_fit(
            pairs,
            query_sets,
            own,
            fitted_share=fitted_share,
            folds=folds,
            fitted_queries=fitted_queries,
            trainer=trainer,
        )
    if converter is not None and CORRECTED in names:
        candidates[CORRECTED] = cross_fit(
            pairs,
            query_sets,
            ["affine"],
            converter=converter,
            fitted_share=fitted_share,
            folds=folds,
        )["affine"]
    if converter is not None and CONVERTER in names:
        vectors = converter(pairs.old)
        blocks = [
            query_item_distances(queries.new, vectors, queries.metric) for queries in query_sets
        ]
        candidates[CONVERTER] = HeldOutResult(vectors, blocks)
    return candidates


def cross_fit(
    pairs: Pairs,
    query_sets: Sequence[Queries],
    kinds: Collection[str] = MAP_KINDS,
    *,
    converter: Map | None = None,
    fitted_share: float = 1.0,
    folds: int | None = None,
    fitted_queries: Queries | None = None,
    trainer: Trainer | None = None,
    adapts_queries: bool = False,
) -> dict[str, HeldOutResult]:
    """Fit each kind of map without every two folds, and judge the pairs of these two.

    All maps share their penalty, which leave-one-out chooses from all pairs.

    Args:
        pairs: At least 10 pairs of old vectors [n, a] and new vectors [n, b].
        query_sets: Sets of queries with rows among the pairs.
        kinds: Kinds of maps; "residual" needs a trainer.
        converter: Fit corrections of this converter in place of whole maps.
        fitted_share: Share of the other folds' pairs that maps are fitted to, for a learning curve.
        folds: Number of folds, at least 3; None for `fold_count`.
        fitted_queries: Queries that are fitted on as further pairs, each left out with its item.
        trainer: Trains the residual map; called once for every two folds; its errors pass through.
            Without it, the arrays of "residual" are not filled.
        adapts_queries: Judge each map as a query adapter. `pairs` and `query_sets` are reversed
            then: "old" is the new model, whose queries are migrated.

    Returns:
        The cross-fit of each kind by its name. The same pairs always give the same folds.

    Raises:
        InvalidInputError: Fewer than 10 pairs, or unusable layers of the trainer. A kind is
            unknown.
        IncompatibleSpaceError: The converter has other dimensions than the pairs.
        ValueError: A vector holds NaN or infinity or, with cosine, is zero; or `folds` is too
            small.
        numpy.linalg.LinAlgError: The equations cannot be solved.
        Exception: Any error of the trainer.
    """
    folds = fold_count(pairs) if folds is None else folds
    if len(pairs) < LEAST:
        raise InvalidInputError(
            f"expected at least {LEAST} items with vectors by both models, got {len(pairs)}; embed "
            "more items by the new model"
        )
    rng = np.random.default_rng(0)
    fold = rng.permutation(np.arange(len(pairs)) % folds)
    items = np.concatenate(
        [_sample(np.flatnonzero(fold == n), fitted_share, rng) for n in range(folds)]
    )
    linear = pairs if converter is None else residual_pairs(converter, pairs)
    rows = append_queries_as_pairs(linear, fitted_queries)
    # The item that each row is left out with: a pair with itself, a query with its item.
    item = np.arange(len(pairs))
    if fitted_queries is not None:
        item = np.r_[item, fitted_queries.gallery_rows]
    fitted = np.flatnonzero(np.isin(item, items))
    total = Moments.from_blocks(split_into_blocks(rows.old[fitted], rows.new[fitted])())
    penalty = None
    if needs_strength(kinds):
        penalty = choose_strength(rows, fitted[fitted < len(pairs)], total)
        penalty = penalty if converter is None else penalty.of_ridge_alone
    unit = converter is None and is_unit(pairs.new)
    moments = [Moments(total) for _ in range(folds)]
    for number, part in enumerate(moments):
        of_fold = fitted[fold[item[fitted]] == number]
        part.add(rows.old[of_fold], rows.new[of_fold])
    results = {kind: _empty_result(pairs, query_sets) for kind in kinds}
    for one, other in combinations(range(folds), 2):
        judged = np.flatnonzero((fold == one) | (fold == other))
        asking = [np.flatnonzero(np.isin(queries.gallery_rows, judged)) for queries in query_sets]
        solver = MapSolver(total.subtract(moments[one]).subtract(moments[other]))
        maps = solver.solve_maps(penalty, unit, [kind for kind in kinds if kind != RESIDUAL_KIND])
        if trainer is not None and RESIDUAL_KIND in kinds:
            others = fitted[~np.isin(item[fitted], judged)]
            straight = solver.solve_maps(penalty, unit, ["affine"])["affine"]
            maps[RESIDUAL_KIND] = train_residual(
                straight, rows.old[others], rows.new[others], trainer
            )
        for kind, mapping in maps.items():
            migrated = mapping(pairs.old[judged])
            if converter is not None:
                migrated = add_correction(converter, pairs.old[judged], migrated)
            # Several maps fill the distances within one fold. Each of them is unbiased, so that the
            # last one may stay.
            result = results[kind]
            result.migrated_vectors[judged] = migrated
            for queries, asked, block in zip(
                query_sets, asking, result.query_distances, strict=True
            ):
                if len(asked):
                    sides = (queries.new[asked], migrated)
                    if adapts_queries:
                        sides = (mapping(queries.old[asked]), pairs.new[judged])
                    block[np.ix_(asked, judged)] = query_item_distances(*sides, queries.metric)
    return results


def choose_strength(pairs: Pairs, rows: Ints, solving_moments: Moments) -> AffineStrength:
    """Choose the parameters of affine maps by leave-one-out among some rows of pairs.

    Args:
        pairs: Pairs, maybe with queries as further pairs.
        rows: Rows to leave out in turn, int [m]: items alone, because an item and its query are too
            alike for one to test the other.
        solving_moments: The moments that maps are solved from later. The penalty is a multiple of
            their variance.

    Returns:
        Parameters whose penalty is in multiples of the variance of `solving_moments`.

    Raises:
        ValueError: There are fewer than 2 rows, or a vector is not finite.
        IndexError: There is no such row.
        numpy.linalg.LinAlgError: The eigenvalues cannot be computed.
    """
    blocks = split_into_blocks(pairs.old[rows], pairs.new[rows])
    of_items = Moments.from_blocks(blocks())
    penalty = MapSolver(of_items).choose_strength(blocks)
    if of_items.row_count == solving_moments.row_count:
        return penalty
    share = float(np.trace(of_items.gram)) / max(1e-300, float(np.trace(solving_moments.gram)))
    return replace(penalty, penalty=share * penalty.penalty)


def append_queries_as_pairs(pairs: Pairs, queries: Queries | None) -> Pairs:
    """Append queries to pairs as further pairs, each side shifted to the items' mean.

    The mean of queries differs from that of items in both spaces. A map that fits this difference
    would not serve items.

    With 0 queries, nothing is appended, and numpy warns.

    Returns:
        New pairs of n items and q queries, whose ids are "query 0" to "query q-1"; the pairs
        themselves if `queries` is None.

    Raises:
        ValueError: A query has another dimension than the items.
    """
    if queries is None:
        return pairs
    sides = []
    for items, asked in ((pairs.old, queries.old), (pairs.new, queries.new)):
        moved = asked - asked.mean(0) + items.mean(0)
        sides.append(np.concatenate([items, moved.astype(np.float32)]))
    ids = [*pairs.ids, *(f"query {row}" for row in range(len(queries.gallery_rows)))]
    return replace(pairs, ids=ids, old=sides[0], new=sides[1])


def _empty_result(pairs: Pairs, query_sets: Sequence[Queries]) -> HeldOutResult:
    blocks = [
        np.empty((len(queries.gallery_rows), len(pairs)), np.float32) for queries in query_sets
    ]
    return HeldOutResult(np.empty_like(pairs.new), blocks)


def _sample(rows: Ints, share: float, rng: np.random.Generator) -> Ints:
    sample: Ints = rng.choice(rows, max(1, round(share * len(rows))), replace=False)
    return sample
