"""Pseudo prototypes: rows of an old classifier for classes that it never had, from old features."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def class_average(old: Tensor) -> Tensor:
    """The mean of one class's old features [m, d] -> [d] (BCT section 2.5; UniBCT's vanilla
    average).
    """
    return old.mean(0)


def drop_average(old: Tensor, share: float = 0.1) -> Tensor:
    """The mean without the `share` of rows that lie farthest from it (UniBCT section 4.2): [m, d]
    -> [d].

    The number dropped is rounded down, so a class of few images keeps them all.
    """
    return old[_nearest(old, len(old) - int(share * len(old)))].mean(0)


def nearest_to_mean(old: Tensor, labels: Tensor, classes: int, share: float) -> Tensor:
    """Which rows of [n, d] are among the `share` of their class, rounded up, that lie nearest to
    its mean: bool [n].
    """
    chosen = torch.zeros(len(old), dtype=torch.bool, device=old.device)
    for label in range(classes):
        rows = torch.nonzero(labels.to(old.device) == label)[:, 0]
        chosen[rows[_nearest(old[rows], math.ceil(share * len(rows)))]] = True
    return chosen


def _nearest(old: Tensor, count: int) -> Tensor:
    return (old - old.mean(0)).square().sum(1).argsort(stable=True)[:count]


def transition(new: Tensor, temperature: float) -> Tensor:
    """UniBCT Eq. 6: row-normalised similarities [m, m] between the new features [m, d] of one
    class.

    Each row is a softmax over cosine / temperature of the other images; the diagonal is 0.
    """
    if len(new) < 2:
        raise ValueError("Eq. 6 needs at least 2 images of a class")
    unit = F.normalize(new)
    similarity = unit @ unit.t() / temperature
    return similarity.fill_diagonal_(-torch.inf).softmax(1)


def refined_features(
    old: Tensor, new: Tensor, *, temperature: float = 0.05, blend: float = 0.9
) -> Tensor:
    """UniBCT Eq. 9: (1 - lambda) (I - lambda E)^-1 V(0), the limit of Eq. 8's propagation: [m, d].

    `old` V(0) and `new` are features of the same images of one class. A class of one image has no
    neighbours and keeps V(0).
    """
    if len(old) < 2:
        return old
    identity = torch.eye(len(old), dtype=old.dtype, device=old.device)
    graph = identity - blend * transition(new, temperature).to(old.dtype)
    limit: Tensor = torch.linalg.solve(graph, old)
    return (1 - blend) * limit


def refined_average(
    old: Tensor, new: Tensor, *, temperature: float = 0.05, blend: float = 0.9
) -> Tensor:
    """UniBCT Eq. 10: the mean over rows of `refined_features`: [m, d], [m, d'] -> [d].

    The published pseudocode takes the softmax over dim 0 and without temperature. Its matrix has
    columns that sum to one, so that the mean over rows is that of V(0): the refinement would do
    nothing.
    """
    return refined_features(old, new, temperature=temperature, blend=blend).mean(0)


def by_class(labels: Tensor, classes: int, make: Callable[[Tensor], Tensor]) -> Tensor:
    """Stack `make(rows)` [d] over the classes 0 .. classes - 1, `rows` int64 [m] of each: [classes,
    d].

    Raises ValueError for a class without rows.
    """
    counts = torch.bincount(labels, minlength=classes)
    if (counts == 0).any():
        raise ValueError(f"class {int(counts.argmin())} has no image to make a prototype from")
    rows = torch.split(labels.argsort(stable=True), counts.tolist())
    return torch.stack([make(picked) for picked in rows])
