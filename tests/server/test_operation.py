"""Operation: draining on SIGTERM, health, reflection, metrics, logs that tell nothing private."""

import ctypes
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from nobackfill.errors import NotFoundError
from nobackfill.server.grpc.listener import SERVICES
from nobackfill.v1 import release_pb2, search_pb2
from tests.server.process import serving
from tests.server.support import Client, images, refused
from tests.support.blocks import png
from tests.support.waiting import wait_until


def test_sigterm_lets_calls_end(repo: Path, tmp_path: Path) -> None:
    """What had arrived when the signal came is answered; what comes after is refused cleanly."""
    with (
        serving(repo, tmp_path / "data", "--triton=in-process") as served,
        Client(served.address) as client,
    ):
        client.create_gallery("g")
        client.put_images(images(10))
        queries = [search_pb2.Query(image=png(image)) for image in images(10)] * 10
        request = search_pb2.SearchBatchRequest(gallery="g", queries=queries)
        early = [client.raw.searches.SearchBatch.future(request, timeout=60) for _ in range(8)]
        watch = client.watch_releases()
        next(watch)
        began = time.monotonic()
        served.process.terminate()
        assert [call.code() for call in early] == [grpc.StatusCode.OK] * 8
        assert all(len(call.result().responses) == 100 for call in early)
        late = client.raw.searches.SearchBatch.future(request, timeout=60)
        assert late.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK)
        # A stream that only watches does not hold the gateway up.
        assert served.process.wait(60) == 0
        print(f"drained in {time.monotonic() - began:.2f} s")
        assert list(watch) == []
    assert served.events()[-1]["event"] == "stopped"


@pytest.mark.long
def test_callers_in_a_loop_hear_that_it_is_unavailable_not_that_they_cancelled(
    repo: Path, tmp_path: Path
) -> None:
    codes: set[grpc.StatusCode] = set()
    with serving(repo, tmp_path / "data", "--triton=in-process") as served:

        def ask() -> None:
            with Client(served.address) as client:
                while served.process.poll() is None:
                    call = client.raw.releases.ListReleases.future(release_list(), timeout=10)
                    codes.add(call.code())

        with ThreadPoolExecutor(24) as pool:
            asking = [pool.submit(ask) for _ in range(24)]
            wait_until(lambda: grpc.StatusCode.OK in codes, "nothing is answered")
            assert served.stop() == 0
            for one in asking:
                one.result()
    assert codes == {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}


def test_sigterm_ends_it_whichever_thread_meets_it(repo: Path, tmp_path: Path) -> None:
    with serving(repo, tmp_path / "data", "--triton=in-process") as served:
        main = served.process.pid
        other = max(int(task.name) for task in Path("/proc", str(main), "task").iterdir())
        assert other != main
        assert ctypes.CDLL(None).tgkill(main, other, signal.SIGTERM) == 0
        assert served.process.wait(60) == 0
    assert served.events()[-1]["event"] == "stopped"


def release_list() -> release_pb2.ListReleasesRequest:
    return release_pb2.ListReleasesRequest()


def release_watch() -> release_pb2.WatchReleasesRequest:
    return release_pb2.WatchReleasesRequest()


def test_health_of_each_service(shared: Client) -> None:
    stub = health_pb2_grpc.HealthStub(shared.raw.channel)
    for name in ("", *SERVICES):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING, name
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICES[0]), timeout=10)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()
    with pytest.raises(grpc.RpcError) as unknown:
        stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=10)
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_tells_a_stranger_the_contract(shared: Client) -> None:
    database = ProtoReflectionDescriptorDatabase(shared.raw.channel)
    assert set(SERVICES) <= set(database.get_services())
    pool = DescriptorPool(database)
    service = pool.FindServiceByName("nobackfill.v1.SearchService")
    assert [method.name for method in service.methods] == ["Search", "SearchBatch", "Feedback"]


@pytest.mark.long
def test_metrics_count_calls_and_hold_no_ids(repo: Path, tmp_path: Path) -> None:
    with serving(repo, tmp_path / "data", "--triton=in-process") as served:
        with Client(served.address) as client:
            client.create_gallery("private-name")
            client.put("private-name", {"private-id": png(images(1)[0])})
            for _ in range(3):
                client.find(images(1)[0], "private-name")
            with refused(NotFoundError):
                client.find(images(1)[0], "no-such-gallery")
        with urlopen(f"http://{served.metrics}/metrics", timeout=10) as page:
            text = page.read().decode()
        search = 'grpc_method="Search",grpc_service="nobackfill.v1.SearchService"'
        assert f'grpc_server_handled_total{{grpc_code="OK",{search}}} 3.0' in text
        assert f'grpc_server_handled_total{{grpc_code="NOT_FOUND",{search}}} 1.0' in text
        assert f"grpc_server_handling_seconds_count{{{search}}} 4.0" in text
        assert "nobackfill_active_release 1.0" in text
        assert 'nobackfill_gallery_items{release="1",state="active"} 1.0' in text
        assert "nobackfill_model_server_up 1.0" in text
        log = served.log.read_text()
    for private in ("private-id", "no-such-gallery"):
        assert private not in text
        assert private not in log


def test_searches_and_puts_from_many_threads(shared: Client, gallery: str) -> None:
    """While items come, what was acknowledged before a search is found by it."""
    pictures = images(60)
    stored = 0
    errors: list[str] = []
    done = threading.Event()

    def search() -> None:
        while not done.is_set():
            count = stored
            if not count:
                continue
            for i in (0, count - 1):
                hit = shared.find(pictures[i], gallery, 1).hits[0]
                if hit.id != f"i{i}" or hit.distance > 1e-4:
                    errors.append(f"asked i{i} of {count}, got {hit.id} at {hit.distance}")

    threads = [threading.Thread(target=search) for _ in range(4)]
    for thread in threads:
        thread.start()
    for i in range(0, 60, 3):
        shared.put_images(pictures[i : i + 3], gallery, first=i)
        stored = i + 3
    done.set()
    for thread in threads:
        thread.join()
    assert not errors
