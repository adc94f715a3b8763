"""Compute CMC and mean average precision from a ranking.

Each function returns one value for each query, NaN if the query has no relevant item in the
gallery; `mean_of_answerable` averages the others. Values are shares, 0 to 1. Values by query let
the bootstrap pair two models on the same queries.
"""

import numpy as np
from numpy.typing import NDArray

from nobackfill.metrics.distances import Floats, Metric
from nobackfill.metrics.ranking import Ranking, Relevance, rank

PerQuery = NDArray[np.float64]


def cmc(ranking: Ranking, k: int) -> PerQuery:
    """Return 1 for each query with a relevant item among the first k (closed-set rank-k), else 0.

    Args:
        ranking: Ranks of the relevant items of q queries.
        k: At least 1.

    Returns:
        [q]; NaN for queries without a relevant item.

    Raises:
        ValueError: k is below 1.
    """
    _check_k(k)
    best = np.array([ranks[0] if len(ranks) else np.inf for ranks in ranking.ranks])
    return np.where(ranking.relevant_counts > 0, (best <= k).astype(np.float64), np.nan)


def average_precision(ranking: Ranking) -> PerQuery:
    """Return the average precision of each query, [q]; its mean is mAP@1.0. It is NaN for queries
    without a relevant item.

    It is the mean over the relevant items of the precision at each one's rank: the area under the
    precision-recall steps without interpolation. A relevant item that a top-k list missed counts as
    precision 0.

    Args:
        ranking: Ranks of the relevant items of q queries; none gives an empty result.
    """
    return _precision_sum(ranking) / _or_nan(ranking.relevant_counts)


def average_precision_at(ranking: Ranking, k: int) -> PerQuery:
    """Return the average precision of the first k answers; its mean is mAP@k.

    The sum is divided by min(k, number of relevant items).

    Args:
        ranking: Ranks of the relevant items of q queries.
        k: At least 1.

    Returns:
        [q]; NaN for queries without a relevant item.

    Raises:
        ValueError: k is below 1.
    """
    _check_k(k)
    cut = Ranking([ranks[ranks <= k] for ranks in ranking.ranks], ranking.relevant_counts)
    return _precision_sum(cut) / _or_nan(np.minimum(ranking.relevant_counts, k))


def mean_of_answerable(per_query: PerQuery) -> float:
    """Return the mean of a figure over answerable queries.

    Args:
        per_query: [q], NaN for queries without an answer, which are left out.

    Raises:
        ValueError: No query is answerable, or there are none.
    """
    answerable = per_query[~np.isnan(per_query)]
    if not len(answerable):
        raise ValueError(
            "no query has a relevant item in the gallery; check the labels of queries and gallery"
        )
    return float(answerable.mean())


def search_and_score(
    queries: Floats, gallery: Floats, relevance: Relevance, metric: Metric = "l2"
) -> dict[str, PerQuery]:
    """Search exactly, and return the three figures of every table by query.

    Args:
        queries: [q, dim].
        gallery: [g, dim].
        relevance: The relevant items of each query.
        metric: How distances are computed.

    Returns:
        cmc1, cmc5 and map, each [q]; NaN for queries without a relevant item.

    Raises:
        ValueError: Relevance for another number of queries, shapes that do not fit, values that are
            not finite, a zero vector with cosine, or an unknown metric.
        IndexError: A position outside the gallery.
    """
    return compute_figures(rank(queries, gallery, relevance, metric))


def compute_figures(ranking: Ranking) -> dict[str, PerQuery]:
    """Return cmc1, cmc5 and map of a ranking, each float64 [q]; NaN for queries without a relevant
    item.

    `map` is the average precision of each query; its mean is mAP.

    Args:
        ranking: Ranks of the relevant items of q queries.
    """
    return {"cmc1": cmc(ranking, 1), "cmc5": cmc(ranking, 5), "map": average_precision(ranking)}


def _precision_sum(ranking: Ranking) -> PerQuery:
    return np.array([(np.arange(1, len(r) + 1) / r).sum() for r in ranking.ranks], np.float64)


def _or_nan(counts: NDArray[np.int64]) -> PerQuery:
    return np.where(counts > 0, counts, np.nan)


def _check_k(k: int) -> None:
    if k < 1:
        raise ValueError(f"k, the number of hits, must be at least 1, got {k}; pass a larger k")
