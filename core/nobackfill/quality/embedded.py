"""Hold one set of images or texts as vectors in the spaces of several releases."""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import numpy as np

from nobackfill.class_folders import ImageListing, Images, decode_listing
from nobackfill.errors import InvalidInputError, NotFoundError, join_few
from nobackfill.metrics.distances import Metric, to_unit_norm
from nobackfill.quality.cells import CellName
from nobackfill.quality.listing import TextListing
from nobackfill.release.manifest import Manifest, QueryAdapter, TextRole
from nobackfill.release.models import (
    Files,
    Upgraded,
    open_adapter,
    open_embedder,
    open_side_encoder,
)
from nobackfill.release.routes import open_route, route_along
from nobackfill.release.text_models import open_text_encoder
from nobackfill.vectors import Vectors

# Images that are decoded and embedded at a time: a ResNet50 at 224 x 224 takes about 10 MB for
# each.
BATCH = 32
_METRICS: dict[str, Metric] = {"squared_l2": "l2", "cosine": "cosine"}


class EmbeddedListing(ABC):
    """A listing as vectors, made by published files or by encoders in training."""

    def __init__(self, listing: ImageListing) -> None:
        self.listing = listing

    @abstractmethod
    def native_vectors(self, release: int) -> Vectors:
        """Return embeddings by the release's own model, float32 [n, dim].

        Vectors are in the order of the listing.

        Raises:
            NotFoundError: No such release.
            NoEncoderError: The release has no model for this kind of item, images or texts.
            ConfigurationError: The library for its tokenizer is not installed.
            VerificationError: A published file differs from its manifest, cannot be loaded, or
                returns no usable vectors.
            InvalidInputError: A file is no image.
            ValueError: The listing is empty.
        """

    @abstractmethod
    def vectors_along(self, releases: tuple[int, ...], *, int8: bool = False) -> Upgraded:
        """Return vectors of the first release, upgraded along the others.

        Args:
            releases: The source, then the route; at least one.
            int8: Use int8 files where they exist.

        Returns:
            The vectors, and side-information and uncertainty where the route has them.

        Raises:
            NotFoundError: A release or an upgrade of the route does not exist.
            NoEncoderError: The source has no model for this kind of item, images or texts.
            ConfigurationError: The library for its tokenizer is not installed.
            VerificationError: A published file differs from its manifest, cannot be loaded, or
                returns no usable vectors.
            InvalidInputError: The route reads side-information that the items lack, or a file is no
                image.
            ValueError: The listing is empty.
            IndexError: `releases` is empty.
        """

    @abstractmethod
    def metric(self, release: int) -> Metric:
        """Return the metric of a release's space: l2 or cosine.

        Raises:
            NotFoundError: No such release.
        """

    def adapted_queries(self, cell: CellName) -> Vectors | None:
        """Return the queries of a cell in the space of its gallery, by the release's query adapter.

        Returns:
            float32 [n, old dim]; None if the cell's queries pass no adapter. Encoders in training
            have none.
        """
        return None

    def search_metric(self, cell: CellName) -> Metric:
        """Return the metric by which queries of a cell search its gallery: l2 or cosine.

        It is the one of the query's space. Queries that pass an adapter use the one of the old
        space.

        Raises:
            NotFoundError: A release of the cell does not exist.
        """
        return self.metric(cell.query_release)


class PublishedListing(EmbeddedListing):
    """A listing as vectors by ONNX files, published or drafted, as gateways and devices run them.

    Each set of vectors is computed on first use.

    Attributes:
        files: The publication folder or the draft's files.
        manifests: The releases by number.
        embedding_seconds: Time of embedding with one release, or of upgrading along several.
    """

    def __init__(
        self,
        listing: ImageListing,
        files: Files,
        manifests: Mapping[int, Manifest],
        threads: int | None = None,
        *,
        role: TextRole = "document",
    ) -> None:
        """Choose the files; nothing is read yet.

        Args:
            listing: The images or texts.
            files: The publication folder or the draft's files.
            manifests: The releases by number; they are copied into `manifests`, which callers may
                change.
            threads: Threads of each model; None or 0: all cores.
            role: Whether texts are embedded as queries or as documents; images have no role.
        """
        super().__init__(listing)
        self.files, self.manifests = files, dict(manifests)
        self._threads = threads or os.cpu_count() or 1
        self._role = role
        self._native: dict[int, Vectors] = {}
        self._side: dict[int, Vectors] = {}
        self.embedding_seconds: dict[tuple[int, ...], float] = {}

    def native_vectors(self, release: int) -> Vectors:
        """Return embeddings by the release's own model, float32 [n, dim].

        They are computed on first use, and their time is recorded in `embedding_seconds`. Later
        calls return the same array, which must not be changed. After an error the next call tries
        again. Call it from one thread at a time.

        Raises:
            NotFoundError: No such release.
            NoEncoderError: The release has no model for this kind of item, images or texts.
            ConfigurationError: The library for its tokenizer is not installed.
            VerificationError: A file differs from the manifest, cannot be loaded, or returns no
                usable vectors.
            InvalidInputError: A file is no image.
            ValueError: The listing is empty.
        """
        if release not in self._native:
            embed = self._embed(release)
            begin = time.perf_counter()
            self._native[release] = embed()
            self.embedding_seconds[release,] = time.perf_counter() - begin
        return self._native[release]

    def side_information(self, release: int) -> Vectors | None:
        """Return side-information by the release's own encoder.

        It is float32 [n, side_dim], and computed on first use; later calls return the same array,
        which must not be changed. Its time is not recorded.

        Returns:
            The side-information in the listing's order; None for texts, or if the release has none.

        Raises:
            NotFoundError: No such release.
            NoEncoderError: The release embeds no images.
            VerificationError: The file differs from the manifest, cannot be loaded, or returns no
                usable vectors.
            InvalidInputError: A file is no image.
            ValueError: The listing is empty.
        """
        manifest = self.release_manifest(release)
        if manifest.side_encoder is None or isinstance(self.listing, TextListing):
            return None
        if release not in self._side:
            model = open_side_encoder(self.files, manifest, self._threads)
            self._side[release] = self._run(model.run, release)
        return self._side[release]

    def vectors_along(self, releases: tuple[int, ...], *, int8: bool = False) -> Upgraded:
        """Return vectors of the first release, upgraded along the others.

        The models of a route are opened and run at each call; only the source's own vectors are
        computed once. The time of the upgrade is recorded in `embedding_seconds`.

        Args:
            releases: The source, then the route; at least one. The source alone gives its own
                vectors, without an upgrade; do not change that array.
            int8: Use int8 files where they exist.

        Returns:
            Embedding float32 [n, dim], and side-information and uncertainty where the route has
            them.

        Raises:
            NotFoundError: A release or an upgrade of the route does not exist.
            NoEncoderError: The source has no model for this kind of item, images or texts.
            ConfigurationError: The library for its tokenizer is not installed.
            VerificationError: A file differs from its manifest, cannot be loaded, or returns no
                usable vectors.
            InvalidInputError: The route reads side-information that the items lack, or a file is no
                image.
            ValueError: The listing is empty.
            IndexError: `releases` is empty.
        """
        for release in releases:
            self.release_manifest(release)
        route = route_along(self.manifests, releases)
        embedding = self.native_vectors(releases[0])
        if not route.steps:
            return Upgraded(embedding, None, None)
        side = self.side_information(releases[0]) if route.reads_side else None
        runner = open_route(self.files, route, self._threads, int8=int8)
        started = time.perf_counter()
        carried = runner.run(embedding, side)
        self.embedding_seconds[releases] = time.perf_counter() - started
        return carried

    def metric(self, release: int) -> Metric:
        """Return the metric of a release's space: l2 or cosine.

        Raises:
            NotFoundError: No such release.
        """
        return _METRICS[self.release_manifest(release).embedder.metric]

    def query_adapter(self, cell: CellName) -> QueryAdapter | None:
        """Return the query adapter that queries of a cell pass; None without one.

        Raises:
            NotFoundError: A release of the cell does not exist.
        """
        if not cell.searches_unmigrated:
            return None
        return self.release_manifest(cell.query_release).adapter_to(
            self.release_manifest(cell.gallery_releases[0]).space
        )

    def adapted_queries(self, cell: CellName) -> Vectors | None:
        """Return the queries of a cell in the space of its gallery, by the release's query adapter.

        The adapter is opened and run at each call; only the embeddings are computed once.

        Returns:
            float32 [n, old dim]; None if the cell's queries pass no adapter.

        Raises:
            NotFoundError: A release of the cell does not exist.
            NoEncoderError: The release has no model for this kind of item, images or texts.
            ConfigurationError: The library for its tokenizer is not installed.
            VerificationError: A file differs from the manifest, cannot be loaded, or returns no
                usable vectors.
            InvalidInputError: A file is no image.
            ValueError: The listing is empty.
        """
        adapter = self.query_adapter(cell)
        if adapter is None:
            return None
        model = open_adapter(
            self.files, self.release_manifest(cell.query_release), adapter, self._threads
        )
        return model.run(self.native_vectors(cell.query_release))

    def search_metric(self, cell: CellName) -> Metric:
        """Return the metric by which queries of a cell search its gallery: l2 or cosine.

        It is the one of the query's space. Queries that pass an adapter use the one of the old
        space.

        Raises:
            NotFoundError: A release of the cell does not exist.
        """
        return self.metric(
            cell.query_release if self.query_adapter(cell) is None else cell.gallery_releases[0]
        )

    def release_manifest(self, release: int) -> Manifest:
        """Return the manifest of a release. Changes of `manifests` count at the next call.

        Raises:
            NotFoundError: No such release.
        """
        if release not in self.manifests:
            raise NotFoundError(
                f"release {release} is not published; the publication has "
                f"{join_few(sorted(self.manifests, reverse=True)) or 'no release'}"
            )
        return self.manifests[release]

    def _embed(self, release: int) -> Callable[[], Vectors]:
        """Open the model, and return a function that embeds the listing."""
        manifest = self.release_manifest(release)
        if not isinstance(self.listing, TextListing):
            run = open_embedder(self.files, manifest, self._threads).run
            return lambda: self._run(run, release)
        model, texts = open_text_encoder(self.files, manifest, self._threads), self.listing.texts
        return lambda: np.concatenate(
            [model.run(texts[at : at + BATCH], self._role) for at in range(0, len(texts), BATCH)]
        )

    def _run(self, run: Callable[[Images], Vectors], release: int) -> Vectors:
        frame = self.release_manifest(release).frame
        rows = np.arange(len(self.listing))
        parts = (self.listing.select(rows[at : at + BATCH]) for at in range(0, len(rows), BATCH))
        return np.concatenate([run(decode_listing(part, *frame)) for part in parts])


def cell_vectors(
    cell: CellName, queries: EmbeddedListing, gallery: EmbeddedListing, *, int8: bool = False
) -> tuple[Vectors, Vectors]:
    """Return query and gallery vectors of a cell, of the same dimension.

    Queries search raw vectors through the release's query adapter, if there is one. Otherwise
    longer queries search raw vectors with their first elements (BCT section 3.6).

    The arrays may be those that the listings store: do not change them.

    Args:
        cell: The cell.
        queries: The queries.
        gallery: The gallery.
        int8: Use int8 files where they exist.

    Returns:
        Queries float32 [q, dim] and gallery vectors float32 [n, dim].

    Raises:
        InvalidInputError: Raw vectors of two releases cannot be compared, the route reads
            side-information that the items lack, or a file is no image.
        ValueError: The first elements of a query are all zero where directions are compared, or a
            listing is empty.
        NotFoundError: A release or an upgrade of the cell does not exist.
        VerificationError: A file differs from its manifest, cannot be loaded, or returns no usable
            vectors.
        NoEncoderError: A release has no model for this kind of item, images or texts.
        ConfigurationError: The library for a tokenizer is not installed.
    """
    vectors = gallery.vectors_along(cell.gallery_releases, int8=int8).embedding
    return query_vectors(cell, queries, vectors), vectors


def query_vectors(cell: CellName, queries: EmbeddedListing, vectors: Vectors) -> Vectors:
    """Return the query vectors of a cell for given gallery vectors, float32 [q, dim].

    Queries search raw vectors through the release's query adapter, if there is one. Otherwise
    longer queries search raw vectors with their first elements (BCT section 3.6).

    The result may be the array that `queries` stores: do not change it.

    Args:
        cell: The cell.
        queries: The queries.
        vectors: The gallery's vectors, float32 [n, dim].

    Raises:
        InvalidInputError: The vectors have another dimension than the queries, or a file is no
            image.
        ValueError: The first elements of a query are all zero where directions are compared, or
            there are no queries.
        NotFoundError: The query's release does not exist.
        VerificationError: A file differs from its manifest, cannot be loaded, or returns no usable
            vectors.
        NoEncoderError: The query's release has no model for this kind of item, images or texts.
        ConfigurationError: The library for a tokenizer is not installed.
    """
    adapted = queries.adapted_queries(cell)
    own = queries.native_vectors(cell.query_release) if adapted is None else adapted
    if cell.searches_unmigrated and own.shape[1] > vectors.shape[1]:
        own = cut_to_old_dim(own, vectors, queries.metric(cell.query_release))
    if own.shape[1] != vectors.shape[1]:
        raise InvalidInputError(
            f"cell {cell}: queries and gallery vectors of the dimensions {own.shape[1]} and "
            f"{vectors.shape[1]} cannot be compared; measure a cell with an upgrade, such as 2/1>2"
        )
    return own


def cut_to_old_dim(new: Vectors, old: Vectors, metric: Metric) -> Vectors:
    """Return the first elements of new vectors, as many as the old ones have.

    They are normalised again where directions are compared: with cosine, or if all old vectors have
    norm 1. Without old vectors they are normalised, too.

    Args:
        new: [q, new dim].
        old: [n, old dim].
        metric: How distances are computed.

    Returns:
        float32 [q, old dim]. Where nothing is normalised, it is a view of `new` in its dtype.
        Vectors that are shorter than the old ones keep their length.

    Raises:
        ValueError: A row's first elements are all zero, and directions are compared.
    """
    first = new[:, : old.shape[1]]
    unit_space = np.allclose(np.linalg.norm(old, axis=1), 1, atol=1e-3)
    return to_unit_norm(first).astype(np.float32) if metric == "cosine" or unit_space else first
