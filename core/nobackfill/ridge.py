"""Fit ridge regressions between paired vectors; leave-one-out in closed form chooses the penalty.

Pairs are streamed: only sums of products are stored, in float64. A hundred pairs and ten million
take the same memory.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Doubles = NDArray[np.float64]
Pairs = tuple[Floats, Floats]
# Yields the same pairs, in blocks, from the start at each call.
Blocks = Callable[[], Iterable[Pairs]]

# Penalties to try, as multiples of the mean input variance.
PENALTIES = tuple(10.0**power for power in range(-6, 4))
# Rows whose leave-one-out error is computed; of more, this many are sampled.
MOST_HELD_OUT = 20_000
_BLOCK_ROWS = 8192


@dataclass(frozen=True)
class Ridge:
    """A ridge map x -> weight x + bias.

    Attributes:
        weight: float64 [b, a].
        bias: float64 [b].
        penalty: Lambda, as a multiple of the mean input variance of all rows.
        loo_error: Leave-one-out error: the mean squared distance, summed over the b outputs,
            between a row and its prediction from the other rows.
        output_variance: The mean squared distance between a row and the mean of all rows.
    """

    weight: Doubles
    bias: Doubles
    penalty: float
    loo_error: float
    output_variance: float


class Moments:
    """Sums over paired rows x [n, a] and y [n, b] from which every closed-form map is solved.

    Attributes:
        row_count: Number of pairs.
    """

    def __init__(self, same_origin_as: "Moments | None" = None) -> None:
        """Begin without pairs.

        Args:
            same_origin_as: Use the origin of these moments, so that `subtract` can take one from
                the other. None, or moments without pairs: the first block gives the origin.
        """
        self.row_count = 0
        # Sums of differences from the first block's means: a large mean costs no digits.
        self._origin: tuple[Doubles, Doubles] | None = None
        if same_origin_as is not None and same_origin_as._origin is not None:
            self._begin(same_origin_as._origin)
        self._sums: tuple[Doubles, Doubles]
        self._products: tuple[Doubles, Doubles]

    @classmethod
    def from_blocks(cls, blocks: Iterable[Pairs]) -> "Moments":
        """Compute the moments of all blocks, in float64.

        Args:
            blocks: Pairs x [n, a] and y [n, b]; empty blocks are skipped.

        Raises:
            ValueError: Rows that are no pairs, NaN or infinity, or fewer than 2 pairs.
            Exception: Any error of `blocks`.
        """
        moments = cls()
        for x, y in blocks:
            moments.add(x, y)
        if moments.row_count < 2:
            raise ValueError(
                f"to fit a map, expected at least 2 pairs, got {moments.row_count}; pass more pairs"
            )
        return moments

    def add(self, x: Floats, y: Floats) -> None:
        """Add pairs to the sums; no rows change nothing.

        Args:
            x: [n, a].
            y: [n, b].

        Raises:
            ValueError: Shapes or dimensions that do not fit, NaN or infinity. Rows before the
                faulty 8192 may have been added. After NaN or infinity in the first rows, no later
                row is accepted: begin with new moments.
        """
        if x.ndim != 2 or y.ndim != 2 or len(x) != len(y):
            raise ValueError(
                "x and y: expected paired rows [n, a] and [n, b], got arrays of the shapes "
                f"{list(x.shape)} and {list(y.shape)}; pass a row of each for every item"
            )
        if not len(x):
            return
        if self._origin is None:
            self._begin((x.mean(0, np.float64), y.mean(0, np.float64)))
        if (x.shape[1], y.shape[1]) != self.dims:
            raise ValueError(
                f"x and y: expected the dimensions {self.dims} of the first block, got the shapes "
                f"{x.shape} and {y.shape}; pass blocks of the same models"
            )
        for first in range(0, len(x), _BLOCK_ROWS):
            self._add(
                *self._shifted(x[first : first + _BLOCK_ROWS], y[first : first + _BLOCK_ROWS])
            )

    def subtract(self, part: "Moments") -> "Moments":
        """Return the moments of the rows that are not in `part`.

        Args:
            part: Moments of some of these rows, created with `same_origin_as` this object. This is
                not checked; without it the result is wrong.

        Returns:
            New moments; neither operand changes. At least one pair must have been added to this
            object.

        Raises:
            AssertionError: No pair was added to this object.
            AttributeError: `part` has neither pairs nor an origin.
        """
        assert self._origin is not None
        others = Moments(self)
        others.row_count = self.row_count - part.row_count
        for total, sums, subtrahend in zip(
            (*others._sums, *others._products),
            (*self._sums, *self._products),
            (*part._sums, *part._products),
            strict=True,
        ):
            total += sums - subtrahend
        return others

    def _begin(self, origin: tuple[Doubles, Doubles]) -> None:
        self._origin = origin
        a, b = map(len, origin)
        self._sums = np.zeros(a), np.zeros(b)
        self._products = np.zeros((a, a)), np.zeros((a, b))

    def _add(self, x: Doubles, y: Doubles) -> None:
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            raise ValueError(
                "x and y: expected finite values in every pair, got NaN or infinity; leave these "
                "pairs out"
            )
        for total, more in zip(self._sums, (x.sum(0), y.sum(0)), strict=True):
            total += more
        for total, more in zip(self._products, (x.T @ x, x.T @ y), strict=True):
            total += more
        self.row_count += len(x)

    def _shifted(self, x: Floats, y: Floats) -> tuple[Doubles, Doubles]:
        assert self._origin is not None
        return x.astype(np.float64) - self._origin[0], y.astype(np.float64) - self._origin[1]

    @property
    def dims(self) -> tuple[int, int]:
        """Return the dimensions a of x and b of y.

        Raises:
            AssertionError: No rows were added.
        """
        assert self._origin is not None
        return len(self._origin[0]), len(self._origin[1])

    @property
    def mean(self) -> tuple[Doubles, Doubles]:
        """Return the mean of x, float64 [a], and of y, float64 [b].

        Without rows after `subtract`, or with only `same_origin_as`, both are NaN.

        Raises:
            AssertionError: No rows were added.
        """
        assert self._origin is not None
        (x, y), (sum_x, sum_y) = self._origin, self._sums
        return x + sum_x / self.row_count, y + sum_y / self.row_count

    @property
    def gram(self) -> Doubles:
        """Return the products of centred inputs, summed over the rows: float64 [a, a].

        Without rows after `subtract`, or with only `same_origin_as`, it is NaN.

        Raises:
            AttributeError: No rows were added.
        """
        return self._products[0] - np.outer(self._sums[0], self._sums[0]) / self.row_count

    @property
    def cross(self) -> Doubles:
        """Return the products of centred inputs and outputs, summed over rows: float64 [a, b].

        Without rows after `subtract`, or with only `same_origin_as`, it is NaN.

        Raises:
            AttributeError: No rows were added.
        """
        return self._products[1] - np.outer(self._sums[0], self._sums[1]) / self.row_count


def split_into_blocks(x: Floats, y: Floats, rows_per_block: int = _BLOCK_ROWS) -> Blocks:
    """Split pairs that are in memory into blocks.

    Args:
        x: [n, a].
        y: [n, b].
        rows_per_block: Largest number of rows of a block, at least 1; 0 raises ValueError at the
            first block.

    Returns:
        A function that iterates over the blocks from the start at each call; without rows there is
        no block. The blocks are views, and the number of rows of `y` is not compared with that of
        `x`.
    """

    def blocks() -> Iterator[Pairs]:
        for first in range(0, len(x), rows_per_block):
            yield x[first : first + rows_per_block], y[first : first + rows_per_block]

    return blocks


def solve_ridge(moments: Moments, penalty: float) -> Ridge:
    """Fit a ridge map with a given penalty, without penalty on the bias.

    Args:
        moments: Sums over at least 1 pair.
        penalty: Lambda, as a multiple of the mean input variance, at least 0; this is not checked.
            0 gives least squares of minimum norm. A constant input gets the weight 0 then.

    Returns:
        The map, with NaN as `loo_error` and `output_variance`.

    Raises:
        numpy.linalg.LinAlgError: The system of equations is singular, or its eigenvalues cannot be
            computed.
        AttributeError: No pair was added to the moments.
    """
    gram = moments.gram
    ridge = penalty * float(np.trace(gram)) / len(gram)
    unknown = float("nan")
    if ridge <= 0:
        return _Spectrum(moments).solve(penalty, unknown, unknown)
    # One penalty needs no eigenvectors; this takes a fiftieth of the time.
    shrunk = gram + ridge * np.eye(len(gram))
    weight = np.asarray(np.linalg.solve(shrunk, moments.cross), np.float64).T
    mean_x, mean_y = moments.mean
    return Ridge(weight, mean_y - weight @ mean_x, penalty, unknown, unknown)


def fit_ridge(
    blocks: Blocks,
    *,
    rows_per_group: int = 1,
    seed: int = 0,
    moments: Moments | None = None,
    most_sampled_rows: int = MOST_HELD_OUT,
) -> Ridge:
    """Fit a ridge map with the penalty of least leave-one-out error.

    The leave-one-out error of a row follows from the fit to all rows: residual over 1 - leverage
    (Allen 1974, PRESS). Penalties are tried by decades, then around the best in quarters of a
    decade. The map and the leverages always use all rows.

    Args:
        blocks: Iterates over the pairs; called twice, or once where `moments` is given.
        rows_per_group: Number of consecutive rows that are left out as one, such as views of one
            image; at least 1.
        seed: Chooses the sampled groups, at least 0; the same seed and pairs give the same map.
        moments: Moments of all blocks, if they are known; only their number of rows is compared
            with `blocks`, which are not checked for NaN then. None computes them.
        most_sampled_rows: Above this number of rows, the error is computed on a sample of this
            size, in whole groups and at least one.

    Returns:
        The map, with `loo_error` and `output_variance` of the sample. `loo_error` is infinite
        where no penalty has a finite error: the rows are too few for their dimensions.

    Raises:
        ValueError: Rows that are no pairs, NaN or infinity, fewer than 2 groups, a number of rows
            that is no multiple of `rows_per_group`, or another number of rows at the second call.
            Or the seed is negative and rows are sampled.
        ZeroDivisionError: `rows_per_group` is 0.
        numpy.linalg.LinAlgError: The eigenvalues cannot be computed.
        Exception: Any error that `blocks` raises.
    """
    moments = Moments.from_blocks(blocks()) if moments is None else moments
    if moments.row_count % rows_per_group or moments.row_count < 2 * rows_per_group:
        raise ValueError(
            f"cross-validation: expected at least 2 whole groups of {rows_per_group} pairs, got "
            f"{moments.row_count} pairs; pass more pairs"
        )
    spectrum = _Spectrum(moments)
    held_out = spectrum.hold_out(blocks(), rows_per_group, seed, most_sampled_rows)
    errors = {penalty: held_out.error(penalty) for penalty in PENALTIES}
    best = min(errors, key=errors.__getitem__)
    finer = {best * 10**power for power in (-0.75, -0.5, -0.25, 0.25, 0.5, 0.75)}
    errors |= {penalty: held_out.error(penalty) for penalty in sorted(finer)}
    best = min(errors, key=errors.__getitem__)
    return spectrum.solve(best, errors[best], float(np.square(held_out.outputs).sum(1).mean()))


class _Spectrum:
    """The eigenvectors of the inputs' products; they turn a penalty into a division."""

    def __init__(self, moments: Moments) -> None:
        values, self._vectors = np.linalg.eigh(moments.gram)
        self._values = values.clip(min=0)
        self._cross = self._vectors.T @ moments.cross
        self._means, self._rows = moments.mean, moments.row_count

    def _scale(self, penalty: float) -> Doubles:
        """Return 1 / (eigenvalue + lambda), 0 where both are 0: constant inputs get no weight."""
        sums = self._values + penalty * self._values.mean()
        scale: Doubles = np.divide(1, sums, out=np.zeros_like(sums), where=sums > 0)
        return scale

    def solve(self, penalty: float, error: float, spread: float) -> Ridge:
        weight = (self._vectors @ (self._scale(penalty)[:, None] * self._cross)).T
        mean_x, mean_y = self._means
        return Ridge(weight, mean_y - weight @ mean_x, penalty, error, spread)

    def hold_out(self, blocks: Iterable[Pairs], group: int, seed: int, most: int) -> "_HeldOut":
        """Read the rows whose leave-one-out error is computed: at most `most`, in whole groups.

        Raises:
            ValueError: `blocks` has another number of pairs than before.
        """
        groups = self._rows // group
        sample = np.arange(groups)
        if self._rows > most:
            draw = np.random.default_rng(seed).choice(groups, max(1, most // group), False)
            sample = np.sort(draw)
        rows = (sample[:, None] * group + np.arange(group)).ravel()
        parts: list[tuple[Doubles, Doubles]] = []
        first = 0
        for x, y in blocks:
            block = rows[(rows >= first) & (rows < first + len(x))] - first
            parts.append((x[block].astype(np.float64), y[block].astype(np.float64)))
            first += len(x)
        x, y = (np.concatenate(side) for side in zip(*parts, strict=True))
        if first != self._rows:
            raise ValueError(
                f"the second reading of the pairs: expected the same {self._rows} pairs as in the "
                f"first, got {first}; run again while no program changes the pairs"
            )
        rotated = (x - self._means[0]) @ self._vectors
        return _HeldOut(rotated, y - self._means[1], group, self._cross, self._scale, self._rows)


@dataclass(frozen=True)
class _HeldOut:
    """Centred rows whose leave-one-out error is computed, and the sums over all rows that it needs.

    Attributes:
        inputs: [m, a], in the directions of the eigenvectors.
        outputs: [m, b].
        group: Consecutive rows that are left out as one.
        cross: [a, b], products of inputs and outputs over all rows.
        scale: Returns 1 / (eigenvalue + lambda) [a] for a penalty.
        rows: Number of all rows.
    """

    inputs: Doubles
    outputs: Doubles
    group: int
    cross: Doubles
    scale: Callable[[float], Doubles]
    rows: int

    def error(self, penalty: float) -> float:
        """Return the mean squared distance of each row to its prediction from the other groups.

        It is infinite where a row or group has a direction of its own, so that no other row
        predicts it.
        """
        scale, size = self.scale(penalty), self.group
        residuals = self.outputs - self.inputs @ (scale[:, None] * self.cross)
        if size == 1:
            slack = 1 - 1 / self.rows - np.square(self.inputs) @ scale
            # No other row has a direction of this row, so that nothing predicts it.
            if slack.min() <= 1e-12:
                return float("inf")
            return float((np.square(residuals).sum(1) / np.square(slack)).mean())
        inputs = self.inputs.reshape(-1, size, self.inputs.shape[1])
        hat = 1 / self.rows + (inputs * scale) @ inputs.transpose(0, 2, 1)
        grouped = residuals.reshape(-1, size, residuals.shape[1])
        try:
            errors = np.linalg.solve(np.eye(size) - hat, grouped)
        except np.linalg.LinAlgError:
            return float("inf")
        return float(np.square(errors).sum(2).mean())
