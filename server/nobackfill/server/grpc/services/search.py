"""SearchService."""

import math
from collections.abc import Mapping, Sequence

import grpc
from google.protobuf.message import DecodeError

from nobackfill.errors import InvalidInputError, TooLargeError
from nobackfill.gallery.search.index import EVERY
from nobackfill.gallery.search.view import parse
from nobackfill.server.canary.canaries import Canaries
from nobackfill.server.canary.sessions import Kind
from nobackfill.server.galleries.answering import Searching
from nobackfill.server.galleries.galleries import GalleryRegistry
from nobackfill.server.galleries.immediate_answers import (
    DEFAULT_K,
    MOST_HITS,
    ImageAnswers,
    ImmediateAnswers,
    VectorQuery,
)
from nobackfill.server.galleries.plan import Query
from nobackfill.server.galleries.ranking import SearchResult
from nobackfill.server.grpc.access import Principal
from nobackfill.server.grpc.rpc import Later
from nobackfill.server.grpc.services.convert import (
    from_filter,
    keys_of,
    to_end,
    to_metadata,
)
from nobackfill.server.state import GatewayState
from nobackfill.v1 import search_pb2 as pb
from nobackfill.v1.search_pb2_grpc import SearchServiceServicer
from nobackfill.wire.limits import LARGEST_K
from nobackfill.wire.values import ORIGINS

SEARCH = "/nobackfill.v1.SearchService/Search"
LARGEST_BATCH = 256
LARGEST_EF = 4096
# With one of these a search may take longer, or its hits are not those that were made ready.
_WORK = ("filter", "accuracy", "fields")

_KINDS: Mapping[int, Kind] = {
    pb.FEEDBACK_KIND_CLICKED: "approved",
    pb.FEEDBACK_KIND_CONFIRMED: "approved",
    pb.FEEDBACK_KIND_REJECTED: "rejected",
}


class SearchService(SearchServiceServicer):
    """See protos/nobackfill/v1/search.proto."""

    def __init__(
        self,
        galleries: GalleryRegistry,
        searching: Searching,
        immediate: ImmediateAnswers,
        images: ImageAnswers,
        state: GatewayState,
        canaries: Canaries,
    ) -> None:
        self._canaries = canaries
        self._immediate = immediate
        self._images = images
        self._galleries = galleries
        self._searching = searching
        self._state = state

    def Search(  # noqa: N802 - the contract's name
        self, request: pb.SearchRequest, context: grpc.ServicerContext
    ) -> pb.SearchResponse:
        with self._galleries.using(request.gallery) as hosted:
            found = self._searching.search(
                hosted, _query(request.query), _k(request.k), from_filter(request.filter),
                _ef(request.accuracy),
            )  # fmt: skip
        return _response(found, request, self._state.current.ends)

    def at_once(
        self, messages: Sequence[tuple[bytes, Principal]]
    ) -> Sequence[bytes | Later | None]:
        """What `Search` answers to each, or what answers it later, where it needs no thread of its
        own; None: it is left to it."""
        named = self._immediate.named()
        routed = (
            self._immediate.routed([message for message, _ in messages])
            if named and all(principal.may_use(named) for _, principal in messages)
            else None
        )
        if routed is not None and None not in routed:
            return routed
        answers: list[bytes | Later | None] = [*routed] if routed else [None] * len(messages)
        together: dict[tuple[str, str], list[tuple[int, VectorQuery]]] = {}
        for number, (message, principal) in enumerate(messages):
            if answers[number] is not None:
                continue
            asked = parse(message) if parse is not None else _parsed(message)
            if asked is None or asked[3] > MOST_HITS or math.isnan(asked[4]):
                continue
            gallery, space, query, k, farthest = asked
            k = k or DEFAULT_K
            if not principal.may_use(gallery):
                continue
            if space is None:
                answers[number] = self._images.later(gallery, query, k, farthest)
            else:
                together.setdefault((gallery, space), []).append((number, (query, k, farthest)))
        for (gallery, space), some in together.items():
            found = self._immediate.answers(gallery, space, [asked for _, asked in some])
            for (number, _), answer in zip(some, found, strict=True):
                answers[number] = answer
        return answers

    def SearchBatch(  # noqa: N802
        self, request: pb.SearchBatchRequest, context: grpc.ServicerContext
    ) -> pb.SearchBatchResponse:
        if not request.queries:
            raise InvalidInputError(f"expected 1 to {LARGEST_BATCH} queries, got none")
        if len(request.queries) > LARGEST_BATCH:
            raise TooLargeError(
                f"expected 1 to {LARGEST_BATCH} queries, got {len(request.queries)}; "
                "send several batches"
            )
        queries = [_query(query) for query in request.queries]
        with self._galleries.using(request.gallery) as hosted:
            found = self._searching.batch(
                hosted, queries, _k(request.k), from_filter(request.filter), _ef(request.accuracy)
            )
        return pb.SearchBatchResponse(
            responses=[
                pb.SearchResponse(error=str(one))
                if isinstance(one, InvalidInputError)
                else _response(one, request, self._state.current.ends)
                for one in found
            ]
        )

    def Feedback(  # noqa: N802
        self, request: pb.FeedbackRequest, context: grpc.ServicerContext
    ) -> pb.FeedbackResponse:
        kind = _KINDS.get(request.kind)
        if kind is None or not request.request_id:
            raise InvalidInputError(
                "feedback: expected the request_id of an answer and a kind, clicked, confirmed or "
                "rejected"
            )
        counted = self._canaries.feedback(request.request_id, request.item_id, kind)
        return pb.FeedbackResponse(counted=counted)


def _parsed(message: bytes) -> tuple[str, str | None, bytes, int, float] | None:
    """What a query by one embedding or one image asks: gallery, space (None: an image), values or
    image, k, max_distance; None: it asks for more."""
    try:
        request = pb.SearchRequest.FromString(message)
    except DecodeError:
        return None
    query, embeddings = request.query, request.query.embeddings.embeddings
    if any(request.HasField(field) for field in _WORK):
        return None
    farthest = request.max_distance if request.HasField("max_distance") else math.inf
    if query.image:
        return request.gallery, None, query.image, request.k, farthest
    if len(embeddings) != 1:
        return None
    return request.gallery, embeddings[0].space, embeddings[0].values, request.k, farthest


def _k(k: int) -> int:
    if k > LARGEST_K:
        raise InvalidInputError(f"k: expected 1 to {LARGEST_K}, got {k}")
    return k or DEFAULT_K


def _ef(accuracy: pb.Accuracy) -> int:
    kind = accuracy.WhichOneof("accuracy")
    if kind == "ef" and not 1 <= accuracy.ef <= LARGEST_EF:
        raise InvalidInputError(f"accuracy.ef: expected 1 to {LARGEST_EF}, got {accuracy.ef}")
    return EVERY if accuracy.exact else accuracy.ef


def _query(query: pb.Query) -> Query:
    kind = query.WhichOneof("query")
    if kind == "image":
        return query.image
    if kind == "text":
        return query.text
    embeddings = query.embeddings.embeddings
    if kind is None or not embeddings:
        raise InvalidInputError("query: expected an image, a text, or at least one embedding")
    found = {embedding.space: embedding.values for embedding in embeddings}
    if len(found) != len(embeddings):
        raise InvalidInputError("query: expected at most one embedding a space")
    return found


def _farthest(request: pb.SearchRequest | pb.SearchBatchRequest) -> float:
    if not request.HasField("max_distance"):
        return math.inf
    if math.isnan(request.max_distance):
        raise InvalidInputError("max_distance: expected a number, got NaN")
    return request.max_distance


def _response(
    found: SearchResult,
    request: pb.SearchRequest | pb.SearchBatchRequest,
    ends: Mapping[str, float],
) -> pb.SearchResponse:
    response = pb.SearchResponse(
        release=found.release, space=found.space, request_id=found.request_id
    )
    farthest = _farthest(request)
    to_end(found.space, ends, response.space_ends_at)
    keys = keys_of(request.fields if request.HasField("fields") else None)
    for hit in found.hits:
        message = pb.Hit(
            id=hit.item.id,
            distance=hit.distance,
            score=hit.score,
            release=hit.release,
            origin=ORIGINS[hit.origin],
            beyond_calibration=hit.beyond_calibration,
        )
        # The distance as the answer shows it: a line drawn finer would reveal more.
        if message.distance <= farthest:
            to_metadata(hit.item.metadata, keys, message.metadata)
            response.hits.append(message)
    return response
