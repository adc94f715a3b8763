"""How much two answers to one query have in common, and what one pair has answered."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from nobackfill.server.galleries.asked import Found

# Durations that quantiles are taken of.
_LATEST = 1000


def overlap(one: Sequence[str], other: Sequence[str]) -> float:
    """Share of the longer answer's items that both have, 0 to 1; of two empty ones: 1."""
    longest = max(len(one), len(other))
    return len(set(one) & set(other)) / longest if longest else 1.0


def rank_correlation(one: Sequence[str], other: Sequence[str]) -> float | None:
    """Spearman's, of the ranks of the items that both answers have, -1 to 1; None below two."""
    ranks = {item: rank for rank, item in enumerate(other)}
    common = [ranks[item] for item in one if item in ranks]
    if len(common) < 2:
        return None
    # Ranks among the common items: no two are equal.
    order = np.argsort(np.argsort(common))
    return float(np.corrcoef(np.arange(len(common)), order)[0, 1])


@dataclass
class PairFigures:
    """What one pair answered. `seconds`: of its last answers while their callers waited."""

    queries: int = 0
    errors: int = 0
    empty: int = 0
    scores: float = 0.0
    scored: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))

    def count(self, found: Found, seconds: float | None) -> None:
        """`seconds`: None where nobody waited for it."""
        self.queries += 1
        self.empty += not found.hits
        if seconds is not None:
            self.seconds.append(seconds)
        score = found.hits[0].score if found.hits else None
        if score is not None:
            self.scores += score
            self.scored += 1

    @property
    def score(self) -> float | None:
        """Mean calibrated score of the first hit."""
        return self.scores / self.scored if self.scored else None

    def quantile(self, share: float) -> float | None:
        """Seconds that `share` of the last answers took at most; None without any."""
        return float(np.quantile(self.seconds, share)) if self.seconds else None


@dataclass
class Likeness:
    """Of the answers to queries that both pairs have answered."""

    compared: int = 0
    overlaps: float = 0.0
    correlations: float = 0.0
    correlated: int = 0

    def count(self, old: Found, new: Found) -> None:
        one, other = ([hit.item.id for hit in found.hits] for found in (old, new))
        self.compared += 1
        self.overlaps += overlap(one, other)
        correlation = rank_correlation(one, other)
        if correlation is not None:
            self.correlations += correlation
            self.correlated += 1

    @property
    def overlap(self) -> float | None:
        return self.overlaps / self.compared if self.compared else None

    @property
    def rank_correlation(self) -> float | None:
        return self.correlations / self.correlated if self.correlated else None
