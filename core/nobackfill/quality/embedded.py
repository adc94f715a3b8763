"""One set of images, or of texts, in the spaces of several releases: cells are measured on it."""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import numpy as np

from nobackfill.class_folders import Images, Listing, decode
from nobackfill.errors import InvalidInputError, NotFoundError, few
from nobackfill.metrics.distances import Metric, unit
from nobackfill.quality.cells import CellName
from nobackfill.quality.listing import TextListing
from nobackfill.release.manifest import Manifest, TextRole
from nobackfill.release.models import Files, Upgraded, open_embedder, open_side_encoder
from nobackfill.release.routes import open_route, route_along
from nobackfill.release.text_models import open_text_encoder
from nobackfill.vectors import Vectors

# Images decoded and embedded at a time: a ResNet50 at 224 x 224 takes some 10 MB for each.
BATCH = 32
_METRICS: dict[str, Metric] = {"squared_l2": "l2", "cosine": "cosine"}


class Embedded(ABC):
    """Images as vectors. Published files make them, or encoders that are still in training."""

    def __init__(self, listing: Listing) -> None:
        self.listing = listing

    @abstractmethod
    def native(self, release: int) -> Vectors:
        """Embeddings [n,dim] by the release's own model."""

    @abstractmethod
    def along(self, releases: tuple[int, ...], *, int8: bool = False) -> Upgraded:
        """Vectors of the first release carried along the others."""

    @abstractmethod
    def metric(self, release: int) -> Metric:
        """The metric that the release's space is searched by."""


class Published(Embedded):
    """By ONNX files, published or drafted, as they run on a gateway or a device. Each set of
    vectors is computed when first asked for."""

    def __init__(
        self,
        listing: Listing,
        files: Files,
        manifests: Mapping[int, Manifest],
        threads: int | None = None,
        *,
        role: TextRole = "document",
    ) -> None:
        """`threads`: of each model; None: all cores. `role`: what texts are read as."""
        super().__init__(listing)
        self.files, self.manifests = files, dict(manifests)
        self._threads = threads or os.cpu_count() or 1
        self._role = role
        self._native: dict[int, Vectors] = {}
        self._side: dict[int, Vectors] = {}
        # What embedding with one release, or carrying along several, took.
        self.seconds: dict[tuple[int, ...], float] = {}

    def native(self, release: int) -> Vectors:
        """Raises NotFoundError for a release that is not there."""
        if release not in self._native:
            embed = self._embed(release)
            started = time.perf_counter()
            self._native[release] = embed()
            self.seconds[release,] = time.perf_counter() - started
        return self._native[release]

    def side(self, release: int) -> Vectors | None:
        """Side-information [n,side_dim] by the release's own encoder, None where it has none."""
        manifest = self.manifest(release)
        if manifest.side_encoder is None or isinstance(self.listing, TextListing):
            return None
        if release not in self._side:
            model = open_side_encoder(self.files, manifest, self._threads)
            self._side[release] = self._run(model.run, release)
        return self._side[release]

    def along(self, releases: tuple[int, ...], *, int8: bool = False) -> Upgraded:
        """Vectors of the first release carried along the others, with int8 files where there are.

        Raises NotFoundError where a release, or an upgrade on the way, does not exist.
        """
        for release in releases:
            self.manifest(release)
        route = route_along(self.manifests, releases)
        embedding = self.native(releases[0])
        if not route.steps:
            return Upgraded(embedding, None, None)
        side = self.side(releases[0]) if route.reads_side else None
        runner = open_route(self.files, route, self._threads, int8=int8)
        started = time.perf_counter()
        carried = runner.run(embedding, side)
        self.seconds[releases] = time.perf_counter() - started
        return carried

    def metric(self, release: int) -> Metric:
        """The metric that the release's space is searched by."""
        return _METRICS[self.manifest(release).embedder.metric]

    def manifest(self, release: int) -> Manifest:
        """Raises NotFoundError for a release that is not there."""
        if release not in self.manifests:
            raise NotFoundError(
                f"release {release} is not published; known: "
                f"{few(sorted(self.manifests, reverse=True)) or 'none'}"
            )
        return self.manifests[release]

    def _embed(self, release: int) -> Callable[[], Vectors]:
        """What embeds the listing, its model opened."""
        manifest = self.manifest(release)
        if not isinstance(self.listing, TextListing):
            run = open_embedder(self.files, manifest, self._threads).run
            return lambda: self._run(run, release)
        model, texts = open_text_encoder(self.files, manifest, self._threads), self.listing.texts
        return lambda: np.concatenate(
            [model.run(texts[at : at + BATCH], self._role) for at in range(0, len(texts), BATCH)]
        )

    def _run(self, run: Callable[[Images], Vectors], release: int) -> Vectors:
        frame = self.manifest(release).frame
        rows = np.arange(len(self.listing))
        parts = (self.listing.select(rows[at : at + BATCH]) for at in range(0, len(rows), BATCH))
        return np.concatenate([run(decode(part, *frame)) for part in parts])


def cell_vectors(
    cell: CellName, queries: Embedded, gallery: Embedded, *, int8: bool = False
) -> tuple[Vectors, Vectors]:
    """Query and gallery vectors of a cell, of one dimension: longer queries meet raw vectors by
    their first elements (BCT section 3.6).

    Raises InvalidInputError where raw vectors of two releases cannot even be compared.
    """
    held = gallery.along(cell.gallery, int8=int8).embedding
    return asking(cell, queries, held), held


def asking(cell: CellName, queries: Embedded, held: Vectors) -> Vectors:
    """Query vectors of a cell, as they meet those that its gallery holds; see `cell_vectors`."""
    own = queries.native(cell.query)
    if cell.raw and own.shape[1] > held.shape[1]:
        own = as_old(own, held, queries.metric(cell.query))
    if own.shape[1] != held.shape[1]:
        raise InvalidInputError(
            f"cell {cell}: dimensions {own.shape[1]} and {held.shape[1]} "
            "cannot be compared; carry the gallery along a route"
        )
    return own


def as_old(new: Vectors, old: Vectors, metric: Metric) -> Vectors:
    """The first elements of new vectors, as many as `old` [n,dim] has, renormalised where
    directions are compared.
    """
    first = new[:, : old.shape[1]]
    unit_space = np.allclose(np.linalg.norm(old, axis=1), 1, atol=1e-3)
    return unit(first).astype(np.float32) if metric == "cosine" or unit_space else first
