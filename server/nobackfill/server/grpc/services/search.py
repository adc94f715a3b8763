"""Implement SearchService: searches, and feedback about their hits."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError

from nobackfill.errors import InvalidInputError, TooLargeError
from nobackfill.gallery.search.index import EXACT_EF
from nobackfill.gallery.search.view import parse_search_request
from nobackfill.server.canary.canaries import Canaries
from nobackfill.server.canary.sessions import FeedbackKind
from nobackfill.server.galleries.answering import (
    DEFAULT_K,
    MAX_HITS,
    DeferredImageSearch,
    GallerySearcher,
    ReceiverSearch,
    VectorQuery,
)
from nobackfill.server.galleries.hosted import GalleryRegistry
from nobackfill.server.galleries.plan import Query, SearchResult
from nobackfill.server.grpc.context import Principal
from nobackfill.server.grpc.rpc import DeferredAnswer
from nobackfill.server.grpc.services.convert import (
    fill_metadata,
    fill_space_end,
    parse_filter,
    requested_metadata_keys,
)
from nobackfill.server.state import GatewayState
from nobackfill.v1 import search_pb2 as pb
from nobackfill.v1.search_pb2_grpc import SearchServiceServicer
from nobackfill.wire.limits import LARGEST_K
from nobackfill.wire.values import ORIGINS

SEARCH = "/nobackfill.v1.SearchService/Search"
MAX_BATCH_QUERIES = 256
MAX_REQUESTED_EF = 4096
# A search with one of these fields may take longer, or needs hits that are not prepared.
_SLOW_FIELDS = ("filter", "accuracy", "fields")

_KINDS: Mapping[int, FeedbackKind] = {
    pb.FEEDBACK_KIND_CLICKED: "approved",
    pb.FEEDBACK_KIND_CONFIRMED: "approved",
    pb.FEEDBACK_KIND_REJECTED: "rejected",
}


@dataclass(eq=False)
class SearchService(SearchServiceServicer):
    """Implement the calls of protos/nobackfill/v1/search.proto."""

    _galleries: GalleryRegistry
    _searching: GallerySearcher
    _immediate: ReceiverSearch
    _images: DeferredImageSearch
    _state: GatewayState
    _canaries: Canaries

    def Search(  # noqa: N802 - the contract's name
        self, request: pb.SearchRequest, context: grpc.ServicerContext
    ) -> pb.SearchResponse:
        """Find the nearest items of a gallery to one query; hits come best first.

        Without k there are at most 10 hits.

        An empty gallery has no hits, and is no error.

        Raises:
            InvalidInputError: the query, k, the filter, the accuracy or max_distance is not valid.
            NotFoundError: no gallery has this name, or it was deleted during the search.
            IncompatibleSpaceError: no embedding of the query is in a space that answers.
            NeedsImageError: the gallery has two spaces, and the query has an embedding of one.
            NoEncoderError: the release has no model for an image or a text.
            ReleaseRetiredError: queries of the embedding's space have ended.
            VerificationError: the gallery is set aside, or a model's output or the store is
                damaged.
            UnavailableError: the model server or the database does not answer.
            DeadlineError: the call's time is over.
            CancelledError: the caller has cancelled the call.
            BusyError: the database is busy.
            OverloadedError: too many calls wait.
            CannotWriteError: the gallery's file cannot be opened, or the disk fails.
            TooLargeError: the text is too large.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        with self._galleries.use_gallery(request.gallery) as hosted:
            answer = self._searching.search(
                hosted, _parse_query(request.query), _checked_k(request.k),
                parse_filter(request.filter), _checked_ef(request.accuracy),
            )  # fmt: skip
        return _search_response(answer, request, self._state.current.ends)

    def answer_immediately(
        self, messages: Sequence[tuple[bytes, Principal]]
    ) -> Sequence[bytes | DeferredAnswer | None]:
        """Answer encoded `Search` requests on the thread that receives calls; it raises nothing for
        a bad request.

        A thread gets each request that is not valid, that its caller may not make, or that needs
        more work. That thread finds the error.

        Args:
            messages: encoded requests with their callers.

        Returns:
            For each, in order, the encoded answer, or what answers it later; None if it needs a
            thread of its own.
        """
        route_gallery = self._immediate.last_gallery()
        routed_answers = (
            self._immediate.search_by_last_plan([message for message, _ in messages])
            if route_gallery and all(principal.may_use(route_gallery) for _, principal in messages)
            else None
        )
        if routed_answers is not None and None not in routed_answers:
            return routed_answers
        answers: list[bytes | DeferredAnswer | None] = (
            [*routed_answers] if routed_answers else [None] * len(messages)
        )
        groups: dict[tuple[str, str], list[tuple[int, VectorQuery]]] = {}
        parse = _parse_simple if parse_search_request is None else parse_search_request
        for number, (message, principal) in enumerate(messages):
            if answers[number] is not None:
                continue
            query = parse(message)
            if query is None or query[3] > MAX_HITS or math.isnan(query[4]):
                continue
            gallery, space, content, k, farthest = query
            k = k or DEFAULT_K
            if not principal.may_use(gallery):
                continue
            if space is None:
                answers[number] = self._images.defer_search(gallery, content, k, farthest)
            else:
                groups.setdefault((gallery, space), []).append((number, (content, k, farthest)))
        for (gallery, space), group in groups.items():
            group_answers = self._immediate.search_encoded(
                gallery, space, [query for _, query in group]
            )
            for (number, _), answer in zip(group, group_answers, strict=True):
                answers[number] = answer
        return answers

    def SearchBatch(  # noqa: N802
        self, request: pb.SearchBatchRequest, context: grpc.ServicerContext
    ) -> pb.SearchBatchResponse:
        """Answer up to MAX_BATCH_QUERIES (256) queries at once, in their order.

        A query that is refused for its content has its error in its own response. Empty batches are
        refused. Without k there are at most 10 hits for each query.

        Raises:
            InvalidInputError: there is no query, a query has no content or two embeddings of one
                space, or k, the filter, the accuracy or max_distance is not valid.
            TooLargeError: there are too many queries, or their images or texts are too large
                together.
            NotFoundError: no gallery has this name, or it was deleted during the search.
            IncompatibleSpaceError: no embedding of a query is in a space that answers.
            NeedsImageError: the gallery has two spaces, and a query has an embedding of one.
            NoEncoderError: the release has no model for an image or a text.
            ReleaseRetiredError: queries of an embedding's space have ended.
            VerificationError: the gallery is set aside, or a model's output or the store is
                damaged.
            UnavailableError: the model server or the database does not answer.
            DeadlineError: the call's time is over.
            CancelledError: the caller has cancelled the call.
            BusyError: the database is busy.
            OverloadedError: too many calls with large pictures are being decoded.
            CannotWriteError: the gallery's file cannot be opened, or the disk fails.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        if not request.queries:
            raise InvalidInputError(
                f"queries: expected 1 to {MAX_BATCH_QUERIES} queries, got none; send at least one"
            )
        if len(request.queries) > MAX_BATCH_QUERIES:
            raise TooLargeError(
                f"queries: expected 1 to {MAX_BATCH_QUERIES} queries, got {len(request.queries)}; "
                "send them in several calls"
            )
        queries = [_parse_query(query) for query in request.queries]
        with self._galleries.use_gallery(request.gallery) as hosted:
            k, condition = _checked_k(request.k), parse_filter(request.filter)
            ef = _checked_ef(request.accuracy)
            answers = self._searching.search_batch(hosted, queries, k, condition, ef)
        return pb.SearchBatchResponse(
            responses=[
                pb.SearchResponse(error=str(answer))
                if isinstance(answer, InvalidInputError)
                else _search_response(answer, request, self._state.current.ends)
                for answer in answers
            ]
        )

    def Feedback(  # noqa: N802
        self, request: pb.FeedbackRequest, context: grpc.ServicerContext
    ) -> pb.FeedbackResponse:
        """Count a caller's feedback about a hit as evidence for a canary.

        `counted` is False without a canary, for an unknown or old answer, and for an item that is
        not among its hits. The gallery of the request is not checked. Only the first feedback of
        each kind in a session is evidence; later ones have `counted` True, too.

        Raises:
            InvalidInputError: the request has no request_id, or an unknown kind.
        """
        kind = _KINDS.get(request.kind)
        if kind is None or not request.request_id:
            raise InvalidInputError(
                "feedback: expected the request_id of a search answer, and a kind: clicked, "
                f"confirmed or rejected; got request_id {request.request_id[:64]!r} and kind "
                f"{request.kind}; correct the feedback"
            )
        counted = self._canaries.record_feedback(request.request_id, request.item_id, kind)
        return pb.FeedbackResponse(counted=counted)


def _parse_simple(message: bytes) -> tuple[str, str | None, bytes, int, float] | None:
    """Parse a request with one embedding or one image, and no option that needs more work.

    Returns:
        Gallery, space (None for an image), values or image, k, max_distance; None for other
        requests.
    """
    try:
        request = pb.SearchRequest.FromString(message)
    except DecodeError:
        return None
    query, embeddings = request.query, request.query.embeddings.embeddings
    if any(request.HasField(field) for field in _SLOW_FIELDS):
        return None
    farthest = request.max_distance if request.HasField("max_distance") else math.inf
    if query.image:
        return request.gallery, None, query.image, request.k, farthest
    if len(embeddings) != 1:
        return None
    return request.gallery, embeddings[0].space, embeddings[0].values, request.k, farthest


def _checked_k(k: int) -> int:
    if k > LARGEST_K:
        raise InvalidInputError(
            f"k, the number of hits: expected 1 to {LARGEST_K}, got {k}; request another number"
        )
    return k or DEFAULT_K


def _checked_ef(accuracy: pb.Accuracy) -> int:
    kind = accuracy.WhichOneof("accuracy")
    if kind == "ef" and not 1 <= accuracy.ef <= MAX_REQUESTED_EF:
        raise InvalidInputError(
            f"accuracy.ef, the width of the graph search: expected 1 to {MAX_REQUESTED_EF}, got "
            f"{accuracy.ef}; request another width"
        )
    return EXACT_EF if accuracy.exact else accuracy.ef


def _parse_query(query: pb.Query) -> Query:
    kind = query.WhichOneof("query")
    if kind == "image":
        return query.image
    if kind == "text":
        return query.text
    embeddings = query.embeddings.embeddings
    if kind is None or not embeddings:
        raise InvalidInputError(
            "query: expected an image, a text, or at least one embedding, got none of them; send "
            "one"
        )
    values = {embedding.space: embedding.values for embedding in embeddings}
    if len(values) != len(embeddings):
        raise InvalidInputError(
            "query: expected at most one embedding for each space, got two for one space; send one "
            "of them"
        )
    return values


def _max_distance(request: pb.SearchRequest | pb.SearchBatchRequest) -> float:
    if not request.HasField("max_distance"):
        return math.inf
    if math.isnan(request.max_distance):
        raise InvalidInputError(
            "max_distance: expected a number, got NaN; send a number, or leave max_distance out"
        )
    return request.max_distance


def _search_response(
    answer: SearchResult,
    request: pb.SearchRequest | pb.SearchBatchRequest,
    ends: Mapping[str, float],
) -> pb.SearchResponse:
    response = pb.SearchResponse(
        release=answer.release, space=answer.space, request_id=answer.request_id
    )
    farthest = _max_distance(request)
    fill_space_end(answer.space, ends, response.space_ends_at)
    keys = requested_metadata_keys(request.fields if request.HasField("fields") else None)
    for hit in answer.hits:
        message = pb.Hit(
            id=hit.item.id,
            distance=hit.distance,
            score=hit.score,
            release=hit.release,
            origin=ORIGINS[hit.origin],
            beyond_calibration=hit.beyond_calibration,
        )
        # Compare the rounded distance: a finer threshold would reveal more of it.
        if message.distance <= farthest:
            fill_metadata(hit.item.metadata, keys, message.metadata)
            response.hits.append(message)
    return response
