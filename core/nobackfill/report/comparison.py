"""One upgrade, measured on pictures: every one of them asks, and all the others are the gallery.

Words: `old` is the release that the gallery was stored with, `new` the release in question,
`served` what the gallery holds after the upgrade (upgraded vectors, or the old ones where `new`
searches them directly).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nobackfill.class_folders import Listing
from nobackfill.metrics.backfill import BackfillCurve
from nobackfill.quality.backfill import backfill_curves
from nobackfill.quality.cells import upgrade_cells
from nobackfill.quality.embedded import Published
from nobackfill.quality.relevance import among_others
from nobackfill.quality.retrieval import Measured, measure_cell
from nobackfill.release.manifest import Manifest
from nobackfill.release.routes import Route, plan_route
from nobackfill.vectors import Vectors

HITS = 5
# Orders of the backfill that a reader could follow.
ORDERS = ("random", "uncertainty", "gain")


@dataclass(frozen=True)
class Cost:
    """What the upgrade took here, on one core, against embedding the images again."""

    items: int
    upgrade_seconds: float
    reembed_seconds: float


@dataclass(frozen=True)
class Comparison:
    """Everything that the pictures tell about an upgrade."""

    old: Manifest
    new: Manifest
    # Releases on the way; empty where the old vectors are searched directly.
    route: tuple[int, ...]
    pictures: Listing
    # By query/gallery, as in "new/served", with each picture's nearest HITS others; new/old is
    # missing where the dimensions differ.
    cells: Mapping[str, Measured]
    old_vectors: Vectors
    served_vectors: Vectors
    new_vectors: Vectors
    # [n], larger is less certain; None where the upgrade predicts none.
    uncertainty: NDArray[np.float32] | None
    # By order of the backfill; empty where served and new vectors differ in dimension.
    curves: Mapping[str, BackfillCurve]
    cost: Cost


def best_route(manifests: Mapping[int, Manifest], old: int, new: int) -> Route | None:
    """The route that a gallery of `old`, whose items all have side-information, takes to `new`."""
    return plan_route(manifests, old, new, manifests[old].side_space)


def predecessor(manifests: Mapping[int, Manifest], release: int) -> int | None:
    """The newest older release whose galleries `release` can take over, or None."""
    for number in sorted((n for n in manifests if n < release), reverse=True):
        old = manifests[number]
        if plan_route(manifests, number, release, old.side_space, directly=old.space):
            return number
    return None


def compare(
    folder: Path, manifests: Mapping[int, Manifest], old: int, new: int, pictures: Listing
) -> Comparison:
    """Measure the upgrade from release `old` to `new` on pictures, with what gateways and devices
    run by default: int8 transforms where they are published.

    Raises VerificationError for models that are not the published ones, InvalidInputError for a
    file that is no image.
    """
    found = best_route(manifests, old, new)
    route = () if found is None else found.releases
    names = upgrade_cells(old, new, route)
    images = Published(pictures, folder, manifests, threads=1)
    relevance = among_others(pictures)
    before, native = images.native(old), images.native(new)
    served = images.along(names["new/served"].gallery, int8=True)
    comparable = {
        "old/old": True,
        "new/old": before.shape[1] == native.shape[1],
        "new/served": served.embedding.shape[1] == native.shape[1],
        "new/new": True,
    }
    cells = {
        name: measure_cell(cell, images, images, relevance, neighbours=HITS, int8=True)
        for name, cell in names.items()
        if comparable[name]
    }
    curves = {}
    if comparable["new/served"]:
        cell = names["new/served"]
        curves = backfill_curves(cell, images, images, relevance, ORDERS, int8=True)
    return Comparison(
        old=manifests[old],
        new=manifests[new],
        route=route,
        pictures=pictures,
        cells=cells,
        old_vectors=before,
        served_vectors=served.embedding,
        new_vectors=native,
        uncertainty=served.uncertainty,
        curves=curves,
        cost=Cost(len(pictures), images.seconds.get(route, 0.0), images.seconds[new,]),
    )
