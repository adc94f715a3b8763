"""VGGFace2's test set: 50 images of each of its 500 subjects, drawn once (fct.txt section 4.2)."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nobackfill.class_folders import Listing, list_images
from nobackfill.errors import InvalidInputError
from nobackfill.metrics.ranking import Ranking, same_label
from nobackfill.metrics.retrieval import average_precision, cmc, mean
from nobackfill.training.protocols.protocol import Figures, Protocol, ranked

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


def protocol(root: Path, _scratch: Path) -> Protocol:
    """CMC and mAP over class folders, a folder a subject. A query is left out of its answers."""
    listing = list_images(root)
    drawn = listing.select(subsample(listing))
    relevance = same_label(drawn.labels, drawn.labels, drawn.paths, drawn.paths)
    return ranked(drawn, drawn, relevance, _figures)


def _figures(ranking: Ranking) -> Figures:
    first = {f"cmc{k}": mean(cmc(ranking, k)) for k in (1, 5)}
    return {**first, "map": mean(average_precision(ranking))}
