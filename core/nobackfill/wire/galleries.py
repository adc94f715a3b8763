"""GalleryService and SearchService: galleries, the items in them, and searches among them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC
from functools import cached_property
from pathlib import Path

import numpy as np

from nobackfill.errors import AlreadyExistsError, InvalidInputError, TooLargeError
from nobackfill.gallery.filters import Filter, Scalar
from nobackfill.gallery.spec import Metadata
from nobackfill.text import check_text
from nobackfill.v1 import gallery_pb2, search_pb2
from nobackfill.v1.gallery_pb2_grpc import GalleryServiceStub
from nobackfill.v1.search_pb2_grpc import SearchServiceStub
from nobackfill.wire.answers import Answer, Hit, Image, Item, Status
from nobackfill.wire.connection import Connection
from nobackfill.wire.values import fill_value, from_metadata, origin_name, to_filter

Where = Mapping[str, Scalar] | Filter
# Vectors by the id of their space.
Embeddings = Mapping[str, Sequence[float]]
FEEDBACK: Mapping[str, search_pb2.FeedbackKind] = {
    "clicked": search_pb2.FEEDBACK_KIND_CLICKED,
    "confirmed": search_pb2.FEEDBACK_KIND_CONFIRMED,
    "rejected": search_pb2.FEEDBACK_KIND_REJECTED,
}


class SearchCalls(Connection):
    """Searches of a gallery."""

    @cached_property
    def _searches(self) -> SearchServiceStub:
        return SearchServiceStub(self._channel)

    def search(
        self,
        gallery: str,
        *,
        image: Image | None = None,
        text: str | None = None,
        embeddings: Embeddings | None = None,
        k: int = 10,
        where: Where | None = None,
        ef: int | None = None,
        exact: bool = False,
        session: str | None = None,
    ) -> Answer[Hit]:
        """The `k` (1 to 1000) items of `gallery` nearest to an image, to a text (at most 64 KiB),
        or to embeddings by space id.

        `where` lets only items pass whose metadata equals the given values, or that pass a filter
        of nobackfill.gallery.filters: `All((Range("year", at_least=2020), Not(OneOf("tag", ("sea",
        )))))`.
        `ef` (1 to 4096) candidates at least are looked at, with `exact` all items: that finds more,
        and takes longer. `session` says whose search it is, where a canary chooses by that. Raises
        InvalidInputError, TooLargeError, NotFoundError, a PreconditionError with its reason
        (NoEncoderError: its release embeds no images, or no texts),
        UnavailableError.
        """
        request = search_pb2.SearchRequest(
            gallery=gallery,
            query=_query(image, text, embeddings),
            k=k,
            filter=to_filter(where),
            accuracy=_accuracy(ef, exact),
        )
        metadata = None if session is None else (("x-session", session),)
        return _answer(
            self._again(lambda t: self._searches.Search(request, timeout=t, metadata=metadata))
        )

    def feedback(self, gallery: str, request_id: str, item: str, kind: str) -> bool:
        """Say what became of an answer: its `item` was clicked, confirmed or rejected.

        Returns whether that says something about a canary under way. Raises InvalidInputError for
        another kind, or without a request id.
        """
        if kind not in FEEDBACK:
            raise InvalidInputError(
                f"kind: expected one of {', '.join(sorted(FEEDBACK))}, got {kind!r}"
            )
        request = search_pb2.FeedbackRequest(
            gallery=gallery, request_id=request_id, item_id=item, kind=FEEDBACK[kind]
        )
        return self._again(lambda t: self._searches.Feedback(request, timeout=t)).counted

    def search_batch(
        self,
        gallery: str,
        *,
        images: Sequence[Image] = (),
        texts: Sequence[str] = (),
        embeddings: Sequence[Embeddings] = (),
        k: int = 10,
        where: Where | None = None,
        ef: int | None = None,
        exact: bool = False,
    ) -> Sequence[Answer[Hit]]:
        """Like `search`, of at most 256 queries on one snapshot: the images' answers, then the
        texts', then the embeddings'. A query that is refused alone has its `error` instead of
        hits."""
        request = search_pb2.SearchBatchRequest(
            gallery=gallery,
            queries=[
                *(_query(image, None, None) for image in images),
                *(_query(None, text, None) for text in texts),
                *(_query(None, None, vectors) for vectors in embeddings),
            ],
            k=k,
            filter=to_filter(where),
            accuracy=_accuracy(ef, exact),
        )
        answer = self._again(lambda t: self._searches.SearchBatch(request, timeout=t))
        return [_answer(response) for response in answer.responses]


def image_bytes(image: Image) -> bytes:
    """An encoded image as it is sent. Raises InvalidInputError for a file that cannot be read,
    TooLargeError above what a gateway takes; nothing was sent then."""
    # Loads Pillow: only who sends images does.
    from nobackfill.images import LARGEST_BYTES, read_file

    if not isinstance(image, bytes):
        try:
            return read_file(Path(image))
        except InvalidInputError as error:
            raise type(error)(f"{image}: {error}") from error
    if len(image) > LARGEST_BYTES:
        raise TooLargeError(
            f"image: expected at most {LARGEST_BYTES} bytes, got {len(image)}; send a smaller copy"
        )
    return image


def _query(
    image: Image | None, text: str | None, embeddings: Embeddings | None
) -> search_pb2.Query:
    if sum(one is not None for one in (image, text, embeddings)) != 1:
        raise InvalidInputError("expected one of image=, text= and embeddings=")
    if image is not None:
        return search_pb2.Query(image=image_bytes(image))
    if text is not None:
        return search_pb2.Query(text=check_text(text))
    query = search_pb2.Query()
    for space, vector in (embeddings or {}).items():
        values = np.ascontiguousarray(vector, "<f4").tobytes()
        query.embeddings.embeddings.add(space=space, values=values)
    return query


def _accuracy(ef: int | None, exact: bool) -> search_pb2.Accuracy | None:
    if exact and ef is not None:
        raise InvalidInputError("expected ef= or exact=, not both: exact looks at all items")
    if exact:
        return search_pb2.Accuracy(exact=True)
    return None if ef is None else search_pb2.Accuracy(ef=ef)


def _answer(response: search_pb2.SearchResponse) -> Answer[Hit]:
    hits = [
        Hit(
            id=hit.id,
            distance=hit.distance,
            score=hit.score if hit.HasField("score") else None,
            release=hit.release,
            origin=origin_name(hit.origin) or "",
            metadata=from_metadata(hit.metadata),
            beyond_calibration=hit.beyond_calibration,
        )
        for hit in response.hits
    ]
    ends = response.space_ends_at if response.HasField("space_ends_at") else None
    return Answer(
        hits,
        response.release,
        response.space,
        None if ends is None else ends.ToDatetime(UTC),
        response.error,
        response.request_id,
    )


# One message of items: at most so many, and it is sent when it is this large.
_ITEMS = 100
_BYTES = 4 * 2**20
_PAGE = 500


class GalleryCalls(Connection):
    """Galleries, and their items by id."""

    @cached_property
    def _galleries(self) -> GalleryServiceStub:
        return GalleryServiceStub(self._channel)

    def create_gallery(
        self, gallery: str, *, exact_distances: bool = False, exist_ok: bool = False
    ) -> gallery_pb2.Gallery:
        """Make an empty gallery in the active release's space. `exist_ok`: one that is there
        already is returned as it is. Raises AlreadyExistsError.

        Not retried: after a lost answer a second try could not tell its own gallery from another's.
        """
        request = gallery_pb2.CreateGalleryRequest(name=gallery, exact_distances=exact_distances)
        try:
            return self._once(lambda t: self._galleries.CreateGallery(request, timeout=t)).gallery
        except AlreadyExistsError:
            if not exist_ok:
                raise
            return self.get_gallery(gallery)

    def get_gallery(self, gallery: str) -> gallery_pb2.Gallery:
        """One gallery and its spaces. Raises NotFoundError."""
        request = gallery_pb2.GetGalleryRequest(name=gallery)
        return self._again(lambda t: self._galleries.GetGallery(request, timeout=t)).gallery

    def list_galleries(self) -> Iterator[gallery_pb2.Gallery]:
        """All galleries, by name; asked for by page, as thousands are too many for one answer."""
        request = gallery_pb2.ListGalleriesRequest(page_size=_PAGE)
        while True:
            answer = self._again(lambda t: self._galleries.ListGalleries(request, timeout=t))
            yield from answer.galleries
            if not answer.next_page_token:
                return
            request.page_token = answer.next_page_token

    def update_gallery(
        self, gallery: str, *, exact_distances: bool | None = None,
        source: gallery_pb2.ItemSource | None = None, both_models: bool | None = None,
    ) -> gallery_pb2.Gallery:  # fmt: skip
        """Change whether a gallery answers with distances as they were computed, where its images
        can be had again (an empty address: nowhere), and whether the model before ranks what was
        carried, too. None: left as it is."""
        request = gallery_pb2.UpdateGalleryRequest(
            name=gallery, exact_distances=exact_distances, source=source, both_models=both_models
        )
        return self._again(lambda t: self._galleries.UpdateGallery(request, timeout=t)).gallery

    def delete_gallery(self, gallery: str) -> None:
        """Delete a gallery and all its items. Raises NotFoundError."""
        request = gallery_pb2.DeleteGalleryRequest(name=gallery)
        self._once(lambda t: self._galleries.DeleteGallery(request, timeout=t))

    def status(self, gallery: str) -> Status:
        """How many items a gallery holds, and which release answers in it. Raises NotFoundError."""
        found = self.get_gallery(gallery)
        return Status(found.items, found.release)

    def put(
        self,
        gallery: str,
        images: Mapping[str, Image],
        metadata: Mapping[str, Mapping[str, Scalar]] | None = None,
    ) -> Mapping[str, str]:
        """Store images by id; durable when this returns. Returns {id: why it was refused}.

        An id that exists is replaced, unless it has the very same content. A file that cannot be
        read, or is larger than a gateway takes, is refused here, unsent.
        """
        unsent: dict[str, str] = {}

        def items() -> Iterator[gallery_pb2.PutItem]:
            for name, image in images.items():
                try:
                    yield _item(name, image, (metadata or {}).get(name, {}))
                except InvalidInputError as error:
                    unsent[name] = str(error)

        return {**self.put_items(gallery, items()), **unsent}

    def put_texts(
        self,
        gallery: str,
        texts: Mapping[str, str],
        metadata: Mapping[str, Mapping[str, Scalar]] | None = None,
    ) -> Mapping[str, str]:
        """As `put`, of texts, each of at most 64 KiB: notes, passages of documents."""
        unsent: dict[str, str] = {}

        def items() -> Iterator[gallery_pb2.PutItem]:
            for name, text in texts.items():
                try:
                    item = gallery_pb2.PutItem(id=name, text=check_text(text))
                except InvalidInputError as error:
                    unsent[name] = str(error)
                    continue
                yield _noted(item, (metadata or {}).get(name, {}))

        return {**self.put_items(gallery, items()), **unsent}

    def put_items(
        self,
        gallery: str,
        items: Iterable[gallery_pb2.PutItem],
        stored: Callable[[int], object] = lambda count: None,
    ) -> Mapping[str, str]:
        """Store images, texts, or vectors made elsewhere, by id; returns {id: why it was refused}.

        They go in pieces, each of which is durable when `stored(items so far)` is called; putting
        is idempotent by id, so a piece that broke off is sent again.
        """
        refused: dict[str, str] = {}
        count = 0
        for piece in _pieces(items):
            for answer in self._put(gallery_pb2.PutItemsRequest(gallery=gallery, items=piece)):
                refused.update((error.id, error.message) for error in answer.errors)
            count += len(piece)
            stored(count - len(refused))
        return refused

    def _put(self, piece: gallery_pb2.PutItemsRequest) -> Sequence[gallery_pb2.PutItemsResponse]:
        def attempt(timeout: float) -> Sequence[gallery_pb2.PutItemsResponse]:
            return tuple(self._galleries.PutItems(iter([piece]), timeout=timeout))

        # It may rightly take all the time there is.
        return self._again(attempt, each=self.seconds)

    def get(self, gallery: str, id: str) -> Item:
        """One item. Raises NotFoundError."""
        request = gallery_pb2.GetItemRequest(gallery=gallery, id=id)
        return _read(self._again(lambda t: self._galleries.GetItem(request, timeout=t)))

    def list(
        self, gallery: str, *, where: Where | None = None, least_certain: bool = False
    ) -> Iterator[Item]:
        """Items as they were put, all or those that pass `where`, asked for by page.

        `least_certain`: those that an upgrade made, the least certain first.
        """
        request = gallery_pb2.ListItemsRequest(
            gallery=gallery, filter=to_filter(where), page_size=_PAGE
        )
        if least_certain:
            request.order = gallery_pb2.ITEM_ORDER_LEAST_CERTAIN
        return self._listed(request)

    def _listed(self, request: gallery_pb2.ListItemsRequest) -> Iterator[Item]:
        while True:
            answer = self._again(lambda t: self._galleries.ListItems(request, timeout=t))
            yield from map(_read, answer.items)
            if not answer.next_page_token:
                return
            request.page_token = answer.next_page_token

    def count(self, gallery: str, *, where: Where | None = None) -> int:
        """How many items there are, or pass `where`."""
        request = gallery_pb2.CountItemsRequest(gallery=gallery, filter=to_filter(where))
        return int(self._again(lambda t: self._galleries.CountItems(request, timeout=t)).items)

    def set_metadata(
        self,
        gallery: str,
        values: Metadata,
        *,
        ids: Sequence[str] = (),
        where: Where | None = None,
        remove: Sequence[str] = (),
    ) -> int:
        """Add or replace metadata, and remove keys, of items by id or filter; how many have it."""
        request = gallery_pb2.SetMetadataRequest(gallery=gallery, ids=ids, remove=remove)
        if where is not None:
            request.filter.CopyFrom(to_filter(where))
        for key, value in values.items():
            fill_value(value, request.set[key])
        return int(self._again(lambda t: self._galleries.SetMetadata(request, timeout=t)).items)

    def delete(self, gallery: str, ids: Sequence[str] = (), *, where: Where | None = None) -> int:
        """Delete items by id (at most 10,000) or filter; how many of them existed.

        Not retried: a second try could not count what the first one deleted.
        """
        request = gallery_pb2.DeleteItemsRequest(gallery=gallery, ids=ids)
        if where is not None:
            request.filter.CopyFrom(to_filter(where))
        return int(self._once(lambda t: self._galleries.DeleteItems(request, timeout=t)).deleted)


def _item(name: str, image: Image, notes: Mapping[str, Scalar]) -> gallery_pb2.PutItem:
    return _noted(gallery_pb2.PutItem(id=name, image=image_bytes(image)), notes)


def _noted(item: gallery_pb2.PutItem, notes: Mapping[str, Scalar]) -> gallery_pb2.PutItem:
    for key, value in notes.items():
        fill_value(value, item.metadata[key])
    return item


def _pieces(items: Iterable[gallery_pb2.PutItem]) -> Iterator[Sequence[gallery_pb2.PutItem]]:
    piece: list[gallery_pb2.PutItem] = []
    size = 0
    for item in items:
        length = item.ByteSize()
        if piece and (len(piece) == _ITEMS or size + length > _BYTES):
            yield piece
            piece, size = [], 0
        piece.append(item)
        size += length
    if piece:
        yield piece


def _read(item: gallery_pb2.GetItemResponse | gallery_pb2.ListedItem) -> Item:
    return Item(
        item.id,
        from_metadata(item.metadata),
        origin_name(item.origin),
        item.uncertainty if item.HasField("uncertainty") else None,
    )
