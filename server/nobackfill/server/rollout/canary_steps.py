"""The time in which a share of the queries meets a release that is not active yet."""

import time
from collections.abc import Mapping

import structlog

from nobackfill.errors import PreconditionError
from nobackfill.server.canary.comparison import CanaryState
from nobackfill.server.rollout.parts import Parts
from nobackfill.server.rollout.run import CancelledError, Phase, Run
from nobackfill.server.state import Canary, State

log = structlog.get_logger("server.canary")

# How often bounds are looked at; evidence holds however often that is.
_EVERY_S = 0.25


class CanarySteps:
    """Waits in the activation's thread, and moves from step to step."""

    def __init__(self, run: Run, parts: Parts) -> None:
        self._run = run
        self._parts = parts

    def wait(self) -> None:
        """Return once the release is promoted.

        Raises PreconditionError where a bound is crossed or the release withdrawn, CancelledError.
        A step takes its time of a gateway that serves: a restart begins it anew, and so does a
        change of the canary's share or steps.
        """
        release, seen, began = self._run.record.release, None, time.monotonic()
        self._run.waiting = True
        try:
            while True:
                self._run.stop_if_cancelled()
                canary = self._parts.canaries.setting()
                if canary is None:
                    # Forgotten by who has called it off, another gateway perhaps.
                    raise CancelledError(f"the activation of release {release} was called off")
                self._judge()
                if canary.promoted:
                    log.info("canary promoted", release=release)
                    self._parts.canaries.end(CanaryState.PROMOTED)
                    return
                step = canary.share, canary.shadow, canary.every_s, canary.steps
                if step != seen:
                    seen, began = step, time.monotonic()
                    log.info("canary", release=release, share=canary.share, shadow=canary.shadow)
                    self._run.report(Phase.CANARY, message=share_of(canary, release))
                if canary.every_s and time.monotonic() - began >= canary.every_s:
                    self._parts.state.together(self._next, self._run.lead)
                self._run.cancelled.wait(_EVERY_S)
        finally:
            self._run.waiting = False

    def _next(self) -> None:
        met = self._parts.canaries.met(self._run.record.release)
        self._parts.state.revise(lambda now: _next_step(now, met=met))

    def _judge(self) -> None:
        withdrawn = self._parts.catalog.releases.get(self._run.record.release)
        reason = self._parts.canaries.verdict()
        if withdrawn is not None:
            reason = f"the release was withdrawn: {withdrawn}"
        if reason is not None:
            self._parts.canaries.end(CanaryState.STOPPED, reason)
            raise PreconditionError(f"its canary stopped: {reason}")


def share_of(canary: Canary, release: int) -> str:
    """A sentence for who watches."""
    does = "is compared with" if canary.shadow else "answers"
    return f"release {release} {does} {canary.share:.3g} of the callers"


def _next_step(now: State, *, met: bool) -> Mapping[str, object]:
    """`met`: whether the release has answered a query; it is not promoted without."""
    record = now.activation
    if record is None or record.canary is None:
        return {}
    canary = record.canary
    if canary.steps:
        values: dict[str, object] = {"share": canary.steps[0], "steps": canary.steps[1:]}
    elif canary.share == 1 and not canary.shadow and met:
        values = {"promoted": True}
    else:
        # The last step stays until somebody promotes it.
        return {}
    return {"activation": record.model_copy(update={"canary": canary.model_copy(update=values)})}
