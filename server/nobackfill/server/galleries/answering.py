"""Answer searches: from the queries of a call to its hits, in the mode of a gallery's plan.

A plan has an answerer. `PlainAnswerer` embeds queries, searches the plan's spaces and ranks the
hits. Every other mode wraps it: `BothAnswerer` here, `HealingAnswerer` in server/healing,
`CanaryAnswerer` in server/canary. Each has one method from queries to answers; a single search is a
batch of one.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

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
from nobackfill.release.manifest import Manifest
from nobackfill.server.catalog import Catalog
from nobackfill.server.embedding.embedding import Batcher, Embedding
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.galleries.plan import (
    Answerer,
    Both,
    ByEmbedding,
    Plan,
    Query,
    QueryAnswer,
    SearchRequest,
    direct_part,
)
from nobackfill.server.galleries.ranking import PlanPart, SearchResult, rank
from nobackfill.server.grpc import context
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.state import GatewayState, OutdatedError
from nobackfill.serving.fusion import HITS, candidates
from nobackfill.vectors import Vectors

# Queries for more hits than this, or with a filter, are not batched: they would slow the others
# down.
_MAX_BATCHED_K = 64
_LARGEST_BATCH = 64
# A query is searched at most so often if items are deleted during its search.
_MAX_TRIES = 3


class Searching:
    """Answer searches by a gallery's present plan."""

    def __init__(self, state: GatewayState) -> None:
        self._state = state

    def search(
        self, hosted: Hosted, query: Query, k: int, filtered: Filter | None = None, ef: int = 0
    ) -> SearchResult:
        """Find the items nearest to one query.

        Args:
            hosted: the gallery.
            query: an encoded image, a text, or embeddings by space.
            k: most hits.
            filtered: only items that pass this filter; None means all.
            ef: width of the graph search, as in Index.search; 0 means the index's own.

        Raises:
            InvalidInputError: the image, vector or filter is not valid.
            IncompatibleSpaceError: the embedding's space cannot be compared with the gallery's.
            NeedsImageError: the gallery lives in two spaces and needs an image or both embeddings.
            ReleaseRetiredError: queries of the embedding's release are no longer answered.
            NotFoundError: the gallery was deleted.
            UnavailableError: the model server, or the database, does not answer.
            DeadlineError: the call's time is over.
        """
        return single_answer(
            self._answer(hosted, SearchRequest((query,), k, filtered, ef, single=True))
        )

    def batch(
        self, hosted: Hosted, queries: Sequence[Query], k: int, filtered: Filter | None = None,
        ef: int = 0, *, heal: bool = True,
    ) -> list[QueryAnswer]:  # fmt: skip
        """Answer several queries by one plan.

        Args:
            hosted: the gallery.
            queries: the queries, each as in `search`.
            k: most hits for each.
            filtered: only items that pass this filter; None means all.
            ef: width of the graph search, as in Index.search; 0 means the index's own.
            heal: re-embed first hits if the gallery does so.

        Returns:
            For each query the result, or the error that refused it.

        Raises:
            NobackfillError: as `search`, for the whole call.
            TooLargeError: the images together are too large.
            OverloadedError: too many images are being decoded.
        """
        return self._answer(hosted, SearchRequest(tuple(queries), k, filtered, ef, heal=heal))

    def _answer(self, hosted: Hosted, request: SearchRequest) -> list[QueryAnswer]:
        """Answer a request, and again if another gateway replaces the plan during the search."""
        while True:
            plan_before = hosted.plan
            try:
                with hosted.using() as plan:
                    return plan.answerer.answer(hosted, request)
            except OutdatedError:
                self._state.catch_up()
                if hosted.is_closing:
                    raise NotFoundError(f"gallery {hosted.name!r} was deleted") from None
                if hosted.plan is plan_before:
                    raise


def single_answer(answers: Sequence[QueryAnswer]) -> SearchResult:
    """Return the answer to a single query.

    Raises:
        InvalidInputError: the query was refused.
    """
    (answer,) = answers
    if isinstance(answer, InvalidInputError):
        raise answer
    return answer


class Answerers:
    """Make the answerer of each plan, and hold the parts that they share."""

    def __init__(
        self,
        embedding: Embedding,
        catalog: Catalog,
        state: GatewayState,
        metrics: Metrics,
        canary: "Callable[[PlainAnswerer, PlainAnswerer], Answerer]",
        healing: "Callable[[PlainAnswerer, str], Answerer]",
    ) -> None:
        """Hold the shared parts.

        Args:
            embedding: embeds queries.
            catalog: published releases.
            state: the gateway's state.
            metrics: counts searches.
            canary: makes the answerer of a plan with a canary, from the old and the new pair's
                answerers.
            healing: makes the answerer that re-embeds hits, from the plain one and the space to
                re-embed.
        """
        self._embedding = embedding
        self._catalog, self._state = catalog, state
        self._canary, self._healing = canary, healing
        self._searches = {kind: metrics.searches.labels(kind) for kind in ("exact", "graph")}
        self.observe = metrics.batch_size.labels("search").observe

    def of(self, plan: Plan) -> Answerer:
        """Make the answerer of a plan, which has at most one of `canary`, `heals` and `both`."""
        choosing = SpaceChoice(self._catalog, self._state, plan.parts, plan.single_parts)
        plain = PlainAnswerer(self, plan.parts, choosing)
        if plan.canary is not None:
            return self._canary(plain, PlainAnswerer(self, (plan.canary,), choosing))
        if plan.heals is not None:
            return self._healing(plain, plan.heals)
        if plan.both is not None:
            return BothAnswerer(self, plain, plan.both)
        return plain

    def embed(
        self, manifests: Sequence[Manifest], items: Sequence[bytes | str], request: SearchRequest
    ) -> list[tuple[Vectors, ...] | InvalidInputError]:
        """Embed images and texts by each release; a single query is batched with those of other
        calls.

        Args:
            manifests: the releases.
            items: encoded images and texts.
            request: the request that they belong to.

        Returns:
            For each item the vectors float32 [1, dim] in the order of `manifests`, or why it has
            none.

        Raises:
            NobackfillError: as Embedding.queries.
        """
        if not items:
            return []
        distinct = {manifest.release: manifest for manifest in manifests}
        if not request.single or request.background:
            rows = self._embedding.queries(list(distinct.values()), items)
        else:
            try:
                rows = [tuple(self._embedding.query(m, items[0]) for m in distinct.values())]
            except InvalidInputError as error:
                return [error]
        places = [list(distinct).index(manifest.release) for manifest in manifests]
        return [
            row if isinstance(row, InvalidInputError) else tuple(row[place] for place in places)
            for row in rows
        ]

    def count(self, questions: "Iterable[Question]") -> None:
        """Count searches in the metrics, by whether they compare every vector or use a graph."""
        for question in questions:
            for part in question.parts:
                is_exact = question.hosted.compares(part, question.ef)
                self._searches["exact" if is_exact else "graph"].inc()


@dataclass(frozen=True, eq=False)
class Question:
    """Hold a query's vectors.

    Attributes:
        hosted: the gallery.
        parts: the parts to search.
        vectors: a vector float32 [1, dim] for each part.
        k: most hits.
        ef: width of the graph search, as in Index.search.
    """

    hosted: Hosted
    parts: tuple[PlanPart, ...]
    vectors: tuple[Vectors, ...]
    k: int
    ef: int


class PlainAnswerer:
    """Answer queries by the nearest items of the plan's one or two spaces."""

    def __init__(
        self, shared: Answerers, parts: tuple[PlanPart, ...], choosing: "SpaceChoice"
    ) -> None:
        """Make an answerer.

        Args:
            shared: parts that all answerers share.
            parts: spaces that images and texts are compared with.
            choosing: chooses the spaces of a query by embedding.
        """
        self.parts = parts
        self._shared = shared
        self._choosing = choosing
        # One batcher for each plan: a search of a small gallery does not wait for a batch of a
        # large one.
        self._batcher = Batcher(find_nearest, largest=_LARGEST_BATCH, observe=shared.observe)

    def answer(self, hosted: Hosted, request: SearchRequest) -> list[QueryAnswer]:
        """Answer each query of a request.

        Raises:
            NobackfillError: as Searching.batch.
        """
        questions = self.questions(hosted, request)
        answers = self.find(hosted, valid_questions(questions), request)
        return [one if isinstance(one, InvalidInputError) else answers[one] for one in questions]

    def image_part(self, hosted: Hosted) -> PlanPart | None:
        """Return the plan's only part; None if there are two."""
        return self.parts[0] if len(self.parts) == 1 else None

    def space_part(self, hosted: Hosted, space: str) -> PlanPart | None:
        """Return the part that answers an embedding of a space; None if no part does."""
        if len(self.parts) == 1 and self.parts[0].query.space == space:
            return self.parts[0]
        return self._choosing.single_parts.get(space)

    def questions(
        self, hosted: Hosted, request: SearchRequest
    ) -> list[Question | InvalidInputError]:
        """Embed the queries of a request, and choose their spaces.

        Returns:
            For each query its question, or why it was refused.

        Raises:
            NobackfillError: as Searching.batch.
        """
        items = [query for query in request.queries if isinstance(query, bytes | str)]
        embedded = iter(self._shared.embed([part.query for part in self.parts], items, request))
        questions: list[Question | InvalidInputError] = []
        for query in request.queries:
            try:
                parts, vectors = self.parts, None
                if isinstance(query, bytes | str):
                    vectors = next(embedded)
                    if isinstance(vectors, InvalidInputError):
                        raise vectors
                else:
                    parts = self._choosing.parts(query, self.parts)
                    vectors = tuple(vector_of(part.query, query) for part in parts)
                questions.append(Question(hosted, parts, vectors, request.k, request.ef))
            except InvalidInputError as error:
                questions.append(error)
        if not request.background:
            self._shared.count(valid_questions(questions))
        return questions

    def find(
        self, hosted: Hosted, questions: Sequence[Question], request: SearchRequest
    ) -> dict[Question, QueryAnswer]:
        """Search for questions of one request, and rank their hits.

        Args:
            hosted: the gallery.
            questions: the questions.
            request: the request that they belong to.

        Raises:
            InvalidInputError: the filter is not valid.
        """
        answers: dict[Question, QueryAnswer] = {}
        if not questions:
            return answers
        with context.part("search"):
            matches = matches_of(hosted, request.filtered)
            open_questions = questions
            for _ in range(_MAX_TRIES):
                searched = list(
                    zip(
                        open_questions, self._nearest(open_questions, matches, request), strict=True
                    )
                )
                answers.update(
                    (question, rank_nearest(question, one)) for question, one in searched
                )
                open_questions = [
                    question for question, one in searched if is_incomplete(question, one, answers)
                ]
                if not open_questions:
                    break
        return answers

    def _nearest(
        self, questions: Sequence[Question], matches: Matches | None, request: SearchRequest
    ) -> Sequence["Nearest"]:
        is_batched = request.single and not request.background and matches is None
        if is_batched and request.k <= _MAX_BATCHED_K and not request.ef:
            return [self._batcher(question) for question in questions]
        return find_nearest(questions, matches, timed=not request.background)


def valid_questions(questions: Sequence[Question | InvalidInputError]) -> list[Question]:
    """Return the questions that were not refused."""
    return [one for one in questions if isinstance(one, Question)]


def matches_of(hosted: Hosted, filtered: Filter | None) -> Matches | None:
    """Return the items that pass a filter; None for all.

    Raises:
        InvalidInputError: the filter is not valid.
    """
    return None if filtered is None else hosted.filtering.passing(filtered)


def can_read(manifest: Manifest, query: Query) -> bool:
    """Tell whether a query has an embedding of a release, or the release can embed it."""
    if isinstance(query, str):
        return manifest.text_encoder is not None
    if isinstance(query, bytes):
        return manifest.embedder.file is not None
    return manifest.space in query


def vector_of(manifest: Manifest, query: ByEmbedding) -> Vectors:
    """Return a query's embedding of a release.

    Its values are checked later, when it is searched together with others.

    Returns:
        float32 [1, dim].

    Raises:
        InvalidInputError: the embedding has the wrong size.
    """
    dim, values = manifest.embedder.dim, query[manifest.space]
    if len(values) != 4 * dim:
        raise InvalidInputError(
            f"query of release {manifest.release}: expected {4 * dim} bytes (float32, dimension "
            f"{dim}), got {len(values)}"
        )
    return np.frombuffer(values, "<f4").reshape(1, dim)


class SpaceChoice:
    """Choose the spaces that a query by embedding is compared with, in one plan."""

    def __init__(
        self, catalog: Catalog, state: GatewayState, parts: tuple[PlanPart, ...],
        single_parts: Mapping[str, PlanPart],
    ) -> None:  # fmt: skip
        """Make the choice for a plan.

        Args:
            catalog: published releases.
            state: the gateway's state.
            parts: Plan.parts.
            single_parts: Plan.single_parts.
        """
        self._catalog = catalog
        self._state = state
        self._parts = parts
        self.single_parts = single_parts

    def parts(self, query: ByEmbedding, preferred: tuple[PlanPart, ...]) -> tuple[PlanPart, ...]:
        """Choose the parts for a query.

        Args:
            query: embeddings by space.
            preferred: parts that are used if the query has an embedding for each.

        Returns:
            The preferred parts, or those of the plan that fit the query.

        Raises:
            NeedsImageError: the gallery lives in two spaces, and the query has an embedding of one.
            ReleaseRetiredError: queries of the embedding's release are no longer answered.
            IncompatibleSpaceError: no embedding's space can be compared with the gallery's.
        """
        for parts in (preferred, self._parts):
            if all(part.query.space in query for part in parts):
                return parts
        for space, part in self.single_parts.items():
            if space in query:
                self._refuse_ended(space, part.query)
                return (part,)
        answering = self._parts[0].query
        if answering.space in query:
            missing = [p.query for p in self._parts if p.query.space not in query]
            raise NeedsImageError(
                "the gallery is being upgraded and lives in two spaces; send the image, or an "
                f"embedding of each of releases {answering.release} and "
                f"{', '.join(str(m.release) for m in missing)}"
            )
        active, spaces = self._parts[-1], self._catalog.spaces
        for space in query:
            manifest = spaces.get(space)
            if manifest is not None and manifest.searches(active.space):
                return (direct_part(manifest, spaces[active.space]),)
        raise self._incompatible(answering.release, query)

    def _refuse_ended(self, space: str, manifest: Manifest) -> None:
        end = self._state.current.ends.get(space)
        if end is not None and time.time() >= end:
            raise _retired(manifest.release)

    def _incompatible(self, answering: int, query: ByEmbedding) -> Exception:
        spaces = self._catalog.spaces
        known = [spaces[space].release for space in query if space in spaces]
        if known and max(known) in self._state.current.retired:
            return _retired(max(known))
        origin = f"release {max(known)}" if known else "no release known here"
        return IncompatibleSpaceError(
            f"the gallery answers queries of release {answering}, the embedding is of {origin}; "
            f"embed the query with release {answering}, or send the image"
        )


def _retired(release: int) -> ReleaseRetiredError:
    return ReleaseRetiredError(
        f"queries of release {release} are no longer answered; embed with the active release"
    )


# The neighbours of each part for a batch of questions, and the row of one question; or its error.
Nearest = tuple[Sequence[Neighbours], int] | InvalidInputError


def find_nearest(
    questions: Sequence[Question], matches: Matches | None = None, *, timed: bool = True
) -> Sequence[Nearest]:
    """Search for several questions; those with the same parts share one search of each part.

    Args:
        questions: the questions.
        matches: items that may be hits; None means all.
        timed: count the duration for the gallery's speed.

    Returns:
        The neighbours of each question.
    """
    if len(questions) == 1:
        return _group(questions, matches, timed)
    groups: dict[tuple[PlanPart, ...], list[Question]] = {}
    for question in questions:
        groups.setdefault(question.parts, []).append(question)
    results: dict[Question, Nearest] = {}
    for group in groups.values():
        results.update(zip(group, _group(group, matches, timed), strict=True))
    return [results[question] for question in questions]


def _group(
    questions: Sequence[Question], matches: Matches | None, timed: bool
) -> Sequence[Nearest]:
    """Search for questions with the same parts."""
    hosted, parts = questions[0].hosted, questions[0].parts
    k = max(question.k for question in questions)
    # All questions have the same ef: one with an ef of its own is searched on its own.
    ef = questions[0].ef
    columns = list(questions[0].vectors)
    if len(questions) > 1:
        columns = [
            np.concatenate([question.vectors[i] for question in questions])
            for i in range(len(parts))
        ]
    began = time.monotonic()
    try:
        neighbours = hosted.search(parts, columns, k, matches, ef)
    except InvalidInputError as error:
        if len(questions) == 1:
            return [error]
        # One of them is not valid: search one by one to find out which.
        return [one for question in questions for one in _group([question], matches, timed)]
    if timed and not ef:
        # A wide search is slow because its caller asked for it, so it does not count.
        hosted.speed.record(time.monotonic() - began, len(questions))
    return [(neighbours, row) for row in range(len(questions))]


def rank_nearest(question: Question, nearest: Nearest) -> QueryAnswer:
    """Rank the hits of a question, best first."""
    if isinstance(nearest, InvalidInputError):
        return nearest
    neighbours, row = nearest
    hosted, query = question.hosted, question.parts[0].query
    hits = rank(question.parts, neighbours, row, question.k, hosted.items, exact=hosted.exact)
    return SearchResult(hits, query.release, query.space)


def is_incomplete(
    question: Question, nearest: Nearest, answers: Mapping[Question, QueryAnswer]
) -> bool:
    """Tell whether a question has too few hits because an item was deleted during the search."""
    answer = answers[question]
    if isinstance(nearest, InvalidInputError) or isinstance(answer, InvalidInputError):
        return False
    if len(answer.hits) == question.k:
        return False
    neighbours, row = nearest
    available = sum(int(np.count_nonzero(part.labels[row] >= 0)) for part in neighbours)
    return len(answer.hits) < min(question.k, available)


class BothAnswerer:
    """Rank migrated items by the new and the previous model, if a query can have both
    embeddings.
    """

    def __init__(self, shared: Answerers, plain: PlainAnswerer, both: Both) -> None:
        """Make an answerer.

        Args:
            shared: parts that all answerers share.
            plain: answers by the new model alone.
            both: the previous space and the weights.
        """
        self._shared, self._plain, self._both = shared, plain, both
        self._part = plain.parts[0]

    def answer(self, hosted: Hosted, request: SearchRequest) -> list[QueryAnswer]:
        """Answer each query of a request.

        Raises:
            NobackfillError: as Searching.batch.
        """
        pairs = self._pairs(hosted, request)
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
            with context.part("search"):
                matches = matches_of(hosted, request.filtered)
                for place, pair in pairs.items():
                    if not isinstance(pair, InvalidInputError):
                        answers[place] = self._ranked(*pair, matches)
        return [answers[place] for place in range(len(request.queries))]

    def image_part(self, hosted: Hosted) -> PlanPart | None:
        """Return None: two parts answer an image."""
        return None

    def space_part(self, hosted: Hosted, space: str) -> PlanPart | None:
        """Return the part that answers an embedding of a space; None if no part does."""
        return self._plain.space_part(hosted, space)

    def _pairs(
        self, hosted: Hosted, request: SearchRequest
    ) -> dict[int, tuple[Question, Vectors] | InvalidInputError]:
        """Return, by place of the query, the new model's question and the previous model's vector.

        Queries that the previous model cannot read are left out.
        """
        new, old = self._part.query, self._both.part.query
        vectors: dict[int, tuple[Vectors, ...] | InvalidInputError] = {}
        items: dict[int, bytes | str] = {}
        for place, query in enumerate(request.queries):
            if not can_read(old, query):
                continue
            if isinstance(query, bytes | str):
                items[place] = query
            elif new.space in query:
                try:
                    vectors[place] = vector_of(new, query), vector_of(old, query)
                except InvalidInputError as error:
                    vectors[place] = error
        rows = zip(items, self._shared.embed([new, old], [*items.values()], request), strict=True)
        vectors |= {place: row for place, row in rows if not isinstance(row, InvalidInputError)}
        pairs: dict[int, tuple[Question, Vectors] | InvalidInputError] = {}
        for place, row in vectors.items():
            if isinstance(row, InvalidInputError):
                pairs[place] = row
            else:
                question = Question(hosted, (self._part,), (row[0],), request.k, request.ef)
                pairs[place] = question, row[1]
        return pairs

    def _ranked(self, question: Question, old: Vectors, matches: Matches | None) -> QueryAnswer:
        context.current().check()
        self._shared.count([question])
        try:
            return rank_by_both(question, self._both, old, matches)
        except InvalidInputError as error:
            return error


def rank_by_both(
    question: Question, both: Both, old: Vectors, matches: Matches | None
) -> SearchResult:
    """Rank the nearest items of either model: migrated ones by both distances, native ones by the
    new.

    Args:
        question: the query in the new space.
        both: the previous space and the weights.
        old: the query's vector in the previous space, float32 [1, dim].
        matches: items that may be hits; None means all.

    Returns:
        The hits, with their distances in the new space.

    Raises:
        InvalidInputError: a vector is not valid.
    """
    hosted, part, new = question.hosted, question.parts[0], question.vectors[0]
    labels = candidates(
        partial(_labels, question, part, new, matches),
        partial(_labels, question, both.part, old, matches),
        count=max(question.k, HITS),
    )
    stored_labels, distances, migrated = _distances(
        hosted, part, new, np.array(sorted(labels), np.int64)
    )
    old_labels, old_distances, _ = _distances(hosted, both.part, old, stored_labels[migrated])
    places = np.searchsorted(stored_labels, old_labels)
    ranking_values = distances.astype(np.float64)
    ranking_values[places] = both.joint(distances[places], old_distances)
    order = np.lexsort((stored_labels, distances, ranking_values))
    ranked = Neighbours(stored_labels[order][None], distances[order][None])
    hits = rank([part], [ranked], 0, len(order), hosted.items, exact=hosted.exact)
    return SearchResult(hits[: question.k], part.query.release, part.query.space)


def _labels(
    question: Question, part: PlanPart, query: Vectors, matches: Matches | None, count: int
) -> Labels:
    (neighbours,) = question.hosted.search([part], [query], count, matches, question.ef)
    labels: Labels = neighbours.labels[0]
    return labels[labels >= 0]


def _distances(
    hosted: Hosted, part: PlanPart, query: Vectors, labels: Labels
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
    distances = index.to_one(part.query.embedder.metric, query, stored.embedding)
    return (
        stored.labels,
        distances,
        np.array([one == "upgraded" for one in stored.origins], np.bool_),
    )
