"""Test by a paired bootstrap whether a difference between two models is larger than chance.

Chance has up to three sources: training (runs), the choice of classes, the choice of queries.
Average precisions of one class share their positives, so queries of a class are not independent:
whole classes are drawn (ADR 0035).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nobackfill.errors import join_few

Verdict = Literal["holds", "fails", "undecided"]
# Fewer classes are no sample of others: no claim is decided.
FEWEST_DECIDING_CLASSES = 10


@dataclass(frozen=True)
class Difference:
    """The mean of (a - b), with the bounds of its bootstrap interval.

    Attributes:
        mean: The mean.
        low: Lower bound.
        high: Upper bound.
        class_count: Number of classes of the queries; None if no class is known.
    """

    mean: float
    low: float
    high: float
    class_count: int | None = None

    @property
    def is_limited_to_classes(self) -> bool:
        """Tell whether the bounds hold for the evaluated classes only, because they are fewer than
        FEWEST_DECIDING_CLASSES."""
        return self.class_count is not None and self.class_count < FEWEST_DECIDING_CLASSES

    @property
    def verdict(self) -> Verdict:
        """Decide from the bounds whether a > b.

        Returns:
            undecided with fewer than FEWEST_DECIDING_CLASSES (10) classes. Otherwise, also if
            `class_count` is None: holds if `low` is above 0, fails if `high` is below 0, else
            undecided.
        """
        if self.is_limited_to_classes:
            return "undecided"
        if self.low > 0:
            return "holds"
        return "fails" if self.high < 0 else "undecided"


@dataclass(frozen=True)
class _Units:
    """The units that are drawn in a run: its classes, or its queries.

    Attributes:
        names: Which units they are, [u].
        sums: Sum of the differences of each unit's queries, [u].
        sizes: Number of queries of each unit, [u].
    """

    names: NDArray[Any]
    sums: NDArray[np.float64]
    sizes: NDArray[np.float64]

    @property
    def mean(self) -> float:
        return float(self.sums.sum() / self.sizes.sum())


def paired_bootstrap(
    a: Sequence[NDArray[np.float64]],
    b: Sequence[NDArray[np.float64]],
    *,
    classes: Sequence[NDArray[Any]] | None = None,
    confidence_level: float = 0.95,
    resample_count: int = 2000,
    seed: int = 0,
) -> Difference:
    """Bootstrap the mean of a - b over one or more paired runs (seeds).

    Each resample draws runs with replacement and, once for all of them, classes with replacement,
    each with all of its queries. Without classes it draws queries. Runs of one set of queries share
    what is easy and hard in it, so more runs do not make up for few queries (Owen, "The pigeonhole
    bootstrap", Annals of Applied Statistics 1, 2007). Runs of other classes, or in which other
    queries have an answer, draw their own. The percentiles over classes are widened as Student's t
    widens an interval over as many values (Hesterberg, "What teachers should know about the
    bootstrap", The American Statistician 69, 2015, section 4.3).

    Args:
        a: One array [q] a run, the first model's value of each query: a finite number such as a
            share, or NaN where the query has no answer.
        b: The second model's, one array [q] a run, paired with `a`.
        classes: The class of each query, one array [q] a run; None if unknown. Equal labels are one
            class in every run. With fewer than FEWEST_DECIDING_CLASSES the bounds are drawn over
            queries and hold for these classes alone.
        confidence_level: The share of intervals that cover the truth, between 0 and 1.
        resample_count: Number of resamples, at least 1.
        seed: Seed of the random numbers, at least 0; a seed gives the same bounds again.

    Returns:
        The mean over runs, its bounds, and the number of classes with an answerable query (the
        least of any run; None without `classes`). Bounds are rounded to 12 decimals. One run leaves
        the training's chance out of the interval.

    Raises:
        ValueError: Unpaired data: other shapes, or NaN at other queries. Or there is no run, labels
            do not match, a run has no answerable query, or a level, number of resamples or seed is
            out of range.
        TypeError: Class labels of a run cannot be ordered, such as None among texts.
    """
    if not 0 < confidence_level < 1 or resample_count < 1:
        raise ValueError(
            f"bootstrap: expected confidence_level between 0 and 1 and resample_count of at least "
            f"1, got {confidence_level} and {resample_count}; correct these arguments"
        )
    queries = _queries(a, b)
    units, class_count, tail = queries, None, (1 - confidence_level) / 2
    if classes is not None:
        by_class = _by_class(queries, a, classes)
        class_count = min(len(run.names) for run in by_class)
        if class_count >= FEWEST_DECIDING_CLASSES:
            units, tail = by_class, _widen(tail, class_count)
    rng = np.random.default_rng(seed)
    draws = rng.integers(len(units), size=(len(units), resample_count))
    if all(np.array_equal(run.names, units[0].names) for run in units):
        means = np.take_along_axis(_resampled_means(units, resample_count, rng), draws, axis=0)
    else:
        means = np.empty(draws.shape)
        for run, own in enumerate(units):
            selected = draws == run
            means[selected] = _resampled_means([own], int(selected.sum()), rng)[0]
    bounds = np.quantile(means.mean(axis=0), [tail, 1 - tail])
    # Differences that cancel leave 1e-18, which is on no side of zero.
    low, high = np.round(bounds, 12) + 0.0
    return Difference(float(np.mean([u.mean for u in units])), float(low), float(high), class_count)


def _queries(a: Sequence[NDArray[np.float64]], b: Sequence[NDArray[np.float64]]) -> list[_Units]:
    """Return the answerable queries of each run, named by their position."""
    if not a or len(a) != len(b):
        raise ValueError(
            "bootstrap of a difference: expected as many runs of one model as of the other, got "
            f"{len(a)} and {len(b)}; pass pairs of runs"
        )
    units = []
    for left, right in zip(a, b, strict=True):
        if left.shape != right.shape or left.ndim != 1:
            raise ValueError(
                "bootstrap of a difference: expected one value for each query [q] from both "
                f"models, got arrays of the shapes {left.shape} and {right.shape}; measure both "
                "models on the same queries"
            )
        if (np.isnan(left) != np.isnan(right)).any():
            raise ValueError(
                "bootstrap of a difference: expected NaN at the same queries from both models, "
                "got a query that only one of them answers; measure both models on the same queries"
            )
        answerable = np.flatnonzero(~np.isnan(left))
        if not len(answerable):
            raise ValueError(
                "no query has a relevant item in the gallery; check the labels of queries and "
                "gallery"
            )
        units.append(_Units(answerable, (left - right)[answerable], np.ones(len(answerable))))
    return units


def _by_class(
    queries: Sequence[_Units], a: Sequence[NDArray[np.float64]], classes: Sequence[NDArray[Any]]
) -> list[_Units]:
    if [labels.shape for labels in classes] != [run.shape for run in a]:
        raise ValueError(
            "bootstrap: expected a class for each query of each run: arrays of the shapes "
            f"{join_few(run.shape for run in a)}, got "
            f"{join_few(labels.shape for labels in classes) or 'none'}; pass a class for each query"
        )
    units = []
    for run, labels in zip(queries, classes, strict=True):
        names, places = np.unique(labels[run.names], return_inverse=True)
        sums, sizes = (
            np.bincount(places, values).astype(np.float64) for values in (run.sums, run.sizes)
        )
        units.append(_Units(names, sums, sizes))
    return units


def _widen(tail: float, count: int) -> float:
    """Return the percentile of a bootstrap over `count` values that Student's t would use.

    The bootstrap divides by n where the estimate of the variance divides by n - 1, and takes the
    estimate for the truth.
    """
    normal, degrees = NormalDist(), count - 1
    z = normal.inv_cdf(tail)
    # Cornish and Fisher's expansion of t's quantile, within .0002 from 9 degrees on (Abramowitz and
    # Stegun 26.7.5).
    t = (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )
    return normal.cdf(t * math.sqrt(count / degrees))


def _resampled_means(
    runs: Sequence[_Units], resample_count: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Return means [runs, resamples]; each resample draws its units once for all runs.

    Works in pieces, so that memory stays small for many queries.
    """
    sums, sizes = np.stack([run.sums for run in runs]), np.stack([run.sizes for run in runs])
    units = sums.shape[1]
    piece = max(1, 4_000_000 // units)
    means = [np.empty((len(runs), 0))]
    for start in range(0, resample_count, piece):
        rows = min(piece, resample_count - start)
        draws = rng.integers(units, size=(rows, units))
        if len(runs) == 1:
            means.append((sums[0][draws].sum(1) / sizes[0][draws].sum(1))[None])
            continue
        # With counts, each draw is read once instead of once for each run.
        draws += units * np.arange(rows)[:, None]
        counts = np.bincount(draws.ravel(), minlength=draws.size).reshape(draws.shape)
        weights = counts.T.astype(np.float64)
        means.append((sums @ weights) / (sizes @ weights))
    return np.concatenate(means, axis=1)
