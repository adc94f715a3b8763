"""One call as grpcio hands it to its pool: received, then answered, from whichever thread."""

import time
from collections.abc import Callable
from typing import Any

import grpc
from grpc import _server
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from nobackfill.errors import NobackfillError
from nobackfill.server.grpc.rpc import Rpc


class Arrival:
    """A call as grpcio hands it to its pool."""

    def __init__(
        self, run: Callable[..., object], respond: Callable[..., object], event: Any, state: Any,
        rpc: Rpc, argument: Callable[[], Any], _read: object, write: object,
    ) -> None:  # fmt: skip
        self.rpc = rpc
        self.event = event
        self.state = state
        self.argument = argument
        self._run = run
        self._respond = respond
        self._write = write
        self._came = False
        self.began = time.monotonic()

    def whole(self) -> "Arrival":
        """As a call of grpcio's, which it is."""
        return self

    def answer(self, argument: Callable[[], Any]) -> None:
        """Call the behavior on this thread, and send what it answers."""
        self._run(self._respond, self.event, self.state, self.rpc, argument, None, self._write)

    def send(self, answer: bytes) -> None:
        """Answer with a message that is there."""
        self.rpc.end(grpc.StatusCode.OK)
        _server._status(self.event, self.state, answer)

    def is_wanted(self) -> bool:
        """Whether the caller still waits."""
        open_ = self.state.client is not _server._CANCELLED
        return open_ and self.event.call_details.deadline > time.time()

    def deadline(self) -> float:
        """Until when its answer may come, on the monotonic clock."""
        left = float(self.event.call_details.deadline) - time.time()
        return time.monotonic() + min(left, self.rpc.seconds())

    def refuse(self, error: NobackfillError) -> None:
        """Answer with a refusal, without waiting for anything."""
        self.rpc.refusal = error
        self.answer(lambda: b"")

    def receive(self, received: Callable[[bytes | None], None]) -> None:
        """Ask for the message; `received` gets it, or None when none will come."""
        take = _server._receive_message(self.state, self.event.call, None)

        def come(event: Any) -> Any:
            finished = take(event)
            with self.state.condition:
                message, self.state.request = self.state.request, None
                # With a second status a call never ends, nor the server.
                self._came = True
                if self.state.statused:
                    message = None
            received(message)
            return finished

        with self.state.condition:
            operation = cygrpc.ReceiveMessageOperation(0)
            self.event.call.start_server_batch((operation,), come)
            self.state.due.add(_server._RECEIVE_MESSAGE_TOKEN)

    def end_unread(self, code: grpc.StatusCode, sentence: str) -> None:
        """End a call whose message has not come; its receiving ends with None. Nothing, once it
        has come: whoever has it answers."""
        with self.state.condition:
            if not self._came and not self.state.statused:
                self.rpc.code = code
                number = _server._application_code(code)
                _server._abort(self.state, self.event.call, number, sentence.encode())
