"""Record which pair answered each caller, and which answers got feedback.

A pair is a query model with its gallery. The unit is a caller's key, not a query: keys are assigned
to pairs at random, and a key that sends much feedback counts once. If both pairs are equally good,
each key without feedback is equally likely to be the next to send some. So the next one belongs to
a pair with a probability that is the pair's share of those keys (Lindon and Malek, "Anytime-valid
inference for multinomial count data", NeurIPS 2022, section 4).
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from nobackfill.server.canary.evidence import CanaryEvidence

FeedbackKind = Literal["approved", "rejected"]
FEEDBACK_KINDS: tuple[FeedbackKind, ...] = ("approved", "rejected")
_MAX_SESSIONS = 100_000
_MAX_ANSWERS = 20_000
# Feedback is counted for so many first hits of an answer.
_MAX_ITEMS = 100


@dataclass
class _CanarySession:
    new: bool
    kinds: set[FeedbackKind] = field(default_factory=set)


class CanarySessions:
    """Keep the sessions of one canary. Not thread-safe: the caller holds a lock."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[int, _CanarySession] = OrderedDict()
        # Session key by request id, and a 64-bit hash of each item of the answer, as ids may be
        # long.
        self._answers: OrderedDict[str, tuple[int, array[int]]] = OrderedDict()
        # Number of sessions by pair (old, new), and of those with feedback by its kind.
        self.session_counts = [0, 0]
        self.feedback_counts: dict[FeedbackKind, list[int]] = {
            kind: [0, 0] for kind in FEEDBACK_KINDS
        }
        # Evidence that the old pair is approved more often, and that the new one is rejected more
        # often.
        self.evidence = {kind: CanaryEvidence() for kind in FEEDBACK_KINDS}

    def count_answer(
        self, caller_digest: int, request_id: str, items: Sequence[str], *, is_new_pair: bool
    ) -> None:
        """Record an answer that its caller got.

        If a key changes its pair, its session begins again without feedback. Beyond 100,000
        sessions or 20,000 answers the oldest is forgotten. Feedback is possible for the first 100
        hits. A repeated `request_id` replaces the earlier answer. The caller holds the lock.

        Args:
            caller_digest: digest of the caller's key.
            request_id: id of the answer, for later feedback.
            items: ids of the hits, best first.
            is_new_pair: True if the new pair answered.
        """
        session = self._sessions.get(caller_digest)
        if session is None or session.new is not is_new_pair:
            self._forget(caller_digest)
            self._sessions[caller_digest] = _CanarySession(is_new_pair)
            self.session_counts[is_new_pair] += 1
            if len(self._sessions) > _MAX_SESSIONS:
                self._forget(next(iter(self._sessions)))
        self._answers[request_id] = caller_digest, array("q", map(hash, items[:_MAX_ITEMS]))
        self._answers.move_to_end(request_id)
        if len(self._answers) > _MAX_ANSWERS:
            self._answers.popitem(last=False)

    def record_feedback(self, request_id: str, item_id: str, kind: FeedbackKind) -> bool:
        """Record feedback about a hit.

        The first feedback of each kind in a session is evidence.

        An approval is evidence if the old pair answered; a rejection, if the new one did. Others
        count against it. Two items may have one hash, but seldom. The answer counts for the present
        session of its key, also if the pair has changed since. The caller holds the lock.

        Args:
            request_id: id of the answer.
            item_id: id of the hit.
            kind: approved or rejected.

        Returns:
            False if the answer is unknown, or no longer remembered, or has no such hit. True
                otherwise, also if the session has sent feedback of this kind before.
        """
        key, items = self._answers.get(request_id, (0, ()))
        session = self._sessions.get(key)
        if session is None or hash(item_id) not in items:
            return False
        if kind not in session.kinds:
            counts = self.feedback_counts[kind]
            silent = [self.session_counts[new] - counts[new] for new in (False, True)]
            # An approval of the old pair, or a rejection of the new one, is against the new pair.
            worse = kind == "rejected"
            self.evidence[kind].add_outcome(session.new is worse, silent[worse] / sum(silent))
            session.kinds.add(kind)
            counts[session.new] += 1
        return True

    def reset(self) -> None:
        """Forget all sessions after a change of the share, which assigns keys to pairs again.

        The evidence stays.

        Feedback for earlier answers is no longer accepted. The counts of sessions and of feedback
        begin again at 0. The caller holds the lock, as this object has none.
        """
        self._sessions.clear()
        self._answers.clear()
        self.session_counts = [0, 0]
        self.feedback_counts = {kind: [0, 0] for kind in FEEDBACK_KINDS}

    def _forget(self, key: int) -> None:
        session = self._sessions.pop(key, None)
        if session is not None:
            self.session_counts[session.new] -= 1
            for kind in session.kinds:
                self.feedback_counts[kind][session.new] -= 1
