"""Searches by one image that hold no thread: decoded and embedded together with others, then found
as an embedding is. What needs more, and every refusal, is left to a thread."""

from collections.abc import Sequence
from dataclasses import dataclass

from nobackfill.server.embedding.embedding import Embedding
from nobackfill.server.embedding.image_queue import ImageQueue, QueuedImage
from nobackfill.server.galleries.asked import Heals
from nobackfill.server.galleries.galleries import Galleries
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.galleries.hosted_file import HostedInFile
from nobackfill.server.galleries.immediate_answers import ImmediateAnswers
from nobackfill.server.galleries.plan import Part, Plan, entered
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.grpc.rpc import Later, Unanswered
from nobackfill.vectors import Vectors


@dataclass(frozen=True, eq=False)
class _Asked:
    """One query, counted among who uses the gallery and its plan."""

    hosted: HostedInFile
    plan: Plan
    part: Part
    k: int
    farthest: float
    call: Unanswered

    def end(self, answer: bytes | None) -> None:
        _leave(self.hosted, self.plan)
        self.call.done(answer)


class ImageAnswers:
    """Answers queries by one image."""

    def __init__(
        self, galleries: Galleries, immediate: ImmediateAnswers, embedding: Embedding,
        healing: Heals, metrics: Metrics,
    ) -> None:  # fmt: skip
        self._galleries = galleries
        self._immediate = immediate
        self._embedding = embedding
        self._healing = healing
        self._queue: ImageQueue[_Asked] = ImageQueue(embedding, metrics, self._answer)

    def close(self) -> None:
        """End its threads; what nobody has begun is left to others."""
        self._queue.close()

    def later(self, gallery: str, image: bytes, k: int, farthest: float) -> Later | None:
        """What answers a query; None: on a thread."""
        hosted = self._galleries.at_hand(gallery)
        if (
            not isinstance(hosted, HostedInFile)
            or self._part(hosted, hosted.plan) is None
            or not self._embedding.models.ready()
        ):
            return None
        return Later(lambda call: self._add(hosted, image, k, farthest, call), self._queue.begin)

    def _add(
        self, hosted: HostedInFile, image: bytes, k: int, farthest: float, call: Unanswered
    ) -> None:
        plan = _enter(hosted)
        part = None if plan is None else self._part(hosted, plan)
        if plan is None or part is None:
            if plan is not None:
                _leave(hosted, plan)
            call.done(None)
            return
        asked = _Asked(hosted, plan, part, k, farthest, call)
        self._queue.add(QueuedImage(asked, part.query, image, call.deadline, call.is_wanted))

    def _part(self, hosted: Hosted, plan: Plan) -> Part | None:
        one = len(plan.parts) == 1 and plan.canary is None and plan.both is None
        return (
            plan.parts[0] if one and not self._healing.heals(hosted, plan.parts[0].space) else None
        )

    def _answer(self, found: Sequence[tuple[QueuedImage[_Asked], Vectors | None]]) -> None:
        answers: dict[QueuedImage[_Asked], bytes | None] = {waiting: None for waiting, _ in found}
        try:
            self._search(found, answers)
        finally:
            for waiting, answer in answers.items():
                waiting.of.end(answer)

    def _search(
        self,
        found: Sequence[tuple[QueuedImage[_Asked], Vectors | None]],
        answers: dict[QueuedImage[_Asked], bytes | None],
    ) -> None:
        rows = {waiting: row for waiting, row in found if row is not None}
        together: dict[tuple[HostedInFile, Part], list[QueuedImage[_Asked]]] = {}
        for waiting in rows:
            together.setdefault((waiting.of.hosted, waiting.of.part), []).append(waiting)
        for (hosted, part), some in together.items():
            queries = [(rows[one].tobytes(), one.of.k, one.of.farthest) for one in some]
            made = self._immediate.of_part(hosted, part, queries)
            answers.update(zip(some, made, strict=True))
        for waiting, row in rows.items():
            if answers[waiting] is None:
                # The thread that answers embeds it no second time.
                self._embedding.keep(waiting.manifest, waiting.image, row)


def _enter(hosted: Hosted) -> Plan | None:
    """The gallery's plan: both are from now on used by one more. None: the gallery is closed."""
    return entered(lambda: hosted.plan) if hosted.users.enter() else None


def _leave(hosted: Hosted, plan: Plan) -> None:
    plan.users.leave()
    hosted.users.leave()
