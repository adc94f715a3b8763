"""One upgrade, measured on pictures: every one of them asks, and all the others are the gallery.

Words: `old` is the release that the gallery was stored with, `new` the release in question,
`served` what the gallery holds after the upgrade (upgraded vectors, or the old ones where `new`
searches them directly).
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.metrics.backfill import (
    BackfillCurve,
    backfill_curve,
    random_order,
    uncertainty_order,
)
from nobackfill.metrics.distances import Metric
from nobackfill.metrics.ranking import Ints, Relevance, same_label
from nobackfill.metrics.retrieval import PerQuery, score
from nobackfill.release.manifest import Manifest
from nobackfill.release.models import Embedder, SideEncoder, open_embedder, open_side_encoder
from nobackfill.release.routes import open_route, plan_route
from nobackfill.report.pictures import Picture, pixels
from nobackfill.vectors import Vectors

METRICS: dict[str, Metric] = {"squared_l2": "l2", "cosine": "cosine"}
HITS = 5
# Images decoded and embedded at a time: a ResNet50 at 224 x 224 takes some 10 MB for each.
BATCH = 32


@dataclass(frozen=True)
class Cell:
    """One cell of the compatibility matrix: figures of every query, and its nearest five."""

    cmc1: PerQuery
    cmc5: PerQuery
    map: PerQuery
    # Positions of the pictures found, int64 [n, HITS], nearest first, -1 where there are no more.
    hits: Ints


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
    pictures: list[Picture]
    # By query/gallery, as in "new/served"; new/old is missing where the dimensions differ.
    cells: Mapping[str, Cell]
    old_vectors: Vectors
    served_vectors: Vectors
    new_vectors: Vectors
    # [n], larger is less certain; None where the upgrade predicts none.
    uncertainty: NDArray[np.float32] | None
    # By order of the backfill; empty where served and new vectors differ in dimension.
    curves: Mapping[str, BackfillCurve]
    cost: Cost


@dataclass(frozen=True)
class _Vectors:
    old: Vectors
    served: Vectors
    new: Vectors
    uncertainty: NDArray[np.float32] | None
    route: tuple[int, ...]
    cost: Cost


def predecessor(manifests: Mapping[int, Manifest], release: int) -> int | None:
    """The newest older release whose galleries `release` can take over, or None."""
    new = manifests[release]
    for number in sorted((n for n in manifests if n < release), reverse=True):
        old = manifests[number]
        if plan_route(manifests, number, release, old.side_space):
            return number
        if old.space in new.searches_directly:
            return number
    return None


def compare(
    folder: Path,
    manifests: Mapping[int, Manifest],
    old: Manifest,
    new: Manifest,
    pictures: list[Picture],
) -> Comparison:
    """Measure the upgrade from `old` to `new` on pictures, with what gateways and devices run by
    default: int8 transforms where they are published.

    Raises VerificationError for models that are not the published ones, InvalidInputError for a
    file that is no image.
    """
    vectors = _embed(folder, manifests, old, new, pictures)
    sides = {
        "old/old": (vectors.old, vectors.old, old),
        "new/old": (vectors.new, vectors.old, old),
        "new/served": (vectors.new, vectors.served, new),
        "new/new": (vectors.new, vectors.new, new),
    }
    cells = {
        name: _cell(queries, gallery, space, pictures)
        for name, (queries, gallery, space) in sides.items()
        if queries.shape[1] == gallery.shape[1]
    }
    return Comparison(
        old=old,
        new=new,
        route=vectors.route,
        pictures=pictures,
        cells=cells,
        old_vectors=vectors.old,
        served_vectors=vectors.served,
        new_vectors=vectors.new,
        uncertainty=vectors.uncertainty,
        curves=_curves(vectors, new, pictures),
        cost=vectors.cost,
    )


def _embed(
    folder: Path,
    manifests: Mapping[int, Manifest],
    old: Manifest,
    new: Manifest,
    pictures: list[Picture],
) -> _Vectors:
    stored = _run(open_embedder(folder, old), old, pictures)
    side = None
    if old.side_encoder is not None:
        side = _run(open_side_encoder(folder, old), old, pictures)
    embedder = open_embedder(folder, new)
    start = time.perf_counter()
    fresh = _run(embedder, new, pictures)
    reembed_seconds = time.perf_counter() - start
    route = plan_route(manifests, old.release, new.release, old.side_space)
    served, uncertainty, seconds = stored, None, 0.0
    if route is not None:
        runner = open_route(folder, route, int8=True)
        start = time.perf_counter()
        upgraded = runner.run(stored, side)
        seconds = time.perf_counter() - start
        served, uncertainty = upgraded.embedding, upgraded.uncertainty
    releases = () if route is None else route.releases
    cost = Cost(len(pictures), seconds, reembed_seconds)
    return _Vectors(stored, served, fresh, uncertainty, releases, cost)


def _run(model: Embedder | SideEncoder, release: Manifest, pictures: list[Picture]) -> Vectors:
    """Vectors [n,dim] of every picture, decoded at the release's size."""
    height, width = release.embedder.height, release.embedder.width
    return np.concatenate(
        [
            model.run(pixels(pictures[start : start + BATCH], height, width))
            for start in range(0, len(pictures), BATCH)
        ]
    )


def _relevance(pictures: list[Picture]) -> Relevance:
    """A picture is to find the others of its class; its own place in the gallery is left out."""
    labels = [picture.label for picture in pictures]
    names = [picture.name for picture in pictures]
    return same_label(labels, labels, names, names)


def _cell(queries: Vectors, gallery: Vectors, space: Manifest, pictures: list[Picture]) -> Cell:
    """Every picture against all others; `space` is the release whose space the gallery lives in."""
    spec = SpaceSpec.of(space)
    figures = score(queries, gallery, _relevance(pictures), METRICS[spec.metric])
    index = ExactIndex(spec, np.arange(len(gallery), dtype=np.int64), gallery)
    found = index.search(queries, HITS + 1).labels
    own = np.arange(len(queries))[:, None]
    hits = np.stack([row[row != i][:HITS] for i, row in zip(own, found, strict=True)])
    return Cell(figures["cmc1"], figures["cmc5"], figures["map"], hits)


def _curves(vectors: _Vectors, new: Manifest, pictures: list[Picture]) -> dict[str, BackfillCurve]:
    if vectors.served.shape[1] != vectors.new.shape[1]:
        return {}
    orders = {"random order": random_order(len(pictures), seed=0)}
    if vectors.uncertainty is not None:
        orders["least certain first"] = uncertainty_order(vectors.uncertainty)
    metric = METRICS[new.embedder.metric]
    relevance = _relevance(pictures)
    return {
        name: backfill_curve(
            vectors.new, vectors.served, vectors.new, order, relevance, metric=metric
        )
        for name, order in orders.items()
    }
