"""Searching one gallery: one plan and one snapshot a search, one ranking over all its spaces."""

from collections.abc import Callable, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.gallery.filters import Filter
from nobackfill.gallery.matches import Matches
from nobackfill.release.manifest import Manifest
from nobackfill.server.catalog import Catalog
from nobackfill.server.embedding.embedding import Batcher, Embedding
from nobackfill.server.galleries import both_answers
from nobackfill.server.galleries.answers import allowed, found, found_or_refused, lost
from nobackfill.server.galleries.asked import Asked, Canary, Found, Heals, Query
from nobackfill.server.galleries.choosing import Choosing, asked_beside, parts_of
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.galleries.plan import Part, Plan
from nobackfill.server.galleries.queries import Answer, Before, Question, Shortcut, run
from nobackfill.server.grpc import context
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.state import GatewayState, OutdatedError
from nobackfill.vectors import Vectors

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
        canary: Canary, healing: Heals,
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
    ) -> Found:
        """The `k` nearest items to one query; `ef` as in Index.search.

        Raises InvalidInputError, IncompatibleSpaceError, NeedsImageError, ReleaseRetiredError,
        UnavailableError (only for images), DeadlineError.
        """
        answer = self.answer(Asked(hosted, query, k, filtered, ef), lambda _question: None)
        assert isinstance(answer, Found), "there is no shortcut"
        return answer

    def answer(self, asked: Asked, shortcut: Shortcut) -> Found | bytes:
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

    def _by_plan(self, asked: Asked, shortcut: Shortcut) -> Found | bytes:
        with asked.hosted.using() as plan:
            if plan.canary is not None:
                return self._canary.search(asked, plan, plan.canary, self._search)
            question = self._question(asked.hosted, plan, asked.query, asked.k, asked.ef, None)
            quick = shortcut(question) if question.before is None else None
            return quick or self._answered(question, asked.filtered)

    def _search(self, asked: Asked, plan: Plan, on_trial: Part | None = None) -> Found:
        if asked.aside:
            return self._search_aside(asked, plan, on_trial)
        question = self._question(asked.hosted, plan, asked.query, asked.k, asked.ef, on_trial)
        return self._answered(question, asked.filtered)

    def _answered(self, question: Question, filtered: Filter | None) -> Found:
        self._count(question)
        if self._heals(question):
            (healed,) = self._healing.find([question], allowed(question.hosted, filtered))
            if isinstance(healed, InvalidInputError):
                raise healed
            return healed
        if question.before is not None:
            with context.part("search"):
                return both_answers.found(question, allowed(question.hosted, filtered))
        with context.part("search"):
            for _ in range(_TRIES):
                answer = self._answer(question, filtered)
                shown = found(question, answer)
                if not lost(question, answer, shown):
                    break
        return shown

    def _heals(self, question: Question) -> bool:
        part = question.parts[0]
        own = len(question.parts) == 1 and part.query.space == part.space
        return own and self._healing.heals(question.hosted, part.space)

    def _search_aside(self, asked: Asked, plan: Plan, on_trial: Part | None) -> Found:
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
        return found(question, (near, 0))

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
    ) -> list[Found | InvalidInputError]:
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
    ) -> list[Found | InvalidInputError]:  # fmt: skip
        with hosted.using() as plan:

            def answer(on_trial: Part | None) -> list[Found | InvalidInputError]:
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
    ) -> list[Found | InvalidInputError]:
        healed = [heal and self._heals(question) for question in questions]
        if any(healed) and all(healed):
            return self._healing.find(questions, passing)
        if any(healed):
            # Queries of several spaces in one call: each for itself.
            return [one for q in questions for one in self._together([q], passing, heal=heal)]
        near = [question for question in questions if question.before is None]
        answers = iter(run(near, passing) if near else ())
        return [
            found_or_refused(q, next(answers)) if q.before is None else _by_both(q, passing)
            for q in questions
        ]

    def _questions(
        self, hosted: Hosted, plan: Plan, queries: Sequence[Query], k: int, ef: int,
        on_trial: Part | None,
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
        self, hosted: Hosted, plan: Plan, query: Query, k: int, ef: int, on_trial: Part | None
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
        self, plan: Plan, parts: tuple[Part, ...], items: Sequence[bytes | str]
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


def _by_both(question: Question, passing: Matches | None) -> Found | InvalidInputError:
    context.current().check()
    try:
        return both_answers.found(question, passing)
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
