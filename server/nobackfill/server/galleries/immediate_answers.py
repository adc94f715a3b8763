"""Searches that are answered where they arrive: handing one to a thread takes as long as doing it.

Nothing here waits: what is read are references to what never changes (a plan, a snapshot) and the
items that are in memory. Whatever else a search needs, or is wrong with it, is left to a thread.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.reading import StoredItem
from nobackfill.gallery.search.view import LiveView, Snapshot, curves_of, parse
from nobackfill.server.embedding.embedding import Embedding
from nobackfill.server.embedding.image_queue import ImageQueue, QueuedImage
from nobackfill.server.galleries.galleries import GalleryRegistry
from nobackfill.server.galleries.hosted import Hosted, light
from nobackfill.server.galleries.hosted_file import (
    HitBytes,
    HostedInFile,
    ItemCache,
    hit_bytes,
    joined,
)
from nobackfill.server.galleries.plan import Plan
from nobackfill.server.galleries.ranking import PlanPart, rounded, scores_of
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.grpc.rpc import Later, Unanswered
from nobackfill.server.state import GatewayState, State
from nobackfill.v1 import search_pb2 as pb
from nobackfill.vectors import Vectors
from nobackfill.wire.values import ORIGINS, origin_name

if TYPE_CHECKING:
    from nobackfill.gallery.search._native import Curves


# Values, k, and how far hits may be.
VectorQuery = tuple[bytes, int, float]

# More hits than this are encoded on a thread.
DEFAULT_K, MOST_HITS = 10, 64


@dataclass(frozen=True)
class _ReadySearch:
    """What answers of one part have in common. `end`: what follows the hits, in which the query's
    space ends at `ends`."""

    part: PlanPart
    items: ItemCache
    make: Callable[[StoredItem], HitBytes | None]
    ends: float | None
    end: bytes
    curves: "Curves | None"


@dataclass(frozen=True)
class _Route:
    """From requests to answers in one call of compiled code, as long as nothing of this changes."""

    answers: Callable[[list[bytes]], list[bytes | None]]
    hosted: HostedInFile
    plan: Plan
    part: PlanPart
    view: LiveView
    snapshot: Snapshot
    state: State
    exact: bool

    def holds(self) -> bool:
        hosted = self.hosted
        return (
            hosted.plan is self.plan
            and hosted.origins.mixed(self.part, self.snapshot) is None
            and self.view.snapshot() is self.snapshot
            and hosted.views().get(self.snapshot.spec.space) is self.view
            and hosted.exact is self.exact
        )


class ImmediateAnswers:
    """Answers queries by one embedding."""

    def __init__(self, galleries: GalleryRegistry, state: GatewayState, metrics: Metrics) -> None:
        self._galleries = galleries
        self._state = state
        self._exact, self._graph = (metrics.searches.labels(kind) for kind in ("exact", "graph"))
        # What answered last.
        self._route: _Route | None = None

    def routed(self, messages: list[bytes]) -> list[bytes | None] | None:
        """To each of `messages` the answer, where all is as it was when one was answered last; None
        to those that ask something else, and for all: ask `answers`."""
        route = self._route
        if (
            route is None
            or not route.holds()
            or self._galleries.at_hand(route.hosted.name) is not route.hosted
            or self._state.current is not route.state
            or not route.hosted.speed.at_its_best
        ):
            self._route = None
            return None
        began = time.monotonic()
        answers = route.answers(messages)
        whole = len(answers) - answers.count(None)
        if whole:
            route.hosted.speed.took_whole(time.monotonic() - began, whole)
            self._graph.inc(whole)
            if chosen := route.view.asked.chosen(whole):
                told = [
                    m for m, answer in zip(messages, answers, strict=True) if answer is not None
                ]
                route.view.asked.keep(_values(told[number] for number in chosen))
        return answers

    def named(self) -> str:
        """The gallery that `routed` answers for."""
        return "" if self._route is None else self._route.hosted.name

    def answers(
        self, gallery: str, space: str, queries: Sequence[VectorQuery]
    ) -> list[bytes | None]:
        """To each of the `queries` in `space` a SearchResponse, or None: ask on a thread."""
        state, hosted = self._state.current, self._galleries.at_hand(gallery)
        if not isinstance(hosted, HostedInFile):
            return [None] * len(queries)
        plan = hosted.plan
        part = plan.answerer.space_part(hosted, space)
        if part is None:
            return [None] * len(queries)
        answers = self.of_part(hosted, part, queries, arriving=True)
        if None not in answers:
            self._route = _route(hosted, plan, part, state)
        return answers

    def of_part(
        self,
        hosted: HostedInFile,
        part: PlanPart,
        queries: Sequence[VectorQuery],
        *,
        arriving: bool = False,
    ) -> list[bytes | None]:
        """As `answers`, for who holds the gallery and the plan that the part is of. A thread that
        is none where calls arrive may take its time, and waits for others: what it takes says
        nothing of the gallery."""
        nothing: list[bytes | None] = [None] * len(queries)
        # Taken before the views: what is made ready for one that goes lands in a mapping that goes.
        known = hosted.ready
        view = hosted.views().get(part.space)
        if view is None or not hosted.origins.known(part):
            return nothing
        ends = self._state.current.ends.get(part.query.space)
        ready = known.get(part.space)
        if ready is None or ready.part is not part or ready.ends != ends:
            ready = known[part.space] = _ready(hosted, part, ends)
        snapshot = view.snapshot()
        if (
            (ends is not None and time.time() >= ends)
            or not (hosted.speed.quick(snapshot) if arriving else light(snapshot))
            or not hosted.speed.worth_a_try()
        ):
            return nothing
        began = time.monotonic()
        answers = _answers(hosted, snapshot, ready, queries)
        if arriving:
            hosted.speed.took(time.monotonic() - began, len(queries))
        self._count(snapshot, view, queries, answers)
        return answers

    def _count(
        self,
        snapshot: Snapshot,
        view: LiveView,
        queries: Sequence[VectorQuery],
        answers: Sequence[bytes | None],
    ) -> None:
        pairs = zip(queries, answers, strict=True)
        seen = [values for (values, _, _), answer in pairs if answer is not None]
        if not seen:
            return
        if not snapshot.graphed:
            self._exact.inc(len(seen))
        else:
            self._graph.inc(len(seen))
            view.asked.see(np.frombuffer(b"".join(seen), "<f4").reshape(len(seen), -1))


def _answers(
    hosted: HostedInFile, snapshot: Snapshot, ready: _ReadySearch, queries: Sequence[VectorQuery]
) -> list[bytes | None]:
    compiled = snapshot.compiled
    answers: list[bytes | None] = [None] * len(queries)
    if (
        compiled is not None
        and ready.curves is not None
        and hosted.origins.mixed(ready.part, snapshot) is None
    ):
        answers = compiled.answers(
            queries, hosted.exact, ready.items.known, ready.curves, ready.end
        )
    for number, answer in enumerate(answers):
        if answer is not None:
            hosted.speed.tried(whole=True)
        else:
            answers[number] = _in_python(hosted, snapshot, ready, *queries[number])
    return answers


def _in_python(
    hosted: HostedInFile,
    snapshot: Snapshot,
    ready: _ReadySearch,
    values: bytes,
    k: int,
    farthest: float,
) -> bytes | None:
    """The same bytes; None where there is something to say or to read."""
    if len(values) != 4 * snapshot.spec.dim:
        return None
    try:
        found = hosted.best(ready.part, snapshot, np.frombuffer(values, "<f4")[None], k)
    except InvalidInputError:
        return None
    labels = found.labels[0].tolist()
    while labels and labels[-1] < 0:
        labels.pop()
    hits = ready.items.shown(labels, ready.make)
    hosted.speed.tried(whole=hits is not None)
    if hits is None:
        return None
    distances = found.distances[0, : len(labels)]
    return _encoded(ready.part, hits, distances, farthest, exact=hosted.exact) + ready.end


def _ready(hosted: HostedInFile, part: PlanPart, ends: float | None) -> _ReadySearch:
    end = pb.SearchResponse(release=part.query.release, space=part.query.space)
    if ends is not None:
        end.space_ends_at.FromNanoseconds(int(ends * 1e9))
    curves = {int(ORIGINS[origin]): curve.points() for origin, curve in part.curves.items()}
    return _ReadySearch(
        part,
        hosted.items_of(part.space),
        partial(hit_bytes, release=part.release),
        ends,
        end.SerializeToString(),
        curves_of(curves),
    )


def _route(hosted: HostedInFile, plan: Plan, part: PlanPart, state: State) -> _Route | None:
    """Where a query's space has no end, nothing is healed, and there is compiled code for it."""
    ready, view = hosted.ready.get(part.space), hosted.views().get(part.space)
    space, exact = part.query.space, hosted.exact
    if view is None or not isinstance(ready, _ReadySearch) or ready.part is not part:
        return None
    snapshot = view.snapshot()
    if snapshot.compiled is None or ready.curves is None or ready.ends is not None:
        return None
    if space in state.ends or plan.heals == part.space:
        return None
    if hosted.origins.mixed(part, snapshot) is not None:
        return None
    answers = snapshot.compiled.route(
        hosted.name, space, DEFAULT_K, MOST_HITS, exact, ready.items.known, ready.curves, ready.end
    )
    return _Route(answers, hosted, plan, part, view, snapshot, state, exact)


def _values(messages: Iterable[bytes]) -> Vectors:
    """Of requests that were read once [q, dim]."""
    assert parse is not None, "compiled code has read them"
    found = [asked[2] for asked in map(parse, messages) if asked is not None]
    return np.frombuffer(b"".join(found), "<f4").reshape(len(found), -1)


def _encoded(
    part: PlanPart, hits: list[HitBytes], distances: Vectors, farthest: float, *, exact: bool
) -> bytes:
    shown = distances if exact else rounded(distances)
    scores = scores_of(part, [origin_name(hit.origin) for hit in hits], shown)
    told = shown.tolist()
    if farthest < math.inf:
        within = [place for place, distance in enumerate(told) if distance <= farthest]
        hits, told = [hits[n] for n in within], [told[n] for n in within]
        scores = [scores[n] for n in within]
    return joined(hits, told, scores)


# Searches by one image that hold no thread: decoded and embedded together with others, then found
# as an embedding is. What needs more, and every refusal, is left to a thread.


@dataclass(frozen=True, eq=False)
class _Asked:
    """One query, counted among who uses the gallery and its plan."""

    hosted: HostedInFile
    plan: Plan
    part: PlanPart
    k: int
    farthest: float
    call: Unanswered

    def end(self, answer: bytes | None) -> None:
        _leave(self.hosted, self.plan)
        self.call.done(answer)


class ImageAnswers:
    """Answers queries by one image."""

    def __init__(
        self, galleries: GalleryRegistry, immediate: ImmediateAnswers, embedding: Embedding,
        metrics: Metrics,
    ) -> None:  # fmt: skip
        self._galleries = galleries
        self._immediate = immediate
        self._embedding = embedding
        self._queue: ImageQueue[_Asked] = ImageQueue(embedding, metrics, self._answer)

    def close(self) -> None:
        """End its threads; what nobody has begun is left to others."""
        self._queue.close()

    def later(self, gallery: str, image: bytes, k: int, farthest: float) -> Later | None:
        """What answers a query; None: on a thread."""
        hosted = self._galleries.at_hand(gallery)
        if (
            not isinstance(hosted, HostedInFile)
            or hosted.plan.answerer.image_part(hosted) is None
            or not self._embedding.models.ready()
        ):
            return None
        return Later(lambda call: self._add(hosted, image, k, farthest, call), self._queue.begin)

    def _add(
        self, hosted: HostedInFile, image: bytes, k: int, farthest: float, call: Unanswered
    ) -> None:
        plan = _enter(hosted)
        part = None if plan is None else plan.answerer.image_part(hosted)
        if plan is None or part is None:
            if plan is not None:
                _leave(hosted, plan)
            call.done(None)
            return
        asked = _Asked(hosted, plan, part, k, farthest, call)
        self._queue.add(QueuedImage(asked, part.query, image, call.deadline, call.is_wanted))

    def _answer(self, found: Sequence[tuple[QueuedImage[_Asked], Vectors | None]]) -> None:
        answers: dict[QueuedImage[_Asked], bytes | None] = {waiting: None for waiting, _ in found}
        try:
            self._search(found, answers)
        finally:
            for waiting, answer in answers.items():
                waiting.of.end(answer)

    def _search(
        self,
        found: Sequence[tuple[QueuedImage[_Asked], Vectors | None]],
        answers: dict[QueuedImage[_Asked], bytes | None],
    ) -> None:
        rows = {waiting: row for waiting, row in found if row is not None}
        together: dict[tuple[HostedInFile, PlanPart], list[QueuedImage[_Asked]]] = {}
        for waiting in rows:
            together.setdefault((waiting.of.hosted, waiting.of.part), []).append(waiting)
        for (hosted, part), some in together.items():
            queries = [(rows[one].tobytes(), one.of.k, one.of.farthest) for one in some]
            made = self._immediate.of_part(hosted, part, queries)
            answers.update(zip(some, made, strict=True))
        for waiting, row in rows.items():
            if answers[waiting] is None:
                # The thread that answers embeds it no second time.
                self._embedding.keep(waiting.manifest, waiting.image, row)


def _enter(hosted: Hosted) -> Plan | None:
    """The gallery's plan: both are from now on used by one more. None: the gallery is closed."""
    return hosted.enter_plan() if hosted.users.enter() else None


def _leave(hosted: Hosted, plan: Plan) -> None:
    plan.users.leave()
    hosted.users.leave()
