"""The index that a view begins with: what the gallery's folder keeps, or one to inherit."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import structlog

from nobackfill.errors import NotFoundError, VerificationError
from nobackfill.gallery.search import hnsw
from nobackfill.gallery.search.hnsw import HnswIndex
from nobackfill.gallery.search.index import Content, Index, Labels, Rows
from nobackfill.gallery.search.view import LiveView, Opener
from nobackfill.gallery.spec import SpaceSpec

log = structlog.get_logger("server.indexing")

# Fewer vectors than this are searched exactly, faster than by a graph.
SMALL = 2_000


def beginning(
    path: Path, source: LiveView | None = None, between: Callable[[], None] = lambda: None
) -> Opener:
    """Take the index at `path`, with tombstones for what is gone and what came since beside it;
    else the links of `source`'s. Neither builds anything. `between` may raise to give up."""

    def begin(spec: SpaceSpec, labels: Labels, vectors: Content) -> tuple[Index, Rows]:
        if len(labels) < SMALL:
            raise NotFoundError("searched exactly: a few vectors only")
        with contextlib.suppress(NotFoundError):
            try:
                return hnsw.load(path, spec, labels, vectors)
            except VerificationError as error:
                log.warning("index file refused, building anew", error=str(error))
                path.unlink(missing_ok=True)
        base = None if source is None else source.snapshot().base.index
        if not isinstance(base, HnswIndex):
            raise NotFoundError("there is no graph to inherit")
        return hnsw.revive(base.skeleton(sums=False), spec, labels, vectors, between)

    return begin
