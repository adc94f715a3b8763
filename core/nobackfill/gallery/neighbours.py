"""A look at an upgrade while it runs, and after: do items keep their neighbours?"""

from collections.abc import Callable

import numpy as np

from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.vectors import Vectors

PROBES = 1000
K = 10


# Of a gallery: about so many items that have a vector in both of two spaces, labels [n] and their
# vectors [n, dim] in each.
Sample = Callable[[str, str, int], tuple[Labels, Vectors, Vectors]]


def neighbours_kept(sample: Sample, old: SpaceSpec, new: SpaceSpec) -> float | None:
    """Share of each probe's K nearest among the probes that stay so after the upgrade, 0 to 1.

    Probes are items that have a vector in both spaces, drawn at random anew each time. None where
    there are too few.
    """
    labels, was, now = sample(old.space, new.space, PROBES)
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
