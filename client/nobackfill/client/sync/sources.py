"""Where releases come from: a gateway, any static HTTP host, or a publication folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nobackfill.errors import ConfigurationError
from nobackfill.release.trust.fetchers import Fetcher, fetcher_for


def normalised(source: str) -> str:
    """The source as it is remembered: folders as absolute paths.

    Raises ConfigurationError for a folder that is not there and for unknown schemes.
    """
    if is_gateway(source) or source.startswith(("http://", "https://")):
        return source
    folder = Path(source).resolve()
    if "://" in source or not folder.is_dir():
        raise ConfigurationError(
            f"expected grpc://HOST:PORT, grpcs://HOST:PORT, http(s)://… or an existing publication "
            f"folder, got {source!r}"
        )
    return str(folder)


def is_gateway(source: str) -> bool:
    """Whether a source is a gateway's address."""
    return source.startswith(("grpc://", "grpcs://"))


@contextmanager
def opened(source: str) -> Iterator[tuple[Fetcher, str]]:
    """The fetcher and base URL of a source, for as long as the context lasts."""
    if not is_gateway(source):
        yield fetcher_for(source)
        return
    from nobackfill.client.sync.fetcher import GatewayFetcher
    from nobackfill.wire.gateway import Gateway

    with Gateway(source) as gateway:
        fetcher = GatewayFetcher(gateway)
        yield fetcher, fetcher.base_url
