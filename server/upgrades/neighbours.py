"""A look at an upgrade while it runs: do items keep their neighbours?"""

import numpy as np

from gallery.exact import ExactIndex
from gallery.index import Labels
from gallery.spec import SpaceSpec
from gallery.store import Store
from release.vectors import Vectors

PROBES = 200
K = 10


def neighbours_kept(store: Store, old: SpaceSpec, new: SpaceSpec) -> float | None:
    """Share of each probe's K nearest among the probes that stay so after the upgrade, 0 to 1.

    Probes are items that have a vector in both spaces. None where there are too few.
    """
    items = store.listing(limit=PROBES)
    pairs = [
        (item.label, before, after)
        for item in items
        if (before := store.vector(item.label, old.space)) is not None
        and (after := store.vector(item.label, new.space)) is not None
    ]
    if len(pairs) <= K:
        return None
    labels = np.array([label for label, _, _ in pairs], np.int64)
    was = _nearest(old, labels, np.concatenate([vector for _, vector, _ in pairs]))
    now = _nearest(new, labels, np.concatenate([vector for _, _, vector in pairs]))
    kept = [len(set(a) & set(b)) / K for a, b in zip(was, now, strict=True)]
    return float(np.mean(kept))


def _nearest(spec: SpaceSpec, labels: Labels, vectors: Vectors) -> list[list[int]]:
    found = ExactIndex(spec, labels, vectors).search(vectors, K + 1).labels
    return [
        [label for label in row if label != own][:K]
        for own, row in zip(labels.tolist(), found.tolist(), strict=True)
    ]
