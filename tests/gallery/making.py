"""Galleries to test with: specs, vectors, stores, and runners that stand for an upgrade's model."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import Metric, SpaceSpec
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.store import NewVectors
from nobackfill.vectors import Vectors

DIM = 12
SIDE_DIM = 5


def spec(
    release: int = 1, *, dim: int = DIM, metric: Metric = "squared_l2", unit: bool = False
) -> SpaceSpec:
    """The space of a release, with side-information."""
    return SpaceSpec(
        f"sp-{release:064x}", release, dim, metric, unit, f"ss-{release:064x}", SIDE_DIM
    )


def vectors(count: int, seed: int, dim: int = DIM) -> Vectors:
    """Clustered float32 [count, dim]."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((10, dim))
    points = centres[rng.integers(0, 10, count)] + 0.4 * rng.standard_normal((count, dim))
    return points.astype(np.float32)


def ids(count: int, start: int = 0) -> list[str]:
    return [f"item-{number}" for number in range(start, start + count)]


def filled(path: Path, count: int, *, side: bool = True, seed: int = 0) -> SqliteGallery:
    """A store of release 1 with items `item-0` … and labels from 1."""
    store = SqliteGallery.create(path, spec())
    put(store, ids(count), seed=seed, side=side)
    return store


def put(
    store: SqliteGallery, names: list[str], *, release: int = 1, seed: int, side: bool = True
) -> Labels:
    """Put items with vectors made from a seed; returns their labels."""
    embedding = vectors(len(names), seed)
    sides = vectors(len(names), seed + 1, SIDE_DIM) if side else None
    new = NewVectors(spec(release).space, embedding, sides)
    return store.put(names, [new]).labels


@dataclass(frozen=True)
class Carried:
    """What Linear gives."""

    embedding: Vectors
    side_information: Vectors | None
    uncertainty: NDArray[np.float32] | None


class Linear:
    """An upgrade: a matrix for the embedding, another for the side-information it reads."""

    def __init__(self, to_dim: int = DIM, seed: int = 7, *, reads_side: bool = True) -> None:
        rng = np.random.default_rng(seed)
        self.embedding = rng.standard_normal((DIM, to_dim)).astype(np.float32)
        self.side = rng.standard_normal((SIDE_DIM, SIDE_DIM)).astype(np.float32)
        self.calls = 0
        self.reads_side = reads_side

    def run(self, embedding: Vectors, side: Vectors | None) -> Carried:
        self.calls += 1
        doubt = np.abs(embedding[:, 0])
        return Carried(
            embedding @ self.embedding, None if side is None else side @ self.side, doubt
        )


def rows(store: SqliteGallery, space: str) -> dict[int, tuple[bytes, bytes | None, str]]:
    """All that a space's table holds, by label, bit for bit."""
    number = store.space(space).table_number
    with store.read_snapshot() as connection:
        found = connection.execute(f"SELECT label, embedding, side, origin FROM vectors_{number}")
        return {label: (embedding, side, origin) for label, embedding, side, origin in found}
