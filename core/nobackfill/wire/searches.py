"""SearchService."""

from collections.abc import Mapping, Sequence
from datetime import UTC
from functools import cached_property
from pathlib import Path

import numpy as np

from nobackfill.errors import InvalidInputError, TooLargeError
from nobackfill.gallery.filters import Filter, Scalar
from nobackfill.tokenizing import check_text
from nobackfill.v1 import search_pb2 as pb
from nobackfill.v1.search_pb2_grpc import SearchServiceStub
from nobackfill.wire.answers import Answer, Hit, Image
from nobackfill.wire.connection import Connection
from nobackfill.wire.expressions import to_filter
from nobackfill.wire.values import from_metadata, origin_name

Where = Mapping[str, Scalar] | Filter
# Vectors by the id of their space.
Embeddings = Mapping[str, Sequence[float]]
FEEDBACK: Mapping[str, pb.FeedbackKind] = {
    "clicked": pb.FEEDBACK_KIND_CLICKED,
    "confirmed": pb.FEEDBACK_KIND_CONFIRMED,
    "rejected": pb.FEEDBACK_KIND_REJECTED,
}


class Searches(Connection):
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
        request = pb.SearchRequest(
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
        request = pb.FeedbackRequest(
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
        request = pb.SearchBatchRequest(
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


def _query(image: Image | None, text: str | None, embeddings: Embeddings | None) -> pb.Query:
    if sum(one is not None for one in (image, text, embeddings)) != 1:
        raise InvalidInputError("expected one of image=, text= and embeddings=")
    if image is not None:
        return pb.Query(image=image_bytes(image))
    if text is not None:
        return pb.Query(text=check_text(text))
    query = pb.Query()
    for space, vector in (embeddings or {}).items():
        values = np.ascontiguousarray(vector, "<f4").tobytes()
        query.embeddings.embeddings.add(space=space, values=values)
    return query


def _accuracy(ef: int | None, exact: bool) -> pb.Accuracy | None:
    if exact and ef is not None:
        raise InvalidInputError("expected ef= or exact=, not both: exact looks at all items")
    if exact:
        return pb.Accuracy(exact=True)
    return None if ef is None else pb.Accuracy(ef=ef)


def _answer(response: pb.SearchResponse) -> Answer[Hit]:
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
