"""Calibration, applied: a distance becomes the probability that two images match.

Fitted by training, stored in the manifest, one curve for each (query space, gallery space, origin).
Between breakpoints the curve is a straight line. Nearer than the first and farther than the last,
where hardly a pair was seen, it keeps the end values and the hit is flagged. Where carried and
native vectors of one space are ranked together, a scale says where a carried one's distance stands
among those of native ones (docs/adr/0024).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nobackfill.vectors import Origin

if TYPE_CHECKING:
    # pydantic would take half of the time in which the edge answers a search.
    from nobackfill.release.manifest import Calibration, Manifest


class Curve(Protocol):
    """Breakpoints, as a manifest's Calibration has them."""

    @property
    def distances(self) -> Sequence[float]:
        """Strictly increasing."""
        ...

    @property
    def probabilities(self) -> Sequence[float]:
        """Strictly decreasing, one a distance."""
        ...


class Scale(NamedTuple):
    """The distance at which a native vector is as likely a match: slope * distance + offset.

    `slope` > 0, so that vectors of one origin keep their order.
    """

    slope: float
    offset: float

    def __call__(self, distances: ArrayLike) -> NDArray[np.float64]:
        """Of the shape of `distances`, in float64; infinity stays infinity."""
        values = np.asarray(distances, np.float64)
        return np.asarray(self.slope * values + self.offset, np.float64)


class Joint(NamedTuple):
    """The distance at which a native vector is as likely a match as what was carried: `new` * the
    distance to its carried vector + `old` * the older model's own distance + `offset`."""

    new: float
    old: float
    offset: float

    def __call__(self, carried: ArrayLike, stayed: ArrayLike) -> NDArray[np.float64]:
        """Of both distances of the same items, in float64."""
        joined = self.new * np.asarray(carried, np.float64) + self.old * np.asarray(stayed)
        return np.asarray(joined + self.offset, np.float64)


class Scorer:
    """A calibration made ready to be applied many times."""

    def __init__(self, calibration: Curve) -> None:
        self._distances = np.array(calibration.distances)
        self._probabilities = np.array(calibration.probabilities)

    def points(self) -> tuple[list[float], list[float]]:
        """Distances of the breakpoints, and the probabilities there."""
        return self._distances.tolist(), self._probabilities.tolist()

    def scores(self, distances: ArrayLike) -> NDArray[np.float64]:
        """See `scores`."""
        values = np.asarray(distances, dtype=np.float64)
        return np.asarray(np.interp(values, self._distances, self._probabilities), dtype=np.float64)

    def beyond(self, distances: ArrayLike) -> NDArray[np.bool_]:
        """See `beyond`."""
        values = np.asarray(distances, dtype=np.float64)
        nearer, farther = values < self._distances[0], values > self._distances[-1]
        return np.asarray(nearer | farther, dtype=np.bool_)


def scores(calibration: Curve, distances: ArrayLike) -> NDArray[np.float64]:
    """Probabilities in [0, 1] of the shape of `distances`; nearer is never less likely.

    NaN stays NaN, so that no caller takes it for a match.
    """
    return Scorer(calibration).scores(distances)


def beyond(calibration: Curve, distances: ArrayLike) -> NDArray[np.bool_]:
    """Which distances lie outside of those that the calibration saw, of the same shape.

    Their scores are the curve's end values. A model that sees pictures unlike those of its
    calibration may place them all so near to each other: such scores are no evidence of a match.
    """
    return Scorer(calibration).beyond(distances)


def find(
    manifest: "Manifest", query_space: str, gallery_space: str, origin: Origin
) -> "Calibration | None":
    """The curve for such a pair, or None where the release was published without one."""
    wanted = (query_space, gallery_space, origin)
    return next(
        (c for c in manifest.calibration if (c.query_space, c.gallery_space, c.origin) == wanted),
        None,
    )
