"""Searches that are answered where they arrive: handing one to a thread takes as long as doing it.

Nothing here waits: what is read are references to what never changes (a plan, a snapshot) and the
items that are in memory. Whatever else a search needs, or is wrong with it, is left to a thread.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.search.compiled_search import curves_of
from nobackfill.gallery.search.view import Snapshot
from nobackfill.gallery.store import Item
from nobackfill.server.galleries.galleries import Galleries
from nobackfill.server.galleries.hit_bytes import HitBytes, hit_bytes, joined
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.galleries.items import ItemCache
from nobackfill.server.galleries.plan import Part, Plan
from nobackfill.server.galleries.ranking import rounded, scores_of
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.state import GatewayState
from nobackfill.v1 import search_pb2 as pb
from nobackfill.vectors import Vectors
from nobackfill.wire.values import ORIGINS, origin_name

if TYPE_CHECKING:
    from nobackfill.gallery.search._native import Curves

# More hits than this are encoded on a thread.
_MOST_HITS = 64


@dataclass(frozen=True)
class _Ready:
    """What answers of one part have in common. `end`: what follows the hits, in which the query's
    space ends at `ends`."""

    part: Part
    items: ItemCache
    make: Callable[[Item], HitBytes | None]
    ends: float | None
    end: bytes
    curves: "Curves | None"


class ImmediateAnswers:
    """Answers queries by one embedding."""

    def __init__(self, galleries: Galleries, state: GatewayState, metrics: Metrics) -> None:
        self._galleries = galleries
        self._state = state
        self._exact, self._graph = (metrics.searches.labels(kind) for kind in ("exact", "graph"))

    def answer(
        self, gallery: str, space: str, values: bytes, k: int, farthest: float
    ) -> bytes | None:
        """A SearchResponse of the `k` nearest within `farthest`, or None: ask on a thread."""
        hosted = self._galleries.at_hand(gallery)
        if hosted is None or k > _MOST_HITS:
            return None
        # Taken before the views: what is made ready for one that goes lands in a mapping that goes.
        known = hosted.ready
        part = _part(hosted.plan, space)
        view = None if part is None else hosted.views().get(part.space)
        if part is None or view is None:
            return None
        ends = self._state.now.ends.get(space)
        ready = known.get(part.space)
        if ready is None or ready.part is not part or ready.ends != ends:
            ready = known[part.space] = _ready(hosted, part, ends)
        if ends is not None and time.time() >= ends:
            return None
        snapshot = view.snapshot()
        if not hosted.speed.quick(snapshot) or not hosted.speed.worth_a_try():
            return None
        compiled, answer = snapshot.compiled, None
        began = time.monotonic()
        if compiled is not None and ready.curves is not None:
            answer = compiled.answer(
                values, k, farthest, hosted.exact, ready.items.known, ready.curves, ready.end
            )
        if answer is not None:
            hosted.speed.tried(whole=True)
        else:
            answer = _in_python(hosted, snapshot, ready, values, k, farthest)
        if answer is None:
            return None
        hosted.speed.took(time.monotonic() - began)
        if not snapshot.graphed:
            self._exact.inc()
        else:
            self._graph.inc()
            view.asked.see(np.frombuffer(values, "<f4")[None])
        return answer


def _in_python(
    hosted: Hosted, snapshot: Snapshot, ready: _Ready, values: bytes, k: int, farthest: float
) -> bytes | None:
    """The same bytes; None where there is something to say or to read."""
    if len(values) != 4 * snapshot.spec.dim:
        return None
    try:
        found = snapshot.search(np.frombuffer(values, "<f4")[None], k)
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


def _ready(hosted: Hosted, part: Part, ends: float | None) -> _Ready:
    end = pb.SearchResponse(release=part.query.release, space=part.query.space)
    if ends is not None:
        end.space_ends_at.FromNanoseconds(int(ends * 1e9))
    curves = {int(ORIGINS[origin]): curve.points() for origin, curve in part.curves.items()}
    return _Ready(
        part,
        hosted.items_of(part.space),
        partial(hit_bytes, release=part.release),
        ends,
        end.SerializeToString(),
        curves_of(curves),
    )


def _part(plan: Plan, space: str) -> Part | None:
    """What a query of this space alone is compared with, if that is all one space."""
    if len(plan.parts) == 1 and plan.parts[0].query.space == space:
        return plan.parts[0]
    return plan.alone.get(space)


def _encoded(
    part: Part, hits: list[HitBytes], distances: Vectors, farthest: float, *, exact: bool
) -> bytes:
    shown = distances if exact else rounded(distances)
    scores = scores_of(part, [origin_name(hit.origin) for hit in hits], shown)
    told = shown.tolist()
    if farthest < math.inf:
        # They come nearest first, and rounding keeps the order.
        within = sum(distance <= farthest for distance in told)
        hits, told, scores = hits[:within], told[:within], scores[:within]
    return joined(hits, told, scores)
