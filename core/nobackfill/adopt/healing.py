"""A gallery on its way: what it answers while 0, 10 … 100 % of its items become native, at random.

Carried and native distances do not compare: sorted as they are, a gallery can answer worse half-way
than at either end (the valley). Scores on one scale of relevance close it; most of all where a
native item keeps a share of its score as a carried one, which all items have.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from nobackfill.adopt.figures import Queries, measure
from nobackfill.adopt.joining import Block, Line, Mask, fit_line

# Queries by which the curves are measured, and random orders of the items that they are means of.
MOST_HEALING = 500
ORDERS = 3
SHARES = np.linspace(0, 1, 11)
# A valley of less is within the noise of a few hundred queries.
MOST_BELOW = 0.01

# By figure, a value for each of SHARES.
Curves = dict[str, list[float]]
# Of carried and of native items.
Lines = tuple[Line, Line]
# Standardised scores as they are; log-odds of a match; these, native items' of both their scores.
Scale = Literal["plain", "odds", "shared"]


@dataclass(frozen=True)
class Healing:
    """`calibrated`: by the scores that `nobackfill.serve` ranks by; `raw`: carried and native
    vectors in one index, by distance."""

    calibrated: Curves
    raw: Curves


@dataclass(frozen=True)
class Chosen:
    """`lines`: fitted to all queries. `native`: scores [q, g] of native items, each query's by
    lines that were fitted without its half."""

    lines: Lines
    curves: Curves
    native: Block


@dataclass(frozen=True)
class Mixed:
    """A gallery on its way: nearness [q, g] of carried items, and of the same as native ones."""

    joined: Block
    native: Block
    truth: Mask
    queries: Queries

    def chosen(self, halves: Mask) -> Chosen:
        """The scale whose figures fall least, over the whole way, below the lower of the two ends
        that each origin alone has; of those that fall less than MOST_BELOW the one that finds most
        on the way. Each is fitted to either half and judged on the other. A match is what is asked
        for, or one of the new model's own ten neighbours.
        """
        some = slice(MOST_HEALING)
        lines = {
            scale: (self._lines(scale, ~halves), self._lines(scale, halves))
            for scale in get_args(Scale)
        }
        curves = {
            scale: self._curves(*self._held_out(fitted, halves, some))
            for scale, fitted in lines.items()
        }
        # Within an origin that keeps no share no scale changes the order.
        ends = {name: min(curve[0], curve[-1]) for name, curve in curves["plain"].items()}

        def cost(scale: Scale) -> tuple[float, float]:
            found = curves[scale]
            deepest = max(ends[name] - min(curve) for name, curve in found.items())
            on_the_way = found["agreement@10" if self.queries.own else "MRR"]
            return max(MOST_BELOW, deepest), -float(np.mean(on_the_way))

        best = min(curves, key=cost)
        native = self._held_out(lines[best], halves, slice(None))[1]
        return Chosen(self._lines(best, np.ones(len(halves), bool)), curves[best], native)

    def raw(self) -> Curves:
        """The curves of the same queries, of both as they are."""
        return self._curves(self.joined[:MOST_HEALING], self.native[:MOST_HEALING])

    def _lines(self, scale: Scale, some: Mask) -> Lines:
        if scale == "plain":
            return Line(), Line()
        kept = np.repeat(some[:, None], self.native.shape[1], 1)
        matches = self.truth.copy()
        rows = np.arange(len(some))
        if self.queries.own:
            kept[rows, self.queries.rows] = False
        else:
            matches[:] = False
            matches[rows, self.queries.rows] = True
        hits, rest = matches & kept, ~matches & kept

        def line(*blocks: Block) -> Line:
            near, others = (np.stack([one[part] for one in blocks], 1) for part in (hits, rest))
            return fit_line(near, others)

        shared = [self.joined] if scale == "shared" else []
        return line(self.joined), line(self.native, *shared)

    def _held_out(
        self, lines: tuple[Lines, Lines], halves: Mask, some: slice
    ) -> tuple[Block, Block]:
        """Scores of some queries' items as carried and as native ones: `lines` of the half itself
        are for the queries in `halves`, then those of the others."""
        joined, native = self.joined[some].copy(), self.native[some].copy()
        for (by_joined, by_native), half in zip(lines, (halves[some], ~halves[some]), strict=True):
            near = self.joined[some][half]
            joined[half] = by_joined(near, near)
            native[half] = by_native(native[half], near)
        return joined, native

    def _curves(self, joined: Block, native: Block) -> Curves:
        rows = np.arange(len(joined))
        figures, _ = measure(-self.native[rows], self.queries.part(rows))
        curves: dict[str, list[list[float]]] = {}
        for seed in range(ORDERS):
            order = np.random.default_rng(seed).random(native.shape[1])
            found = [figures(-np.where(order < one, native, joined)) for one in SHARES]
            for name in found[0]:
                curves.setdefault(name, []).append([float(one[name].mean()) for one in found])
        return {name: np.mean(ones, axis=0).tolist() for name, ones in curves.items()}


def valley(curve: list[float]) -> float:
    """How far it falls below the lower of its ends."""
    return max(0.0, min(curve[0], curve[-1]) - min(curve))
