"""Evidence against a bound on a share, valid however often it is looked at.

Each outcome x is bet on against the bound p: a bettor who stakes the fraction f multiplies its
capital by 1 + f (x - p) / p. While every outcome is 1 with probability at most p, given all before,
the capital is a nonnegative supermartingale, and so is the mean of several bettors': by Ville's
inequality it ever reaches 1 / alpha with probability at most alpha, whoever peeks and stops when
(Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS-B 2024,
section 4; Ramdas et al., "Game-theoretic statistics and safe anytime-valid inference", 2023).

Who has bet through healthy days has nothing left to bet when a release breaks. So bettors begin
anew at each outcome, the n-th with 1 / (n (n + 1)) of the capital, which sums to 1 and is kept
aside until then: what breaks after n outcomes is told by those that began about then, as soon as
they have made up for the share n^-2 of the capital that they began with.
"""

# Stakes: small ones find small excesses in the long run, large ones find large excesses soon.
_STAKES = (0.9, 0.5, 0.25, 1 / 8, 1 / 16, 1 / 32, 1 / 64)
# Enough to tell; beyond it capitals would overflow.
_LARGEST = 1e250


class CanaryEvidence:
    """That outcomes are 1 more often than a bound says, or than bounds that change do."""

    def __init__(self) -> None:
        self._seen = 0
        # By stake, of all who bet it since whenever: they win and lose alike from here on.
        self._capitals = [0.0] * len(_STAKES)

    def see(self, outcome: bool, bound: float) -> None:
        """Count an outcome whose probability of being True is, in the hypothesis, at most `bound`,
        given all that was seen before; of a bound of 0, 1 or beyond nothing follows."""
        if not 0 < bound < 1:
            return
        self._seen += 1
        begins = 1 / (self._seen * (self._seen + 1)) / len(_STAKES)
        for i, stake in enumerate(_STAKES):
            gain = 1 + stake * (outcome - bound) / bound
            self._capitals[i] = min(_LARGEST, (self._capitals[i] + begins) * gain)

    @property
    def value(self) -> float:
        """Above 0: 1 at the beginning, and in the hypothesis 1 at most in the mean at any time."""
        aside = 1 / (self._seen + 1)
        return aside + sum(self._capitals)
