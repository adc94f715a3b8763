"""Files of a publication, streamed by a gateway: a fetcher for release/trust.py."""

from collections.abc import Iterator

import grpc
from tuf.api.exceptions import DownloadError, DownloadHTTPError, SlowRetrievalError

from nobackfill.errors import NotPermittedError
from nobackfill.release.trust.fetchers import SILENCE_SECONDS
from nobackfill.v1 import release_pb2, release_pb2_grpc
from nobackfill.wire.statuses import sentence

_STATUS = {grpc.StatusCode.NOT_FOUND: 404, grpc.StatusCode.OUT_OF_RANGE: 416}


class GrpcFetcher:
    """The publication folder of the gateway `source`, at `channel`; URLs are base_url + path."""

    def __init__(self, channel: grpc.Channel, source: str) -> None:
        self._releases = release_pb2_grpc.ReleaseServiceStub(channel)
        self.base_url = f"{source}/"

    def fetch_from(self, url: str, offset: int) -> Iterator[bytes]:
        """See nobackfill.release.trust.fetchers.Fetcher. Raises NotPermittedError, too.

        The deadline of a stream is the silence that is allowed: one that brought something by then
        is taken up where it ended.
        """
        path = url.removeprefix(self.base_url)
        came = offset
        while True:
            started = came
            request = release_pb2.FetchFileRequest(path=path, offset=came)
            stream = self._releases.FetchFile(request, timeout=SILENCE_SECONDS)
            try:
                for message in stream:
                    came += len(message.chunk)
                    yield message.chunk
                return
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED or came == started:
                    raise _translated(error, path) from error
            finally:
                stream.cancel()


def _translated(error: grpc.RpcError, path: str) -> DownloadError | NotPermittedError:
    code = error.code()
    text = f"{path}: {sentence(error)}"
    if code in _STATUS:
        return DownloadHTTPError(text, _STATUS[code])
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        # Not a trouble of the network, and trying again will not help.
        return NotPermittedError(text)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return SlowRetrievalError(f"{path}: nothing came for {SILENCE_SECONDS:g} s")
    return DownloadError(text)
