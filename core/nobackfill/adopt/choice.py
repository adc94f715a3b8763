"""Which candidate carries: the one that serves the queries best on pairs that it has not seen."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nobackfill.adopt import crossfit
from nobackfill.adopt.correction import CONVERTER, CORRECTED, corrected
from nobackfill.adopt.crossfit import Held
from nobackfill.adopt.figures import Queries, chosen_by
from nobackfill.adopt.judgement import figures_of
from nobackfill.adopt.maps import Map, fit_maps
from nobackfill.adopt.pairs import Pairs


@dataclass(frozen=True)
class Choice:
    """`figures`: of each candidate, by which `kind` was chosen; `held`: the chosen one."""

    kind: str
    figures: dict[str, float]
    held: Held

    def fitted(self, pairs: Pairs, prior: Map | None = None) -> Map:
        """The chosen candidate, from all pairs."""
        if prior is not None and self.kind in (CONVERTER, CORRECTED):
            return prior if self.kind == CONVERTER else corrected(prior, pairs)
        return fit_maps(pairs.old, pairs.new, kinds=[self.kind])[self.kind]


def choose(pairs: Pairs, asked: Sequence[Queries], prior: Map | None = None) -> Choice:
    """By MRR of the first set of queries, by neighbours kept where they are items; the chosen one's
    distances are of all sets. Raises InvalidInputError for fewer than 10 pairs."""
    held = crossfit.candidates(pairs, asked, prior)
    figures = {kind: _figure(one, pairs, asked[0]) for kind, one in held.items()}
    kind = max(figures, key=figures.__getitem__)
    return Choice(kind, figures, held[kind])


def _figure(held: Held, pairs: Pairs, asked: Queries) -> float:
    return float(np.mean(chosen_by(figures_of(held.apart[0], pairs, asked), asked.own)))
