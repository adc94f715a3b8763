"""OpenTelemetry spans: one for each call of the gateway, and one for each of its parts."""

import os
from collections.abc import Mapping
from concurrent.futures import wait
from importlib.metadata import entry_points
from typing import Any

import grpc
import structlog

from nobackfill.errors import ConfigurationError
from nobackfill.extras import require_extra
from nobackfill.processes import DaemonThreads

with require_extra("otel"):
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

log = structlog.get_logger("server.traces")
# How long closing waits for the last spans to be sent.
_CLOSE_S = 3.0
_EXPORTER = "OTEL_TRACES_EXPORTER"
_PROTOCOLS = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
# Status codes that are the server's fault, by OpenTelemetry's conventions for RPC.
_FAULTS = {
    grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DATA_LOSS,
}  # fmt: skip


def open_tracing(environment: Mapping[str, str]) -> "OtelTracing":
    """Start to send spans with the exporter that OpenTelemetry's variables configure.

    Args:
        environment: OTEL_TRACES_EXPORTER names the exporter; empty or otlp: OTLP, by the protocol
            of OTEL_EXPORTER_OTLP_TRACES_PROTOCOL or OTEL_EXPORTER_OTLP_PROTOCOL, by default grpc;
            another protocol counts as an exporter's name. The exporter itself reads its other
            variables from the process's environment.

    Returns:
        The tracing, which the caller closes. The exporter's name is logged. Where several packages
        offer the exporter, the first one found is used.

    Raises:
        ConfigurationError: the exporter is not installed.
        Exception: any error of the exporter's constructor.
    """
    name = environment.get(_EXPORTER) or "otlp"
    if name == "otlp":
        protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get(
            "OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"
        )
        name = _PROTOCOLS.get(protocol, protocol)
    exporters = entry_points(group="opentelemetry_traces_exporter", name=name)
    if not exporters:
        raise ConfigurationError(
            f"{_EXPORTER}: no exporter {name!r} of OpenTelemetry is installed; pip install "
            "'.[otel]' in the folder of nobackfill's source installs otlp (by gRPC) and console"
        )
    log.info("traces are sent", exporter=name)
    return OtelTracing(next(iter(exporters)).load()())


class OtelTracing:
    """Sends the gateway's calls as spans, in the background.

    It uses its own provider, so that nothing else in the process is traced.
    """

    def __init__(self, exporter: Any) -> None:
        """Start the thread that sends spans in batches.

        The thread runs until `close`.

        Args:
            exporter: a SpanExporter of OpenTelemetry. The service is nobackfill-gateway unless
                OTEL_SERVICE_NAME names it.
        """
        has_name = bool(os.environ.get("OTEL_SERVICE_NAME"))
        resource = Resource.create({} if has_name else {SERVICE_NAME: "nobackfill-gateway"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("nobackfill.server")
        self._extract = TraceContextTextMapPropagator().extract

    def export(
        self, method: str, parent: Mapping[str, str], times: tuple[int, int],
        parts: list[tuple[str, int, int]], code: grpc.StatusCode, request_id: str,
    ) -> None:  # fmt: skip
        """Queue the spans of one call; they are sent later.

        Never blocks: if the queue is full, spans are dropped. After `close`, nothing is sent. Any
        thread may call it.

        Args:
            method: the full name, /PACKAGE.SERVICE/METHOD.
            parent: the call's metadata; a W3C `traceparent` in it links the span to the caller's.
            times: start and end of the call, in nanoseconds since 1970.
            parts: name, start and end of each part, in nanoseconds since 1970.
            code: the status; a fault of the server marks the span as an error.
            request_id: the id of the request, an attribute of the span.
        """
        service, _, name = method[1:].partition("/")
        span = self._tracer.start_span(
            f"{service}/{name}", self._extract(parent), SpanKind.SERVER, start_time=times[0],
            attributes={
                "rpc.system": "grpc", "rpc.service": service, "rpc.method": name,
                "rpc.grpc.status_code": code.value[0], "nobackfill.request_id": request_id,
            },
        )  # fmt: skip
        if code in _FAULTS:
            span.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(span)
        for part, start, end in parts:
            self._tracer.start_span(part, inside, start_time=start).end(end)
        span.end(times[1])

    def close(self) -> None:
        """Send the last spans, for at most 3 s; log a warning if the collector does not answer.

        A second call does nothing.
        """
        # OpenTelemetry alone would try for half a minute.
        end = DaemonThreads(1, "traces").submit(self._provider.shutdown)
        if not wait([end], _CLOSE_S).done:
            log.warning(
                "the last spans were not sent, because OpenTelemetry's collector does not answer; "
                "check the variable OTEL_EXPORTER_OTLP_ENDPOINT"
            )
