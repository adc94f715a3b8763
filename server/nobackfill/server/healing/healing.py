"""Galleries that heal: what queries bring up is embedded again from its source, and kept.

A healer is made of a gallery's plan and of its source, and goes with them. One thread of low
priority makes what is new, lets go of what went, and embeds the rest in the background.
"""

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nobackfill.errors import (
    BusyError,
    InvalidInputError,
    NobackfillError,
    NotFoundError,
    UnavailableError,
)
from nobackfill.gallery.filters import Matches
from nobackfill.gallery.reading import StoredItem
from nobackfill.gallery.search import index
from nobackfill.gallery.search.index import Labels, Neighbours, give_way
from nobackfill.gallery.spec import space_of
from nobackfill.processes import DaemonThreads
from nobackfill.release.manifest import Manifest
from nobackfill.server.embedding.embedding import Embedding
from nobackfill.server.galleries.answering import (
    PlainAnswerer,
    Question,
    find_nearest,
    matches_of,
    rank_nearest,
    valid_questions,
)
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.galleries.hosted_file import HostedInFile
from nobackfill.server.galleries.plan import SOURCE, QueryAnswer, SearchRequest
from nobackfill.server.galleries.ranking import PlanPart, RankedHit, SearchResult, rank
from nobackfill.server.grpc import context
from nobackfill.server.grpc.context import error_boundary
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.healing.healer import Healer, HealingProgress
from nobackfill.server.healing.ledger import FileLedger, HealingLedger
from nobackfill.server.healing.registration import HealingSource, Places
from nobackfill.server.settings import Settings
from nobackfill.serving.fusion import candidates
from nobackfill.serving.reembedding import EmbeddingCost
from nobackfill.serving.sources import Items

# Answers of a gallery that heals: candidates embedded again, then ranked by what there is.

# A question, and the labels of the items that are ranked for it.
Candidates = tuple[Question, list[int]]

# Candidates that are embedded again and read at once, those of one question in any case: a batch
# may have half a million.
_AT_ONCE = 4096


def _candidates(
    healer: Healer, questions: Sequence[Question], allowed: Matches | None
) -> list[Candidates | InvalidInputError]:
    """Collect the items that are ranked for each question. Raises DeadlineError, CancelledError."""
    wide = [replace(question, k=max(question.k, healer.source.hits)) for question in questions]
    native = healer.ledger.native(allowed)
    return [
        answer
        if isinstance(answer, InvalidInputError)
        else (question, _labels(one, answer[0][0].labels[answer[1]], native))
        for question, one, answer in zip(questions, wide, find_nearest(wide, allowed), strict=True)
    ]


def _labels(question: Question, near: Labels, native: Matches | None) -> list[int]:
    """Choose candidates: the items that are `near`, found together with those of other questions,
    and the nearest native ones. By distance alone, carried items hide native ones that are as near
    in truth (docs/adr/0024)."""

    def nearest_native(count: int) -> Labels:
        if native is None:
            return near[:0]
        context.current().check()
        search = question.parts, question.vectors, count, native, question.ef
        found: Labels = question.hosted.search(*search)[0].labels[0]
        return found

    chosen = candidates(lambda _: near, nearest_native, count=question.k)
    return [int(label) for label in chosen if label >= 0]


def _groups(near: Sequence[Candidates]) -> Iterator[Sequence[Candidates]]:
    """Questions that are answered together, by what their candidates take."""
    first, many = 0, 0
    for number, (_, labels) in enumerate(near):
        if number > first and many + len(labels) > _AT_ONCE:
            yield near[first:number]
            first, many = number, 0
        many += len(labels)
    if near:
        yield near[first:]


def _answered(healer: Healer, near: Sequence[Candidates], end: float) -> Iterator[SearchResult]:
    """Answer questions by the vectors that their candidates have once the carried ones among the
    first are embedded again, or at the `end` of the monotonic clock."""
    ranked = _ranked(near)
    first = [hit for hits in ranked for hit in hits[: healer.source.hits]]
    carried = {hit.item.label: hit.item.id for hit in first if hit.origin == "upgraded"}
    if carried:
        healer.ask(carried, end - time.monotonic())
        ranked = _ranked(near)
    for (question, _), hits in zip(near, ranked, strict=True):
        query = question.parts[0].query
        yield SearchResult(hits[: question.k], query.release, query.space)


def _ranked(near: Sequence[Candidates]) -> list[list[RankedHit]]:
    """Rank the candidates of each question by the vectors that they have now."""
    hosted, part = near[0][0].hosted, near[0][0].parts[0]
    labels = np.array(sorted({label for _, some in near for label in some}), np.int64)
    stored = hosted.store.stored(labels, part.space)
    metric = space_of(hosted.spaces(), part.space).spec.metric
    origins = dict(zip(stored.labels.tolist(), stored.origins, strict=True))

    def items(some: list[int], space: str) -> list[StoredItem | None]:
        # Their vectors' own origins, whatever happens meanwhile.
        return [
            None if one is None else replace(one, origin=origins[one.label])
            for one in hosted.items(some, space)
        ]

    found = []
    for question, some in near:
        rows = np.flatnonzero(np.isin(stored.labels, some))
        apart = index.to_one(metric, question.vectors[0], stored.embedding[rows])
        order = np.lexsort((stored.labels[rows], apart))
        there = Neighbours(stored.labels[rows][order][None], apart[order][None])
        # By scores, as distances to carried and to native vectors do not compare.
        found.append(rank([part], [there], 0, len(order), items, exact=hosted.exact, by_score=True))
    return found


# Metrics of galleries that heal.


class HealingSeries(Collector):
    """Metrics of all galleries with a source together, computed when they are read."""

    def __init__(self, progress: Callable[[], Iterable[HealingProgress]]) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._shown = {"carried": 0, "native": 0}

    def count(self, answers: Iterable[SearchResult]) -> None:
        """Count hits that are shown, by the origin of their vectors."""
        hits = [hit for one in answers for hit in one.hits]
        carried = sum(hit.origin == "upgraded" for hit in hits)
        with self._lock:
            self._shown["carried"] += carried
            self._shown["native"] += len(hits) - carried

    def collect(self) -> Iterator[Metric]:
        seen = list(self._progress())
        items = GaugeMetricFamily(
            "nobackfill_healing_items",
            "Items of galleries with a source: carried by an upgrade, or embedded by the release.",
            labels=["origin"],
        )
        carried = sum(one.carried or 0 for one in seen)
        items.add_metric(["carried"], carried)
        items.add_metric(["native"], sum(one.items for one in seen) - carried)
        yield items
        shown = CounterMetricFamily(
            "nobackfill_healing_hits",
            "Hits shown by galleries with a source, by what they were ranked by.",
            labels=["origin"],
        )
        for origin, count in self._shown.items():
            shown.add_metric([origin], count)
        yield shown
        made = CounterMetricFamily(
            "nobackfill_healing_embedded",
            "Items embedded again from their source, by what became of them.",
            labels=["outcome"],
        )
        made.add_metric(["kept"], sum(one.cost.embedded for one in seen))
        made.add_metric(["failed"], sum(one.cost.failed for one in seen))
        yield made
        yield CounterMetricFamily(
            "nobackfill_healing_read_bytes", "Bytes read from sources.",
            value=sum(one.cost.bytes for one in seen),
        )  # fmt: skip
        yield CounterMetricFamily(
            "nobackfill_healing_seconds", "Seconds of threads that read and embedded again.",
            value=sum(one.cost.seconds for one in seen),
        )  # fmt: skip
        yield GaugeMetricFamily(
            "nobackfill_healing_budget_left", "Items that today's budgets have room for.",
            value=sum(max(0, one.a_day - one.today) for one in seen),
        )  # fmt: skip


log = structlog.get_logger("server.healing")

_EVERY_S = 0.5
# A search waits so long for a source to be opened; the gateway's end for batches that have begun.
_OPENED_S, _ENDED_S = 2.0, 3.0
# Where a source cannot be opened, or its file not be written, it is tried again after so long.
_AGAIN_S = 30.0
# The share of a call's time that it may wait for its hits.
_SHARE = 0.8


class HealingAnswerer:
    """Embeds hits again before they are shown, until nothing is left that was carried."""

    def __init__(self, healing: "Healing", plain: PlainAnswerer, space: str) -> None:
        """`space`: whose carried vectors are made anew."""
        self._healing, self._plain, self._space = healing, plain, space

    def answer(self, hosted: Hosted, request: SearchRequest) -> list[QueryAnswer]:
        """Raises as Searching.batch."""
        questions = self._plain.questions(hosted, request)
        answers: dict[Question, QueryAnswer] = {}
        healed = [
            one for one in valid_questions(questions) if request.heal and self._heals(hosted, one)
        ]
        if healed:
            with context.part("search"):
                found = self._healing.find(healed, matches_of(hosted, request.filtered))
            answers.update(zip(healed, found, strict=True))
        left = [one for one in valid_questions(questions) if one not in answers]
        answers |= self._plain.find(hosted, left, request)
        return [one if isinstance(one, InvalidInputError) else answers[one] for one in questions]

    def image_part(self, hosted: Hosted) -> PlanPart | None:
        return self._unless_healed(hosted, self._plain.image_part(hosted))

    def space_part(self, hosted: Hosted, space: str) -> PlanPart | None:
        return self._unless_healed(hosted, self._plain.space_part(hosted, space))

    def _unless_healed(self, hosted: Hosted, part: PlanPart | None) -> PlanPart | None:
        heals = part is not None and part.space == self._space
        return None if heals and not self._healing.whole(hosted, self._space) else part

    def _heals(self, hosted: Hosted, question: Question) -> bool:
        """Return whether it is asked in the space's own release, and hits may have been carried."""
        part = question.parts[0]
        own = len(question.parts) == 1 and part.query.space == part.space == self._space
        return own and not self._healing.whole(hosted, self._space)


class Healing:
    """The healers of galleries that have a source, and the thread that embeds in the background."""

    def __init__(self, embedding: Embedding, settings: Settings, metrics: Metrics) -> None:
        self._embedding, self._metrics = embedding, metrics
        self._places = Places(
            settings.item_folders, settings.item_hosts, columns=settings.item_columns,
            functions=settings.item_functions,
        )  # fmt: skip
        self._series = HealingSeries(self.all_progress)
        metrics.registry.register(self._series)
        self._lock = threading.Lock()
        self._healers: WeakKeyDictionary[Hosted, Healer] = WeakKeyDictionary()
        # Held while a gallery's is made, which may wait for a folder on a network.
        self._making: WeakKeyDictionary[Hosted, threading.Lock] = WeakKeyDictionary()
        self._trouble: WeakKeyDictionary[Hosted, float] = WeakKeyDictionary()
        # Replaced healers whose batches have not ended yet.
        self._replaced: list[Healer] = []
        # Sources that are being opened.
        self._opening: dict[HealingSource, Future[Items]] = {}
        self._past = EmbeddingCost()
        self._stopping = threading.Event()
        self._galleries: Callable[[], Iterable[Hosted]] = tuple
        self._thread = threading.Thread(target=self._run, name="healing", daemon=True)

    @contextlib.contextmanager
    def running(self, galleries: Callable[[], Iterable[Hosted]]) -> Iterator[None]:
        """Heal in the background to the end of the block. Batches that have begun by then are
        finished, unless their source hangs."""
        self._galleries = galleries
        self._thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            with self._lock:
                for hosted in list(self._healers):
                    self._replace(hosted)
            self._let_go(_ENDED_S)
            self._thread.join()

    def answerer(self, plain: PlainAnswerer, space: str) -> HealingAnswerer:
        """Make the answerer of a plan that heals a space."""
        return HealingAnswerer(self, plain, space)

    def whole(self, hosted: Hosted, space: str) -> bool:
        """Return whether no carried item is left in a space that heals, as far as is known; asked
        for each query that might be answered quickly."""
        healer = self._healers.get(hosted)
        return healer is not None and healer.space == space and healer.whole

    def find(self, questions: Sequence[Question], allowed: Matches | None) -> list[QueryAnswer]:
        """Answer questions in one space that heals."""
        hosted, part = questions[0].hosted, questions[0].parts[0]
        healer = self._healer(hosted, part.query)
        if healer is None:
            answers = find_nearest(questions, allowed)
            return [rank_nearest(q, a) for q, a in zip(questions, answers, strict=True)]
        near = _candidates(healer, questions, allowed)
        # All of them together wait as long as one.
        patience = min(healer.source.seconds, _SHARE * context.current().remaining())
        end, found = time.monotonic() + patience, list[SearchResult]()
        for group in _groups([one for one in near if not isinstance(one, InvalidInputError)]):
            context.current().check()
            found += _answered(healer, group, end)
        self._series.count(found)
        healed = iter(found)
        return [one if isinstance(one, InvalidInputError) else next(healed) for one in near]

    def progress(self, hosted: Hosted) -> HealingProgress | None:
        """Report on a gallery that has a source; None for another."""
        if hosted.plan.heals is None:
            return None
        healer = self._healer(hosted, hosted.plan.query)
        try:
            return None if healer is None else healer.progress()
        except NotFoundError:
            # It was replaced a moment ago.
            return None

    def all_progress(self) -> Iterator[HealingProgress]:
        """Report on every gallery that heals, and on the cost of those that no longer do."""
        with self._lock:
            costs = [replace(self._past), *(one.cost for one in self._replaced)]
            healers = list(self._healers.values())
        for cost in costs:
            yield HealingProgress(0, 0, 0, 0, cost)
        for healer in healers:
            with contextlib.suppress(NobackfillError):
                yield healer.progress()

    def _healer(self, hosted: Hosted, manifest: Manifest) -> Healer | None:
        """Return the healer of the gallery's present space and source; None: it has none now."""
        source = hosted.state(SOURCE)
        if source is None or hosted.is_closing or time.monotonic() < self._trouble.get(hosted, 0.0):
            return None
        given = HealingSource.from_state(source)
        known = self._healers.get(hosted)
        if known is not None and (known.space, known.source) == (manifest.space, given):
            return known
        with self._lock:
            making = self._making.setdefault(hosted, threading.Lock())
        with making:
            known = self._healers.get(hosted)
            if known is not None and (known.space, known.source) == (manifest.space, given):
                return known
            if time.monotonic() < self._trouble.get(hosted, 0.0):
                return None
            return self._new(hosted, manifest, given)

    def _new(self, hosted: Hosted, manifest: Manifest, source: HealingSource) -> Healer | None:
        """Make a gallery's healer in place of the last one; under the gallery's own lock."""
        made = None
        try:
            items, ledger = self.open(source, _OPENED_S), _ledger(hosted, manifest.space)
            made = Healer(hosted, manifest, self._embedding, source, items, ledger)
        except (NobackfillError, OSError, sqlite3.Error) as error:
            log.error("source not usable", gallery=hosted.name, error=str(error))
            self._trouble[hosted] = time.monotonic() + _AGAIN_S
        with self._lock:
            self._replace(hosted)
            if made is None:
                return None
            if not self._stopping.is_set():
                self._healers[hosted] = made
                return made
        made.close(0.0)
        return None

    def open(self, source: HealingSource, seconds: float) -> Items:
        """Raises as Places.open, and UnavailableError for a source that is not open within so many
        seconds, such as a folder of a network that is away: a thread goes on opening it, whose
        result the next call gets."""
        with self._lock:
            opening = self._opening.get(source)
            if opening is None:
                opening = DaemonThreads(1, "source").submit(partial(self._places.open, source))
                self._opening[source] = opening
        if not wait([opening], seconds).done:
            raise UnavailableError(
                f"source: {source.address[:80]!r} cannot be opened within {seconds:g} s; look "
                "whether its host or its file system answers"
            )
        with self._lock:
            self._opening.pop(source, None)
        return opening.result()

    def _replace(self, hosted: Hosted) -> None:
        """Retire a gallery's healer; under the lock."""
        if (healer := self._healers.pop(hosted, None)) is not None:
            self._replaced.append(healer)

    def _let_go(self, seconds: float = 0.0) -> None:
        """Close retired healers whose batches end within so many seconds all together; try the
        others the next time."""
        end, replaced = time.monotonic() + seconds, list(self._replaced)
        for healer in replaced:
            healer.close(0.0)
        for healer in replaced:
            if not healer.close(max(0.0, end - time.monotonic())):
                if seconds:
                    log.warning("a source hangs, nobody waits for it")
                continue
            cost, past = healer.cost, self._past
            with self._lock:
                # At a stop two threads may end the same one.
                if healer in self._replaced:
                    self._replaced.remove(healer)
                    past.embedded += cost.embedded
                    past.failed += cost.failed
                    past.bytes += cost.bytes
                    past.seconds += cost.seconds

    def _run(self) -> None:
        with error_boundary(self._metrics, "healing"):
            give_way()
        while not self._stopping.is_set():
            worked = 0.0
            with error_boundary(self._metrics, "healing"):
                worked = self._round()
            # Searches come first: it rests as long as it works. Nobody's gallery is in use then.
            self._stopping.wait(worked or _EVERY_S)

    def _round(self) -> float:
        """Heal a few items of each gallery; return the seconds spent where there may be more."""
        worked, seen = 0.0, set[Hosted]()
        for hosted in self._galleries():
            if hosted.plan.heals is None or self._stopping.is_set():
                continue
            seen.add(hosted)
            began = time.monotonic()
            # An error of one gallery keeps no other from healing.
            with error_boundary(self._metrics, "healing"):
                if self._heal_some(hosted):
                    worked += time.monotonic() - began
        with self._lock:
            for hosted in list(self._healers):
                if hosted not in seen and (hosted.is_closing or hosted.state(SOURCE) is None):
                    self._replace(hosted)
        self._let_go()
        return worked

    def _heal_some(self, hosted: Hosted) -> bool:
        """Heal a few items of one gallery; return whether there may be more."""
        with hosted.using() as plan:
            healer = self._healer(hosted, plan.query) if plan.heals else None
        if healer is None:
            return False
        more = False
        # Busy, or replaced meanwhile.
        with contextlib.suppress(BusyError, NotFoundError):
            healer.ledger.load()
            more = healer.heal_some()
        return more


def _ledger(hosted: Hosted, space: str) -> HealingLedger:
    if isinstance(hosted, HostedInFile):
        return FileLedger(hosted.folder, hosted.store, space)
    # It needs the extra `postgres`.
    from nobackfill.server.stores.postgresql.gallery import PostgresqlGallery
    from nobackfill.server.stores.postgresql.ledger import DatabaseLedger

    assert isinstance(hosted.store, PostgresqlGallery), "there is no third kind"
    return DatabaseLedger(hosted.store, space)
