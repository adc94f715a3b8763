"""How many items the galleries of a token may hold: looked at before each message is stored."""

import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from nobackfill.errors import NotFoundError, VerificationError
from nobackfill.server.galleries.allowance import Allowance
from nobackfill.server.galleries.galleries import Galleries
from nobackfill.server.grpc import context
from nobackfill.server.grpc.access import Principal

# How old, in seconds, a count may be: other gateways put, too. Where there is room for fewer items
# than a second brings, none is kept.
_COUNTED_S, _FAR = 1.0, 100_000


class Quotas:
    """Of all tokens that have one, at one gateway."""

    def __init__(self, galleries: Galleries) -> None:
        self._galleries = galleries
        self._known: dict[Allowance, _Quota] = {}

    @contextmanager
    def taking(
        self, principal: Principal, gallery: str, ids: Collection[str]
    ) -> Iterator[Allowance | None]:
        """Put items under `ids` into `gallery` within the block, which the caller's role is for. A
        store that others write, too, has to keep to the allowance, where there is one.

        Raises ItemQuotaError where those that are new are too many, NotFoundError for no gallery,
        DeadlineError, CancelledError.
        """
        names, most = principal.galleries, principal.items
        if names is None or most is None:
            yield None
            return
        allowance = Allowance(names, most)
        quota = self._known.setdefault(allowance, _Quota(self._galleries, allowance))
        with quota.taking(gallery, set(ids)):
            yield allowance if quota.near else None


class _Quota:
    """Counts now and then, and adds what is put here meanwhile."""

    def __init__(self, galleries: Galleries, allowance: Allowance) -> None:
        self._galleries, self._allowance = galleries, allowance
        self._turn = threading.Condition()
        self._counted, self._at = 0, float("-inf")
        # Items of messages that are being stored.
        self._under_way = 0

    @property
    def near(self) -> bool:
        """Whether there is room for so few items that none counted before is to be relied on."""
        return self._allowance.items - self._counted < _FAR

    @contextmanager
    def taking(self, gallery: str, ids: set[str]) -> Iterator[None]:
        with self._turn:
            many = self._admit(gallery, ids)
            self._under_way += many
        try:
            yield
        finally:
            with self._turn:
                self._under_way -= many
                self._counted += many
                self._turn.notify_all()

    def _admit(self, gallery: str, ids: set[str]) -> int:
        """How many items it may become more."""
        while True:
            old = time.monotonic() - self._at > _COUNTED_S
            if old or self.near:
                self._count()
            if self._counted + self._under_way + len(ids) <= self._allowance.items:
                return len(ids)
            if not self._under_way:
                return self._admit_new(gallery, ids)
            # What is counted may hold some of those under way already.
            self._turn.wait(min(_COUNTED_S, context.current().remaining()))
            context.current().check()

    def _admit_new(self, gallery: str, ids: set[str]) -> int:
        self._count()
        with self._galleries.using(gallery) as hosted:
            new = len(ids) - len(hosted.store.labels_of(list(ids)))
        self._allowance.check(self._counted, new)
        return new

    def _count(self) -> None:
        counted = 0
        for name in self._allowance.galleries:
            with suppress(NotFoundError, VerificationError), self._galleries.using(name) as hosted:
                counted += hosted.store.count()
        self._counted, self._at = counted, time.monotonic()
