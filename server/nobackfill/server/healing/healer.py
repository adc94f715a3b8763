"""One gallery that heals: carried items embedded again from their source by its release's model."""

import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nobackfill.errors import NobackfillError, NoEncoderError, NotFoundError
from nobackfill.gallery.store import Item
from nobackfill.items.reembedding import Cost, Reembedding, today
from nobackfill.items.sources import Items
from nobackfill.release.manifest import Manifest
from nobackfill.server.embedding.embedding import Embedding
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.healing.ledger import Ledger
from nobackfill.server.healing.registration import Source
from nobackfill.server.upgrades.backfill import embed_again, read_again

# What could not be embedded is not tried again before so long.
_REST_S = 60.0
# Nor, in the background, what was left when all was tried: a source that lacks pictures would take
# its budget every day.
_TRIED_S = 3600.0
# Items that the background asks for at once: no query waits behind more.
_FEW = 8
_PAGE = 1000


@dataclass(frozen=True)
class Progress:
    """How far a gallery has healed. `today`: items begun on this day, by all gateways; `cost`: this
    process's own."""

    items: int
    carried: int | None
    today: int
    a_day: int
    cost: Cost


class Healer:
    """Of one space of a gallery; a Work of Reembedding by label."""

    def __init__(
        self, hosted: Hosted, manifest: Manifest, embedding: Embedding, source: Source,
        items: Items, ledger: Ledger,
    ) -> None:  # fmt: skip
        self.source, self.space, self.ledger = source, manifest.space, ledger
        self._hosted, self._manifest, self._embedding = hosted, manifest, embedding
        self.again = Reembedding[int](items, source.limits)
        self._lock = threading.Lock()
        self._resting: dict[int, float] = {}
        self._rest: Iterator[Item] | None = None
        self._all_tried = 0.0

    def close(self) -> None:
        """End what embeds, after the batches that have begun."""
        self.again.close()
        self.ledger.close()

    @property
    def whole(self) -> bool:
        """Whether nothing is left that an upgrade has carried, as far as is known."""
        return self.ledger.carried() == 0

    def ask(self, items: Mapping[int, str], seconds: float) -> None:
        """Embed items again, by label and id; return when they are kept or time is up."""
        self.again.ask(items, self, seconds)

    def heal_some(self) -> bool:
        """A few of the rest: what was asked for, then what the upgrade was least certain of, then
        the others; half of a day's budget is left to queries. False where there is nothing to do
        at present."""
        room = self.source.a_day // 2 - self.ledger.spent(today())
        if self.whole or room <= 0:
            return False
        few = min(room, _FEW)
        some = self._wanted(few) or self._of_the_rest(few)
        if some:
            self.again.finish(some, self)
        return bool(some)

    def _wanted(self, few: int) -> dict[int, str]:
        labels = self._ready(self.ledger.wanted(_PAGE))[:few]
        return self._carried(labels)

    def _of_the_rest(self, few: int) -> dict[int, str]:
        if self._rest is None:
            if time.monotonic() < self._all_tried:
                return {}
            self._rest = self._by_doubt()
        some: dict[int, str] = {}
        for item in self._rest:
            if self._ready([item.label]):
                some[item.label] = item.id
                if len(some) == few:
                    return some
        self._rest, self._all_tried = None, time.monotonic() + _TRIED_S
        return some

    def _by_doubt(self) -> Iterator[Item]:
        """Carried items, the least certain first, then those of unknown uncertainty."""
        for least_certain in (True, False):
            after = None
            while True:
                page, after = self._hosted.store.page(
                    self.space, _PAGE, after=after, least_certain=least_certain
                )
                for item, _ in page:
                    doubtful = item.uncertainty is not None
                    if item.origin == "upgraded" and doubtful == least_certain:
                        yield item
                if after is None:
                    break

    def progress(self) -> Progress:
        """For a person, or for metrics."""
        return Progress(
            self._hosted.count(), self.ledger.carried(), self.ledger.spent(today()),
            self.source.a_day, self.again.cost,
        )  # fmt: skip

    def _ready(self, labels: Sequence[int]) -> list[int]:
        """Those that have not failed a moment ago."""
        now = time.monotonic()
        with self._lock:
            self._resting = {label: end for label, end in self._resting.items() if end > now}
            return [label for label in labels if label not in self._resting]

    def _carried(self, labels: Sequence[int]) -> dict[int, str]:
        """Those that are there and still as an upgrade left them, with their ids; the others are
        settled."""
        found = self._hosted.store.items(labels, self.space) if labels else []
        left = {one.label: one.id for one in found if one and one.origin == "upgraded"}
        if len(left) < len(labels):
            self.ledger.settle([label for label in labels if label not in left])
        return left

    def claim(self, keys: Sequence[int], budget: int) -> Sequence[int]:
        """See Work. Looked at again once they are claimed: another may have kept them since."""
        mine = self.ledger.claim(self._ready(keys), today(), budget)
        left = self._carried(mine)
        return [label for label in mine if label in left]

    def keep(self, found: Mapping[int, str | bytes], gone: Sequence[int]) -> Collection[int]:
        """See Work. An item that was deleted or put again has another label, and nothing is written
        for the one it had."""
        if gone:
            self.again.failed(NotFoundError(f"the source lacks {len(gone)} items of a batch"))
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
            self.again.failed(NobackfillError(why))
        left = {one.label for one in items}
        # Those that went meanwhile are settled, too.
        done = [*kept, *(label for label in found if label not in left)]
        self.ledger.settle(done)
        return done

    def _images(
        self, items: Sequence[Item], found: Mapping[int, str | bytes], refused: list[str]
    ) -> list[int]:
        pairs = [(one, data) for one in items if isinstance(data := found[one.label], bytes)]
        if not pairs:
            return []
        some, images = zip(*pairs, strict=True)
        with self._embedding.decoding.batch(images):
            return embed_again(self._hosted, self._embedding, self._manifest, some, images, refused)

    def _texts(
        self, items: Sequence[Item], found: Mapping[int, str | bytes], refused: list[str]
    ) -> list[int]:
        pairs = [(one, data) for one in items if isinstance(data := found[one.label], str)]
        if not pairs:
            return []
        some, texts = zip(*pairs, strict=True)
        return read_again(self._hosted, self._embedding, self._manifest, some, texts, refused)

    def release(self, keys: Collection[int]) -> None:
        """See Work."""
        with self._lock:
            self._resting |= dict.fromkeys(keys, time.monotonic() + _REST_S)
        self.ledger.release(keys)
