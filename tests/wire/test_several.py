"""One client of several gateways: what one does not answer, the next does."""

from contextlib import ExitStack

import grpc
import pytest

from nobackfill.errors import ConfigurationError, UnavailableError
from nobackfill.wire.gateway import Gateway
from tests.wire.scripted import Scripted, serving

# Nothing listens there.
GONE = "127.0.0.1:1"


def ask(gateway: Gateway) -> int:
    return gateway.search("gallery", embeddings={"sp-x": [1.0, 0.0]}).release


def stopping(call: int, context: grpc.ServicerContext) -> None:
    context.abort(grpc.StatusCode.UNAVAILABLE, "the gateway is stopping; try again elsewhere")


def cut(call: int, context: grpc.ServicerContext) -> None:
    context.abort(grpc.StatusCode.CANCELLED, "")


def test_a_call_that_an_ending_gateway_cuts_is_made_again() -> None:
    with serving() as (scripted, address), serving() as (other, elsewhere):
        scripted.behave = cut
        with Gateway(f"{address}, {elsewhere}", seconds=10) as gateway:
            assert [ask(gateway) for _ in range(5)] == [7] * 5
        assert scripted.calls <= 1
        assert other.calls == 5


def test_the_next_is_asked_where_one_is_gone_or_ends() -> None:
    with ExitStack() as closing:
        served = [closing.enter_context(serving()) for _ in range(2)]
        scripted: list[Scripted] = [one for one, _ in served]
        addresses = ",".join([GONE, *(address for _, address in served)])
        gateway = closing.enter_context(Gateway(addresses, seconds=10))
        for ending in (0, 1):
            for one in scripted:
                one.behave, one.calls = lambda call, context: None, 0
            scripted[ending].behave = stopping
            # With the one that answers it stays.
            assert [ask(gateway) for _ in range(20)] == [7] * 20
            assert scripted[ending].calls <= 1
            assert scripted[1 - ending].calls == 20


def test_the_only_gateway_of_many_is_reached_before_the_pauses_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The client begins at the first address, so that all that are gone come before the other.
    monkeypatch.setattr("nobackfill.wire.connection.random.randrange", lambda gateways: 0)
    with (
        serving() as (_, address),
        Gateway(",".join([*([GONE] * 20), address]), seconds=10) as gateway,
    ):
        assert ask(gateway) == 7


def test_that_none_answers_is_said() -> None:
    with (
        Gateway(f"grpc://{GONE},127.0.0.1:2", seconds=0.5) as gateway,
        pytest.raises(UnavailableError, match="nothing listens there"),
    ):
        ask(gateway)


def test_an_address_between_commas_is_no_nothing() -> None:
    with pytest.raises(ConfigurationError, match="several hosts separated by"):
        Gateway(f"{GONE},")
