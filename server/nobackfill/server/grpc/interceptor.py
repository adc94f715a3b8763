"""The one interceptor that every call passes, as soon as its headers come.

It names the request and checks the token and the role, before a thread is taken or a message read.
What follows is in rpc.py. Services behind it only raise.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import grpc

from nobackfill.errors import NobackfillError, UnavailableError
from nobackfill.server.grpc.auth import RULES, authorize
from nobackfill.server.grpc.executor import PATIENCE_S, CallExecutor
from nobackfill.server.grpc.lanes import Lanes
from nobackfill.server.grpc.logs import name_request, request_name
from nobackfill.server.grpc.messages import reader
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.grpc.rpc import AtOnce, Kind, Rpc
from nobackfill.server.grpc.stalls import Stalls
from nobackfill.server.grpc.tokens import Tokens
from nobackfill.server.grpc.traces import Tracing

# Generic in its stubs only.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Metadata: TypeAlias = "Iterable[tuple[str, str | bytes]]"
MaybeHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


class Interceptor(grpc.ServerInterceptor):
    """Wraps each call. `pool` is what gRPC hands them to."""

    def __init__(
        self,
        metrics: Metrics,
        tokens: Tokens | None,
        max_calls: int,
        max_call_seconds: float,
        patience_s: float = PATIENCE_S,
        slow: Callable[[str], bool] = lambda _gallery: False,
        at_once: Mapping[str, AtOnce] = MappingProxyType({}),
        tracing: Tracing | None = None,
    ) -> None:
        """`patience_s`: how long a unary call may take to send its message. `slow`: whether
        searches of a gallery take long, which then take no threads of the others. `at_once`: what
        answers calls of a method where they arrive, if it can."""
        self._slow = slow
        self._at_once = at_once
        self._tracing = tracing
        self._metrics = metrics
        self._tokens = tokens
        self._max_call_seconds = max_call_seconds
        self._lanes = Lanes(max_calls, shared=tokens is not None)
        self._executor = CallExecutor(self._lanes, max_calls, patience_s, metrics)
        self._stalls = Stalls(metrics)
        self._draining = False
        self._kinds: dict[str, tuple[Kind, Handler]] = {}
        awaited = self._executor.awaited
        metrics.calls.lanes = {
            "message": (awaited, awaited),
            **{name: (lane.held, lane.waiting) for name, lane in self._lanes.all.items()},
        }

    @property
    def pool(self) -> CallExecutor:
        return self._executor

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], MaybeHandler],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MaybeHandler:
        method = str(handler_call_details.method)
        known = self._kinds.get(method)
        if known is None:
            handler = continuation(handler_call_details)
            if handler is None:
                self._metrics.calls.count_unknown()
                return None
            known = self._kinds[method] = (self._kind(method, handler), handler)
        handling = self._handling(known, handler_call_details.invocation_metadata)
        name_request(handling.rpc.request_id)
        return handling

    def arrive(self, method: str, metadata: Metadata) -> "Handling | None":
        """How a call is handled that may be answered where it arrives; None: as any other, or it is
        not let in."""
        known = self._kinds.get(method)
        if known is None or known[0].at_once is None or self._tracing is not None:
            return None
        handling = self._handling(known, metadata)
        return handling if handling.rpc.refusal is None else None

    def _handling(self, known: "tuple[Kind, Handler]", metadata: Metadata) -> "Handling":
        kind, handler = known
        told = dict(metadata)
        rpc = Rpc(kind, request_name(_text(told.get("x-request-id"))))
        rpc.session = _text(told.get("x-session"))
        if self._tracing is not None:
            rpc.trace = self._tracing.begin(kind.method, told)
        try:
            if self._draining:
                raise UnavailableError("the gateway is stopping; try again elsewhere")
            tokens, shown = self._tokens, _text(told.get("authorization"))
            principal = authorize(kind.method, tokens, shown)
            confirm = None
            if tokens is not None and RULES[kind.method] is not None:
                confirm = partial(tokens.confirm, shown, principal)
            rpc.let_in(principal, confirm)
        except NobackfillError as error:
            rpc.refusal = error
        return Handling(handler, rpc, kind.write)

    def drain(self) -> None:
        """The gateway ends: calls that come now are refused, and those that nobody works on end."""
        self._draining = True
        self._executor.give_up()
        self._stalls.end_all()

    def close(self) -> None:
        """End the threads once their calls have ended."""
        self._stalls.close()
        self._executor.close()
        self._lanes.close()

    def _kind(self, method: str, handler: Handler) -> Kind:
        streams = bool(handler.request_streaming or handler.response_streaming)
        behavior = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )
        assert behavior is not None, "there are four kinds of calls"
        assert handler.request_deserializer is not None, "generated code brings one"
        return Kind(
            method=method,
            behavior=behavior,
            read=reader(handler.request_deserializer),
            write=_serializer(handler.response_serializer),
            reads_stream=bool(handler.request_streaming),
            sends_stream=bool(handler.response_streaming),
            lane=self._lanes.of(method, streams=streams),
            stalls=self._stalls,
            metrics=self._metrics,
            max_call_seconds=self._max_call_seconds,
            slow=self._slow,
            at_once=self._at_once.get(method),
        )


class Handling(grpc.RpcMethodHandler):  # type: ignore[type-arg] # generic in its stubs only
    """A call, as gRPC wants to have it handled: messages come as bytes, the rpc reads them."""

    request_deserializer = None

    def __init__(self, handler: Handler, rpc: Rpc, write: Callable[[Any], bytes]) -> None:
        self.rpc = rpc
        self.request_streaming = handler.request_streaming
        self.response_streaming = handler.response_streaming
        self.response_serializer = self.write = write
        # gRPC looks at the one that the two flags name.
        self.unary_unary = self.unary_stream = self.stream_unary = self.stream_stream = rpc


def _serializer(of_message: Callable[[Any], bytes] | None) -> Callable[[Any], bytes]:
    """Some behaviors answer with bytes already."""
    assert of_message is not None, "generated code brings one"
    return lambda answer: answer if isinstance(answer, bytes) else of_message(answer)


def _text(value: str | bytes | None) -> str | None:
    return value if isinstance(value, str) else None
