"""Searching one gallery: one plan and one snapshot a search, one ranking over all its spaces."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from gallery.exact import ExactIndex
from gallery.filters import Filter
from gallery.index import Neighbours
from gallery.view import Allowed
from release.errors import (
    IncompatibleSpaceError,
    InvalidInputError,
    NeedsImageError,
    ReleaseRetiredError,
)
from release.manifest import Manifest
from release.vectors import Vectors
from server.border.metrics import Metrics
from server.catalog import Catalog
from server.embedding.batching import Batcher
from server.embedding.embedding import Embedding
from server.galleries.hosted import Hosted
from server.galleries.plan import Part, Plan, direct_part
from server.galleries.ranking import Hit, rank
from server.state import StateFile

# Queries for more hits than this, or with a filter, run alone: they would slow the others down.
_SMALL_K = 64
_LARGEST_BATCH = 64
# Times that a query is asked anew because an item was deleted while it was being found.
_TRIES = 3

# A query by embedding: space id to little-endian float32 values.
ByEmbedding = Mapping[str, bytes]
Query = bytes | ByEmbedding


@dataclass(frozen=True)
class Found:
    """Hits of one query, nearest first, and what answered it."""

    hits: list[Hit]
    release: int
    space: str


@dataclass(frozen=True)
class _Question:
    """A query's vectors float32 [1,dim], one for each of `parts`."""

    hosted: Hosted
    parts: tuple[Part, ...]
    vectors: tuple[Vectors, ...]
    k: int


# Each part's neighbours of a batch, and the row of one query in them; or why it was refused.
_Answer = tuple[Sequence[Neighbours], int] | InvalidInputError


class Searching:
    """Answers queries by image and by embedding."""

    def __init__(
        self, embedding: Embedding, catalog: Catalog, state: StateFile, metrics: Metrics
    ) -> None:
        self._embedding = embedding
        self._catalog = catalog
        self._state = state
        self._searches = {kind: metrics.searches.labels(kind) for kind in ("exact", "graph")}
        self._observe = metrics.batch_size.labels("search").observe
        # One a gallery: who asks a small one waits for no batch of a large one.
        self._batchers: WeakKeyDictionary[Hosted, Batcher[_Question, _Answer]] = WeakKeyDictionary()

    def search(self, hosted: Hosted, query: Query, k: int, filtered: Filter | None) -> Found:
        """The `k` nearest items to one query.

        Raises InvalidInputError, IncompatibleSpaceError, NeedsImageError, ReleaseRetiredError,
        UnavailableError (only for images), DeadlineError.
        """
        with hosted.using() as plan:
            question = self._question(hosted, plan, query, k)
            self._count(question)
            for _ in range(_TRIES):
                answer = self._answer(question, filtered)
                found = _found(question, answer)
                if not _lost(question, answer, found):
                    break
            return found

    def _count(self, question: _Question) -> None:
        for part in question.parts:
            base = question.hosted.view(part.space).snapshot().base
            self._searches["exact" if isinstance(base.index, ExactIndex) else "graph"].inc()

    def _answer(self, question: _Question, filtered: Filter | None) -> _Answer:
        if filtered is None and question.k <= _SMALL_K:
            return self._batcher(question.hosted)(question)
        return _run([question], _allowed(question.hosted, filtered))[0]

    def _batcher(self, hosted: Hosted) -> Batcher[_Question, _Answer]:
        batcher = self._batchers.get(hosted)
        if batcher is None:
            made = Batcher(_run, largest=_LARGEST_BATCH, observe=self._observe)
            batcher = self._batchers.setdefault(hosted, made)
        return batcher

    def batch(
        self, hosted: Hosted, queries: Sequence[Query], k: int, filtered: Filter | None
    ) -> list[Found | InvalidInputError]:
        """Several queries on one snapshot; what is no image or no vector is refused by itself.

        Raises like `search`, for all of them; TooLargeError and OverloadedError for images that
        cost too much together.
        """
        with hosted.using() as plan:
            asked = self._questions(hosted, plan, queries, k)
            questions = [one for one in asked if isinstance(one, _Question)]
            for question in questions:
                self._count(question)
            answers = iter(_run(questions, _allowed(hosted, filtered)) if questions else ())
            return [
                _found_or_refused(one, next(answers)) if isinstance(one, _Question) else one
                for one in asked
            ]

    def _questions(
        self, hosted: Hosted, plan: Plan, queries: Sequence[Query], k: int
    ) -> list[_Question | InvalidInputError]:
        images = [query for query in queries if isinstance(query, bytes)]
        made = iter(self._embedding.queries([part.query for part in plan.parts], images))
        questions: list[_Question | InvalidInputError] = []
        for query in queries:
            try:
                if not isinstance(query, bytes):
                    questions.append(self._question(hosted, plan, query, k))
                    continue
                vectors = next(made)
                questions.append(
                    vectors
                    if isinstance(vectors, InvalidInputError)
                    else _Question(hosted, plan.parts, vectors, k)
                )
            except InvalidInputError as error:
                questions.append(error)
        return questions

    def _question(self, hosted: Hosted, plan: Plan, query: Query, k: int) -> _Question:
        if isinstance(query, bytes):
            made = {
                manifest.release: self._embedding.query(manifest, query)
                for manifest in {part.query.release: part.query for part in plan.parts}.values()
            }
            vectors = tuple(made[part.query.release] for part in plan.parts)
            return _Question(hosted, plan.parts, vectors, k)
        parts = self._parts(plan, query)
        vectors = tuple(_read(part.query, query[part.query.space]) for part in parts)
        return _Question(hosted, parts, vectors, k)

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
            if manifest is not None and active.space in manifest.searches_directly:
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


def _found(question: _Question, answer: _Answer) -> Found:
    if isinstance(answer, InvalidInputError):
        raise answer
    found, row = answer
    hosted = question.hosted
    hits = rank(question.parts, found, row, question.k, hosted.items, exact=hosted.exact)
    query = question.parts[0].query
    return Found(hits, query.release, query.space)


def _found_or_refused(question: _Question, answer: _Answer) -> Found | InvalidInputError:
    return answer if isinstance(answer, InvalidInputError) else _found(question, answer)


def _allowed(hosted: Hosted, filtered: Filter | None) -> Allowed | None:
    return None if filtered is None else hosted.filtering.passing(filtered).mask


def _lost(question: _Question, answer: _Answer, found: Found) -> bool:
    """Whether there are fewer hits than were asked for, because one was deleted meanwhile."""
    if len(found.hits) == question.k or isinstance(answer, InvalidInputError):
        return False
    neighbours, row = answer
    there = sum(int(np.count_nonzero(part.labels[row] >= 0)) for part in neighbours)
    return len(found.hits) < min(question.k, there)


def _run(questions: Sequence[_Question], allowed: Allowed | None = None) -> Sequence[_Answer]:
    """Answer questions together, those with the same parts by one search a part."""
    if len(questions) == 1:
        question = questions[0]
        return [(_search(question.hosted, question.parts, questions, allowed), 0)]
    groups: dict[tuple[Part, ...], list[int]] = {}
    for i, question in enumerate(questions):
        groups.setdefault(question.parts, []).append(i)
    answers: dict[int, _Answer] = {}
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


def _alone(question: _Question, allowed: Allowed | None) -> _Answer:
    try:
        return _search(question.hosted, question.parts, [question], allowed), 0
    except InvalidInputError as error:
        return error


def _search(
    hosted: Hosted, parts: tuple[Part, ...], questions: Sequence[_Question], allowed: Allowed | None
) -> list[Neighbours]:
    k = max(question.k for question in questions)
    if len(questions) == 1:
        columns = list(questions[0].vectors)
    else:
        columns = [
            np.concatenate([question.vectors[i] for question in questions])
            for i in range(len(parts))
        ]
    snapshots = hosted.snapshots(parts)
    began = time.monotonic()
    found = [
        snapshot.search(column, k, allowed)
        for snapshot, column in zip(snapshots, columns, strict=True)
    ]
    hosted.took(time.monotonic() - began)
    return found
