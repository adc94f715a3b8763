"""One table of statuses: what the gateway says is what its callers understand."""

import grpc

from nobackfill.errors import NobackfillError, NotFoundError
from nobackfill.server.grpc.errors import CODES
from nobackfill.wire.statuses import ERRORS

# Of these a caller learns less than the gateway knew: a full disk or a message too large is a
# RESOURCE_EXHAUSTED like any other, and to be tried again later.
COARSER = {"CannotWriteError": 75, "TooLargeError": 75, "ConfigurationError": 65}


def test_every_status_that_the_gateway_gives_is_understood() -> None:
    assert set(CODES.values()) == set(ERRORS)


def test_exit_codes_are_those_of_the_error_that_was_raised() -> None:
    for raised, code in CODES.items():
        if issubclass(raised, NobackfillError):
            expected = COARSER.get(raised.__name__, raised.exit_code)
            assert ERRORS[code].exit_code == expected, raised


def test_codes_of_the_contract() -> None:
    assert ERRORS[grpc.StatusCode.OUT_OF_RANGE].exit_code == 65
    assert ERRORS[grpc.StatusCode.NOT_FOUND] is NotFoundError
