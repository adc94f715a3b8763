"""One ranking of the carried and the native vectors of a space, whose distances do not compare.

A new query is nearer to what an upgrade has carried than to what its own model made, on average:
sorted as they are, distances let a gallery answer worse half-way than at either end. So each origin
gives its nearest, and a release's scale says where carried ones stand (docs/adr/0024).
"""

from collections.abc import Callable

import numpy as np

from nobackfill.gallery.search.index import Labels, Mask, Neighbours
from nobackfill.release.calibration import Scale

# Which of labels (increasing) may be found: bool, one for each.
Allowed = Callable[[Labels], Mask]
# The same of labels that were carried, and of those that were not.
Origins = Callable[[Labels], tuple[Mask, Mask]]


def search(
    nearest: Callable[[Allowed], Neighbours],
    origins: Origins,
    scale: Scale,
    k: int,
    allowed: Allowed | None = None,
) -> Neighbours:
    """The `k` best of those that are `allowed`; `nearest` gives the `k` nearest of some."""
    # Asked once: what is embedded again meanwhile is found once, too.
    known: dict[int, tuple[Mask, Mask]] = {}

    def of(origin: int) -> Neighbours:
        def chosen(labels: Labels) -> Mask:
            mask = known.setdefault(id(labels), origins(labels))[origin]
            return mask if allowed is None else mask & allowed(labels)

        return nearest(chosen)

    return joined(of(0), of(1), scale, k)


def joined(carried: Neighbours, native: Neighbours, scale: Scale, k: int) -> Neighbours:
    """The `k` best of both, distances as they are."""
    both = Neighbours(
        np.concatenate([carried.labels, native.labels], axis=1),
        np.concatenate([carried.distances, native.distances], axis=1),
    )
    found = ranked(both, np.arange(both.labels.shape[1]) < carried.labels.shape[1], scale)
    return Neighbours(found.labels[:, :k], found.distances[:, :k])


def ranked(found: Neighbours, carried: Mask, scale: Scale) -> Neighbours:
    """The same in the order of the distances at which native vectors would be as likely; equal ones
    by their own distances, then by label. `carried`: of which labels [q, c] or columns [c]."""
    apart = np.where(carried, scale(found.distances), found.distances)
    order = np.lexsort((found.labels, found.distances, apart), axis=1)
    query = np.arange(len(order))[:, None]
    return Neighbours(found.labels[query, order], found.distances[query, order])
