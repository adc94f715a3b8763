"""Maps alone by the number of pairs: ours, what they are made of, and what could be done to one."""

import numpy as np

from bench.adoption.against import OURS, compare_with_ours
from bench.adoption.trial import Trial
from bench.harness import Row
from nobackfill import ridge
from nobackfill.adopt.crossfit import MANY_DIMS
from nobackfill.adopt.judgement import (
    CROWD,
    Figures,
    Queries,
    figures_from_vectors,
    measure_figures,
    query_item_distances,
)
from nobackfill.adopt.maps import LEAVE_ONE_OUT_ROWS, fit_maps, is_unit
from nobackfill.adopt.pairs import Pairs
from nobackfill.ridge import Floats, Moments, split_into_blocks
from nobackfill.serving.fusion import Block, measure_hubs
from nobackfill.vectors import Vectors, normalise

COUNTS = (100, 250, 500, 1000, 2000, 5000)
# Draws of pairs: of fewer there are more, where a map does not take seconds.
DRAWS, DRAWS_OF_MANY_DIMS = 5, 2
# Of ridge before anything chose it.
FIXED = 1e-5
NOTE = (
    "In %, of items and queries that chose nothing; means of `draws` of pairs. `against`: whether "
    "agreement@10, R@1 and R@10 are measurably better (+) or worse (-) than affine's, by a paired "
    "bootstrap over queries (over classes, where items have any) and draws. `ridge`: of least "
    "leave-one-out error, which affine was until November 2026; `ridge, fixed`: of a penalty of "
    "1e-5 of the mean input variance, as it was before that. `not centred`: Procrustes between "
    "vectors as they are. `affine, centred`: carried items moved to their mean, queries to that of "
    "the new model's own of the pairs. `affine, hubs`: items near to every one of other queries "
    "stand back."
)


def maps_alone(trial: Trial) -> list[Row]:
    """A row for each way and count of pairs; of more pairs than the trial fits on, where there are
    any, one draw."""
    gallery, asked = (
        trial.take_pairs(trial.held_out_slice),
        trial.take_queries(trial.held_out_slice),
    )
    alike = Queries(
        gallery.old, gallery.new, np.arange(len(gallery), dtype=np.int64), are_gallery_items=True
    )
    few = max(trial.old.bodies.shape[1], trial.new.bodies.shape[1]) < MANY_DIMS
    pool = trial.take_pairs(slice(0, trial.pair_count))
    most = _joined(pool, trial.more_pairs)
    rows: list[Row] = []
    for count in (one for one in COUNTS if one <= len(most)):
        source = pool if count <= len(pool) else most
        draws = min(DRAWS if few else DRAWS_OF_MANY_DIMS, len(source) // count)
        found: dict[str, list[Figures]] = {}
        for draw in range(draws):
            part = slice(draw * count, (draw + 1) * count)
            pairs = Pairs(source.ids[part], source.old[part], source.new[part])
            crowd = normalise(trial.new.titles[: trial.query_count][:CROWD])
            for way, figures in _ways(pairs, gallery, asked, alike, crowd).items():
                found.setdefault(way, []).append(figures)
        named: Row = {"pair": trial.name, "pairs": count, "draws": draws}
        rows += [compare_with_ours(named, way, found, trial.held_out_labels) for way in found]
    return rows


def _joined(pool: Pairs, more: Pairs | None) -> Pairs:
    if more is None:
        return pool
    old, new = (np.concatenate(both) for both in ((pool.old, more.old), (pool.new, more.new)))
    return Pairs([str(row) for row in range(len(old))], old, new)


def _ways(
    pairs: Pairs, gallery: Pairs, asked: Queries, alike: Queries, crowd: Vectors
) -> dict[str, Figures]:
    unit = is_unit(pairs.new)
    blocks = split_into_blocks(pairs.old, pairs.new)
    straight = {
        "ridge": ridge.fit_ridge(blocks, most_sampled_rows=LEAVE_ONE_OUT_ROWS),
        "ridge, fixed": ridge.solve_ridge(Moments.from_blocks(blocks()), FIXED),
    }
    carried = {kind: one(gallery.old) for kind, one in fit_maps(pairs.old, pairs.new).items()}
    for way, found_by in straight.items():
        carried[way] = _ended(gallery.old @ found_by.weight.T + found_by.bias, unit)
    u, _, vt = np.linalg.svd(pairs.old.T @ pairs.new, full_matrices=False)
    carried["procrustes, not centred"] = _ended(gallery.old @ (u @ vt), unit)
    found = {
        way: _known(
            figures_from_vectors(vectors, gallery, asked),
            figures_from_vectors(vectors, gallery, alike),
        )
        for way, vectors in carried.items()
    }
    ours = carried[OURS]
    means = ours.mean(0), pairs.new.mean(0)
    moved = normalise(ours - means[0])

    def centred(queries: Queries) -> Figures:
        by_new = normalise(queries.new - means[1])
        return _judged(query_item_distances(by_new, moved), gallery, queries)

    def crowded(queries: Queries) -> Figures:
        return _judged(
            query_item_distances(queries.new, ours) + measure_hubs(ours, crowd)[None],
            gallery,
            queries,
        )

    for way, one in (("centred", centred), ("hubs", crowded)):
        found[f"{OURS}, {way}"] = _known(one(asked), one(alike))
    return found


def _ended(vectors: Floats, unit: bool) -> Vectors:
    made = np.asarray(vectors, np.float32)
    return normalise(made) if unit else made


def _judged(block: Block, gallery: Pairs, queries: Queries) -> Figures:
    return measure_figures(query_item_distances(queries.new, gallery.new), queries)[0](
        np.asarray(block, np.float32)
    )


def _known(asked: Figures, alike: Figures) -> Figures:
    return {"agreement@10": alike["agreement@10"], "R@1": asked["R@1"], "R@10": asked["R@10"]}
