"""Running an action in a forked child with a fault armed: what a crash sweep is made of."""

import gc
import json
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nobackfill.durable import FAULT_INJECTOR
from nobackfill.errors import NobackfillError

KILLED = -9


@dataclass(frozen=True)
class Outcome:
    """How a child ended: exit status (-9: killed), durable steps taken, whether the fault fired.

    A killed child has taken the step it was killed at; its `error` is empty.
    """

    status: int
    steps: int
    fired: bool
    error: str


def fork() -> int:
    """`os.fork`, and no collection of garbage in the child: among what a test left may be a session
    of onnxruntime, whose end waits for threads that the parent alone has."""
    gc.disable()
    child = os.fork()
    if child:
        gc.enable()
    return child


def run_with_fault(spec: str | None, action: Callable[[], object]) -> Outcome:
    """Fork, arm `spec` (see nobackfill.durable), run `action`.

    Our own errors end the child with their exit codes; any other exception fails the caller, as no
    fault may show as a traceback.
    """
    reader, writer = os.pipe()
    child = fork()
    if child == 0:
        os.close(reader)
        _child(writer, spec, action)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not text:
        assert status == KILLED, f"the child ended with {status} and said nothing"
        return Outcome(status, 0, True, "")
    said = json.loads(text)
    assert not said["traceback"], said["traceback"]
    return Outcome(status, said["steps"], said["fired"], said["error"])


def sweep(
    kind: str,
    action: Callable[[], object],
    prepare: Callable[[], object],
    first: int = 1,
    stride: int = 1,
) -> Iterator[tuple[int, Outcome]]:
    """Raise N until a run ends without the fault firing; prepare before each run.

    Yields (N, outcome) of every run in which it fired. With a stride, only every stride-th step,
    from the `first` on.
    """  # fmt: skip
    step = first
    while True:
        prepare()
        outcome = run_with_fault(f"{kind}@{step}", action)
        if not outcome.fired:
            return
        yield step, outcome
        step += stride


def first_of(steps: int, stride: int) -> int:
    """Where a sweep by `stride` begins that ends with the last of `steps`."""
    return (steps - 1) % stride + 1


def count_steps(action: Callable[[], object]) -> int:
    """How many durable steps an undisturbed run takes."""
    outcome = run_with_fault(None, action)
    assert outcome.status == 0, outcome.error
    return outcome.steps


def _child(writer: int, spec: str | None, action: Callable[[], object]) -> None:
    status, error, trace = 0, "", ""
    try:
        FAULT_INJECTOR.arm(spec)
        action()
    except NobackfillError as refusal:
        status, error = refusal.exit_code, str(refusal)
    except BaseException:  # noqa: BLE001 - told to the parent, which fails
        status, trace = 1, traceback.format_exc()
    finally:
        said = {
            "steps": FAULT_INJECTOR.steps,
            "fired": FAULT_INJECTOR.fired,
            "error": error,
            "traceback": trace,
        }
        os.write(writer, json.dumps(said).encode())
        os._exit(status)
