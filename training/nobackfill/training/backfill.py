"""What a backfill would bring: quality while served vectors are replaced by re-embedded ones."""

from collections.abc import Mapping

from nobackfill.metrics.backfill import (
    TENTHS,
    backfill_curve,
    class_order,
    class_shares,
    oracle_order,
    random_order,
    uncertainty_order,
)
from nobackfill.metrics.ranking import Relevance
from nobackfill.training.matrix import metric_of
from nobackfill.training.measure import CellName, Embedded

# Of an order: the curve at `shares` of the gallery, and its mean over them.
Curve = dict[str, float | list[float]]


def backfill_curves(
    name: CellName, queries: Embedded, gallery: Embedded, relevance: Relevance
) -> Mapping[str, Curve]:
    """The curves of a cell of an older gallery, searched as it is or carried along a route.

    In random order, by class in steps of 2 % of them (BCT's supplement), by the true error (what a
    perfect uncertainty would reach), and by the upgrade's uncertainty where it predicts one.
    """
    asked, _ = queries.native(name.query)
    served = gallery.along(name.gallery)
    whole, _ = gallery.native(name.query)
    labels = gallery.listing.labels
    by_class = class_order(labels, 0)
    orders = {
        "random": (random_order(len(whole), 0), TENTHS),
        "class": (by_class, class_shares(labels, by_class)),
        "oracle": (oracle_order(served.embedding, whole), TENTHS),
    }
    if served.uncertainty is not None:
        orders["uncertainty"] = (uncertainty_order(served.uncertainty), TENTHS)
    metric = metric_of(queries, name.query)
    curves = {}
    for title, (order, shares) in orders.items():
        curve = backfill_curve(
            asked, served.embedding, whole, order, relevance, shares=shares, metric=metric
        )
        curves[title] = {
            "mean_map": curve.mean_over(curve.map),
            "mean_cmc1": curve.mean_over(curve.cmc1),
            "shares": curve.shares.tolist(),
            "map": curve.map.tolist(),
            "cmc1": curve.cmc1.tolist(),
        }
    return curves
