"""What `nobackfill sample` is worth: maps of pairs that it chooses, and of as many at random."""

import numpy as np

from bench.adoption.curves import format_interval, mean_gain
from bench.adoption.trial import Trial
from bench.harness import Row, Value
from nobackfill.adopt.judgement import Figures, Queries, figures_from_vectors
from nobackfill.adopt.maps import fit_maps
from nobackfill.adopt.pairs import Pairs, sample_spread_rows
from nobackfill.adopt.sources.source import Rows
from nobackfill.metrics.ranking import Ints

DRAWS = 5
NOTE = (
    f"In %, of the affine map alone, of items and queries that chose nothing; {DRAWS} draws from "
    "the first items. `gain`: of sample over random, with its interval by a paired bootstrap over "
    "queries (over classes, where items have any) and draws."
)


def coverage_rows(trial: Trial, count: int) -> list[Row]:
    """A row for each figure."""
    pool, others = (
        trial.take_pairs(slice(0, trial.pair_count)),
        trial.take_pairs(trial.held_out_slice),
    )
    alike = Queries(
        others.old, others.new, np.arange(len(others), dtype=np.int64), are_gallery_items=True
    )
    asked = (trial.take_queries(trial.held_out_slice), alike)

    def found(rows: Ints) -> Figures:
        one = fit_maps(pool.old[rows], pool.new[rows], kinds=["affine"])["affine"]
        known, near = (figures_from_vectors(one(others.old), others, queries) for queries in asked)
        return {name: known[name] for name in ("R@1", "R@10")} | near

    spread, random = [], []
    for seed in range(DRAWS):
        spread.append(found(_sampled(pool, count, seed)))
        random.append(found(np.random.default_rng(seed).permutation(len(pool))[:count]))
    rows: list[Row] = []
    for figure in spread[0]:
        ours, theirs = ([one[figure] for one in some] for some in (spread, random))
        gain = mean_gain(ours, theirs, trial.held_out_labels)
        row: dict[str, Value] = {"pair": trial.name, "pairs": count, "figure": figure}
        row |= {"random": 100 * float(np.mean(theirs)), "sample": 100 * float(np.mean(ours))}
        row |= {"gain": 100 * gain.mean, "95 %": format_interval(gain)}
        rows.append(row)
    return rows


def _sampled(pool: Pairs, count: int, seed: int) -> Ints:
    ids = sample_spread_rows(Rows(pool.ids, pool.old), count, seed)
    return np.array([int(name) for name in ids], np.int64)
