"""What may be asked without TLS."""

import pytest

from nobackfill.loopback import is_loopback


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.8.8", "::1", "[::1]"])
def test_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "0.0.0.0",
        "::",
        "10.0.0.1",
        "localhost.example.org",
        "127.0.0.1.example.org",
        "127.1",
        "2130706433",
        "/run/postgresql",
        "[::1].example.org",
    ],
)
def test_others(host: str) -> None:
    assert not is_loopback(host)
