"""How an activation ends: what stays behind, and what is taken back where it has failed."""

import threading
from collections.abc import Callable

import structlog

from nobackfill.errors import NobackfillError
from nobackfill.server.galleries.hosted import NOTE
from nobackfill.server.grpc.context import error_boundary
from nobackfill.server.rollout.parts import Parts
from nobackfill.server.rollout.recovery import return_galleries, writes_locked
from nobackfill.server.rollout.run import Phase
from nobackfill.server.state import Lead, LeadLostError, State

log = structlog.get_logger("server.activation")

# How soon what could not be recorded is tried again.
_AGAIN_S = 1.0


def fail(
    parts: Parts, release: int, reason: str, lead: Lead, cancelled: threading.Event | None = None
) -> None:
    """Mark the release FAILED; what it did not yet replace serves on.

    Returns once that is durable, so that nothing begins it again but an operator. Where the disk is
    full or the database away it tries again until `cancelled` is set (None: once), or another
    gateway leads.
    """
    state, galleries = parts.state, parts.galleries

    def failed(now: State) -> dict[str, object]:
        marked = now.failed if now.active == release else {**now.failed, release: reason}
        return {"activation": None, "failed": marked}

    def give_back() -> None:
        state.revise(failed)
        if (active := state.now.active) is not None:
            return_galleries(galleries, active)

    with error_boundary(parts.metrics, "activation"):
        try:
            with writes_locked(galleries):
                state.together(give_back, lead)
        except LeadLostError as error:
            log.error("the failure is not recorded", error=str(error))
        except NobackfillError as error:
            log.error("the failure is not recorded yet", release=release, error=str(error))
            # The mark alone takes less room than what the galleries would write.
            _repeat(lambda: state.together(lambda: state.revise(failed), lead), cancelled)
        with writes_locked(galleries):
            old = parts.serving.replan()
        parts.serving.settle(old)


def _repeat(mark: Callable[[], object], cancelled: threading.Event | None) -> None:
    trouble = ""
    while True:
        try:
            mark()
        except LeadLostError:
            return
        except NobackfillError as error:
            if str(error) != trouble:
                log.error("the failure is not recorded yet", error=str(error))
            trouble = str(error)
        else:
            return
        if cancelled is None or cancelled.wait(_AGAIN_S):
            return


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
