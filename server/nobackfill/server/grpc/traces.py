"""Traces for OpenTelemetry, where the OTEL_* variables ask for them: a span a call, and one each of
its parts.

A call notes when its parts began and ended, and its spans are made once it has ended: nothing of
OpenTelemetry is on its way. Without the variables nothing is imported, and nothing is noted.
"""

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

import grpc
import structlog

from nobackfill.errors import ConfigurationError
from nobackfill.extras import extra
from nobackfill.processes import DaemonThreads

log = structlog.get_logger("server.traces")
# At the end the last spans have so long to be sent.
_CLOSED_S = 3.0
# What asks for traces, and what says that there are none.
_ASKED = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_EXPORTER = "OTEL_TRACES_EXPORTER"
_PROTOCOLS = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
# Codes that are the server's fault, by OpenTelemetry's conventions for RPC.
_FAULTS = {
    grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DATA_LOSS,
}  # fmt: skip


class CallTrace:
    """What is noted of one call; one thread at a time works for it."""

    def __init__(self, tracing: "Tracing", method: str, metadata: Mapping[str, Any]) -> None:
        self._tracing, self._method = tracing, method
        self._parent = {name: metadata[name] for name in _CONTEXT if name in metadata}
        # Wall clock once, the steps of the other from there.
        self._began, self._offset = time.monotonic_ns(), time.time_ns() - time.monotonic_ns()
        self._parts: list[tuple[str, int, int]] = []

    def queued(self) -> None:
        """A thread has taken it."""
        self._parts.append(("queue", self._began, time.monotonic_ns()))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The block is a part of it."""
        began = time.monotonic_ns()
        try:
            yield
        finally:
            self._parts.append((name, began, time.monotonic_ns()))

    def end(self, code: grpc.StatusCode, request_id: str) -> None:
        """Hand its spans to the exporter, which waits for nothing here."""
        shifted = [(n, began + self._offset, end + self._offset) for n, began, end in self._parts]
        whole = self._began + self._offset, time.monotonic_ns() + self._offset
        self._tracing.export(self._method, self._parent, whole, shifted, code, request_id)


# What callers say of their own span: W3C Trace Context.
_CONTEXT = ("traceparent", "tracestate")


class Tracing:
    """A provider of its own, so that nothing else in the process is traced."""

    def __init__(self, exporter: Any) -> None:
        """`exporter`: a SpanExporter."""
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = bool(os.environ.get("OTEL_SERVICE_NAME"))
        resource = Resource.create({} if named else {SERVICE_NAME: "nobackfill-gateway"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("nobackfill.server")
        self._extract = TraceContextTextMapPropagator().extract
        self._inside = set_span_in_context
        self._server, self._error = SpanKind.SERVER, Status(StatusCode.ERROR)

    def begin(self, method: str, metadata: Mapping[str, Any]) -> CallTrace:
        """A call of `method` (/package.Service/Method) has arrived."""
        return CallTrace(self, method, metadata)

    def export(
        self, method: str, parent: Mapping[str, str], whole: tuple[int, int],
        parts: list[tuple[str, int, int]], code: grpc.StatusCode, request_id: str,
    ) -> None:  # fmt: skip
        """Times are nanoseconds since 1970."""
        service, _, name = method[1:].partition("/")
        span = self._tracer.start_span(
            f"{service}/{name}", self._extract(parent), self._server, start_time=whole[0],
            attributes={
                "rpc.system": "grpc", "rpc.service": service, "rpc.method": name,
                "rpc.grpc.status_code": code.value[0], "nobackfill.request_id": request_id,
            },
        )  # fmt: skip
        if code in _FAULTS:
            span.set_status(self._error)
        inside = self._inside(span)
        for part, began, ended in parts:
            self._tracer.start_span(part, inside, start_time=began).end(ended)
        span.end(whole[1])

    def close(self) -> None:
        """Send what is left, where the collector takes it in time: OpenTelemetry alone would try
        for half a minute."""
        sent = DaemonThreads(1, "traces").submit(self._provider.shutdown)
        if not wait([sent], _CLOSED_S).done:
            log.warning("the last traces are not sent, the collector does not answer")


def tracing_of(environment: Mapping[str, str]) -> Tracing | None:
    """By OTEL_TRACES_EXPORTER, OTEL_EXPORTER_OTLP_*, OTEL_SDK_DISABLED; None: no traces.

    Raises ConfigurationError for an exporter that is not installed.
    """
    wanted = environment.get(_EXPORTER, "")
    asked = wanted or next((name for name in _ASKED if environment.get(name)), "")
    disabled = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if not asked or wanted == "none" or disabled:
        return None
    with extra("otel"):
        import opentelemetry.sdk.trace  # noqa: F401
    name = wanted or "otlp"
    if name == "otlp":
        protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get(
            "OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"
        )
        name = _PROTOCOLS.get(protocol, protocol)
    found = entry_points(group="opentelemetry_traces_exporter", name=name)
    if not found:
        raise ConfigurationError(
            f"{_EXPORTER}: no exporter {name!r} of OpenTelemetry is installed; "
            "pip install '.[otel]' brings otlp (by gRPC) and console"
        )
    log.info("traces are sent", exporter=name)
    return Tracing(next(iter(found)).load()())
