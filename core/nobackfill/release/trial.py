"""Load and run a release's models for the first time, in a child process with limits.

A graph that passes every rule may still end the process that loads it (a division by zero in
constant folding is SIGFPE), fill its memory, or never finish. So may a file of golden probes.
Therefore devices, gateways and publishers first run rules, sessions and probes in a child. `python
-m nobackfill.release.trial` is this child.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from nobackfill.errors import ConfigurationError, VerificationError
from nobackfill.release.manifest import Manifest
from nobackfill.release.models import CHUNK_ROWS, Files

MEMORY_BYTES = 4 * 2**30
CPU_SECONDS = 240
WALL_SECONDS = 120
# Each thread of a session reserves address space, which the memory limit counts.
_MOST_THREADS = 4
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
_LOOK_SECONDS = 0.2
# -P: Python must not import modules from the current folder.
_COMMAND = [sys.executable, "-P", "-m", "nobackfill.release.trial"]


class _Request(BaseModel):
    """The request to the child, as JSON.

    Attributes:
        manifest: The release.
        files: The publication folder, or the local file of each published path.
        upgrades: Upgrades from these releases are probed; None: from all.
        threads: Threads of each session.
        memory_bytes: Limit of address space.
        cpu_seconds: Limit of processor time.
    """

    model_config = ConfigDict(extra="forbid")

    manifest: Manifest
    files: Path | dict[str, Path]
    upgrades: list[int] | None
    threads: int
    memory_bytes: int
    cpu_seconds: int


def try_release(
    files: Files,
    manifest: Manifest,
    *,
    upgrades: Collection[int] | None = None,
    threads: int = 1,
    poll: Callable[[], None] = lambda: None,
) -> None:
    """Check, load and probe all models of a release, as far as `files` has them, in a child
    process.

    The child has limits of memory (4 GiB), processor time (240 s) and time (120 s). Upgrades run on
    a full chunk of rows, as on devices and gateways. Blocks until the child ends. Nothing is
    written.

    Args:
        files: The publication folder or the draft's files. In a folder, missing files are skipped.
        manifest: The release.
        upgrades: Probe the upgrades from these releases; None: from all.
        threads: Threads of each session, at least 1; more than 4 count as 4.
        poll: Called every 0.2 s; its error ends the trial. The default does nothing.

    Raises:
        VerificationError: A model is refused, met a limit or crashed the child, or the extra `text`
            is needed and not installed. The message names the model if it is known.
        Exception: Any error of `poll`; the child is killed.
        OSError: The child cannot be started.
    """
    request = _Request(
        manifest=manifest,
        files=files if isinstance(files, Path) else dict(files),
        upgrades=None if upgrades is None else sorted(upgrades),
        threads=min(threads, _MOST_THREADS),
        memory_bytes=MEMORY_BYTES,
        cpu_seconds=CPU_SECONDS,
    )
    reason = explain_trial_failure_in_child(request, poll)
    if reason is not None:
        raise VerificationError(reason)


def explain_trial_failure_in_child(request: _Request, poll: Callable[[], None]) -> str | None:
    """Run `explain_trial_failure` in a child with limits; if the child dies, return the cause.

    Blocks until the child ends; it never outlives the call.

    Args:
        request: The request.
        poll: Called every 0.2 s; its error ends the child, and is raised.

    Returns:
        Why the release is refused, also after 120 s without an answer; None if it is valid.

    Raises:
        OSError: The child cannot be started.
        Exception: Any error of `poll`.
    """
    end = time.monotonic() + WALL_SECONDS
    text: str | None = request.model_dump_json()
    with subprocess.Popen(
        _COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **dict.fromkeys(_THREADS, "1")},
    ) as child:
        try:
            while time.monotonic() < end:
                try:
                    answer, _ = child.communicate(text, timeout=_LOOK_SECONDS)
                    return _refusal_of(child.returncode, answer)
                except subprocess.TimeoutExpired:
                    # communicate() goes on writing the text itself.
                    text = None
                    poll()
        finally:
            child.kill()
    return (
        f"the release's models took more than {WALL_SECONDS} s to be loaded and tested in a child "
        "process; the release is refused. Try again on an idle machine, or ask its publisher for "
        "smaller models"
    )


def _refusal_of(status: int, answer: str) -> str | None:
    if status:
        return (
            f"the release's models crash the process that loads them ({_cause(status)}); the "
            "release is refused. Publish it again with valid models"
        )
    reason: str | None = json.loads(answer)["refused"]
    return reason


def _cause(status: int) -> str:
    if status == -signal.SIGXCPU:
        return f"more than {CPU_SECONDS} s of processor time"
    if status < 0:
        return f"{signal.Signals(-status).name}, within {MEMORY_BYTES >> 30} GiB of memory"
    return f"exit status {status}, within {MEMORY_BYTES >> 30} GiB of memory"


def explain_trial_failure(request: _Request) -> str | None:
    """Run the models of a release in this process, and explain why the release is refused.

    A model that crashes ends the process. `request` decides which upgrades are probed; its limits
    are not set here. Any other error passes.

    Returns:
        The sentence of the VerificationError or ConfigurationError, or one on too little memory;
        None if the release is valid.
    """
    from nobackfill.release.probes import check_probes, check_release

    try:
        check_release(request.files, request.manifest)
        check_probes(
            request.files,
            request.manifest,
            upgrades=request.upgrades,
            threads=request.threads,
            least_row_count=CHUNK_ROWS,
        )
    except (VerificationError, ConfigurationError) as error:
        # ConfigurationError: the library for its tokenizer is not installed here.
        return str(error)
    except MemoryError:
        return (
            f"the release's models need more than {MEMORY_BYTES >> 30} GiB of memory to be loaded "
            "and tested; the release is refused. Ask its publisher for smaller models"
        )
    return None


def _limit(memory_bytes: int, cpu_seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 5))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Read a request from stdin, and write the reason of a refusal, or null, to stdout, both as
    JSON.

    Sets the limits of this process for good: memory, processor time, no files and no core dump.

    Raises:
        pydantic.ValidationError: The request is invalid.
    """
    request = _Request.model_validate_json(sys.stdin.read())
    _limit(request.memory_bytes, request.cpu_seconds)
    print(json.dumps({"refused": explain_trial_failure(request)}))


if __name__ == "__main__":
    main()
