"""How an activation ends: what stays behind, and what is taken back where it has failed."""

import structlog

from nobackfill.errors import CannotWriteError
from nobackfill.server.galleries.hosted import NOTE
from nobackfill.server.grpc.error_boundary import error_boundary
from nobackfill.server.rollout.parts import Parts
from nobackfill.server.rollout.recovery import return_galleries, writes_locked
from nobackfill.server.rollout.run import Phase
from nobackfill.server.state import Lead, LeadLostError, State

log = structlog.get_logger("server.activation")


def fail(parts: Parts, release: int, reason: str, lead: Lead) -> None:
    """Mark the release FAILED; what it did not yet replace serves on."""
    state, galleries = parts.state, parts.galleries

    def failed(now: State) -> dict[str, object]:
        marked = now.failed if now.active == release else {**now.failed, release: reason}
        return {"activation": None, "failed": marked}

    def give_back() -> None:
        active = state.now.active
        try:
            state.revise(failed)
        except CannotWriteError as error:
            # A restart finds the activation as it was, and tries it again.
            log.error("the failure is not recorded", error=str(error))
        else:
            if active is not None:
                return_galleries(galleries, active)

    with error_boundary(parts.metrics, "activation"):
        with writes_locked(galleries):
            try:
                state.together(give_back, lead)
            except LeadLostError as error:
                log.error("the failure is not recorded", error=str(error))
            old = parts.serving.replan()
        parts.serving.settle(old)


def behind(parts: Parts) -> dict[str, str]:
    """Galleries whose active space is not the active release's, with the reason."""
    return {
        hosted.name: str(hosted.state(NOTE) or "its upgrade is under way")
        for hosted in parts.galleries.all()
        if hosted.spec().release != parts.state.now.active
    }


def end_jobs(parts: Parts, phase: Phase, message: str) -> None:
    """No upgrade is under way any more: those that did not get to their end say why."""
    for hosted in parts.galleries.all():
        why = str(hosted.state(NOTE) or "") if phase is Phase.DONE else message
        parts.upgrading.give_up(hosted.name, why)
