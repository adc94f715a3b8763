"""Vectors and images to measure with: seeded, the same anywhere.

A population of things with hidden traits, in clusters; each space sees the traits through a random
network of its own, with noise of its own. So vectors lie on a curved surface of low dimension, as
real embeddings do, and an old and a new space agree about most neighbours but not all.
"""

import io
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from nobackfill.vectors import Vectors

TRAITS = 32
CLUSTERS = 100
DIM = 128
SIDE_DIM = 128
POPULATION = 12345
_CHUNK = 1 << 16


@dataclass(frozen=True)
class ItemVectors:
    """The same things in the old and in the new space, and their side-information: [n, 128]."""

    old: Vectors
    side: Vectors
    new: Vectors


def draw_items(count: int, seed: int = 0) -> ItemVectors:
    """`count` things of one population; other seeds draw other things of the same one."""
    parts = [_some(min(_CHUNK, count - start), [seed, start]) for start in range(0, count, _CHUNK)]
    columns = zip(*parts, strict=True)
    return ItemVectors(*(np.concatenate(column) for column in columns))


def _some(count: int, seed: list[int]) -> tuple[Vectors, Vectors, Vectors]:
    rng = np.random.default_rng(seed)
    population = np.random.default_rng(POPULATION)
    traits = _traits(population, rng, count)
    # An old model has not learnt every trait.
    seen = (0.85, 1.0, 1.0)
    return (
        _look(population, rng, traits, seen[0], DIM, unit=True),
        _look(population, rng, traits, seen[1], SIDE_DIM, unit=False),
        _look(population, rng, traits, seen[2], DIM, unit=True),
    )


def _traits(population: np.random.Generator, rng: np.random.Generator, count: int) -> Vectors:
    """Of `count` things, [count, TRAITS]; the first that is drawn from `population`."""
    centres = population.standard_normal((CLUSTERS, TRAITS), np.float32)
    spread = population.uniform(0.3, 0.8, (CLUSTERS, 1)).astype(np.float32)
    of = rng.integers(0, CLUSTERS, count)
    traits: Vectors = centres[of] + spread[of] * rng.standard_normal((count, TRAITS), np.float32)
    return traits


def _look(
    population: np.random.Generator,
    rng: np.random.Generator,
    traits: Vectors,
    seen: float,
    dim: int,
    *,
    unit: bool,
) -> Vectors:
    used = round(seen * TRAITS)
    first = population.standard_normal((used, 4 * dim), np.float32) / np.float32(np.sqrt(used))
    second = population.standard_normal((4 * dim, dim), np.float32) / np.float32(np.sqrt(4 * dim))
    vectors = np.tanh(traits[:, :used] @ first) @ second
    vectors += np.float32(0.05) * rng.standard_normal(vectors.shape, np.float32)
    if unit:
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.ascontiguousarray(vectors, np.float32)


def draw_images(count: int, size: int, seed: int = 0) -> NDArray[np.uint8]:
    """Smooth pictures of things of the same population, uint8 [count, size, size, 3]: whatever
    embeds them, those of one cluster are alike. Other seeds draw other things."""
    population, rng = np.random.default_rng(POPULATION), np.random.default_rng(seed)
    traits = _traits(population, rng, count)
    first = population.standard_normal((TRAITS, 8 * 8 * 3), np.float32) / np.sqrt(TRAITS)
    coarse = (255 / (1 + np.exp(-2 * traits @ first))).astype(np.uint8).reshape(-1, 8, 8, 3)
    return np.stack([np.asarray(Image.fromarray(c).resize((size, size))) for c in coarse])


def draw_jpegs(count: int, size: int, seed: int = 0) -> list[bytes]:
    """The same as JPEG files."""
    encoded = []
    for pixels in draw_images(count, size, seed):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=90)
        encoded.append(file.getvalue())
    return encoded
