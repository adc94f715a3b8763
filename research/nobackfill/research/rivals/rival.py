"""The interface of rivals, and the vectors that they are fitted on."""

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class TrainingVectors:
    """Vectors of the same items by both models.

    Attributes:
        old: [n, a] by the old model.
        new: [n, b] by the new model.
        side: [n, s] side-information that was stored with the old vectors; None without one.
        labels: int64 [n], the class of each item; None without classes.
        unit_norm: the new vectors have length 1.
    """

    old: Floats
    new: Floats
    side: Floats | None
    labels: NDArray[np.int64] | None
    unit_norm: bool


class Rival(Protocol):
    """A transform that is fitted on pairs.

    Attributes:
        mapped_vectors: "items": it maps stored vectors into the new space. "queries": it maps
            queries of the new model into the old space, so that no stored vector changes.
    """

    mapped_vectors: Literal["items", "queries"]

    def fit(self, train: TrainingVectors, seed: int) -> None:
        """Fit the transform, and replace an earlier fit.

        Args:
            train: the pairs, at least one.
            seed: sets all random numbers; a seed gives the same transform again.

        Raises:
            ConfigurationError: this transform needs labels, equal dimensions or a package that is
                not there. The comparison then lists the row as not run, with the sentence.
            DivergedError: a loss is not finite; the comparison ends.
        """

    def transform(self, vectors: Floats, side: Floats | None) -> Floats:
        """Map vectors: old [m, a] to [m, b] for "items", new [m, b] to [m, a] for "queries".

        Call `fit` before. The vectors are not changed.

        Args:
            vectors: the vectors.
            side: side-information [m, s] of items; None for queries, or without one.

        Returns:
            The mapped vectors, in the order of `vectors`.
        """

    @property
    def parameters(self) -> int:
        """The number of fitted values of the transform.

        Call `fit` before.
        """


@runtime_checkable
class UncertainRival(Rival, Protocol):
    """A rival of maps "items" that says how far its outputs may be off."""

    def variances(self, vectors: Floats, side: Floats | None) -> Floats | None:
        """Predict the variance of each mapped vector, float32 [m], above 0.

        Call `fit` before. The arguments are those of `transform`. None: this fit predicts none.
        """
