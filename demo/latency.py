"""What clients under load met before, during and after the swap."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from demo.load import OK, Answer


def latency_percentile(answers: Sequence[Answer], percent: int) -> float:
    """Milliseconds within which `percent` of the answers came."""
    milliseconds = [1000 * answer.seconds for answer in answers]
    return round(statistics.quantiles(milliseconds, n=100, method="inclusive")[percent - 1], 1)


@dataclass(frozen=True)
class ActivationWindow:
    """The activation, as time.monotonic()."""

    start: float
    end: float

    def overlaps(self, answer: Answer) -> bool:
        """Whether the call was under way at any moment of the activation."""
        return answer.start < self.end and answer.start + answer.seconds > self.start


def latency_summary(answers: Sequence[Answer], swap: ActivationWindow) -> dict[str, float]:
    """Counts, and latencies in milliseconds: `steady` is before the swap, `after` is after it."""
    before = [a for a in answers if a.start + a.seconds <= swap.start]
    during = [a for a in answers if swap.overlaps(a)]
    after = [a for a in answers if a.start >= swap.end]
    return {
        "requests": len(answers),
        "failed": sum(answer.outcome != OK for answer in answers),
        "p50_ms_steady": latency_percentile(before, 50),
        "p99_ms_steady": latency_percentile(before, 99),
        "p50_ms_swap": latency_percentile(during, 50),
        "p99_ms_swap": latency_percentile(during, 99),
        "p50_ms_after": latency_percentile(after, 50),
        "p99_ms_after": latency_percentile(after, 99),
    }
