"""The address of a store's server, private and without a password in it, and what it answers."""

from urllib.parse import SplitResult, urlsplit

from nobackfill.errors import (
    BusyError,
    ConfigurationError,
    NobackfillError,
    NotFoundError,
    NotPermittedError,
    UnavailableError,
)
from nobackfill.loopback import is_loopback

# What a status of HTTP means; all others say that the request is unfit.
STATUSES: dict[int, type[NobackfillError]] = {
    401: NotPermittedError, 403: NotPermittedError, 404: NotFoundError, 429: BusyError,
    500: UnavailableError, 502: UnavailableError, 503: UnavailableError, 504: UnavailableError,
}  # fmt: skip


def server_address(place: str, kind: str, key: str) -> SplitResult:
    """The parts of https://HOST:PORT, or of http:// on this machine: vectors are private.

    `key`: the variable that a server's key belongs into. Raises ConfigurationError.
    """
    try:
        parts = urlsplit(place)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigurationError(f"{kind}: expected https://HOST:PORT as its address") from error
    if "@" in parts.netloc:
        raise ConfigurationError(f"{kind}: expected no password in the address, but a key in {key}")
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigurationError(f"{kind}: expected https://HOST:PORT as its address")
    if parts.scheme == "http" and not is_loopback(host):
        raise ConfigurationError(f"{kind}: expected https://{host}; vectors are private")
    return parts
