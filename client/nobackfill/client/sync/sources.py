"""Where releases come from: a gateway, any static HTTP host, or a publication folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nobackfill.errors import ConfigurationError
from nobackfill.release.trust.fetchers import Fetcher, fetcher_for

_GATEWAY = {"grpc://": False, "grpcs://": True}


def normalised(source: str) -> str:
    """The source as it is remembered: folders as absolute paths.

    Raises ConfigurationError for a folder that is not there and for unknown schemes.
    """
    if gateway_address(source) is not None or source.startswith(("http://", "https://")):
        return source
    folder = Path(source).resolve()
    if "://" in source or not folder.is_dir():
        raise ConfigurationError(
            f"expected grpc://HOST:PORT, grpcs://HOST:PORT, http(s)://… or an existing publication "
            f"folder, got {source!r}"
        )
    return str(folder)


def gateway_address(source: str) -> tuple[str, bool] | None:
    """(HOST:PORT, whether TLS) of a gateway source, None for the others."""
    for scheme, tls in _GATEWAY.items():
        if source.startswith(scheme):
            return source.removeprefix(scheme).rstrip("/"), tls
    return None


@contextmanager
def opened(source: str) -> Iterator[tuple[Fetcher, str]]:
    """The fetcher and base URL of a source, for as long as the context lasts."""
    gateway = gateway_address(source)
    if gateway is None:
        yield fetcher_for(source)
        return
    from nobackfill.client.sync.fetcher import GrpcFetcher
    from nobackfill.wire.channel import open_channel

    address, tls = gateway
    with open_channel(address, tls=tls) as channel:
        gateway_fetcher = GrpcFetcher(channel, source)
        yield gateway_fetcher, gateway_fetcher.base_url
