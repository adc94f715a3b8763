"""Searching: exact, offline, in the space that is active at the moment of asking."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nobackfill.client.cli.conditions import every
from nobackfill.client.device import Device
from nobackfill.errors import (
    DamagedError,
    IncompatibleSpaceError,
    InvalidInputError,
    NotFoundError,
    UnusableOutputError,
    UnusableRowsError,
)
from nobackfill.gallery.filter_engine import passing_labels
from nobackfill.gallery.filters import Filter, Scalar
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.index import Labels, mask_of
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.release.calibration import scores
from nobackfill.vectors import Vectors, check_vectors
from nobackfill.wire.limits import LARGEST_K


@dataclass(frozen=True)
class Curve:
    """Breakpoints of a calibration, see nobackfill.release.manifest.Calibration."""

    distances: list[float]
    probabilities: list[float]


@dataclass(frozen=True)
class Hit:
    """An item that was found. `score`: calibrated probability of a match, None if the release
    carries no calibration; `release`: whose space its vector lives in."""

    id: str
    path: str
    distance: float
    score: float | None
    release: int
    origin: str


@dataclass(frozen=True)
class Answer:
    """The hits of one query, nearest first."""

    query: str
    release: int
    space: str
    hits: list[Hit]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Search:
    """One gallery at one moment: the active space's vectors, read once, searched many times."""

    def __init__(self, device: Device, where: Mapping[str, Scalar] | Filter) -> None:
        """Only items that pass `where` are found: a filter, or values by key that they all have.
        Raises InvalidInputError for a filter that `nobackfill.gallery.filters.check` refuses."""
        self._device = device
        self.spec, labels, vectors = self._load()
        if len(labels) < device.store.count():
            # Items may lack a vector, and pages may have lost some: only their bytes show which.
            device.store.check_pages()
        try:
            check_vectors(vectors, self.spec.dim, what="stored vectors", unit=self.spec.unit)
        except UnusableRowsError as error:
            # Found elsewhere than they are, they would be wrong answers.
            raise DamagedError(device.path, error) from error
        self._curves = _curves(device.manifest_text(self.spec.release), self.spec.space)
        self._index = ExactIndex(self.spec, labels, vectors)
        self._allowed = None
        if (filtered := every(where)) is not None:
            self._allowed = mask_of(labels, passing_labels(device.store, filtered))

    def _load(self) -> tuple[SpaceSpec, Labels, Vectors]:
        while True:
            spec = self._device.store.active().spec
            with contextlib.suppress(IncompatibleSpaceError):
                return spec, *self._device.store.load(spec.space)
            # A sync dropped it in between: it is not the active one any more.

    def by_images(self, images: Sequence[Path], k: int) -> list[Answer]:
        """The items nearest to each image file. Raises InvalidInputError for one that is none."""
        from nobackfill.client.photos.encoding import Encoder
        from nobackfill.images import decode_file
        from nobackfill.release.models import no_vector

        manifest = self._device.manifest(self.spec.release)
        encoder = Encoder(self._device.models, manifest, side=False)
        size = manifest.embedder
        pixels = [decode_file(path, size.height, size.width) for path in images]
        queries = []
        for start in range(0, len(pixels), 64):
            try:
                queries.append(encoder.embed(pixels[start : start + 64]))
            except UnusableOutputError as error:
                worst = images[start + error.rows[0]]
                raise InvalidInputError(f"{worst}: {no_vector(manifest)}") from error
        return self._answers([str(path) for path in images], np.concatenate(queries), k)

    def by_id(self, item_id: str, k: int) -> Answer:
        """The other items nearest to one of the gallery. Raises NotFoundError."""
        item = self._device.store.get(item_id)
        vector = None if item is None else self._device.store.vector(item.label, self.spec.space)
        if item is None or vector is None:
            raise NotFoundError(f"{item_id}: no such item; `edge-client list` names them")
        answer = self._answers([item_id], vector, k + 1)[0]
        others = [hit for hit in answer.hits if hit.id != item.id]
        return Answer(answer.query, answer.release, answer.space, others[:k])

    def _answers(self, names: Sequence[str], queries: Vectors, k: int) -> list[Answer]:
        if not 1 <= k <= LARGEST_K + 1:
            raise InvalidInputError(f"expected k from 1 to {LARGEST_K}, got {k}")
        found = self._index.search(queries, k, self._allowed)
        return [
            Answer(name, self.spec.release, self.spec.space, self._hits(labels, distances))
            for name, labels, distances in zip(names, found.labels, found.distances, strict=True)
        ]

    def _hits(self, labels: Any, distances: Any) -> list[Hit]:
        items = self._device.store.items(labels[labels >= 0], self.spec.space)
        if None in items:
            # Removed since, or no longer found on a damaged page.
            self._device.store.check_pages()
        return [
            Hit(
                id=item.id,
                path=str(item.metadata.get("path", "")),
                distance=float(distance),
                score=self._score(item.origin or "native", float(distance)),
                release=self.spec.release,
                origin=item.origin or "native",
            )
            for item, distance in zip(items, distances, strict=False)
            if item is not None
        ]

    def _score(self, origin: str, distance: float) -> float | None:
        curve = self._curves.get(origin)
        return None if curve is None else float(scores(curve, [distance])[0])


def _curves(manifest: bytes, space: str) -> dict[str, Curve]:
    """Calibration of one space's distances by origin, read without pydantic: every release here was
    checked with it, and a search has no time to load it."""
    return {
        curve["origin"]: Curve(curve["distances"], curve["probabilities"])
        for curve in json.loads(manifest)["calibration"]
        if curve["query_space"] == space
        # A vector that is searched as it is was measured in the space it was made in.
        and (curve["gallery_space"] == space or curve["origin"] == "direct")
    }
