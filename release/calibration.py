"""Calibration, applied: a distance becomes the probability that two images match.

Fitted by training, stored in the manifest, one curve for each (query space, gallery space, origin).
Between breakpoints the curve is a straight line; outside of them it keeps the end values.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from release.manifest import Calibration, Manifest, Origin


def scores(calibration: Calibration, distances: ArrayLike) -> NDArray[np.float64]:
    """Probabilities in [0, 1] of the shape of `distances`; nearer is never less likely.

    NaN stays NaN, so that no caller takes it for a match.
    """
    values = np.asarray(distances, dtype=np.float64)
    return np.asarray(
        np.interp(values, calibration.distances, calibration.probabilities), dtype=np.float64
    )


def find(
    manifest: Manifest, query_space: str, gallery_space: str, origin: Origin
) -> Calibration | None:
    """The curve for such a pair, or None where the release was published without one."""
    wanted = (query_space, gallery_space, origin)
    return next(
        (c for c in manifest.calibration if (c.query_space, c.gallery_space, c.origin) == wanted),
        None,
    )
