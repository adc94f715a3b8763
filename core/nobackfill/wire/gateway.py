"""The Python client for apps: search a gateway's galleries in five lines.

    from nobackfill.wire.gateway import Gateway

    with Gateway("127.0.0.1:50051") as gateway:
        for hit in gateway.search("gallery", image="query.png", k=5).hits:
            print(hit.id, hit.distance, hit.score)

Everything else of the API is there through `nobackfill.v1`; this file covers what apps do all day.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.filters import Filter, Scalar, check
from nobackfill.v1 import (
    gallery_pb2,
    gallery_pb2_grpc,
    search_pb2,
    search_pb2_grpc,
)
from nobackfill.wire import calls
from nobackfill.wire.channel import open_channel
from nobackfill.wire.expressions import to_expression, to_value

Image = bytes | str | Path


class Gateway:
    """A connection to one gateway, usable from several threads.

    `address` is HOST:PORT. With `tls`, certificates and a bearer token come from the variables that
    `nobackfill.wire.channel` names. `seconds` bounds each call with all its retries. Methods
    raise the errors of nobackfill.errors.
    """

    def __init__(self, address: str, *, tls: bool = False, seconds: float = 30.0) -> None:
        self._address = address
        self._seconds = seconds
        self._channel = open_channel(address, tls=tls)
        self._search = search_pb2_grpc.SearchServiceStub(self._channel)
        self._galleries = gallery_pb2_grpc.GalleryServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def search(
        self,
        gallery: str,
        *,
        image: Image | None = None,
        embeddings: Mapping[str, Sequence[float]] | None = None,
        k: int = 10,
        where: Mapping[str, Scalar] | Filter | None = None,
        ef: int | None = None,
        exact: bool = False,
    ) -> search_pb2.SearchResponse:
        """The `k` (1 to 1000) items of `gallery` nearest to an image, or to embeddings by space id.

        `where` lets only items pass whose metadata equals the given values, or that pass a filter
        of nobackfill.gallery.filters: `All((Range("year", at_least=2020), Not(OneOf("tag", ("sea",
        )))))`.
        `ef` (1 to 4096) candidates at least are looked at, with `exact` all items: that finds more,
        and takes longer. Raises InvalidInputError, NotFoundError, a PreconditionError with its
        reason, UnavailableError.
        """
        if (image is None) == (embeddings is None):
            raise InvalidInputError("expected either image= or embeddings=")
        if exact and ef is not None:
            raise InvalidInputError("expected ef= or exact=, not both: exact looks at all items")
        query = search_pb2.Query()
        if image is not None:
            query.image = _bytes(image)
        for space, vector in (embeddings or {}).items():
            values = np.ascontiguousarray(vector, "<f4").tobytes()
            query.embeddings.embeddings.add(space=space, values=values)
        request = search_pb2.SearchRequest(gallery=gallery, query=query, k=k)
        if isinstance(where, Mapping):
            # Gateways before expressions answer these, too; an expression they would not see.
            for key, value in where.items():
                request.filter.conditions.add(key=key, equals=to_value(value))
        elif where is not None:
            check(where)
            request.filter.expression.CopyFrom(to_expression(where))
        if exact:
            request.accuracy.exact = True
        elif ef is not None:
            request.accuracy.ef = ef
        return calls.retried(
            lambda timeout: self._search.Search(request, timeout=timeout),
            self._address,
            seconds=self._seconds,
        )

    def create(self, gallery: str) -> gallery_pb2.Gallery:
        """Make an empty gallery in the active release's space. Raises AlreadyExistsError.

        Not retried: after a lost answer a second try could not tell its own gallery from another's.
        """
        request = gallery_pb2.CreateGalleryRequest(name=gallery)
        with calls.translated(self._address):
            return self._galleries.CreateGallery(request, timeout=self._seconds).gallery

    def put(
        self,
        gallery: str,
        images: Mapping[str, Image],
        metadata: Mapping[str, Mapping[str, Scalar]] | None = None,
    ) -> dict[str, str]:
        """Store images by id; durable when this returns. Returns {id: why it was refused}.

        Putting is idempotent by id, so a broken stream is sent again from its start.
        """

        def requests() -> Iterable[gallery_pb2.PutItemsRequest]:
            yield gallery_pb2.PutItemsRequest(gallery=gallery)
            for name, image in images.items():
                item = gallery_pb2.PutItem(id=name, image=_bytes(image))
                for key, value in (metadata or {}).get(name, {}).items():
                    item.metadata[key].CopyFrom(to_value(value))
                yield gallery_pb2.PutItemsRequest(items=[item])

        def attempt(timeout: float) -> dict[str, str]:
            refused: dict[str, str] = {}
            for answer in self._galleries.PutItems(iter(requests()), timeout=timeout):
                refused.update((error.id, error.message) for error in answer.errors)
            return refused

        # A long stream may rightly take all the time there is.
        return calls.retried(attempt, self._address, seconds=self._seconds, each=self._seconds)

    def delete(self, gallery: str, ids: Sequence[str]) -> int:
        """Delete items; how many of them existed."""
        request = gallery_pb2.DeleteItemsRequest(gallery=gallery, ids=ids)
        with calls.translated(self._address):
            return int(self._galleries.DeleteItems(request, timeout=self._seconds).deleted)


def _bytes(image: Image) -> bytes:
    return image if isinstance(image, bytes) else Path(image).read_bytes()
