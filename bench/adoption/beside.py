"""Every map beside every rival, on items that none has seen, by draws of pairs."""

from collections.abc import Callable

import numpy as np

from bench.adoption.against import compared
from bench.adoption.backfilling import turned_back
from bench.adoption.rivals import local, nearly_orthogonal
from bench.adoption.trial import Trial
from bench.adoption.unpaired import without_pairs
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


def beside(trial: Trial, count: int, draws: int = DRAWS) -> list[Row]:
    """Rows of one pair of models with `count` pairs; `draws`: at most, without replacement."""
    gallery, asked = trial.pairs_of(slice(trial.pairs, None)), trial.queries_of(trial.rest)
    alike = Queries(
        gallery.old, gallery.new, np.arange(len(gallery), dtype=np.int64), are_gallery_items=True
    )
    starts = range(0, min(draws * count, trial.pairs - count + 1), count)
    found: dict[str, list[Figures]] = {}
    for part in (slice(first, first + count) for first in starts):
        pairs = trial.pairs_of(part)
        searches = _ways(pairs, gallery)
        # The verdict's own, where it had these pairs.
        whole = count == trial.pairs
        fitted = trial.said.map if whole else _fitted(pairs, trial.queries_of(part))
        searches["chosen by fit"] = _by(fitted(gallery.old))
        for way, search in searches.items():
            both = _figures(search, gallery, asked) | _figures(search, gallery, alike)
            found.setdefault(way, []).append(both)
    named: Row = {"pair": trial.name, "pairs": count, "draws": len(starts)}
    return [compared(named, way, found, trial.rest_labels) for way in found]


def _fitted(pairs: Pairs, asked: Queries) -> Map:
    """What `fit` takes where it is given these queries."""
    return choose_map(pairs, [asked]).fit(pairs)


def _ways(pairs: Pairs, gallery: Pairs) -> dict[str, Search]:
    made = fit_maps(pairs.old, pairs.new)
    turn = turned_back(pairs)
    ways: dict[str, Search] = {
        "stay": lambda asked, items: query_item_distances(asked.old, items.old),
        **{kind: _by(one(gallery.old)) for kind, one in made.items()},
        "lambda-orthogonality": _by(nearly_orthogonal(pairs)(gallery.old)),
        "local adapters": _by(local(pairs)(gallery.old)),
        "reverse query transform": lambda asked, items: query_item_distances(
            turn(asked.new), items.old
        ),
    }
    if max(pairs.old.shape[1], pairs.new.shape[1]) < MANY_DIMS:
        ways["unpaired"] = _by(without_pairs(gallery.old, pairs.new)(gallery.old))
    return ways


def _by(carried: Vectors) -> Search:
    return lambda asked, items: query_item_distances(asked.new, carried)


def _figures(search: Search, gallery: Pairs, asked: Queries) -> Figures:
    found = measure_figures(query_item_distances(asked.new, gallery.new), asked)[0](
        search(asked, gallery)
    )
    return found if asked.are_gallery_items else {name: found[name] for name in ("R@1", "R@10")}
