"""Every map beside every rival, on items that none has seen, by draws of pairs."""

from collections.abc import Callable

import numpy as np

from bench.adoption.against import compare_with_ours
from bench.adoption.backfilling import train_reverse_transform
from bench.adoption.rivals import fit_lambda_orthogonal, fit_local_adapters
from bench.adoption.trial import Trial
from bench.adoption.unpaired import fit_without_pairs
from bench.harness import Row
from nobackfill.adopt.crossfit import MANY_DIMS
from nobackfill.adopt.judgement import Figures, Queries, measure_figures, query_item_distances
from nobackfill.adopt.maps import Map, fit_maps
from nobackfill.adopt.pairs import Pairs
from nobackfill.adopt.verdict import choose_map
from nobackfill.serving.fusion import Block
from nobackfill.vectors import Vectors

DRAWS = 2
NOTE = (
    "In %, of items and queries that chose nothing; means of `draws` of pairs. `against`: whether "
    "agreement@10, R@1 and R@10 are measurably better (+) or worse (-) than affine's, by "
    "a paired bootstrap over queries (over classes, where items have any) and draws. "
    "`chosen by fit`: the kind of ours with the best MRR of queries among the pairs, out of fold. "
    "lambda-orthogonality, local adapters and the reverse query transform choose their strength on "
    "a fifth of the pairs. `unpaired` has all old vectors of the gallery and as many new ones of "
    "other items as there are pairs; where "
    f"dimensions are {MANY_DIMS:,} and more, it is left out: it decomposes a matrix forty times."
)
# Distances [q, g] of queries to the gallery: by old, new vectors of either.
Search = Callable[[Queries, Pairs], Block]


def compare_rivals(trial: Trial, count: int, draws: int = DRAWS) -> list[Row]:
    """Rows of one pair of models with `count` pairs; `draws`: at most, without replacement."""
    gallery, asked = (
        trial.take_pairs(slice(trial.pair_count, None)),
        trial.take_queries(trial.held_out_slice),
    )
    alike = Queries(
        gallery.old, gallery.new, np.arange(len(gallery), dtype=np.int64), are_gallery_items=True
    )
    starts = range(0, min(draws * count, trial.pair_count - count + 1), count)
    found: dict[str, list[Figures]] = {}
    for part in (slice(first, first + count) for first in starts):
        pairs = trial.take_pairs(part)
        searches = _ways(pairs, gallery)
        # The verdict's own, where it had these pairs.
        whole = count == trial.pair_count
        fitted = trial.fitted_verdict.map if whole else _fitted(pairs, trial.take_queries(part))
        searches["chosen by fit"] = _by(fitted(gallery.old))
        for way, search in searches.items():
            both = _figures(search, gallery, asked) | _figures(search, gallery, alike)
            found.setdefault(way, []).append(both)
    named: Row = {"pair": trial.name, "pairs": count, "draws": len(starts)}
    return [compare_with_ours(named, way, found, trial.held_out_labels) for way in found]


def _fitted(pairs: Pairs, asked: Queries) -> Map:
    """What `fit` takes where it is given these queries."""
    return choose_map(pairs, [asked]).fit(pairs)


def _ways(pairs: Pairs, gallery: Pairs) -> dict[str, Search]:
    made = fit_maps(pairs.old, pairs.new)
    turn = train_reverse_transform(pairs)
    ways: dict[str, Search] = {
        "stay": lambda asked, items: query_item_distances(asked.old, items.old),
        **{kind: _by(one(gallery.old)) for kind, one in made.items()},
        "lambda-orthogonality": _by(fit_lambda_orthogonal(pairs)(gallery.old)),
        "local adapters": _by(fit_local_adapters(pairs)(gallery.old)),
        "reverse query transform": lambda asked, items: query_item_distances(
            turn(asked.new), items.old
        ),
    }
    if max(pairs.old.shape[1], pairs.new.shape[1]) < MANY_DIMS:
        ways["unpaired"] = _by(fit_without_pairs(gallery.old, pairs.new)(gallery.old))
    return ways


def _by(carried: Vectors) -> Search:
    return lambda asked, items: query_item_distances(asked.new, carried)


def _figures(search: Search, gallery: Pairs, asked: Queries) -> Figures:
    found = measure_figures(query_item_distances(asked.new, gallery.new), asked)[0](
        search(asked, gallery)
    )
    return found if asked.are_gallery_items else {name: found[name] for name in ("R@1", "R@10")}
