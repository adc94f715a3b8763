"""A metric by class: the worst class, and ranges of classes (FCT appendix C)."""

import numpy as np
from numpy.typing import ArrayLike

from nobackfill.metrics.retrieval import PerQuery, mean


def by_class(per_query: PerQuery, labels: ArrayLike) -> dict[int, float]:
    """Mean of a per-query metric over the answerable queries of each class, ascending by class."""
    labels = _fitting(per_query, labels)
    answerable = ~np.isnan(per_query)
    return {
        int(label): float(per_query[answerable & (labels == label)].mean())
        for label in np.unique(labels[answerable])
    }


def worst_class(per_query: PerQuery, labels: ArrayLike) -> tuple[int, float]:
    """The class that is served worst, and its mean."""
    values = by_class(per_query, labels)
    if not values:
        raise ValueError("no query has a relevant item in the gallery")
    label = min(values, key=values.__getitem__)
    return label, values[label]


def in_range(per_query: PerQuery, labels: ArrayLike, first: int, end: int) -> float:
    """Mean over the queries whose class is first <= class < end."""
    labels = _fitting(per_query, labels)
    return mean(per_query[(labels >= first) & (labels < end)])


def _fitting(per_query: PerQuery, labels: ArrayLike) -> np.ndarray:
    labels = np.asarray(labels)
    if labels.shape != per_query.shape:
        raise ValueError(f"expected a label a query, got {labels.shape} for {per_query.shape}")
    return labels
