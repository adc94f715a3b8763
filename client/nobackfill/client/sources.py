"""Sources of releases: a gateway, a static HTTP host, or a publication folder."""

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
    """Return the source in the form that galleries store: folders become absolute paths.

    Raises:
        ConfigurationError: the folder does not exist, or the scheme is unknown.
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
    """Return whether a source is a gateway's address."""
    return source.startswith(("grpc://", "grpcs://"))


@contextmanager
def open_source(source: str) -> Iterator[tuple[Fetcher, str]]:
    """Open a source; yields its fetcher and base URL."""
    if not is_gateway(source):
        yield fetcher_for(source)
        return
    # Imported here: most sources need no gRPC.
    from nobackfill.wire.gateway import Gateway

    with Gateway(source) as gateway:
        fetcher = GatewayFetcher(gateway)
        yield fetcher, fetcher.base_url


_HTTP = {NotFoundError: 404, OutOfRangeError: 416}


class GatewayFetcher:
    """Fetch files of a gateway's publication; a URL is base_url + path."""

    def __init__(self, gateway: "Gateway") -> None:
        self._gateway = gateway
        self.base_url = f"{gateway.address}/"

    def fetch_from(self, url: str, offset: int) -> Iterator[bytes]:
        """Yield the bytes of a file from `offset`, as nobackfill.release.trust.trust.Fetcher says.

        Each stream has a deadline of SILENCE_SECONDS. A stream that delivered bytes before its
        deadline is resumed where it ended.

        Raises:
            NotPermittedError: the gateway refuses the call.
            DownloadError: the download failed; SlowRetrievalError if no byte came in time.
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
                # Not a network failure: trying again does not help.
                raise
            except DeadlineError as error:
                if came == started:
                    raise SlowRetrievalError(
                        f"{path}: no bytes arrived for {SILENCE_SECONDS:g} s"
                    ) from error
            except NobackfillError as error:
                status = _HTTP.get(type(error))
                text = f"{path}: {error}"
                raise (
                    DownloadError(text) if status is None else DownloadHTTPError(text, status)
                ) from error
