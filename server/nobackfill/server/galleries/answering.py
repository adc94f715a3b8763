"""Answer searches: from the queries of a call to its hits, in the mode of a gallery's plan.

A plan has an answerer. `PlainAnswerer` embeds queries, searches the plan's spaces and ranks the
hits. Every other mode wraps it: `FusionAnswerer` here, `HealingAnswerer` in server/healing,
`CanaryAnswerer` in server/canary. Each has one method from queries to answers; a single search is a
batch of one.

`ReceiverSearch` and `DeferredImageSearch` give the same answers to plain queries without a thread
of the
call: handing a search to another thread takes as long as the search. They read only references to
immutable objects (a plan, a snapshot) and cached items. A query that needs more, or has an error,
is left to the thread that `PlainAnswerer` works on.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nobackfill.errors import (
    IncompatibleSpaceError,
    InvalidInputError,
    NeedsImageError,
    NotFoundError,
    ReleaseRetiredError,
)
from nobackfill.gallery.filters import Filter, Matches
from nobackfill.gallery.search import index
from nobackfill.gallery.search.index import Labels, Mask, Neighbours
from nobackfill.gallery.search.view import LiveView, Snapshot, compile_curves, parse_search_request
from nobackfill.gallery.spec import Origin
from nobackfill.gallery.sqlite_file import StoredItem
from nobackfill.release.calibration import DistanceScale, Scorer
from nobackfill.release.manifest import Manifest
from nobackfill.server.catalog import Catalog
from nobackfill.server.embedding.embedding import (
    Batcher,
    EmbeddingService,
    ImageQueue,
    QueryAdapters,
    QueuedImage,
)
from nobackfill.server.galleries.hosted import (
    UNUSABLE_GALLERY_ERRORS,
    GalleryRegistry,
    HostedGallery,
    is_cheap_search,
)
from nobackfill.server.galleries.hosted_file import (
    EncodedHit,
    HostedInFile,
    ItemCache,
    encode_hit,
    encode_hits,
)
from nobackfill.server.galleries.plan import (
    Answerer,
    EmbeddingQuery,
    Plan,
    PlanPart,
    Query,
    QueryAnswer,
    RankedHit,
    RankFusion,
    Score,
    SearchRequest,
    SearchResult,
    direct_part,
)
from nobackfill.server.grpc import context
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.grpc.rpc import DeferredAnswer, DeferredCall
from nobackfill.server.state import GatewayState, OutdatedPlanError, State
from nobackfill.serving.fusion import CANDIDATES_PER_SEARCH, collect_candidates
from nobackfill.v1 import search_pb2 as pb
from nobackfill.vectors import Vectors
from nobackfill.wire.values import ORIGINS, origin_name

# Reads items by label and space, in the order of the labels; None for deleted ones.
ReadItems = Callable[[list[int], str], list[StoredItem | None]]


def rank_hits(
    parts: Sequence[PlanPart],
    neighbours: Sequence[Neighbours],
    query_row: int,
    k: int,
    read_items: ReadItems,
    *,
    exact: bool,
    by_score: bool = False,
) -> list[RankedHit]:
    """Rank the hits of one query.

    Hits of one part are ranked by distance. Hits of several parts are ranked by score, because
    distances of different spaces do not compare. If a score is missing (a direct search without a
    calibration), they are ranked by distance, which the release then declares comparable. Ranking
    uses exact distances; the hits have rounded ones, unless `exact` is set.

    Ties go by distance, then by label. A part that has an `origin` gives it to all its hits. An
    error of `read_items` passes through. No further neighbour takes the place of a deleted item.

    Args:
        parts: the searched parts.
        neighbours: neighbours of each part.
        query_row: row of the query in the neighbours.
        k: most hits to return.
        read_items: reads items by label.
        exact: return exact distances, and scores of them.
        by_score: rank one part by score, too, along its scale if it has one.

    Returns:
        At most `k` hits, best first; deleted items are left out.

    Raises:
        ValueError: there is another number of neighbours than of parts.
        IndexError: there is no part.
    """
    # Pairs: the hit with exact distances, for ranking, and the hit to return.
    hits: list[tuple[RankedHit, RankedHit]] = []
    for part, nearest in zip(parts, neighbours, strict=True):
        hits += _part_hits(part, nearest, query_row, k, read_items, exact=exact)
    scale = parts[0].distance_scale
    if by_score and scale is not None:
        hits.sort(key=lambda pair: _scale_sort_key(scale, pair[0]))
    elif len(parts) > 1 or by_score:
        scored = all(hit.score is not None for hit, _ in hits)
        order = _score_sort_key if scored else _distance_sort_key
        hits.sort(key=lambda pair: order(pair[0]))
    return [shown for _, shown in hits[:k]]


def round_distances(distances: Vectors) -> Vectors:
    """Round distances to three significant digits.

    That is enough for ranking and thresholds, but too little to reconstruct a stored vector from
    its distances to some queries.

    NaN and infinity stay as they are; an empty array gives an empty one.

    Args:
        distances: float32 [n].

    Returns:
        float32 [n].
    """
    return np.array([float(f"{distance:.3g}") for distance in distances.tolist()], np.float32)


def _part_hits(
    part: PlanPart, neighbours: Neighbours, row: int, k: int, read_items: ReadItems, *, exact: bool
) -> list[tuple[RankedHit, RankedHit]]:
    labels = neighbours.labels[row, :k].tolist()
    while labels and labels[-1] < 0:
        labels.pop()
    distances = neighbours.distances[row, : len(labels)]
    stored_items = read_items(labels, part.space)
    origins = [part.fixed_origin or (item.origin if item else None) for item in stored_items]

    def hits(distances: Vectors) -> list[RankedHit]:
        scores = calibrated_scores(part, origins, distances)
        return [
            RankedHit(item, distance, score.value, part.release, origin, score.beyond_calibration)
            if score is not None
            else RankedHit(item, distance, None, part.release, origin)
            for item, origin, distance, score in zip(
                stored_items, origins, distances.tolist(), scores, strict=True
            )
            if item is not None and origin is not None
        ]

    exact_hits = hits(distances)
    return list(
        zip(exact_hits, exact_hits if exact else hits(round_distances(distances)), strict=True)
    )


def calibrated_scores(
    part: PlanPart, origins: Sequence[Origin | None], distances: Vectors
) -> list[Score | None]:
    """Return the calibrated score of each hit, in the order of the hits.

    Args:
        part: the part that was searched.
        origins: origin of each hit; None has no score.
        distances: float32 [n], one for each origin.

    Returns:
        One score for each hit; None if its origin has no calibration. Empty without hits.
    """
    kinds = set(origins)
    if len(kinds) == 1:
        curve = part.score_curves.get(origins[0]) if origins[0] else None
        return [None] * len(origins) if curve is None else _curve_scores(curve, distances)
    result: list[Score | None] = [None] * len(origins)
    for origin in kinds:
        curve = part.score_curves.get(origin) if origin else None
        if curve is not None:
            for i, score in enumerate(_curve_scores(curve, distances)):
                if origins[i] == origin:
                    result[i] = score
    return result


def _curve_scores(curve: Scorer, distances: Vectors) -> list[Score | None]:
    values = curve.scores(distances).tolist()
    beyond = curve.is_beyond_calibration(distances).tolist()
    return [Score(*one) for one in zip(values, beyond, strict=True)]


def _score_sort_key(hit: RankedHit) -> tuple[float, float, int]:
    assert hit.score is not None
    return -hit.score, hit.distance, hit.item.label


def _scale_sort_key(scale: DistanceScale, hit: RankedHit) -> tuple[float, float, int]:
    """Return the sort key along a scale; nobackfill.gallery.search.index ranks in the same way."""
    scaled_distance = float(scale(hit.distance)) if hit.origin == "upgraded" else hit.distance
    return scaled_distance, hit.distance, hit.item.label


def _distance_sort_key(hit: RankedHit) -> tuple[float, int]:
    return hit.distance, hit.item.label


# Queries for more hits than this, or with a filter, are not batched: they would slow the others
# down.
_MAX_BATCHED_K = 64
_LARGEST_BATCH = 64
# A query is searched at most so often if items are deleted during its search.
_MAX_TRIES = 3


class GallerySearcher:
    """Answer searches by a gallery's present plan."""

    def __init__(self, state: GatewayState) -> None:
        self._state = state

    def search(
        self,
        hosted: HostedGallery,
        query: Query,
        k: int,
        condition: Filter | None = None,
        ef: int = 0,
    ) -> SearchResult:
        """Find the items nearest to one query.

        If another gateway replaces the plan meanwhile, the query is answered again by the new one.
        The caller is a user of the gallery.

        Args:
            hosted: the gallery.
            query: an encoded image, a text, or embeddings by space.
            k: most hits.
            condition: only items that pass this filter; None means all.
            ef: width of the graph search, as in Index.search; 0 means the index's own.

        Returns:
            The hits, best first, with the release and space that answered; fewer than `k` if the
            gallery has fewer, none if it is empty.

        Raises:
            InvalidInputError: the image, text, vector or filter is not valid.
            TooLargeError: the text is too large.
            NoEncoderError: the release embeds no texts, or no images.
            IncompatibleSpaceError: the embedding's space cannot be compared with the gallery's.
            NeedsImageError: the gallery lives in two spaces and needs an image or both embeddings.
            ReleaseRetiredError: queries of the embedding's release are no longer answered.
            NotFoundError: the gallery was deleted.
            UnavailableError: the model server, or the database, does not answer; or this gateway
                cannot follow another one that changed the gallery (OutdatedPlanError).
            VerificationError: the store, or a model's output, is damaged.
            DeadlineError: the call's time is over.
            CancelledError: the caller has cancelled the call.
            BusyError: the database is busy.
            CannotWriteError: the gallery's file cannot be opened, or the disk fails.
            ConfigurationError: the database refuses the statement, as without rights.
            OSError: the first search of a gallery in a file cannot delete a useless index file.
        """
        return single_answer(
            self._answer(hosted, SearchRequest((query,), k, condition, ef, is_single=True))
        )

    def search_batch(
        self, hosted: HostedGallery, queries: Sequence[Query], k: int,
        condition: Filter | None = None, ef: int = 0, *, may_reembed: bool = True,
    ) -> list[QueryAnswer]:  # fmt: skip
        """Answer several queries by one plan.

        If another gateway replaces the plan meanwhile, all are answered again. The caller is a user
        of the gallery.

        Args:
            hosted: the gallery.
            queries: the queries, each as in `search`; empty gives no answers.
            k: most hits for each, at least 1.
            condition: only items that pass this filter; None means all.
            ef: width of the graph search, as in Index.search; 0 means the index's own.
            may_reembed: re-embed first hits if the gallery does so.

        Returns:
            For each query, in order, the result, or the InvalidInputError that refused it alone.

        Raises:
            NobackfillError: each class that `search` names, for the whole call: a query whose space
                does not fit or has ended refuses all, as an invalid filter does.
            TooLargeError: the images, or the texts, together are too large.
            OverloadedError: too many images are being decoded.
        """
        return self._answer(
            hosted, SearchRequest(tuple(queries), k, condition, ef, may_reembed=may_reembed)
        )

    def _answer(self, hosted: HostedGallery, request: SearchRequest) -> list[QueryAnswer]:
        """Answer a request, and again if another gateway replaces the plan during the search."""
        while True:
            plan_before = hosted.plan
            try:
                with hosted.use_plan() as plan:
                    return plan.answerer.answer(hosted, request)
            except OutdatedPlanError:
                self._state.catch_up()
                if hosted.is_closing:
                    raise NotFoundError(
                        f"gallery {hosted.name!r} was deleted during the search; `gateway gallery "
                        "list` shows the others"
                    ) from None
                if hosted.plan is plan_before:
                    raise


def single_answer(answers: Sequence[QueryAnswer]) -> SearchResult:
    """Return the answer to a single query, from a list of exactly one (ValueError otherwise).

    Raises:
        InvalidInputError: the query was refused.
    """
    (answer,) = answers
    if isinstance(answer, InvalidInputError):
        raise answer
    return answer


class AnswererFactory:
    """Make the answerer of each plan, and hold the parts that they share."""

    def __init__(
        self,
        embedding: EmbeddingService,
        adapters: QueryAdapters,
        catalog: Catalog,
        state: GatewayState,
        metrics: Metrics,
        make_canary_answerer: "Callable[[PlainAnswerer, PlainAnswerer], Answerer]",
        make_reembedding_answerer: "Callable[[PlainAnswerer, str], Answerer]",
    ) -> None:
        """Hold the shared parts.

        Args:
            embedding: embeds queries.
            adapters: maps queries to older spaces.
            catalog: published releases.
            state: the gateway's state.
            metrics: counts searches.
            make_canary_answerer: makes the answerer of a plan with a canary, from the old and the
                new pair's answerers.
            make_reembedding_answerer: makes the answerer that re-embeds hits, from the plain one
                and the space to re-embed.
        """
        self._embedding, self._adapters = embedding, adapters
        self._catalog, self._state = catalog, state
        self._canary, self._healing = make_canary_answerer, make_reembedding_answerer
        self._searches = {kind: metrics.searches.labels(kind) for kind in ("exact", "graph")}
        self.observe_batch_size = metrics.batch_size.labels("search").observe

    def make_answerer(self, plan: Plan) -> Answerer:
        """Make the answerer of a plan, which has at most one of `canary_part`, `reembedded_space`
        and `fusion`; with more, the first of these counts.
        """
        choosing = SpaceChoice(self._catalog, self._state, plan.parts, plan.single_parts)
        plain = PlainAnswerer(self, plan.parts, choosing)
        if plan.canary_part is not None:
            return self._canary(plain, PlainAnswerer(self, (plan.canary_part,), choosing))
        if plan.reembedded_space is not None:
            return self._healing(plain, plan.reembedded_space)
        if plan.fusion is not None:
            return FusionAnswerer(self, plain, plan.fusion)
        return plain

    def embed_queries(
        self, manifests: Sequence[Manifest], items: Sequence[bytes | str], request: SearchRequest
    ) -> list[tuple[Vectors, ...] | InvalidInputError]:
        """Embed images and texts by each release; a single query, unless in the background, is
        batched with those of other calls.

        For a batched query, a text or image that is too large is a returned error, not a raised
        one. In the background a single query is treated like several.

        Args:
            manifests: the releases; one that is named twice is used once.
            items: encoded images and texts; empty gives no rows.
            request: the request that they belong to.

        Returns:
            For each item the vectors float32 [1, dim] in the order of `manifests`, or why it has
            none.

        Raises:
            NoEncoderError: a release does not embed such items.
            TooLargeError: the items cost too much together; not for a batched query.
            OverloadedError: too many expensive calls are being decoded.
            UnavailableError: the model server does not answer.
            VerificationError: the model's output has another shape.
            DeadlineError: the call's time is over.
            CancelledError: the caller has cancelled the call.
        """
        if not items:
            return []
        distinct = {manifest.release: manifest for manifest in manifests}
        if not request.is_single or request.is_background:
            rows = self._embedding.embed_queries(list(distinct.values()), items)
        else:
            try:
                rows = [tuple(self._embedding.embed_query(m, items[0]) for m in distinct.values())]
            except InvalidInputError as error:
                return [error]
        places = [list(distinct).index(manifest.release) for manifest in manifests]
        return [
            row if isinstance(row, InvalidInputError) else tuple(row[place] for place in places)
            for row in rows
        ]

    def adapt_vectors(
        self, parts: Sequence[PlanPart], vectors: Sequence[Vectors]
    ) -> tuple[Vectors, ...]:
        """Map a query's vectors into the searched spaces, where a part has a query adapter.

        Args:
            parts: the parts to search.
            vectors: the query's vector float32 [1, dim] of each part's query release.

        Returns:
            A vector float32 [1, dim] in each part's space, in the order of the parts.

        Raises:
            InvalidInputError: an adapter has no usable vector for the query, or the query is not a
                valid vector.
            VerificationError: an adapter's file is missing, is not as signed, or cannot be run.
            ValueError: there is another number of vectors than of parts.
        """
        return tuple(
            vector
            if part.adapter is None
            else self._adapters.map_queries(part.query_manifest, part.adapter, vector)
            for part, vector in zip(parts, vectors, strict=True)
        )

    def count_searches(self, embedded_queries: "Iterable[EmbeddedQuery]") -> None:
        """Count searches in the metrics, once for each part of a question, by whether they compare
        every vector or use a graph.

        After an error earlier questions are counted.

        Raises:
            OutdatedPlanError: another gateway has deleted a space.
            IncompatibleSpaceError, NotFoundError: a view is needed that cannot be made.
            BusyError, UnavailableError: the store is busy, or does not answer.
            VerificationError: the store is damaged.
            CannotWriteError: the gallery's file cannot be opened, or the disk fails.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        for question in embedded_queries:
            for part in question.parts:
                is_exact = question.hosted.scans_all_vectors(part, question.ef)
                self._searches["exact" if is_exact else "graph"].inc()


@dataclass(frozen=True, eq=False)
class EmbeddedQuery:
    """Hold a query's vectors.

    Attributes:
        hosted: the gallery.
        parts: the parts to search.
        vectors: a vector float32 [1, dim] for each part.
        k: most hits.
        ef: width of the graph search, as in Index.search.
    """

    hosted: HostedGallery
    parts: tuple[PlanPart, ...]
    vectors: tuple[Vectors, ...]
    k: int
    ef: int


class PlainAnswerer:
    """Answer queries by the nearest items of the plan's one or two spaces."""

    def __init__(
        self, shared: AnswererFactory, parts: tuple[PlanPart, ...], space_choice: "SpaceChoice"
    ) -> None:
        """Make an answerer.

        Args:
            shared: parts that all answerers share.
            parts: spaces that images and texts are compared with.
            space_choice: chooses the spaces of a query by embedding.
        """
        self.parts = parts
        self._shared = shared
        self._space_choice = space_choice
        # One batcher for each plan: a search of a small gallery does not wait for a batch of a
        # large one.
        self._batcher = Batcher(
            find_nearest, largest_batch=_LARGEST_BATCH, observe_size=shared.observe_batch_size
        )

    def answer(self, hosted: HostedGallery, request: SearchRequest) -> list[QueryAnswer]:
        """Answer each query of a request.

        Args:
            hosted: the gallery; the caller uses it and its plan.
            request: the request.

        Returns:
            For each query, in order, the result, or the InvalidInputError that refused it.

        Raises:
            NobackfillError: as GallerySearcher.search_batch.
            OutdatedPlanError: another gateway has replaced the plan; the caller begins again.
            InvalidInputError: the filter is not valid; TooLargeError if the images together are too
                large.
            NoEncoderError, IncompatibleSpaceError, NeedsImageError, ReleaseRetiredError: a query
                does not suit the gallery; see GallerySearcher.search.
            DeadlineError, CancelledError: the call's time is over, or its caller has gone.
            BusyError, UnavailableError: the store is busy, a server does not answer, or too many
                images are being decoded (OverloadedError).
            NotFoundError: the gallery was closed or deleted.
            VerificationError: the store, or a model's output, is damaged.
            CannotWriteError: the gallery's file cannot be opened, or the disk fails.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        questions = self.embed_queries(hosted, request)
        answers = self.search_embedded(hosted, accepted_queries(questions), request)
        return [one if isinstance(one, InvalidInputError) else answers[one] for one in questions]

    def sole_image_part(self, hosted: HostedGallery) -> PlanPart | None:
        """Return the plan's only part, which answers an image; None if there are two."""
        return self.parts[0] if len(self.parts) == 1 else None

    def sole_space_part(self, hosted: HostedGallery, space: str) -> PlanPart | None:
        """Return the part that answers an embedding of a space; None if no part does it alone. An
        announced end of the space is not checked.
        """
        if len(self.parts) == 1 and self.parts[0].query_manifest.space == space:
            return self.parts[0]
        return self._space_choice.single_parts.get(space)

    def embed_queries(
        self, hosted: HostedGallery, request: SearchRequest
    ) -> list[EmbeddedQuery | InvalidInputError]:
        """Embed the queries of a request, choose their spaces, and map them there where a part has
        a query adapter. Searches are counted in the metrics, except those in the background.

        Args:
            hosted: the gallery.
            request: the request.

        Returns:
            For each query, in order, its question, or why it was refused. The values of an
            embedding are not checked yet.

        Raises:
            NoEncoderError: the release embeds no texts, or no images.
            IncompatibleSpaceError, NeedsImageError, ReleaseRetiredError: as
                SpaceChoice.choose_parts.
            UnavailableError: the model server or the database does not answer, or
                OutdatedPlanError.
            DeadlineError, CancelledError: the call's time is over, or its caller has gone.
            TooLargeError, OverloadedError: the images or texts are too many, for this call or for
                the gateway.
            VerificationError: a model's output has another shape, or a query adapter's file is not
                as signed.
            BusyError, NotFoundError, CannotWriteError: the store is busy, closed, or cannot be
                opened while searches are counted.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        items = [query for query in request.queries if isinstance(query, bytes | str)]
        embedded = iter(
            self._shared.embed_queries([part.query_manifest for part in self.parts], items, request)
        )
        questions: list[EmbeddedQuery | InvalidInputError] = []
        for query in request.queries:
            try:
                parts, vectors = self.parts, None
                if isinstance(query, bytes | str):
                    vectors = next(embedded)
                    if isinstance(vectors, InvalidInputError):
                        raise vectors
                else:
                    parts = self._space_choice.choose_parts(query, self.parts)
                    vectors = tuple(query_vector(part.query_manifest, query) for part in parts)
                adapted = self._shared.adapt_vectors(parts, vectors)
                questions.append(EmbeddedQuery(hosted, parts, adapted, request.k, request.ef))
            except InvalidInputError as error:
                questions.append(error)
        if not request.is_background:
            self._shared.count_searches(accepted_queries(questions))
        return questions

    def search_embedded(
        self, hosted: HostedGallery, questions: Sequence[EmbeddedQuery], request: SearchRequest
    ) -> dict[EmbeddedQuery, QueryAnswer]:
        """Search for questions of one request, and rank their hits.

        A question that loses hits because items are deleted meanwhile is searched again, three
        times in all; after that it has fewer hits. The duration counts for the gallery's speed,
        except in the background.

        Args:
            hosted: the gallery.
            questions: the questions; empty gives no answers.
            request: the request that they belong to.

        Returns:
            For each question its hits, or the InvalidInputError that refused its vector.

        Raises:
            InvalidInputError: the filter is not valid.
            DeadlineError: the call's time is over.
            CancelledError: the caller has cancelled the call.
            NobackfillError: the store's error: BusyError, NotFoundError, UnavailableError,
                VerificationError, CannotWriteError if a file cannot be opened or the disk fails, or
                ConfigurationError if the database refuses the statement.
            OutdatedPlanError: another gateway has replaced the plan.
            IncompatibleSpaceError: a space was deleted meanwhile; only in a file.
        """
        answers: dict[EmbeddedQuery, QueryAnswer] = {}
        if not questions:
            return answers
        with context.trace_part("search"):
            matches = matching_items(hosted, request.condition)
            open_questions = questions
            for _ in range(_MAX_TRIES):
                nearest = self._nearest(open_questions, matches, request)
                searched = list(zip(open_questions, nearest, strict=True))
                answers |= {question: rank_nearest(question, one) for question, one in searched}
                open_questions = [
                    question for question, one in searched if is_incomplete(question, one, answers)
                ]
                if not open_questions:
                    break
        return answers

    def _nearest(
        self, questions: Sequence[EmbeddedQuery], matches: Matches | None, request: SearchRequest
    ) -> Sequence["Nearest"]:
        is_batched = request.is_single and not request.is_background and matches is None
        if is_batched and request.k <= _MAX_BATCHED_K and not request.ef:
            return [self._batcher(question) for question in questions]
        return find_nearest(questions, matches, records_speed=not request.is_background)


def accepted_queries(
    embedded_queries: Sequence[EmbeddedQuery | InvalidInputError],
) -> list[EmbeddedQuery]:
    """Return the questions that were not refused, in their order."""
    return [one for one in embedded_queries if isinstance(one, EmbeddedQuery)]


def matching_items(hosted: HostedGallery, condition: Filter | None) -> Matches | None:
    """Return the items that pass a filter; None for all.

    Raises:
        InvalidInputError: the filter is not valid.
        TypeError: the condition is no filter.
        NobackfillError: the store's error: BusyError, NotFoundError (closed), UnavailableError,
            VerificationError, CannotWriteError if a file cannot be opened or the disk fails, or
            ConfigurationError if the database refuses the statement.
    """
    return None if condition is None else hosted.filtering.find_matches(condition)


def can_read(manifest: Manifest, query: Query) -> bool:
    """Tell whether a query has an embedding of a release, or the release can embed it. Whether the
    query is valid is not checked.
    """
    if isinstance(query, str):
        return manifest.text_encoder is not None
    if isinstance(query, bytes):
        return manifest.embedder.file is not None
    return manifest.space in query


def query_vector(manifest: Manifest, query: EmbeddingQuery) -> Vectors:
    """Return a query's embedding of a release.

    Its values are checked later, when it is searched together with others.

    The array shares the query's memory and cannot be written. NaN and infinity pass.

    Args:
        manifest: the release.
        query: embeddings by space; one of them is in the release's space.

    Returns:
        float32 [1, dim].

    Raises:
        InvalidInputError: the embedding has the wrong size.
        KeyError: the query has no embedding in the release's space.
    """
    dim, values = manifest.embedder.dim, query[manifest.space]
    if len(values) != 4 * dim:
        raise InvalidInputError(
            f"query: expected an embedding of release {manifest.release}, which has {4 * dim} "
            f"bytes (float32, dimension {dim}), got {len(values)} bytes; embed the query with that "
            "release"
        )
    return np.frombuffer(values, "<f4").reshape(1, dim)


@dataclass(eq=False)
class SpaceChoice:
    """Choose the spaces that a query by embedding is compared with, in one plan: `parts` and
    `single_parts` are those of the plan.
    """

    _catalog: Catalog
    _state: GatewayState
    _parts: tuple[PlanPart, ...]
    single_parts: Mapping[str, PlanPart]

    def choose_parts(
        self, query: EmbeddingQuery, preferred: tuple[PlanPart, ...]
    ) -> tuple[PlanPart, ...]:
        """Choose the parts for a query.

        The first that fit are taken: the preferred parts, those of the plan, then one part for a
        single space. Last comes a direct search from another release's space; if it needs a query
        adapter, only from the active release's. An announced end counts for single parts only.

        Args:
            query: embeddings by space; spaces that are not known here are ignored.
            preferred: parts that are used if the query has an embedding for each.

        Returns:
            The preferred parts, or those that fit the query. The vectors are not checked.

        Raises:
            NeedsImageError: the gallery lives in two spaces, and the query has an embedding of the
                one that answers only.
            ReleaseRetiredError: queries of the embedding's release are no longer answered.
            IncompatibleSpaceError: no embedding's space can be compared with the gallery's.
        """
        for parts in (preferred, self._parts):
            if all(part.query_manifest.space in query for part in parts):
                return parts
        for space, part in self.single_parts.items():
            if space in query:
                self._refuse_ended(space, part.query_manifest)
                return (part,)
        answering = self._parts[0].query_manifest
        if answering.space in query:
            missing = [p.query_manifest for p in self._parts if p.query_manifest.space not in query]
            raise NeedsImageError(
                "query: the gallery is being upgraded and has vectors of two releases; send the "
                f"image, or an embedding of each of releases {answering.release} and "
                f"{', '.join(str(m.release) for m in missing)}"
            )
        active, spaces = self._parts[-1], self._catalog.manifest_by_space
        for space in query:
            manifest = spaces.get(space)
            if manifest is None or not manifest.searches_space_directly(active.space):
                continue
            part = direct_part(manifest, spaces[active.space])
            # An activation tries an adapter in a child process before it runs here.
            if part.adapter is None or manifest.release == self._state.current.active:
                return (part,)
        raise self._incompatible_error(answering.release, query)

    def _refuse_ended(self, space: str, manifest: Manifest) -> None:
        end = self._state.current.ends.get(space)
        if end is not None and time.time() >= end:
            raise _retired_error(manifest.release)

    def _incompatible_error(self, answering: int, query: EmbeddingQuery) -> Exception:
        spaces = self._catalog.manifest_by_space
        known = [spaces[space].release for space in query if space in spaces]
        if known and max(known) in self._state.current.retired:
            return _retired_error(max(known))
        origin = f"release {max(known)}" if known else "a release that is unknown to this gateway"
        return IncompatibleSpaceError(
            f"query: expected an embedding of release {answering}, which answers in this gallery, "
            f"got one of {origin}; embed the query with release {answering}, or send the image"
        )


def _retired_error(release: int) -> ReleaseRetiredError:
    return ReleaseRetiredError(
        f"query: embeddings of release {release} are no longer answered, because its announced end "
        "has passed; embed the query with the active release, which `gateway releases` shows"
    )


# The neighbours of each part for a batch of questions, and the row of one question; or its error.
Nearest = tuple[Sequence[Neighbours], int] | InvalidInputError


def find_nearest(
    embedded_queries: Sequence[EmbeddedQuery],
    matches: Matches | None = None,
    *,
    records_speed: bool = True,
) -> Sequence[Nearest]:
    """Search for several questions; those with the same parts share one search of each part.

    If one of them is not valid, they are searched one by one.

    The neighbours have the largest `k` of the questions with the same parts.

    Args:
        embedded_queries: the questions, all of one gallery and with one `ef`, which is not
            checked; empty gives no answers.
        matches: items that may be hits; None means all.
        records_speed: count the duration for the gallery's speed, unless the search has an `ef`.

    Returns:
        The neighbours of each question, in order, or the InvalidInputError that refused its vector.

    Raises:
        NobackfillError: the store's error: BusyError, NotFoundError, UnavailableError,
            VerificationError, CannotWriteError if a file cannot be opened or the disk fails, or
            ConfigurationError if the database refuses the statement.
        OutdatedPlanError: another gateway has deleted a space.
        DeadlineError, CancelledError: the call's time is over, or its caller has gone; only in a
            database.
        IncompatibleSpaceError: a space was deleted meanwhile; only in a file.
    """
    if len(embedded_queries) == 1:
        return _search_group(embedded_queries, matches, records_speed)
    groups: dict[tuple[PlanPart, ...], list[EmbeddedQuery]] = {}
    for question in embedded_queries:
        groups.setdefault(question.parts, []).append(question)
    results: dict[EmbeddedQuery, Nearest] = {}
    for group in groups.values():
        results.update(zip(group, _search_group(group, matches, records_speed), strict=True))
    return [results[question] for question in embedded_queries]


def _search_group(
    embedded_queries: Sequence[EmbeddedQuery], matches: Matches | None, timed: bool
) -> Sequence[Nearest]:
    """Search for questions with the same parts."""
    hosted, parts = embedded_queries[0].hosted, embedded_queries[0].parts
    k = max(question.k for question in embedded_queries)
    # All questions have the same ef: one with an ef of its own is searched on its own.
    ef = embedded_queries[0].ef
    columns = list(embedded_queries[0].vectors)
    if len(embedded_queries) > 1:
        columns = [
            np.concatenate([question.vectors[i] for question in embedded_queries])
            for i in range(len(parts))
        ]
    began = time.monotonic()
    try:
        neighbours = hosted.search(parts, columns, k, matches, ef)
    except InvalidInputError as error:
        if len(embedded_queries) == 1:
            return [error]
        # One of them is not valid: search one by one to find out which.
        return [_search_group([one], matches, timed)[0] for one in embedded_queries]
    if timed and not ef:
        # A wide search is slow because its caller asked for it, so it does not count.
        hosted.search_speed.record_search(time.monotonic() - began, len(embedded_queries))
    return [(neighbours, row) for row in range(len(embedded_queries))]


def rank_nearest(embedded_query: EmbeddedQuery, nearest: Nearest) -> QueryAnswer:
    """Rank the hits of a question, best first; an error instead of neighbours is returned as it is.

    Reads the items: errors of the store pass through, such as BusyError, NotFoundError,
    UnavailableError, VerificationError, CannotWriteError and ConfigurationError.

    Returns:
        At most `k` hits without deleted items; or the error.

    Raises:
        OutdatedPlanError: another gateway has deleted the space.
        DeadlineError, CancelledError: the call's time is over, or its caller has gone; only in a
            database.
        IncompatibleSpaceError: a space was deleted meanwhile; only in a file.
    """
    if isinstance(nearest, InvalidInputError):
        return nearest
    neighbours, row = nearest
    hosted, query = embedded_query.hosted, embedded_query.parts[0].query_manifest
    parts, k, exact = embedded_query.parts, embedded_query.k, hosted.exact_distances
    hits = rank_hits(parts, neighbours, row, k, hosted.items, exact=exact)
    return SearchResult(hits, query.release, query.space)


def is_incomplete(
    embedded_query: EmbeddedQuery, nearest: Nearest, answers: Mapping[EmbeddedQuery, QueryAnswer]
) -> bool:
    """Tell whether a question has fewer hits than neighbours were found, up to its `k`, because an
    item was deleted during the search. A question with an error is complete; one that `answers`
    lacks raises KeyError.
    """
    answer = answers[embedded_query]
    if isinstance(nearest, InvalidInputError) or isinstance(answer, InvalidInputError):
        return False
    if len(answer.hits) == embedded_query.k:
        return False
    neighbours, row = nearest
    available = sum(int(np.count_nonzero(part.labels[row] >= 0)) for part in neighbours)
    return len(answer.hits) < min(embedded_query.k, available)


class FusionAnswerer:
    """Rank migrated items by the new and the previous model, if a query can have both
    embeddings.
    """

    def __init__(self, shared: AnswererFactory, plain: PlainAnswerer, fusion: RankFusion) -> None:
        """Make an answerer.

        Args:
            shared: parts that all answerers share.
            plain: answers by the new model alone.
            fusion: the previous space and the weights.
        """
        self._shared, self._plain, self._fusion = shared, plain, fusion
        self._part = plain.parts[0]

    def answer(self, hosted: HostedGallery, request: SearchRequest) -> list[QueryAnswer]:
        """Answer each query of a request.

        A query that the previous model cannot read, or that has no vector of both models, is
        answered by the new model alone.

        Args:
            hosted: the gallery; the caller uses it and its plan.
            request: the request.

        Returns:
            For each query, in order, the result, or the InvalidInputError that refused it.

        Raises:
            NobackfillError: as GallerySearcher.search_batch.
            InvalidInputError: the filter is not valid; TooLargeError if the images together are too
                large.
            NoEncoderError, IncompatibleSpaceError, NeedsImageError, ReleaseRetiredError: a query
                does not suit the gallery; see GallerySearcher.search.
            OutdatedPlanError: another gateway has replaced the plan; the caller begins again.
            DeadlineError, CancelledError: the call's time is over, or its caller has gone.
            BusyError, UnavailableError: the store is busy, a server does not answer, or too many
                images are being decoded (OverloadedError).
            NotFoundError: the gallery was closed or deleted.
            VerificationError: the store, or a model's output, is damaged.
            CannotWriteError: the gallery's file cannot be opened, or the disk fails.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        pairs = self._query_pairs(hosted, request)
        answers: dict[int, QueryAnswer] = {
            place: pair for place, pair in pairs.items() if isinstance(pair, InvalidInputError)
        }
        if other_places := [place for place in range(len(request.queries)) if place not in pairs]:
            other_request = replace(
                request, queries=tuple(request.queries[place] for place in other_places)
            )
            answers.update(
                zip(other_places, self._plain.answer(hosted, other_request), strict=True)
            )
        if len(answers) < len(request.queries):
            with context.trace_part("search"):
                matches = matching_items(hosted, request.condition)
                for place, pair in pairs.items():
                    if not isinstance(pair, InvalidInputError):
                        answers[place] = self._rank_pair(*pair, matches)
        return [answers[place] for place in range(len(request.queries))]

    def sole_image_part(self, hosted: HostedGallery) -> PlanPart | None:
        """Return None: two models answer an image, so that it needs a thread of its call."""
        return None

    def sole_space_part(self, hosted: HostedGallery, space: str) -> PlanPart | None:
        """Return the part that answers an embedding of a space by the new model alone; None if no
        part does.
        """
        return self._plain.sole_space_part(hosted, space)

    def _query_pairs(
        self, hosted: HostedGallery, request: SearchRequest
    ) -> dict[int, tuple[EmbeddedQuery, Vectors] | InvalidInputError]:
        """Return, by place of the query, the new model's question and the previous model's vector.

        Queries that the previous model cannot read are left out.
        """
        new, old = self._part.query_manifest, self._fusion.old_part.query_manifest
        vectors: dict[int, tuple[Vectors, ...] | InvalidInputError] = {}
        items: dict[int, bytes | str] = {}
        for place, query in enumerate(request.queries):
            if not can_read(old, query):
                continue
            if isinstance(query, bytes | str):
                items[place] = query
            elif new.space in query:
                try:
                    vectors[place] = query_vector(new, query), query_vector(old, query)
                except InvalidInputError as error:
                    vectors[place] = error
        rows = zip(
            items, self._shared.embed_queries([new, old], [*items.values()], request), strict=True
        )
        vectors |= {place: row for place, row in rows if not isinstance(row, InvalidInputError)}
        pairs: dict[int, tuple[EmbeddedQuery, Vectors] | InvalidInputError] = {}
        for place, row in vectors.items():
            if isinstance(row, InvalidInputError):
                pairs[place] = row
            else:
                question = EmbeddedQuery(hosted, (self._part,), (row[0],), request.k, request.ef)
                pairs[place] = question, row[1]
        return pairs

    def _rank_pair(
        self, question: EmbeddedQuery, old: Vectors, matches: Matches | None
    ) -> QueryAnswer:
        context.current_call().check()
        self._shared.count_searches([question])
        try:
            return rank_by_fusion(question, self._fusion, old, matches)
        except InvalidInputError as error:
            return error


def rank_by_fusion(
    embedded_query: EmbeddedQuery, fusion: RankFusion, old_vectors: Vectors, matches: Matches | None
) -> SearchResult:
    """Rank the nearest items of either model: migrated ones by both distances, native ones by the
    new.

    Ties go by the new distance, then by label. Items that have no vector in the new space, or are
    deleted meanwhile, are left out and not replaced.

    Each model gives as many candidates as `collect_candidates` says, at least
    CANDIDATES_PER_SEARCH.

    Args:
        embedded_query: the query in the new space.
        fusion: the previous space and the weights.
        old_vectors: the query's vector in the previous space, float32 [1, dim].
        matches: items that may be hits; None means all.

    Returns:
        At most `k` hits, best first, with their distances in the new space.

    Raises:
        InvalidInputError: a vector is not valid.
        NobackfillError: the store's error: BusyError, NotFoundError, UnavailableError,
            VerificationError, CannotWriteError if a file cannot be opened or the disk fails, or
            ConfigurationError if the database refuses the statement.
        OutdatedPlanError: another gateway has deleted a space.
        DeadlineError, CancelledError: the call's time is over, or its caller has gone; only in a
            database.
        IncompatibleSpaceError: a space was deleted meanwhile; only in a file.
    """
    hosted, part, new = embedded_query.hosted, embedded_query.parts[0], embedded_query.vectors[0]
    labels = collect_candidates(
        partial(_nearest_labels, embedded_query, part, new, matches),
        partial(_nearest_labels, embedded_query, fusion.old_part, old_vectors, matches),
        count=max(embedded_query.k, CANDIDATES_PER_SEARCH),
    )
    stored_labels, distances, migrated = _distances_to_stored(
        hosted, part, new, np.array(sorted(labels), np.int64)
    )
    old_labels, old_distances, _ = _distances_to_stored(
        hosted, fusion.old_part, old_vectors, stored_labels[migrated]
    )
    places = np.searchsorted(stored_labels, old_labels)
    ranking_values = distances.astype(np.float64)
    ranking_values[places] = fusion.joint_distance(distances[places], old_distances)
    order = np.lexsort((stored_labels, distances, ranking_values))
    ranked = Neighbours(stored_labels[order][None], distances[order][None])
    hits = rank_hits([part], [ranked], 0, len(order), hosted.items, exact=hosted.exact_distances)
    return SearchResult(
        hits[: embedded_query.k], part.query_manifest.release, part.query_manifest.space
    )


def _nearest_labels(
    embedded_query: EmbeddedQuery,
    part: PlanPart,
    query: Vectors,
    matches: Matches | None,
    count: int,
) -> Labels:
    (neighbours,) = embedded_query.hosted.search([part], [query], count, matches, embedded_query.ef)
    labels: Labels = neighbours.labels[0]
    return labels[labels >= 0]


def _distances_to_stored(
    hosted: HostedGallery, part: PlanPart, query: Vectors, labels: Labels
) -> tuple[Labels, Vectors, Mask]:
    """Return the distances of stored vectors to a query.

    Args:
        hosted: the gallery.
        part: the part that has the vectors.
        query: float32 [1, dim].
        labels: increasing labels.

    Returns:
        The labels that have a vector there, their distances, and whether each was migrated.
    """
    stored = hosted.store.stored_vectors(labels, part.space)
    distances = index.distances_to_query(
        part.query_manifest.embedder.metric, query, stored.embedding
    )
    migrated = np.array([one == "upgraded" for one in stored.origins], np.bool_)
    return stored.labels, distances, migrated


if TYPE_CHECKING:
    from nobackfill.gallery.search._native import Curves


# A query by embedding: little-endian float32 values, k, and the largest distance of a hit.
VectorQuery = tuple[bytes, int, float]

# Default number of hits; answers with more hits than MAX_HITS are made on another thread.
DEFAULT_K, MAX_HITS = 10, 64


@dataclass(frozen=True)
class _PreparedPart:
    """Hold what all answers of one part share.

    Attributes:
        part: the part.
        item_cache: cached items.
        encode_item: encodes a hit.
        ends_at: Unix time at which queries of the space end; None without an end.
        encoded_tail: encoded fields that follow the hits.
        curves: calibration for compiled code; None without compiled code.
    """

    part: PlanPart
    item_cache: ItemCache
    encode_item: Callable[[StoredItem], EncodedHit | None]
    ends_at: float | None
    encoded_tail: bytes
    curves: "Curves | None"


@dataclass(frozen=True)
class _CompiledRoute:
    """Answer requests in one call of compiled code, while nothing that it depends on changes."""

    answer_messages: Callable[[list[bytes]], list[bytes | None]]
    hosted: HostedInFile
    plan: Plan
    part: PlanPart
    view: LiveView
    snapshot: Snapshot
    state: State
    has_exact_distances: bool

    def is_valid(self) -> bool:
        """Tell whether everything that the route depends on is unchanged."""
        hosted = self.hosted
        return (
            hosted.plan is self.plan
            and hosted.origin_cache.migrated_labels(self.part, self.snapshot) is None
            and self.view.snapshot() is self.snapshot
            and hosted.views().get(self.snapshot.spec.space) is self.view
            and hosted.exact_distances is self.has_exact_distances
        )


class ReceiverSearch:
    """Answer queries by one embedding."""

    def __init__(self, galleries: GalleryRegistry, state: GatewayState, metrics: Metrics) -> None:
        self._galleries = galleries
        self._state = state
        self._exact, self._graph = (metrics.searches.labels(kind) for kind in ("exact", "graph"))
        # The route of the last answer; None if it had none.
        self._route: _CompiledRoute | None = None

    def search_by_last_plan(self, messages: list[bytes]) -> list[bytes | None] | None:
        """Answer encoded requests by the route of the last answer; call it on the thread that
        receives calls only.

        Answers are counted in the metrics and for the gallery's speed. A route that is no longer
        valid is dropped. Rights and deadlines are not checked, here or in `search_encoded`: call it
        only if each caller may use the gallery of `last_gallery`.

        Args:
            messages: encoded SearchRequests.

        Returns:
            The encoded answer to each, in order, None for a request that the route does not fit.
            Without a valid route, None for all; the caller then uses `search_encoded`.
        """
        route = self._route
        if (
            route is None
            or not route.is_valid()
            or self._galleries.searchable_gallery(route.hosted.name) is not route.hosted
            or self._state.current is not route.state
            or not route.hosted.search_speed.is_fast
        ):
            self._route = None
            return None
        began = time.monotonic()
        answers = route.answer_messages(messages)
        count = len(answers) - answers.count(None)
        if count:
            route.hosted.search_speed.record_on_receiver(time.monotonic() - began, count)
            self._graph.inc(count)
            if sample := route.view.query_sample.draw(count):
                answered = [
                    m for m, answer in zip(messages, answers, strict=True) if answer is not None
                ]
                route.view.query_sample.store_queries(
                    _query_vectors(answered[number] for number in sample)
                )
        return answers

    def last_gallery(self) -> str:
        """Return the gallery that `search_by_last_plan` answers for; empty without a route. The
        route may no longer be valid.
        """
        return "" if self._route is None else self._route.hosted.name

    def search_encoded(
        self, gallery: str, space: str, queries: Sequence[VectorQuery]
    ) -> list[bytes | None]:
        """Answer queries by embedding; call it on the thread that receives calls only.

        If all are answered, a route is prepared for `search_by_last_plan`. An unknown gallery, one
        in a database, an unknown space and a query that is not valid are no errors here: another
        thread gets them.

        Args:
            gallery: name of the gallery.
            space: id of the queries' space.
            queries: the queries.

        Returns:
            An encoded SearchResponse to each query, in order; None if it needs another thread, also
            because the gallery is slow, its items are not in memory, or queries of the space have
            ended.
        """
        state, hosted = self._state.current, self._galleries.searchable_gallery(gallery)
        if not isinstance(hosted, HostedInFile):
            return [None] * len(queries)
        plan = hosted.plan
        part = plan.answerer.sole_space_part(hosted, space)
        if part is None:
            return [None] * len(queries)
        answer = self.search_part(hosted, part, queries, on_receiver=True)
        if None not in answer:
            self._route = _compile_route(hosted, plan, part, state)
        return answer

    def search_part(
        self,
        hosted: HostedInFile,
        part: PlanPart,
        queries: Sequence[VectorQuery],
        *,
        on_receiver: bool = False,
    ) -> list[bytes | None]:
        """Answer queries of one part.

        The caller is a user of the gallery and of the plan. Answers are counted in the metrics.

        Args:
            hosted: the gallery.
            part: the part of its plan.
            queries: the queries.
            on_receiver: the caller receives calls. Only then is the time limited, and recorded for
                the gallery's speed. Another caller may wait for the file: items that are not in
                memory are read.

        Returns:
            An encoded SearchResponse to each query, in order; None if it needs another thread, as
            all do once the space's announced end has passed.
        """
        no_answers: list[bytes | None] = [None] * len(queries)
        # Read this before the views: parts that are prepared for freed views then land in a freed
        # mapping.
        prepared_parts = hosted.prepared_searches
        view = hosted.views().get(part.space)
        if view is None or not hosted.origin_cache.is_loaded(part):
            return no_answers
        ends = self._state.current.ends.get(part.query_manifest.space)
        ready = prepared_parts.get(part.space)
        if ready is None or ready.part is not part or ready.ends_at != ends:
            ready = prepared_parts[part.space] = _prepare(hosted, part, ends)
        snapshot = view.snapshot()
        speed = hosted.search_speed
        is_quick = speed.is_faster_than_handover if on_receiver else is_cheap_search
        if (
            (ends is not None and time.time() >= ends)
            or not is_quick(snapshot)
            or not speed.should_search_on_receiver()
        ):
            return no_answers
        began = time.monotonic()
        answer = _encoded_answers(hosted, snapshot, ready, queries, may_read=not on_receiver)
        if on_receiver:
            speed.record_search(time.monotonic() - began, len(queries))
        self._count(snapshot, view, queries, answer)
        return answer

    def _count(
        self,
        snapshot: Snapshot,
        view: LiveView,
        queries: Sequence[VectorQuery],
        answer: Sequence[bytes | None],
    ) -> None:
        pairs = zip(queries, answer, strict=True)
        vectors = [vector for (vector, _, _), answer in pairs if answer is not None]
        if not vectors:
            return
        if not snapshot.is_graph:
            self._exact.inc(len(vectors))
        else:
            self._graph.inc(len(vectors))
            view.query_sample.observe(
                np.frombuffer(b"".join(vectors), "<f4").reshape(len(vectors), -1)
            )


def _encoded_answers(
    hosted: HostedInFile,
    snapshot: Snapshot,
    ready: _PreparedPart,
    queries: Sequence[VectorQuery],
    *,
    may_read: bool,
) -> list[bytes | None]:
    compiled = snapshot.compiled
    answers: list[bytes | None] = [None] * len(queries)
    if (
        compiled is not None
        and ready.curves is not None
        and hosted.origin_cache.migrated_labels(ready.part, snapshot) is None
    ):
        hits = ready.item_cache.encoded_hits
        answers = compiled.encode_responses(
            queries, hosted.exact_distances, hits, ready.curves, ready.encoded_tail
        )
    for number, answer in enumerate(answers):
        if answer is not None:
            hosted.search_speed.record_receiver_search(in_memory=True)
        else:
            answers[number] = _answer_in_python(
                hosted, snapshot, ready, *queries[number], may_read=may_read
            )
    return answers


def _answer_in_python(
    hosted: HostedInFile,
    snapshot: Snapshot,
    ready: _PreparedPart,
    values: bytes,
    k: int,
    max_distance: float,
    *,
    may_read: bool,
) -> bytes | None:
    """Answer one query without compiled code, with the same bytes; None if it needs another
    thread.

    `may_read` allows to read items that are not in memory from the file.
    """
    if len(values) != 4 * snapshot.spec.dim:
        return None
    try:
        neighbours = hosted.search_part(ready.part, snapshot, np.frombuffer(values, "<f4")[None], k)
    except InvalidInputError:
        return None
    labels = neighbours.labels[0].tolist()
    while labels and labels[-1] < 0:
        labels.pop()
    hits = ready.item_cache.encode(labels, ready.encode_item)
    hosted.search_speed.record_receiver_search(in_memory=hits is not None)
    if hits is None and may_read:
        try:
            items = ready.item_cache.get(labels)
        except UNUSABLE_GALLERY_ERRORS:
            return None  # the call's own thread gets the error
        encoded = [None if item is None else ready.encode_item(item) for item in items]
        hits = [hit for hit in encoded if hit is not None]
        if len(hits) < len(labels):
            return None
    if hits is None:
        return None
    distances = neighbours.distances[0, : len(labels)]
    return (
        _encoded_answer(ready.part, hits, distances, max_distance, exact=hosted.exact_distances)
        + ready.encoded_tail
    )


def _prepare(hosted: HostedInFile, part: PlanPart, ends: float | None) -> _PreparedPart:
    end = pb.SearchResponse(release=part.query_manifest.release, space=part.query_manifest.space)
    if ends is not None:
        end.space_ends_at.FromNanoseconds(int(ends * 1e9))
    curves = {
        int(ORIGINS[origin]): curve.breakpoints() for origin, curve in part.score_curves.items()
    }
    cache, encode = hosted.item_cache(part.space), partial(encode_hit, release=part.release)
    tail = end.SerializeToString()
    return _PreparedPart(part, cache, encode, ends, tail, compile_curves(curves))


def _compile_route(
    hosted: HostedInFile, plan: Plan, part: PlanPart, state: State
) -> _CompiledRoute | None:
    """Make the compiled route of a part; None if a query's answer depends on more than its
    snapshot.
    """
    ready, view = hosted.prepared_searches.get(part.space), hosted.views().get(part.space)
    space, exact = part.query_manifest.space, hosted.exact_distances
    if view is None or not isinstance(ready, _PreparedPart) or ready.part is not part:
        return None
    snapshot = view.snapshot()
    if snapshot.compiled is None or ready.curves is None or ready.ends_at is not None:
        return None
    if space in state.ends or plan.reembedded_space == part.space:
        return None
    if hosted.origin_cache.migrated_labels(part, snapshot) is not None:
        return None
    hits, tail = ready.item_cache.encoded_hits, ready.encoded_tail
    answers = snapshot.compiled.request_handler(
        hosted.name, space, DEFAULT_K, MAX_HITS, exact, hits, ready.curves, tail
    )
    return _CompiledRoute(answers, hosted, plan, part, view, snapshot, state, exact)


def _query_vectors(messages: Iterable[bytes]) -> Vectors:
    """Return the vectors of requests that compiled code has parsed, float32 [q, dim]."""
    assert parse_search_request is not None, "compiled code has parsed them before"
    values = [request[2] for request in map(parse_search_request, messages) if request is not None]
    return np.frombuffer(b"".join(values), "<f4").reshape(len(values), -1)


def _encoded_answer(
    part: PlanPart, hits: list[EncodedHit], distances: Vectors, max_distance: float, *, exact: bool
) -> bytes:
    distances_shown = distances if exact else round_distances(distances)
    scores = calibrated_scores(part, [origin_name(hit.origin) for hit in hits], distances_shown)
    values = distances_shown.tolist()
    if max_distance < math.inf:
        near = [place for place, distance in enumerate(values) if distance <= max_distance]
        hits, values = [hits[n] for n in near], [values[n] for n in near]
        scores = [scores[n] for n in near]
    return encode_hits(hits, values, scores)


@dataclass(frozen=True, eq=False)
class _ImageQuery:
    """Hold a query by one image, a user of the gallery and of its plan."""

    hosted: HostedInFile
    plan: Plan
    part: PlanPart
    k: int
    max_distance: float
    call: DeferredCall

    def answer_and_leave(self, answer: bytes | None) -> None:
        """Answer the call, None for another thread, and leave the gallery and the plan."""
        _leave_plan(self.hosted, self.plan)
        self.call.send_answer(answer)


class DeferredImageSearch:
    """Answer queries by one image without holding a thread of their calls.

    Its own threads, those of ImageQueue, run from the construction to `close`.

    Images of many calls are decoded and embedded together, then searched as embeddings on the same
    thread, which also reads hits that are not in memory. A query that needs more, or has an error,
    is left to another thread.
    """

    def __init__(
        self, galleries: GalleryRegistry, immediate: ReceiverSearch, embedding: EmbeddingService,
        metrics: Metrics,
    ) -> None:  # fmt: skip
        self._galleries = galleries
        self._immediate = immediate
        self._embedding = embedding
        self._queue: ImageQueue[_ImageQuery] = ImageQueue(embedding, metrics, self._answer)

    def close(self) -> None:
        """Stop the threads, and wait for them; waiting queries, and those that come later, are left
        to other threads. Call it once.
        """
        self._queue.close()

    def defer_search(
        self, gallery: str, image: bytes, k: int, max_distance: float
    ) -> DeferredAnswer | None:
        """Return what answers a query later; None if it needs another thread.

        It needs one for an unknown gallery, one in a database, one whose plan has two parts for
        images, and while no model answers.

        Args:
            gallery: name of the gallery.
            image: the encoded image; it is checked later.
            k: most hits.
            max_distance: largest distance of a hit, inclusive; infinite means any.

        Returns:
            The later answer, which counts as a user of the gallery until it ends; or None.
        """
        hosted = self._galleries.searchable_gallery(gallery)
        if (
            not isinstance(hosted, HostedInFile)
            or hosted.plan.answerer.sole_image_part(hosted) is None
            or not self._embedding.models.is_ready()
        ):
            return None
        return DeferredAnswer(
            lambda call: self._add(hosted, image, k, max_distance, call), self._queue.begin
        )

    def _add(
        self, hosted: HostedInFile, image: bytes, k: int, max_distance: float, call: DeferredCall
    ) -> None:
        plan = _enter_plan(hosted)
        part = None if plan is None else plan.answerer.sole_image_part(hosted)
        if plan is None or part is None:
            if plan is not None:
                _leave_plan(hosted, plan)
            call.send_answer(None)
            return
        query = _ImageQuery(hosted, plan, part, k, max_distance, call)
        self._queue.add(
            QueuedImage(query, part.query_manifest, image, call.deadline, call.is_wanted)
        )

    def _answer(self, embedded: Sequence[tuple[QueuedImage[_ImageQuery], Vectors | None]]) -> None:
        answers: dict[QueuedImage[_ImageQuery], bytes | None] = {
            waiting: None for waiting, _ in embedded
        }
        try:
            self._search(embedded, answers)
        finally:
            for waiting, answer in answers.items():
                waiting.owner.answer_and_leave(answer)

    def _search(
        self,
        embedded: Sequence[tuple[QueuedImage[_ImageQuery], Vectors | None]],
        answers: dict[QueuedImage[_ImageQuery], bytes | None],
    ) -> None:
        rows = {waiting: row for waiting, row in embedded if row is not None}
        groups: dict[tuple[HostedInFile, PlanPart], list[QueuedImage[_ImageQuery]]] = {}
        for waiting in rows:
            groups.setdefault((waiting.owner.hosted, waiting.owner.part), []).append(waiting)
        for (hosted, part), group in groups.items():
            queries = [(rows[one].tobytes(), one.owner.k, one.owner.max_distance) for one in group]
            group_answers = self._immediate.search_part(hosted, part, queries)
            answers.update(zip(group, group_answers, strict=True))
        for waiting, row in rows.items():
            if answers[waiting] is None:
                # The thread that answers it finds the embedding there and does not make it again.
                self._embedding.remember_query(waiting.manifest, waiting.image, row)


def _enter_plan(hosted: HostedGallery) -> Plan | None:
    """Become a user of a gallery and its plan, and return the plan; None if the gallery is
    closed.
    """
    return hosted.enter_plan() if hosted.use_counter.enter() else None


def _leave_plan(hosted: HostedGallery, plan: Plan) -> None:
    plan.use_counter.leave()
    hosted.use_counter.leave()
