"""Clients that search without a pause, and judge every answer.

Release v embeds into its own orthogonal block, so a query that met a vector of another space would
find cosine 0 instead of itself at distance 0.
"""

import threading
import time
from collections import Counter

import grpc
import numpy as np
from numpy.typing import NDArray

from nobackfill.release.manifest import Manifest
from nobackfill.v1 import search_pb2
from tests.server.support import Client, embedding, images
from tests.support.blocks import png

# Items `i0`, `i1`, ... that must be there throughout.
ITEMS = 400


class Load:
    """Clients that search all the time, by image, and by the embeddings of old and new clients."""

    def __init__(self, address: str, clients: int, one: Manifest, two: Manifest) -> None:
        self.pictures = images(ITEMS)
        self.queries = [search_pb2.Query(image=png(picture)) for picture in self.pictures]
        self.by_old = [self._by(one, picture) for picture in self.pictures]
        self.by_both = [self._by(one, picture, two) for picture in self.pictures]
        self.failed: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.latencies: list[tuple[float, float]] = []
        self.answered: Counter[int] = Counter()
        self._address = address
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(clients)]

    def _by(self, one: Manifest, picture: NDArray[np.uint8], *more: Manifest) -> search_pb2.Query:
        vectors = [embedding(manifest, picture) for manifest in (one, *more)]
        return search_pb2.Query(embeddings=search_pb2.Embeddings(embeddings=vectors))

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        with Client(self._address) as client:
            while not self._stop.is_set():
                item = int(rng.integers(ITEMS))
                query = (self.queries, self.queries, self.by_old, self.by_both)[rng.integers(4)][
                    item
                ]
                began = time.monotonic()
                try:
                    answer = client.ask(query, k=5)
                except grpc.RpcError as error:
                    self.failed[f"{error.code().name}: {error.details()}"] += 1
                    continue
                self.latencies.append((began, time.monotonic() - began))
                self.answered[answer.release] += 1
                self._judge(item, answer)

    def _judge(self, item: int, answer: search_pb2.SearchResponse) -> None:
        names = [hit.id for hit in answer.hits]
        first = answer.hits[0]
        if names[0] != f"i{item}" or first.distance > 1e-4:
            self.wrong.append(f"asked i{item}, got {names[0]} at {first.distance}")
        if len(set(names)) != len(names) or len(names) != 5:
            self.wrong.append(f"asked 5 items, got {names}")

    def milliseconds(self, begin: float, end: float) -> tuple[float, float, float]:
        """p50, p99 and the largest latency of calls that began in an interval."""
        found = [1e3 * took for began, took in self.latencies if begin <= began < end]
        return float(np.percentile(found, 50)), float(np.percentile(found, 99)), max(found)
