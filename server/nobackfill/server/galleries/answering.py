"""Answering searches: from the queries of a call to its hits, in the mode of a gallery's plan.

A plan carries its answerer. `PlainAnswerer` embeds queries, compares them with the plan's spaces
and ranks what is nearest. Every other mode is made of it: `BothAnswerer` here, `HealingAnswerer` in
server/healing, `CanaryAnswerer` in server/canary. All have one method from queries to answers; a
single search is a batch of one.
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

# Queries for more hits than this, or with a filter, run alone: they would slow the others down.
_SMALL_K = 64
_LARGEST_BATCH = 64
# Times that a query is searched again because an item was deleted while it was being found.
_TRIES = 3


class Searching:
    """Answers searches by the plan that a gallery has at present."""

    def __init__(self, state: GatewayState) -> None:
        self._state = state

    def search(
        self, hosted: Hosted, query: Query, k: int, filtered: Filter | None = None, ef: int = 0
    ) -> SearchResult:
        """Find the `k` nearest items to one query; `ef` as in Index.search.

        Raises InvalidInputError, IncompatibleSpaceError, NeedsImageError, ReleaseRetiredError,
        UnavailableError (only for images), DeadlineError.
        """
        return only(self._answer(hosted, SearchRequest((query,), k, filtered, ef, single=True)))

    def batch(
        self, hosted: Hosted, queries: Sequence[Query], k: int, filtered: Filter | None = None,
        ef: int = 0, *, heal: bool = True,
    ) -> list[QueryAnswer]:  # fmt: skip
        """Answer several queries on one plan; a query that is no image or no vector is refused by
        itself. `heal`: re-embed hits first where the gallery does.

        Raises like `search`, for all of them; TooLargeError and OverloadedError for images that
        cost too much together.
        """
        return self._answer(hosted, SearchRequest(tuple(queries), k, filtered, ef, heal=heal))

    def _answer(self, hosted: Hosted, request: SearchRequest) -> list[QueryAnswer]:
        """Answer, and again where another gateway has replaced the plan meanwhile."""
        while True:
            current = hosted.plan
            try:
                with hosted.using() as plan:
                    return plan.answerer.answer(hosted, request)
            except OutdatedError:
                self._state.catch_up()
                if hosted.leaving:
                    raise NotFoundError(f"gallery {hosted.name!r} was deleted") from None
                if hosted.plan is current:
                    raise


def only(answers: Sequence[QueryAnswer]) -> SearchResult:
    """The answer to a single query. Raises the InvalidInputError that refused it."""
    (answer,) = answers
    if isinstance(answer, InvalidInputError):
        raise answer
    return answer


# The answerers of plans.


class Answerers:
    """Makes the answerer of each plan, and has what they share."""

    def __init__(
        self,
        embedding: Embedding,
        catalog: Catalog,
        state: GatewayState,
        metrics: Metrics,
        canary: "Callable[[PlainAnswerer, PlainAnswerer], Answerer]",
        healing: "Callable[[PlainAnswerer, str], Answerer]",
    ) -> None:
        """`canary`: of the pair that answers and the pair on trial. `healing`: of the space whose
        carried vectors are replaced."""
        self._embedding = embedding
        self._catalog, self._state = catalog, state
        self._canary, self._healing = canary, healing
        self._searches = {kind: metrics.searches.labels(kind) for kind in ("exact", "graph")}
        self.observe = metrics.batch_size.labels("search").observe

    def of(self, plan: Plan) -> Answerer:
        """By the plan's mode: it has at most one of `canary`, `heals` and `both`."""
        choosing = Choosing(self._catalog, self._state, plan.parts, plan.alone)
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
        """Embed images and texts, each by each release; why not, where one has no vector. A single
        one goes together with those of other calls. Raises as Embedding.queries."""
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
        """Count searches by whether they compare every vector."""
        for question in questions:
            for part in question.parts:
                compared = question.hosted.compares(part, question.ef)
                self._searches["exact" if compared else "graph"].inc()


@dataclass(frozen=True, eq=False)
class Question:
    """A query's vectors float32 [1,dim], one for each of `parts`; `ef` as in Index.search."""

    hosted: Hosted
    parts: tuple[PlanPart, ...]
    vectors: tuple[Vectors, ...]
    k: int
    ef: int


class PlainAnswerer:
    """Ranks the nearest items of the plan's one or two spaces."""

    def __init__(
        self, shared: Answerers, parts: tuple[PlanPart, ...], choosing: "Choosing"
    ) -> None:
        """`parts`: what images and texts are compared with."""
        self.parts = parts
        self._shared = shared
        self._choosing = choosing
        # Of this plan: a search of a small gallery waits for no batch of a large one.
        self._batcher = Batcher(nearest, largest=_LARGEST_BATCH, observe=shared.observe)

    def answer(self, hosted: Hosted, request: SearchRequest) -> list[QueryAnswer]:
        """Raises as Searching.batch."""
        questions = self.questions(hosted, request)
        answers = self.find(hosted, asked(questions), request)
        return [one if isinstance(one, InvalidInputError) else answers[one] for one in questions]

    def image_part(self, hosted: Hosted) -> PlanPart | None:
        return self.parts[0] if len(self.parts) == 1 else None

    def space_part(self, hosted: Hosted, space: str) -> PlanPart | None:
        if len(self.parts) == 1 and self.parts[0].query.space == space:
            return self.parts[0]
        return self._choosing.alone.get(space)

    def questions(
        self, hosted: Hosted, request: SearchRequest
    ) -> list[Question | InvalidInputError]:
        """Embed the queries and choose their spaces; why not, where one is no image or vector.
        Raises as `answer`."""
        items = [query for query in request.queries if isinstance(query, bytes | str)]
        made = iter(self._shared.embed([part.query for part in self.parts], items, request))
        questions: list[Question | InvalidInputError] = []
        for query in request.queries:
            try:
                parts, vectors = self.parts, None
                if isinstance(query, bytes | str):
                    vectors = next(made)
                    if isinstance(vectors, InvalidInputError):
                        raise vectors
                else:
                    parts = self._choosing.parts(query, self.parts)
                    vectors = tuple(read(part.query, query) for part in parts)
                questions.append(Question(hosted, parts, vectors, request.k, request.ef))
            except InvalidInputError as error:
                questions.append(error)
        if not request.background:
            self._shared.count(asked(questions))
        return questions

    def find(
        self, hosted: Hosted, questions: Sequence[Question], request: SearchRequest
    ) -> dict[Question, QueryAnswer]:
        """Search for the questions of a request, and rank what is found."""
        answers: dict[Question, QueryAnswer] = {}
        if not questions:
            return answers
        with context.part("search"):
            allowed = passing(hosted, request.filtered)
            left = questions
            for _ in range(_TRIES):
                found = list(zip(left, self._nearest(left, allowed, request), strict=True))
                answers.update((question, rank_nearest(question, one)) for question, one in found)
                left = [question for question, one in found if lost(question, one, answers)]
                if not left:
                    break
        return answers

    def _nearest(
        self, questions: Sequence[Question], allowed: Matches | None, request: SearchRequest
    ) -> Sequence["Nearest"]:
        together = request.single and not request.background and allowed is None
        if together and request.k <= _SMALL_K and not request.ef:
            return [self._batcher(question) for question in questions]
        return nearest(questions, allowed, timed=not request.background)


def asked(questions: Sequence[Question | InvalidInputError]) -> list[Question]:
    """Those that were not refused."""
    return [one for one in questions if isinstance(one, Question)]


def passing(hosted: Hosted, filtered: Filter | None) -> Matches | None:
    """Items that pass a filter; None for all. Raises InvalidInputError."""
    return None if filtered is None else hosted.filtering.passing(filtered)


def reads(manifest: Manifest, query: Query) -> bool:
    """Whether a release has a vector of a query, or an encoder for it."""
    if isinstance(query, str):
        return manifest.text_encoder is not None
    if isinstance(query, bytes):
        return manifest.embedder.file is not None
    return manifest.space in query


def read(manifest: Manifest, query: ByEmbedding) -> Vectors:
    """A query's vector [1,dim] of a release. Its values are checked where it is searched, together
    with others."""
    dim, values = manifest.embedder.dim, query[manifest.space]
    if len(values) != 4 * dim:
        raise InvalidInputError(
            f"query of release {manifest.release}: expected {4 * dim} bytes (float32, dimension "
            f"{dim}), got {len(values)}"
        )
    return np.frombuffer(values, "<f4").reshape(1, dim)


class Choosing:
    """Which spaces of one plan a query by embedding is compared with."""

    def __init__(
        self, catalog: Catalog, state: GatewayState, parts: tuple[PlanPart, ...],
        alone: Mapping[str, PlanPart],
    ) -> None:  # fmt: skip
        """`parts` and `alone` as in Plan."""
        self._catalog = catalog
        self._state = state
        self._parts = parts
        self.alone = alone

    def parts(self, query: ByEmbedding, preferred: tuple[PlanPart, ...]) -> tuple[PlanPart, ...]:
        """The `preferred` parts where the query brings their spaces, else those of the plan that it
        may be compared with. Raises NeedsImageError, ReleaseRetiredError, IncompatibleSpaceError.
        """
        for parts in (preferred, self._parts):
            if all(part.query.space in query for part in parts):
                return parts
        for space, part in self.alone.items():
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
        sent = f"release {max(known)}" if known else "no release known here"
        return IncompatibleSpaceError(
            f"the gallery answers queries of release {answering}, the embedding is of {sent}; "
            f"embed the query with release {answering}, or send the image"
        )


def _retired(release: int) -> ReleaseRetiredError:
    return ReleaseRetiredError(
        f"queries of release {release} are no longer answered; embed with the active release"
    )


# From questions to neighbours, and from neighbours to hits.

# Each part's neighbours of a batch, and the row of one question in them; or why it was refused.
Nearest = tuple[Sequence[Neighbours], int] | InvalidInputError


def nearest(
    questions: Sequence[Question], allowed: Matches | None = None, *, timed: bool = True
) -> Sequence[Nearest]:
    """Search for questions together, those with the same parts by one search a part. `timed`: what
    it takes counts for the gallery's speed."""
    if len(questions) == 1:
        return _group(questions, allowed, timed)
    groups: dict[tuple[PlanPart, ...], list[Question]] = {}
    for question in questions:
        groups.setdefault(question.parts, []).append(question)
    found: dict[Question, Nearest] = {}
    for group in groups.values():
        found.update(zip(group, _group(group, allowed, timed), strict=True))
    return [found[question] for question in questions]


def _group(
    questions: Sequence[Question], allowed: Matches | None, timed: bool
) -> Sequence[Nearest]:
    """Those of the same parts."""
    hosted, parts = questions[0].hosted, questions[0].parts
    k = max(question.k for question in questions)
    # The same in all of them: with one of its own a question, or a request, is searched alone.
    ef = questions[0].ef
    columns = list(questions[0].vectors)
    if len(questions) > 1:
        columns = [
            np.concatenate([question.vectors[i] for question in questions])
            for i in range(len(parts))
        ]
    began = time.monotonic()
    try:
        found = hosted.search(parts, columns, k, allowed, ef)
    except InvalidInputError as error:
        if len(questions) == 1:
            return [error]
        # One of them is no vector of its space: find out which.
        return [one for question in questions for one in _group([question], allowed, timed)]
    if timed and not ef:
        # What searches take that nobody asked to take longer.
        hosted.speed.took(time.monotonic() - began, len(questions))
    return [(found, row) for row in range(len(questions))]


def rank_nearest(question: Question, found: Nearest) -> QueryAnswer:
    """A question's hits, best first."""
    if isinstance(found, InvalidInputError):
        return found
    neighbours, row = found
    hosted, query = question.hosted, question.parts[0].query
    hits = rank(question.parts, neighbours, row, question.k, hosted.items, exact=hosted.exact)
    return SearchResult(hits, query.release, query.space)


def lost(question: Question, found: Nearest, answers: Mapping[Question, QueryAnswer]) -> bool:
    """Whether there are fewer hits than were asked for, because one was deleted meanwhile."""
    shown = answers[question]
    if isinstance(found, InvalidInputError) or isinstance(shown, InvalidInputError):
        return False
    if len(shown.hits) == question.k:
        return False
    neighbours, row = found
    there = sum(int(np.count_nonzero(part.labels[row] >= 0)) for part in neighbours)
    return len(shown.hits) < min(question.k, there)


# A gallery that asks both models: one ranking of all its items (docs/adr/0024).


class BothAnswerer:
    """Ranks carried items by the new model and the one before, where a query can have both."""

    def __init__(self, shared: Answerers, plain: PlainAnswerer, both: Both) -> None:
        """`plain` answers for the new model alone."""
        self._shared, self._plain, self._both = shared, plain, both
        self._part = plain.parts[0]

    def answer(self, hosted: Hosted, request: SearchRequest) -> list[QueryAnswer]:
        """Raises as Searching.batch."""
        pairs = self._pairs(hosted, request)
        answers: dict[int, QueryAnswer] = {
            place: pair for place, pair in pairs.items() if isinstance(pair, InvalidInputError)
        }
        if left := [place for place in range(len(request.queries)) if place not in pairs]:
            alone = replace(request, queries=tuple(request.queries[place] for place in left))
            answers.update(zip(left, self._plain.answer(hosted, alone), strict=True))
        if len(answers) < len(request.queries):
            with context.part("search"):
                allowed = passing(hosted, request.filtered)
                for place, pair in pairs.items():
                    if not isinstance(pair, InvalidInputError):
                        answers[place] = self._ranked(*pair, allowed)
        return [answers[place] for place in range(len(request.queries))]

    def image_part(self, hosted: Hosted) -> PlanPart | None:
        return None

    def space_part(self, hosted: Hosted, space: str) -> PlanPart | None:
        return self._plain.space_part(hosted, space)

    def _pairs(
        self, hosted: Hosted, request: SearchRequest
    ) -> dict[int, tuple[Question, Vectors] | InvalidInputError]:
        """By place, what the new model asks and the old model's vector, where a query has both.
        What the old model cannot read is left to the new one."""
        new, old = self._part.query, self._both.part.query
        vectors: dict[int, tuple[Vectors, ...] | InvalidInputError] = {}
        items: dict[int, bytes | str] = {}
        for place, query in enumerate(request.queries):
            if not reads(old, query):
                continue
            if isinstance(query, bytes | str):
                items[place] = query
            elif new.space in query:
                try:
                    vectors[place] = read(new, query), read(old, query)
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

    def _ranked(self, question: Question, old: Vectors, allowed: Matches | None) -> QueryAnswer:
        context.current().check()
        self._shared.count([question])
        try:
            return rank_by_both(question, self._both, old, allowed)
        except InvalidInputError as error:
            return error


def rank_by_both(
    question: Question, both: Both, old: Vectors, allowed: Matches | None
) -> SearchResult:
    """The best of the nearest by either model: carried items by both distances, native ones by the
    new model's. `old`: the query's vector in the space before. An answer shows the new distances.

    Raises InvalidInputError for queries that are none.
    """
    hosted, part, new = question.hosted, question.parts[0], question.vectors[0]
    near = candidates(
        partial(_labels, question, part, new, allowed),
        partial(_labels, question, both.part, old, allowed),
        count=max(question.k, HITS),
    )
    there, apart, carried = _apart(hosted, part, new, np.array(sorted(near), np.int64))
    kept, stayed, _ = _apart(hosted, both.part, old, there[carried])
    places = np.searchsorted(there, kept)
    likely = apart.astype(np.float64)
    likely[places] = both.joint(apart[places], stayed)
    order = np.lexsort((there, apart, likely))
    found = Neighbours(there[order][None], apart[order][None])
    hits = rank([part], [found], 0, len(order), hosted.items, exact=hosted.exact)
    return SearchResult(hits[: question.k], part.query.release, part.query.space)


def _labels(
    question: Question, part: PlanPart, query: Vectors, allowed: Matches | None, count: int
) -> Labels:
    (near,) = question.hosted.search([part], [query], count, allowed, question.ef)
    labels: Labels = near.labels[0]
    return labels[labels >= 0]


def _apart(
    hosted: Hosted, part: PlanPart, query: Vectors, labels: Labels
) -> tuple[Labels, Vectors, Mask]:
    """Those of `labels` (increasing) that have a vector there, their distances to a query [1, dim],
    and which of them were carried."""
    stored = hosted.store.stored(labels, part.space)
    apart = index.to_one(part.query.embedder.metric, query, stored.embedding)
    return stored.labels, apart, np.array([one == "upgraded" for one in stored.origins], np.bool_)
