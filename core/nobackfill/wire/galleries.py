"""GalleryService: galleries, and the items in them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from nobackfill.errors import AlreadyExistsError, InvalidInputError
from nobackfill.gallery.filters import Scalar
from nobackfill.gallery.spec import Metadata
from nobackfill.tokenizing import check_text
from nobackfill.v1 import gallery_pb2 as pb
from nobackfill.v1.gallery_pb2_grpc import GalleryServiceStub
from nobackfill.wire.answers import Image, Item, Status
from nobackfill.wire.connection import Connection
from nobackfill.wire.expressions import to_filter
from nobackfill.wire.searches import Where, image_bytes
from nobackfill.wire.values import fill_value, from_metadata, origin_name

# One message of items: at most so many, and it is sent when it is this large.
_ITEMS = 100
_BYTES = 4 * 2**20
_PAGE = 500


class Galleries(Connection):
    """Galleries, and their items by id."""

    @cached_property
    def _galleries(self) -> GalleryServiceStub:
        return GalleryServiceStub(self._channel)

    def create_gallery(
        self, gallery: str, *, exact_distances: bool = False, exist_ok: bool = False
    ) -> pb.Gallery:
        """Make an empty gallery in the active release's space. `exist_ok`: one that is there
        already is returned as it is. Raises AlreadyExistsError.

        Not retried: after a lost answer a second try could not tell its own gallery from another's.
        """
        request = pb.CreateGalleryRequest(name=gallery, exact_distances=exact_distances)
        try:
            return self._once(lambda t: self._galleries.CreateGallery(request, timeout=t)).gallery
        except AlreadyExistsError:
            if not exist_ok:
                raise
            return self.get_gallery(gallery)

    def get_gallery(self, gallery: str) -> pb.Gallery:
        """One gallery and its spaces. Raises NotFoundError."""
        request = pb.GetGalleryRequest(name=gallery)
        return self._again(lambda t: self._galleries.GetGallery(request, timeout=t)).gallery

    def list_galleries(self) -> Iterator[pb.Gallery]:
        """All galleries, by name; asked for by page, as thousands are too many for one answer."""
        request = pb.ListGalleriesRequest(page_size=_PAGE)
        while True:
            answer = self._again(lambda t: self._galleries.ListGalleries(request, timeout=t))
            yield from answer.galleries
            if not answer.next_page_token:
                return
            request.page_token = answer.next_page_token

    def update_gallery(
        self, gallery: str, *, exact_distances: bool | None = None,
        source: pb.ItemSource | None = None, both_models: bool | None = None,
    ) -> pb.Gallery:  # fmt: skip
        """Change whether a gallery answers with distances as they were computed, where its images
        can be had again (an empty address: nowhere), and whether the model before ranks what was
        carried, too. None: left as it is."""
        request = pb.UpdateGalleryRequest(
            name=gallery, exact_distances=exact_distances, source=source, both_models=both_models
        )
        return self._again(lambda t: self._galleries.UpdateGallery(request, timeout=t)).gallery

    def delete_gallery(self, gallery: str) -> None:
        """Delete a gallery and all its items. Raises NotFoundError."""
        request = pb.DeleteGalleryRequest(name=gallery)
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

        def items() -> Iterator[pb.PutItem]:
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

        def items() -> Iterator[pb.PutItem]:
            for name, text in texts.items():
                try:
                    item = pb.PutItem(id=name, text=check_text(text))
                except InvalidInputError as error:
                    unsent[name] = str(error)
                    continue
                yield _noted(item, (metadata or {}).get(name, {}))

        return {**self.put_items(gallery, items()), **unsent}

    def put_items(
        self,
        gallery: str,
        items: Iterable[pb.PutItem],
        stored: Callable[[int], object] = lambda count: None,
    ) -> Mapping[str, str]:
        """Store images, texts, or vectors made elsewhere, by id; returns {id: why it was refused}.

        They go in pieces, each of which is durable when `stored(items so far)` is called; putting
        is idempotent by id, so a piece that broke off is sent again.
        """
        refused: dict[str, str] = {}
        count = 0
        for piece in _pieces(items):
            for answer in self._put(pb.PutItemsRequest(gallery=gallery, items=piece)):
                refused.update((error.id, error.message) for error in answer.errors)
            count += len(piece)
            stored(count - len(refused))
        return refused

    def _put(self, piece: pb.PutItemsRequest) -> Sequence[pb.PutItemsResponse]:
        def attempt(timeout: float) -> Sequence[pb.PutItemsResponse]:
            return tuple(self._galleries.PutItems(iter([piece]), timeout=timeout))

        # It may rightly take all the time there is.
        return self._again(attempt, each=self.seconds)

    def get(self, gallery: str, id: str) -> Item:
        """One item. Raises NotFoundError."""
        request = pb.GetItemRequest(gallery=gallery, id=id)
        return _read(self._again(lambda t: self._galleries.GetItem(request, timeout=t)))

    def list(
        self, gallery: str, *, where: Where | None = None, least_certain: bool = False
    ) -> Iterator[Item]:
        """Items as they were put, all or those that pass `where`, asked for by page.

        `least_certain`: those that an upgrade made, the least certain first.
        """
        request = pb.ListItemsRequest(gallery=gallery, filter=to_filter(where), page_size=_PAGE)
        if least_certain:
            request.order = pb.ITEM_ORDER_LEAST_CERTAIN
        return self._listed(request)

    def _listed(self, request: pb.ListItemsRequest) -> Iterator[Item]:
        while True:
            answer = self._again(lambda t: self._galleries.ListItems(request, timeout=t))
            yield from map(_read, answer.items)
            if not answer.next_page_token:
                return
            request.page_token = answer.next_page_token

    def count(self, gallery: str, *, where: Where | None = None) -> int:
        """How many items there are, or pass `where`."""
        request = pb.CountItemsRequest(gallery=gallery, filter=to_filter(where))
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
        request = pb.SetMetadataRequest(gallery=gallery, ids=ids, remove=remove)
        if where is not None:
            request.filter.CopyFrom(to_filter(where))
        for key, value in values.items():
            fill_value(value, request.set[key])
        return int(self._again(lambda t: self._galleries.SetMetadata(request, timeout=t)).items)

    def delete(self, gallery: str, ids: Sequence[str] = (), *, where: Where | None = None) -> int:
        """Delete items by id (at most 10,000) or filter; how many of them existed.

        Not retried: a second try could not count what the first one deleted.
        """
        request = pb.DeleteItemsRequest(gallery=gallery, ids=ids)
        if where is not None:
            request.filter.CopyFrom(to_filter(where))
        return int(self._once(lambda t: self._galleries.DeleteItems(request, timeout=t)).deleted)


def _item(name: str, image: Image, notes: Mapping[str, Scalar]) -> pb.PutItem:
    return _noted(pb.PutItem(id=name, image=image_bytes(image)), notes)


def _noted(item: pb.PutItem, notes: Mapping[str, Scalar]) -> pb.PutItem:
    for key, value in notes.items():
        fill_value(value, item.metadata[key])
    return item


def _pieces(items: Iterable[pb.PutItem]) -> Iterator[Sequence[pb.PutItem]]:
    piece: list[pb.PutItem] = []
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


def _read(item: pb.GetItemResponse | pb.ListedItem) -> Item:
    return Item(
        item.id,
        from_metadata(item.metadata),
        origin_name(item.origin),
        item.uncertainty if item.HasField("uncertainty") else None,
    )
