"""Spans as a collector receives them over OTLP; none unless they are asked for."""

import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from nobackfill.errors import ConfigurationError, NotFoundError
from nobackfill.server.grpc.traces import read_tracing
from nobackfill.v1 import search_pb2
from tests.server.conftest import Stages
from tests.server.process import serving
from tests.server.support import Client, images, refused, running
from tests.support.blocks import png

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service_grpc

IN_PROCESS = "--triton=in-process"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(service_grpc.TraceServiceServicer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.received: list[Any] = []

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        with self.lock:
            self.received.append(request)
        return service_pb.ExportTraceServiceResponse()

    def spans(self) -> list[Any]:
        return [
            span
            for request in self.received
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


def without_numbers(span: Any) -> bytes:
    """A span without numbers, random ones and times, whose bytes may be any."""
    copied = type(span)()
    copied.CopyFrom(span)
    for field in (
        *("trace_id", "span_id", "parent_span_id"),
        *("start_time_unix_nano", "end_time_unix_nano"),
    ):
        copied.ClearField(field)
    bare: bytes = copied.SerializeToString()
    return bare


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    add: Any = service_grpc.add_TraceServiceServicer_to_server
    add(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def test_a_collector_gets_a_span_a_call_with_its_parts(
    stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as (collector, address):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        with running(stages[1], tmp_path / "data") as gateway, Client(gateway.address) as client:
            client.create_gallery("g")
            client.put_images(images(3))
            request = search_pb2.SearchRequest(
                gallery="g", query=search_pb2.Query(image=png(images(1)[0])), k=1
            )
            context = ("traceparent", f"00-{TRACE}-{PARENT}-01")
            client.raw.searches.Search(request, metadata=(context, ("x-request-id", "mine")))
            with refused(NotFoundError):
                client.find(images(1)[0], "none")
        # What was left went with the gateway's end.
        spans = collector.spans()
        resource = collector.received[0].resource_spans[0].resource
    told = {one.key: one.value.string_value for one in resource.attributes}
    assert told["service.name"] == "nobackfill-gateway"
    calls = [span for span in spans if span.name.startswith("nobackfill.v1.")]
    assert [span.name.rpartition("/")[2] for span in calls].count("Search") == 2
    (mine,) = [span for span in calls if span.trace_id.hex() == TRACE]
    assert mine.parent_span_id.hex() == PARENT
    values = {one.key: one.value for one in mine.attributes}
    assert values["nobackfill.request_id"].string_value == "mine"
    assert values["rpc.grpc.status_code"].int_value == 0
    parts = [span for span in spans if span.parent_span_id == mine.span_id]
    assert {"queue", "embed"} <= {part.name for part in parts}
    for part in parts:
        assert mine.start_time_unix_nano <= part.start_time_unix_nano
        assert part.start_time_unix_nano <= part.end_time_unix_nano <= mine.end_time_unix_nano
    (put,) = [span for span in calls if span.name.endswith("PutItems")]
    stored = [span.name for span in spans if span.parent_span_id == put.span_id]
    assert stored == ["queue", "embed", "store"]
    # An image, a vector or an item's name is in none of them.
    assert not any(b"i0" in without_numbers(span) for span in spans)


@pytest.mark.long
def test_a_collector_that_is_away_delays_no_end(stages: Stages, tmp_path: Path) -> None:
    shutil.copytree(stages[1], tmp_path / "repo")
    around = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    with (
        serving(tmp_path / "repo", tmp_path / "data", IN_PROCESS, **around) as served,
        Client(served.address) as client,
    ):
        client.list_releases()
        began = time.monotonic()
        assert served.stop() == 0
        took = time.monotonic() - began
    assert any("not sent" in event["event"] for event in served.events())
    # A container has 30 s.
    assert took < 20, took


def test_nothing_is_traced_unless_it_is_asked_for() -> None:
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    assert read_tracing({"PATH": "/bin"}) is None
    assert read_tracing({**endpoint, "OTEL_SDK_DISABLED": "true"}) is None
    assert read_tracing({**endpoint, "OTEL_TRACES_EXPORTER": "none"}) is None
    with pytest.raises(ConfigurationError, match="no exporter 'jaeger'"):
        read_tracing({"OTEL_TRACES_EXPORTER": "jaeger"})
