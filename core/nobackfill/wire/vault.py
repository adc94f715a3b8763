"""VaultService: blobs of ciphertext, in pieces."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property

from nobackfill.errors import NotFoundError
from nobackfill.v1 import vault_pb2 as pb
from nobackfill.v1.vault_pb2_grpc import VaultServiceStub
from nobackfill.wire.connection import Connection


class Vault(Connection):
    """Blobs of the vault. A transfer is one try: whoever makes it resumes at what is held."""

    @cached_property
    def _vault(self) -> VaultServiceStub:
        return VaultServiceStub(self._channel)

    def held_of_blob(self, blob: pb.Blob) -> int:
        """Bytes that the vault has of a blob."""
        request = pb.PutBlobRequest(blob=blob)
        return int(self._again(lambda t: self._vault.PutBlob(iter([request]), timeout=t)).received)

    def put_blob(
        self,
        blob: pb.Blob,
        chunks: Iterable[bytes],
        offset: int = 0,
        *,
        seconds: float | None = None,
    ) -> int:
        """Send a blob from `offset` on, within `seconds`; bytes that the vault has then.

        Raises InvalidInputError, TooLargeError, QuotaExceededError, OutOfRangeError.
        """

        def requests() -> Iterator[pb.PutBlobRequest]:
            first = True
            for chunk in chunks:
                yield pb.PutBlobRequest(
                    blob=blob if first else None, offset=offset if first else 0, chunk=chunk
                )
                first = False

        return int(
            self._once(
                lambda t: self._vault.PutBlob(requests(), timeout=t), seconds=seconds
            ).received
        )

    def get_blob(
        self, blob_id: str, offset: int = 0, *, seconds: float | None = None
    ) -> Iterator[bytes]:
        """A blob from an offset on, in pieces, within `seconds`. Raises NotFoundError."""
        request = pb.GetBlobRequest(id=blob_id, offset=offset)
        stream = self._vault.GetBlob(request, timeout=seconds or self.seconds)
        return (answer.chunk for answer in self._followed(stream))

    def delete_blob(self, blob_id: str) -> None:
        """Delete a blob; one that is not there is fine."""
        request = pb.DeleteBlobRequest(id=blob_id)
        with suppress(NotFoundError):
            self._again(lambda t: self._vault.DeleteBlob(request, timeout=t))

    def list_blobs(self, page_token: str = "") -> pb.ListBlobsResponse:
        """A page of blobs by id, and the token of the next."""
        request = pb.ListBlobsRequest(page_token=page_token)
        return self._again(lambda t: self._vault.ListBlobs(request, timeout=t))
