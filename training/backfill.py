"""What a backfill would bring: quality while served vectors are replaced by re-embedded ones."""

from collections.abc import Mapping

from metrics.backfill import backfill_curve, oracle_order, random_order, uncertainty_order
from metrics.distances import Metric
from metrics.ranking import Relevance
from training.measure import CellName, Embedded

# Of an order: mean over the curve and the curve itself, at shares 0, 0.1, … 1 of the gallery.
Curve = dict[str, float | list[float]]


def backfill_curves(
    name: CellName, queries: Embedded, gallery: Embedded, relevance: Relevance
) -> Mapping[str, Curve]:
    """The curves of a cell whose gallery took a route.

    In random order, by the upgrade's uncertainty where it predicts one, and by the true error (what
    a perfect uncertainty would reach).
    """
    asked, _ = queries.native(name.query)
    served = gallery.along(name.gallery)
    whole, _ = gallery.native(name.query)
    spec = queries.manifest(name.query).embedder
    metric: Metric = "cosine" if spec.metric == "cosine" else "l2"
    orders = {
        "random": random_order(len(whole), 0),
        "oracle": oracle_order(served.embedding, whole),
    }
    if served.uncertainty is not None:
        orders["uncertainty"] = uncertainty_order(served.uncertainty)
    curves = {}
    for title, order in orders.items():
        curve = backfill_curve(asked, served.embedding, whole, order, relevance, metric=metric)
        curves[title] = {
            "mean_map": curve.mean_over(curve.map),
            "mean_cmc1": curve.mean_over(curve.cmc1),
            "map": curve.map.tolist(),
            "cmc1": curve.cmc1.tolist(),
        }
    return curves
