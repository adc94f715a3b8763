"""A few of the queries that were asked of a space: what its index is tuned on."""

import random
import threading

import numpy as np

from nobackfill.vectors import Vectors

# Queries that are kept.
SIZE = 64
# Once so many are kept, one in so many takes another's place: the last thousand count.
_SHARE = 16


class Asked:
    """Queries at random, later ones likelier. In memory only: what people look for is written
    nowhere. Safe to use from many threads."""

    def __init__(self, dim: int) -> None:
        self._lock = threading.Lock()
        self._vectors = np.empty((0, dim), np.float32)
        self._seen = self._kept = 0

    @property
    def seen(self) -> int:
        """How many queries came by."""
        return self._seen

    def see(self, queries: Vectors) -> None:
        """Queries [q, dim] that were checked and answered."""
        self.keep(queries[self.chosen(len(queries))])

    def chosen(self, count: int) -> list[int]:
        """Count queries that were checked and answered; which of them are to be kept."""
        # No secret hangs on it: which queries an index is tuned on. Two threads may count as one.
        seen, self._seen = self._seen, self._seen + count
        return [
            number
            for number in range(count)
            if seen + number < SIZE or random.random() * _SHARE < 1  # noqa: S311
        ]

    def keep(self, queries: Vectors) -> None:
        """Those of them [q, dim]."""
        with self._lock:
            if not len(self._vectors):
                self._vectors = np.empty((SIZE, queries.shape[1]), np.float32)
            for query in queries:
                filled = self._kept >= SIZE
                self._vectors[random.randrange(SIZE) if filled else self._kept] = query  # noqa: S311
                self._kept += not filled

    def sample(self) -> Vectors:
        """Those that are kept, a copy, float32 [at most SIZE, dim]."""
        with self._lock:
            return self._vectors[: self._kept].copy()
