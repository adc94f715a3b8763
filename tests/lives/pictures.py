"""What items show, where it lies in each release's space, and what a search must find."""

from collections.abc import Mapping, Sequence

import numpy as np

from nobackfill.release.manifest import Manifest
from nobackfill.vectors import Vectors
from tests.support import blocks, graphs, releases

# Pictures below IMAGES are images; the others exist as vectors only.
IMAGES = 160
PICTURES = 2_600
# Distances are of unit vectors, squared: 2 between any two spaces.
TOLERANCE = 1e-4


class Pictures:
    """What items show: pixels of some, and of each its place [BLOCK] in any release's block."""

    def __init__(self) -> None:
        pixels = releases.images(IMAGES)
        self.pngs = [blocks.png(image) for image in pixels]
        scaled = pixels.reshape(IMAGES, -1).astype(np.float32) / np.float32(255)
        seen = (scaled - np.float32(0.4987)) @ graphs.projection(graphs.BLOCK, 1)
        made = np.random.default_rng(1).standard_normal((PICTURES - IMAGES, graphs.BLOCK))
        places = np.concatenate([seen, made]).astype(np.float32)
        self.places: Vectors = places / np.linalg.norm(places, axis=1, keepdims=True)

    def vector(self, manifest: Manifest, picture: int) -> Vectors:
        """What a release's embedder makes of a picture: float32 [DIM]."""
        eye = np.eye(graphs.BLOCK, dtype=np.float32)
        made: Vectors = self.places[picture] @ graphs.into_block(eye, releases.block_of(manifest))
        return made


def judge(
    hits: Sequence[tuple[str, float]],
    places: Mapping[str, int],
    pictures: Pictures,
    query: int,
    k: int,
    *,
    exact: bool,
) -> None:
    """Compare hits (id, distance) with a slow search over `places`: id -> picture.

    `exact`: all of the nearest must be there; else (a graph was searched) the nearest itself.
    """
    names = list(places)
    rows = pictures.places[[places[name] for name in names]] - pictures.places[query]
    distances = dict(zip(names, (rows**2).sum(axis=1).tolist(), strict=True))
    found = [name for name, _ in hits]
    assert len(set(found)) == len(found), f"an item twice: {found}"
    assert set(found) <= set(names), f"no such items: {sorted(set(found) - set(names))}"
    assert len(found) == min(k, len(names)), f"{len(found)} hits of {len(names)} items, k = {k}"
    for name, distance in hits:
        wrong = f"{name} at {distance}, is at {distances[name]}"
        # A gateway tells three digits.
        assert abs(distance - distances[name]) < TOLERANCE + 0.005 * distances[name], wrong
    nearest = sorted(distances.values())[: len(found)]
    wanted, got = (nearest, [distance for _, distance in hits]) if exact else (nearest[:1], [])
    if not exact and hits:
        got = [hits[0][1]]
    assert np.allclose(got, wanted, rtol=0.005, atol=TOLERANCE), f"got {got}, nearest are {wanted}"
