"""Searching one gallery: one plan and one snapshot a search, one ranking over all its spaces."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from nobackfill.errors import (
    IncompatibleSpaceError,
    InvalidInputError,
    NeedsImageError,
    NotFoundError,
    ReleaseRetiredError,
)
from nobackfill.gallery.filters import Filter
from nobackfill.gallery.matches import Matches
from nobackfill.release.manifest import Manifest
from nobackfill.server.catalog import Catalog
from nobackfill.server.embedding.batching import Batcher
from nobackfill.server.embedding.embedding import Embedding
from nobackfill.server.galleries.answers import allowed, found, found_or_refused, lost
from nobackfill.server.galleries.asked import Asked, ByEmbedding, Canary, Found, Heals, Query
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.galleries.plan import Part, Plan, direct_part
from nobackfill.server.galleries.queries import Answer, Question, Shortcut, run
from nobackfill.server.grpc import calls
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
        self._catalog = catalog
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
            return shortcut(question) or self._answered(question, asked.filtered)

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
        with calls.part("search"):
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
        hosted, parts = asked.hosted, _parts_of(plan, on_trial)
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
                with calls.part("search"):
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
        answers = run(questions, passing) if questions else ()
        return [found_or_refused(q, answer) for q, answer in zip(questions, answers, strict=True)]

    def _questions(
        self, hosted: Hosted, plan: Plan, queries: Sequence[Query], k: int, ef: int,
        on_trial: Part | None,
    ) -> list[Question | InvalidInputError]:  # fmt: skip
        items = [query for query in queries if isinstance(query, bytes | str)]
        parts = _parts_of(plan, on_trial)
        made = iter(self._embedding.queries([part.query for part in parts], items))
        questions: list[Question | InvalidInputError] = []
        for query in queries:
            try:
                if not isinstance(query, bytes | str):
                    questions.append(self._question(hosted, plan, query, k, ef, on_trial))
                    continue
                vectors = next(made)
                questions.append(
                    vectors
                    if isinstance(vectors, InvalidInputError)
                    else Question(hosted, parts, vectors, k, ef)
                )
            except InvalidInputError as error:
                questions.append(error)
        return questions

    def _question(
        self, hosted: Hosted, plan: Plan, query: Query, k: int, ef: int, on_trial: Part | None
    ) -> Question:
        parts = _parts_of(plan, on_trial)
        if isinstance(query, bytes | str):
            made = {
                manifest.release: self._embedding.query(manifest, query)
                for manifest in {part.query.release: part.query for part in parts}.values()
            }
            vectors = tuple(made[part.query.release] for part in parts)
            return Question(hosted, parts, vectors, k, ef)
        if on_trial is None or on_trial.query.space not in query:
            parts = self._parts(plan, query)
        vectors = tuple(_read(part.query, query[part.query.space]) for part in parts)
        return Question(hosted, parts, vectors, k, ef)

    def _parts(self, plan: Plan, query: ByEmbedding) -> tuple[Part, ...]:
        """What a query by embedding may be compared with, in the spaces that it brings."""
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


def _parts_of(plan: Plan, on_trial: Part | None) -> tuple[Part, ...]:
    """What an image, or a text, is compared with."""
    return plan.parts if on_trial is None else (on_trial,)


def _retired(release: int) -> ReleaseRetiredError:
    return ReleaseRetiredError(
        f"queries of release {release} are no longer answered; embed with the active release"
    )


def _read(manifest: Manifest, values: bytes) -> Vectors:
    """One vector [1,dim]. Its values are checked where it is searched, together with others."""
    dim = manifest.embedder.dim
    if len(values) != 4 * dim:
        raise InvalidInputError(
            f"query of release {manifest.release}: expected {4 * dim} bytes (float32, dimension "
            f"{dim}), got {len(values)}"
        )
    return np.frombuffer(values, "<f4").reshape(1, dim)
