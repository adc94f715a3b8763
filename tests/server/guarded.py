"""A gateway with tokens, and calls of every kind that it must go on answering."""

import dataclasses
import hashlib
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nobackfill.server.grpc import rpc
from nobackfill.server.grpc.rpc import LaneSize
from tests.server.support import TIMEOUT_S, Client, ids, images

NAMES = ("admin", "other")


class Guarded:
    """A gateway with tokens, without TLS."""

    def __init__(self, address: str, metrics: str) -> None:
        self.address = address
        self.metrics = metrics

    def client(self, name: str | None, seconds: float = TIMEOUT_S) -> Client:
        """A client with the token of `name`, or without one; each call within `seconds`."""
        return Client(self.address, token=name, seconds=seconds)

    def series(self, start: str) -> float:
        """The sum of the metrics' lines that begin so."""
        return series(self.metrics, start)


@contextmanager
def few_watches() -> Iterator[Mapping[str, LaneSize]]:
    """Gateways that start here have as few places for watches as a plain server."""
    few = {
        name: dataclasses.replace(size, capacity=size.thread_count)
        for name, size in rpc.STREAM_LANES.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rpc, "STREAM_LANES", few)
        yield few


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
    with guarded.client(name, seconds=10) as client:
        health = health_pb2_grpc.HealthStub(client.raw.channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert ids(client.find(images(3)[1]))[0] == "i1"
        client.put_images(images(3)[2:], first=2)
        assert list(client.fetch_file("timestamp.json"))
        client.list_blobs()
        assert next(client.watch_releases())


def silence(over: Event) -> Iterator[bytes]:
    """A client's messages, none of which comes."""
    over.wait(60)
    yield from ()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
