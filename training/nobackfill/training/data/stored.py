"""Vectors that somebody else stored, matched to images by path: an upgrade's old side without
phi.
"""

import numpy as np

from nobackfill.class_folders import Listing
from nobackfill.errors import ConfigurationError, InvalidInputError
from nobackfill.training.config import StoredVectors
from nobackfill.vectors import Vectors, check_vectors


def read_stored(stored: StoredVectors, listing: Listing) -> Vectors:
    """The stored vectors of the listing's images, float32 [n,dim] in its order.

    Raises ConfigurationError for a missing file, InvalidInputError for anything but a .npy of
    [n,dim] with one path a row, or an image without a vector.
    """
    for path in (stored.vectors, stored.paths):
        if not path.is_file():
            raise ConfigurationError(f"no stored vectors {path}")
    try:
        vectors = np.load(stored.vectors, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise InvalidInputError(
            f"{stored.vectors}: expected a .npy file of float32 [n, dim] ({error})"
        ) from error
    if vectors.ndim != 2:
        raise InvalidInputError(
            f"{stored.vectors}: expected an array of shape [n, dim], got {list(vectors.shape)}"
        )
    checked = check_vectors(vectors, vectors.shape[1], what=str(stored.vectors))
    paths = stored.paths.read_text(encoding="utf-8").split("\n")[: len(checked)]
    if len(paths) != len(checked) or not all(paths):
        raise InvalidInputError(
            f"{stored.paths}: expected {len(checked)} lines, one image path a row of "
            f"{stored.vectors}, got {sum(map(bool, paths))}"
        )
    row_of = {path: row for row, path in enumerate(paths)}
    missing = [path for path in listing.paths if path not in row_of]
    if missing:
        raise InvalidInputError(
            f"{stored.paths}: no vector for {len(missing)} of {len(listing)} images of "
            f"{listing.root}, first {missing[0]}"
        )
    return checked[[row_of[path] for path in listing.paths]]
