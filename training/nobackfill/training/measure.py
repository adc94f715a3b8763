"""Cells of the compatibility matrix, measured on published (or drafted) ONNX files.

A cell is written QUERY/GALLERY: `2/2`, `2/1` (vectors of release 1 as they are), `2/1>2` (carried
along the route 1 -> 2). Models run through release/models.py, as they do on a gateway or a device.
"""

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from nobackfill.errors import ConfigurationError, InvalidInputError, NotFoundError, few
from nobackfill.gallery.search import exact, hnsw
from nobackfill.gallery.search.index import Index, Neighbours
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.metrics.ranking import Relevance, rank_neighbours
from nobackfill.metrics.retrieval import PerQuery, average_precision, cmc
from nobackfill.release.manifest import Manifest
from nobackfill.release.models import Files, Upgraded
from nobackfill.release.routes import every_route, open_route, route_along
from nobackfill.training.data.folders import Images, Listing, decode
from nobackfill.training.networks.published import of_manifest
from nobackfill.vectors import Vectors

# Answers asked of the index for mAP; relevant items beyond count as not found.
DEPTH = 1000
# Answers asked for CMC, as a served search asks: a deeper search of a graph finds more.
SERVED = 20
# Measured of each source: all of them where fewer than six releases lie between.
MOST_ROUTES = 32
_QUERIES = 256
_CELL = re.compile(r"^(\d+)/(\d+(?:>\d+)*)\Z")


@dataclass(frozen=True)
class CellName:
    """`query`'s model against the gallery of the first release, carried along the others."""

    query: int
    gallery: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.query}/{'>'.join(map(str, self.gallery))}"


def parse_cell(text: str) -> CellName:
    """Read `2/1>2`. Raises ConfigurationError for anything else."""
    match = _CELL.match(text.strip())
    if match is None:
        raise ConfigurationError(
            f"expected a cell like 2/2, 2/1 or 2/1>2 (query/gallery), got {text!r}"
        )
    return CellName(int(match[1]), tuple(int(part) for part in match[2].split(">")))


class Embedded:
    """One set of images in the spaces of several releases, each computed when first asked for."""

    def __init__(self, listing: Listing, files: Files, manifests: Mapping[int, Manifest]) -> None:
        self.listing, self.files, self.manifests = listing, files, dict(manifests)
        self._native: dict[int, tuple[Vectors, Vectors | None]] = {}
        self._images: dict[int, Images] = {}

    def native(self, release: int) -> tuple[Vectors, Vectors | None]:
        """Embeddings [n,dim] and side-information [n,side_dim] by the release's own models."""
        if release not in self._native:
            embedder, side = of_manifest(self.files, self.manifest(release))
            size = embedder.image_size
            if size not in self._images:
                self._images[size] = decode(self.listing, size)
            images = self._images[size]
            self._native[release] = embedder.run(images), side.run(images) if side else None
        return self._native[release]

    def along(self, releases: tuple[int, ...], *, int8: bool = False) -> Upgraded:
        """Vectors of the first release carried along the others.

        Raises NotFoundError where an upgrade on the way does not exist.
        """
        embedding, side = self.native(releases[0])
        if len(releases) == 1:
            return Upgraded(embedding, side, None)
        for release in releases:
            self.manifest(release)
        route = route_along(self.manifests, releases)
        return open_route(self.files, route, os.cpu_count() or 1, int8=int8).run(embedding, side)

    def manifest(self, release: int) -> Manifest:
        """Raises NotFoundError for a release that is not there."""
        if release not in self.manifests:
            raise NotFoundError(
                f"release {release} is not published; known: "
                f"{few(sorted(self.manifests, reverse=True)) or 'none'}"
            )
        return self.manifests[release]


def cell_vectors(
    cell: CellName, queries: Embedded, gallery: Embedded, *, int8: bool = False
) -> tuple[Vectors, Vectors]:
    """Query and gallery vectors of a cell, of one dimension.

    Raises InvalidInputError where raw vectors of two releases cannot even be compared.
    """
    query_vectors, _ = queries.native(cell.query)
    gallery_vectors = gallery.along(cell.gallery, int8=int8).embedding
    if query_vectors.shape[1] != gallery_vectors.shape[1]:
        raise InvalidInputError(
            f"cell {cell}: dimensions {query_vectors.shape[1]} and {gallery_vectors.shape[1]} "
            "cannot be compared; carry the gallery along a route"
        )
    return query_vectors, gallery_vectors


def served_cells(
    new: Manifest, manifests: Mapping[int, Manifest], withdrawn: frozenset[int] = frozenset()
) -> Iterator[CellName]:
    """The ways in which `new` would answer from older vectors: direct search, and of each release
    the MOST_ROUTES shortest routes. Twenty releases that are fully linked have a quarter of a
    million; what is not measured is planned by the product of its parts.

    No route is planned through a withdrawn release, but a gallery may still live in its space.
    """
    usable = {n: manifest for n, manifest in manifests.items() if n not in withdrawn}
    for number, old in sorted(manifests.items()):
        if number >= new.release:
            continue
        if old.space in new.searches_directly:
            yield CellName(new.release, (number,))
        from_there = usable | {number: old}
        routes = every_route(from_there, number, new.release, old.side_space)
        for route in itertools.islice(routes, MOST_ROUTES):
            yield CellName(new.release, route.releases)


@dataclass(frozen=True)
class Measured:
    """A cell's figures by query (shares 0..1, NaN where a query has no answer in the gallery)."""

    cmc1: PerQuery
    cmc5: PerQuery
    map: PerQuery
    # Gallery positions [q,k] and distances [q,k], nearest first, -1 and infinity for none.
    neighbours: np.ndarray
    distances: np.ndarray


def search_cell(
    cell: CellName,
    queries: Embedded,
    gallery: Embedded,
    relevance: Relevance,
    *,
    engine: str = "hnsw",
    int8: bool = False,
) -> Measured:
    """Measure a cell through a real index of the gallery room ("hnsw" or "exact")."""
    query_vectors, gallery_vectors = cell_vectors(cell, queries, gallery, int8=int8)
    spec = SpaceSpec.of(queries.manifest(cell.query))
    labels = np.arange(len(gallery_vectors))
    if engine == "hnsw":
        # One thread: the same graph, and so the same verdict, each time.
        index: Index = hnsw.build(spec, labels, gallery_vectors)
    else:
        index = exact.ExactIndex(spec, labels, gallery_vectors)
    found = _search(index, query_vectors, DEPTH)
    first = rank_neighbours(_search(index, query_vectors, SERVED).labels, relevance)
    return Measured(
        cmc(first, 1),
        cmc(first, 5),
        average_precision(rank_neighbours(found.labels, relevance)),
        found.labels,
        found.distances,
    )


def _search(index: Index, queries: Vectors, k: int) -> Neighbours:
    """The `k` nearest, some queries at a time: each brings k candidate vectors into memory."""
    k = min(k, len(index.labels))
    parts = [
        index.search(queries[start : start + _QUERIES], k)
        for start in range(0, len(queries), _QUERIES)
    ]
    return Neighbours(
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.distances for part in parts]),
    )
