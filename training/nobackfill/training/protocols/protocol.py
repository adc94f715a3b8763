"""A protocol as evaluate.py runs it: images to embed, figures of their vectors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nobackfill.class_folders import Listing
from nobackfill.errors import NotFoundError
from nobackfill.metrics.distances import Metric
from nobackfill.metrics.ranking import Ranking, Relevance, rank
from nobackfill.vectors import Vectors

# By name, shares 0..1.
Figures = Mapping[str, float]


@dataclass(frozen=True)
class Protocol:
    """`figures`: of vectors of the queries [q,dim] and of the gallery [n,dim], in the order of the
    listings, and the metric that they are searched by. One listing may be both.
    """

    queries: Listing
    gallery: Listing
    figures: Callable[[Vectors, Vectors, Metric], Figures]


def images(root: Path, paths: Sequence[str]) -> Listing:
    """Images below `root`, in this order. Raises NotFoundError naming the first that is missing."""
    missing = [path for path in paths if not (root / path).is_file()]
    if missing:
        raise NotFoundError(
            f"{len(missing)} of the protocol's {len(paths)} images are missing, the first is "
            f"{root / missing[0]}"
        )
    return Listing(root, (root.name,), tuple(paths), np.zeros(len(paths), np.int64))


def ranked(
    queries: Listing,
    gallery: Listing,
    relevance: Relevance,
    figures: Callable[[Ranking], Figures],
) -> Protocol:
    """A protocol whose figures follow from one ranking of the gallery for each query."""
    return Protocol(queries, gallery, lambda q, g, metric: figures(rank(q, g, relevance, metric)))
