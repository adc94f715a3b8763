"""Re-embed what queries find, from the gallery's source, and keep the new vectors.

A healer belongs to a gallery's plan and source, and is replaced with them. One thread of low
priority makes new healers, closes old ones, and re-embeds the remaining items in the background.
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
    VerificationError,
)
from nobackfill.gallery.filters import Matches
from nobackfill.gallery.search import index
from nobackfill.gallery.search.index import Labels, Neighbours, lower_thread_priority
from nobackfill.gallery.spec import select_space
from nobackfill.gallery.sqlite_file import StoredItem
from nobackfill.processes import DaemonThreads
from nobackfill.release.manifest import Manifest
from nobackfill.server.embedding.embedding import EmbeddingService
from nobackfill.server.galleries.answering import (
    EmbeddedQuery,
    PlainAnswerer,
    accepted_queries,
    find_nearest,
    matching_items,
    rank_hits,
    rank_nearest,
)
from nobackfill.server.galleries.hosted import HostedGallery
from nobackfill.server.galleries.hosted_file import HostedInFile
from nobackfill.server.galleries.plan import (
    SOURCE_KEY,
    PlanPart,
    QueryAnswer,
    RankedHit,
    SearchRequest,
    SearchResult,
)
from nobackfill.server.grpc import context
from nobackfill.server.grpc.context import error_boundary
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.healing.healer import Healer, HealingProgress
from nobackfill.server.healing.ledger import FileLedger, HealingLedger
from nobackfill.server.healing.registration import AllowedSources, HealingSource
from nobackfill.server.settings import Settings
from nobackfill.serving.fusion import collect_candidates
from nobackfill.serving.reembedding import EmbeddingCost
from nobackfill.serving.sources import ItemSource

# A question, and the labels of the items that are ranked for it.
Candidates = tuple[EmbeddedQuery, list[int]]

# Most candidates that are re-embedded and read at once, except for a single question: a batch may
# have half a million.
_MAX_CANDIDATES = 4096


def _collect_candidates(
    healer: Healer, questions: Sequence[EmbeddedQuery], matches: Matches | None
) -> list[Candidates | InvalidInputError]:
    """Collect the items to rank for each question.

    Raises:
        DeadlineError: the call's time is over.
        CancelledError: the caller has cancelled the call.
    """
    wide_questions = [
        replace(question, k=max(question.k, healer.source.hits)) for question in questions
    ]
    native = healer.ledger.native_matches(matches)
    return [
        answer
        if isinstance(answer, InvalidInputError)
        else (question, _candidate_labels(wide_question, answer[0][0].labels[answer[1]], native))
        for question, wide_question, answer in zip(
            questions, wide_questions, find_nearest(wide_questions, matches), strict=True
        )
    ]


def _candidate_labels(
    question: EmbeddedQuery, nearest: Labels, native: Matches | None
) -> list[int]:
    """Choose the candidates of a question: its nearest items, and its nearest native items.

    By distance alone, migrated items hide native ones that are truly as near (docs/adr/0024).
    """

    def nearest_native(count: int) -> Labels:
        if native is None:
            return nearest[:0]
        context.current_call().check()
        search = question.parts, question.vectors, count, native, question.ef
        labels: Labels = question.hosted.search(*search)[0].labels[0]
        return labels

    selection = collect_candidates(lambda _: nearest, nearest_native, count=question.k)
    return [int(label) for label in selection if label >= 0]


def _split_by_candidates(pairs: Sequence[Candidates]) -> Iterator[Sequence[Candidates]]:
    """Split questions into groups, by the number of their candidates."""
    first, total = 0, 0
    for number, (_, labels) in enumerate(pairs):
        if number > first and total + len(labels) > _MAX_CANDIDATES:
            yield pairs[first:number]
            first, total = number, 0
        total += len(labels)
    if pairs:
        yield pairs[first:]


def _answer_from_candidates(
    healer: Healer, pairs: Sequence[Candidates], end: float
) -> Iterator[SearchResult]:
    """Answer questions by the present vectors of their candidates.

    First re-embed the migrated ones among the first hits, at most until `end` on the monotonic
    clock.
    """
    ranked = _rank_candidates(pairs)
    first_hits = [hit for hits in ranked for hit in hits[: healer.source.hits]]
    migrated = {hit.item.label: hit.item.id for hit in first_hits if hit.origin == "upgraded"}
    if migrated:
        healer.reembed_within_limit(migrated, end - time.monotonic())
        ranked = _rank_candidates(pairs)
    for (question, _), hits in zip(pairs, ranked, strict=True):
        query = question.parts[0].query_manifest
        yield SearchResult(hits[: question.k], query.release, query.space)


def _rank_candidates(pairs: Sequence[Candidates]) -> list[list[RankedHit]]:
    """Rank the candidates of each question by their present vectors."""
    hosted, part = pairs[0][0].hosted, pairs[0][0].parts[0]
    labels = np.array(
        sorted({label for _, candidates_of in pairs for label in candidates_of}), np.int64
    )
    stored = hosted.store.stored_vectors(labels, part.space)
    metric = select_space(hosted.spaces(), part.space).spec.metric
    origins = dict(zip(stored.labels.tolist(), stored.origins, strict=True))

    def items(candidates_of: list[int], space: str) -> list[StoredItem | None]:
        # The origins of the vectors that were read, even if they change now.
        return [
            None if item is None else replace(item, origin=origins[item.label])
            for item in hosted.items(candidates_of, space)
        ]

    ranked = []
    for question, candidates_of in pairs:
        rows = np.flatnonzero(np.isin(stored.labels, candidates_of))
        distances = index.distances_to_query(metric, question.vectors[0], stored.embedding[rows])
        order = np.lexsort((stored.labels[rows], distances))
        neighbours = Neighbours(stored.labels[rows][order][None], distances[order][None])
        # Ranked by score, as distances to migrated and to native vectors do not compare.
        exact = hosted.exact_distances
        ranked.append(
            rank_hits([part], [neighbours], 0, len(order), items, exact=exact, by_score=True)
        )
    return ranked


class HealingSeries(Collector):
    """Export metrics of all galleries with a source, computed at a scrape."""

    def __init__(self, progress: Callable[[], Iterable[HealingProgress]]) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._hits = {"carried": 0, "native": 0}

    def count_hits_by_origin(self, answers: Iterable[SearchResult]) -> None:
        """Count the hits of answers, by the origin of their vectors.

        They are summed since the start of the process. Any origin but a migrated one counts as
        native. Any thread may call it.
        """
        hits = [hit for answer in answers for hit in answer.hits]
        migrated = sum(hit.origin == "upgraded" for hit in hits)
        with self._lock:
            self._hits["carried"] += migrated
            self._hits["native"] += len(hits) - migrated

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of items, hits, outcomes, bytes, seconds and budgets, summed over all
        galleries.

        A gallery whose report fails is left out. Where the number of migrated items is not known
        yet, all items count as native.

        Raises:
            Exception: any error of the reports that is no NobackfillError.
        """
        reports = list(self._progress())
        items = GaugeMetricFamily(
            "nobackfill_healing_items",
            "Items of galleries with a source: carried by an upgrade, or embedded by the release.",
            labels=["origin"],
        )
        migrated = sum(report.migrated_count or 0 for report in reports)
        items.add_metric(["carried"], migrated)
        items.add_metric(["native"], sum(report.item_count for report in reports) - migrated)
        yield items
        hits = CounterMetricFamily(
            "nobackfill_healing_hits",
            "Hits of galleries with a source, by the origin of their vectors.",
            labels=["origin"],
        )
        for origin, count in self._hits.items():
            hits.add_metric([origin], count)
        yield hits
        embedded = CounterMetricFamily(
            "nobackfill_healing_embedded",
            "Items re-embedded from their source, by outcome.",
            labels=["outcome"],
        )
        embedded.add_metric(["kept"], sum(report.cost.embedded_count for report in reports))
        embedded.add_metric(["failed"], sum(report.cost.failed_count for report in reports))
        yield embedded
        yield CounterMetricFamily(
            "nobackfill_healing_read_bytes", "Bytes read from sources.",
            value=sum(report.cost.bytes_read for report in reports),
        )  # fmt: skip
        yield CounterMetricFamily(
            "nobackfill_healing_seconds", "Seconds of threads that read and re-embedded items.",
            value=sum(report.cost.seconds for report in reports),
        )  # fmt: skip
        yield GaugeMetricFamily(
            "nobackfill_healing_budget_left", "Items left in today's budgets.",
            value=sum(max(0, report.daily_limit - report.begun_today) for report in reports),
        )  # fmt: skip


log = structlog.get_logger("server.healing")

_POLL_SECONDS = 0.5
# Longest wait (seconds) of a search for a source to open, and of a stop for batches that run.
_OPEN_SECONDS, _STOP_SECONDS = 2.0, 3.0
# A source that cannot be opened, or a ledger that cannot be written, is tried again after so long
# (seconds).
_RETRY_SECONDS = 30.0
# Largest share of a call's remaining time that it waits for its hits.
_WAIT_SHARE = 0.8


class HealingAnswerer:
    """Re-embed hits before they are returned, until no migrated item is left."""

    def __init__(self, healing: "Healing", plain: PlainAnswerer, space: str) -> None:
        """Make an answerer.

        Args:
            healing: the healers.
            plain: answers without re-embedding, in the plan's one space.
            space: the space to re-embed.
        """
        self._healing, self._plain, self._space = healing, plain, space

    def answer(self, hosted: HostedGallery, request: SearchRequest) -> list[QueryAnswer]:
        """Answer each query of a request, after re-embedding its first migrated hits.

        Queries in other spaces, requests without `heal`, and all queries once no migrated item is
        left are answered as without a source.

        Args:
            hosted: the gallery; the caller uses it and its plan.
            request: the request.

        Returns:
            For each query, in order, the result, or the InvalidInputError that refused it.

        Raises:
            InvalidInputError: the filter is not valid; TooLargeError if the images together are too
                large.
            NoEncoderError, IncompatibleSpaceError, NeedsImageError, ReleaseRetiredError: a query
                does not suit the gallery; see GallerySearcher.search.
            OutdatedPlanError: another gateway has replaced the plan; the caller begins again.
            DeadlineError, CancelledError: the call's time is over, or its caller has gone.
            BusyError, UnavailableError: the store is busy, a server does not answer, or too many
                images are being decoded (OverloadedError).
            NotFoundError: the gallery was closed or deleted.
            VerificationError: the store, or a model's output, is damaged.
            CannotWriteError: the gallery's file cannot be opened, or the disk fails.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        questions = self._plain.embed_queries(hosted, request)
        answers: dict[EmbeddedQuery, QueryAnswer] = {}
        to_heal = [
            question
            for question in accepted_queries(questions)
            if request.may_reembed and self._may_reembed(hosted, question)
        ]
        if to_heal:
            with context.trace_part("search"):
                results = self._healing.answer_queries(
                    to_heal, matching_items(hosted, request.condition)
                )
            answers.update(zip(to_heal, results, strict=True))
        others = [question for question in accepted_queries(questions) if question not in answers]
        answers |= self._plain.search_embedded(hosted, others, request)
        return [
            question if isinstance(question, InvalidInputError) else answers[question]
            for question in questions
        ]

    def sole_image_part(self, hosted: HostedGallery) -> PlanPart | None:
        """Return the part that answers an image, once no migrated item is left.

        None before that, and if two parts answer. It reads memory only.
        """
        return self._if_complete(hosted, self._plain.sole_image_part(hosted))

    def sole_space_part(self, hosted: HostedGallery, space: str) -> PlanPart | None:
        """Return the part that answers an embedding of a space, once no migrated item is left.

        None before that in the space to re-embed. An unknown space gives None.
        """
        return self._if_complete(hosted, self._plain.sole_space_part(hosted, space))

    def _if_complete(self, hosted: HostedGallery, part: PlanPart | None) -> PlanPart | None:
        heals = part is not None and part.space == self._space
        return None if heals and not self._healing.is_complete(hosted, self._space) else part

    def _may_reembed(self, hosted: HostedGallery, question: EmbeddedQuery) -> bool:
        """Tell whether a question is in the space to re-embed, and hits may be migrated."""
        part = question.parts[0]
        is_own = len(question.parts) == 1 and part.query_manifest.space == part.space == self._space
        return is_own and not self._healing.is_complete(hosted, self._space)


class Healing:
    """Keep the healers of galleries with a source, and the thread that re-embeds in the
    background.
    """

    def __init__(self, embedding: EmbeddingService, settings: Settings, metrics: Metrics) -> None:
        self._embedding, self._metrics = embedding, metrics
        self._places = AllowedSources(
            settings.item_folders, settings.item_hosts, columns=settings.item_columns,
            functions=settings.item_functions,
        )  # fmt: skip
        self._series = HealingSeries(self.all_progress)
        metrics.registry.register(self._series)
        self._lock = threading.Lock()
        self._healers: WeakKeyDictionary[HostedGallery, Healer] = WeakKeyDictionary()
        # Held while a gallery's healer is made, which may wait for a network folder.
        self._locks: WeakKeyDictionary[HostedGallery, threading.Lock] = WeakKeyDictionary()
        self._trouble: WeakKeyDictionary[HostedGallery, float] = WeakKeyDictionary()
        # Replaced healers with batches that still run.
        self._replaced: list[Healer] = []
        # Sources that are being opened.
        self._opening: dict[HealingSource, Future[ItemSource]] = {}
        self._past_cost = EmbeddingCost()
        self._stopping = threading.Event()
        self._galleries: Callable[[], Iterable[HostedGallery]] = tuple
        self._thread = threading.Thread(target=self._run, name="healing", daemon=True)

    @contextlib.contextmanager
    def reembed_in_background(
        self, galleries: Callable[[], Iterable[HostedGallery]]
    ) -> Iterator[None]:
        """Re-embed in the background during a block; running batches are finished, unless their
        source hangs.

        The end waits up to three seconds for batches, and then without a limit for the background
        thread. Call it once.

        Args:
            galleries: returns all galleries, each as used until the next one.

        Raises:
            RuntimeError: a second call, or the system has no thread left.
        """
        self._galleries = galleries
        self._thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            with self._lock:
                for hosted in list(self._healers):
                    self._retire_healer(hosted)
            self._close_replaced(_STOP_SECONDS)
            self._thread.join()

    def is_complete(self, hosted: HostedGallery, space: str) -> bool:
        """Tell whether a space has no migrated item left, as far as is known; called for each
        query.

        It is False before a healer exists, so at first after a start. It reads memory only.
        """
        healer = self._healers.get(hosted)
        return healer is not None and healer.space == space and healer.is_complete

    def answer_queries(
        self, questions: Sequence[EmbeddedQuery], matches: Matches | None
    ) -> list[QueryAnswer]:
        """Answer questions in one space that is re-embedded.

        The migrated ones among the first hits are re-embedded first. The questions wait for that
        together, at most the source's seconds and 0.8 of the call's remaining time. Items beyond
        the day's budget, and those that fail, keep their vectors. Without a healer at present they
        are answered as without a source. The first call may wait up to two seconds for the source.

        Args:
            questions: questions of one gallery and one part, at least one (IndexError without).
            matches: items that may be hits; None means all.

        Returns:
            For each question, in order, the result, or why it was refused.

        Raises:
            DeadlineError: the call's time is over.
            CancelledError: the caller has cancelled the call.
            OutdatedPlanError: another gateway has deleted the space.
            NotFoundError: the gallery was deleted.
            IncompatibleSpaceError: the space was deleted.
            BusyError, UnavailableError: the store or the record of re-embedding is busy, or does
                not answer.
            VerificationError: the store or the record of re-embedding is damaged.
            CannotWriteError: the gallery's file cannot be opened, or the disk fails.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        hosted, part = questions[0].hosted, questions[0].parts[0]
        healer = self._healer(hosted, part.query_manifest)
        if healer is None:
            answers = find_nearest(questions, matches)
            return [rank_nearest(q, a) for q, a in zip(questions, answers, strict=True)]
        pairs = _collect_candidates(healer, questions, matches)
        # All questions wait as long as one would.
        patience = min(healer.source.seconds, _WAIT_SHARE * context.current_call().remaining())
        end, results = time.monotonic() + patience, list[SearchResult]()
        valid = [pair for pair in pairs if not isinstance(pair, InvalidInputError)]
        for group in _split_by_candidates(valid):
            context.current_call().check()
            results += _answer_from_candidates(healer, group, end)
        self._series.count_hits_by_origin(results)
        iterator = iter(results)
        return [pair if isinstance(pair, InvalidInputError) else next(iterator) for pair in pairs]

    def progress(self, hosted: HostedGallery) -> HealingProgress | None:
        """Report on a gallery; None if it has no source, or its healer is not ready.

        It may make the healer first, and wait up to two seconds for its source. A source that
        cannot be used is logged and tried again after 30 s.

        Raises:
            BusyError, UnavailableError: the store or the record of re-embedding is busy, or does
                not answer.
            CannotWriteError: the record cannot be written, or the gallery's file cannot be opened.
            VerificationError: the store or the record is damaged.
            NotFoundError: the gallery is closed or deleted.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        if hosted.plan.reembedded_space is None:
            return None
        healer = self._healer(hosted, hosted.plan.query_manifest)
        try:
            return None if healer is None else healer.progress()
        except NotFoundError:
            # The healer was replaced a moment ago.
            return None

    def all_progress(self) -> Iterator[HealingProgress]:
        """Yield a report on every gallery that has a healer, and the cost of earlier healers.

        A gallery whose report fails is left out. The reports that only have a cost come first. No
        healer is made. Other errors than a NobackfillError pass.
        """
        with self._lock:
            costs = [replace(self._past_cost), *(healer.cost for healer in self._replaced)]
            healers = list(self._healers.values())
        for cost in costs:
            yield HealingProgress(0, 0, 0, 0, cost)
        for healer in healers:
            with contextlib.suppress(NobackfillError):
                yield healer.progress()

    def _healer(self, hosted: HostedGallery, manifest: Manifest) -> Healer | None:
        """Return the healer for a gallery's present space and source; None if there is none now."""
        source = hosted.state_value(SOURCE_KEY)
        if source is None or hosted.is_closing or time.monotonic() < self._trouble.get(hosted, 0.0):
            return None
        try:
            present_source = HealingSource.from_state(source)
        except VerificationError as error:
            self._pause_gallery(hosted, error)
            return None
        healer, key = self._healers.get(hosted), (manifest.space, present_source)
        if healer is not None and (healer.space, healer.source) == key:
            return healer
        with self._lock:
            lock = self._locks.setdefault(hosted, threading.Lock())
        with lock:
            healer = self._healers.get(hosted)
            if healer is not None and (healer.space, healer.source) == key:
                return healer
            if time.monotonic() < self._trouble.get(hosted, 0.0):
                return None
            return self._make_healer(hosted, manifest, present_source)

    def _make_healer(
        self, hosted: HostedGallery, manifest: Manifest, source: HealingSource
    ) -> Healer | None:
        """Make a gallery's healer, which replaces the last one; the caller holds the gallery's
        lock.
        """
        healer = None
        try:
            items, ledger = self.open(source, _OPEN_SECONDS), _open_ledger(hosted, manifest.space)
            healer = Healer(hosted, manifest, self._embedding, source, items, ledger)
        except (NobackfillError, OSError, sqlite3.Error) as error:
            self._pause_gallery(hosted, error)
        with self._lock:
            self._retire_healer(hosted)
            if healer is None:
                return None
            if not self._stopping.is_set():
                self._healers[hosted] = healer
                return healer
        healer.close(0.0)
        return None

    def _pause_gallery(self, hosted: HostedGallery, error: Exception) -> None:
        """Log that a gallery's source cannot be used, and leave it alone for a while."""
        log.error(
            "cannot use the source of a gallery, so its items are not re-embedded; the gateway "
            "tries again later",
            gallery=hosted.name,
            error=str(error),
        )
        self._trouble[hosted] = time.monotonic() + _RETRY_SECONDS

    def open(self, source: HealingSource, seconds: float) -> ItemSource:
        """Open a source.

        Calls for one source at the same time share one opening. A failure is not remembered, even
        if it came after the wait of the call that began the opening.

        Args:
            source: the source.
            seconds: longest wait; afterwards a thread still opens it, and the next call gets the
                result.

        Returns:
            An object that reads its items.

        Raises:
            ConfigurationError: the gateway's settings do not allow the source.
            NotFoundError: the source does not exist.
            UnavailableError: the source is not open in time, such as a network folder that is away,
                or the system has no thread left.
            InvalidInputError: the file of texts has an invalid line, or is no regular file.
            OSError: this user may not look into the folder.
            RuntimeError, ValueError: the path has a loop of links, or a zero byte.
        """
        with self._lock:
            opening = self._opening.get(source)
            if opening is None or (opening.done() and opening.exception() is not None):
                try:
                    opening = DaemonThreads(1, "source").submit(partial(self._places.open, source))
                except RuntimeError as error:
                    raise UnavailableError(
                        f"source: {source.address[:80]!r} cannot be opened, because the system has "
                        f"no thread left ({error}); try again later"
                    ) from error
                self._opening[source] = opening
        if not wait([opening], seconds).done:
            raise UnavailableError(
                f"source: {source.address[:80]!r} cannot be opened within {seconds:g} s; check "
                "that its host or file system answers, then run `gateway update-gallery` again"
            )
        with self._lock:
            if self._opening.get(source) is opening:
                del self._opening[source]
        return opening.result()

    def _retire_healer(self, hosted: HostedGallery) -> None:
        """Retire a gallery's healer; the caller holds the lock."""
        if (healer := self._healers.pop(hosted, None)) is not None:
            self._replaced.append(healer)

    def _close_replaced(self, seconds: float = 0.0) -> None:
        """Close retired healers, and wait at most so many seconds for all their batches.

        A healer with a batch that still runs stays in the list, and is closed by a later call.
        """
        end, replaced = time.monotonic() + seconds, list(self._replaced)
        for healer in replaced:
            healer.close(0.0)
        for healer in replaced:
            if not healer.close(max(0.0, end - time.monotonic())):
                if seconds:
                    log.warning(
                        "the source of a gallery does not answer, so its last batch of items is "
                        "not re-embedded"
                    )
                continue
            cost, past = healer.cost, self._past_cost
            with self._lock:
                # Two threads may close the same healer when the gateway stops.
                if healer in self._replaced:
                    self._replaced.remove(healer)
                    past.embedded_count += cost.embedded_count
                    past.failed_count += cost.failed_count
                    past.bytes_read += cost.bytes_read
                    past.seconds += cost.seconds

    def _run(self) -> None:
        with error_boundary(self._metrics, "healing"):
            lower_thread_priority()
        while not self._stopping.is_set():
            worked = 0.0
            with error_boundary(self._metrics, "healing"):
                worked = self._reembed_round()
            # Searches come first: pause as long as the work took. No gallery is in use during the
            # pause.
            self._stopping.wait(worked or _POLL_SECONDS)

    def _reembed_round(self) -> float:
        """Re-embed a few items of each gallery; returns the seconds of work if there may be
        more.
        """
        seconds, healed = 0.0, set[HostedGallery]()
        for hosted in self._galleries():
            if hosted.plan.reembedded_space is None or self._stopping.is_set():
                continue
            healed.add(hosted)
            began = time.monotonic()
            # An error in one gallery must not stop the others.
            with error_boundary(self._metrics, "healing"):
                if self._heal_some(hosted):
                    seconds += time.monotonic() - began
        with self._lock:
            for hosted in list(self._healers):
                if hosted not in healed and (
                    hosted.is_closing or hosted.state_value(SOURCE_KEY) is None
                ):
                    self._retire_healer(hosted)
        self._close_replaced()
        return seconds

    def _heal_some(self, hosted: HostedGallery) -> bool:
        """Re-embed a few items of one gallery; tells whether there may be more."""
        with hosted.use_plan() as plan:
            healer = self._healer(hosted, plan.query_manifest) if plan.reembedded_space else None
        if healer is None:
            return False
        has_more = False
        # The healer is busy, or was replaced.
        with contextlib.suppress(BusyError, NotFoundError):
            healer.ledger.load_origins()
            has_more = healer.reembed_some()
        return has_more


def _open_ledger(hosted: HostedGallery, space: str) -> HealingLedger:
    if isinstance(hosted, HostedInFile):
        return FileLedger(hosted.folder, hosted.store, space)
    # These imports need the extra `postgres`.
    from nobackfill.server.stores.postgresql.gallery import PostgresqlGallery
    from nobackfill.server.stores.postgresql.ledger import DatabaseLedger

    assert isinstance(hosted.store, PostgresqlGallery), "a store is a file or a database"
    return DatabaseLedger(hosted.store, space)
