"""What each served cell keeps, gains and loses: BCT's Eq. 1, 2 and 9, DMU's two deltas."""

from collections.abc import Sequence

import numpy as np

from nobackfill.metrics.compatibility import (
    degradation,
    gap_closed,
    is_compatible,
    negative_flips,
    share_kept,
    strict_criterion,
    update_gain,
    upgrade_gain,
)
from nobackfill.metrics.ranking import Relevance
from nobackfill.quality.cells import CellName, alone
from nobackfill.quality.embedded import Published, cell_vectors
from nobackfill.quality.retrieval import MatrixCell

Judged = dict[str, float | bool | None]
# The embedder method that has no regard for older models.
ALONE = "independent"


def criterion(
    cells: Sequence[MatrixCell],
    queries: Published,
    gallery: Published,
    relevance: Relevance,
    independent: int | None = None,
) -> dict[str, Judged]:
    """For each cell of an older gallery, where both bounds were measured: figures in mAP.

    Update gain and degradation are relative to an independent model's new/new: that of release
    `independent`, or the query's own where it was trained without regard for older ones; None
    where neither is so. The strict criterion is that of old vectors as they are; None for others.
    """
    by_name = {cell.name: cell for cell in cells}
    found: dict[str, Judged] = {}
    for cell in cells:
        source, query = cell.name.gallery[0], cell.name.query
        old, new = by_name.get(alone(source)), by_name.get(alone(query))
        if source == query or old is None or new is None:
            continue
        reference = independent
        if independent is None and queries.manifest(query).method == ALONE:
            reference = query
        bound = None if reference is None else by_name.get(alone(reference))
        strict = _strict(cell.name, queries, gallery, relevance)
        found[str(cell.name)] = _judged(cell, old, new, bound) | strict
    return found


def _judged(
    cell: MatrixCell, old: MatrixCell, new: MatrixCell, independent: MatrixCell | None
) -> Judged:
    served, before, upper = (c.figures["map"] for c in (cell, old, new))
    bound = None if independent is None else independent.figures["map"]
    return {
        "compatible": is_compatible(served, before),
        "update_gain": None if bound is None else update_gain(served, before, bound),
        "upgrade_gain": upgrade_gain(served, before),
        "degradation": None if bound is None else degradation(upper, bound),
        "share_kept": share_kept(served, upper),
        "gap_closed": gap_closed(served, before, upper),
        "negative_flips": negative_flips(old.cmc1, cell.cmc1),
    }


def _strict(name: CellName, queries: Published, gallery: Published, relevance: Relevance) -> Judged:
    """BCT Eq. (1): the share of pairs that keep to it, of two classes and of one."""
    if len(name.gallery) > 1:
        return {"strict_apart": None, "strict_together": None}
    (old,) = name.gallery
    asking, held = cell_vectors(name, queries, gallery)
    shares = strict_criterion(
        asking,
        queries.native(old),
        held,
        relevance,
        queries.metric(name.query),
    )
    told = {"strict_apart": shares.apart, "strict_together": shares.together}
    return {key: None if np.isnan(share) else share for key, share in told.items()}
