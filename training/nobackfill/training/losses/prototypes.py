"""Pseudo prototypes: rows of an old classifier for classes that it lacks, from old features."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def class_average(old: Tensor) -> Tensor:
    """Return the mean of one class's old features: [m, d] -> [d], m >= 1 (BCT section 2.5).

    Without rows the mean is NaN.
    """
    return old.mean(0)


def trimmed_average(old: Tensor, share: float = 0.1) -> Tensor:
    """Return the mean without the `share` of rows farthest from it: [m, d] -> [d] (UniBCT 4.2).

    The number of dropped rows is rounded down, so a class of few images keeps them all. `share` is
    0 to below 1. At equal distances the earlier row is kept. Without rows the mean is NaN.
    """
    return old[_nearest(old, len(old) - int(share * len(old)))].mean(0)


def select_nearest_to_mean(old: Tensor, labels: Tensor, class_count: int, share: float) -> Tensor:
    """Select in each class the `share` of rows (rounded up) that are nearest to the class mean.

    A class without rows is allowed. At equal distances the earlier row is selected. If a class has
    NaN, its first rows are selected.

    Args:
        old: features [n, d].
        labels: int64 [n]; rows of another label than 0 to below `class_count` are not selected.
        class_count: the number of classes.
        share: 0 to 1; 0 selects no row, above 0 at least one of each class that has rows.

    Returns:
        A mask, bool [n], on the device of `old`.
    """
    mask = torch.zeros(len(old), dtype=torch.bool, device=old.device)
    for label in range(class_count):
        rows = torch.nonzero(labels.to(old.device) == label)[:, 0]
        mask[rows[_nearest(old[rows], math.ceil(share * len(rows)))]] = True
    return mask


def _nearest(old: Tensor, count: int) -> Tensor:
    return (old - old.mean(0)).square().sum(1).argsort(stable=True)[:count]


def transition_matrix(new: Tensor, temperature: float) -> Tensor:
    """Return the transition matrix of UniBCT Eq. 6 for one class: new features [m, d] -> [m, m].

    Each row is a softmax over cosine / temperature of the other images; the diagonal is 0. A zero
    vector has the cosine 0 to every other.

    Args:
        new: features of one class [m, d]; normalised here.
        temperature: divisor of the cosines, above 0.

    Raises:
        ValueError: there are fewer than 2 images.
    """
    if len(new) < 2:
        raise ValueError(
            "UniBCT's transition matrix (Eq. 6) compares the images of one class: expected at "
            f"least 2 images, got {len(new)}. Leave such classes out, or call refined_features, "
            "which keeps their old features"
        )
    unit = F.normalize(new)
    similarity = unit @ unit.t() / temperature
    return similarity.fill_diagonal_(-torch.inf).softmax(1)


def refined_features(
    old: Tensor, new: Tensor, *, temperature: float = 0.05, blend: float = 0.9
) -> Tensor:
    """Return (1 - lambda) (I - lambda E)^-1 V(0), the limit of UniBCT Eq. 8 (Eq. 9): [m, d].

    Args:
        old: old features V(0) of one class [m, d]; m may be 0.
        new: new features of the same images [m, d']; normalised here; not read if m is below 2.
        temperature: of the transition matrix E, above 0.
        blend: lambda, 0 to below 1; with 0 the result equals V(0).

    Returns:
        Refined old features [m, d], in the dtype of `old`; `old` itself for a class of one image or
        none.

    Raises:
        RuntimeError: `new` has another number of rows than `old`.
        ValueError: `new` has fewer than two rows, but `old` has more.
    """
    if len(old) < 2:
        return old
    identity = torch.eye(len(old), dtype=old.dtype, device=old.device)
    graph = identity - blend * transition_matrix(new, temperature).to(old.dtype)
    limit: Tensor = torch.linalg.solve(graph, old)
    return (1 - blend) * limit


def refined_old_average(
    old: Tensor, new: Tensor, *, temperature: float = 0.05, blend: float = 0.9
) -> Tensor:
    """Return the mean of `refined_features` over rows: [m, d], [m, d'] -> [d] (UniBCT Eq. 10).

    Arguments and errors are as in `refined_features`.

    The published pseudocode takes the softmax over dim 0, without temperature. The columns of its
    matrix sum to one, so the mean over rows would be that of V(0), and the refinement would have no
    effect. A class of one image keeps its old feature. Without rows the mean is NaN.

    Raises:
        RuntimeError: `new` has another number of rows than `old`.
    """
    return refined_features(old, new, temperature=temperature, blend=blend).mean(0)


def stack_by_class(labels: Tensor, class_count: int, make: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute `make(rows)` [d] for each class, and stack the results [classes, d].

    Args:
        labels: int64 [n], each from 0 to below `class_count`; a larger one is not noticed.
        class_count: the number of classes, at least 1.
        make: a function of the class's row numbers, int64 [m], ascending; called once per class, in
            order.

    Raises:
        ValueError: a class has no rows.
    """
    counts = torch.bincount(labels, minlength=class_count)
    if (counts == 0).any():
        raise ValueError(
            f"class number {int(counts.argmin())} of {class_count} has no training image, so it "
            "has no prototype; add images, or remove the class"
        )
    rows = torch.split(labels.argsort(stable=True), counts.tolist())
    return torch.stack([make(picked) for picked in rows])
