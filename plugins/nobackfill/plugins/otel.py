"""OpenTelemetry spans: one for each call of the gateway, and one for each of its parts."""

import os
from collections.abc import Mapping
from concurrent.futures import wait
from importlib.metadata import entry_points
from typing import Any

import grpc
import structlog

from nobackfill.errors import ConfigurationError
from nobackfill.extras import extra
from nobackfill.processes import DaemonThreads

with extra("otel"):
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

log = structlog.get_logger("server.traces")
# How long closing waits for the last spans to be sent.
_CLOSED_S = 3.0
_EXPORTER = "OTEL_TRACES_EXPORTER"
_PROTOCOLS = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
# Status codes that are the server's fault, by OpenTelemetry's conventions for RPC.
_FAULTS = {
    grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DATA_LOSS,
}  # fmt: skip


def open_tracing(environment: Mapping[str, str]) -> "OtelTracing":
    """Send spans with the exporter that OTEL_TRACES_EXPORTER and OTEL_EXPORTER_OTLP_* configure.

    Raises:
        ConfigurationError: the exporter is not installed.
    """
    name = environment.get(_EXPORTER) or "otlp"
    if name == "otlp":
        protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get(
            "OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"
        )
        name = _PROTOCOLS.get(protocol, protocol)
    found = entry_points(group="opentelemetry_traces_exporter", name=name)
    if not found:
        raise ConfigurationError(
            f"{_EXPORTER}: no exporter {name!r} of OpenTelemetry is installed; "
            "pip install '.[otel]' installs otlp (by gRPC) and console"
        )
    log.info("traces are sent", exporter=name)
    return OtelTracing(next(iter(found)).load()())


class OtelTracing:
    """Sends spans; implements Tracing. Uses its own provider, so that nothing else in the process
    is traced."""

    def __init__(self, exporter: Any) -> None:
        """Send spans to `exporter`, a SpanExporter."""
        named = bool(os.environ.get("OTEL_SERVICE_NAME"))
        resource = Resource.create({} if named else {SERVICE_NAME: "nobackfill-gateway"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("nobackfill.server")
        self._extract = TraceContextTextMapPropagator().extract

    def export(
        self, method: str, parent: Mapping[str, str], whole: tuple[int, int],
        parts: list[tuple[str, int, int]], code: grpc.StatusCode, request_id: str,
    ) -> None:  # fmt: skip
        service, _, name = method[1:].partition("/")
        span = self._tracer.start_span(
            f"{service}/{name}", self._extract(parent), SpanKind.SERVER, start_time=whole[0],
            attributes={
                "rpc.system": "grpc", "rpc.service": service, "rpc.method": name,
                "rpc.grpc.status_code": code.value[0], "nobackfill.request_id": request_id,
            },
        )  # fmt: skip
        if code in _FAULTS:
            span.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(span)
        for part, began, ended in parts:
            self._tracer.start_span(part, inside, start_time=began).end(ended)
        span.end(whole[1])

    def close(self) -> None:
        """Send the last spans, for at most 3 s; OpenTelemetry alone would try for half a minute."""
        sent = DaemonThreads(1, "traces").submit(self._provider.shutdown)
        if not wait([sent], _CLOSED_S).done:
            log.warning("the last traces are not sent, the collector does not answer")
