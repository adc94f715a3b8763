"""Who was answered by which pair, and what became of the answers.

A unit is a caller's key, not a query: keys are what is chosen at random, and one that sends a lot
of feedback is one all the same. Of the keys that have said nothing so far, each is as likely to be
the next to say something, whichever pair answers it, if the pairs are equally good: so the next
comes from a pair with the probability that is the pair's share of them (as Lindon and Malek,
"Anytime-valid inference for multinomial count data", NeurIPS 2022, section 4).
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from nobackfill.server.canary.evidence import CanaryEvidence

Kind = Literal["approved", "rejected"]
KINDS: tuple[Kind, ...] = ("approved", "rejected")
_MOST_SESSIONS = 100_000
_MOST_ANSWERS = 20_000
# Feedback about later hits of an answer is not counted.
_MOST_ITEMS = 100


@dataclass
class _CanarySession:
    new: bool
    said: set[Kind] = field(default_factory=set)


class CanarySessions:
    """Of one canary; the caller sees to it that one thread at a time is in here."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[int, _CanarySession] = OrderedDict()
        # Request ids to the session, and 64 bits of each item of the answer: ids may be long.
        self._answers: OrderedDict[str, tuple[int, array[int]]] = OrderedDict()
        # Sessions, and those that have said something, by pair: old, new.
        self.counts = [0, 0]
        self.said: dict[Kind, list[int]] = {kind: [0, 0] for kind in KINDS}
        # That the old pair is approved more often, and that the new one is rejected more often.
        self.evidence = {kind: CanaryEvidence() for kind in KINDS}

    def answered(self, key: int, request_id: str, items: Sequence[str], *, new: bool) -> None:
        """Count an answer that its caller got; `key`: a digest of the caller's."""
        session = self._sessions.get(key)
        if session is None or session.new is not new:
            self._forget(key)
            self._sessions[key] = _CanarySession(new)
            self.counts[new] += 1
            if len(self._sessions) > _MOST_SESSIONS:
                self._forget(next(iter(self._sessions)))
        self._answers[request_id] = key, array("q", map(hash, items[:_MOST_ITEMS]))
        self._answers.move_to_end(request_id)
        if len(self._answers) > _MOST_ANSWERS:
            self._answers.popitem(last=False)

    def feedback(self, request_id: str, item: str, kind: Kind) -> bool:
        """Whether it is about an item of an answer that is remembered. The first of its kind of a
        session is evidence."""
        key, items = self._answers.get(request_id, (0, ()))
        session = self._sessions.get(key)
        if session is None or hash(item) not in items:
            return False
        if kind not in session.said:
            silent = [self.counts[new] - self.said[kind][new] for new in (False, True)]
            # What speaks against the new pair: an approval of the old one, a rejection of it.
            worse = kind == "rejected"
            self.evidence[kind].see(session.new is worse, silent[worse] / sum(silent))
            session.said.add(kind)
            self.said[kind][session.new] += 1
        return True

    def begin_anew(self) -> None:
        """The setting has changed, and with it who belongs where. Evidence counts on."""
        self._sessions.clear()
        self._answers.clear()
        self.counts = [0, 0]
        self.said = {kind: [0, 0] for kind in KINDS}

    def _forget(self, key: int) -> None:
        session = self._sessions.pop(key, None)
        if session is not None:
            self.counts[session.new] -= 1
            for kind in session.said:
                self.said[kind][session.new] -= 1
