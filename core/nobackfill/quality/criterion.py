"""Compute what each served cell keeps, gains and loses: BCT's Eq. 1, 2 and 9, DMU's two deltas."""

from collections.abc import Sequence

import numpy as np

from nobackfill.metrics.compatibility import (
    closed_gap_share,
    degradation,
    is_compatible,
    negative_flips,
    retention,
    strict_criterion,
    update_gain,
    upgrade_gain,
)
from nobackfill.metrics.ranking import Relevance
from nobackfill.quality.cells import CellName, native_cell
from nobackfill.quality.embedded import PublishedListing, cell_vectors
from nobackfill.quality.retrieval import MatrixCell

Judgement = dict[str, float | bool | None]
# The embedder method that ignores older models.
INDEPENDENT = "independent"


def compute_criteria(
    cells: Sequence[MatrixCell],
    queries: PublishedListing,
    gallery: PublishedListing,
    relevance: Relevance,
    independent_release: int | None = None,
) -> dict[str, Judgement]:
    """Compute the criteria of each cell of an older gallery, from mAP.

    Update gain and degradation need an independent model's new/new: that of release
    `independent_release`, otherwise the query's own if it was trained without older models; else
    they are None. The strict criterion is measured for old vectors as they are; it is None for
    others.

    Args:
        cells: Measured cells. A cell is left out unless both its bounds, old/old and new/new, are
            among them.
        queries: The queries.
        gallery: The gallery.
        relevance: The relevant items of each query.
        independent_release: Number of an independent release; unless its own cell is among
            `cells`, the two figures are None. None: the query's own, if it was trained without
            older models.

    Returns:
        The criteria by the name of the cell: a share, a flag, or None where it is not defined.
        Empty without a cell of an older gallery.

    Raises:
        InvalidInputError: Vectors of a cell cannot be compared.
        ValueError: A cell's mAP is 0 where a relative figure is computed, two cells do not answer
            the same queries, or vectors are not finite.
        NotFoundError: A release of a cell is not published.
        ConfigurationError: The library for a tokenizer is not installed.
        NoEncoderError: A release has no model for this kind of item, images or texts.
        VerificationError: A file differs from its manifest, cannot be loaded, or returns no usable
            vectors.
        IndexError: Relevance is for fewer queries, or names a position outside the gallery.
    """
    by_name = {cell.name: cell for cell in cells}
    criteria: dict[str, Judgement] = {}
    for cell in cells:
        source, query = cell.name.gallery_releases[0], cell.name.query_release
        old, new = by_name.get(native_cell(source)), by_name.get(native_cell(query))
        if source == query or old is None or new is None:
            continue
        reference = independent_release
        if independent_release is None and queries.release_manifest(query).method == INDEPENDENT:
            reference = query
        bound = None if reference is None else by_name.get(native_cell(reference))
        strict = _strict(cell.name, queries, gallery, relevance)
        criteria[str(cell.name)] = _judge(cell, old, new, bound) | strict
    return criteria


def _judge(
    cell: MatrixCell, old: MatrixCell, new: MatrixCell, independent: MatrixCell | None
) -> Judgement:
    served, old_map, upper = (c.figures["map"] for c in (cell, old, new))
    bound = None if independent is None else independent.figures["map"]
    return {
        "compatible": is_compatible(served, old_map),
        "update_gain": None if bound is None else update_gain(served, old_map, bound),
        "upgrade_gain": upgrade_gain(served, old_map),
        "degradation": None if bound is None else degradation(upper, bound),
        "share_kept": retention(served, upper),
        "gap_closed": closed_gap_share(served, old_map, upper),
        "negative_flips": negative_flips(old.cmc1, cell.cmc1),
    }


def _strict(
    name: CellName, queries: PublishedListing, gallery: PublishedListing, relevance: Relevance
) -> Judgement:
    """Measure BCT Eq. (1): the shares of pairs of two classes and of one that satisfy it."""
    if len(name.gallery_releases) > 1:
        return {"strict_apart": None, "strict_together": None}
    (old,) = name.gallery_releases
    new_queries, vectors = cell_vectors(name, queries, gallery)
    shares = strict_criterion(
        new_queries, queries.native_vectors(old), vectors, relevance, queries.search_metric(name)
    )
    values = {
        "strict_apart": shares.different_class_share,
        "strict_together": shares.same_class_share,
    }
    return {key: None if np.isnan(share) else share for key, share in values.items()}
