"""The real tritonserver: as good as in process, brought back when it dies, never left over."""

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc.service_pb2 import SystemSharedMemoryStatusRequest

from nobackfill.errors import UnavailableError
from nobackfill.release.manifest import Manifest, embedder_model_name
from nobackfill.server.triton import client as shared_memory_module
from nobackfill.server.triton import process as process_module
from nobackfill.server.triton.client import TritonClient
from nobackfill.v1 import gallery_pb2, release_pb2, search_pb2, vault_pb2
from tests.server.conftest import Stages, publish_stage
from tests.server.process import Served, serving, start, triton_venv
from tests.server.support import Client, embedding, ids, images, random_id, refused
from tests.support.blocks import png
from tests.support.processes import alive, children, wait_until_gone

pytestmark = pytest.mark.skipif(triton_venv() is None, reason="no Triton here: run make setup")

HEALED_S = 60.0


@pytest.fixture(scope="module")
def served(stages: Stages, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("triton")
    shutil.copytree(stages[1], folder / "repo")
    with (
        serving(folder / "repo", folder / "data", f"--triton-venv={triton_venv()}") as served,
        Client(served.address) as client,
    ):
        client.create_gallery("g")
        client.put_images(images(20))
        yield served


def triton_pid(served: Served) -> int:
    """The tritonserver below a gateway."""
    (pid,) = programs(served, "tritonserver")
    return pid


def stubs(served: Served) -> set[int]:
    """The processes that run its models."""
    return programs(served, "triton_python_backend_stub")


def programs(served: Served, name: str) -> set[int]:
    """Processes below a gateway that run a program of that name."""
    found = set()
    for pid in children(served.process.pid):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/exe").readlink().name == name:
                found.add(pid)
    return found


def shared_memory(served: Served) -> set[Path]:
    """What it holds in shared memory, by name."""
    return set(Path("/dev/shm").glob(f"nobackfill-{served.process.pid}-*"))


def test_only_files_of_dead_gateways_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "_SHM", tmp_path)
    dead = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    orphan, of_another = tmp_path / f"nobackfill-{dead}-1", tmp_path / f"nobackfill-{dead}"
    orphan.touch()
    of_another.mkdir()
    process_module._remove_orphaned_shared_memory()
    assert not orphan.exists() and of_another.is_dir()


def wait_healed(client: Client) -> float:
    """Seconds until an image is searched again."""
    began = time.monotonic()
    while time.monotonic() - began < HEALED_S:
        try:
            client.find(images(1)[0])
        except UnavailableError:
            time.sleep(0.02)
        else:
            return time.monotonic() - began
    raise AssertionError("Triton did not come back")


def test_images_are_embedded_by_triton(served: Served, one: Manifest) -> None:
    assert not any("in this process" in event["event"] for event in served.events())
    with Client(served.address) as client:
        for i, image in enumerate(images(20)):
            by_image, by_hand = client.find(image), client.find_by(embedding(one, image))
            assert ids(by_image) == ids(by_hand)
            assert by_image.hits[0].id == f"i{i}"
            assert by_image.hits[0].distance == pytest.approx(0, abs=1e-4)


def test_a_client_that_sets_no_deadline_is_answered(served: Served) -> None:
    """Clients in most languages set none. A call of each kind: unary, and streams of each way."""
    blob = b"age-encryption.org/v1\n" + bytes(200)
    digest = hashlib.sha256(blob).hexdigest()
    with Client(served.address) as client:
        wait_healed(client)
        raw = client.raw
        items = [gallery_pb2.PutItem(id="no-deadline", image=png(images(21)[20]))]
        put = gallery_pb2.PutItemsRequest(gallery="g", items=items)
        (answer,) = raw.galleries.PutItems(iter([put]))
        assert (answer.stored, answer.refused) == (1, 0), answer
        query = search_pb2.Query(image=png(images(21)[20]))
        found = raw.searches.Search(search_pb2.SearchRequest(gallery="g", query=query, k=1))
        assert ids(found) == ["no-deadline"]
        batch = search_pb2.SearchBatchRequest(gallery="g", queries=[query, query], k=1)
        answers = raw.searches.SearchBatch(batch).responses
        assert [ids(one) for one in answers] == [["no-deadline"]] * 2
        watch = raw.releases.WatchReleases(release_pb2.WatchReleasesRequest())
        assert next(watch).releases[0].number == 1
        watch.cancel()
        file = raw.releases.FetchFile(release_pb2.FetchFileRequest(path="timestamp.json"))
        pieces = list(file)
        assert sum(len(piece.chunk) for piece in pieces) == pieces[0].size
        named = vault_pb2.Blob(id=random_id(1), size=len(blob), sha256=digest)
        sent = raw.vault.PutBlob(iter([vault_pb2.PutBlobRequest(blob=named, chunk=blob)]))
        assert sent.received == len(blob)
        kept = raw.vault.GetBlob(vault_pb2.GetBlobRequest(id=random_id(1)))
        assert b"".join(piece.chunk for piece in kept) == blob
        raw.galleries.DeleteItems(gallery_pb2.DeleteItemsRequest(gallery="g", ids=["no-deadline"]))


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_it_is_brought_back(served: Served, one: Manifest, how: signal.Signals) -> None:
    with Client(served.address) as client:
        health = health_pb2_grpc.HealthStub(client.raw.channel)
        request = health_pb2.HealthCheckRequest(service="nobackfill.v1.SearchService")
        wait_healed(client)
        old, below, memory = triton_pid(served), stubs(served), shared_memory(served)
        assert memory
        os.kill(old, how)
        began = time.monotonic()
        while health.Check(request, timeout=5).status == health_pb2.HealthCheckResponse.SERVING:
            assert time.monotonic() - began < HEALED_S
            time.sleep(0.01)
        detected = time.monotonic() - began
        # Searching by embedding goes on, and nothing hangs.
        assert client.find_by(embedding(one, images(20)[3])).hits[0].id == "i3"
        with refused(UnavailableError, "by embedding work"):
            client.find(images(1)[0])
        whole = health_pb2.HealthCheckRequest()
        assert health.Check(whole, timeout=5).status == health_pb2.HealthCheckResponse.SERVING
        wait_healed(client)
        healed = time.monotonic() - began
        print(f"{how.name}: detected after {detected:.2f} s, healed after {healed:.2f} s")
        assert triton_pid(served) != old
        assert not alive(old)
        assert not wait_until_gone(below)
        assert not memory & shared_memory(served)


def test_pixels_come_by_memory_and_none_is_left(
    served: Served, one: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory_module, "_MIN_BYTES", 1)
    pixels, name = images(20), embedder_model_name(one.release)
    inputs = {"image": pixels}
    folder = os.open(served.log.parent / "data" / "triton", os.O_PATH)
    address = f"unix:/proc/{os.getpid()}/fd/{folder}/grpc:1"
    with contextlib.closing(TritonClient(address)) as near, Client(served.address) as client:
        wait_healed(client)
        with contextlib.closing(TritonClient(address)) as other:
            other._shared = None
            expected = other.infer(name, inputs, "embedding", 10)
        # One after the other, and one that is larger than what there is.
        for count in (5, 3, 20):
            found = near.infer(name, {"image": pixels[:count]}, "embedding", 10)
            assert np.array_equal(found, expected[:count])
        assert regions(near) == regions_of(os.getpid(), near) != set()
        # Named until Triton has mapped it, so that nobody has to clean up.
        assert not list(Path("/dev/shm").glob("*-pixels-*"))
        # What a killed gateway had it map goes with the next one's first.
        dead = subprocess.Popen(
            [sys.executable, "-c", KILLED, address, name], stdin=subprocess.PIPE
        )
        dead.communicate(pixels.tobytes())
        assert dead.returncode == -signal.SIGKILL
        assert regions_of(dead.pid, near)
        with contextlib.closing(TritonClient(address)) as third:
            assert np.array_equal(third.infer(name, inputs, "embedding", 10), expected)
            assert not regions_of(dead.pid, near)
        # A Triton that was started anew knows of none.
        os.kill(triton_pid(served), signal.SIGKILL)
        wait_healed(client)
        assert np.array_equal(near.infer(name, inputs, "embedding", 10), expected)
        assert np.array_equal(near.infer(name, inputs, "embedding", 10), expected)
        assert regions(near)
        # Without room, pixels go in messages.
        monkeypatch.setattr(shared_memory_module, "_FREE_FACTOR", 2**60)
        with contextlib.closing(TritonClient(address)) as third:
            assert np.array_equal(third.infer(name, inputs, "embedding", 10), expected)
            assert regions(third) == regions(near)
    os.close(folder)


KILLED = """
import os, signal, sys
import numpy as np
from nobackfill.server.triton import client
client._MIN_BYTES = 1
pixels = np.frombuffer(sys.stdin.buffer.read(), np.uint8).reshape(20, 8, 8, 3)
client.TritonClient(sys.argv[1]).infer(sys.argv[2], {"image": pixels}, "embedding", 10)
os.kill(os.getpid(), signal.SIGKILL)
"""


def regions(client: TritonClient) -> set[str]:
    """What its Triton has mapped of pixels."""
    return set(client._stub.SystemSharedMemoryStatus(SystemSharedMemoryStatusRequest()).regions)


def regions_of(process: int, client: TritonClient) -> set[str]:
    return {name for name in regions(client) if name.startswith(f"nobackfill-{process}-")}


def test_an_activation_under_triton(served: Served, stages: Stages) -> None:
    repo = served.log.parent / "repo"
    publish_stage(repo, stages[2])
    with Client(served.address) as client:
        client.swap(2)
        for i, image in enumerate(images(5)):
            hit = client.find(image).hits[0]
            assert (hit.id, hit.release) == (f"i{i}", 2)
            assert hit.distance == pytest.approx(0, abs=1e-4)
        client.put_images(images(22)[20:], first=20)
        assert client.find(images(22)[21]).hits[0].id == "i21"


@pytest.mark.long
def test_nothing_is_left_when_the_gateway_is_killed(stages: Stages, tmp_path: Path) -> None:
    shutil.copytree(stages[1], tmp_path / "repo")
    served = start(tmp_path / "repo", tmp_path / "data", f"--triton-venv={triton_venv()}")
    below = children(served.process.pid)
    # Model processes that wait for ever notice nothing: as when Triton dies while it loads them.
    waiting = stubs(served)
    assert len(waiting) == 2
    for pid in waiting:
        os.kill(pid, signal.SIGSTOP)
    served.process.kill()
    served.process.wait()
    assert not wait_until_gone(below)
    # The next start finds nothing in its way, and sweeps shared memory.
    again = start(tmp_path / "repo", tmp_path / "data", f"--triton-venv={triton_venv()}")
    assert not shared_memory(served)
    below = children(again.process.pid)
    assert again.stop() == 0
    assert not wait_until_gone(below)
