"""Activations that were begun at the console; they go on at the gateway when nobody watches."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from nobackfill.errors import BusyError, NobackfillError
from nobackfill.server.console.caller import Caller
from nobackfill.v1 import release_pb2 as pb


@dataclass
class Run:
    """An activation as its last report tells it."""

    release: int
    rollout: str
    began: float
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
    """The last activation, and beginning the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.run: Run | None = None

    def begin(self, caller: Callable[[], Caller], release: int, rollout: str) -> None:
        """Activate a release. Raises BusyError while another one that began here goes on, and what
        the call raises at once, as NotPermittedError."""
        with self._lock:
            if self.run is not None and not self.run.ended:
                raise BusyError(f"the activation of release {self.run.release} goes on")
            before, run = self.run, Run(release, rollout, time.monotonic())
            self.run = run
        gateway = caller()
        reports = gateway.activate(release, rollout=rollout)
        try:
            _take(run, next(reports))
        except BaseException as error:
            gateway.close()
            with self._lock:
                # Refused: nothing began.
                run.ended = True
                self.run = before
            if isinstance(error, StopIteration):
                raise BusyError("the gateway reported nothing; try again") from error
            raise

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
