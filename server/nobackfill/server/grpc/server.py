"""gRPC's threaded server, which says when nothing more has come: what came together is answered
together then.

A search walks through a megabyte, and leaves neither gRPC nor Python in the processor's caches: a
message after it takes three times as long to receive as one after another message. So messages are
received first, then searched for, then answered. That is no public interface of grpcio, so what is
relied upon is checked, here and in executor.py.
"""

import inspect
import threading
import time
from collections.abc import Sequence
from typing import Any

import grpc
from grpc import _server
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from nobackfill.errors import ConfigurationError
from nobackfill.server.grpc.interceptor import Interceptor
from nobackfill.server.grpc.quick_call import QuickCall

_STARTED = _server._ServerStage.STARTED
# Then it is looked whether the server was forgotten, as gRPC does.
_IDLE_S = 1.0
# How often it is looked whether all is answered.
_DRAINED_S = 0.01
# Events that may come while calls are gathered: of other calls they need not end.
_PATIENCE = 64
_PARAMETERS = (
    "self", "thread_pool", "generic_handlers", "interceptors", "options",
    "maximum_concurrent_rpcs", "compression", "xds",
)  # fmt: skip


class Server(_server._Server):
    """Calls pass `interceptor`, and are answered by its pool."""

    def __init__(
        self,
        interceptor: Interceptor,
        options: Sequence[tuple[str, Any]],
    ) -> None:
        """Raises ConfigurationError for a grpcio that works otherwise."""
        if tuple(inspect.signature(_server._Server.__init__).parameters) != _PARAMETERS:
            raise ConfigurationError(
                f"grpcio {grpc.__version__} makes servers otherwise than expected; install the "
                "version that constraints.txt names"
            )
        pool: Any = interceptor.pool
        super().__init__(pool, (), [interceptor], options, None, None, False)
        self._interceptor = interceptor

    def start(self) -> None:
        """As gRPC's, with another loop. Raises ValueError if it was started."""
        state = self._state
        with state.lock:
            if state.stage is not _server._ServerStage.STOPPED:
                raise ValueError("started already")
            state.server.start()
            state.stage = _STARTED
            for method in state.registered_method_handlers:
                _server._request_registered_call(state, method)
            _server._request_call(state)
        threading.Thread(target=_serve, args=(state, self._interceptor), daemon=True).start()

    def finish(self, end: float) -> None:
        """Wait until what is being answered now has ended, at most until `end` on the monotonic
        clock. What comes meanwhile is not waited for."""
        with self._state.lock:
            left = set(self._state.rpc_states)
        while left and time.monotonic() < end:
            time.sleep(_DRAINED_S)
            # Some have become calls of grpcio's meanwhile.
            left = {one.listed if isinstance(one, QuickCall) else one for one in left}
            with self._state.lock:
                left &= self._state.rpc_states


def _serve(state: Any, interceptor: Interceptor) -> None:
    executor, since = interceptor.pool, 0
    while True:
        since = since + 1 if executor.gathered else 0
        event = state.completion_queue.poll(time.time() + (0 if since else _IDLE_S))
        if state.server_deallocated:
            _server._begin_shutdown_once(state)
        came = event.completion_type != cygrpc.CompletionType.queue_timeout
        if (
            came
            and not _quickly(state, interceptor, event)
            and not _server._process_event_and_continue(state, event)
        ):
            return
        # Whose calls are all that are open, they are waited for no longer.
        alone = len(state.rpc_states) <= executor.gathered
        if executor.gathered and (alone or not came or since >= _PATIENCE):
            executor.answer_gathered()
        # gRPC's own loop says why: an event may hold a call that has ended.
        event = None


def _quickly(state: Any, interceptor: Interceptor, event: Any) -> bool:
    """Whether it was the arrival of a call that this thread may answer; its message is awaited."""
    method = event.tag
    if type(method) is not str or not event.success or state.stage is not _STARTED:
        return False
    handling = interceptor.arrive(method, event.invocation_metadata)
    if handling is None:
        return False
    with state.lock:
        if state.stage is not _STARTED:
            return False
        state.due.remove(method)
        call = QuickCall(event, handling.rpc, handling.write, state.rpc_states)
        _server._request_registered_call(state, method)
    interceptor.pool.take(call)
    return True
