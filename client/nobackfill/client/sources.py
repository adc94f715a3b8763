"""Where releases come from: a gateway, any static HTTP host, or a publication folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tuf.api.exceptions import DownloadError, DownloadHTTPError, SlowRetrievalError

from nobackfill.errors import (
    ConfigurationError,
    DeadlineError,
    NobackfillError,
    NotFoundError,
    NotPermittedError,
    OutOfRangeError,
)
from nobackfill.release.trust.trust import SILENCE_SECONDS, Fetcher, fetcher_for

if TYPE_CHECKING:
    from nobackfill.wire.gateway import Gateway


def normalised_source(source: str) -> str:
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
def open_source(source: str) -> Iterator[tuple[Fetcher, str]]:
    """The fetcher and base URL of a source, for as long as the context lasts."""
    if not is_gateway(source):
        yield fetcher_for(source)
        return
    # Only here, as most sources need no gRPC.
    from nobackfill.wire.gateway import Gateway

    with Gateway(source) as gateway:
        fetcher = GatewayFetcher(gateway)
        yield fetcher, fetcher.base_url


_HTTP = {NotFoundError: 404, OutOfRangeError: 416}


class GatewayFetcher:
    """The publication folder of a gateway; URLs are base_url + path."""

    def __init__(self, gateway: "Gateway") -> None:
        self._gateway = gateway
        self.base_url = f"{gateway.address}/"

    def fetch_from(self, url: str, offset: int) -> Iterator[bytes]:
        """See nobackfill.release.trust.trust.Fetcher. Raises NotPermittedError, too.

        The deadline of a stream is the silence that is allowed: one that brought something by then
        is taken up where it ended.
        """
        path = url.removeprefix(self.base_url)
        came = offset
        while True:
            started = came
            try:
                for chunk in self._gateway.fetch_file(path, came, seconds=SILENCE_SECONDS):
                    came += len(chunk)
                    yield chunk
                return
            except NotPermittedError:
                # Not a trouble of the network, and trying again will not help.
                raise
            except DeadlineError as error:
                if came == started:
                    raise SlowRetrievalError(
                        f"{path}: nothing came for {SILENCE_SECONDS:g} s"
                    ) from error
            except NobackfillError as error:
                status = _HTTP.get(type(error))
                text = f"{path}: {error}"
                raise (
                    DownloadError(text) if status is None else DownloadHTTPError(text, status)
                ) from error
