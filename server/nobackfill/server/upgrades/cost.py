"""What an upgrade of one gallery will cost, measured on a few of its items."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from nobackfill.gallery.neighbours import neighbours_kept
from nobackfill.gallery.search import hnsw
from nobackfill.gallery.search.hnsw import HnswIndex
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.upgrade import Runner
from nobackfill.release.models import CHUNK
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.galleries.hosted_file import SMALL, HostedInFile
from nobackfill.server.upgrades.job import LOOKS
from nobackfill.server.upgrades.throttle import Throttle

# A graph of so many items is built to measure larger ones.
_SAMPLE = 1_500
# How much faster a graph is carried to new vectors than built.
_CARRIED = 20
# What an element of a graph takes beside its vector: links, labels, levels.
_ELEMENT_BYTES = 8 * hnsw.M + 32


Result = TypeVar("Result")


@dataclass(frozen=True)
class Cost:
    """`seconds` until the new space answers; `index_seconds` more until it has a graph of its own,
    built behind the answers. `bytes` added on the disk, vectors and index; `memory_bytes` taken
    beyond what is used now, at the most."""

    items: int = 0
    seconds: float = 0.0
    index_seconds: float = 0.0
    bytes: int = 0
    memory_bytes: int = 0
    left_behind: int = 0


def cost(
    hosted: Hosted, open_runner: Callable[[], Runner], target: SpaceSpec, throttle: Throttle
) -> Cost:
    """With the pauses of `throttle`, on a machine as busy as now. Raises CannotWriteError."""
    runner, opening = _timed(open_runner)
    _, looking = _timed(lambda: neighbours_kept(hosted.store.sample, hosted.spec(), hosted.spec()))
    found = hosted.store.estimate(runner, target)
    count = hosted.store.count() - found.left_behind
    vectors = 4 * target.dim * count
    here = isinstance(hosted, HostedInFile)
    links = _ELEMENT_BYTES * count if here and count >= SMALL else 0
    chunks = math.ceil(found.items / CHUNK)
    carrying = found.seconds + looking * min(chunks, LOOKS)
    inherited, built = _index_seconds(hosted, target, count)
    return Cost(
        items=found.items,
        seconds=opening + carrying * (1 + throttle.pause_per_second) + looking + inherited,
        index_seconds=built,
        # An index file holds links only.
        bytes=found.bytes + links,
        # Graphs hold the vectors: the one that is inherited, and beside it the next one.
        memory_bytes=(2 * (vectors + links) if links else vectors) * here,
        left_behind=found.left_behind,
    )


def _index_seconds(hosted: Hosted, target: SpaceSpec, count: int) -> tuple[float, float]:
    """Until the new space has an index, and then until it has one of its own."""
    if count < SMALL or not isinstance(hosted, HostedInFile):
        return 0.0, 0.0
    spec = hosted.spec()
    labels, vectors, _ = hosted.store.sample(spec.space, spec.space, _SAMPLE)
    _, seconds = _timed(lambda: hnsw.build(spec, labels, vectors))
    # Each insertion walks down a graph whose depth grows with the logarithm of its size.
    growth = count / len(labels) * math.log(count) / math.log(len(labels))
    built = seconds * growth * (1 + target.dim / spec.dim) / 2
    base = hosted.view(spec.space).snapshot().base.index
    if isinstance(base, HnswIndex) and base.spec.metric == target.metric:
        return built / _CARRIED, built
    return built, 0.0


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    began = time.perf_counter()
    return work(), time.perf_counter() - began
