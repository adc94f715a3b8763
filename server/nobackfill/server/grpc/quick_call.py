"""A call whose message is received and answered on gRPC's own thread: two requests to gRPC's core,
where a call of grpcio's takes three, and keeps a state that nobody looks at. Whatever needs more
becomes such a call. As in executor.py, no public interface of grpcio.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
from grpc import _server
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from nobackfill.server.grpc.arrival import Arrival
from nobackfill.server.grpc.logs import name_request
from nobackfill.server.grpc.rpc import Rpc


class QuickCall:
    """One of them, from its arrival; among the server's open calls until it has ended."""

    def __init__(
        self, event: Any, rpc: Rpc, write: Callable[[Any], bytes], open_calls: set[Any]
    ) -> None:
        """`event`: grpcio's of its arrival; `write`: what its answer's bytes are made by."""
        self.rpc = rpc
        self.event = event
        self.began = time.monotonic()
        self._write = write
        self._open_calls = open_calls
        self._lock = threading.Lock()
        self._whole: Arrival | None = None
        self._came = False
        open_calls.add(self)

    @property
    def listed(self) -> Any:
        """What stands for it among the server's open calls."""
        return self if self._whole is None else self._whole.state

    def receive(self, received: Callable[[bytes | None], None]) -> None:
        """Ask for the message; `received` gets it, or None when none will come."""

        def come(event: Any) -> Any:
            message = _server._serialized_request(event)
            with self._lock:
                self._came, ended = True, self._whole
            if ended is None:
                if message is None:
                    self.whole().state.client = _server._CLOSED
                received(message)
                return None, ()
            # With a second status a call never ends, nor the server.
            with ended.state.condition:
                finished = _server._possibly_finish_call(
                    ended.state, _server._RECEIVE_MESSAGE_TOKEN
                )
            received(None)
            return finished

        self.event.call.start_server_batch((cygrpc.ReceiveMessageOperation(0),), come)

    def is_wanted(self) -> bool:
        """Whether the caller may still wait."""
        return bool(self.event.call_details.deadline > time.time())

    def send(self, answer: bytes) -> None:
        """Answer with a message that is there. It ends with what grpcio learns of the caller."""
        self.rpc.end(grpc.StatusCode.OK)
        self.event.call.start_server_batch(
            (
                cygrpc.SendInitialMetadataOperation(None, 0),
                cygrpc.SendMessageOperation(answer, 0),
                cygrpc.SendStatusFromServerOperation(None, cygrpc.StatusCode.ok, b"", 0),
                cygrpc.ReceiveCloseOnServerOperation(0),
            ),
            lambda _event: (self, ()),
        )

    def end_unread(self, code: grpc.StatusCode, sentence: str) -> None:
        """End a call whose message has not come; nothing, once it has: whoever has it answers."""
        with self._lock:
            if self._came:
                return
            whole = self._become()
        whole.end_unread(code, sentence)

    def whole(self) -> Arrival:
        """The same as a call of grpcio's, which knows whether its caller has left."""
        with self._lock:
            return self._become()

    def _become(self) -> Arrival:
        if self._whole is not None:
            return self._whole
        state: Any = _server._RPCState()  # type: ignore[no-untyped-call]
        state.context.run(name_request, self.rpc.request_id)
        with state.condition:
            self.event.call.start_server_batch(
                (cygrpc.ReceiveCloseOnServerOperation(0),), _server._receive_close_on_server(state)
            )
            state.due.add(_server._RECEIVE_CLOSE_ON_SERVER_TOKEN)
            if not self._came:
                state.due.add(_server._RECEIVE_MESSAGE_TOKEN)
        # Never none of them: the server would take itself for idle.
        self._open_calls.add(state)
        self._open_calls.remove(self)
        respond = _server._unary_response_in_pool
        self._whole = Arrival(
            state.context.run, respond, self.event, state, self.rpc, bytes, None, self._write
        )
        return self._whole
