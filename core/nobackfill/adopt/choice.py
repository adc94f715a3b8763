"""Which candidate carries: the one that serves the queries best on pairs that it has not seen."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nobackfill.adopt import crossfit
from nobackfill.adopt.closed_form import KINDS, Solver, fit_maps, needs_strength
from nobackfill.adopt.correction import CONVERTER, CORRECTED, corrected
from nobackfill.adopt.crossfit import Held
from nobackfill.adopt.figures import Queries, chosen_by
from nobackfill.adopt.judgement import figures_of
from nobackfill.adopt.maps import Map, is_unit
from nobackfill.adopt.pairs import Pairs
from nobackfill.adopt.residual import RESIDUAL, Trainer, trained
from nobackfill.ridge import Moments, in_blocks


@dataclass(frozen=True)
class Choice:
    """`figures`: of each candidate, by which `kind` was chosen; `held`: the chosen one. `more`:
    queries that it is fitted on beside the pairs. `also`: who trains a residual map."""

    kind: str
    figures: dict[str, float]
    held: Held
    more: Queries | None
    also: Trainer | None = None

    @property
    def figure(self) -> float:
        """Of the chosen one."""
        return max(self.figures.values())

    def fitted(self, pairs: Pairs, prior: Map | None = None) -> Map:
        """The chosen candidate, from all pairs."""
        if prior is not None and self.kind in (CONVERTER, CORRECTED):
            return prior if self.kind == CONVERTER else corrected(prior, pairs)
        if self.kind == RESIDUAL and self.also is not None:
            straight = fit_maps(pairs.old, pairs.new, kinds=["affine"])["affine"]
            return trained(straight, pairs.old, pairs.new, self.also)
        if self.more is None:
            return fit_maps(pairs.old, pairs.new, kinds=[self.kind])[self.kind]
        rows = crossfit.with_queries(pairs, self.more)
        blocks = in_blocks(rows.old, rows.new)
        moments = Moments.of(blocks())
        chosen = None
        if needs_strength([self.kind]):
            chosen = crossfit.strength(rows, np.arange(len(pairs)), moments)
        found = Solver(moments).maps(chosen, is_unit(pairs.new), [self.kind])[self.kind]
        counts = {"pairs": str(len(pairs)), "queries": str(len(self.more.rows))}
        return replace(found, facts=found.facts | counts)


def choose(
    pairs: Pairs,
    asked: Sequence[Queries],
    prior: Map | None = None,
    also: Trainer | None = None,
) -> Choice:
    """By MRR of the first set of queries, by neighbours kept where they are items; the chosen one's
    distances are of all sets. It is fitted on these queries, too, where others of them are found
    better so. Raises InvalidInputError for fewer than 10 pairs."""
    held = crossfit.candidates(pairs, asked, prior, also=also)
    figures = {kind: _figure(one, pairs, asked[0]) for kind, one in held.items()}
    kind = max(figures, key=figures.__getitem__)
    without, queries = Choice(kind, figures, held[kind], None, also), asked[0]
    if queries.own or kind not in KINDS:
        return without
    # Pairs of both models as the items are; but they may be of another kind, or read otherwise.
    again = crossfit.cross_fitted(pairs, asked, [kind], more=queries)[kind]
    figure = _figure(again, pairs, queries)
    figures[f"{kind}, fitted on queries too"] = figure
    return Choice(kind, figures, again, queries) if figure > figures[kind] else without


def _figure(held: Held, pairs: Pairs, asked: Queries) -> float:
    return float(np.mean(chosen_by(figures_of(held.apart[0], pairs, asked), asked.own)))
