"""Re-embed the migrated items of one gallery from its source, with its release's model."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from nobackfill.errors import NobackfillError, NoEncoderError, NotFoundError
from nobackfill.gallery.sqlite_file import StoredItem
from nobackfill.release.manifest import Manifest
from nobackfill.server.embedding.embedding import EmbeddingService
from nobackfill.server.galleries.hosted import HostedGallery
from nobackfill.server.healing.ledger import HealingLedger
from nobackfill.server.healing.registration import HealingSource
from nobackfill.server.upgrades.backfill import re_embed_images, re_embed_texts
from nobackfill.serving.ledger import today_utc
from nobackfill.serving.reembedding import Backoff, EmbeddingCost, Reembedding
from nobackfill.serving.sources import ItemSource

# An item that failed is not tried again for so long (seconds), then twice as long, up to an hour.
_RETRY_SECONDS, _MAX_RETRY_SECONDS = 60.0, 3600.0
# The background pauses for so long (seconds) once it has tried all items: a source that lacks
# pictures would use up its budget every day.
_ROUND_PAUSE_SECONDS = 3600.0
# Items that the background embeds at once: a query never waits behind more. It waits for them for
# so long (seconds), as a user of the gallery, whose deletion waits for it.
_BATCH, _BATCH_SECONDS = 8, 1.0
# If all of them failed, the background pauses from so long to so long (seconds).
_FAILURE_PAUSES = (1.0, 60.0)
_PAGE = 1000

# By the type of an original.
_EMBEDDERS: tuple[tuple[type, Callable[..., list[int]]], ...] = (
    (bytes, re_embed_images), (str, re_embed_texts),
)  # fmt: skip


@dataclass(frozen=True)
class HealingProgress:
    """Report how far a gallery is re-embedded.

    Attributes:
        item_count: items of the gallery.
        migrated_count: migrated items that are not re-embedded; None if not known yet.
        begun_today: items begun today by all gateways, without failed ones.
        daily_limit: most items a day.
        cost: work of this process alone.
    """

    item_count: int
    migrated_count: int | None
    begun_today: int
    daily_limit: int
    cost: EmbeddingCost


class Healer(Reembedding[int]):
    """Re-embed items of one space of a gallery, by label."""

    ledger: HealingLedger
    backoff: Backoff[int]

    def __init__(
        self, hosted: HostedGallery, manifest: Manifest, embedding: EmbeddingService,
        source: HealingSource, items: ItemSource, ledger: HealingLedger,
    ) -> None:  # fmt: skip
        backoff = Backoff[int](_RETRY_SECONDS, _MAX_RETRY_SECONDS)
        super().__init__(items, source.limits, ledger, backoff)
        self.source, self.space = source, manifest.space
        self._hosted, self._manifest, self._embedding = hosted, manifest, embedding
        self._remaining: Iterator[StoredItem] | None = None
        self._next_round = 0.0
        # The background's last batch, and the cost of all items before it.
        self._batch: dict[int, str] = {}
        self._cost_before = EmbeddingCost()
        self._pause = self._paused = 0.0

    def close(self, seconds: float = 0.0) -> bool:
        """Close the source and the ledger.

        Nothing new begins after the call. A second call may wait for the batches again.

        Args:
            seconds: longest wait for batches that have begun; 0 only looks.

        Returns:
            False if a batch has not ended; the ledger then stays open.
        """
        is_closed = super().close(seconds)
        if is_closed:
            self.ledger.close()
        return is_closed

    @property
    def is_complete(self) -> bool:
        """Tell whether no migrated item is left, as far as is known; False before the ledger has
        loaded.
        """
        return self.ledger.count_migrated() == 0

    def reembed_some(self) -> bool:
        """Re-embed a few items, within half of the day's budget; the other half is for queries.

        First come items that queries requested, then those that the upgrade was least certain of,
        then the others.

        It re-embeds up to 8 items, and waits up to 1 s for them; the vectors are stored later if
        that is too short. It pauses for 1 to 60 s after a batch of which all failed, and for an
        hour once all items were tried. Call it from one thread at a time.

        Returns:
            False if there is nothing to do now.

        Raises:
            NotFoundError: the ledger or the gallery is closed.
            BusyError, UnavailableError: the ledger or the store is busy, or does not answer.
            CannotWriteError: the ledger cannot be written, or the gallery's file cannot be opened.
            VerificationError: the ledger or the store is damaged.
            IncompatibleSpaceError: the space was deleted.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        if self._must_wait():
            return False
        room = self.source.a_day // 2 - self.ledger.count_claimed(today_utc())
        if self.is_complete or room <= 0:
            return False
        count = min(room, _BATCH)
        batch = self._next_requested(count) or self._next_remaining(count)
        if batch:
            self._batch, self._cost_before = batch, replace(self.cost)
            self.reembed(batch, _BATCH_SECONDS)
        return bool(batch)

    def _must_wait(self) -> bool:
        """Tell whether the last batch still runs, or all of it failed a moment ago.

        Failures cost no budget, and a source that is down must not be asked for all items.
        """
        if self.is_embedding(self._batch):
            return True
        if self._batch:
            cost, cost_before, (shortest, longest) = self.cost, self._cost_before, _FAILURE_PAUSES
            has_failed = (
                cost.failed_count > cost_before.failed_count
                and cost.embedded_count == cost_before.embedded_count
            )
            self._pause = min(2 * self._pause or shortest, longest) if has_failed else 0.0
            self._batch, self._paused = {}, time.monotonic() + self._pause
        return time.monotonic() < self._paused

    def _next_requested(self, count: int) -> dict[int, str]:
        labels = self.backoff.filter_ready(self.ledger.requested_labels(_PAGE))[:count]
        return self._migrated_ids(labels)

    def _next_remaining(self, count: int) -> dict[int, str]:
        if self._remaining is None:
            if time.monotonic() < self._next_round:
                return {}
            self._remaining = self._least_certain_items()
        batch: dict[int, str] = {}
        for item in self._remaining:
            if self.backoff.filter_ready([item.label]):
                batch[item.label] = item.id
                if len(batch) == count:
                    return batch
        self._remaining = None
        if not self._hosted.is_closing:
            self._next_round = time.monotonic() + _ROUND_PAUSE_SECONDS
        return batch

    def _least_certain_items(self) -> Iterator[StoredItem]:
        """Yield migrated items, the least certain first, then those of unknown uncertainty.

        It stops once the gallery is to be deleted, because many pages may have no migrated item.
        """
        for least_certain in (True, False):
            place = None
            while not self._hosted.is_closing:
                page, place = self._hosted.store.list_page(
                    self.space, _PAGE, start_after=place, least_certain=least_certain
                )
                for item, _ in page:
                    has_uncertainty = item.uncertainty is not None
                    if item.origin == "upgraded" and has_uncertainty == least_certain:
                        yield item
                if place is None:
                    break

    def progress(self) -> HealingProgress:
        """Report the progress.

        Days are those of UTC.

        Raises:
            NotFoundError: the ledger or the gallery is closed.
            BusyError, UnavailableError: the ledger or the store is busy, or does not answer.
            CannotWriteError: the ledger cannot be written, or the gallery's file cannot be opened.
            VerificationError: the ledger or the store is damaged.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        return HealingProgress(
            self._hosted.count(), self.ledger.count_migrated(),
            self.ledger.count_claimed(today_utc()),
            self.source.a_day, self.cost,
        )  # fmt: skip

    def _migrated_ids(self, labels: Sequence[int]) -> dict[int, str]:
        """Return the ids of items that exist and are still migrated; the ledger settles the
        others.
        """
        items = self._hosted.store.items(labels, self.space) if labels else []
        migrated = {item.label: item.id for item in items if item and item.origin == "upgraded"}
        if len(migrated) < len(labels):
            self.ledger.finish_claims([label for label in labels if label not in migrated])
        return migrated

    def claim(self, keys: Sequence[int], budget: int) -> Sequence[int]:
        """Claim items for this process, within the day's budget; queue the others as requested.

        Items that are no longer migrated are settled instead. Their claims still cost the budget.
        Items that another process embeds now are left out.

        Args:
            keys: labels, claimed in their order.
            budget: most items of today (UTC), over all processes; 0 only queues.

        Returns:
            The claimed labels that are still migrated, in order.

        Raises:
            NotFoundError: the ledger or the gallery is closed.
            BusyError, UnavailableError: the ledger or the store is busy, or does not answer.
            CannotWriteError: the ledger cannot be written, or the gallery's file cannot be opened.
            VerificationError: the ledger or the store is damaged.
            IncompatibleSpaceError: the space was deleted.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        # Checked after the claim: another process may have re-embedded them before.
        claimed = super().claim(keys, budget)
        migrated = self._migrated_ids(claimed)
        return [label for label in claimed if label in migrated]

    def embed_and_store(
        self, originals: Mapping[int, str | bytes], missing: Sequence[int]
    ) -> Collection[int]:
        """Embed originals, and store their vectors.

        An item that was deleted or put again has another label, so nothing is stored for the old
        one.

        Nothing is stored if the gallery is being deleted, or its plan re-embeds another space by
        now. The labels that are returned are settled in the ledger. Failures are recorded in
        `cost`. After an error, vectors of images may be stored, but nothing is settled.

        Args:
            originals: original by label, a text or an encoded image; may be empty.
            missing: labels whose original the source lacks.

        Returns:
            The labels that need no more work, also of items that are gone or no longer migrated.
            They are in no order; those in `missing` are not among them.

        Raises:
            UnavailableError: the model server or the database does not answer.
            TooLargeError: the images or the texts are too many together.
            OverloadedError: too many expensive calls are being decoded.
            BusyError: the store or the ledger is locked for too long.
            CannotWriteError: the store or the ledger cannot be written.
            VerificationError: the store, the ledger or a model's output is damaged.
            IncompatibleSpaceError, NotFoundError: the space was deleted, or the ledger is closed.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        if missing:
            self.record_failure(
                NotFoundError(
                    f"the gallery's source of originals has no image or text of {len(missing)} "
                    "items that are to be re-embedded; restore them there, or delete the items"
                )
            )
        if not originals or not self._hosted.use_counter.enter():
            return ()
        try:
            with self._hosted.use_plan() as plan:
                # The space may be about to be deleted.
                is_current = plan.reembedded_space == self.space
                return self._reembed_originals(originals) if is_current else ()
        finally:
            self._hosted.use_counter.leave()

    def _reembed_originals(self, originals: Mapping[int, str | bytes]) -> Collection[int]:
        items = self._hosted.store.items(list(originals), self.space)
        targets = [item for item in items if item is not None and item.origin == "upgraded"]
        stored, reasons = list[int](), list[str]()
        for kind, embed in _EMBEDDERS:
            pairs = [
                (one, data) for one in targets if isinstance(data := originals[one.label], kind)
            ]
            if not pairs:
                continue
            batch, contents = zip(*pairs, strict=True)
            try:
                with self._embedding.decoder.admit_batch(contents if kind is bytes else ()):
                    stored += embed(
                        self._hosted, self._embedding, self._manifest, batch, contents, reasons
                    )
            except NoEncoderError as error:
                reasons.append(str(error))
        for why in reasons:
            self.record_failure(NobackfillError(why))
        migrated = {item.label for item in targets}
        # Items that were deleted in the meantime are settled, too.
        settled = [*stored, *(label for label in originals if label not in migrated)]
        self.ledger.finish_claims(settled)
        return settled
