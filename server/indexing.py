"""Indexes of live views, made in the background: loaded if good, else built; compacted if due."""

import os
import threading
from collections.abc import Callable, Iterable

import numpy as np
import structlog

from gallery import hnsw
from gallery.exact import ExactIndex
from gallery.index import Index, Labels
from gallery.spec import SpaceSpec
from gallery.view import LiveView
from release.errors import CannotWriteError, NotFoundError, VerificationError
from release.vectors import Vectors
from server.hosted import Hosted

log = structlog.get_logger("server.indexing")

# Fewer vectors than this are searched exactly, faster than by a graph.
SMALL = 2_000
# A base is made anew when so many vectors lie beside it or so large a share of it is dead.
_LARGEST_DELTA = 4_000
_LARGEST_SHARE = 0.2
_EVERY_S = 0.5
_NICE = 10


class Indexing:
    """Looks after every view of every gallery, from one thread."""

    def __init__(self, galleries: Callable[[], Iterable[Hosted]]) -> None:
        self._galleries = galleries
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._work, name="indexing", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End once the present build is done."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _work(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while not self._stopping.is_set():
            for hosted in self._galleries():
                for space, view in hosted.views().items():
                    if not self._stopping.is_set() and due(view):
                        make_index(hosted, space, view)
            self._wake.wait(_EVERY_S)


def due(view: LiveView) -> bool:
    """Whether a view has changed enough since its base was made."""
    snapshot = view.snapshot()
    total = len(snapshot)
    if total < SMALL:
        return False
    if isinstance(snapshot.base.index, ExactIndex):
        return True
    rows = len(snapshot.base.index.labels)
    dead = rows - len(snapshot.base)
    return len(snapshot.delta) > max(_LARGEST_DELTA, _LARGEST_SHARE * rows) or (
        dead > _LARGEST_SHARE * rows
    )


def make_index(hosted: Hosted, space: str, view: LiveView) -> None:
    """Give the view a base of all its vectors: the cached one if it is good, else a new graph."""
    path = hosted.index_path(space)

    def build(spec: SpaceSpec, labels: Labels, vectors: Vectors) -> Index:
        try:
            index = hnsw.load(path, spec)
            if np.array_equal(index.labels, labels) and np.array_equal(index.vectors, vectors):
                return index
        except NotFoundError:
            pass
        except VerificationError as error:
            log.warning("index file refused, building anew", error=str(error))
        index = hnsw.build(spec, labels, vectors)
        try:
            index.save(path)
        except CannotWriteError as error:
            # It is a cache: the next start builds again.
            log.warning("index not saved", error=str(error))
        return index

    view.compact(build)
    log.info("indexed", gallery=hosted.name, items=len(view.snapshot()))
