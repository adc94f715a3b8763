"""Compute a metric by class: each class, the worst class, ranges of classes (FCT appendix C)."""

import numpy as np
from numpy.typing import ArrayLike

from nobackfill.metrics.retrieval import PerQuery


def mean_by_class(per_query: PerQuery, labels: ArrayLike) -> dict[int, float]:
    """Return the mean over the answerable queries of each class, ascending by class.

    Args:
        per_query: A figure of each query, [q]; NaN for queries without an answer.
        labels: Class of each query, int [q].

    Returns:
        The mean by class; a class without an answerable query is missing.

    Raises:
        ValueError: The lengths differ.
    """
    labels = np.asarray(labels)
    if labels.shape != per_query.shape:
        raise ValueError(
            "labels of queries: expected one for each query, an array of the shape "
            f"{per_query.shape}, got {labels.shape}; pass a label for each query"
        )
    answerable = ~np.isnan(per_query)
    return {
        int(label): float(per_query[answerable & (labels == label)].mean())
        for label in np.unique(labels[answerable])
    }


def worst_class(per_query: PerQuery, labels: ArrayLike) -> tuple[int, float]:
    """Return the class with the lowest mean, and that mean; of equal ones the smallest label.

    Args:
        per_query: A figure of each query, [q]; NaN for queries without an answer.
        labels: Class of each query, int [q].

    Raises:
        ValueError: The lengths differ, or no query is answerable.
    """
    values = mean_by_class(per_query, labels)
    if not values:
        raise ValueError(
            "no query has a relevant item in the gallery; check the labels of queries and gallery"
        )
    label = min(values, key=values.__getitem__)
    return label, values[label]
