"""A look at an upgrade while it runs, and after: do items keep their neighbours?"""

import numpy as np

from nobackfill.gallery.gallery_store import GalleryStore
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.vectors import Vectors

PROBES = 1000
K = 10
# An upgrade is looked at so often while it runs, at equal distances.
LOOKS = 10


def neighbours_kept(store: GalleryStore, old: SpaceSpec, new: SpaceSpec) -> float | None:
    """Share of each probe's K nearest among the probes that stay so after the upgrade, 0 to 1.

    Probes are items that have a vector in both spaces, drawn at random anew each time. None where
    there are too few.
    """
    labels, was, now = store.sample(old.space, new.space, PROBES)
    if len(labels) <= K:
        return None
    before, after = _nearest(old, labels, was), _nearest(new, labels, now)
    kept = [len(set(a) & set(b)) / K for a, b in zip(before, after, strict=True)]
    return float(np.mean(kept))


def _nearest(spec: SpaceSpec, labels: Labels, vectors: Vectors) -> list[list[int]]:
    found = ExactIndex(spec, labels, vectors).search(vectors, K + 1).labels
    return [
        [label for label in row if label != own][:K]
        for own, row in zip(labels.tolist(), found.tolist(), strict=True)
    ]
