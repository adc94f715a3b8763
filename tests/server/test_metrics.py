"""What the metrics tell: queues, how searches are answered, what indexes hold."""

import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2

from nobackfill.server.grpc.context import RULES
from nobackfill.server.grpc.listener import make_grpc_server
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.grpc.rpc import Interceptor, Lanes
from tests.server.support import Client, images, running
from tests.support.waiting import wait_until

METHOD = "/test.Sleeping/Sleep"
SECONDS = 0.3
THREADS = 8


class Sleeping(grpc.GenericRpcHandler):
    """One method, that takes a while, `free` or not before; how often it ran."""

    def __init__(self) -> None:
        self.ran = 0
        self.free = threading.Event()
        self._lock = threading.Lock()
        self._handler = grpc.unary_unary_rpc_method_handler(
            self._sleep,
            health_pb2.HealthCheckRequest.FromString,
            health_pb2.HealthCheckResponse.SerializeToString,
        )

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]":
        return self._handler

    def _sleep(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        with self._lock:
            self.ran += 1
        self.free.wait(60)
        time.sleep(SECONDS)
        return health_pb2.HealthCheckResponse()


@contextmanager
def serving(sleeping: Sleeping, metrics: Metrics, max_calls: int) -> Iterator[Client]:
    """`sleeping` behind a interceptor."""
    plain = bool(os.environ.get("NOBACKFILL_PLAIN_GRPC"))
    interceptor = Interceptor(metrics, None, max_calls, max_call_seconds=60, is_plain_server=plain)
    calls = make_grpc_server(interceptor, [])
    server = calls.grpc_server
    server.add_generic_rpc_handlers((sleeping,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with Client(f"127.0.0.1:{port}") as client:
            yield client
    finally:
        server.stop(None).wait()
        calls.close()
        interceptor.close()


def value(metrics: Metrics, name: str, **labels: str) -> float:
    given = {"grpc_service": "test.Sleeping", "grpc_method": "Sleep", **labels}
    return metrics.registry.get_sample_value(name, given) or 0.0


def test_time_in_the_queue_counts_and_what_is_shed_is_counted() -> None:
    metrics, sleeping = Metrics(), Sleeping()
    with serving(sleeping, metrics, max_calls=3 * THREADS) as client:
        call = client.raw.channel.unary_unary(METHOD, bytes, bytes)
        sent = [call.future(b"", timeout=60) for _ in range(4 * THREADS)]
        # Nobody leaves before all have come.
        wait_until(lambda: sum(one.done() for one in sent) == THREADS, "a quarter is shed")
        sleeping.free.set()
        codes = [one.code() for one in sent]
    answered, shed = (
        codes.count(grpc.StatusCode.OK),
        codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED),
    )
    assert (answered, shed) == (3 * THREADS, THREADS)
    counted = {
        code: value(metrics, "grpc_server_handled_total", grpc_code=code)
        for code in ("OK", "RESOURCE_EXHAUSTED")
    }
    assert counted == {"OK": answered, "RESOURCE_EXHAUSTED": shed}
    # Three rounds of eight: the last waits for two others.
    total = value(metrics, "grpc_server_handling_seconds_sum")
    assert total > 1.5 * answered * SECONDS


def test_calls_whose_callers_left_the_queue_are_not_worked_on() -> None:
    metrics, sleeping = Metrics(), Sleeping()
    with serving(sleeping, metrics, max_calls=64) as client:
        call = client.raw.channel.unary_unary(METHOD, bytes, bytes)
        sent = [call.future(b"", timeout=60) for _ in range(5 * THREADS)]
        while sleeping.ran < THREADS:
            time.sleep(0.01)
        for one in sent:
            one.cancel()
        sleeping.free.set()
        call(b"", timeout=60)
        # Those that ran when they were left, and ours; a few were begun meanwhile.
        assert sleeping.ran <= 3 * THREADS
        counted = value(metrics, "grpc_server_handled_total", grpc_code="CANCELLED")
        assert counted >= 2 * THREADS


def test_searches_indexes_and_the_disk_are_told(repo: Path, tmp_path: Path) -> None:
    with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        client.put_images(images(5))
        client.find(images(5)[1])
        told = client.get_gallery("g").spaces[0].index
        assert (told.in_graph, told.compared, told.delta, told.due) == (0, 0, 5, False)
        with urllib.request.urlopen(f"http://{gateway.metrics_address}/readyz") as page:
            assert page.status == 200
        with urllib.request.urlopen(f"http://{gateway.metrics_address}/metrics") as page:
            lines = dict(line.rsplit(" ", 1) for line in page.read().decode().splitlines())
    assert float(lines['nobackfill_searches_total{searched="exact"}']) == 1
    # Put after the gallery was opened, so beside its base.
    assert float(lines['nobackfill_index_vectors{searched="delta"}']) == 5
    assert float(lines['nobackfill_index_vectors{searched="graph"}']) == 0
    assert float(lines["nobackfill_index_age_seconds"]) == 0
    assert float(lines["nobackfill_disk_free_bytes"]) > 0
    assert float(lines["nobackfill_triton_restarts_total"]) == 0


def test_what_needs_no_token_shares_no_lane_with_what_does() -> None:
    lanes = Lanes(8, limits_callers=True)
    try:
        of_strangers = {
            lanes.lane_of(m, is_stream="Watch" in m).name for m in RULES if RULES[m] is None
        }
        streams = ("PutItems", "FetchFile", "Blob", "Watch", "ActivateRelease", "Reflection")
        of_others = {
            lanes.lane_of(m, is_stream=any(s in m for s in streams)).name
            for m in RULES
            if RULES[m] is not None
        }
        assert not of_strangers & of_others
    finally:
        lanes.close()


def test_health_pages_tell_a_kubelet_when_to_send_calls() -> None:
    metrics = Metrics()
    for address in ("127.0.0.1:0", "[::1]:0"):
        host = address.rpartition(":")[0]
        port = metrics.serve(address).rpartition(":")[2]

        def status(path: str, at: str = f"http://{host}:{port}") -> int:
            try:
                with urllib.request.urlopen(at + path, timeout=10) as page:
                    return int(page.status)
            except urllib.error.HTTPError as error:
                error.close()
                return error.code

        try:
            metrics.is_ready = lambda: False
            assert (status("/healthz"), status("/readyz")) == (200, 503)
            metrics.is_ready = lambda: True
            assert (status("/readyz"), status("/metrics"), status("/other")) == (200, 200, 404)
        finally:
            metrics.close()
