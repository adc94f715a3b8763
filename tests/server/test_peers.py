"""Peers that send headers only, drip, stand still or never read: everybody else is served."""

import shutil
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nobackfill.errors import (
    DeadlineError,
    InvalidInputError,
    NobackfillError,
    OverloadedError,
    UnauthenticatedError,
)
from nobackfill.server.grpc import rpc
from nobackfill.server.grpc.context import RULES
from nobackfill.server.grpc.listener import LARGEST_PEER, HealthService, make_grpc_server
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.grpc.rpc import Interceptor
from nobackfill.v1 import search_pb2
from tests.server import process
from tests.server.conftest import Stages
from tests.server.guarded import (
    Guarded,
    everything_is_served,
    few_watches,
    series,
    silence,
    tokens_file,
    wait_for,
)
from tests.server.peers import Peer, prefixed
from tests.server.support import Client, images, refused, running

# More than the threads of any lane, and than the calls that today's pool of eight took.
MANY = 60
CLOSED = sorted(method for method, roles in RULES.items() if roles is not None)
# Calls that send many messages hold a thread from the start, so their lane is bounded.
READING = (
    "/nobackfill.v1.GalleryService/PutItems",
    "/nobackfill.v1.VaultService/PutBlob",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)
OPEN = "nobackfill_calls_open"


@pytest.fixture(scope="module")
def guarded(stages: Stages, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    shutil.copytree(stages[1], folder / "repo")
    tokens = tokens_file(folder / "tokens")
    with (
        few_watches(),
        running(folder / "repo", folder / "data", tokens_file=tokens) as gateway,
    ):
        guarded = Guarded(gateway.address, gateway.metrics_address)
        with guarded.client("admin") as admin:
            admin.create_gallery("g")
            admin.put_images(images(3))
        yield guarded


def test_without_a_token_headers_alone_are_refused(guarded: Guarded) -> None:
    """Before any message: the peer sends none, and is answered."""
    with Client(guarded.address) as stranger:
        for method in CLOSED:
            call = stranger.raw.channel.stream_stream(method, bytes, bytes)
            over = Event()
            with refused(UnauthenticatedError):
                list(call(silence(over), timeout=10))
            over.set()


@pytest.mark.parametrize("part", [b"", prefixed(bytes(2**20))[:100]], ids=["headers", "dripping"])
def test_calls_whose_message_does_not_come_hold_nothing(guarded: Guarded, part: bytes) -> None:
    waiting = 'nobackfill_calls_waiting{lane="message"}'
    methods = [method for method in CLOSED if method not in READING]
    with Peer(guarded.address) as peer:
        for method in (*methods, "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"):
            for _ in range(MANY // 3):
                stream = peer.begin(method, "admin")
                if part:
                    peer.send(stream, part)
        wait_for(lambda: guarded.series(waiting) >= MANY)
        everything_is_served(guarded)
    wait_for(lambda: guarded.series(waiting) == 0)


def test_one_callers_streams_take_its_share_only(guarded: Guarded) -> None:
    """Transfers that stand still, and watches that are never read."""
    with Peer(guarded.address) as peer:
        for method in READING:
            for _ in range(rpc.STREAM_LANES["transfers"].capacity):
                peer.begin(method, "admin")
        for _ in range(rpc.STREAM_LANES["watches"].capacity):
            stream = peer.begin("/nobackfill.v1.ReleaseService/WatchReleases", "admin")
            peer.send(stream, prefixed(b""))
        for lane in ("transfers", "watches"):
            share = round(rpc.STREAM_LANES[lane].capacity * rpc.STREAM_LANES[lane].max_caller_share)
            wait_for(lambda s=share, n=lane: guarded.series(f'{OPEN}{{lane="{n}"}}') == s)  # type: ignore[misc]
        everything_is_served(guarded)
        with guarded.client("admin") as admin, refused(OverloadedError, "of one caller"):
            admin.put_images(images(3))


def test_watching_the_health_takes_no_place_of_others(guarded: Guarded) -> None:
    size = rpc.STREAM_LANES["public"]
    share = round(size.capacity * size.max_caller_share)
    with Client(guarded.address) as stranger:
        stub = health_pb2_grpc.HealthStub(stranger.raw.channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=60) for _ in range(MANY)]

        def first(watch: Iterator[health_pb2.HealthCheckResponse]) -> grpc.StatusCode:
            try:
                next(watch)
            except grpc.RpcError as error:
                return error.code()
            return grpc.StatusCode.OK

        with ThreadPoolExecutor(MANY) as pool:
            codes = Counter(pool.map(first, watches))
        exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
        assert codes == {grpc.StatusCode.OK: share, exhausted: MANY - share}
        everything_is_served(guarded)


@pytest.mark.hot_path
def test_strangers_who_send_headers_only_keep_no_health_check_out(guarded: Guarded) -> None:
    """More of them than are awaited: the longest awaited end, the others go on."""
    most = 4 * 256
    with Peer(guarded.address) as peer, Peer(guarded.address) as another:
        for one in (peer, another):
            for _ in range(most - 100):
                one.begin("/grpc.health.v1.Health/Check")
        wait_for(lambda: guarded.series(f'{OPEN}{{lane="message"}}') == most)
        everything_is_served(guarded)


def test_peers_who_do_nothing_keep_no_gateway_from_ending(repo: Path, tmp_path: Path) -> None:
    with running(repo, tmp_path / "data", drain_seconds=60) as gateway:
        peer = Peer(gateway.address)
        for _ in range(MANY):
            peer.begin("/nobackfill.v1.SearchService/Search")
        stream = peer.begin("/grpc.health.v1.Health/Watch")
        peer.send(stream, prefixed(b""))
        wait_for(lambda: series(gateway.metrics_address, f'{OPEN}{{lane="public"}}') == 1)
        began = time.monotonic()
    # Half of the time that it would have given to calls that are worked on.
    assert time.monotonic() - began < 30
    peer.socket.close()


@pytest.mark.hot_path
def test_what_is_silent_or_old_is_ended_and_counted(guarded: Guarded) -> None:
    metrics = Metrics()
    interceptor = Interceptor(
        metrics, None, max_calls=8, max_call_seconds=60, receive_timeout_s=0.5
    )
    calls = make_grpc_server(interceptor, [])
    server = calls.grpc_server
    health_pb2_grpc.add_HealthServicer_to_server(HealthService(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with Client(f"127.0.0.1:{port}") as client:
            call = client.raw.channel.stream_stream("/grpc.health.v1.Health/Check", bytes, bytes)
            over = Event()
            with refused(DeadlineError, "0.5 s"):
                list(call(silence(over), timeout=30))
            over.set()
            with refused(InvalidInputError):
                list(call(iter([]), timeout=30))
        labels = {"grpc_service": "grpc.health.v1.Health", "grpc_method": "Check"}
        for counted in ("DEADLINE_EXCEEDED", "INVALID_ARGUMENT"):
            value = metrics.registry.get_sample_value(
                "grpc_server_handled_total", {**labels, "grpc_code": counted}
            )
            assert value == 1, counted
    finally:
        server.stop(None).wait()
        calls.close()
        interceptor.close()


def test_refused_calls_are_counted(guarded: Guarded) -> None:
    unauthenticated = 'grpc_server_handled_total{grpc_code="UNAUTHENTICATED",grpc_method="Search",'
    unknown = 'grpc_server_handled_total{grpc_code="UNIMPLEMENTED",grpc_method="unknown"'
    before = guarded.series(unauthenticated), guarded.series(unknown)
    with Client(guarded.address) as stranger:
        path = "/nobackfill.v1.SearchService/Nothing"
        unknown_method = stranger.raw.channel.unary_unary(path, bytes, bytes)
        for _ in range(3):
            with refused(UnauthenticatedError):
                stranger.find(images(1)[0])
            with refused(NobackfillError, "not found"):
                unknown_method(b"", timeout=10)
    assert guarded.series(unauthenticated) == before[0] + 3
    assert guarded.series(unknown) == before[1] + 3


@pytest.mark.long
def test_large_messages_without_a_token_are_not_kept(stages: Stages, tmp_path: Path) -> None:
    shutil.copytree(stages[1], tmp_path / "repo")
    tokens = tokens_file(tmp_path / "tokens")
    options = ("--triton=in-process", f"--tokens-file={tokens}")
    message = search_pb2.SearchRequest(query=search_pb2.Query(image=bytes(32 * 2**20)))
    with process.serving(tmp_path / "repo", tmp_path / "data", *options) as served:
        with Client(served.address) as stranger:
            with refused(UnauthenticatedError):
                stranger.find(images(1)[0])
            before = resident_mib(served.process.pid)
            for _ in range(5):
                calls = [stranger.raw.searches.Search.future(message, timeout=60) for _ in range(8)]
                assert {call.code() for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}
        # What gRPC's windows let in before a refusal is sent, of 1,280 MiB.
        assert resident_mib(served.process.pid) - before < 300


def test_one_peers_silent_connections_are_closed_and_others_come_in(guarded: Guarded) -> None:
    """The ones that were silent for longest: a client that speaks meanwhile stays."""
    host, _, port = guarded.address.rpartition(":")
    with guarded.client("other") as client, ExitStack() as stack:
        client.get_gallery("g")
        silent = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
            for _ in range(LARGEST_PEER + 40)
        ]
        for one in silent:
            one.setblocking(False)
        deadline = time.monotonic() + 30
        while sum(map(is_open, silent)) > LARGEST_PEER:
            assert time.monotonic() < deadline
            client.get_gallery("g")
            time.sleep(0.05)
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(guarded.address, options) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            stub.Check(health_pb2.HealthCheckRequest(), timeout=30)


def is_open(connection: socket.socket) -> bool:
    """Whether the other end has not closed it."""
    try:
        while connection.recv(2**16):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def resident_mib(pid: int) -> float:
    """The most memory that a process has held."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
