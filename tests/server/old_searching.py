"""How galleries were searched before plans carried answerers: the oracle of test_answerers.

Searching one gallery: one plan and one snapshot a search, one ranking over all its spaces."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

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
from nobackfill.server.galleries.plan import Both, Plan, direct_part
from nobackfill.server.galleries.ranking import PlanPart, SearchResult, rank
from nobackfill.server.grpc import context
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.state import GatewayState, OutdatedError
from nobackfill.vectors import Vectors

# Questions of searches: what is asked of a gallery's spaces, answered together where it can be.

# The space before, and a query's vector [1,dim] there.
Before = tuple[Both, Vectors]


@dataclass(frozen=True, eq=False)
class Question:
    """A query's vectors float32 [1,dim], one for each of `parts`; `ef` as in Index.search.

    `before`: where both models rank what is carried.
    """

    hosted: Hosted
    parts: tuple[PlanPart, ...]
    vectors: tuple[Vectors, ...]
    k: int
    ef: int
    before: Before | None = None


# The whole answer's bytes to a question that needs no more; None: it does.
Shortcut = Callable[[Question], bytes | None]
# Each part's neighbours of a batch, and the row of one query in them; or why it was refused.
Answer = tuple[Sequence[Neighbours], int] | InvalidInputError


def run(questions: Sequence[Question], allowed: Matches | None = None) -> Sequence[Answer]:
    """Answer questions together, those with the same parts by one search a part."""
    if len(questions) == 1:
        question = questions[0]
        return [(_search(question.hosted, question.parts, questions, allowed), 0)]
    groups: dict[tuple[PlanPart, ...], list[int]] = {}
    for i, question in enumerate(questions):
        groups.setdefault(question.parts, []).append(i)
    answers: dict[int, Answer] = {}
    for parts, members in groups.items():
        group = [questions[i] for i in members]
        try:
            found = _search(group[0].hosted, parts, group, allowed)
        except InvalidInputError:
            # One of them is no vector of its space: find out which.
            answers.update({i: _alone(questions[i], allowed) for i in members})
        else:
            answers.update({i: (found, row) for row, i in enumerate(members)})
    return [answers[i] for i in range(len(questions))]


def _alone(question: Question, allowed: Matches | None) -> Answer:
    try:
        return _search(question.hosted, question.parts, [question], allowed), 0
    except InvalidInputError as error:
        return error


def _search(
    hosted: Hosted,
    parts: tuple[PlanPart, ...],
    questions: Sequence[Question],
    allowed: Matches | None,
) -> list[Neighbours]:
    k = max(question.k for question in questions)
    # The same in all of them: with one of its own a question, or a request, is searched alone.
    ef = questions[0].ef
    if len(questions) == 1:
        columns = list(questions[0].vectors)
    else:
        columns = [
            np.concatenate([question.vectors[i] for question in questions])
            for i in range(len(parts))
        ]
    began = time.monotonic()
    found = hosted.search(parts, columns, k, allowed, ef)
    if not ef:
        # What searches take that nobody asked to take longer.
        hosted.speed.took(time.monotonic() - began, len(questions))
    return found


# One search: what is asked, what is found, and who says which release answers it.

# A query by embedding: space id to little-endian float32 values.
ByEmbedding = Mapping[str, bytes]
# An image, a text, or vectors.
Query = bytes | str | ByEmbedding


@dataclass(frozen=True)
class SearchRequest:
    """One search. `ef` as in Index.search; `aside`: nobody waits for it, and no one else's queries
    are answered together with it."""

    hosted: Hosted
    query: Query
    k: int
    filtered: Filter | None
    ef: int
    aside: bool = False


# Answers one query in a plan: by the release on trial, where its part is given.
Search = Callable[[SearchRequest, Plan, PlanPart | None], SearchResult]


Answers = TypeVar("Answers")


class CanaryChoice(Protocol):
    """Who says which queries meet a release on trial."""

    def search(
        self, asked: SearchRequest, plan: Plan, on_trial: PlanPart, search: Search
    ) -> SearchResult:
        """Answer one query, wholly by one pair of query model and gallery."""
        ...

    def batch(self, on_trial: PlanPart, answer: Callable[[PlanPart | None], Answers]) -> Answers:
        """Answer several queries of one call, all of them by the same pair."""
        ...


class Heals(Protocol):
    """Who embeds hits again before they are shown."""

    def heals(self, hosted: Hosted, space: str) -> bool:
        """Whether answers in a space of a gallery are healed at present; looked at for each query
        that might be answered quickly."""
        ...

    def find(
        self, questions: Sequence[Question], allowed: Matches | None
    ) -> list[SearchResult | InvalidInputError]:
        """Answer questions in one space that it heals. Raises as Searching.search."""
        ...


# From what an index answers to what a query has found.


def rank_answer(question: Question, answer: Answer) -> SearchResult:
    """Hits, ranked. Raises InvalidInputError for what was refused."""
    if isinstance(answer, InvalidInputError):
        raise answer
    neighbours, row = answer
    hosted = question.hosted
    hits = rank(question.parts, neighbours, row, question.k, hosted.items, exact=hosted.exact)
    query = question.parts[0].query
    return SearchResult(hits, query.release, query.space)


def rank_or_refuse(question: Question, answer: Answer) -> SearchResult | InvalidInputError:
    """The same of one among several."""
    return answer if isinstance(answer, InvalidInputError) else rank_answer(question, answer)


def allowed(hosted: Hosted, filtered: Filter | None) -> Matches | None:
    """Items that pass; None for all. Raises InvalidInputError."""
    return None if filtered is None else hosted.filtering.passing(filtered)


def lost(question: Question, answer: Answer, shown: SearchResult) -> bool:
    """Whether there are fewer hits than were asked for, because one was deleted meanwhile."""
    if len(shown.hits) == question.k or isinstance(answer, InvalidInputError):
        return False
    neighbours, row = answer
    there = sum(int(np.count_nonzero(part.labels[row] >= 0)) for part in neighbours)
    return len(shown.hits) < min(question.k, there)


# Answers of a gallery that asks both models: one ranking of all its items (docs/adr/0033).

# Candidates of either model, at least.
_HITS = 100


def rank_by_both(question: Question, allowed: Matches | None) -> SearchResult:
    """The best of the nearest by either model, which must both have been asked: carried items by
    both distances, native ones by the new model's. What an answer shows of them is the new one's.

    Raises InvalidInputError for queries that are none.
    """
    assert question.before is not None, "both models have the query"
    hosted, part, new = question.hosted, question.parts[0], question.vectors[0]
    both, old = question.before
    labels = np.union1d(
        _nearest(question, part, new, allowed), _nearest(question, both.part, old, allowed)
    )
    there, apart, carried = _apart(hosted, part, new, labels)
    kept, stayed, _ = _apart(hosted, both.part, old, there[carried])
    places = np.searchsorted(there, kept)
    likely = apart.astype(np.float64)
    likely[places] = both.joint(apart[places], stayed)
    order = np.lexsort((there, apart, likely))
    ranked = Neighbours(there[order][None], apart[order][None])
    hits = rank([part], [ranked], 0, len(order), hosted.items, exact=hosted.exact)
    return SearchResult(hits[: question.k], part.query.release, part.query.space)


def _nearest(question: Question, part: PlanPart, query: Vectors, allowed: Matches | None) -> Labels:
    wide = max(question.k, _HITS)
    (near,) = question.hosted.search([part], [query], wide, allowed, question.ef)
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


# Which spaces a query is compared with: by what it is, by what the gallery lives in.


class Choosing:
    """Of queries by embedding."""

    def __init__(self, catalog: Catalog, state: GatewayState) -> None:
        self._catalog = catalog
        self._state = state

    def parts(self, plan: Plan, query: ByEmbedding) -> tuple[PlanPart, ...]:
        """What it may be compared with, in the spaces that it brings. Raises NeedsImageError,
        ReleaseRetiredError, IncompatibleSpaceError."""
        if all(part.query.space in query for part in plan.parts):
            return plan.parts
        for space, part in plan.alone.items():
            if space in query:
                self._refuse_ended(space, part.query)
                return (part,)
        if plan.query.space in query:
            missing = [p.query for p in plan.parts if p.query.space not in query]
            raise NeedsImageError(
                "the gallery is being upgraded and lives in two spaces; send the image, or an "
                f"embedding of each of releases {plan.query.release} and "
                f"{', '.join(str(m.release) for m in missing)}"
            )
        active, spaces = plan.parts[-1], self._catalog.spaces
        for space in query:
            manifest = spaces.get(space)
            if manifest is not None and manifest.searches(active.space):
                return (direct_part(manifest, spaces[active.space]),)
        raise self._incompatible(plan, query)

    def _refuse_ended(self, space: str, manifest: Manifest) -> None:
        end = self._state.now.ends.get(space)
        if end is not None and time.time() >= end:
            raise _retired(manifest.release)

    def _incompatible(self, plan: Plan, query: ByEmbedding) -> Exception:
        spaces = self._catalog.spaces
        known = [spaces[space].release for space in query if space in spaces]
        if known and max(known) in self._state.now.retired:
            return _retired(max(known))
        sent = f"release {max(known)}" if known else "no release known here"
        return IncompatibleSpaceError(
            f"the gallery answers queries of release {plan.query.release}, the embedding is of "
            f"{sent}; embed the query with release {plan.query.release}, or send the image"
        )


def parts_of(plan: Plan, on_trial: PlanPart | None) -> tuple[PlanPart, ...]:
    """What an image, or a text, is compared with."""
    return plan.parts if on_trial is None else (on_trial,)


def asked_beside(plan: Plan, parts: tuple[PlanPart, ...], query: Query) -> Both | None:
    """The space before, where its model ranks carried items too and can have the query."""
    both = plan.both
    if both is None or parts is not plan.parts:
        return None
    if isinstance(query, bytes):
        return both if both.part.query.embedder.file is not None else None
    if isinstance(query, str):
        return both if both.part.query.text_encoder is not None else None
    return both if both.part.query.space in query else None


def _retired(release: int) -> ReleaseRetiredError:
    return ReleaseRetiredError(
        f"queries of release {release} are no longer answered; embed with the active release"
    )


Result = TypeVar("Result")

# Queries for more hits than this, or with a filter, run alone: they would slow the others down.
_SMALL_K = 64
_LARGEST_BATCH = 64
# Times that a query is asked anew because an item was deleted while it was being found.
_TRIES = 3


class Searching:
    """Answers queries by image, by text and by embedding."""

    def __init__(
        self, embedding: Embedding, catalog: Catalog, state: GatewayState, metrics: Metrics,
        canary: CanaryChoice, healing: Heals,
    ) -> None:  # fmt: skip
        self._canary = canary
        self._healing = healing
        self._embedding = embedding
        self._choosing = Choosing(catalog, state)
        self._state = state
        self._searches = {kind: metrics.searches.labels(kind) for kind in ("exact", "graph")}
        self._observe = metrics.batch_size.labels("search").observe
        # One a gallery: who asks a small one waits for no batch of a large one.
        self._batchers: WeakKeyDictionary[Hosted, Batcher[Question, Answer]] = WeakKeyDictionary()

    def search(
        self, hosted: Hosted, query: Query, k: int, filtered: Filter | None, ef: int = 0
    ) -> SearchResult:
        """The `k` nearest items to one query; `ef` as in Index.search.

        Raises InvalidInputError, IncompatibleSpaceError, NeedsImageError, ReleaseRetiredError,
        UnavailableError (only for images), DeadlineError.
        """
        answer = self.answer(SearchRequest(hosted, query, k, filtered, ef), lambda _question: None)
        assert isinstance(answer, SearchResult), "there is no shortcut"
        return answer

    def answer(self, asked: SearchRequest, shortcut: Shortcut) -> SearchResult | bytes:
        """As `search`, or what `shortcut` makes of it, where that is not None."""
        return self._current(asked.hosted, lambda: self._by_plan(asked, shortcut))

    def _current(self, hosted: Hosted, ask: Callable[[], Result]) -> Result:
        """What `ask` finds, asked again where another gateway has replaced the plan it went by."""
        while True:
            plan = hosted.plan
            try:
                return ask()
            except OutdatedError:
                self._state.catch_up()
                if hosted.leaving:
                    raise NotFoundError(f"gallery {hosted.name!r} was deleted") from None
                if hosted.plan is plan:
                    raise

    def _by_plan(self, asked: SearchRequest, shortcut: Shortcut) -> SearchResult | bytes:
        with asked.hosted.using() as plan:
            if plan.canary is not None:
                return self._canary.search(asked, plan, plan.canary, self._search)
            question = self._question(asked.hosted, plan, asked.query, asked.k, asked.ef, None)
            quick = shortcut(question) if question.before is None else None
            return quick or self._answered(question, asked.filtered)

    def _search(
        self, asked: SearchRequest, plan: Plan, on_trial: PlanPart | None = None
    ) -> SearchResult:
        if asked.aside:
            return self._search_aside(asked, plan, on_trial)
        question = self._question(asked.hosted, plan, asked.query, asked.k, asked.ef, on_trial)
        return self._answered(question, asked.filtered)

    def _answered(self, question: Question, filtered: Filter | None) -> SearchResult:
        self._count(question)
        if self._heals(question):
            (healed,) = self._healing.find([question], allowed(question.hosted, filtered))
            if isinstance(healed, InvalidInputError):
                raise healed
            return healed
        if question.before is not None:
            with context.part("search"):
                return rank_by_both(question, allowed(question.hosted, filtered))
        with context.part("search"):
            for _ in range(_TRIES):
                answer = self._answer(question, filtered)
                shown = rank_answer(question, answer)
                if not lost(question, answer, shown):
                    break
        return shown

    def _heals(self, question: Question) -> bool:
        part = question.parts[0]
        own = len(question.parts) == 1 and part.query.space == part.space
        return own and self._healing.heals(question.hosted, part.space)

    def _search_aside(
        self, asked: SearchRequest, plan: Plan, on_trial: PlanPart | None
    ) -> SearchResult:
        hosted, parts = asked.hosted, parts_of(plan, on_trial)
        if isinstance(asked.query, bytes | str):
            (made,) = self._embedding.queries([part.query for part in parts], [asked.query])
            if isinstance(made, InvalidInputError):
                raise made
            question = Question(hosted, parts, made, asked.k, asked.ef)
        else:
            question = self._question(hosted, plan, asked.query, asked.k, asked.ef, on_trial)
        passing = allowed(hosted, asked.filtered)
        # Not through `run`, which counts how long searches take that somebody waits for.
        near = hosted.search(question.parts, question.vectors, asked.k, passing, asked.ef)
        return rank_answer(question, (near, 0))

    def _count(self, question: Question) -> None:
        for part in question.parts:
            compared = question.hosted.compares(part, question.ef)
            self._searches["exact" if compared else "graph"].inc()

    def _answer(self, question: Question, filtered: Filter | None) -> Answer:
        if filtered is None and question.k <= _SMALL_K and not question.ef:
            return self._batcher(question.hosted)(question)
        return run([question], allowed(question.hosted, filtered))[0]

    def _batcher(self, hosted: Hosted) -> Batcher[Question, Answer]:
        batcher = self._batchers.get(hosted)
        if batcher is None:
            made = Batcher(run, largest=_LARGEST_BATCH, observe=self._observe)
            batcher = self._batchers.setdefault(hosted, made)
        return batcher

    def batch(
        self,
        hosted: Hosted,
        queries: Sequence[Query],
        k: int,
        filtered: Filter | None,
        ef: int = 0,
        *,
        heal: bool = True,
    ) -> list[SearchResult | InvalidInputError]:
        """Several queries on one snapshot; what is no image or no vector is refused by itself.
        `heal`: where the gallery does, as for who asks one by one.

        Raises like `search`, for all of them; TooLargeError and OverloadedError for images that
        cost too much together.
        """
        return self._current(
            hosted, lambda: self._batch(hosted, queries, k, filtered, ef, heal=heal)
        )

    def _batch(
        self, hosted: Hosted, queries: Sequence[Query], k: int, filtered: Filter | None, ef: int,
        *, heal: bool,
    ) -> list[SearchResult | InvalidInputError]:  # fmt: skip
        with hosted.using() as plan:

            def answer(on_trial: PlanPart | None) -> list[SearchResult | InvalidInputError]:
                asked = self._questions(hosted, plan, queries, k, ef, on_trial)
                questions = [one for one in asked if isinstance(one, Question)]
                for question in questions:
                    self._count(question)
                with context.part("search"):
                    passing = allowed(hosted, filtered)
                    answers = iter(self._together(questions, passing, heal=heal))
                return [next(answers) if isinstance(one, Question) else one for one in asked]

            return answer(None) if plan.canary is None else self._canary.batch(plan.canary, answer)

    def _together(
        self, questions: Sequence[Question], passing: Matches | None, *, heal: bool
    ) -> list[SearchResult | InvalidInputError]:
        healed = [heal and self._heals(question) for question in questions]
        if any(healed) and all(healed):
            return self._healing.find(questions, passing)
        if any(healed):
            # Queries of several spaces in one call: each for itself.
            return [one for q in questions for one in self._together([q], passing, heal=heal)]
        near = [question for question in questions if question.before is None]
        answers = iter(run(near, passing) if near else ())
        return [
            rank_or_refuse(q, next(answers)) if q.before is None else _by_both(q, passing)
            for q in questions
        ]

    def _questions(
        self, hosted: Hosted, plan: Plan, queries: Sequence[Query], k: int, ef: int,
        on_trial: PlanPart | None,
    ) -> list[Question | InvalidInputError]:  # fmt: skip
        items = [query for query in queries if isinstance(query, bytes | str)]
        parts = parts_of(plan, on_trial)
        made = iter(self._made(plan, parts, items))
        questions: list[Question | InvalidInputError] = []
        for query in queries:
            try:
                if not isinstance(query, bytes | str):
                    questions.append(self._question(hosted, plan, query, k, ef, on_trial))
                    continue
                found = next(made)
                if isinstance(found, InvalidInputError):
                    raise found
                vectors, before = found
                questions.append(Question(hosted, parts, vectors, k, ef, before))
            except InvalidInputError as error:
                questions.append(error)
        return questions

    def _question(
        self, hosted: Hosted, plan: Plan, query: Query, k: int, ef: int, on_trial: PlanPart | None
    ) -> Question:
        parts = parts_of(plan, on_trial)
        if isinstance(query, bytes | str):
            both = asked_beside(plan, parts, query)
            asked = [*parts, both.part] if both else parts
            made = {
                manifest.release: self._embedding.query(manifest, query)
                for manifest in {part.query.release: part.query for part in asked}.values()
            }
            vectors = tuple(made[part.query.release] for part in parts)
            before = (both, made[both.part.query.release]) if both else None
            return Question(hosted, parts, vectors, k, ef, before)
        if on_trial is None or on_trial.query.space not in query:
            parts = self._choosing.parts(plan, query)
        vectors = tuple(_read(part.query, query[part.query.space]) for part in parts)
        both = asked_beside(plan, parts, query)
        if both is None:
            return Question(hosted, parts, vectors, k, ef)
        old = _read(both.part.query, query[both.part.query.space])
        return Question(hosted, parts, vectors, k, ef, (both, old))

    def _made(
        self, plan: Plan, parts: tuple[PlanPart, ...], items: Sequence[bytes | str]
    ) -> list[tuple[tuple[Vectors, ...], Before | None] | InvalidInputError]:
        """Of each image or text the vectors of its parts, and that of the model before where it is
        asked; what that one cannot read is ranked by the others."""
        asked = [asked_beside(plan, parts, item) for item in items]
        models = [part.query for part in parts]
        made: dict[int, tuple[Vectors, ...]] = {}
        if plan.both is not None:
            rows = [row for row, both in enumerate(asked) if both is not None]
            beside = [*models, plan.both.part.query]
            found = self._embedding.queries(beside, [items[row] for row in rows])
            made = {r: v for r, v in zip(rows, found, strict=True) if isinstance(v, tuple)}
        left = [item for row, item in enumerate(items) if row not in made]
        rest = iter(self._embedding.queries(models, left))
        told: list[tuple[tuple[Vectors, ...], Before | None] | InvalidInputError] = []
        for row, both in enumerate(asked):
            if row in made and both is not None:
                told.append((made[row][:-1], (both, made[row][-1])))
                continue
            alone = next(rest)
            told.append(alone if isinstance(alone, InvalidInputError) else (alone, None))
        return told


def _by_both(question: Question, passing: Matches | None) -> SearchResult | InvalidInputError:
    context.current().check()
    try:
        return rank_by_both(question, passing)
    except InvalidInputError as error:
        return error


def _read(manifest: Manifest, values: bytes) -> Vectors:
    """One vector [1,dim]. Its values are checked where it is searched, together with others."""
    dim = manifest.embedder.dim
    if len(values) != 4 * dim:
        raise InvalidInputError(
            f"query of release {manifest.release}: expected {4 * dim} bytes (float32, dimension "
            f"{dim}), got {len(values)}"
        )
    return np.frombuffer(values, "<f4").reshape(1, dim)
