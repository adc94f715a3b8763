"""Exact offline search in the space that is active when the search starts."""

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
    """Breakpoints of a calibration curve; see nobackfill.release.manifest.Calibration."""

    distances: list[float]
    probabilities: list[float]
    scale: list[float] | None = None


class DeviceHit(answers.Hit):
    """A hit, with the path of the file that it was added from."""

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
    """The hits of one query; `query` is the image's path, the text, or the item's id."""

    query: str = ""

    def as_json(self) -> dict[str, Any]:
        hits = [hit.as_json() for hit in self.hits]
        return {"query": self.query, "release": self.release, "space": self.space, "hits": hits}


class Search:
    """A snapshot of one gallery: the vectors of a space, read once, for any number of searches."""

    def __init__(
        self,
        device: GalleryFile,
        where: Mapping[str, Scalar] | Filter,
        spec: SpaceSpec | None = None,
    ) -> None:
        """Read the vectors of a space.

        Args:
            device: the gallery.
            where: a filter, or values by key that every hit must have.
            spec: a space of the gallery; None: the active one.

        Raises:
            InvalidInputError: the filter is not valid.
            IncompatibleSpaceError: the gallery does not hold the space `spec`.
            DamagedError: pages of the file or vectors are damaged.
        """
        self._device = device
        self.spec, labels, vectors = self._load(spec)
        if len(labels) < device.store.count():
            # Items may lack a vector, or pages may have lost some; only a check can tell.
            device.store.check_pages()
        try:
            check_vectors(vectors, self.spec.dim, what="stored vectors", unit=self.spec.unit)
        except UnusableRowsError as error:
            # Damaged vectors would give wrong answers.
            raise DamagedError(device.path, error) from error
        self._curves = _curves(device.manifest_text(self.spec.release), self.spec.space)
        self._index = ExactIndex(self.spec, labels, vectors)
        self._carried = self._mixed(labels)
        self._allowed = self._passing(where)

    def among(self, where: Mapping[str, Scalar] | Filter) -> Self:
        """Return a search of the same vectors, without reading them again, with another filter."""
        other = copy.copy(self)
        other._allowed = self._passing(where)
        return other

    def _passing(self, where: Mapping[str, Scalar] | Filter) -> Mask | None:
        if (condition := every(where)) is None:
            return None
        return mask_of(self._index.labels, passing_labels(self._device.store, condition))

    def _mixed(self, labels: Labels) -> Mask | None:
        """Return which vectors an upgrade carried, if they and native vectors are ranked on the
        release's common scale; None if plain distances rank all."""
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
            # A sync dropped the space between the two reads: read the new active space.

    def by_images(self, images: Sequence[Path | bytes], k: int) -> list[DeviceAnswer]:
        """Return the items nearest to each image.

        Raises:
            InvalidInputError: an image cannot be read or embedded, or `k` is not 1 to 1000.
            NoEncoderError: the release embeds no images.
        """
        from nobackfill.images import decode, decode_file
        from nobackfill.release.image_model import ImageModel
        from nobackfill.release.models import cores, no_vector, open_image_model

        model = ImageModel.read(self._device.manifest_text(self.spec.release))
        embedder = open_image_model(self._device.models, model, cores())
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
        """Return the items nearest to each text.

        Raises:
            NoEncoderError: the release embeds no texts.
            InvalidInputError: a text is empty or cannot be embedded, or `k` is not 1 to 1000.
        """
        from nobackfill.client import notes

        manifest = self._device.manifest(self.spec.release)
        return self._answers(texts, notes.embed(self._device, manifest, texts, "query"), k)

    def by_embedding(self, embeddings: Mapping[str, Sequence[float]], k: int) -> DeviceAnswer:
        """Return the items nearest to an embedding [dim] of the searched space.

        Args:
            embeddings: vectors by space id.
            k: the number of hits, 1 to 1000.

        Raises:
            IncompatibleSpaceError: `embeddings` has no vector of the searched space.
            InvalidInputError: the vector has another size, or is not finite, or `k` is too large.
        """
        embedding = embeddings.get(self.spec.space)
        if embedding is None:
            raise IncompatibleSpaceError(
                f"expected an embedding of release {self.spec.release} ({self.spec.space}), got "
                f"{few(embeddings) or 'none'}; embed the query with that release"
            )
        query = np.ascontiguousarray(embedding, np.float32)[None]
        check_vectors(query, self.spec.dim, what="query", unit=self.spec.unit)
        return self._answers([""], query, k)[0]

    def by_id(self, item_id: str, k: int) -> DeviceAnswer:
        """Return the other items nearest to an item of the gallery. Raises NotFoundError."""
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
        """Return the `k` nearest of each query, or k + 1 where `itself` is among the hits."""
        if not 1 <= k <= LARGEST_K:
            raise InvalidInputError(f"expected k from 1 to {LARGEST_K}, got {k}")
        neighbours = self._nearest(queries, k + itself)
        return [
            DeviceAnswer(
                self._hits(labels, distances), self.spec.release, self.spec.space, query=name
            )
            for name, labels, distances in zip(
                names, neighbours.labels, neighbours.distances, strict=True
            )
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
            # An item was removed meanwhile, or a damaged page lost it.
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
    """Return the calibration curves of one space by origin.

    Read without pydantic, which takes longer to import than a search: the manifest was validated
    when its release was installed."""
    return {
        curve["origin"]: DistanceCurve(
            curve["distances"], curve["probabilities"], curve.get("scale")
        )
        for curve in json.loads(manifest)["calibration"]
        if curve["query_space"] == space
        # A vector that is searched unchanged was calibrated in the space that made it.
        and (curve["gallery_space"] == space or curve["origin"] == "direct")
    }
