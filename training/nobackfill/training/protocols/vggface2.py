"""VGGFace2's test set: 50 images of each of its 500 subjects, drawn once (fct.txt section 4.2)."""

import numpy as np
from numpy.typing import NDArray

from nobackfill.class_folders import Listing
from nobackfill.errors import InvalidInputError

SUBSAMPLE = 50


def subsample(listing: Listing, per_class: int = SUBSAMPLE, seed: int = 0) -> NDArray[np.int64]:
    """Rows of `per_class` images of every class, ascending, the same for a seed on any machine.

    The images are both the queries and the gallery. Raises InvalidInputError for a class with
    fewer.
    """
    rng = np.random.default_rng(seed)
    chosen = []
    for label, name in enumerate(listing.class_names):
        rows = np.flatnonzero(listing.labels == label)
        if len(rows) < per_class:
            raise InvalidInputError(
                f"class {name} of {listing.root}: expected at least {per_class} images, "
                f"got {len(rows)}"
            )
        chosen.append(rng.permutation(rows)[:per_class])
    return np.sort(np.concatenate(chosen))
