"""Vectors that somebody else stored, matched to images by path: an upgrade's old side without
phi.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tokenize import TokenError

import numpy as np

from nobackfill.class_folders import Listing
from nobackfill.errors import ConfigurationError, InvalidInputError, few
from nobackfill.training.config import StoredVectors
from nobackfill.vectors import Vectors, check_vectors


def read_stored(stored: StoredVectors, listing: Listing) -> Vectors:
    """The stored vectors of the listing's images, float32 [n,dim] in its order.

    Raises ConfigurationError for a missing file, InvalidInputError for anything but a .npy of
    [n,dim] with one path a row, each once, a vector of zeros, or an image without a vector.
    """
    for path in (stored.vectors, stored.paths):
        if not path.is_file():
            raise ConfigurationError(f"no stored vectors {path}")
    vectors = _vectors(stored.vectors)
    paths = _paths(stored, len(vectors))
    zero = [paths[row] for row in np.flatnonzero(~vectors.any(axis=1)).tolist()]
    if zero:
        raise InvalidInputError(
            f"{stored.vectors}: {len(zero)} vectors are zero, which points nowhere, those of "
            f"{few(zero)}; leave their rows out"
        )
    row_of = {path: row for row, path in enumerate(paths)}
    missing = [path for path in listing.paths if path not in row_of]
    if missing:
        raise InvalidInputError(
            f"{stored.paths}: no vector for {len(missing)} of {len(listing)} images of "
            f"{listing.root}, first {missing[0]}"
        )
    return vectors[[row_of[path] for path in listing.paths]]


def _vectors(path: Path) -> Vectors:
    try:
        with path.open("rb") as file:
            read = np.lib.format.read_array(file, allow_pickle=False)
    except (ValueError, OSError, EOFError, MemoryError, TokenError, SyntaxError) as error:
        raise InvalidInputError(
            f"{path}: expected a .npy file of float32 [n, dim] ({error})"
        ) from error
    if read.ndim != 2 or not read.shape[1]:
        raise InvalidInputError(
            f"{path}: expected an array of shape [n, dim], got {list(read.shape)}"
        )
    return check_vectors(read, read.shape[1], what=str(path))


def _paths(stored: StoredVectors, count: int) -> Sequence[str]:
    try:
        paths = stored.paths.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{stored.paths}: cannot be read as UTF-8 ({error})") from error
    # One line more, as of a header, and each path would get its neighbour's vector.
    if len(paths) != count or not all(paths):
        raise InvalidInputError(
            f"{stored.paths}: expected {count} lines, one image path a row of {stored.vectors}, "
            f"got {sum(map(bool, paths))}"
        )
    twice = [path for path, times in Counter(paths).items() if times > 1]
    if twice:
        raise InvalidInputError(
            f"{stored.paths}: {len(twice)} paths are there more than once: {few(twice)}; expected "
            "one vector an image"
        )
    return paths
