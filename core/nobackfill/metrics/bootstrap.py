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
        """Whether a > b: "holds" with the whole interval above 0, "fails" with it below 0, and
        "undecided" where it reaches 0, also where it is nothing else.
        """
        if self.low > 0:
            return "holds"
        return "fails" if self.high < 0 else "undecided"


def paired_bootstrap(
    a: Sequence[NDArray[np.float64]],
    b: Sequence[NDArray[np.float64]],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    same_queries: bool = True,
) -> Difference:
    """Bootstrap the mean of a - b, by query, over one or more paired runs (seeds).

    `a[s][i]` and `b[s][i]` are the two models' values (shares) on query i in run s. Each resample
    draws runs with replacement and, once for all of them, queries with replacement: runs of one set
    of queries share what is easy and hard in it, so more runs do not make up for few queries (Owen,
    "The pigeonhole bootstrap", Annals of Applied Statistics 1, 2007). Each drawn run has queries of
    its own where `same_queries` is False, or where the runs differ in their number or in which are
    answerable. Queries that are NaN in both (not answerable) are left out; NaN in one alone is
    refused: the pairs would not match. With one run the interval covers the choice of queries only.
    Raises ValueError for unpaired data.
    """
    if not 0 < level < 1 or resamples < 1:
        raise ValueError(f"expected 0 < level < 1 and resamples >= 1, got {level}, {resamples}")
    differences = _differences(a, b)
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(differences), size=(len(differences), resamples))
    if same_queries and _alike(a):
        by_run = _resampled_means(np.stack(differences), resamples, rng)
        means = np.take_along_axis(by_run, drawn, axis=0)
    else:
        means = np.empty(drawn.shape)
        for run, values in enumerate(differences):
            chosen = drawn == run
            means[chosen] = _resampled_means(values[None], int(chosen.sum()), rng)[0]
    bounds = np.quantile(means.mean(axis=0), [(1 - level) / 2, (1 + level) / 2])
    # What differences that cancel leave behind (1e-18) is on no side of zero.
    low, high = np.round(bounds, 12) + 0.0
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


def _alike(runs: Sequence[NDArray[np.float64]]) -> bool:
    """Whether nothing says that the runs asked different queries."""
    answered = [~np.isnan(run) for run in runs]
    return all(np.array_equal(one, answered[0]) for one in answered)


def _resampled_means(
    runs: NDArray[np.float64], resamples: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Means [runs, resamples] of values [runs, queries], each resample's queries drawn once for all
    runs; in pieces, so that memory stays small for many queries.
    """
    queries = runs.shape[1]
    piece = max(1, 4_000_000 // queries)
    means = [np.empty((len(runs), 0))]
    for start in range(0, resamples, piece):
        rows = min(piece, resamples - start)
        drawn = rng.integers(queries, size=(rows, queries))
        if len(runs) == 1:
            means.append(runs[0][drawn].mean(axis=1)[None])
            continue
        # Counted, each draw is read once, not once a run.
        drawn += queries * np.arange(rows)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=drawn.size).reshape(drawn.shape)
        means.append(runs @ counts.T.astype(np.float64) / queries)
    return np.concatenate(means, axis=1)
