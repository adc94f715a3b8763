"""Online backfilling (Seo et al., WACV 2025) with both models frozen and no labels: nothing is
carried, a new query is turned back into the old space, and what it finds there joins what it finds
among native items by distance alone, which the loss has made comparable."""

from collections.abc import Callable

import numpy as np

from nobackfill.adopt.judgement import Queries, measure_figures, query_item_distances
from nobackfill.adopt.maps import fit_maps
from nobackfill.adopt.pairs import Pairs
from nobackfill.ridge import Doubles
from nobackfill.vectors import Vectors, normalise

# New queries [q, b] -> old space [q, a].
Turn = Callable[[Vectors], Vectors]
_TEMPERATURE = 0.05
_EPOCHS, _BATCH, _RATE = 12, 256, 3e-4


def train_reverse_transform(pairs: Pairs, seed: int = 0) -> Turn:
    """The reverse query transform: affine, begun as ridge, then metric-compatible contrastive
    learning; the epoch of most neighbours kept among a fifth of the pairs."""
    rng = np.random.default_rng(seed)
    held, rest = np.split(rng.permutation(len(pairs)), [len(pairs) // 5])
    start = fit_maps(pairs.new[rest], pairs.old[rest], kinds=["affine"])["affine"]
    state = _Adam(np.concatenate([start.weight, start.bias[:, None]], axis=1).astype(np.float64))
    old, new = normalise(pairs.old), normalise(pairs.new)
    best, kept = state.value, -1.0
    for _ in range(_EPOCHS + 1):
        share = _kept(_turn(state.value), old[held], new[held])
        if share > kept:
            best, kept = state.value, share
        order = rng.permutation(rest)
        for first in range(0, len(order), _BATCH):
            rows = order[first : first + _BATCH]
            state.step(_slope(state.value, old[rows], new[rows]))
    return _turn(best)


def _turn(weight: Doubles) -> Turn:
    def turn(queries: Vectors) -> Vectors:
        turned = queries @ weight[:, :-1].T + weight[:, -1]
        return normalise(np.asarray(turned, np.float32))

    return turn


def _kept(turn: Turn, old: Vectors, new: Vectors) -> float:
    asked = Queries(old, new, np.arange(len(old), dtype=np.int64), are_gallery_items=True)
    found = measure_figures(query_item_distances(new, new), asked)[0](
        query_item_distances(turn(new), old)
    )
    return float(found["agreement@10"].mean())


def _slope(weight: Doubles, old: Vectors, new: Vectors) -> Doubles:
    """Of the loss: an item's own old vector, and its own new one, against the other items' vectors
    of either model together, so that one distance means the same among both."""
    given = np.concatenate([new, np.ones((len(new), 1))], axis=1)
    turned = given @ weight.T
    lengths = np.linalg.norm(turned, axis=1, keepdims=True)
    unit = turned / lengths
    same = np.eye(len(new), dtype=bool)
    crossed = np.exp((unit @ old.T - 1) / _TEMPERATURE)
    native = np.where(same, 0, np.exp((new @ new.T - 1) / _TEMPERATURE)).sum(1, keepdims=True)
    first = crossed / (crossed.sum(1, keepdims=True) + native) - same
    others = np.where(same, 0, crossed)
    second = others / (1 + native + others.sum(1, keepdims=True))
    pull = (first + second) @ old / (_TEMPERATURE * len(new))
    pull -= unit * (unit * pull).sum(1, keepdims=True)
    slope: Doubles = (pull / lengths).T @ given
    return slope


class _Adam:
    """Kingma and Ba 2015."""

    def __init__(self, value: Doubles) -> None:
        self.value, self._steps = value, 0
        self._mean, self._square = np.zeros_like(value), np.zeros_like(value)

    def step(self, slope: Doubles) -> None:
        self._steps += 1
        self._mean = 0.9 * self._mean + 0.1 * slope
        self._square = 0.999 * self._square + 0.001 * np.square(slope)
        mean = self._mean / (1 - 0.9**self._steps)
        square = self._square / (1 - 0.999**self._steps)
        self.value = self.value - _RATE * mean / (np.sqrt(square) + 1e-8)
