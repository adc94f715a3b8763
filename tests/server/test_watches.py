"""Watches cost no thread: callers who watch the same are told the same, each in its time."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nobackfill.errors import NotFoundError
from nobackfill.release.manifest import Manifest
from nobackfill.server.gateway import GatewayServer
from nobackfill.server.grpc.context import Principal, Tokens
from nobackfill.server.grpc.listener import HealthService, make_grpc_server
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.grpc.rpc import Interceptor, StallMonitor
from nobackfill.server.upgrades.upgrading import Job, JobState
from nobackfill.v1 import release_pb2, upgrade_pb2
from tests.server.conftest import Stages, publish_stage
from tests.server.guarded import tokens_file
from tests.server.peers import Peer, prefixed
from tests.server.support import Client, embedding, images, refused, running
from tests.support.waiting import wait_until

HEALTH = health_pb2.HealthCheckResponse


class Watched:
    """A server of the health service, and a client of it."""

    def __init__(self, client: Client, health: HealthService, interceptor: Interceptor) -> None:
        self.address = client.address
        self.stub = health_pb2_grpc.HealthStub(client.raw.channel)
        self.health = health
        self.stalls = interceptor.stall_monitor
        self.lane = interceptor.lanes.by_name["public"]

    def watch(self, name: str = "") -> Any:
        return self.stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=60)


@pytest.fixture
def watched() -> Iterator[Watched]:
    interceptor = Interceptor(Metrics(), None, 256, max_call_seconds=60)
    calls, health = make_grpc_server(interceptor, []), HealthService()
    health_pb2_grpc.add_HealthServicer_to_server(health, calls.grpc_server)
    port = calls.grpc_server.add_insecure_port("127.0.0.1:0")
    calls.grpc_server.start()
    with Client(f"127.0.0.1:{port}") as client:
        yield Watched(client, health, interceptor)
    calls.grpc_server.stop(None).wait()
    calls.close()
    interceptor.close()


@pytest.mark.hot_path
def test_many_watches_take_no_thread_and_hear_each_change(watched: Watched) -> None:
    first = watched.watch()
    next(first)
    before = threading.active_count()
    watches = [watched.watch() for _ in range(200)]
    assert [next(watch).status for watch in watches] == [HEALTH.SERVING] * 200
    # The client and the server are one process: its channel has a thread of its own.
    assert threading.active_count() <= before + 2
    for status in (HEALTH.NOT_SERVING, HEALTH.SERVING):
        watched.health.set("", status)
        assert [next(watch).status for watch in watches] == [status] * 200
    for watch in watches:
        watch.cancel()
    wait_until(lambda: watched.lane.occupied_count() == 1, "places are not given back")
    first.cancel()


def test_who_comes_later_is_told_what_is_so_now(watched: Watched) -> None:
    first = watched.watch("a")
    assert next(first).status == HEALTH.SERVICE_UNKNOWN
    for _ in range(20):
        for status in (HEALTH.NOT_SERVING, HEALTH.SERVING):
            watched.health.set("a", status)
            assert next(watched.watch("a")).status == status
    assert next(watched.watch("b")).status == HEALTH.SERVICE_UNKNOWN
    # Those who were there before may have missed some, not the last.
    while next(first).status != HEALTH.SERVING:
        pass


@pytest.mark.long
def test_a_watcher_that_does_not_read_keeps_nobody_waiting_and_is_cut(watched: Watched) -> None:
    watched.stalls._patience_s = 3.0
    other = watched.watch()
    assert next(other).status == HEALTH.SERVING
    with Peer(watched.address, window=0) as peer:
        stream = peer.begin("/grpc.health.v1.Health/Watch")
        peer.send(stream, prefixed(b""))
        wait_until(lambda: watched.lane.occupied_count() == 2, "it does not watch")
        for status in (HEALTH.NOT_SERVING, HEALTH.SERVING) * 5:
            watched.health.set("", status)
            assert next(other).status == status
        wait_until(lambda: watched.lane.occupied_count() == 1, "its place is not given back")
        watched.health.set("", HEALTH.NOT_SERVING)
        assert next(other).status == HEALTH.NOT_SERVING


def test_a_watch_that_cannot_go_on_says_why(
    stages: Stages, repo: Path, gateway: GatewayServer
) -> None:
    with Client(gateway.address) as client:
        releases = client.raw.releases.WatchReleases(release_pb2.WatchReleasesRequest())
        assert [one.number for one in next(releases).releases] == [1]
        with refused(NotFoundError, "nothing"):
            list(
                client.raw.upgrades.WatchUpgrade(upgrade_pb2.WatchUpgradeRequest(gallery="nothing"))
            )
        client.create_gallery("g")
        ended = client.raw.upgrades.WatchUpgrade(upgrade_pb2.WatchUpgradeRequest(gallery="g"))
        assert [one.progress.state for one in ended] == [upgrade_pb2.UPGRADE_STATE_DONE]
        publish_stage(repo, stages[2])
        seen: list[int] = []
        while seen != [1, 2]:
            seen = [one.number for one in next(releases).releases]


@pytest.mark.hot_path
def test_slow_watches_of_one_method_keep_no_others_waiting(
    gateway: GatewayServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither while they are looked at, nor after those who asked have left."""
    asked: list[str] = []
    go_on = threading.Event()

    def job(name: str) -> Job:
        asked.append(name)
        assert go_on.wait(60)
        return Job(name, 1, 1, JobState.DONE)

    monkeypatch.setattr(gateway.lifecycle, "upgrade_job", job)
    monkeypatch.setattr(gateway.lifecycle, "reembedding_progress", lambda name: None)
    requests = [upgrade_pb2.WatchUpgradeRequest(gallery=f"g{row}") for row in range(40)]
    # The same request with fields that nobody knows: all watch one source.
    odd = [
        upgrade_pb2.WatchUpgradeRequest.FromString(
            requests[0].SerializeToString() + bytes([0xF8, 0x3F, row])
        )
        for row in range(20)
    ]
    watches = [client.raw.upgrades.WatchUpgrade(one, timeout=60) for one in (*requests, *odd)]
    wait_until(lambda: len(asked) == 2, "two are looked at")
    releases = client.raw.releases.WatchReleases(release_pb2.WatchReleasesRequest(), timeout=30)
    assert next(releases).releases
    releases.cancel()
    for watch in watches:
        watch.cancel()
    held = gateway.metrics.calls.lanes["watches"][0]
    wait_until(lambda: held() == 0, "all have left")
    go_on.set()
    last = client.raw.upgrades.WatchUpgrade(requests[-1], timeout=30)
    assert next(last).progress.gallery == "g39"
    assert len(asked) <= 4


def watch_releases(client: Client) -> Any:
    """Open a watch and take its first message."""
    watch = client.raw.releases.WatchReleases(release_pb2.WatchReleasesRequest(), timeout=60)
    next(watch)
    return watch


@pytest.mark.hot_path
def test_an_open_watch_makes_no_search_wait(
    gateway: GatewayServer, client: Client, one: Manifest
) -> None:
    """Beside a watch a call is never alone, so that the loop looks for others before it answers.
    To look took a millisecond, as long as the rest of a search."""
    picture = images(1)[0]
    client.create_gallery("g")
    client.put_images(images(1))
    query = embedding(one, picture)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    held = gateway.metrics.calls.lanes["watches"][0]
    for number in range(20):
        watched = number % 2 == 1
        watch = watch_releases(client) if watched else None
        for _ in range(30):
            began = time.perf_counter()
            assert client.find_by(query, k=1).hits[0].id == "i0"
            seconds[watched].append(time.perf_counter() - began)
        if watch is not None:
            watch.cancel()
            wait_until(lambda: held() == 0, "it has left")
    assert median(seconds[True]) < 1.5 * median(seconds[False])


def test_a_token_is_looked_at_once_for_all_its_watches(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking at it for each of 9,000 took a seventh of the interpreter's time."""
    seen: list[str] = []
    all_streams, confirm = StallMonitor._streams_by_check, Tokens.confirm

    def look(stalls: StallMonitor) -> Any:
        # Another gateway of this process, which has no stream, looks as well.
        if streams := all_streams(stalls):
            seen.append("look")
        return streams

    def confirmed(tokens: Tokens, header: str | None, principal: Principal) -> None:
        seen.append(principal.name)
        confirm(tokens, header, principal)

    monkeypatch.setattr(StallMonitor, "_streams_by_check", look)
    monkeypatch.setattr(Tokens, "confirm", confirmed)
    tokens = tokens_file(tmp_path / "tokens")
    with (
        running(repo, tmp_path / "data", tokens_file=tokens) as gateway,
        Client(gateway.address, token="admin") as client,
        Client(gateway.address, token="other") as other,
    ):
        watches = [watch_releases(client) for _ in range(30)] + [watch_releases(other)]
        del seen[:]
        wait_until(lambda: seen.count("look") > 3, "streams are looked at")
        rows = " ".join(seen).split("look")[1:-1]
        assert [sorted(row.split()) for row in rows] == [["admin", "other"]] * len(rows)
        for watch in watches:
            watch.cancel()
