"""Clients of several gateways, as an app's: each asks again what one gateway did not answer."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from nobackfill.errors import NobackfillError
from nobackfill.release.manifest import Manifest
from nobackfill.wire.gateway import Gateway
from tests.server.support import vector
from tests.support.blocks import png

# An item's distance to its own image.
_SELF = 1e-4


class Crowd:
    """Threads that search for items `i0`, `i1`, … by image, by an old client's embedding and by
    both releases', and put each other item again. Release v embeds into its own orthogonal block:
    a query that met a vector of another space would find cosine 0."""

    def __init__(
        self, addresses: Sequence[str], pictures: NDArray[np.uint8], manifests: Sequence[Manifest]
    ) -> None:
        self._address = ",".join(addresses)
        self._pictures = pictures
        self._manifests = manifests
        # One that searches another's vectors as they are embeds into its block.
        self._blocks = {
            one.space: next(
                (other for other in manifests if one.searches_space_directly(other.space)), one
            )
            for one in manifests
        }
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.answers: list[int] = []
        self.failures: list[str] = []

    @contextmanager
    def asking(self, threads: int = 2, pause_s: float = 0.02) -> Iterator["Crowd"]:
        """They ask to the end of the block, each with a pause after each answer."""
        crowd = [
            threading.Thread(target=self._ask, args=(seed, pause_s)) for seed in range(threads)
        ]
        for thread in crowd:
            thread.start()
        try:
            yield self
        finally:
            self._over.set()
            for thread in crowd:
                thread.join()

    def _ask(self, seed: int, pause_s: float) -> None:
        random = np.random.default_rng(seed)
        with Gateway(self._address, seconds=60) as gateway:
            while not self._over.wait(pause_s):
                number = int(random.integers(len(self._pictures)))
                try:
                    self._search(gateway, number, int(random.integers(4)))
                except (NobackfillError, AssertionError) as error:
                    with self._lock:
                        self.failures.append(f"i{number}: {type(error).__name__} {error}")

    def _search(self, gateway: Gateway, number: int, kind: int) -> None:
        picture = self._pictures[number]
        if kind == 3:
            assert gateway.put("g", {f"i{number}": png(picture)}) == {}
        asked = [] if kind in (0, 3) else self._manifests[: 1 if kind == 1 else None]
        embeddings = {one.space: vector(self._blocks[one.space], picture).tolist() for one in asked}
        answer = (
            gateway.search("g", embeddings=embeddings, k=5)
            if embeddings
            else gateway.search("g", image=png(picture), k=5)
        )
        found = [(hit.id, hit.distance) for hit in answer.hits]
        assert len(found) == 5, f"{len(found)} hits"
        assert found[0][0] == f"i{number}", f"{found[0]} of release {answer.release}"
        assert found[0][1] < _SELF, f"{found[0]} of release {answer.release}"
        with self._lock:
            self.answers.append(answer.release)
