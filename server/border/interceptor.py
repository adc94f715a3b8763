"""The border of the gateway: the one interceptor every call passes.

It names the request, checks the token and the role, bounds streams and time, turns exceptions into
statuses, and counts. Services behind it only raise.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import BoundedSemaphore
from typing import Any, NamedTuple, NoReturn, TypeAlias

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from release.errors import InvalidInputError
from server.border import calls
from server.border.auth import Tokens, authorize
from server.border.errors import DeadlineError, OverloadedError, code_of, status_of
from server.border.logs import begin_request
from server.border.metrics import Metrics
from server.border.stalls import Stalls

log = structlog.get_logger("server.border")

# Generic in its stubs only.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
MaybeHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"

Behavior = Callable[[Any, grpc.ServicerContext], Any]

MAX_STREAMS = 48


class Border(grpc.ServerInterceptor):
    """Wraps each method once, when it is first called.

    Streams run on threads of their own, so that slow readers never keep searches waiting; there are
    a few threads more than streams allowed, which refuse the others at once.
    """

    def __init__(self, metrics: Metrics, tokens: Tokens | None, max_call_seconds: float) -> None:
        self._metrics = metrics
        self._tokens = tokens
        self._max_call_seconds = max_call_seconds
        self._streams = BoundedSemaphore(MAX_STREAMS)
        self._stream_pool = ThreadPoolExecutor(MAX_STREAMS + 8, thread_name_prefix="stream")
        self._stalls = Stalls()
        # Set when the gateway ends: calls that come now are refused.
        self.draining = False
        self._wrapped: dict[str, Handler] = {}

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], MaybeHandler],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MaybeHandler:
        method = str(handler_call_details.method)
        if self.draining:
            return _going
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            handler = continuation(handler_call_details)
            if handler is None:
                return None
            wrapped = self._wrapped[method] = self._wrap(method, handler)
        return wrapped

    def close(self) -> None:
        """End the stream threads once their streams have ended."""
        self._stalls.close()
        self._stream_pool.shutdown(wait=False, cancel_futures=True)

    def _wrap(self, method: str, handler: Handler) -> Handler:
        passage = _Passage(method, self._metrics, self._tokens, self._max_call_seconds)
        codecs = (_forgiving(handler.request_deserializer), handler.response_serializer)
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(passage.unary(handler.unary_unary), *codecs)
        if handler.stream_unary is not None:
            unary = passage.unary(self._reading(handler.stream_unary), self._streams)
            unary.experimental_thread_pool = self._stream_pool  # type: ignore[attr-defined]
            return grpc.stream_unary_rpc_method_handler(unary, *codecs)
        if handler.unary_stream is not None:
            stream = passage.stream(self._sending(handler.unary_stream), self._streams)
            stream.experimental_thread_pool = self._stream_pool  # type: ignore[attr-defined]
            return grpc.unary_stream_rpc_method_handler(stream, *codecs)
        assert handler.stream_stream is not None, "there are four kinds of calls"
        both = self._sending(self._reading(handler.stream_stream))
        stream = passage.stream(both, self._streams)
        stream.experimental_thread_pool = self._stream_pool  # type: ignore[attr-defined]
        return grpc.stream_stream_rpc_method_handler(stream, *codecs)

    def _reading(self, behavior: Behavior) -> Behavior:
        def call(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
            return behavior(map(_whole, self._stalls.requests(requests, context)), context)

        return call

    def _sending(self, behavior: Behavior) -> Behavior:
        def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            return self._stalls.responses(behavior(request, context), context)

        return call


def _refuse_going(_request: Any, context: grpc.ServicerContext) -> NoReturn:
    context.abort(grpc.StatusCode.UNAVAILABLE, "the gateway is stopping; try again elsewhere")


# A call that sends many messages is refused as well, without reading them.
_going: Handler = grpc.stream_stream_rpc_method_handler(_refuse_going)


class _Malformed:
    """Stands for a request whose bytes are no message, until the border refuses it."""


def _forgiving(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """gRPC itself would answer INTERNAL."""
    if deserialize is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _Malformed()

    return read


def _whole(request: Any) -> Any:
    if isinstance(request, _Malformed):
        raise InvalidInputError("the request is not the protocol's message; use the .proto files")
    return request


class _Status(
    NamedTuple("_Fields", [("code", Any), ("details", Any), ("trailing_metadata", Any)]),
    grpc.Status,
):
    """A status with its error details and the request's id."""


class _Passage:
    """One method's way through the border."""

    def __init__(
        self, method: str, metrics: Metrics, tokens: Tokens | None, max_call_seconds: float
    ) -> None:
        self._method = method
        self._tokens = tokens
        self._max_call_seconds = max_call_seconds
        service, _, name = method.strip("/").rpartition("/")
        self._seconds = metrics.handling.labels(service, name)
        self._handled = {
            code: metrics.handled.labels(service, name, code.name) for code in grpc.StatusCode
        }

    def unary(self, behavior: Behavior, streams: BoundedSemaphore | None = None) -> Behavior:
        def call(request: Any, context: grpc.ServicerContext) -> Any:
            began = time.perf_counter()
            code = grpc.StatusCode.OK
            admitted = streams is None or streams.acquire(blocking=False)
            request_id = ""
            try:
                request_id = self._enter(context, streams is not None)
                _admit(admitted)
                return behavior(_whole(request), context)
            except Exception as error:  # noqa: BLE001 - the one place that may
                code = code_of(error) if context.is_active() else grpc.StatusCode.CANCELLED
                self._refuse(context, error, code, request_id)
            finally:
                if streams is not None and admitted:
                    streams.release()
                self._count(code, began)

        return call

    def stream(self, behavior: Behavior, streams: BoundedSemaphore) -> Behavior:
        def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            began = time.perf_counter()
            code = grpc.StatusCode.OK
            admitted = streams.acquire(blocking=False)
            request_id = ""
            try:
                request_id = self._enter(context, True)
                _admit(admitted)
                yield from behavior(_whole(request), context)
            except GeneratorExit:
                code = grpc.StatusCode.CANCELLED
                raise
            except Exception as error:  # noqa: BLE001 - the one place that may
                code = code_of(error) if context.is_active() else grpc.StatusCode.CANCELLED
                self._refuse(context, error, code, request_id)
            finally:
                if admitted:
                    streams.release()
                self._count(code, began)

        return call

    def _enter(self, context: grpc.ServicerContext, streaming: bool) -> str:
        metadata = dict(context.invocation_metadata())
        request_id = begin_request(_text(metadata.get("x-request-id")))
        principal = authorize(self._method, self._tokens, _text(metadata.get("authorization")))
        left = context.time_remaining()
        if not streaming:
            left = self._max_call_seconds if left is None else min(left, self._max_call_seconds)
        if not context.is_active() or (left is not None and left <= 0):
            raise DeadlineError("the call ended before its turn came; allow more time")
        deadline = time.monotonic() + (left or 86_400)
        calls.begin(calls.Call(principal, deadline, context.is_active))
        return request_id

    def _refuse(
        self,
        context: grpc.ServicerContext,
        error: Exception,
        code: grpc.StatusCode,
        request_id: str,
    ) -> NoReturn:
        unforeseen = code is grpc.StatusCode.INTERNAL
        level = log.exception if unforeseen else log.warning
        level("refused", method=self._method, code=code.name, error=type(error).__name__)
        status = rpc_status.to_status(status_of(error, request_id))
        metadata = (*status.trailing_metadata, ("x-request-id", request_id))
        context.abort_with_status(_Status(status.code, status.details, metadata))

    def _count(self, code: grpc.StatusCode, began: float) -> None:
        self._seconds.observe(time.perf_counter() - began)
        self._handled[code].inc()


def _admit(admitted: bool) -> None:
    if not admitted:
        raise OverloadedError(
            f"{MAX_STREAMS} streams are open already; try again with a growing delay"
        )


def _text(value: str | bytes | None) -> str | None:
    return value if isinstance(value, str) else None
