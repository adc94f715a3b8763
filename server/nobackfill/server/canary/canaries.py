"""The canary of a gateway: each query that takes part is answered by one pair, and compared."""

import time
from collections.abc import Callable
from dataclasses import replace

from nobackfill.errors import NobackfillError
from nobackfill.server.canary.comparison import NOTHING, CanaryState, Comparison, Report
from nobackfill.server.canary.mirror import Mirror
from nobackfill.server.canary.sessions import Kind
from nobackfill.server.galleries.asked import Answers, Asked, Found, Search
from nobackfill.server.galleries.plan import Part, Plan
from nobackfill.server.grpc import calls
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.state import Canary, GatewayState
from nobackfill.shares import digest, in_share


class Canaries:
    """At most one at a time: what the gateway's state says of it holds, from one query to the
    next."""

    def __init__(self, state: GatewayState, metrics: Metrics) -> None:
        self._state = state
        self._mirror = Mirror(metrics)
        self._now: Comparison | None = None

    def close(self) -> None:
        self._mirror.close()

    def begin(self, release: int) -> None:
        """One of this release begins: nothing of an earlier one counts."""
        self._now = Comparison(release)

    def end(self, state: CanaryState, message: str = "") -> None:
        """The one under way has ended."""
        if self._now is not None:
            self._now.end(state, message)

    def setting(self) -> Canary | None:
        """Of the canary under way; None without one."""
        record = self._state.now.activation
        return None if record is None else record.canary

    def report(self) -> Report:
        """Of the last one since the start."""
        return NOTHING if self._now is None else self._now.report()

    def verdict(self) -> str | None:
        """Why the one under way is to be stopped, if it is."""
        canary = self.setting()
        return None if canary is None or self._now is None else self._now.verdict(canary)

    def feedback(self, request_id: str, item: str, kind: Kind) -> bool:
        """Whether it is about an answer that is remembered, while one is under way."""
        going_on = self.setting() is not None and self._now is not None
        return going_on and self._now is not None and self._now.feedback(request_id, item, kind)

    def search(self, asked: Asked, plan: Plan, on_trial: Part, search: Search) -> Found:
        """Answer one query, wholly by one pair: what the new one fails, the old one answers.

        A query takes part that either pair can answer: an image, a text, or an embedding of each.
        Raises what `search` of the old pair does.
        """
        canary = self.setting()
        if canary is None:
            return search(asked, plan, None)
        call = calls.current()
        key = digest(on_trial.query.release, call.key)
        chosen = in_share(key, canary.share)
        by_new = chosen and not canary.shadow
        if not _takes_part(asked, plan, on_trial):
            return search(asked, plan, on_trial if by_new else None)
        comparison = self._comparison(on_trial.query.release)
        began = time.monotonic()
        try:
            found = search(asked, plan, on_trial if by_new else None)
        except NobackfillError:
            if not by_new:
                raise
            # What neither can answer says nothing about either.
            found = search(asked, plan, None)
            comparison.failed(canary)
            return found
        found = replace(found, request_id=call.request_id)
        comparison.answered(canary, found, time.monotonic() - began, key, new=by_new)
        if chosen:
            self._compare(asked, plan, on_trial, search, (canary, comparison, found))
        return found

    def batch(self, on_trial: Part, answer: Callable[[Part | None], Answers]) -> Answers:
        """Answer several queries of one call, all of them by the same pair; they are not compared.
        Raises what `answer` by the old pair does."""
        canary = self.setting()
        if canary is None or canary.shadow:
            return answer(None)
        release = on_trial.query.release
        if not in_share(digest(release, calls.current().key), canary.share):
            return answer(None)
        try:
            return answer(on_trial)
        except NobackfillError:
            found = answer(None)
            self._comparison(release).failed(canary)
            return found

    def _compare(
        self, asked: Asked, plan: Plan, on_trial: Part, search: Search,
        answered: tuple[Canary, Comparison, Found],
    ) -> None:  # fmt: skip
        """Have the other pair answer the query, too, some time."""
        canary, comparison, found = answered
        by_new = found.space == on_trial.query.space
        aside = replace(asked, aside=True)

        def work() -> None:
            hosted = asked.hosted
            if not hosted.users.enter():
                return
            try:
                with hosted.using() as now:
                    if now is not plan:
                        return
                    other = search(aside, plan, None if by_new else on_trial)
            except NobackfillError:
                if not by_new:
                    comparison.failed(canary)
                return
            finally:
                hosted.users.leave()
            old, new = (other, found) if by_new else (found, other)
            comparison.mirrored(canary, old, new, by_new=not by_new)

        if not self._mirror.offer(work, len(asked.query)):
            comparison.skipped()

    def _comparison(self, release: int) -> Comparison:
        """Of the release on trial: after a restart it begins anew."""
        now = self._now
        if now is None or now.release != release:
            now = self._now = Comparison(release)
        return now


def _takes_part(asked: Asked, plan: Plan, on_trial: Part) -> bool:
    query = asked.query
    both = (on_trial, *plan.parts)
    if isinstance(query, str):
        return all(part.query.text_encoder for part in both)
    if isinstance(query, bytes):
        return all(part.query.embedder.file for part in both)
    return all(part.query.space in query for part in both)
