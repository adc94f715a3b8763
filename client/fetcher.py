"""python-tuf's fetcher over a gateway's FetchFile stream."""

from collections.abc import Iterator

import grpc
from tuf.api.exceptions import DownloadError, DownloadHTTPError
from tuf.ngclient.fetcher import FetcherInterface

from nobackfill.v1 import release_pb2, release_pb2_grpc

# A gateway that sends nothing for this long is gone; a whole file may take its time.
_FIRST_SECONDS = 10.0
_FILE_SECONDS = 600.0


class GrpcFetcher(FetcherInterface):
    """Streams the files of the publication folder that the gateway at `channel` serves.

    URLs are `base_url` + path; a file that is not there is HTTP's 404, which ngclient knows.
    """

    base_url = "gateway:/"

    def __init__(self, channel: grpc.Channel) -> None:
        self._releases = release_pb2_grpc.ReleaseServiceStub(channel)

    def _fetch(self, url: str) -> Iterator[bytes]:
        return self.fetch_from(url, 0)

    def fetch_from(self, url: str, offset: int) -> Iterator[bytes]:
        """The file's bytes from `offset` on. Raises DownloadError; DownloadHTTPError 404, 416."""
        path = url.removeprefix(self.base_url)
        request = release_pb2.FetchFileRequest(path=path, offset=offset)
        messages = self._releases.FetchFile(request, timeout=_FILE_SECONDS)
        # The first message is asked for here, so that "not found" is raised before any byte.
        first = self._next(messages, url)
        return self._chunks(first, messages, url)

    def _chunks(
        self,
        first: release_pb2.FetchFileResponse | None,
        messages: Iterator[release_pb2.FetchFileResponse],
        url: str,
    ) -> Iterator[bytes]:
        message = first
        while message is not None:
            yield message.chunk
            message = self._next(messages, url)

    @staticmethod
    def _next(
        messages: Iterator[release_pb2.FetchFileResponse], url: str
    ) -> release_pb2.FetchFileResponse | None:
        try:
            return next(messages, None)
        except grpc.RpcError as error:
            status = {grpc.StatusCode.NOT_FOUND: 404, grpc.StatusCode.OUT_OF_RANGE: 416}
            if error.code() in status:
                raise DownloadHTTPError(
                    f"{url}: {error.details()}", status[error.code()]
                ) from error
            raise DownloadError(f"{url}: {error.code().name}: {error.details()}") from error
