"""Class figures while carried items become native: by distance, along the gate's scale, and by the
scores of nobackfill.serve."""

import numpy as np

from bench.adoption.curves import (
    Labels,
    class_curves,
    class_ranking_figures,
    curve_rows,
    same_class_relevance,
)
from bench.adoption.trial import Trial
from bench.harness import Row
from nobackfill.adopt.judgement import JudgedGallery, Queries, query_item_distances
from nobackfill.metrics.backfill import DistanceLine
from nobackfill.metrics.ranking import Ranking
from nobackfill.quality.retrieval import CellFigures
from nobackfill.quality.route_evidence import fit_distance_line
from nobackfill.serving.fusion import Block
from nobackfill.vectors import Vectors

# Neighbours whose distances and matches a line is fitted to.
_NEAR = 100


def class_valley_rows(trial: Trial) -> list[Row]:
    """Curves of one half of the items that the verdict has not seen, each of which asks for its
    class. The gate's line is fitted to the other half, by classes; the scores of nobackfill.serve
    to the verdict's queries, which know of none."""
    labels = trial.labels
    if labels is None:
        return []
    rest = np.arange(trial.pair_count, len(labels))
    fitted, judged = np.array_split(np.random.default_rng(0).permutation(rest), 2)
    line = _line(trial.take_gallery(fitted), labels[fitted])
    gallery, theirs = trial.take_gallery(judged), labels[judged]
    own = np.arange(len(judged), dtype=np.int64)
    asked = Queries(gallery.old, gallery.new, own, are_gallery_items=True)
    carried, native = (
        query_item_distances(asked.new, one) for one in (gallery.migrated, gallery.new)
    )
    ranked: dict[str, tuple[Block, Block]] = {
        "distance": (carried, native),
        "scale": (line.slope * carried + line.offset, native),
    }
    odds = trial.ranking_scores(gallery, asked)
    ranked["nobackfill.serve"] = -odds[0], -odds[1]
    found = [
        row
        for name, blocks in ranked.items()
        for row in curve_rows(trial.name, name, class_curves(*blocks, theirs), theirs)
    ]
    stay = class_ranking_figures(
        query_item_distances(gallery.old, gallery.old), same_class_relevance(theirs)
    )
    return [
        {**row, "old model": 100 * float(np.nanmean(stay[str(row["figure"])]))} for row in found
    ]


def _line(gallery: JudgedGallery, labels: Labels) -> DistanceLine:
    carried, native = (_nearest(gallery.new, one) for one in (gallery.migrated, gallery.new))
    return fit_distance_line(carried, native, same_class_relevance(labels))


def _nearest(queries: Vectors, items: Vectors) -> CellFigures:
    apart = query_item_distances(queries, items)
    near = np.argsort(apart, axis=1)[:, :_NEAR]
    none, nothing = np.empty(0), Ranking([], np.empty(0, np.int64))
    return CellFigures(none, none, none, nothing, near, np.take_along_axis(apart, near, 1))
