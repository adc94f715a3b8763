"""Bases of live views: a graph that is made, renewed or inherited, tuned, and kept in a file."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from nobackfill.errors import CannotWriteError
from nobackfill.gallery.search import hnsw
from nobackfill.gallery.search.hnsw import HnswIndex
from nobackfill.gallery.search.index import Content, Index, Labels
from nobackfill.gallery.search.view import LiveView
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.server.galleries.initial_index import SMALL

if TYPE_CHECKING:
    from nobackfill.server.galleries.hosted import Hosted

log = structlog.get_logger("server.indexing")

# A base is made anew when so many vectors lie beside it or so large a share of it is dead.
LARGEST_DELTA = 4_000
_LARGEST_SHARE = 0.2


def due(view: LiveView) -> bool:
    """Whether a view has changed enough since its base was made, or its base was only carried."""
    snapshot = view.snapshot()
    total, base = len(snapshot), snapshot.base.index
    if total < SMALL:
        return False
    if not isinstance(base, HnswIndex) or not base.fresh:
        return True
    # Also what was deleted before the gateway started.
    dead = base.graph.get_current_count() - len(snapshot.base)
    return len(snapshot.delta) > max(LARGEST_DELTA, _LARGEST_SHARE * len(base.labels)) or (
        dead > _LARGEST_SHARE * len(base.labels)
    )


def make_index(
    hosted: "Hosted",
    space: str,
    view: LiveView,
    between: Callable[[], None],
    threads: hnsw.Threads,
) -> None:
    """Give the view a base of all its vectors: its own, renewed, or a fresh graph.

    `between` is called now and then, and may raise to give up; `threads` as in hnsw.build.
    """
    base = view.snapshot().base.index
    old = base if isinstance(base, HnswIndex) and base.fresh else None
    _compact(hosted, view, old, between, threads)
    save_index(hosted, space, view)


def inherit_index(
    hosted: "Hosted",
    space: str,
    view: LiveView,
    source: LiveView,
    between: Callable[[], None] = lambda: None,
) -> None:
    """After an upgrade: the graph of the space before, over the new vectors, unless the view began
    with one. It serves at once; a fresh one follows in the background. `between` as in
    `make_index`."""
    if isinstance(view.snapshot().base.index, HnswIndex) or not due(view):
        save_index(hosted, space, view)
        return
    base = source.snapshot().base.index
    _compact(hosted, view, base if isinstance(base, HnswIndex) else None, between)
    save_index(hosted, space, view)


def _compact(
    hosted: "Hosted",
    view: LiveView,
    old: HnswIndex | None,
    between: Callable[[], None] = lambda: None,
    threads: hnsw.Threads = hnsw.one_thread,
) -> None:
    began = time.monotonic()

    def build(spec: SpaceSpec, labels: Labels, vectors: Content) -> Index:
        base = hnsw.renew(spec, labels, vectors, old=old, threads=threads, between=between)
        return tuned(base, view, between)

    view.compact(build)
    seconds = round(time.monotonic() - began, 3)
    log.info("indexed", gallery=hosted.name, items=len(view.snapshot()), seconds=seconds)


def tuned(base: Index, view: LiveView, between: Callable[[], None]) -> Index:
    """A graph as wide as finds what is really asked of the view; `between` as in `make_index`."""
    queries = view.asked.sample()
    if not isinstance(base, HnswIndex) or not len(queries):
        return base
    index = hnsw.tuned(base, queries, between)
    if index.ef != base.ef:
        log.info("tuned", ef=index.ef, before=base.ef)
    return index


def save_index(hosted: "Hosted", space: str, view: LiveView) -> None:
    """Keep the base for the next start: changes since are found in the gallery itself."""
    index = view.snapshot().base.index
    try:
        if isinstance(index, HnswIndex):
            index.save(hosted.index_path(space))
    except CannotWriteError as error:
        # It is a cache: the next start builds again.
        log.warning("index not saved", error=str(error))
