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
    join_few,
)
from nobackfill.gallery.filter_engine import passing_labels
from nobackfill.gallery.filters import Filter, Scalar, as_filter
from nobackfill.gallery.listing import read_migrated_labels
from nobackfill.gallery.search import index
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.index import Labels, Mask, Neighbours, membership_mask
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.release.calibration import DistanceScale, Scorer
from nobackfill.vectors import Vectors, check_vectors
from nobackfill.wire import answers
from nobackfill.wire.limits import LARGEST_K


@dataclass(frozen=True)
class DistanceCurve:
    """The calibration curve of one origin of vectors: distances and probabilities of a match.

    Attributes:
        distances: breakpoints, increasing.
        probabilities: for each breakpoint the probability of a match, 0 to 1.
        scale: the release's common scale of migrated and native distances; None without one.
    """

    distances: list[float]
    probabilities: list[float]
    scale: list[float] | None = None


class DeviceHit(answers.Hit):
    """A hit, with the path of the file that it was added from."""

    @property
    def path(self) -> str:
        """Return the metadata `path`; empty if the item was not added from a file.

        The file may have been moved, changed or deleted since.
        """
        return str(self.metadata.get("path", ""))

    def as_json(self) -> dict[str, Any]:
        """Return the hit as in `edge-client search --json`, without its metadata.

        Returns:
            id, path, distance, score (a probability, or None without calibration), release, origin
            and beyond_calibration.
        """
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
    """The hits of one query, nearest first.

    Attributes:
        query: the image's path, the text, or the item's id; empty for an embedding.
    """

    query: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the answer as in `edge-client search --json`.

        Returns:
            query, release, space, and hits as `DeviceHit.as_json` returns them.
        """
        hits = [hit.as_json() for hit in self.hits]
        return {"query": self.query, "release": self.release, "space": self.space, "hits": hits}


class Search:
    """A snapshot of one gallery: the vectors of a space, read once, for any number of searches.

    Searches are exact and offline. Items that are added later are not found. Hits that are deleted
    later are left out; each such search checks all pages of the file, which takes as long as
    reading it.

    Attributes:
        spec: the searched space.
    """

    def __init__(
        self,
        device: GalleryFile,
        where: Mapping[str, Scalar] | Filter,
        spec: SpaceSpec | None = None,
    ) -> None:
        """Read all vectors of a space.

        The vectors stay in memory: 4 bytes for each dimension of each item. If items lack a vector,
        all pages of the file are checked first, which takes as long as reading it.

        Args:
            device: the gallery; it must stay open.
            where: a filter, or values by key that every hit must have; empty: all items. It is
                evaluated now, and later changes of metadata have no effect.
            spec: a space of the gallery; None: the active one.

        Raises:
            InvalidInputError: the filter is not valid.
            IncompatibleSpaceError: the gallery does not hold the space `spec`.
            NotFoundError: the release of the space is not installed, or the gallery was closed.
            VerificationError: the gallery file, a vector or the manifest is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the file cannot be opened, or the disk fails.
            TypeError: `where` is no filter, or a value in it is None or a list.
        """
        self._device = device
        self.spec, labels, vectors = self._load(spec)
        if len(labels) < device.store.count():
            # Items may lack a vector, or pages may have lost some; only a check can tell.
            device.store.check_pages()
        try:
            check_vectors(
                vectors, self.spec.dim, error_name="stored vectors", unit_norm=self.spec.unit_norm
            )
        except UnusableRowsError as error:
            # Damaged vectors would give wrong answers.
            raise DamagedError(device.path, error) from error
        self._curves = _curves(device.manifest_text(self.spec.release), self.spec.space)
        self._scorers = {origin: Scorer(curve) for origin, curve in self._curves.items()}
        self._index = ExactIndex(self.spec, labels, vectors)
        self._migrated = self._migrated_rows(labels)
        self._passing = self._filter(where)

    def with_filter(self, where: Mapping[str, Scalar] | Filter) -> Self:
        """Return a search of the same vectors with another filter, without reading them again.

        Items whose metadata was changed since are judged by the present metadata.

        Args:
            where: a filter, or values by key that every hit must have; empty: all items. It is
                evaluated now.

        Raises:
            InvalidInputError: the filter is not valid.
            DamagedError: the gallery file is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the file cannot be opened, or the disk fails.
            NotFoundError: the gallery was closed, or its file is gone.
            TypeError: `where` is no filter, or a value in it is None or a list.
        """
        other = copy.copy(self)
        other._passing = self._filter(where)
        return other

    def _filter(self, where: Mapping[str, Scalar] | Filter) -> Mask | None:
        if (condition := as_filter(where)) is None:
            return None
        return membership_mask(self._index.labels, passing_labels(self._device.store, condition))

    def _migrated_rows(self, labels: Labels) -> Mask | None:
        """Return which vectors were migrated, if they and native vectors are ranked on the
        release's common scale; None if plain distances rank all."""
        curve = self._curves.get("upgraded")
        if curve is None or curve.scale is None:
            return None
        migrated = membership_mask(
            labels, read_migrated_labels(self._device.store, self.spec.space)
        )
        return None if migrated.all() or not migrated.any() else migrated

    def _load(self, spec: SpaceSpec | None) -> tuple[SpaceSpec, Labels, Vectors]:
        if spec is not None:
            return spec, *self._device.store.load_vectors(spec.space)
        while True:
            spec = self._device.store.active().spec
            with contextlib.suppress(IncompatibleSpaceError):
                return spec, *self._device.store.load_vectors(spec.space)
            # A sync dropped the space between the two reads: read the new active space.

    def by_images(self, images: Sequence[Path | bytes], k: int) -> list[DeviceAnswer]:
        """Return the items nearest to each of one or more images.

        Opens the model at each call, decodes all images into memory, and embeds 64 at a time. Hits
        are nearest first; equal distances are ordered as the items were stored. If the release has
        a common scale, migrated and native hits are ranked on it, not by their distances.

        Args:
            images: one or more paths or encoded bytes (JPEG, PNG, WebP; HEIC and AVIF with the
                extra heic).
            k: the largest number of hits of each, 1 to 1000; it is checked after the images are
                embedded.

        Returns:
            One answer for each image, in order; it has fewer than `k` hits if fewer items pass or
            hits were deleted since, and none in an empty gallery.

        Raises:
            InvalidInputError: an image cannot be read or embedded, and the message names the first
                one; or `k` is out of range.
            NoEncoderError: the release embeds no images.
            VerificationError: the model or the gallery file is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            ValueError: `images` is empty.
            NotFoundError: the release was removed since, or the gallery was closed.
            IncompatibleSpaceError: the searched space was dropped since.
            CannotWriteError: the gallery file cannot be opened, or the disk fails.
        """
        from nobackfill.images import decode_file, decode_image
        from nobackfill.release.image_model import ImageModel
        from nobackfill.release.models import count_cores, no_vector_error, open_image_model

        model = ImageModel.read(self._device.manifest_text(self.spec.release))
        embedder = open_image_model(self._device.models, model, count_cores())
        size = model.frame
        names = ["the image" if isinstance(image, bytes) else str(image) for image in images]
        pixels = [
            decode_image(image, *size) if isinstance(image, bytes) else decode_file(image, *size)
            for image in images
        ]
        queries = []
        for start in range(0, len(pixels), 64):
            try:
                queries.append(embedder.run(np.stack(pixels[start : start + 64])))
            except UnusableOutputError as error:
                worst = names[start + error.unusable_rows[0]]
                raise InvalidInputError(f"{worst}: {no_vector_error(model)}") from error
        return self._answers(names, np.concatenate(queries), k)

    def by_texts(self, texts: Sequence[str], k: int) -> list[DeviceAnswer]:
        """Return the items nearest to each of one or more texts.

        Opens the model at each call. Hits are nearest first; equal distances are ordered as the
        items were stored. If the release has a common scale, migrated and native hits are ranked on
        it, not by their distances.

        Args:
            texts: one or more queries of 1 byte to 64 KiB.
            k: the number of hits of each, 1 to 1000.

        Returns:
            One answer for each text, in order; it has fewer than `k` hits if fewer items pass or
            hits were deleted since, and none in an empty gallery.

        Raises:
            NoEncoderError: the release embeds no texts.
            ConfigurationError: the extra `text` is not installed.
            InvalidInputError: a text is empty, too long (TooLargeError) or cannot be embedded, or
                `k` is out of range.
            NotFoundError: the release is not installed, or the gallery was closed.
            VerificationError: the model, the manifest or the gallery file is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            IncompatibleSpaceError: the searched space was dropped since.
            CannotWriteError: the file cannot be opened, or the disk fails.
            ValueError: `texts` is empty.
        """
        from nobackfill.client import notes

        manifest = self._device.manifest(self.spec.release)
        return self._answers(texts, notes.embed(self._device, manifest, texts, "query"), k)

    def by_embedding(self, embeddings: Mapping[str, Sequence[float]], k: int) -> DeviceAnswer:
        """Return the items nearest to an embedding of the searched space.

        Hits are nearest first; equal distances are ordered as the items were stored. If the release
        has a common scale, migrated and native hits are ranked on it, not by their distances.

        Args:
            embeddings: vectors [dim] by space id; the one of the searched space is used, others are
                ignored.
            k: the number of hits, 1 to 1000.

        Raises:
            IncompatibleSpaceError: `embeddings` has no vector of the searched space, or the space
                was dropped since.
            InvalidInputError: the vector has another size or norm, or is not finite, or `k` is out
                of range.
            DamagedError: the gallery file is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            ValueError: the vector has values that are no numbers.
            CannotWriteError: the file cannot be opened, or the disk fails.
            NotFoundError: the gallery was closed.
            TypeError: the vector has values of another type than numbers, such as a mapping.
        """
        embedding = embeddings.get(self.spec.space)
        if embedding is None:
            raise IncompatibleSpaceError(
                f"query: expected an embedding in the space of release {self.spec.release} "
                f"({self.spec.space}), got {join_few(embeddings) or 'none'}; embed the query with "
                "that release"
            )
        query = np.ascontiguousarray(embedding, np.float32)[None]
        check_vectors(query, self.spec.dim, error_name="query", unit_norm=self.spec.unit_norm)
        return self._answers([""], query, k)[0]

    def by_id(self, item_id: str, k: int) -> DeviceAnswer:
        """Return the items nearest to an item of the gallery, without that item itself.

        Hits are nearest first; equal distances are ordered as the items were stored. If the release
        has a common scale, migrated and native hits are ranked on it, not by their distances. The
        item's present vector is used, also if the item was added after this snapshot.

        Args:
            item_id: the item's id.
            k: the number of hits, 1 to 1000.

        Raises:
            NotFoundError: there is no such item, or it has no vector in the searched space; or the
                gallery was closed.
            InvalidInputError: `k` is out of range.
            IncompatibleSpaceError: the searched space was dropped since.
            DamagedError: the gallery file is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the file cannot be opened, or the disk fails.
        """
        item = self._device.store.get(item_id)
        vector = None if item is None else self._device.store.vector(item.label, self.spec.space)
        if item is None or vector is None:
            raise NotFoundError(
                f"{item_id}: this gallery has no searchable item of this id; `edge-client list` "
                "lists the ids"
            )
        answer = self._answers([item_id], vector, k, itself=True)[0]
        others = [hit for hit in answer.hits if hit.id != item.id]
        return replace(answer, hits=others[:k])

    def _answers(
        self, names: Sequence[str], queries: Vectors, k: int, *, itself: bool = False
    ) -> list[DeviceAnswer]:
        """Return the `k` nearest of each query, or k + 1 where `itself` is among the hits."""
        if not 1 <= k <= LARGEST_K:
            raise InvalidInputError(
                f"k, the number of hits: expected 1 to {LARGEST_K}, got {k}; request another number"
            )
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
        migrated, passing = self._migrated, self._passing
        if migrated is None:
            return self._index.search(queries, k, passing)
        scale = DistanceScale(*self._curves["upgraded"].scale or ())
        upgraded, others = (
            self._index.search(queries, k, one if passing is None else one & passing)
            for one in (migrated, ~migrated)
        )
        return index.merge_on_native_scale(upgraded, others, scale, k)

    def _hits(self, labels: Any, distances: Any) -> list[DeviceHit]:
        items = self._device.store.items(labels[labels >= 0], self.spec.space)
        if None in items:
            # An item was removed meanwhile, or a damaged page lost it.
            self._device.store.check_pages()
        return [
            DeviceHit(
                id=item.id,
                distance=float(distance),
                score=None if curve is None else float(curve.scores(distance)),
                release=self.spec.release,
                origin=item.origin or "native",
                metadata=item.metadata,
                beyond_calibration=curve is not None
                and bool(curve.is_beyond_calibration(distance)),
            )
            for item, distance in zip(items, distances, strict=False)
            if item is not None
            for curve in (self._scorers.get(item.origin or "native"),)
        ]


def _curves(manifest: bytes, space: str) -> dict[str, DistanceCurve]:
    """Return the calibration curves of one space by origin.

    Does not use pydantic, which takes longer to import than a search: the manifest was validated
    when its release was installed.
    """
    return {
        curve["origin"]: DistanceCurve(
            curve["distances"], curve["probabilities"], curve.get("scale")
        )
        for curve in json.loads(manifest)["calibration"]
        if curve["query_space"] == space
        # A vector that is searched unchanged was calibrated in the space that made it.
        and (curve["gallery_space"] == space or curve["origin"] == "direct")
    }
