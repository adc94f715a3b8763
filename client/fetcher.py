"""Files of a publication, streamed by a gateway: a fetcher for release/trust.py."""

from collections.abc import Iterator

import grpc
from tuf.api.exceptions import DownloadError, DownloadHTTPError, SlowRetrievalError

from nobackfill.v1 import release_pb2, release_pb2_grpc
from release.errors import NotPermittedError

# Bounds one stream; a file that takes longer is resumed by the next run.
_SECONDS = 600.0
_STATUS = {grpc.StatusCode.NOT_FOUND: 404, grpc.StatusCode.OUT_OF_RANGE: 416}


class GrpcFetcher:
    """The publication folder that the gateway at `channel` serves; URLs are base_url + path."""

    base_url = "gateway:/"

    def __init__(self, channel: grpc.Channel) -> None:
        self._releases = release_pb2_grpc.ReleaseServiceStub(channel)

    def fetch_from(self, url: str, offset: int) -> Iterator[bytes]:
        """See release.fetchers.Fetcher. Raises NotPermittedError, too."""
        path = url.removeprefix(self.base_url)
        request = release_pb2.FetchFileRequest(path=path, offset=offset)
        try:
            for message in self._releases.FetchFile(request, timeout=_SECONDS):
                yield message.chunk
        except grpc.RpcError as error:
            code, text = error.code(), f"{path}: {error.details() or error.code().name}"
            if code in _STATUS:
                raise DownloadHTTPError(text, _STATUS[code]) from error
            if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                # Not a trouble of the network, and trying again will not help.
                raise NotPermittedError(text) from error
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise SlowRetrievalError(text) from error
            raise DownloadError(text) from error
