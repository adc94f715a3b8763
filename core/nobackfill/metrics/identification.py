"""Measure 1:N open-set identification: TPIR@FPIR."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nobackfill.metrics.distances import Floats, Metric, distance_blocks
from nobackfill.metrics.ranking import Relevance
from nobackfill.metrics.verification import threshold_at_error_rate


@dataclass(frozen=True)
class OpenSetSearch:
    """The nearest answer of every probe.

    Attributes:
        mated_distances: Distance of the nearest mate if it is the first hit, otherwise infinity;
            [mated probes].
        non_mated_distances: Distance of the nearest item, for probes without a mate; [non-mated
            probes].
    """

    mated_distances: NDArray[np.float64]
    non_mated_distances: NDArray[np.float64]


def open_set_search(
    probes: Floats, gallery: Floats, relevance: Relevance, metric: Metric = "l2"
) -> OpenSetSearch:
    """Search every probe in the gallery, exactly.

    A probe without relevant items is non-mated; so is one whose mates are all ignored. Its distance
    is infinity if all items are ignored. A mate at the same distance as a stranger is not the first
    hit; a mated probe without a first hit has infinity. Each part of the result has the order of
    the probes; without probes, both are empty.

    Args:
        probes: [q, dim].
        gallery: [g, dim].
        relevance: The mates of each probe.
        metric: How distances are computed.

    Raises:
        ValueError: Shapes that do not fit, an empty gallery, values that are not finite, a zero
            vector with cosine, or an unknown metric.
        IndexError: Relevance for fewer queries, or a position outside the gallery. Relevance for
            more queries is not noticed.
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
    """Return the share of mated probes that are identified at a rate of false positives.

    A probe is identified if its mate is the first hit and nearer than a threshold. At the
    threshold, at most the share `fpir` of non-mated probes gets an answer.

    Args:
        search: The answers.
        fpir: 0 to 1; with 1, every probe whose first hit is its mate is identified.

    Raises:
        ValueError: No mated or no non-mated probes, or `fpir` is out of range.
    """
    if not len(search.mated_distances) or not len(search.non_mated_distances):
        raise ValueError(
            "identification: expected at least one mated probe (a query whose class is in the "
            f"gallery) and one non-mated probe, got {len(search.mated_distances)} and "
            f"{len(search.non_mated_distances)}; add queries of the missing kind"
        )
    # Infinity marks a miss, which an infinite threshold (fpir 1) must not accept.
    identified = search.mated_distances < threshold_at_error_rate(search.non_mated_distances, fpir)
    return float(identified.mean())
