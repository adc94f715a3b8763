"""Turn distances into calibrated probabilities of a match.

Training fits one curve for each (query space, gallery space, origin) and stores it in the manifest.
Between breakpoints the curve is linear. Beyond the first and the last, where the calibration hardly
saw a pair, it keeps the end values, and the hit is flagged. Where migrated and native vectors are
ranked together, a `DistanceScale` converts the distances of migrated ones (docs/adr/0024).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nobackfill.vectors import Origin

if TYPE_CHECKING:
    # Importing pydantic would take half the time of a search on a device.
    from nobackfill.release.manifest import Calibration, Manifest


class Curve(Protocol):
    """Breakpoints of a curve, as the `Calibration` of a manifest has them."""

    @property
    def distances(self) -> Sequence[float]:
        """Return the distances, strictly increasing."""

    @property
    def probabilities(self) -> Sequence[float]:
        """Return the probability at each distance, strictly decreasing."""


class DistanceScale(NamedTuple):
    """Convert a migrated vector's distance to that of a native vector that is as likely a match.

    The result is slope * distance + offset.

    Attributes:
        slope: Above 0, so that vectors of one origin keep their order.
        offset: Added to the product.
    """

    slope: float
    offset: float

    def __call__(self, distances: ArrayLike) -> NDArray[np.float64]:
        """Convert distances of any shape to float64 of the same shape; infinity stays infinity. NaN
        stays NaN."""
        values = np.asarray(distances, np.float64)
        return np.asarray(self.slope * values + self.offset, np.float64)


class JointDistance(NamedTuple):
    """Combine both models' distances to a migrated item into the distance of an equally likely
    native one.

    The result is new * (distance to the migrated vector) + old * (old model's distance) + offset.

    Attributes:
        new_weight: Weight of the new model's distance.
        old_weight: Weight of the old model's distance.
        offset: Added to the sum.
    """

    new_weight: float
    old_weight: float
    offset: float

    def __call__(self, new_distances: ArrayLike, old_distances: ArrayLike) -> NDArray[np.float64]:
        """Combine the distances of the same items to float64.

        Args:
            new_distances: Distances to the migrated vectors.
            old_distances: Distances of the old model, of the same shape or one that broadcasts to
                it.

        Returns:
            float64, of the same shape. NaN stays NaN.

        Raises:
            ValueError: The shapes do not fit.
        """
        both = self.new_weight * np.asarray(
            new_distances, np.float64
        ) + self.old_weight * np.asarray(old_distances)
        return np.asarray(both + self.offset, np.float64)


class Scorer:
    """A curve that is prepared for many calls."""

    def __init__(self, calibration: Curve) -> None:
        self._distances = np.array(calibration.distances)
        self._probabilities = np.array(calibration.probabilities)

    def breakpoints(self) -> tuple[list[float], list[float]]:
        """Return the breakpoints: their distances, increasing, and the probabilities there. The
        lists are copies."""
        return self._distances.tolist(), self._probabilities.tolist()

    def scores(self, distances: ArrayLike) -> NDArray[np.float64]:
        """Return the probability of a match for each distance.

        Beyond the first and the last breakpoint the score is theirs.

        Args:
            distances: Float, of any shape [...].

        Returns:
            float64 in 0 to 1, of the same shape [...]; a smaller distance never has a smaller
            score. NaN stays NaN.

        Raises:
            ValueError: The curve has no breakpoint.
        """
        values = np.asarray(distances, dtype=np.float64)
        return np.asarray(np.interp(values, self._distances, self._probabilities), dtype=np.float64)

    def is_beyond_calibration(self, distances: ArrayLike) -> NDArray[np.bool_]:
        """Return which distances lie outside of those that the calibration saw; their scores are
        its end values. The first and the last breakpoint count as inside.

        A model may place all pictures that differ from the calibration's close together: such
        scores are no evidence of a match.

        Args:
            distances: Float, of any shape [...]; NaN is not beyond.

        Returns:
            bool, of the same shape [...].

        Raises:
            IndexError: The curve has no breakpoint.
        """
        values = np.asarray(distances, dtype=np.float64)
        nearer, farther = values < self._distances[0], values > self._distances[-1]
        return np.asarray(nearer | farther, dtype=np.bool_)


def match_probabilities(calibration: Curve, distances: ArrayLike) -> NDArray[np.float64]:
    """Return the probability of a match for each distance.

    Between breakpoints the score is linear, and beyond them it is that of the nearest end. It
    prepares the curve at each call; use `Scorer` for many.

    Args:
        calibration: The curve.
        distances: Any shape.

    Returns:
        float64 in [0, 1], of the same shape; a smaller distance never has a smaller score. NaN
        stays NaN, so that no caller takes it for a match.

    Raises:
        ValueError: The curve has no breakpoint.
    """
    return Scorer(calibration).scores(distances)


def find_curve(
    manifest: "Manifest", query_space: str, gallery_space: str, origin: Origin
) -> "Calibration | None":
    """Find the curve of a manifest for a pair of spaces.

    Args:
        manifest: The release.
        query_space: Id of the query's space.
        gallery_space: Id of the gallery's space.
        origin: How the gallery's vectors were made.

    Returns:
        The first such curve in the manifest's order; None if the release has no curve for them.
    """
    key = (query_space, gallery_space, origin)
    return next(
        (c for c in manifest.calibration if (c.query_space, c.gallery_space, c.origin) == key), None
    )
