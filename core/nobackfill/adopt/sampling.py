"""Which items to embed again for fitting: spread over the space, not merely at random.

k-means on the old vectors, then from each cluster a share of its size, and one at least.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nobackfill.adopt.maps import normalised
from nobackfill.adopt.sources.source import Rows
from nobackfill.errors import InvalidInputError
from nobackfill.metrics.ranking import Ints
from nobackfill.vectors import Vectors

MOST_CLUSTERS = 256
# Vectors that the clusters are found from.
_FITTED_ON = 20_000
_ROUNDS = 10
_BLOCK = 20_000
# Rows whose distances to all chosen ones are held at once.
_NEAR_BLOCK = 2000


def sample(rows: Rows, count: int, seed: int = 0) -> list[str]:
    """Ids of `count` items in the order of `rows`. Raises InvalidInputError for too few items."""
    if not 1 <= count <= len(rows):
        raise InvalidInputError(f"expected -n from 1 to {len(rows)} (all items), got {count}")
    rng = np.random.default_rng(seed)
    cluster = clusters(rows.vectors, min(MOST_CLUSTERS, max(1, count // 8)), rng)
    sizes = np.bincount(cluster)
    chosen: list[Ints] = []
    for number, share in enumerate(_shares(sizes, count)):
        members = np.flatnonzero(cluster == number)
        chosen.append(rng.choice(members, share, replace=False))
    return [rows.ids[row] for row in sorted(np.concatenate(chosen).tolist())]


@dataclass(frozen=True)
class Covered:
    """How well a choice covers a source: the mean cosine distance from an item to the nearest
    chosen one, and to the nearest of as many at random."""

    chosen: float
    at_random: float

    @property
    def sentence(self) -> str:
        nearer = 1 - self.chosen / self.at_random if self.at_random > 0 else 0.0
        word = "nearer" if nearer >= 0 else "farther"
        return (
            f"an item lies {self.chosen:.3f} from the nearest of them on average (cosine "
            f"distance), {self.at_random:.3f} from the nearest of as many at random: "
            f"{abs(nearer):.1%} {word}; maps of three pairs of text models were measurably no "
            "better for it"
        )


def covered(rows: Rows, ids: Sequence[str], seed: int = 0) -> Covered:
    """Measured on 20,000 of the rows at most."""
    rng = np.random.default_rng(seed + 1)
    wanted = set(ids)
    chosen = np.flatnonzero(np.fromiter((one in wanted for one in rows.ids), bool, len(rows)))
    random = rng.choice(len(rows), len(chosen), replace=False)
    some = rng.permutation(len(rows))[:_FITTED_ON]

    def apart(others: Ints) -> float:
        near = normalised(rows.vectors[others]).T
        cosines = [
            (normalised(rows.vectors[some[first : first + _NEAR_BLOCK]]) @ near).max(1)
            for first in range(0, len(some), _NEAR_BLOCK)
        ]
        # Rounding leaves an item a little off itself, on either side.
        return max(0.0, 1 - float(np.concatenate(cosines).mean()))

    return Covered(apart(chosen), apart(random))


def clusters(vectors: Vectors, count: int, rng: np.random.Generator) -> Ints:
    """The nearest of `count` k-means centres for each row, numbered without gaps."""
    some = vectors
    if len(vectors) > _FITTED_ON:
        some = vectors[rng.choice(len(vectors), _FITTED_ON, replace=False)]
    centres = _far_apart(some, min(count, len(some)), rng)
    for _ in range(_ROUNDS):
        near = _nearest(some, centres)
        sums = np.zeros(centres.shape, np.float64)
        np.add.at(sums, near, some)
        sizes = np.bincount(near, minlength=len(centres))
        filled = sizes > 0
        centres[filled] = (sums[filled] / sizes[filled, None]).astype(np.float32)
    return np.unique(_nearest(vectors, centres), return_inverse=True)[1].astype(np.int64)


def _far_apart(vectors: Vectors, count: int, rng: np.random.Generator) -> Vectors:
    """The first centres of k-means++ (Arthur and Vassilvitskii 2007): each drawn in proportion to
    the squared distance from those before, so that no far group is missed."""
    chosen = [int(rng.integers(len(vectors)))]
    distance = np.full(len(vectors), np.inf)
    for _ in range(count - 1):
        apart = np.square(vectors - vectors[chosen[-1]]).sum(1, dtype=np.float64)
        distance = np.minimum(distance, apart)
        total = distance.sum()
        if total == 0:
            break
        chosen.append(int(rng.choice(len(vectors), p=distance / total)))
    return vectors[chosen].copy()


def _nearest(vectors: Vectors, centres: Vectors) -> Ints:
    half = np.square(centres).sum(1) / 2
    found = [
        (vectors[first : first + _BLOCK] @ centres.T - half).argmax(1)
        for first in range(0, len(vectors), _BLOCK)
    ]
    return np.concatenate(found).astype(np.int64)


def _shares(sizes: Ints, count: int) -> list[int]:
    """`count` divided in proportion to the sizes, one at least of each while there are enough."""
    exact = count * sizes / sizes.sum()
    shares = np.minimum(np.maximum(1, np.floor(exact)), sizes).astype(np.int64)
    # What is left goes where the most is missing; what is too much comes from where the most is.
    while (left := count - int(shares.sum())) != 0:
        owed = np.where(shares < sizes, exact - shares, -np.inf) if left > 0 else shares - exact
        owed = np.where(shares > 0, owed, -np.inf) if left < 0 else owed
        shares[int(np.argmax(owed))] += 1 if left > 0 else -1
    return [int(share) for share in shares]
