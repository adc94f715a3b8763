"""Closed-form maps between two spaces, the baselines of every learned transformation.

All functions take paired rows x [n, a] and y [n, b] with n >= 2, and solve in float64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nobackfill.ridge import fit_ridge, split_into_blocks


@dataclass(frozen=True)
class AffineMap:
    """x -> weight x + bias; weight [b, a], bias [b]."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Map rows [n, a] to [n, b].

        `x` has the dtype and the device of the map, which is float64 as it is fitted; another dtype
        raises RuntimeError. n may be 0.
        """
        return x @ self.weight.t() + self.bias


def fit_procrustes(x: Tensor, y: Tensor, *, scaled: bool) -> AffineMap:
    """Fit the orthogonal map and shift of least squared error (Schoenemann 1966).

    Minimises |s (x - mean x) R - (y - mean y)| with R R' = 1. The solution is R = U V' of the
    singular value decomposition of xc' yc. Between different dimensions R is semi-orthogonal: it
    keeps every direction of the smaller space. The map is float64, on the device of x.

    Args:
        x: [n, a].
        y: [n, b].
        scaled: also fit the factor s; else s = 1. With equal rows of x the factor is NaN.

    Raises:
        ValueError: x and y are not matrices of paired rows, or there are fewer than 2.
        RuntimeError: a value is NaN or infinite.
    """
    xc, yc, shift_x, shift_y = _centred(x, y)
    u, singular, vt = torch.linalg.svd(xc.t() @ yc, full_matrices=False)
    rotation = u @ vt
    factor = singular.sum() / (xc @ rotation).square().sum() if scaled else 1.0
    return _shifted(factor * rotation.t(), shift_x, shift_y)


def fit_affine(x: Tensor, y: Tensor, ridge: float | None = None, group_size: int = 1) -> AffineMap:
    """Fit an affine map by ridge regression, without a penalty on the bias.

    Args:
        x: [n, a].
        y: [n, b].
        ridge: the penalty, as a multiple of the mean variance of x, from 0. None: selected by
            leaving out one group at a time, on the CPU. With a given penalty a value of NaN makes
            the map NaN.
        group_size: the number of consecutive rows of a group, such as the views of one image; used
            only to select the penalty. n must be a multiple of it.

    Returns:
        The map in float64, on the device of x.

    Raises:
        ValueError: x and y are not paired rows, or there are fewer than 2; or with `ridge` None,
            there are fewer than 2 whole groups, or a value is NaN or infinite.
        RuntimeError: `ridge` is 0 and the columns of x are dependent.
    """
    if ridge is None:
        _check_paired(x, y)
        rows = split_into_blocks(x.double().cpu().numpy(), y.double().cpu().numpy())
        solution = fit_ridge(rows, rows_per_group=group_size)
        parts = [torch.from_numpy(part).to(x.device) for part in (solution.weight, solution.bias)]
        return AffineMap(*parts)
    xc, yc, shift_x, shift_y = _centred(x, y)
    gram = xc.t() @ xc
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    gram = gram + ridge * gram.diagonal().mean() * identity
    return _shifted(torch.linalg.solve(gram, xc.t() @ yc).t(), shift_x, shift_y)


def fit_low_rank(
    x: Tensor, y: Tensor, rank: int, ridge: float | None = None, group_size: int = 1
) -> tuple[AffineMap, AffineMap]:
    """Fit the affine map of a given rank with least squared error (reduced-rank regression).

    It projects the affine solution onto the leading principal directions of its predictions.

    Args:
        rank: 1 to min(a, b).
        x: [n, a].
        y: [n, b].
        ridge: the penalty, as in `fit_affine`; None: selected.
        group_size: the number of consecutive rows of a group, as in `fit_affine`.

    Returns:
        Two maps in float64, [a -> rank] and [rank -> b]; the second is to follow the first.

    Raises:
        ValueError: the rank is out of range, or the rows do not fit; or `ridge` is None and they do
            not fill the groups or are not finite.
        RuntimeError: `ridge` is given, and a value is NaN or infinite; or it is 0, and the columns
            of x are dependent.
    """
    largest = min(x.shape[1], y.shape[1])
    if not 1 <= rank <= largest:
        raise ValueError(
            f"low_rank: expected a rank of 1 to {largest}, the smaller dimension of both vectors, "
            f"got {rank}; set another rank"
        )
    full = fit_affine(x, y, ridge, group_size)
    predicted = full(x.double())
    centre = predicted.mean(0)
    _, _, vt = torch.linalg.svd(predicted - centre, full_matrices=False)
    leading = vt[:rank]
    down = AffineMap(leading @ full.weight, leading @ (full.bias - centre))
    return down, AffineMap(leading.t(), centre)


def fit_principal_map(x: Tensor, rank: int) -> AffineMap:
    """Fit x [n, d] -> its `rank` directions of largest variance, from its mean (PCA).

    The map is float64, on the device of x; the largest variance comes first. The signs of the
    directions are arbitrary.

    Args:
        x: [n, d], n at least 1.
        rank: the number of directions.

    Raises:
        ValueError: the rank is not 1 to d.
        RuntimeError: a value is NaN or infinite.
    """
    if not 1 <= rank <= x.shape[1]:
        raise ValueError(
            f"rank of the map: expected 1 to {x.shape[1]}, the dimension of the vectors, got "
            f"{rank}; set another rank"
        )
    shift = x.double().mean(0)
    xc = x.double() - shift
    _, directions = torch.linalg.eigh(xc.t() @ xc)
    weight = directions.t().flip(0)[:rank]
    return AffineMap(weight, -weight @ shift)


def fit_whitening_map(x: Tensor, ridge: float = 1e-3) -> AffineMap:
    """Fit a map of rows to uncorrelated directions of unit variance (PCA whitening).

    If all rows are equal, the map is infinite or NaN.

    Args:
        x: [n, d], n at least 2.
        ridge: a multiple of the mean variance, added to each variance, from 0. Directions with less
            variance are therefore not scaled up to 1.

    Returns:
        A map [d -> d] in float64; its directions have ascending variance.

    Raises:
        RuntimeError: a value is NaN or infinite, or there is one row.
    """
    shift = x.double().mean(0)
    xc = x.double() - shift
    variances, directions = torch.linalg.eigh(xc.t() @ xc / (len(x) - 1))
    scale = (variances.clamp(min=0) + ridge * variances.mean()).rsqrt()
    weight = scale[:, None] * directions.t()
    return AffineMap(weight, -weight @ shift)


def _check_paired(x: Tensor, y: Tensor) -> None:
    if x.ndim != 2 or y.ndim != 2 or len(x) != len(y) or len(x) < 2:
        raise ValueError(
            "to fit a map, expected paired vectors [n, a] and [n, b] with n of at least 2, got "
            f"shapes {list(x.shape)} and {list(y.shape)}"
        )


def _centred(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_paired(x, y)
    wide_x, wide_y = x.double(), y.double()
    shift_x, shift_y = wide_x.mean(0), wide_y.mean(0)
    return wide_x - shift_x, wide_y - shift_y, shift_x, shift_y


def _shifted(weight: Tensor, shift_x: Tensor, shift_y: Tensor) -> AffineMap:
    return AffineMap(weight, shift_y - weight @ shift_x)
