"""A map that is not solved: an affine one, and a network that learns what that leaves over.

Who trains the network is named by the user, as `module:function`: nothing here knows of a trainer.
`nobackfill.training.pairs:residual` is ours, where the extra `training` is installed.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from nobackfill.adopt.maps import Map
from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.ridge import Floats
from nobackfill.vectors import Vectors, check_vectors

RESIDUAL = "residual"
# From old vectors [n, a], new ones [n, b] and what the affine map gives before it normalises
# [n, b]: the layers of a network, weight [out, in] and bias [out] each, which gives of old vectors
# what to add. ReLU stands between layers.
Trainer = Callable[[Vectors, Vectors, Vectors], Sequence[tuple[Floats, Floats]]]


def open_trainer(name: str) -> Trainer:
    """`module:function`. Raises NotFoundError where there is none, or what it needs is missing."""
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise NotFoundError(
            f"{name}: cannot be imported ({error}); our own trainer needs pip install '.[training]'"
        ) from error
    if not callable(found):
        raise InvalidInputError(f"{name}: is no function")
    trainer: Trainer = found
    return trainer


def trained(straight: Map, old: Vectors, new: Vectors, trainer: Trainer) -> Map:
    """An affine map with a network beside it, from pairs. Raises InvalidInputError for layers that
    do not fit, NaN and infinity."""
    given = trainer(old, new, replace(straight, unit=False)(old))
    layers: list[tuple[Vectors, Vectors]] = []
    size = straight.dims[0]
    for weight, bias in given:
        if np.ndim(weight) != 2 or np.shape(weight)[1] != size:
            raise InvalidInputError(
                f"--also: expected a layer that reads {size} numbers, got weights of shape "
                f"{list(np.shape(weight))}"
            )
        size = len(weight)
        shift = check_vectors(np.asarray(bias, np.float32)[None], size, what="a layer's bias")
        checked = check_vectors(
            np.asarray(weight, np.float32), np.shape(weight)[1], what="a layer's weight"
        )
        layers.append((checked, shift[0]))
    if size != straight.dims[1] or not layers:
        raise InvalidInputError(
            f"--also: expected layers that give {straight.dims[1]} numbers, got {size}"
        )
    return replace(straight, kind=RESIDUAL, layers=tuple(layers))
