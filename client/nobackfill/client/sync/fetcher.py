"""Files of a publication, streamed by a gateway: a fetcher for nobackfill.release.trust."""

from collections.abc import Iterator

from tuf.api.exceptions import DownloadError, DownloadHTTPError, SlowRetrievalError

from nobackfill.errors import (
    DeadlineError,
    NobackfillError,
    NotFoundError,
    NotPermittedError,
    OutOfRangeError,
)
from nobackfill.release.trust.fetchers import SILENCE_SECONDS
from nobackfill.wire.gateway import Gateway

_HTTP = {NotFoundError: 404, OutOfRangeError: 416}


class GatewayFetcher:
    """The publication folder of a gateway; URLs are base_url + path."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.base_url = f"{gateway.address}/"

    def fetch_from(self, url: str, offset: int) -> Iterator[bytes]:
        """See nobackfill.release.trust.fetchers.Fetcher. Raises NotPermittedError, too.

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
