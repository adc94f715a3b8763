"""A gateway with tokens, and calls of every kind that it must go on answering."""

import hashlib
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

from grpc_health.v1 import health_pb2, health_pb2_grpc

from nobackfill.v1 import gallery_pb2, release_pb2, vault_pb2
from tests.server.support import Client, ids, images
from tests.support.blocks import png

NAMES = ("admin", "other")


class Guarded:
    """A gateway with tokens, without TLS."""

    def __init__(self, address: str, metrics: str) -> None:
        self.address = address
        self.metrics = metrics

    def client(self, name: str | None) -> Client:
        """A client with the token of `name`, or without one."""
        return Client(self.address, token=name)

    def series(self, start: str) -> float:
        """The sum of the metrics' lines that begin so."""
        return series(self.metrics, start)


def series(metrics: str, start: str) -> float:
    """The sum of the metrics' lines that begin so."""
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=30) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))


def tokens_file(path: Path) -> Path:
    path.write_text(
        "".join(f"{name} admin {hashlib.sha256(name.encode()).hexdigest()}\n" for name in NAMES)
    )
    return path


def everything_is_served(guarded: Guarded, name: str = "other") -> None:
    """A call of each kind, each within seconds."""
    with guarded.client(name) as client:
        health = health_pb2_grpc.HealthStub(client.channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert ids(client.search(images(3)[1]))[0] == "i1"
        item = gallery_pb2.PutItem(id="i2", image=png(images(3)[2]))
        put = gallery_pb2.PutItemsRequest(gallery="g", items=[item])
        assert next(iter(client.galleries.PutItems(iter([put]), timeout=10))).stored == 1
        fetch = release_pb2.FetchFileRequest(path="timestamp.json")
        assert list(client.releases.FetchFile(fetch, timeout=10))
        client.vault.ListBlobs(vault_pb2.ListBlobsRequest(), timeout=10)
        watch = client.releases.WatchReleases(release_pb2.WatchReleasesRequest(), timeout=10)
        assert next(watch).releases
        watch.cancel()


def silence(over: Event) -> Iterator[bytes]:
    """A client's messages, none of which comes."""
    over.wait(60)
    yield from ()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
