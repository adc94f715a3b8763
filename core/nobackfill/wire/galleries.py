"""Call GalleryService and SearchService: galleries, their items, and searches."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from nobackfill.errors import AlreadyExistsError, InvalidInputError, TooLargeError
from nobackfill.gallery.filters import Filter, Scalar
from nobackfill.gallery.spec import Metadata
from nobackfill.text import check_text
from nobackfill.v1 import gallery_pb2, search_pb2
from nobackfill.v1.gallery_pb2_grpc import GalleryServiceStub
from nobackfill.v1.search_pb2_grpc import SearchServiceStub
from nobackfill.wire.answers import Answer, Hit, Image, Item, Status
from nobackfill.wire.connection import Connection, T
from nobackfill.wire.values import fill_metadata, filter_message, origin_name, read_metadata

Where = Mapping[str, Scalar] | Filter
# Vectors by the id of their space.
Embeddings = Mapping[str, Sequence[float]]
FEEDBACK: Mapping[str, search_pb2.FeedbackKind] = {
    "clicked": search_pb2.FEEDBACK_KIND_CLICKED,
    "confirmed": search_pb2.FEEDBACK_KIND_CONFIRMED,
    "rejected": search_pb2.FEEDBACK_KIND_REJECTED,
}


class SearchCalls(Connection):
    """Searches in galleries."""

    @cached_property
    def _searches(self) -> SearchServiceStub:
        return self._make_stub(SearchServiceStub)

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
        """Search the items of a gallery that are nearest to an image, a text or given vectors.

        Give exactly one of `image`, `text` and `embeddings`. The call is retried until the
        connection's `seconds` are over.

        Args:
            gallery: Name of the gallery.
            image: An encoded picture, or the path of its file.
            text: At most 64 KiB in UTF-8, with at least one visible character.
            embeddings: A float32 vector for each space id, at least one. The gateway uses the space
                that the gallery answers in.
            k: Number of hits, 1 to 1000; fewer are returned if no more items match. 0 means 10.
            where: Values that metadata must equal, or a filter of nobackfill.gallery.filters:
                `All((Range("year", at_least=2020), Not(OneOf("tag", ("sea",)))))`. None or {} for
                all items.
            ef: Minimum number of candidates, 1 to 4096; more find more and take longer. None lets
                the gateway choose. Not together with `exact`.
            exact: Compare all items.
            session: The user's session, by which a canary may choose who gets the new release, in
                printable ASCII; other characters give a NobackfillError. None for none.

        Returns:
            The hits, nearest first; empty if no item passes the filter.

        Raises:
            InvalidInputError: Not exactly one query, or an invalid query, filter or parameter. Or
                the gateway sends metadata that this version cannot read.
            TooLargeError: The query is larger than a gateway accepts.
            NotFoundError: No such gallery, or it was deleted meanwhile.
            PreconditionError: The gallery cannot answer such a query now; see its reason.
                NoEncoderError: its release does not embed images, or texts. NeedsImageError: the
                vectors are not those of all spaces that answer.
            VerificationError: The gallery is damaged and set aside.
            BusyError: The database of the gallery is busy.
            ReleaseRetiredError, IncompatibleSpaceError: As a PreconditionError: queries of the
                embeddings' space have ended, or no embedding is of a space that answers.
            NobackfillError: Any other failure: UnavailableError (no answer), DeadlineError (the
                time is over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed, a value of `embeddings` is no number, or `k` or
                `ef` is negative.
            TypeError: `image` is neither bytes nor a path; a bytearray is neither. Or `where` is
                neither a mapping nor a filter.
        """
        request = search_pb2.SearchRequest(
            gallery=gallery,
            query=_query(image, text, embeddings),
            k=k,
            filter=filter_message(where),
            accuracy=_accuracy(ef, exact),
        )
        metadata = None if session is None else (("x-session", session),)
        return _answer(self._retry(self._searches.Search, request, metadata=metadata))

    def feedback(self, gallery: str, request_id: str, item: str, kind: str) -> bool:
        """Report that a user clicked, confirmed or rejected a hit.

        Retried until the connection's `seconds` are over.

        Args:
            gallery: Name of the gallery.
            request_id: The `request_id` of the answer.
            item: Id of the hit.
            kind: clicked, confirmed or rejected.

        Returns:
            Whether a running canary counts the feedback; False also for an unknown or old answer,
            and for an item that is not among its hits. Only the first of each kind in a session is
            evidence; later ones give True, too.

        Raises:
            InvalidInputError: Another kind, or no request id.
            NobackfillError: Any other failure: UnavailableError (no answer), DeadlineError (the
                time is over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed.
        """
        if kind not in FEEDBACK:
            raise InvalidInputError(
                f"kind of feedback: expected one of {', '.join(sorted(FEEDBACK))}, got {kind!r}; "
                "pass one of these"
            )
        request = search_pb2.FeedbackRequest(
            gallery=gallery, request_id=request_id, item_id=item, kind=FEEDBACK[kind]
        )
        return self._retry(self._searches.Feedback, request).counted

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
        """Search with at most 256 queries on one snapshot of the gallery.

        Retried until the connection's `seconds` are over.

        Args:
            gallery: Name of the gallery.
            images: Encoded pictures, or paths of files.
            texts: Each of at most 64 KiB in UTF-8.
            embeddings: For each query, a float32 vector for each space id.
            k: Number of hits for each query, 1 to 1000. 0 means 10.
            where: Values that metadata must equal, or a filter; None for all items.
            ef: Minimum number of candidates, 1 to 4096; None lets the gateway choose. Not together
                with `exact`.
            exact: Compare all items.

        Returns:
            The answers to the images, then to the texts, then to the embeddings. A query that the
            gateway refuses by itself has `error` and no hits.

        Raises:
            InvalidInputError: No query, a file that cannot be read, a text that cannot be embedded,
                or an invalid filter or parameter. Nothing is searched then. Or the gateway sends
                metadata that this version cannot read.
            TooLargeError: The batch is larger than a gateway accepts, or has more than 256 queries.
            NotFoundError: No such gallery, or it was deleted meanwhile.
            PreconditionError: The gallery cannot answer now; see its reason.
            VerificationError: The gallery is damaged and set aside.
            BusyError: The database of the gallery is busy.
            NobackfillError: Any other failure: UnavailableError (no answer), DeadlineError (the
                time is over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed, a value of `embeddings` is no number, or `k` or
                `ef` is negative.
            TypeError: One of `images` is neither bytes nor a path; a bytearray is neither. Or
                `where` is neither a mapping nor a filter.
        """
        request = search_pb2.SearchBatchRequest(
            gallery=gallery,
            queries=[
                *(_query(image, None, None) for image in images),
                *(_query(None, text, None) for text in texts),
                *(_query(None, None, vectors) for vectors in embeddings),
            ],
            k=k,
            filter=filter_message(where),
            accuracy=_accuracy(ef, exact),
        )
        answer = self._retry(self._searches.SearchBatch, request)
        return [_answer(response) for response in answer.responses]


def image_bytes(image: Image) -> bytes:
    """Return the bytes of an encoded image, for sending.

    Args:
        image: The bytes, or the path of a file. Whether they are an image is not checked.

    Raises:
        InvalidInputError: The file is missing, cannot be read, or has more than 32 MiB; the message
            begins with its path.
        TooLargeError: The bytes are more than 32 MiB.
        TypeError: `image` is neither bytes nor a path; a bytearray is neither.
    """
    # Loads Pillow, which only callers that send images need.
    from nobackfill.images import LARGEST_IMAGE_BYTES, read_file

    if not isinstance(image, bytes):
        try:
            return read_file(Path(image))
        except InvalidInputError as error:
            raise type(error)(f"{image}: {error}") from error
    if len(image) > LARGEST_IMAGE_BYTES:
        raise TooLargeError(
            f"image: expected at most {LARGEST_IMAGE_BYTES} bytes, got {len(image)}; send a "
            "smaller copy"
        )
    return image


def _query(
    image: Image | None, text: str | None, embeddings: Embeddings | None
) -> search_pb2.Query:
    if sum(one is not None for one in (image, text, embeddings)) != 1:
        raise InvalidInputError(
            "query: expected exactly one of image=, text= and embeddings=, got none or several; "
            "pass one of them"
        )
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
        raise InvalidInputError(
            "accuracy of a search: expected ef= or exact=, got both; leave ef= out, because "
            "exact= compares all items"
        )
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
            metadata=read_metadata(hit.metadata),
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


# A message holds at most _ITEMS items, and is sent once it has _BYTES bytes.
_ITEMS = 100
_BYTES = 4 * 2**20
_PAGE = 500


class GalleryCalls(Connection):
    """Galleries, and their items by id."""

    @cached_property
    def _galleries(self) -> GalleryServiceStub:
        return self._make_stub(GalleryServiceStub)

    def create_gallery(
        self, gallery: str, *, exact_distances: bool = False, exist_ok: bool = False
    ) -> gallery_pb2.Gallery:
        """Create an empty gallery in the active release's space.

        Not retried: after a lost answer, a retry could not tell its own gallery from another
        client's. The gallery may exist then.

        Args:
            gallery: Its name: 1 to 64 characters of a-z, 0-9, '-' and '_'.
            exact_distances: Answer with exact distances, instead of rounded ones.
            exist_ok: Return an existing gallery as it is, with its own `exact_distances`, instead
                of raising an error. It fails as `get_gallery` does.

        Raises:
            AlreadyExistsError: The gallery exists, and `exist_ok` is False.
            InvalidInputError: The name is not valid, or the vectors of the active release have more
                dimensions than the gateway's database can store.
            PreconditionError: No release is active.
            BusyError: An activation or a rollback is under way.
            CannotWriteError: The gallery cannot be written.
            NobackfillError: Any other failure: UnavailableError (no answer), DeadlineError (the
                time is over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed.
        """
        request = gallery_pb2.CreateGalleryRequest(name=gallery, exact_distances=exact_distances)
        try:
            return self._call_once(self._galleries.CreateGallery, request).gallery
        except AlreadyExistsError:
            if not exist_ok:
                raise
            return self.get_gallery(gallery)

    def get_gallery(self, gallery: str) -> gallery_pb2.Gallery:
        """Return a gallery and its spaces. Retried until the connection's `seconds` are over.

        Raises:
            NotFoundError: No such gallery.
            VerificationError: The gallery is damaged and set aside.
            BusyError: The database of the gallery is busy.
            NobackfillError: Any other failure: UnavailableError (no answer), DeadlineError (the
                time is over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed.
        """
        request = gallery_pb2.GetGalleryRequest(name=gallery)
        return self._retry(self._galleries.GetGallery, request).gallery

    def list_galleries(self) -> Iterator[gallery_pb2.Gallery]:
        """Yield all galleries by name, reading them page by page.

        Nothing is sent before the first `next`. Only galleries that the token's role is for are
        listed. A gallery that is set aside has only its name and the reason. Each page is retried
        until the connection's `seconds` are over. Galleries that are created or deleted meanwhile
        may be listed or missing.

        Raises:
            NobackfillError: Any failure: UnavailableError (no answer), DeadlineError (the time is
                over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed.
        """
        request = gallery_pb2.ListGalleriesRequest(page_size=_PAGE)
        for page in self._read_pages(self._galleries.ListGalleries, request):
            yield from page.galleries

    def update_gallery(
        self, gallery: str, *, exact_distances: bool | None = None,
        source: gallery_pb2.ItemSource | None = None, both_models: bool | None = None,
    ) -> gallery_pb2.Gallery:  # fmt: skip
        """Change settings of a gallery; None leaves a setting as it is.

        They are changed one after the other, in the order of the arguments; a change before an
        error stays. Without any, the gallery is returned as it is. Retried until the connection's
        `seconds` are over.

        Args:
            gallery: Its name.
            exact_distances: Whether it answers with exact distances.
            source: Where its originals can be read again; an empty address means nowhere.
            both_models: Whether the previous model, too, ranks migrated vectors.

        Raises:
            NotFoundError: No such gallery, or the source's folder or file does not exist.
            InvalidInputError: A limit of the source is out of its range.
            ConfigurationError: The gateway's settings do not allow the source.
            UnavailableError: The source does not open within 20 s, or the gateway does not answer.
            CannotWriteError: The gallery cannot be written.
            NobackfillError: Any other failure: UnavailableError (no answer), DeadlineError (the
                time is over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed.
            VerificationError: The gallery is damaged and set aside.
            BusyError: The database of the gallery is busy.
        """
        request = gallery_pb2.UpdateGalleryRequest(
            name=gallery, exact_distances=exact_distances, source=source, both_models=both_models
        )
        return self._retry(self._galleries.UpdateGallery, request).gallery

    def delete_gallery(self, gallery: str) -> None:
        """Delete a gallery and all its items, permanently, once no call uses it. Not retried.

        Raises:
            NotFoundError: No such gallery.
            BusyError: An activation is under way, or calls use the gallery for a minute.
            CannotWriteError: The gallery cannot be deleted.
            NobackfillError: Any other failure: UnavailableError (no answer), DeadlineError (the
                time is over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed.
        """
        request = gallery_pb2.DeleteGalleryRequest(name=gallery)
        self._call_once(self._galleries.DeleteGallery, request)

    def status(self, gallery: str) -> Status:
        """Return how many items a gallery holds, and which release answers in it.

        Retried until the connection's `seconds` are over.

        Raises:
            NotFoundError: No such gallery.
            VerificationError: The gallery is damaged and set aside.
            BusyError: The database of the gallery is busy.
            NobackfillError: Any other failure: UnavailableError (no answer), DeadlineError (the
                time is over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed.
        """
        answer = self.get_gallery(gallery)
        return Status(answer.items, answer.release)

    def put(
        self,
        gallery: str,
        images: Mapping[str, Image],
        metadata: Mapping[str, Mapping[str, Scalar]] | None = None,
    ) -> Mapping[str, str]:
        """Store images by id; they are durable when this returns.

        An existing id is replaced, unless its content is the same. A file that cannot be read or is
        too large, and metadata of another kind, are refused without sending them; so are numbers
        beyond the largest float, and ids, keys and texts that are no valid Unicode. Items are sent
        in pieces, each retried until the connection's `seconds` are over.

        Args:
            gallery: Name of the gallery.
            images: Encoded pictures or paths of files, by id of 1 to 256 characters. Without any,
                nothing is sent.
            metadata: Metadata by id; ids that are missing get none. Ids that `images` lacks are
                ignored. None: no item has metadata.

        Returns:
            The reason of each refusal, by id; empty if all were stored.

        Raises:
            NotFoundError: No such gallery.
            ItemQuotaError: The token's galleries would hold too many items.
            BusyError, CannotWriteError: The gallery is busy or cannot be written. Earlier pieces
                stay stored, as after each other error.
            NobackfillError: Any other failure: UnavailableError (no answer), DeadlineError (the
                time is over), OverloadedError, NotPermittedError (token or role). Earlier pieces
                stay stored.
            ValueError: The connection was closed.
            VerificationError: The gallery is damaged and set aside, or a model of the release
                fails.
            TypeError: An image is neither bytes nor a path; earlier pieces stay stored.
        """
        return self._put_each(gallery, images, metadata, "image", image_bytes)

    def put_texts(
        self,
        gallery: str,
        texts: Mapping[str, str],
        metadata: Mapping[str, Mapping[str, Scalar]] | None = None,
    ) -> Mapping[str, str]:
        """Store texts by id, such as notes or passages of documents; they are durable when this
        returns.

        An existing id is replaced, unless its content is the same. A text that cannot be embedded,
        and metadata of another kind, are refused without sending them; so are numbers beyond the
        largest float, and ids, keys and texts that are no valid Unicode. Items are sent in pieces,
        each retried until the connection's `seconds` are over.

        Args:
            gallery: Name of the gallery.
            texts: Each of at most 64 KiB in UTF-8 with at least one visible character, by id of 1
                to 256 characters. Without any, nothing is sent.
            metadata: Metadata by id; ids that are missing get none. Ids that `texts` lacks are
                ignored. None: no item has metadata.

        Returns:
            The reason of each refusal, by id; empty if all were stored.

        Raises:
            NotFoundError: No such gallery.
            ItemQuotaError: The token's galleries would hold too many items.
            BusyError, CannotWriteError: The gallery is busy or cannot be written. Earlier pieces
                stay stored, as after each other error.
            NobackfillError: Any other failure: UnavailableError (no answer), DeadlineError (the
                time is over), OverloadedError, NotPermittedError (token or role). Earlier pieces
                stay stored.
            ValueError: The connection was closed.
            VerificationError: The gallery is damaged and set aside, or a model of the release
                fails.
            AttributeError: A text is no str; earlier pieces stay stored.
        """
        return self._put_each(gallery, texts, metadata, "text", check_text)

    def _put_each(
        self, gallery: str, values: Mapping[str, T],
        metadata: Mapping[str, Mapping[str, Scalar]] | None, field: str, encode: Callable[[T], Any],
    ) -> Mapping[str, str]:  # fmt: skip
        unsent: dict[str, str] = {}

        def items() -> Iterator[gallery_pb2.PutItem]:
            for name, value in values.items():
                try:
                    item = _item(name, (metadata or {}).get(name, {}))
                    setattr(item, field, encode(value))
                except InvalidInputError as error:
                    unsent[name] = str(error)
                else:
                    yield item

        return {**self.put_items(gallery, items()), **unsent}

    def put_items(
        self,
        gallery: str,
        items: Iterable[gallery_pb2.PutItem],
        progress: Callable[[int], object] = lambda count: None,
    ) -> Mapping[str, str]:
        """Store images, texts, or vectors made elsewhere, by id, in pieces.

        A piece has at most 100 items and about 4 MiB. One that failed is sent again until the
        connection's `seconds` are over: putting is idempotent by id. Pieces go in order, and those
        before an error stay stored.

        Args:
            gallery: Name of the gallery.
            items: Messages of the contract; read as they are sent, and their errors pass through.
                Without any, nothing is sent, and a missing gallery is not noticed. If an id
                repeats, its last item is stored.
            progress: Called after each durable piece with the number of items stored so far; its
                error ends the call.

        Returns:
            The reason of each refusal, by id; empty if all were stored.

        Raises:
            NotFoundError: No such gallery.
            TooLargeError: One item is larger than a gateway accepts.
            ItemQuotaError: The token's galleries would hold too many items.
            BusyError, CannotWriteError: The gallery is busy or cannot be written.
            NobackfillError: Any other failure: UnavailableError (no answer), DeadlineError (the
                time is over), OverloadedError, NotPermittedError (token or role). Earlier pieces
                stay stored.
            ValueError: The connection was closed.
            VerificationError: The gallery is damaged and set aside, or a model of the release
                fails.
        """
        refusals: dict[str, str] = {}
        count = 0
        for piece in _pieces(items):
            request = gallery_pb2.PutItemsRequest(gallery=gallery, items=piece)
            # A piece may take as long as the whole call.
            for answer in self._retry(self._put, request, each=self.seconds):
                refusals.update((error.id, error.message) for error in answer.errors)
            count += len(piece)
            progress(count - len(refusals))
        return refusals

    def _put(
        self, piece: gallery_pb2.PutItemsRequest, timeout: float
    ) -> Sequence[gallery_pb2.PutItemsResponse]:
        return tuple(self._galleries.PutItems(iter([piece]), timeout=timeout))

    def get(self, gallery: str, id: str) -> Item:
        """Return an item of a gallery by its id. Retried until the connection's `seconds` are over.

        Raises:
            NotFoundError: No such gallery or item.
            InvalidInputError: The gateway sends metadata that this version cannot read.
            VerificationError: The gallery is damaged and set aside.
            BusyError: The database of the gallery is busy.
            NobackfillError: Any other failure: UnavailableError (no answer), DeadlineError (the
                time is over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed.
        """
        request = gallery_pb2.GetItemRequest(gallery=gallery, id=id)
        return _read(self._retry(self._galleries.GetItem, request))

    def list(
        self, gallery: str, *, where: Where | None = None, least_certain: bool = False
    ) -> Iterator[Item]:
        """Yield items in the order in which they were stored, reading them page by page.

        Each page is retried. Items that are stored or deleted meanwhile may be listed or missing.
        An item replaced meanwhile may come twice. The first request is sent at the first `next`.

        Args:
            gallery: Name of the gallery.
            where: Values that metadata must equal, or a filter; None for all items.
            least_certain: Only items that an upgrade migrated with an uncertainty, the most
                uncertain first.

        Raises:
            InvalidInputError: An invalid filter, raised at once; or metadata that this version
                cannot read, raised at its item. The gateway refuses an invalid mapping `where` only
                at the first item.
            NotFoundError: No such gallery; raised at the first item, like the following errors.
            VerificationError: The gallery is damaged and set aside.
            BusyError: The database of the gallery is busy.
            NobackfillError: Any other failure: UnavailableError (no answer), DeadlineError (the
                time is over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed.
            TypeError: `where` is neither a mapping nor a filter; raised at once.
        """
        request = gallery_pb2.ListItemsRequest(
            gallery=gallery, filter=filter_message(where), page_size=_PAGE
        )
        if least_certain:
            request.order = gallery_pb2.ITEM_ORDER_LEAST_CERTAIN
        pages = self._read_pages(self._galleries.ListItems, request)
        return (_read(item) for page in pages for item in page.items)

    def _read_pages(self, method: Callable[..., Any], request: Any) -> Iterator[Any]:
        while True:
            answer = self._retry(method, request)
            yield answer
            if not answer.next_page_token:
                return
            request.page_token = answer.next_page_token

    def count(self, gallery: str, *, where: Where | None = None) -> int:
        """Count the items of a gallery. Retried until the connection's `seconds` are over.

        Args:
            gallery: Name of the gallery.
            where: Values that metadata must equal, or a filter; None counts all items.

        Raises:
            InvalidInputError: An invalid filter.
            NotFoundError: No such gallery.
            VerificationError: The gallery is damaged and set aside.
            BusyError: The database of the gallery is busy.
            NobackfillError: Any other failure: UnavailableError (no answer), DeadlineError (the
                time is over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed.
            TypeError: `where` is neither a mapping nor a filter.
        """
        request = gallery_pb2.CountItemsRequest(gallery=gallery, filter=filter_message(where))
        return int(self._retry(self._galleries.CountItems, request).items)

    def set_metadata(
        self,
        gallery: str,
        values: Metadata,
        *,
        ids: Sequence[str] = (),
        where: Where | None = None,
        remove: Sequence[str] = (),
    ) -> int:
        """Add, replace and remove metadata of items; other keys of an item stay.

        Many items are changed in several transactions, so that a failed call may have changed some.
        Retried until the connection's `seconds` are over.

        Args:
            gallery: Name of the gallery.
            values: Values to set, by key; {} sets none.
            ids: Ids of the items, at most 10,000; unknown ids are ignored. Give either ids or a
                filter.
            where: A filter that chooses the items; None if ids do. A filter without a condition,
                such as {}, is refused.
            remove: Keys to remove; keys that an item lacks are ignored.

        Returns:
            Number of chosen items that exist, whether their metadata differed or not.

        Raises:
            InvalidInputError: An invalid filter or value, a key that is both set and removed, both
                ids and a filter, or neither.
            TooLargeError: More than 10,000 ids.
            NotFoundError: No such gallery.
            VerificationError: The gallery is damaged and set aside.
            BusyError, CannotWriteError: The gallery is busy or cannot be written; some items may be
                changed.
            NobackfillError: Any other failure: UnavailableError (no answer), DeadlineError (the
                time is over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed, or an id or a key of `remove` has half a
                surrogate pair.
            TypeError: `where` is neither a mapping nor a filter.
        """
        request = gallery_pb2.SetMetadataRequest(gallery=gallery, ids=ids, remove=remove)
        if where is not None:
            request.filter.CopyFrom(filter_message(where))
        fill_metadata(values, request.set)
        return int(self._retry(self._galleries.SetMetadata, request).items)

    def delete(self, gallery: str, ids: Sequence[str] = (), *, where: Where | None = None) -> int:
        """Delete items by id or by filter, permanently.

        Not retried: a retry could not count the items that the first attempt deleted. Many items
        are deleted in several transactions, so that a failed call may have deleted some. After a
        lost answer, items may be gone.

        Args:
            gallery: Name of the gallery.
            ids: At most 10,000 ids; unknown ids are ignored. Without ids and filter, nothing is
                deleted.
            where: A filter that chooses the items; None if ids do. A filter without a condition is
                refused, so that it cannot delete everything.

        Returns:
            Number of deleted items.

        Raises:
            InvalidInputError: An invalid filter, one without a condition, or both ids and a filter.
            TooLargeError: More than 10,000 ids.
            NotFoundError: No such gallery.
            VerificationError: The gallery is damaged and set aside.
            BusyError, CannotWriteError: The gallery is busy or cannot be written; some items may be
                deleted.
            NobackfillError: Any other failure: UnavailableError (no answer), DeadlineError (the
                time is over), OverloadedError, NotPermittedError (token or role).
            ValueError: The connection was closed, or an id has half a surrogate pair.
            TypeError: `where` is neither a mapping nor a filter.
        """
        request = gallery_pb2.DeleteItemsRequest(gallery=gallery, ids=ids)
        if where is not None:
            request.filter.CopyFrom(filter_message(where))
        return int(self._call_once(self._galleries.DeleteItems, request).deleted)


def _item(name: str, notes: Mapping[str, Scalar]) -> gallery_pb2.PutItem:
    """Return an item without content."""
    try:
        item = gallery_pb2.PutItem(id=name)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"id: expected valid Unicode text, got {name!r:.64}; use another id"
        ) from error
    fill_metadata(notes, item.metadata)
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
        read_metadata(item.metadata),
        origin_name(item.origin),
        item.uncertainty if item.HasField("uncertainty") else None,
    )
