"""Traces of calls, where the OTEL_* variables ask for them.

A call notes when its parts began and ended, and is handed on once it has ended: nothing of
OpenTelemetry is on its way. Without the variables nothing is imported, and nothing is noted.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import grpc

from nobackfill.extras import load_plugin

# What asks for traces.
_ASKED = (
    "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
)  # fmt: skip
# What callers say of their own span: W3C Trace Context.
_CONTEXT = ("traceparent", "tracestate")


class Tracing(Protocol):
    """What takes the spans of calls: the plug-in of `nobackfill.telemetry` makes one."""

    def export(
        self, method: str, parent: Mapping[str, str], whole: tuple[int, int],
        parts: list[tuple[str, int, int]], code: grpc.StatusCode, request_id: str,
    ) -> None:  # fmt: skip
        """Take a call of `method` (/package.Service/Method) and its parts by name.

        `whole`, `parts`: begin and end, nanoseconds since 1970. `parent`: what the caller says of
        its own span. It waits for nothing.
        """
        ...

    def close(self) -> None:
        """Send what is left, where the collector takes it in time."""
        ...


class CallTrace:
    """What is noted of one call; one thread at a time works for it."""

    def __init__(self, tracing: Tracing, method: str, metadata: Mapping[str, Any]) -> None:
        """A call of `method` (/package.Service/Method) has arrived."""
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


def tracing_of(environment: Mapping[str, str]) -> Tracing | None:
    """By OTEL_TRACES_EXPORTER, OTEL_EXPORTER_OTLP_*, OTEL_SDK_DISABLED; None: no traces.

    Raises ConfigurationError for an exporter that is not installed.
    """
    disabled = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    none = environment.get("OTEL_TRACES_EXPORTER") == "none"
    if disabled or none or not any(map(environment.get, _ASKED)):
        return None
    tracing: Tracing = load_plugin("telemetry", "otel")(environment)
    return tracing
