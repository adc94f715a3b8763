"""Slow loops written from the definitions: the oracles of the vectorised metrics."""

import math
from collections.abc import Sequence

import numpy as np

from nobackfill.metrics.ranking import Relevance


def distance(a: Sequence[float], b: Sequence[float], metric: str) -> float:
    """Squared L2 or 1 - cos of two vectors, one coordinate at a time."""
    if metric == "l2":
        return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    norms = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(y * y for y in b))
    return 1 - dot / norms


def ranked_relevance(
    query: Sequence[float], gallery: np.ndarray, relevant: set[int], ignored: set[int], metric: str
) -> list[bool]:
    """Relevant or not, nearest first, irrelevant before relevant at equal distance."""
    items = [
        (distance(query, gallery[g].tolist(), metric), g in relevant)
        for g in range(len(gallery))
        if g not in ignored
    ]
    return [is_relevant for _, is_relevant in sorted(items)]


def all_ranked(
    queries: np.ndarray, gallery: np.ndarray, relevance: Relevance, metric: str
) -> list[list[bool]]:
    """`ranked_relevance` of every query."""
    return [
        ranked_relevance(
            queries[q].tolist(),
            gallery,
            set(relevance.relevant[q].tolist()),
            set(relevance.ignored[q].tolist()),
            metric,
        )
        for q in range(len(queries))
    ]


def cmc(ranked: list[bool], k: int) -> float:
    """1 if any of the first k is relevant; NaN if none exists."""
    return float(any(ranked[:k])) if any(ranked) else math.nan


def average_precision(ranked: list[bool], k: int | None = None) -> float:
    """Sum of the precision at each relevant item, over min(k, relevant)."""
    total = sum(ranked)
    if not total:
        return math.nan
    depth = len(ranked) if k is None else k
    value, hits = 0.0, 0
    for position, is_relevant in enumerate(ranked[:depth], start=1):
        if is_relevant:
            hits += 1
            value += hits / position
    return value / min(total, depth)
