"""Indexes of live views, made in the background: loaded if good, else built; compacted if due."""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable

import structlog

from gallery import hnsw
from gallery.hnsw import HnswIndex
from gallery.index import Content, Index, Labels
from gallery.spec import SpaceSpec
from gallery.view import LiveView, Snapshot
from release.errors import CannotWriteError
from server.border.metrics import Metrics
from server.border.survival import surviving
from server.galleries.beginnings import SMALL
from server.galleries.hosted import Hosted

log = structlog.get_logger("server.indexing")

# A base is made anew when so many vectors lie beside it or so large a share of it is dead.
_LARGEST_DELTA = 4_000
_LARGEST_SHARE = 0.2
# While a gallery is filled, that keeps its graph from being made over and over. Once nothing
# changed for so long, fewer than this lie beside it: every search compares each of them.
_QUIET_DELTA = 1_000
_QUIET_S = 1.0
# A space that an upgrade fills is searched exactly up to here.
_LARGEST_FILLING = 200_000
_EVERY_S = 0.5
# An index that could not be written, on a full disk say, is tried again after so long.
_UNWRITTEN_S = 20.0
# An index is tuned on queries once so many more were asked, at most so often, and in no more than
# one part of its time in so many.
_ENOUGH_ASKED = 32
_TUNED_EVERY_S = 30.0
_TUNED_SHARE = 50
_NICE = 10
# A gallery whose index cannot be made for a reason nobody foresaw is tried again after so long.
_REST_S = 30.0


class Indexing:
    """Looks after every view of every gallery, from one thread."""

    def __init__(self, galleries: Callable[[], Iterable[Hosted]], metrics: Metrics) -> None:
        self._galleries = galleries
        self._metrics = metrics
        # Views whose index is not on the disk: the snapshot last seen, and since when. Weak: a view
        # that a swap left behind must not keep its vectors and its graph here.
        self._since: weakref.WeakKeyDictionary[LiveView, tuple[weakref.ref[Snapshot], float]] = (
            weakref.WeakKeyDictionary()
        )
        # Views whose index was tuned on what was asked: how much had been by then, and from when on
        # that is worth its time again.
        self._tuned: weakref.WeakKeyDictionary[LiveView, tuple[int, float]] = (
            weakref.WeakKeyDictionary()
        )
        # Galleries that failed for a reason nobody foresaw: left alone until then.
        self._resting: weakref.WeakKeyDictionary[Hosted, float] = weakref.WeakKeyDictionary()
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._work, name="indexing", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End; a build under way is given up."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _work(self) -> None:
        with surviving(self._metrics, "indexing"):
            give_way()
        while not self._stopping.is_set():
            with surviving(self._metrics, "indexing"):
                for hosted in self._galleries():
                    self._try(hosted)
            self._wake.wait(_EVERY_S)

    def _try(self, hosted: Hosted) -> None:
        """What fails in one gallery keeps no other from its index, and is tried again later."""
        if time.monotonic() < self._resting.get(hosted, 0.0):
            return
        self._resting[hosted] = time.monotonic() + _REST_S
        with surviving(self._metrics, "indexing"):
            self._look_after(hosted)
            del self._resting[hosted]

    def _look_after(self, hosted: Hosted) -> None:
        for space, view in hosted.views().items():
            if space not in hosted.plan.alone and len(view.snapshot()) < _LARGEST_FILLING:
                # An upgrade fills it; it inherits an index when it is whole.
                continue
            wanted = due(view) or self._settled(hosted, space, view)
            if wanted and not self._stopping.is_set():
                self._make(hosted, space, view)
            elif self._asked_anew(view):
                self._tune(hosted, view)

    def _settled(self, hosted: Hosted, space: str, view: LiveView) -> bool:
        """Whether a graph has no file or much beside it, and nothing changed for a while that would
        cost it again."""
        snapshot = view.snapshot()
        base = snapshot.base.index
        behind = len(snapshot.delta) > _QUIET_DELTA
        if not isinstance(base, HnswIndex) or (hosted.index_path(space).exists() and not behind):
            self._since.pop(view, None)
            return False
        seen, since = self._since.get(view, (None, 0.0))
        if seen is None or seen() is not snapshot:
            self._since[view] = (weakref.ref(snapshot), time.monotonic())
            return False
        if time.monotonic() - since < (_QUIET_S if behind else _UNWRITTEN_S):
            return False
        # A disk that is full is tried again after another while.
        del self._since[view]
        return True

    def _asked_anew(self, view: LiveView) -> bool:
        """Whether a graph was asked enough since it was tuned, and that is not long ago."""
        if not isinstance(view.snapshot().base.index, HnswIndex):
            return False
        seen, rested = self._tuned.get(view, (0, 0.0))
        return view.asked.seen - seen >= _ENOUGH_ASKED and time.monotonic() >= rested

    def _tune(self, hosted: Hosted, view: LiveView) -> None:
        began, seen = time.monotonic(), view.asked.seen
        with contextlib.suppress(_StoppedError):
            view.tune(lambda base: tuned(base, view, self._giving_up(hosted)))
        ended = time.monotonic()
        rest = max(_TUNED_EVERY_S, _TUNED_SHARE * (ended - began))
        self._tuned[view] = seen, ended + rest

    def _make(self, hosted: Hosted, space: str, view: LiveView) -> None:
        with contextlib.suppress(_StoppedError):
            make_index(hosted, space, view, self._giving_up(hosted))

    def _giving_up(self, hosted: Hosted) -> Callable[[], None]:
        def give_up() -> None:
            if self._stopping.is_set() or hosted.leaving:
                raise _StoppedError

        return give_up


class _StoppedError(Exception):
    """The gateway ends, and the index is made at the next start; or the gallery is deleted."""


def give_way() -> None:
    """Let searches go before this thread, and before the processes that it starts from now on."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


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
    return len(snapshot.delta) > max(_LARGEST_DELTA, _LARGEST_SHARE * len(base.labels)) or (
        dead > _LARGEST_SHARE * len(base.labels)
    )


def make_index(
    hosted: Hosted, space: str, view: LiveView, between: Callable[[], None] = lambda: None
) -> None:
    """Give the view a base of all its vectors: its own, renewed, or a fresh graph.

    `between` is called now and then, and may raise to give up.
    """
    base = view.snapshot().base.index
    old = base if isinstance(base, HnswIndex) and base.fresh else None
    _compact(hosted, view, old, between)
    save_index(hosted, space, view)


def inherit_index(
    hosted: Hosted,
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
    hosted: Hosted,
    view: LiveView,
    old: HnswIndex | None,
    between: Callable[[], None] = lambda: None,
) -> None:
    began = time.monotonic()

    def build(spec: SpaceSpec, labels: Labels, vectors: Content) -> Index:
        return tuned(hnsw.renew(spec, labels, vectors, old=old, between=between), view, between)

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


def save_index(hosted: Hosted, space: str, view: LiveView) -> None:
    """Keep the base for the next start: changes since are found in the gallery itself."""
    index = view.snapshot().base.index
    try:
        if isinstance(index, HnswIndex):
            index.save(hosted.index_path(space))
    except CannotWriteError as error:
        # It is a cache: the next start builds again.
        log.warning("index not saved", error=str(error))
