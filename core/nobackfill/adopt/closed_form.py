"""Maps that are solved from pairs: no labels and no training, sums over pairs are all they need.

Ridge regression shrinks the directions that it knows little of towards nothing, and searches miss
what they told apart; a rotation keeps them all, and follows no stretching. Their mean finds more
known items than either, from 100 pairs to 2,000 (docs/adopt.md has the figures).
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nobackfill import ridge
from nobackfill.adopt.maps import Map, is_unit
from nobackfill.errors import InvalidInputError
from nobackfill.ridge import Blocks, Doubles, Moments, in_blocks
from nobackfill.vectors import Vectors

KINDS = ("affine", "low_rank", "procrustes")
# Rows whose leave-one-out error chooses a penalty: a curve over 16 penalties needs no more.
LEFT_OUT = 4000
# Of an affine map, found on texts and pictures that no figure is told of: the rotation's most
# share; ridge's penalty over the one of least error, as a mean of two varies less than either; and
# the singular value, over the mean one, at which the rotation believes a direction by 1 / sqrt(2).
MOST_TURNED, LESS, DOUBTED = 0.6, 0.3, 0.3


@dataclass(frozen=True)
class Strength:
    """What an affine map is told beside the pairs' moments: ridge's penalty, and the share of the
    rotation beside it."""

    penalty: float
    turned: float

    @property
    def straight(self) -> "Strength":
        """Of ridge alone: what a converter leaves over is shrunk, and not turned."""
        return Strength(self.penalty / LESS, 0.0)


def fit_maps(
    old: Vectors, new: Vectors, *, kinds: Collection[str] = KINDS, together: int = 1
) -> dict[str, Map]:
    """The candidates, by name, from pairs old [n, a] and new [n, b].

    "affine": the mean of ridge, its penalty by leave-one-out, and of a rotation times a factor.
    "low_rank": the same through the b/2 leading directions of what it predicts. "procrustes":
    orthogonal between centred vectors, between vectors of any norm times one factor. Raises
    InvalidInputError for fewer than 2 pairs.
    """
    if len(old) != len(new) or len(old) < 2 * together:
        raise InvalidInputError(f"expected at least 2 pairs, got {len(old)} old and {len(new)} new")
    blocks = in_blocks(old, new)
    solver = Solver(Moments.of(blocks()))
    strength = solver.strength(blocks, together=together) if needs_strength(kinds) else None
    return solver.maps(strength, is_unit(new), kinds)


def needs_strength(kinds: Collection[str]) -> bool:
    """Whether one of them is told more than moments: all but a rotation are."""
    return any(kind != "procrustes" for kind in kinds)


class Solver:
    """The candidates of the pairs whose moments are given; what two of them need is solved once."""

    def __init__(self, moments: Moments) -> None:
        self._moments = moments

    def strength(self, blocks: Blocks, *, together: int = 1) -> Strength:
        """By leave-one-out error on the same pairs, which `blocks` gives. The less of the new
        vectors ridge leaves unexplained, the less is turned."""
        found = ridge.fit(blocks, together=together, moments=self._moments, left_out=LEFT_OUT)
        unexplained = found.error / found.spread if found.spread > 0 else 0.0
        return Strength(LESS * found.penalty, min(MOST_TURNED, unexplained))

    def maps(
        self, strength: Strength | None, unit: bool, kinds: Collection[str] = KINDS
    ) -> dict[str, Map]:
        """Those of `kinds`; `strength`: where they need one; `unit`: as in Map."""
        moments, maps = self._moments, {}
        affine = None if strength is None else self._affine(strength)
        for kind in kinds:
            facts = {"pairs": str(moments.rows)}
            if kind == "procrustes":
                weight = self._rotation(np.ones(min(moments.dims)), factor=not unit)
            else:
                assert strength is not None and affine is not None
                half = max(1, moments.dims[1] // 2)
                weight = affine if kind == "affine" else _low_rank(affine, moments, half)
                facts |= {
                    "penalty": f"{strength.penalty:.3g}",
                    "turned": f"{strength.turned:.3g}",
                }
            bias = moments.means[1] - weight @ moments.means[0]
            maps[kind] = Map(kind, weight.astype(np.float32), bias.astype(np.float32), unit, facts)
        return maps

    def _affine(self, strength: Strength) -> Doubles:
        straight = ridge.solve(self._moments, strength.penalty).weight
        if strength.turned == 0:
            return straight
        _, singular, _ = self._decomposed
        doubted = DOUBTED * singular.mean()
        # 1 in place of each singular value gives the rotation of least error, in which those of
        # directions that the pairs say little of are as large as any.
        known = np.hypot(singular, doubted)
        believed = np.divide(singular, known, out=np.zeros_like(singular), where=known > 0)
        turned = self._rotation(believed, factor=True)
        mean: Doubles = (1 - strength.turned) * straight + strength.turned * turned
        return mean

    def _rotation(self, values: Doubles, *, factor: bool) -> Doubles:
        """V diag(values) U' [b, a] of the singular value decomposition U s V' of the cross products
        (Schönemann 1966), semi-orthogonal where all are 1; with `factor` times the one of least
        squared error."""
        u, singular, vt = self._decomposed
        turned = (u * values) @ vt
        spread = float((self._moments.gram @ turned * turned).sum())
        scale = float(values @ singular) / spread if factor and spread > 0 else 1.0
        return scale * turned.T

    @cached_property
    def _decomposed(self) -> tuple[Doubles, Doubles, Doubles]:
        return _decomposed(self._moments.cross)


def _low_rank(weight: Doubles, moments: Moments, rank: int) -> Doubles:
    """Reduced-rank regression: `weight` onto the leading principal directions of its outputs."""
    _, directions = np.linalg.eigh(weight @ moments.gram @ weight.T)
    kept = directions[:, -rank:]
    return kept @ (kept.T @ weight)


def _decomposed(cross: Doubles) -> tuple[Doubles, Doubles, Doubles]:
    try:
        u, singular, vt = np.linalg.svd(cross, full_matrices=False)
    except np.linalg.LinAlgError:
        # LAPACK's gesdd gives up on a few matrices of fewer pairs than dims, not on the transpose.
        v, singular, ut = np.linalg.svd(cross.T, full_matrices=False)
        u, vt = ut.T, v.T
    return u, singular, vt
