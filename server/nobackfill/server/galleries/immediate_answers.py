"""Answer searches on the thread that receives calls: handing one to another thread takes as long.

Nothing here waits. It reads only references to immutable objects (a plan, a snapshot) and cached
items. A search that needs more, or has an error, is left to another thread.
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
from nobackfill.server.galleries.hosted import Hosted, is_light
from nobackfill.server.galleries.hosted_file import (
    HitBytes,
    HostedInFile,
    ItemCache,
    encode_hit,
    encode_hits,
)
from nobackfill.server.galleries.plan import Plan
from nobackfill.server.galleries.ranking import PlanPart, round_distances, scores_of
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.grpc.rpc import Later, Unanswered
from nobackfill.server.state import GatewayState, State
from nobackfill.v1 import search_pb2 as pb
from nobackfill.vectors import Vectors
from nobackfill.wire.values import ORIGINS, origin_name

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
        items: cached items.
        make: encodes a hit.
        ends: Unix time at which queries of the space end; None without an end.
        end: encoded fields that follow the hits.
        curves: calibration for compiled code; None without compiled code.
    """

    part: PlanPart
    items: ItemCache
    make: Callable[[StoredItem], HitBytes | None]
    ends: float | None
    end: bytes
    curves: "Curves | None"


@dataclass(frozen=True)
class _CompiledRoute:
    """Answer requests in one call of compiled code, while nothing that it depends on changes."""

    answers: Callable[[list[bytes]], list[bytes | None]]
    hosted: HostedInFile
    plan: Plan
    part: PlanPart
    view: LiveView
    snapshot: Snapshot
    state: State
    exact: bool

    def is_valid(self) -> bool:
        """Tell whether everything that the route depends on is unchanged."""
        hosted = self.hosted
        return (
            hosted.plan is self.plan
            and hosted.origins.migrated_labels(self.part, self.snapshot) is None
            and self.view.snapshot() is self.snapshot
            and hosted.views().get(self.snapshot.spec.space) is self.view
            and hosted.exact is self.exact
        )


class ImmediateAnswers:
    """Answer queries by one embedding."""

    def __init__(self, galleries: GalleryRegistry, state: GatewayState, metrics: Metrics) -> None:
        self._galleries = galleries
        self._state = state
        self._exact, self._graph = (metrics.searches.labels(kind) for kind in ("exact", "graph"))
        # The route of the last answer; None if it had none.
        self._route: _CompiledRoute | None = None

    def answer_by_route(self, messages: list[bytes]) -> list[bytes | None] | None:
        """Answer encoded requests by the route of the last answer.

        Args:
            messages: encoded SearchRequests.

        Returns:
            The encoded answer to each, None for a request that the route does not fit; or None for
            all if the route is no longer valid. The caller then uses `answer`.
        """
        route = self._route
        if (
            route is None
            or not route.is_valid()
            or self._galleries.ready_gallery(route.hosted.name) is not route.hosted
            or self._state.current is not route.state
            or not route.hosted.speed.is_fast
        ):
            self._route = None
            return None
        began = time.monotonic()
        answers = route.answers(messages)
        count = len(answers) - answers.count(None)
        if count:
            route.hosted.speed.record_immediate(time.monotonic() - began, count)
            self._graph.inc(count)
            if sample := route.view.query_sample.draw(count):
                answered = [
                    m for m, answer in zip(messages, answers, strict=True) if answer is not None
                ]
                route.view.query_sample.keep(_values(answered[number] for number in sample))
        return answers

    def route_gallery(self) -> str:
        """Return the gallery that `answer_by_route` answers for; empty without a route."""
        return "" if self._route is None else self._route.hosted.name

    def answer(
        self, gallery: str, space: str, queries: Sequence[VectorQuery]
    ) -> list[bytes | None]:
        """Answer queries by embedding.

        Args:
            gallery: name of the gallery.
            space: id of the queries' space.
            queries: the queries.

        Returns:
            An encoded SearchResponse to each query; None if it needs another thread.
        """
        state, hosted = self._state.current, self._galleries.ready_gallery(gallery)
        if not isinstance(hosted, HostedInFile):
            return [None] * len(queries)
        plan = hosted.plan
        part = plan.answerer.space_part(hosted, space)
        if part is None:
            return [None] * len(queries)
        answer = self.answer_part(hosted, part, queries, on_receiver=True)
        if None not in answer:
            self._route = _compile_route(hosted, plan, part, state)
        return answer

    def answer_part(
        self,
        hosted: HostedInFile,
        part: PlanPart,
        queries: Sequence[VectorQuery],
        *,
        on_receiver: bool = False,
    ) -> list[bytes | None]:
        """Answer queries of one part.

        The caller is a user of the gallery and of the plan.

        Args:
            hosted: the gallery.
            part: the part of its plan.
            queries: the queries.
            on_receiver: the caller receives calls. Only then is the time limited,
                and recorded for the gallery's speed.

        Returns:
            As `answer`.
        """
        no_answers: list[bytes | None] = [None] * len(queries)
        # Read this before the views: parts that are prepared for freed views then land in a freed
        # mapping.
        prepared_parts = hosted.ready
        view = hosted.views().get(part.space)
        if view is None or not hosted.origins.is_loaded(part):
            return no_answers
        ends = self._state.current.ends.get(part.query.space)
        ready = prepared_parts.get(part.space)
        if ready is None or ready.part is not part or ready.ends != ends:
            ready = prepared_parts[part.space] = _prepare(hosted, part, ends)
        snapshot = view.snapshot()
        if (
            (ends is not None and time.time() >= ends)
            or not (hosted.speed.is_quick(snapshot) if on_receiver else is_light(snapshot))
            or not hosted.speed.should_try()
        ):
            return no_answers
        began = time.monotonic()
        answer = _answers(hosted, snapshot, ready, queries)
        if on_receiver:
            hosted.speed.record(time.monotonic() - began, len(queries))
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
        if not snapshot.graphed:
            self._exact.inc(len(vectors))
        else:
            self._graph.inc(len(vectors))
            view.query_sample.see(np.frombuffer(b"".join(vectors), "<f4").reshape(len(vectors), -1))


def _answers(
    hosted: HostedInFile, snapshot: Snapshot, ready: _PreparedPart, queries: Sequence[VectorQuery]
) -> list[bytes | None]:
    compiled = snapshot.compiled
    answers: list[bytes | None] = [None] * len(queries)
    if (
        compiled is not None
        and ready.curves is not None
        and hosted.origins.migrated_labels(ready.part, snapshot) is None
    ):
        answers = compiled.answers(
            queries, hosted.exact, ready.items.encoded_hits, ready.curves, ready.end
        )
    for number, answer in enumerate(answers):
        if answer is not None:
            hosted.speed.record_attempt(in_memory=True)
        else:
            answers[number] = _in_python(hosted, snapshot, ready, *queries[number])
    return answers


def _in_python(
    hosted: HostedInFile,
    snapshot: Snapshot,
    ready: _PreparedPart,
    values: bytes,
    k: int,
    farthest: float,
) -> bytes | None:
    """Answer one query without compiled code, with the same bytes; None if it needs another
    thread.
    """
    if len(values) != 4 * snapshot.spec.dim:
        return None
    try:
        neighbours = hosted.best(ready.part, snapshot, np.frombuffer(values, "<f4")[None], k)
    except InvalidInputError:
        return None
    labels = neighbours.labels[0].tolist()
    while labels and labels[-1] < 0:
        labels.pop()
    hits = ready.items.encode(labels, ready.make)
    hosted.speed.record_attempt(in_memory=hits is not None)
    if hits is None:
        return None
    distances = neighbours.distances[0, : len(labels)]
    return _encoded(ready.part, hits, distances, farthest, exact=hosted.exact) + ready.end


def _prepare(hosted: HostedInFile, part: PlanPart, ends: float | None) -> _PreparedPart:
    end = pb.SearchResponse(release=part.query.release, space=part.query.space)
    if ends is not None:
        end.space_ends_at.FromNanoseconds(int(ends * 1e9))
    curves = {int(ORIGINS[origin]): curve.points() for origin, curve in part.curves.items()}
    return _PreparedPart(
        part,
        hosted.items_of(part.space),
        partial(encode_hit, release=part.release),
        ends,
        end.SerializeToString(),
        curves_of(curves),
    )


def _compile_route(
    hosted: HostedInFile, plan: Plan, part: PlanPart, state: State
) -> _CompiledRoute | None:
    """Make the compiled route of a part; None if a query's answer depends on more than its
    snapshot.
    """
    ready, view = hosted.ready.get(part.space), hosted.views().get(part.space)
    space, exact = part.query.space, hosted.exact
    if view is None or not isinstance(ready, _PreparedPart) or ready.part is not part:
        return None
    snapshot = view.snapshot()
    if snapshot.compiled is None or ready.curves is None or ready.ends is not None:
        return None
    if space in state.ends or plan.heals == part.space:
        return None
    if hosted.origins.migrated_labels(part, snapshot) is not None:
        return None
    answers = snapshot.compiled.route(
        hosted.name,
        space,
        DEFAULT_K,
        MAX_HITS,
        exact,
        ready.items.encoded_hits,
        ready.curves,
        ready.end,
    )
    return _CompiledRoute(answers, hosted, plan, part, view, snapshot, state, exact)


def _values(messages: Iterable[bytes]) -> Vectors:
    """Return the vectors of requests that compiled code has parsed, float32 [q, dim]."""
    assert parse is not None, "compiled code has parsed them before"
    values = [request[2] for request in map(parse, messages) if request is not None]
    return np.frombuffer(b"".join(values), "<f4").reshape(len(values), -1)


def _encoded(
    part: PlanPart, hits: list[HitBytes], distances: Vectors, farthest: float, *, exact: bool
) -> bytes:
    distances_shown = distances if exact else round_distances(distances)
    scores = scores_of(part, [origin_name(hit.origin) for hit in hits], distances_shown)
    values = distances_shown.tolist()
    if farthest < math.inf:
        near = [place for place, distance in enumerate(values) if distance <= farthest]
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
    farthest: float
    call: Unanswered

    def end(self, answer: bytes | None) -> None:
        """Answer the call, None for another thread, and leave the gallery and the plan."""
        _leave(self.hosted, self.plan)
        self.call.done(answer)


class ImageAnswers:
    """Answer queries by one image without holding a thread.

    Images of many calls are decoded and embedded together, then searched as embeddings. A query
    that needs more, or has an error, is left to another thread.
    """

    def __init__(
        self, galleries: GalleryRegistry, immediate: ImmediateAnswers, embedding: Embedding,
        metrics: Metrics,
    ) -> None:  # fmt: skip
        self._galleries = galleries
        self._immediate = immediate
        self._embedding = embedding
        self._queue: ImageQueue[_ImageQuery] = ImageQueue(embedding, metrics, self._answer)

    def close(self) -> None:
        """Stop the threads; waiting queries are left to others."""
        self._queue.close()

    def later(self, gallery: str, image: bytes, k: int, farthest: float) -> Later | None:
        """Return what answers a query later; None if it needs another thread.

        Args:
            gallery: name of the gallery.
            image: the encoded image.
            k: most hits.
            farthest: largest distance of a hit.
        """
        hosted = self._galleries.ready_gallery(gallery)
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
        query = _ImageQuery(hosted, plan, part, k, farthest, call)
        self._queue.add(QueuedImage(query, part.query, image, call.deadline, call.is_wanted))

    def _answer(self, embedded: Sequence[tuple[QueuedImage[_ImageQuery], Vectors | None]]) -> None:
        answers: dict[QueuedImage[_ImageQuery], bytes | None] = {
            waiting: None for waiting, _ in embedded
        }
        try:
            self._search(embedded, answers)
        finally:
            for waiting, answer in answers.items():
                waiting.of.end(answer)

    def _search(
        self,
        embedded: Sequence[tuple[QueuedImage[_ImageQuery], Vectors | None]],
        answers: dict[QueuedImage[_ImageQuery], bytes | None],
    ) -> None:
        rows = {waiting: row for waiting, row in embedded if row is not None}
        groups: dict[tuple[HostedInFile, PlanPart], list[QueuedImage[_ImageQuery]]] = {}
        for waiting in rows:
            groups.setdefault((waiting.of.hosted, waiting.of.part), []).append(waiting)
        for (hosted, part), group in groups.items():
            queries = [(rows[one].tobytes(), one.of.k, one.of.farthest) for one in group]
            group_answers = self._immediate.answer_part(hosted, part, queries)
            answers.update(zip(group, group_answers, strict=True))
        for waiting, row in rows.items():
            if answers[waiting] is None:
                # The thread that answers it finds the embedding there and does not make it again.
                self._embedding.keep(waiting.manifest, waiting.image, row)


def _enter(hosted: Hosted) -> Plan | None:
    """Become a user of a gallery and its plan, and return the plan; None if the gallery is
    closed.
    """
    return hosted.enter_plan() if hosted.users.enter() else None


def _leave(hosted: Hosted, plan: Plan) -> None:
    plan.users.leave()
    hosted.users.leave()
