"""Ten swaps and rollbacks under load, mixed rollouts included: no failed call, no mixed space.

Release v embeds into its own orthogonal block, so a query that met a vector of another space would
find cosine 0 instead of itself at distance 0.
"""

import shutil
import threading
import time
from collections import Counter
from pathlib import Path

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from nobackfill.v1 import release_pb2, search_pb2
from release.manifest import Manifest
from tests.server.conftest import Stages, make_stages, publish_stage
from tests.server.process import serving, triton_venv
from tests.server.support import Client, embedding, images
from tests.support.blocks import manifest, png

ITEMS = 400


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """Releases 1 and 2."""
    return make_stages(tmp_path_factory.mktemp("published"), 2)


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


def swap(
    repo: Path, stages: Stages, address: str, swaps: int, *, clients: int, seconds: float
) -> Load:
    """Fill, load, swap there and back again; the load that was on meanwhile."""
    with Client(address) as client:
        client.create()
        for i in range(0, ITEMS, 50):
            client.put_images(images(ITEMS)[i : i + 50], first=i)
        publish_stage(repo, stages[2])
        one, two = manifest(repo, 1), manifest(repo, 2)
        with Load(address, clients, one, two) as load:
            time.sleep(seconds)
            steady = (time.monotonic() - seconds, time.monotonic())
            began = time.monotonic()
            for number in range(swaps):
                rollout = ("CUTOVER", "DUAL")[number % 2]
                assert client.activate(2, rollout).phase == release_pb2.PHASE_DONE
                time.sleep(seconds / 4)
                if number + 1 < swaps:
                    assert client.rollback(confirm=True).lost_items == 0
                    time.sleep(seconds / 4)
            ended = time.monotonic()
    p50, p99, most = load.milliseconds(*steady)
    print(f"steady: p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {most:.1f} ms")
    p50, p99, most = load.milliseconds(began, ended)
    print(f"{swaps} swaps: p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {most:.1f} ms")
    print(f"{len(load.latencies)} answers, {sum(load.failed.values())} failed, "
          f"{len(load.wrong)} wrong, by release {dict(load.answered)}")  # fmt: skip
    return load


def test_two_swaps_under_load(stages: Stages, tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    shutil.copytree(stages[1], repo)
    with serving(repo, tmp_path / "data", "--triton=in-process") as served:
        load = swap(repo, stages, served.address, 2, clients=4, seconds=1)
    assert not load.failed
    assert not load.wrong
    assert set(load.answered) == {1, 2}


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_ten_swaps_under_load(stages: Stages, tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    shutil.copytree(stages[1], repo)
    venv = triton_venv()
    with serving(repo, tmp_path / "data", *([f"--triton-venv={venv}"] if venv else [])) as served:
        load = swap(repo, stages, served.address, 10, clients=8, seconds=8)
    assert not load.failed
    assert not load.wrong
    assert len(load.latencies) >= 10_000
