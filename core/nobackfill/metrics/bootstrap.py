"""Paired bootstrap: is a difference between two models larger than chance in queries and seeds?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Verdict = Literal["holds", "fails", "undecided"]


@dataclass(frozen=True)
class Difference:
    """Mean of (a - b) with the bounds of its bootstrap interval."""

    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> Verdict:
        """Whether a > b: "holds" with the whole interval above 0, "fails" with it at or below 0."""
        if self.low > 0:
            return "holds"
        return "fails" if self.high <= 0 else "undecided"


def paired_bootstrap(
    a: Sequence[NDArray[np.float64]],
    b: Sequence[NDArray[np.float64]],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Difference:
    """Bootstrap the mean of a - b, by query, over one or more paired runs (seeds).

    `a[s][i]` and `b[s][i]` are the two models' values on query i in run s. Each resample draws runs
    with replacement, and queries with replacement within each drawn run. Queries that are NaN in
    both (not answerable) are left out; NaN in one alone is refused: the pairs would not match. With
    one run the interval covers the choice of queries only. Raises ValueError for unpaired data.
    """
    if not 0 < level < 1 or resamples < 1:
        raise ValueError(f"expected 0 < level < 1 and resamples >= 1, got {level}, {resamples}")
    differences = _differences(a, b)
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(differences), size=(len(differences), resamples))
    means = np.empty(drawn.shape)
    for run, values in enumerate(differences):
        chosen = drawn == run
        means[chosen] = _resampled_means(values, int(chosen.sum()), rng)
    low, high = np.quantile(means.mean(axis=0), [(1 - level) / 2, (1 + level) / 2])
    return Difference(float(np.mean([run.mean() for run in differences])), float(low), float(high))


def _differences(
    a: Sequence[NDArray[np.float64]], b: Sequence[NDArray[np.float64]]
) -> list[NDArray[np.float64]]:
    if not a or len(a) != len(b):
        raise ValueError(f"expected the same runs on both sides, got {len(a)} and {len(b)}")
    differences = []
    for left, right in zip(a, b, strict=True):
        if left.shape != right.shape or left.ndim != 1:
            raise ValueError(f"expected paired values [q], got {left.shape} and {right.shape}")
        if (np.isnan(left) != np.isnan(right)).any():
            raise ValueError("the two sides do not answer the same queries")
        kept = (left - right)[~np.isnan(left)]
        if not len(kept):
            raise ValueError("no query has a relevant item in the gallery")
        differences.append(kept)
    return differences


def _resampled_means(
    values: NDArray[np.float64], resamples: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Means of `resamples` draws, in pieces, so that memory stays small for many queries."""
    piece = max(1, 4_000_000 // len(values))
    means = [
        values[rng.integers(len(values), size=(min(piece, resamples - start), len(values)))].mean(1)
        for start in range(0, resamples, piece)
    ]
    return np.concatenate([np.empty(0), *means])
