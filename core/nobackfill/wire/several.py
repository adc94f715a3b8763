"""Several gateways as one channel: calls go to one of them, and to the next once that does not
answer. Whoever makes a call again meets another gateway then."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import grpc

# What a gateway says that ends or is overrun, and what is said of one that is gone or hangs.
_LEAVE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)


def one_of(channels: Sequence[grpc.Channel]) -> grpc.Channel:
    """A channel to all of them; closing it closes them."""
    return channels[0] if len(channels) == 1 else _Several(channels)


class _Several(grpc.Channel):
    """What is said of each method: grpc.Channel."""

    def __init__(self, channels: Sequence[grpc.Channel]) -> None:
        self._channels = channels
        # Many clients with the same list begin at different gateways.
        self.current = random.randrange(len(channels))  # noqa: S311 - no secret

    def leave(self, number: int) -> None:
        """Ask the next from here on, unless another call has left this one already."""
        if self.current == number:
            self.current = (number + 1) % len(self._channels)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, [one.unary_unary(*args, **kwargs) for one in self._channels])

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, [one.unary_stream(*args, **kwargs) for one in self._channels])

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, [one.stream_unary(*args, **kwargs) for one in self._channels])

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, [one.stream_stream(*args, **kwargs) for one in self._channels])

    def subscribe(self, callback: Callable[..., Any], try_to_connect: bool | None = None) -> None:
        self._channels[self.current].subscribe(callback, bool(try_to_connect))

    def unsubscribe(self, callback: Callable[..., Any]) -> None:
        for channel in self._channels:
            channel.unsubscribe(callback)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> "_Several":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Method:
    """One method of a service, of each gateway."""

    def __init__(self, several: _Several, each: Sequence[Callable[..., Any]]) -> None:
        self._several = several
        self._each = each

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        number = self._several.current
        try:
            answer = self._each[number](*args, **kwargs)
        except grpc.RpcError as error:
            if error.code() in _LEAVE:
                self._several.leave(number)
            raise
        # Whether a stream ends well is known when it has ended, which it may have already.
        if isinstance(answer, grpc.Call) and not answer.add_callback(
            lambda: self._ended(number, answer)
        ):
            self._ended(number, answer)
        return answer

    def _ended(self, number: int, stream: Any) -> None:
        if stream.code() in _LEAVE:
            self._several.leave(number)
