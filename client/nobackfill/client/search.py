"""Searching: exact, offline, in the space that is active at the moment of asking."""

import contextlib
import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from nobackfill.client.gallery_file import GalleryFile
from nobackfill.errors import (
    DamagedError,
    IncompatibleSpaceError,
    InvalidInputError,
    NotFoundError,
    UnusableOutputError,
    UnusableRowsError,
    few,
)
from nobackfill.gallery.filter_engine import passing_labels
from nobackfill.gallery.filters import Filter, Scalar, every
from nobackfill.gallery.listing import carried_labels
from nobackfill.gallery.search import index
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.index import Labels, Mask, Neighbours, mask_of
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.release.calibration import Scale, beyond, scores
from nobackfill.vectors import Vectors, check_vectors
from nobackfill.wire import answers
from nobackfill.wire.limits import LARGEST_K


@dataclass(frozen=True)
class DistanceCurve:
    """Breakpoints of a calibration, see nobackfill.release.manifest.Calibration."""

    distances: list[float]
    probabilities: list[float]
    scale: list[float] | None = None


class DeviceHit(answers.Hit):
    """An item that was found, and the file that it was added from."""

    @property
    def path(self) -> str:
        return str(self.metadata.get("path", ""))

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "path": self.path,
            "distance": self.distance,
            "score": self.score,
            "release": self.release,
            "origin": self.origin,
            "beyond_calibration": self.beyond_calibration,
        }


@dataclass(frozen=True)
class DeviceAnswer(answers.Answer[DeviceHit]):
    """The hits of one query; `query`: the image's path, the text, or
    the item's id."""

    query: str = ""

    def as_json(self) -> dict[str, Any]:
        hits = [hit.as_json() for hit in self.hits]
        return {"query": self.query, "release": self.release, "space": self.space, "hits": hits}


class Search:
    """One gallery at one moment: the active space's vectors, read once, searched many times."""

    def __init__(
        self,
        device: GalleryFile,
        where: Mapping[str, Scalar] | Filter,
        spec: SpaceSpec | None = None,
    ) -> None:
        """Only items that pass `where` are found: a filter, or values by key that they all have.
        `spec`: another of the gallery's spaces than the active one, as the one before an upgrade.

        Raises InvalidInputError for a filter that `nobackfill.gallery.filters.check` refuses,
        IncompatibleSpaceError for a space that is not there (any more).
        """
        self._device = device
        self.spec, labels, vectors = self._load(spec)
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
        self._carried = self._mixed(labels)
        self._allowed = self._passing(where)

    def among(self, where: Mapping[str, Scalar] | Filter) -> Self:
        """The same vectors, without reading them again, and the items that pass `where` now."""
        other = copy.copy(self)
        other._allowed = self._passing(where)
        return other

    def _passing(self, where: Mapping[str, Scalar] | Filter) -> Mask | None:
        if (filtered := every(where)) is None:
            return None
        return mask_of(self._index.labels, passing_labels(self._device.store, filtered))

    def _mixed(self, labels: Labels) -> Mask | None:
        """Which vectors an upgrade has carried, where these are ranked along the release's scale
        beside native ones; None where distances rank all."""
        curve = self._curves.get("upgraded")
        if curve is None or curve.scale is None:
            return None
        carried = mask_of(labels, carried_labels(self._device.store, self.spec.space))
        return None if carried.all() or not carried.any() else carried

    def _load(self, spec: SpaceSpec | None) -> tuple[SpaceSpec, Labels, Vectors]:
        if spec is not None:
            return spec, *self._device.store.load(spec.space)
        while True:
            spec = self._device.store.active().spec
            with contextlib.suppress(IncompatibleSpaceError):
                return spec, *self._device.store.load(spec.space)
            # A sync dropped it in between: it is not the active one any more.

    def by_images(self, images: Sequence[Path | bytes], k: int) -> list[DeviceAnswer]:
        """The items nearest to each image. Raises InvalidInputError for one that is none."""
        from nobackfill.client.photos import threads
        from nobackfill.images import decode, decode_file
        from nobackfill.release.image_model import ImageModel
        from nobackfill.release.models import no_vector, open_image_model

        model = ImageModel.read(self._device.manifest_text(self.spec.release))
        embedder = open_image_model(self._device.models, model, threads())
        size = model.frame
        names = ["the image" if isinstance(image, bytes) else str(image) for image in images]
        pixels = [
            decode(image, *size) if isinstance(image, bytes) else decode_file(image, *size)
            for image in images
        ]
        queries = []
        for start in range(0, len(pixels), 64):
            try:
                queries.append(embedder.run(np.stack(pixels[start : start + 64])))
            except UnusableOutputError as error:
                worst = names[start + error.rows[0]]
                raise InvalidInputError(f"{worst}: {no_vector(model)}") from error
        return self._answers(names, np.concatenate(queries), k)

    def by_texts(self, texts: Sequence[str], k: int) -> list[DeviceAnswer]:
        """The items nearest to each text. Raises NoEncoderError where the release embeds none,
        InvalidInputError for one with nothing to read."""
        from nobackfill.client import notes

        manifest = self._device.manifest(self.spec.release)
        return self._answers(texts, notes.embed(self._device, manifest, texts, "query"), k)

    def by_embedding(self, embeddings: Mapping[str, Sequence[float]], k: int) -> DeviceAnswer:
        """The items nearest to the vector of the space that answers.

        Raises IncompatibleSpaceError without one, InvalidInputError for a vector that is none.
        """
        given = embeddings.get(self.spec.space)
        if given is None:
            raise IncompatibleSpaceError(
                f"expected an embedding of release {self.spec.release} ({self.spec.space}), got "
                f"{few(embeddings) or 'none'}; embed the query with that release"
            )
        query = np.ascontiguousarray(given, np.float32)[None]
        check_vectors(query, self.spec.dim, what="query", unit=self.spec.unit)
        return self._answers([""], query, k)[0]

    def by_id(self, item_id: str, k: int) -> DeviceAnswer:
        """The other items nearest to one of the gallery. Raises NotFoundError."""
        item = self._device.store.get(item_id)
        vector = None if item is None else self._device.store.vector(item.label, self.spec.space)
        if item is None or vector is None:
            raise NotFoundError(f"{item_id}: no such item; `edge-client list` names them")
        answer = self._answers([item_id], vector, k, itself=True)[0]
        others = [hit for hit in answer.hits if hit.id != item.id]
        return replace(answer, hits=others[:k])

    def _answers(
        self, names: Sequence[str], queries: Vectors, k: int, *, itself: bool = False
    ) -> list[DeviceAnswer]:
        """The `k` nearest of each query; one more where an item finds `itself` among them."""
        if not 1 <= k <= LARGEST_K:
            raise InvalidInputError(f"expected k from 1 to {LARGEST_K}, got {k}")
        found = self._nearest(queries, k + itself)
        return [
            DeviceAnswer(
                self._hits(labels, distances), self.spec.release, self.spec.space, query=name
            )
            for name, labels, distances in zip(names, found.labels, found.distances, strict=True)
        ]

    def _nearest(self, queries: Vectors, k: int) -> Neighbours:
        carried, allowed = self._carried, self._allowed
        if carried is None:
            return self._index.search(queries, k, allowed)
        scale = Scale(*self._curves["upgraded"].scale or ())
        upgraded, others = (
            self._index.search(queries, k, one if allowed is None else one & allowed)
            for one in (carried, ~carried)
        )
        return index.join_origins(upgraded, others, scale, k)

    def _hits(self, labels: Any, distances: Any) -> list[DeviceHit]:
        items = self._device.store.items(labels[labels >= 0], self.spec.space)
        if None in items:
            # Removed since, or no longer found on a damaged page.
            self._device.store.check_pages()
        return [
            DeviceHit(
                id=item.id,
                distance=float(distance),
                score=None if curve is None else float(scores(curve, distance)),
                release=self.spec.release,
                origin=item.origin or "native",
                metadata=item.metadata,
                beyond_calibration=curve is not None and bool(beyond(curve, distance)),
            )
            for item, distance in zip(items, distances, strict=False)
            if item is not None
            for curve in (self._curves.get(item.origin or "native"),)
        ]


def _curves(manifest: bytes, space: str) -> dict[str, DistanceCurve]:
    """Calibration of one space's distances by origin, read without pydantic: every release here was
    checked with it, and a search has no time to load it."""
    return {
        curve["origin"]: DistanceCurve(
            curve["distances"], curve["probabilities"], curve.get("scale")
        )
        for curve in json.loads(manifest)["calibration"]
        if curve["query_space"] == space
        # A vector that is searched as it is was measured in the space it was made in.
        and (curve["gallery_space"] == space or curve["origin"] == "direct")
    }
