"""Ridge regression between paired vectors, its penalty chosen by leave-one-out in closed form.

Streaming: sums of products are kept in float64, never the pairs, so that a hundred or ten million
of them take the same memory.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Doubles = NDArray[np.float64]
Pairs = tuple[Floats, Floats]
# Gives the same pairs from the start at each call, in blocks.
Blocks = Callable[[], Iterable[Pairs]]

# Penalties that are tried, as multiples of the mean input variance of all rows together.
DECADES = tuple(10.0**power for power in range(-6, 4))
# Rows whose leave-one-out error is computed; of more, this many are drawn.
MOST_LEFT_OUT = 20_000
_BLOCK_ROWS = 8192


@dataclass(frozen=True)
class Ridge:
    """x -> weight x + bias; weight [b, a], bias [b].

    `penalty`: lambda over the mean input variance of all rows together. `error`: mean squared
    distance, summed over the b outputs, between a row and what it is predicted as by the others;
    `spread`: the same between a row and the mean of all.
    """

    weight: Doubles
    bias: Doubles
    penalty: float
    error: float
    spread: float


class Moments:
    """Sums over paired rows x [n, a] and y [n, b] from which every closed-form map is solved."""

    def __init__(self, like: "Moments | None" = None) -> None:
        self.rows = 0
        # Sums are of distances from the first block's means: they lose no digits to a large mean.
        self._origin: tuple[Doubles, Doubles] | None = None
        if like is not None and like._origin is not None:
            self._begin(like._origin)
        self._sums: tuple[Doubles, Doubles]
        self._products: tuple[Doubles, Doubles]

    @classmethod
    def of(cls, blocks: Iterable[Pairs]) -> "Moments":
        """Those of all blocks. Raises ValueError for rows that are no pairs, or fewer than 2."""
        moments = cls()
        for x, y in blocks:
            moments.add(x, y)
        if moments.rows < 2:
            raise ValueError(f"expected at least 2 pairs, got {moments.rows}")
        return moments

    def add(self, x: Floats, y: Floats) -> None:
        """Count further pairs. Raises ValueError for shapes that do not fit, NaN and infinity."""
        if x.ndim != 2 or y.ndim != 2 or len(x) != len(y):
            raise ValueError(
                f"expected paired rows [n, a] and [n, b], got {list(x.shape)} and {list(y.shape)}"
            )
        if not len(x):
            return
        if self._origin is None:
            self._begin((x.mean(0, np.float64), y.mean(0, np.float64)))
        if (x.shape[1], y.shape[1]) != self.dims:
            raise ValueError(f"expected pairs of dimensions {self.dims}, got {x.shape, y.shape}")
        for first in range(0, len(x), _BLOCK_ROWS):
            self._add(
                *self._shifted(x[first : first + _BLOCK_ROWS], y[first : first + _BLOCK_ROWS])
            )

    def without(self, part: "Moments") -> "Moments":
        """Those of the other rows; `part` was begun `like` this one and holds some of its rows."""
        assert self._origin is not None
        rest = Moments(self)
        rest.rows = self.rows - part.rows
        for total, whole, less in zip(
            (*rest._sums, *rest._products),
            (*self._sums, *self._products),
            (*part._sums, *part._products),
            strict=True,
        ):
            total += whole - less
        return rest

    def _begin(self, origin: tuple[Doubles, Doubles]) -> None:
        self._origin = origin
        a, b = map(len, origin)
        self._sums = np.zeros(a), np.zeros(b)
        self._products = np.zeros((a, a)), np.zeros((a, b))

    def _add(self, x: Doubles, y: Doubles) -> None:
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            raise ValueError("expected finite values in every pair, got NaN or infinity")
        for total, more in zip(self._sums, (x.sum(0), y.sum(0)), strict=True):
            total += more
        for total, more in zip(self._products, (x.T @ x, x.T @ y), strict=True):
            total += more
        self.rows += len(x)

    def _shifted(self, x: Floats, y: Floats) -> tuple[Doubles, Doubles]:
        assert self._origin is not None
        return x.astype(np.float64) - self._origin[0], y.astype(np.float64) - self._origin[1]

    @property
    def dims(self) -> tuple[int, int]:
        """a and b."""
        assert self._origin is not None
        return len(self._origin[0]), len(self._origin[1])

    @property
    def means(self) -> tuple[Doubles, Doubles]:
        """Of x [a] and of y [b]."""
        assert self._origin is not None
        (x, y), (sum_x, sum_y) = self._origin, self._sums
        return x + sum_x / self.rows, y + sum_y / self.rows

    @property
    def gram(self) -> Doubles:
        """Products of centred inputs, summed over the rows: [a, a]."""
        return self._products[0] - np.outer(self._sums[0], self._sums[0]) / self.rows

    @property
    def cross(self) -> Doubles:
        """Products of centred inputs and outputs, summed over the rows: [a, b]."""
        return self._products[1] - np.outer(self._sums[0], self._sums[1]) / self.rows


def in_blocks(x: Floats, y: Floats, rows: int = _BLOCK_ROWS) -> Blocks:
    """Pairs that are in memory, as blocks."""

    def blocks() -> Iterator[Pairs]:
        for first in range(0, len(x), rows):
            yield x[first : first + rows], y[first : first + rows]

    return blocks


def solve(moments: Moments, penalty: float) -> Ridge:
    """The ridge map at one penalty, none on the bias; its `error` and `spread` are NaN."""
    gram = moments.gram
    least = penalty * float(np.trace(gram)) / len(gram)
    unknown = float("nan")
    if least <= 0:
        return _Spectrum(moments).solve(penalty, unknown, unknown)
    # Without eigenvectors, which one penalty does not need: a fiftieth of the time.
    shrunk = gram + least * np.eye(len(gram))
    weight = np.asarray(np.linalg.solve(shrunk, moments.cross), np.float64).T
    mean_x, mean_y = moments.means
    return Ridge(weight, mean_y - weight @ mean_x, penalty, unknown, unknown)


def fit(
    blocks: Blocks,
    *,
    together: int = 1,
    seed: int = 0,
    moments: Moments | None = None,
    left_out: int = MOST_LEFT_OUT,
) -> Ridge:
    """The ridge map at the penalty of least leave-one-out error.

    The error of a row that the map was fitted without follows from the fit to all rows: residual
    over 1 - leverage (Allen 1974, PRESS). `together`: consecutive rows that are left out as one,
    as views of one image are. Above `left_out` rows the error is
    that of as many drawn by `seed`; their leverages, and the map, are still those of all rows.
    `moments`: those of all blocks, if they are known. Raises ValueError for rows that
    are no pairs, NaN, and fewer than 2 groups.
    """
    moments = Moments.of(blocks()) if moments is None else moments
    if moments.rows % together or moments.rows < 2 * together:
        raise ValueError(f"expected at least 2 groups of {together} rows, got {moments.rows}")
    spectrum = _Spectrum(moments)
    some = spectrum.left_out(blocks(), together, seed, left_out)
    errors = {penalty: some.error(penalty) for penalty in DECADES}
    best = min(errors, key=errors.__getitem__)
    finer = {best * 10**power for power in (-0.75, -0.5, -0.25, 0.25, 0.5, 0.75)}
    errors |= {penalty: some.error(penalty) for penalty in sorted(finer)}
    best = min(errors, key=errors.__getitem__)
    return spectrum.solve(best, errors[best], float(np.square(some.outputs).sum(1).mean()))


class _Spectrum:
    """The eigenvectors of the inputs' products, in which a penalty is a division."""

    def __init__(self, moments: Moments) -> None:
        values, self._vectors = np.linalg.eigh(moments.gram)
        self._values = values.clip(min=0)
        self._cross = self._vectors.T @ moments.cross
        self._means, self._rows = moments.means, moments.rows

    def _scale(self, penalty: float) -> Doubles:
        """1 / (eigenvalue + lambda), 0 where both are 0: inputs that never vary weigh nothing."""
        sums = self._values + penalty * self._values.mean()
        scale: Doubles = np.divide(1, sums, out=np.zeros_like(sums), where=sums > 0)
        return scale

    def solve(self, penalty: float, error: float, spread: float) -> Ridge:
        weight = (self._vectors @ (self._scale(penalty)[:, None] * self._cross)).T
        mean_x, mean_y = self._means
        return Ridge(weight, mean_y - weight @ mean_x, penalty, error, spread)

    def left_out(self, blocks: Iterable[Pairs], together: int, seed: int, most: int) -> "_LeftOut":
        """Of at most `most` rows, whole groups."""
        groups = self._rows // together
        drawn = np.arange(groups)
        if self._rows > most:
            some = np.random.default_rng(seed).choice(groups, max(1, most // together), False)
            drawn = np.sort(some)
        rows = (drawn[:, None] * together + np.arange(together)).ravel()
        taken: list[tuple[Doubles, Doubles]] = []
        first = 0
        for x, y in blocks:
            here = rows[(rows >= first) & (rows < first + len(x))] - first
            taken.append((x[here].astype(np.float64), y[here].astype(np.float64)))
            first += len(x)
        x, y = (np.concatenate(parts) for parts in zip(*taken, strict=True))
        if first != self._rows:
            raise ValueError(f"expected the same {self._rows} pairs a second time, got {first}")
        turned = (x - self._means[0]) @ self._vectors
        return _LeftOut(turned, y - self._means[1], together, self._cross, self._scale, self._rows)


@dataclass(frozen=True)
class _LeftOut:
    """Centred rows, inputs in the eigenvectors' directions [m, a], outputs [m, b]; of all rows the
    products with the outputs [a, b]."""

    inputs: Doubles
    outputs: Doubles
    together: int
    cross: Doubles
    scale: Callable[[float], Doubles]
    rows: int

    def error(self, penalty: float) -> float:
        """Mean squared distance of each row to its prediction from the other groups' rows."""
        scale, size = self.scale(penalty), self.together
        residuals = self.outputs - self.inputs @ (scale[:, None] * self.cross)
        if size == 1:
            kept = 1 - 1 / self.rows - np.square(self.inputs) @ scale
            # A row that nothing else speaks about is not predicted by the others at all.
            if kept.min() <= 1e-12:
                return float("inf")
            return float((np.square(residuals).sum(1) / np.square(kept)).mean())
        inputs = self.inputs.reshape(-1, size, self.inputs.shape[1])
        hat = 1 / self.rows + (inputs * scale) @ inputs.transpose(0, 2, 1)
        grouped = residuals.reshape(-1, size, residuals.shape[1])
        try:
            left = np.linalg.solve(np.eye(size) - hat, grouped)
        except np.linalg.LinAlgError:
            return float("inf")
        return float(np.square(left).sum(2).mean())
