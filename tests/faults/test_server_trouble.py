"""The gateway in trouble: Triton killed and stopped 20 times, floods, fuzz, stuck clients, SIGTERM.

Figures are printed; times are compared within one run, never with a clock.
"""

import os
import random
import shutil
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from nobackfill.errors import CancelledError, NobackfillError, UnavailableError
from nobackfill.release.manifest import Manifest
from nobackfill.v1 import release_pb2, search_pb2
from tests.server.conftest import Stages, make_stages, publish_stage
from tests.server.process import Served, serving, triton_venv
from tests.server.support import Client, embedding, ids, images
from tests.server.test_rules import METHODS
from tests.server.test_triton import triton_pid, wait_healed
from tests.support.blocks import manifest, png
from tests.support.processes import children

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

OURS = [method for method in METHODS if method.startswith("/nobackfill")]


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """Release 1."""
    return make_stages(tmp_path_factory.mktemp("published"), 1)


@pytest.fixture(scope="module")
def one(stages: Stages) -> Manifest:
    return manifest(stages[1], 1)


@pytest.fixture
def served(stages: Stages, tmp_path: Path) -> Iterator[Served]:
    """A gateway without Triton, 50 items in gallery g."""
    shutil.copytree(stages[1], tmp_path / "repo")
    with (
        serving(tmp_path / "repo", tmp_path / "data", "--triton=in-process") as served,
        Client(served.address) as client,
    ):
        client.create_gallery("g")
        client.put_images(images(50))
        yield served


def latencies(address: str, seconds: float, one: Manifest) -> list[float]:
    """A good client's search times in ms; it fails where an answer is missing or wrong."""
    found = []
    end = time.monotonic() + seconds
    with Client(address) as client:
        while time.monotonic() < end:
            item = random.randrange(50)
            began = time.monotonic()
            answer = client.find_by(embedding(one, images(50)[item]))
            found.append(1e3 * (time.monotonic() - began))
            assert ids(answer)[0] == f"i{item}"
    return found


def p99(found: list[float]) -> float:
    return float(np.percentile(found, 99))


@pytest.mark.skipif(triton_venv() is None, reason="no Triton here: run make setup")
def test_triton_killed_and_stopped_twenty_times(
    stages: Stages, one: Manifest, tmp_path: Path
) -> None:
    shutil.copytree(stages[1], tmp_path / "repo")
    refused: Counter[type[NobackfillError]] = Counter()
    by_vector = Counter[str]()
    detected, healed, stop = [], [], threading.Event()
    with (
        serving(tmp_path / "repo", tmp_path / "data", f"--triton-venv={triton_venv()}") as served,
        Client(served.address) as client,
    ):
        client.create_gallery("g")
        client.put_images(images(50))

        def by_image() -> None:
            with Client(served.address) as own:
                while not stop.is_set():
                    item = random.randrange(50)
                    try:
                        answer = own.find(images(50)[item])
                    except NobackfillError as error:
                        refused[type(error)] += 1
                        time.sleep(0.01)
                    else:
                        assert ids(answer)[0] == f"i{item}"

        def by_embedding() -> None:
            while not stop.is_set():
                latencies(served.address, 1, one)
                by_vector["seconds"] += 1

        threads = [threading.Thread(target=t) for t in (by_image, by_image, by_embedding)]
        for thread in threads:
            thread.start()
        for number in range(20):
            wait_healed(client)
            os.kill(triton_pid(served), (signal.SIGKILL, signal.SIGSTOP)[number % 2])
            began = time.monotonic()
            while client_up(served.address):
                time.sleep(0.01)
            detected.append(time.monotonic() - began)
            wait_healed(client)
            healed.append(time.monotonic() - began)
        stop.set()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "a call hangs"
        below = children(served.process.pid)
        assert sum("tritonserver" in exe(pid) for pid in below) == 1
    for what, first in (("killed", 0), ("stopped", 1)):
        print(f"{what} 10 times: detected after {max(detected[first::2]):.2f} s at most, healed "
              f"after {max(healed[first::2]):.2f} s at most")  # fmt: skip
    print(f"refused meanwhile: {dict(refused)}")
    assert set(refused) <= {UnavailableError}
    assert by_vector["seconds"] > 20


def exe(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return ""


def client_up(address: str) -> bool:
    """Whether images can be searched just now."""
    with Client(address) as client:
        try:
            client.find(images(1)[0])
        except NobackfillError:
            return False
        return True


def test_fuzz_bytes(served: Served, one: Manifest) -> None:
    """Random and mutated requests to every call: refused, never INTERNAL or UNKNOWN."""
    rng = random.Random(1)
    good = search_pb2.SearchRequest(gallery="g", query=search_pb2.Query(image=png(images(1)[0])))
    seed = good.SerializeToString()
    codes: Counter[grpc.StatusCode] = Counter()
    with Client(served.address) as client:
        for _ in range(3000):
            data = bytearray(seed if rng.random() < 0.5 else rng.randbytes(rng.randrange(300)))
            for _ in range(rng.randrange(8)):
                if data:
                    data[rng.randrange(len(data))] = rng.randrange(256)
            method = rng.choice(OURS)
            # A request to search gallery g is also one to delete it.
            if method.rpartition("/")[2].startswith(("Delete", "Activate", "Retire", "Watch")):
                continue
            call = client.raw.channel.stream_stream(
                method, request_serializer=bytes, response_deserializer=bytes
            )
            answers = call(iter([bytes(data)]), timeout=20)
            try:
                for _ in answers:
                    pass
            except grpc.RpcError as error:
                codes[error.code()] += 1
    print({code.name: count for code, count in codes.items()})
    assert not codes[grpc.StatusCode.INTERNAL]
    assert not codes[grpc.StatusCode.UNKNOWN]
    assert latencies(served.address, 1, one)


def test_stuck_clients_hurt_nobody(served: Served, one: Manifest) -> None:
    """100 connections that say nothing or half a preface, 10 streams that are never read."""
    before = latencies(served.address, 5, one)
    host, port = served.address.split(":")
    threads_before = len(list(Path(f"/proc/{served.process.pid}/task").iterdir()))
    silent = [socket.create_connection((host, int(port))) for _ in range(100)]
    for connection in silent[::2]:
        connection.sendall(b"PRI * HTTP/2.0\r\n")
    with Client(served.address) as slow:
        for _ in range(10):
            slow.raw.releases.WatchReleases(release_pb2.WatchReleasesRequest())
        during = latencies(served.address, 5, one)
    for connection in silent:
        connection.close()
    print(f"p99 alone {p99(before):.1f} ms, beside stuck clients {p99(during):.1f} ms")
    threads = len(list(Path(f"/proc/{served.process.pid}/task").iterdir()))
    assert threads <= threads_before + 64
    assert latencies(served.address, 1, one)


def test_a_flood_is_shed(served: Served, one: Manifest) -> None:
    """Far more than fits: answered or shed, nothing else, and normal again right after."""
    queries = [search_pb2.Query(image=png(image)) for image in images(50)]
    request = search_pb2.SearchBatchRequest(gallery="g", queries=queries)
    codes: Counter[grpc.StatusCode] = Counter()
    with Client(served.address) as client:
        end = time.monotonic() + 8
        while time.monotonic() < end:
            calls = [
                client.raw.searches.SearchBatch.future(request, timeout=60) for _ in range(1000)
            ]
            codes += Counter(call.code() for call in calls)
        print({code.name: count for code, count in codes.items()})
        shed = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
        assert set(codes) <= {grpc.StatusCode.OK} | shed
        assert codes[grpc.StatusCode.RESOURCE_EXHAUSTED]
    assert latencies(served.address, 2, one)


def test_ten_sigterms_under_load(stages: Stages, one: Manifest, tmp_path: Path) -> None:
    """What had begun when the signal came is answered; the exit status is 0 each time."""
    shutil.copytree(stages[1], tmp_path / "repo")
    cut: Counter[str] = Counter()
    for number in range(10):
        with serving(tmp_path / "repo", tmp_path / "data", "--triton=in-process") as served:
            with Client(served.address) as client:
                if number == 0:
                    client.create_gallery("g")
                    client.put_images(images(50))
            signalled = [float("inf")]

            def work(address: str, signalled: list[float]) -> None:
                with Client(address) as own:
                    while True:
                        began = time.monotonic()
                        try:
                            own.find_by(embedding(one, images(50)[7]))
                        except (UnavailableError, CancelledError) as error:
                            if began < signalled[0]:
                                cut[type(error).__name__] += 1
                            return

            threads = [
                threading.Thread(target=work, args=(served.address, signalled)) for _ in range(8)
            ]
            for thread in threads:
                thread.start()
            time.sleep(0.5)
            signalled[0] = time.monotonic()
            assert served.stop() == 0
            for thread in threads:
                thread.join(60)
    print(f"calls that began before the signal and were cut: {dict(cut)}")
    assert not cut


def test_nothing_grows_over_fifty_swaps(tmp_path: Path) -> None:
    """Activations, rollbacks and galleries that come and go leave no file, thread or memory."""
    published = make_stages(tmp_path / "published", 2)
    shutil.copytree(published[1], tmp_path / "repo")
    with (
        serving(tmp_path / "repo", tmp_path / "data", "--triton=in-process") as served,
        Client(served.address) as client,
    ):
        client.create_gallery("g")
        client.put_images(images(50))
        publish_stage(tmp_path / "repo", published[2])
        measures = []
        for number in range(25):
            client.swap(2, ("cutover", "dual")[number % 2])
            client.find(images(50)[number])
            client.create_gallery("other")
            client.put_images(images(5), "other")
            client.delete_gallery("other")
            client.rollback(confirm=True)
            measures.append(footprint(served))
    memory, files, threads = (np.array(column) for column in zip(*measures, strict=True))
    print(f"memory {memory[5] / 2**20:.0f} -> {memory[-1] / 2**20:.0f} MiB, files "
          f"{files[5]} -> {files[-1]}, threads {threads[5]} -> {threads[-1]}")  # fmt: skip
    assert memory[-1] <= memory[5] * 1.1
    assert files[-1] <= files[5] + 2
    assert threads[-1] <= threads[5] + 16


def footprint(served: Served) -> tuple[int, int, int]:
    """Resident bytes, open files and threads of a gateway."""
    process = Path(f"/proc/{served.process.pid}")
    pages = int((process / "statm").read_text().split()[1])
    descriptors = len(list((process / "fd").iterdir()))
    return pages * 4096, descriptors, len(list((process / "task").iterdir()))
