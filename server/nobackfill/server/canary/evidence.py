"""Measure evidence against a bound on a share, valid however often it is looked at.

Each outcome x is a bet against the bound p: a bettor who stakes the fraction f multiplies its
capital by 1 + f (x - p) / p. While every outcome is 1 with probability at most p, given all earlier
ones, the capital is a nonnegative supermartingale. So is the mean of several bettors' capitals. By
Ville's inequality it ever reaches 1 / alpha with probability at most alpha, whenever somebody looks
or stops (Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS-B
2024, section 4; Ramdas et al., "Game-theoretic statistics and safe anytime-valid inference", 2023).

A bettor that has bet through healthy days has little capital left when a release breaks. So new
bettors begin at each outcome. The n-th generation gets 1 / (n (n + 1)) of the capital, which sums
to 1 and is reserved until then. A release that breaks after n outcomes is detected by the bettors
that began about then, as soon as they have made up for their small share n^-2.
"""

# Small stakes detect a small excess in the long run; large stakes detect a large excess soon.
_STAKES = (0.9, 0.5, 0.25, 1 / 8, 1 / 16, 1 / 32, 1 / 64)
# Far above any threshold; without this limit capitals would overflow.
_LARGEST = 1e250


class CanaryEvidence:
    """Accumulate evidence that outcomes are 1 more often than a bound allows.

    The bound may change from outcome to outcome.
    """

    def __init__(self) -> None:
        self._outcomes = 0
        # Capital of all bettors by stake; those of one stake win and lose alike from here on.
        self._capitals = [0.0] * len(_STAKES)

    def add_outcome(self, is_bad: bool, max_probability: float) -> None:
        """Count an outcome.

        It is not thread-safe. A capital never grows beyond 1e250.

        Args:
            is_bad: True if the bad event happened.
            max_probability: highest probability of True under the hypothesis, given all earlier
                outcomes. A bound outside 0 to 1, or at either end, is ignored.
        """
        if not 0 < max_probability < 1:
            return
        self._outcomes += 1
        endowment = 1 / (self._outcomes * (self._outcomes + 1)) / len(_STAKES)
        for i, stake in enumerate(_STAKES):
            gain = 1 + stake * (is_bad - max_probability) / max_probability
            self._capitals[i] = min(_LARGEST, (self._capitals[i] + endowment) * gain)

    @property
    def value(self) -> float:
        """Return the evidence, above 0.

        It begins at 1, and its mean stays at most 1 under the hypothesis. It may fall as well as
        rise.
        """
        reserve = 1 / (self._outcomes + 1)
        return reserve + sum(self._capitals)
