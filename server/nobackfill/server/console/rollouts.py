"""Activations that were begun at the console; they go on at the gateway when nobody watches."""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from nobackfill.errors import BusyError, NobackfillError
from nobackfill.server.console.caller import Caller
from nobackfill.server.console.load import Load
from nobackfill.v1 import release_pb2 as pb


@dataclass
class Run:
    """An activation as its last report tells it."""

    release: int
    rollout: str
    phase: str = "begins"
    done: int = 0
    total: int = 0
    message: str = ""
    ended: bool = False
    failed: bool = False
    # When the first item was carried, on the monotonic clock.
    carrying_since: float | None = None

    @property
    def remaining_s(self) -> float | None:
        """Seconds that carrying may still take, by its pace so far."""
        if self.carrying_since is None or not 0 < self.done < self.total:
            return None
        return (time.monotonic() - self.carrying_since) / self.done * (self.total - self.done)


class Rollouts:
    """The last activation that began here, and beginning the next."""

    def __init__(self) -> None:
        self._run: Run | None = None

    def told(self, load: Load) -> Run | None:
        """The last activation, unless what is going on now has left it behind."""
        run = self._run
        if run is None or not run.ended:
            return run
        elsewhere = 0 < load.ratio < 1
        undone = not run.failed and run.release != load.release
        return None if elsewhere or undone else run

    def begin(self, caller: Callable[[], Caller], release: int, rollout: str) -> None:
        """Activate a release. Raises what the call raises at once, as NotPermittedError, and
        BusyError while another activation goes on."""
        with ExitStack() as closing:
            gateway = closing.enter_context(caller())
            reports = gateway.activate(release, rollout=rollout)
            run = Run(release, rollout)
            try:
                _take(run, next(reports))
            except StopIteration as error:
                raise BusyError("the gateway reported nothing; try again") from error
            # Only now it has begun.
            self._run = run
            closing.pop_all()

        def follow() -> None:
            with gateway:
                try:
                    for report in reports:
                        _take(run, report)
                except NobackfillError as error:
                    run.failed = True
                    run.message = str(error)
                finally:
                    run.ended = True

        threading.Thread(target=follow, name="console-rollout", daemon=True).start()


def _take(run: Run, report: pb.ActivateReleaseResponse) -> None:
    run.phase = pb.Phase.Name(report.phase).removeprefix("PHASE_").lower()
    if report.total:
        # Only reports of carrying count.
        run.done, run.total = report.done, report.total
    run.message = report.message
    run.failed = report.phase == pb.PHASE_FAILED
    if report.phase == pb.PHASE_UPGRADING and run.carrying_since is None:
        run.carrying_since = time.monotonic()
