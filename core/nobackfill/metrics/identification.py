"""1:N open-set identification: TPIR@FPIR."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nobackfill.metrics.distances import Floats, Metric, distance_blocks
from nobackfill.metrics.ranking import Relevance
from nobackfill.metrics.verification import threshold_at


@dataclass(frozen=True)
class OpenSetSearch:
    """The nearest answer of every probe.

    `hit_distances` [mated]: distance of the nearest mate where it stands at rank 1, else infinity.
    `non_mated` [non-mated]: distance of the nearest item for probes without a mate in the gallery.
    """

    hit_distances: NDArray[np.float64]
    non_mated: NDArray[np.float64]


def open_set_search(
    probes: Floats, gallery: Floats, relevance: Relevance, metric: Metric = "l2"
) -> OpenSetSearch:
    """Search every probe [q, dim] in the gallery [g, dim].

    A probe without relevant items is non-mated. A mate that shares the smallest distance with a
    stranger is not at rank 1.
    """
    hits, non_mated = [], []
    for first, block in distance_blocks(probes, gallery, metric):
        for row, query in zip(block, range(first, first + len(block)), strict=True):
            row[relevance.ignored[query]] = np.inf
            mates = row[relevance.relevant[query]]
            nearest_mate = mates.min(initial=np.inf)
            if np.isinf(nearest_mate):
                non_mated.append(row.min())
                continue
            row[relevance.relevant[query]] = np.inf
            hits.append(nearest_mate if nearest_mate < row.min() else np.inf)
    return OpenSetSearch(np.array(hits, np.float64), np.array(non_mated, np.float64))


def tpir_at_fpir(search: OpenSetSearch, fpir: float) -> float:
    """Share of mated probes that are found: rank 1, and nearer than the threshold at which at most
    the share `fpir` of non-mated probes gets any answer. Raises ValueError without both kinds."""
    if not len(search.hit_distances) or not len(search.non_mated):
        raise ValueError(
            f"expected mated and non-mated probes, got {len(search.hit_distances)} and "
            f"{len(search.non_mated)}"
        )
    # Infinity marks a miss, which an infinite threshold (fpir 1) must not let in.
    found = search.hit_distances < threshold_at(search.non_mated, fpir)
    return float(found.mean())
