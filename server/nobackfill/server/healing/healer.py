"""One gallery that heals: carried items embedded again from their source by its release's model."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from nobackfill.errors import NobackfillError, NoEncoderError, NotFoundError
from nobackfill.gallery.reading import StoredItem
from nobackfill.release.manifest import Manifest
from nobackfill.server.embedding.embedding import Embedding
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.healing.ledger import HealingLedger
from nobackfill.server.healing.registration import HealingSource
from nobackfill.server.upgrades.backfill import embed_again, read_again
from nobackfill.serving.ledger import today
from nobackfill.serving.reembedding import Backoff, EmbeddingCost, Reembedding
from nobackfill.serving.sources import Items

# An item that could not be embedded rests so long, then twice as long, up to an hour.
_REST_S, _LONGEST_REST_S = 60.0, 3600.0
# The background rests so long when all was tried: a source that lacks pictures would take its
# budget every day.
_TRIED_S = 3600.0
# Items that the background asks for at once: no query waits behind more. So long it waits for them
# as one of the gallery's users, whose deletion waits for it.
_FEW, _FEW_S = 8, 1.0
# Where all of them failed, the background rests: from so long to so long.
_IN_VAIN_S = (1.0, 60.0)
_PAGE = 1000


@dataclass(frozen=True)
class HealingProgress:
    """How far a gallery has healed. `today`: items begun on this day, by all gateways, without
    those that could not be embedded; `cost`: this process's own."""

    items: int
    carried: int | None
    today: int
    a_day: int
    cost: EmbeddingCost


class Healer(Reembedding[int]):
    """Embeds items of one space of a gallery again, by label."""

    ledger: HealingLedger
    backoff: Backoff[int]

    def __init__(
        self, hosted: Hosted, manifest: Manifest, embedding: Embedding, source: HealingSource,
        items: Items, ledger: HealingLedger,
    ) -> None:  # fmt: skip
        backoff = Backoff[int](_REST_S, _LONGEST_REST_S)
        super().__init__(items, source.limits, ledger, backoff)
        self.source, self.space = source, manifest.space
        self._hosted, self._manifest, self._embedding = hosted, manifest, embedding
        self._rest: Iterator[StoredItem] | None = None
        self._all_tried = 0.0
        # The items that the background has begun, and the cost of all by then.
        self._begun: dict[int, str] = {}
        self._before = EmbeddingCost()
        self._pause = self._paused = 0.0

    def close(self, seconds: float = 0.0) -> bool:
        ended = super().close(seconds)
        if ended:
            self.ledger.close()
        return ended

    @property
    def whole(self) -> bool:
        """Whether no carried item is left, as far as is known."""
        return self.ledger.carried() == 0

    def heal_some(self) -> bool:
        """Embed a few items: first those that were asked for, then those that the upgrade was least
        certain of, then the others. Half of a day's budget is left to queries. Returns False where
        there is nothing to do at present."""
        if self._held_back():
            return False
        room = self.source.a_day // 2 - self.ledger.spent(today())
        if self.whole or room <= 0:
            return False
        few = min(room, _FEW)
        some = self._wanted(few) or self._of_the_rest(few)
        if some:
            self._begun, self._before = some, replace(self.cost)
            self.finish(some, _FEW_S)
        return bool(some)

    def _held_back(self) -> bool:
        """Return whether the last few are under way still, or all of them failed a moment ago. They
        cost the budget nothing, and a source that is down shall not be asked for all items."""
        if self.busy(self._begun):
            return True
        if self._begun:
            now, before, (least, most) = self.cost, self._before, _IN_VAIN_S
            vain = now.failed > before.failed and now.embedded == before.embedded
            self._pause = min(2 * self._pause or least, most) if vain else 0.0
            self._begun, self._paused = {}, time.monotonic() + self._pause
        return time.monotonic() < self._paused

    def _wanted(self, few: int) -> dict[int, str]:
        labels = self.backoff.ready(self.ledger.wanted(_PAGE))[:few]
        return self._carried(labels)

    def _of_the_rest(self, few: int) -> dict[int, str]:
        if self._rest is None:
            if time.monotonic() < self._all_tried:
                return {}
            self._rest = self._by_doubt()
        some: dict[int, str] = {}
        for item in self._rest:
            if self.backoff.ready([item.label]):
                some[item.label] = item.id
                if len(some) == few:
                    return some
        self._rest = None
        if not self._hosted.is_closing:
            self._all_tried = time.monotonic() + _TRIED_S
        return some

    def _by_doubt(self) -> Iterator[StoredItem]:
        """Yield carried items, the least certain first, then those of unknown uncertainty. None
        follows once the gallery is to be deleted: many pages may hold no carried item."""
        for least_certain in (True, False):
            after = None
            while not self._hosted.is_closing:
                page, after = self._hosted.store.page(
                    self.space, _PAGE, after=after, least_certain=least_certain
                )
                for item, _ in page:
                    doubtful = item.uncertainty is not None
                    if item.origin == "upgraded" and doubtful == least_certain:
                        yield item
                if after is None:
                    break

    def progress(self) -> HealingProgress:
        """Report how far it has come, to a person or to metrics."""
        return HealingProgress(
            self._hosted.count(), self.ledger.carried(), self.ledger.spent(today()),
            self.source.a_day, self.cost,
        )  # fmt: skip

    def _carried(self, labels: Sequence[int]) -> dict[int, str]:
        """Return the ids of items that are there and still as an upgrade left them; settle the
        others."""
        found = self._hosted.store.items(labels, self.space) if labels else []
        left = {one.label: one.id for one in found if one and one.origin == "upgraded"}
        if len(left) < len(labels):
            self.ledger.settle([label for label in labels if label not in left])
        return left

    def claim(self, keys: Sequence[int], budget: int) -> Sequence[int]:
        # Looked at again once they are claimed: another may have kept them since.
        mine = super().claim(keys, budget)
        left = self._carried(mine)
        return [label for label in mine if label in left]

    def keep(self, found: Mapping[int, str | bytes], gone: Sequence[int]) -> Collection[int]:
        """Embed and write. An item that was deleted or put again has another label, and nothing is
        written for the one it had."""
        if gone:
            self.failed(NotFoundError(f"the source lacks {len(gone)} items of a batch"))
        if not found or not self._hosted.users.enter():
            return ()
        try:
            with self._hosted.using() as plan:
                # The space may be on its way out.
                return self._written(found) if plan.heals == self.space else ()
        finally:
            self._hosted.users.leave()

    def _written(self, found: Mapping[int, str | bytes]) -> Collection[int]:
        there = self._hosted.store.items(list(found), self.space)
        items = [one for one in there if one is not None and one.origin == "upgraded"]
        kept, refused = list[int](), list[str]()
        for embed in (self._images, self._texts):
            try:
                kept += embed(items, found, refused)
            except NoEncoderError as error:
                refused.append(str(error))
        for why in refused:
            self.failed(NobackfillError(why))
        left = {one.label for one in items}
        # Items that went meanwhile are settled, too.
        done = [*kept, *(label for label in found if label not in left)]
        self.ledger.settle(done)
        return done

    def _images(
        self, items: Sequence[StoredItem], found: Mapping[int, str | bytes], refused: list[str]
    ) -> list[int]:
        pairs = [(one, data) for one in items if isinstance(data := found[one.label], bytes)]
        if not pairs:
            return []
        some, images = zip(*pairs, strict=True)
        with self._embedding.decoding.batch(images):
            return embed_again(self._hosted, self._embedding, self._manifest, some, images, refused)

    def _texts(
        self, items: Sequence[StoredItem], found: Mapping[int, str | bytes], refused: list[str]
    ) -> list[int]:
        pairs = [(one, data) for one in items if isinstance(data := found[one.label], str)]
        if not pairs:
            return []
        some, texts = zip(*pairs, strict=True)
        return read_again(self._hosted, self._embedding, self._manifest, some, texts, refused)
