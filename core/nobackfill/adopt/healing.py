"""A gallery on its way: what it answers while 0, 10 … 100 % of its items become native, at random.

Carried and native distances do not compare: sorted as they are, a gallery can answer worse half-way
than at either end (the valley). Scores on one scale of relevance close it.
"""

from dataclasses import dataclass

import numpy as np

from nobackfill.adopt.figures import Queries, measure
from nobackfill.adopt.joining import Block, Line, Mask, fit_line

# Queries by which the curves are measured, and random orders of the items that they are means of.
MOST_HEALING = 500
ORDERS = 3
SHARES = np.linspace(0, 1, 11)

# By figure, a value for each of SHARES.
Curves = dict[str, list[float]]


@dataclass(frozen=True)
class Healing:
    """`calibrated`: by the scores that `nobackfill.serve` ranks by; `raw`: carried and native
    vectors in one index, by distance."""

    calibrated: Curves
    raw: Curves


@dataclass(frozen=True)
class Mixed:
    """A gallery on its way: nearness [q, g] of carried items, and of the same as native ones."""

    joined: Block
    native: Block
    truth: Mask
    queries: Queries

    def chosen(self, halves: Mask) -> tuple[tuple[Line, Line], Curves]:
        """The lines of both origins, and their curves: fitted to one half, judged on the other.

        Either standardised scores as they are, or their log-odds of a match; whichever's figures
        fall less below the lower of their ends. A match is what is asked for, or one of the new
        model's own ten neighbours.
        """
        fitted = (self._line(self.joined, halves), self._line(self.native, halves))
        plain = (Line(), Line())
        curves = {lines: self._curves(lines, ~halves) for lines in (fitted, plain)}
        best = min(curves, key=lambda lines: deepest(curves[lines]))
        everyone = np.ones(len(halves), bool)
        lines = plain
        if best is fitted:
            lines = (self._line(self.joined, everyone), self._line(self.native, everyone))
        return lines, curves[best]

    def _line(self, near: Block, some: Mask) -> Line:
        kept = np.repeat(some[:, None], near.shape[1], 1)
        matches = self.truth.copy()
        rows = np.arange(len(some))
        if self.queries.own:
            kept[rows, self.queries.rows] = False
        else:
            matches[:] = False
            matches[rows, self.queries.rows] = True
        return fit_line(near[matches & kept], near[~matches & kept])

    def raw(self, halves: Mask) -> Curves:
        """The curves of the same queries, of both as they are."""
        return self._curves((Line(), Line()), ~halves)

    def _curves(self, lines: tuple[Line, Line], some: Mask) -> Curves:
        rows = np.flatnonzero(some)[:MOST_HEALING]
        figures, _ = measure(-self.native[rows], self.queries.part(rows))
        by_joined, by_native = lines[0](self.joined[rows]), lines[1](self.native[rows])
        curves: dict[str, list[list[float]]] = {}
        for seed in range(ORDERS):
            order = np.random.default_rng(seed).random(self.native.shape[1])
            found = [figures(-np.where(order < one, by_native, by_joined)) for one in SHARES]
            for name in found[0]:
                curves.setdefault(name, []).append([float(one[name].mean()) for one in found])
        return {name: np.mean(ones, axis=0).tolist() for name, ones in curves.items()}


def valley(curve: list[float]) -> float:
    """How far it falls below the lower of its ends."""
    return max(0.0, min(curve[0], curve[-1]) - min(curve))


def deepest(curves: Curves) -> float:
    """The valley of the figure that falls most."""
    return max(map(valley, curves.values()))
