"""Implement VaultService: a device's encrypted blobs."""

from collections.abc import Iterator

import grpc

from nobackfill.errors import InvalidInputError
from nobackfill.server.grpc.context import current_call
from nobackfill.server.vault import PAGE, Blob, VaultBlobs
from nobackfill.v1 import vault_pb2 as pb
from nobackfill.v1.vault_pb2_grpc import VaultServiceServicer


class VaultService(VaultServiceServicer):
    """Implement the calls of protos/nobackfill/v1/vault.proto.

    Each caller sees only the blobs of its own token's name.
    """

    def __init__(self, vault: VaultBlobs) -> None:
        self._vault = vault

    def PutBlob(  # noqa: N802 - the contract's name
        self, request_iterator: Iterator[pb.PutBlobRequest], context: grpc.ServicerContext
    ) -> pb.PutBlobResponse:
        """Store a blob, or its next piece, from a stream whose first message describes it.

        Only the first message's blob and offset are read. Pieces before an error stay, so that the
        upload can be continued. If the blob is complete already, neither offset nor pieces are
        read.

        Returns:
            The number of stored bytes; the blob is complete when it equals the size.

        Raises:
            InvalidInputError: the first message has no blob, an id or digest is not valid, or the
                bytes are no age file or have another digest.
            TooLargeError: the blob is too large, or there are more bytes than announced.
            OutOfRangeError: the offset is not the number of stored bytes.
            AlreadyExistsError: the id has another content.
            BusyError: another call writes or deletes the blob.
            QuotaExceededError: the caller's blobs would cost more than the quota.
            CannotWriteError: the blob cannot be written.
            OSError: a file of the vault cannot be read.
        """
        first = next(request_iterator, None)
        if first is None or not first.HasField("blob"):
            raise InvalidInputError(
                "PutBlob: expected the blob's id, size and sha256 in the first message of the "
                "stream, got none; send them first"
            )
        blob = Blob(first.blob.id, first.blob.size, first.blob.sha256)

        def chunks() -> Iterator[bytes]:
            yield first.chunk
            for request in request_iterator:
                yield request.chunk

        received = self._vault.put(_owner(), blob, first.offset, chunks())
        return pb.PutBlobResponse(received=received)

    def GetBlob(  # noqa: N802
        self, request: pb.GetBlobRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GetBlobResponse]:
        """Yield a complete blob in pieces from an offset; the first answer describes it.

        At the end of the blob there is one answer without bytes.

        Raises:
            NotFoundError: the caller has no such complete blob.
            OutOfRangeError: the offset is above the blob's size.
            OSError: the blob's file cannot be read.
        """
        blob, chunks = self._vault.get(_owner(), request.id, request.offset)
        yield pb.GetBlobResponse(chunk=next(chunks, b""), blob=_message(blob))
        for chunk in chunks:
            yield pb.GetBlobResponse(chunk=chunk)

    def DeleteBlob(  # noqa: N802
        self, request: pb.DeleteBlobRequest, context: grpc.ServicerContext
    ) -> pb.DeleteBlobResponse:
        """Delete a blob, or an unfinished upload, for good.

        Raises:
            NotFoundError: the caller has neither.
            BusyError: another call writes or deletes the blob.
            CannotWriteError: it cannot be deleted.
        """
        self._vault.delete(_owner(), request.id)
        return pb.DeleteBlobResponse()

    def ListBlobs(  # noqa: N802
        self, request: pb.ListBlobsRequest, context: grpc.ServicerContext
    ) -> pb.ListBlobsResponse:
        """List a page of the caller's complete blobs by rising id, at most 1000; an empty token
        ends the list.

        Unfinished uploads are left out. After a full page the next one may be empty.

        Raises:
            InvalidInputError: the page token is not one of an earlier answer.
            OSError: a folder of the vault cannot be read.
        """
        blobs = self._vault.list_page(_owner(), request.page_token)
        token = blobs[-1].id if len(blobs) == PAGE else ""
        return pb.ListBlobsResponse(blobs=map(_message, blobs), next_page_token=token)


def _owner() -> str:
    return current_call().principal.name


def _message(blob: Blob) -> pb.Blob:
    return pb.Blob(id=blob.id, size=blob.size, sha256=blob.sha256)
