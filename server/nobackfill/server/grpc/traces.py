"""Trace calls, if the OTEL_* variables ask for it.

A call records when its parts began and ended, and is exported once it has ended: OpenTelemetry runs
outside the request path. Without the variables nothing is imported, and nothing recorded.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import grpc

from nobackfill.extras import load_plugin

# Variables that ask for traces.
_VARIABLES = (
    "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
)  # fmt: skip
# Headers with the caller's span: W3C Trace Context.
_CONTEXT = ("traceparent", "tracestate")


class Tracing(Protocol):
    """Export the spans of calls; the plug-in of `nobackfill.telemetry` implements it."""

    def export(
        self, method: str, parent: Mapping[str, str], times: tuple[int, int],
        parts: list[tuple[str, int, int]], code: grpc.StatusCode, request_id: str,
    ) -> None:  # fmt: skip
        """Export one call, without waiting; a call that cannot be exported is dropped, and nothing
        is raised.

        Args:
            method: /package.Service/Method.
            parent: headers of the caller's span; empty without one.
            times: begin and end of the call, nanoseconds since 1970.
            parts: name, begin and end of each part, in the order of their ends.
            code: the status of the call.
            request_id: id of the request.
        """

    def close(self) -> None:
        """Export what is left, if the collector takes it in time; spans that it does not take are
        lost.
        """


class CallTrace:
    """Record one call; one thread at a time works for it."""

    def __init__(self, tracing: Tracing, method: str, metadata: Mapping[str, Any]) -> None:
        """Begin when the call has arrived, which is now.

        Args:
            tracing: exports the call.
            method: /package.Service/Method.
            metadata: headers of the call; only the caller's span is read.
        """
        self._tracing, self._method = tracing, method
        self._parent = {name: metadata[name] for name in _CONTEXT if name in metadata}
        # The wall clock is read once; steps are measured on the monotonic clock.
        self._began, self._offset = time.monotonic_ns(), time.time_ns() - time.monotonic_ns()
        self._parts: list[tuple[str, int, int]] = []

    def end_queue_part(self) -> None:
        """Record that a thread has taken the call: the part `queue` lasts from its arrival until
        now. Call it once.
        """
        self._parts.append(("queue", self._began, time.monotonic_ns()))

    @contextmanager
    def record_part(self, name: str) -> Iterator[None]:
        """Record the block as a part of the call, also if it raises; the error passes.

        Args:
            name: a fixed word that names the part.
        """
        began = time.monotonic_ns()
        try:
            yield
        finally:
            self._parts.append((name, began, time.monotonic_ns()))

    def end(self, code: grpc.StatusCode, request_id: str) -> None:
        """Export the call and its parts, without waiting; call it once.

        Parts that have not ended are left out.

        Args:
            code: the status of the call.
            request_id: id of the request.
        """
        shifted = [(n, began + self._offset, end + self._offset) for n, began, end in self._parts]
        times = self._began + self._offset, time.monotonic_ns() + self._offset
        self._tracing.export(self._method, self._parent, times, shifted, code, request_id)


def read_tracing(environment: Mapping[str, str]) -> Tracing | None:
    """Make what exports traces, as OTEL_TRACES_EXPORTER, OTEL_EXPORTER_OTLP_* and OTEL_SDK_DISABLED
    say.

    Args:
        environment: the environment variables; an empty value counts as none.

    Returns:
        The exporter, which has a thread of its own and which the caller closes; None if no traces
        are requested, or OTEL_SDK_DISABLED is true or OTEL_TRACES_EXPORTER is none.

    Raises:
        ConfigurationError: the exporter, or the extra that it needs, is not installed, or the
            plug-in cannot be imported.
        Exception: any error of importing or constructing OpenTelemetry's exporter.
    """
    is_disabled = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    is_none = environment.get("OTEL_TRACES_EXPORTER") == "none"
    if is_disabled or is_none or not any(map(environment.get, _VARIABLES)):
        return None
    tracing: Tracing = load_plugin("telemetry", "otel")(environment)
    return tracing
