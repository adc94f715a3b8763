"""A release's models, first loaded and run where they can do no harm: in a child with limits.

A graph that passes every rule may still end the process that loads it (a constant folded by zero is
SIGFPE), fill its memory or never finish, and so may a file of golden probes. So rules, sessions and
probes run in a subprocess first, on a device, in a gateway and at the publisher's alike; what it
survives, the caller may load. `python -m nobackfill.release.trial` is that subprocess.
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
from nobackfill.release.models import CHUNK, Files

MEMORY_BYTES = 4 * 2**30
CPU_SECONDS = 240
WALL_SECONDS = 120
# Sessions of many threads reserve address space that counts as memory here.
_MOST_THREADS = 4
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
_LOOK_SECONDS = 0.2
# -P: a file of the folder that a command runs in is none of its modules.
_COMMAND = [sys.executable, "-P", "-m", "nobackfill.release.trial"]


class _Request(BaseModel):
    """`files`: a folder, or published paths with local ones. `upgrades` as in probes.py."""

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
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Check every ONNX file of a release that `files` holds by the rules of the ONNX check, load it
    and run its golden probes, within limits of memory, processor and time. Upgrades run on a full
    chunk, of as many rows as devices and gateways give them.

    `upgrades`: releases whose upgrades are probed (None: all). `meanwhile` is called now and then;
    what it raises ends the trial. Raises VerificationError, naming what is refused, or the limit
    that was met.
    """
    request = _Request(
        manifest=manifest,
        files=files if isinstance(files, Path) else dict(files),
        upgrades=None if upgrades is None else sorted(upgrades),
        threads=min(threads, _MOST_THREADS),
        memory_bytes=MEMORY_BYTES,
        cpu_seconds=CPU_SECONDS,
    )
    refused = refusal_in_child(request, meanwhile)
    if refused is not None:
        raise VerificationError(refused)


def refusal_in_child(request: _Request, meanwhile: Callable[[], None]) -> str | None:
    """What `refusal` gives, from a child with limits; and if that dies, of what."""
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
                    # What was to be written goes on by itself.
                    text = None
                    meanwhile()
        finally:
            child.kill()
    return f"its models took more than {WALL_SECONDS} s to be loaded and probed; refused"


def _refusal_of(status: int, answer: str) -> str | None:
    if status:
        return (
            f"its models end the process that tries them ({_cause(status)}); refused. "
            "Publish them again from sound files"
        )
    refused: str | None = json.loads(answer)["refused"]
    return refused


def _cause(status: int) -> str:
    if status == -signal.SIGXCPU:
        return f"more than {CPU_SECONDS} s of processor"
    if status < 0:
        return f"{signal.Signals(-status).name}, within {MEMORY_BYTES >> 30} GiB of memory"
    return f"exit status {status}, within {MEMORY_BYTES >> 30} GiB of memory"


def refusal(request: _Request) -> str | None:
    """Why a release is refused; None if it is good. Runs its models in this process."""
    from nobackfill.release.probes import check_probes, check_release

    try:
        check_release(request.files, request.manifest)
        check_probes(
            request.files,
            request.manifest,
            upgrades=request.upgrades,
            threads=request.threads,
            rows=CHUNK,
        )
    except (VerificationError, ConfigurationError) as error:
        # The latter: what reads its tokenizer is not installed here.
        return str(error)
    except MemoryError:
        return f"its models take more than {MEMORY_BYTES >> 30} GiB of memory; refused"
    return None


def _limit(memory_bytes: int, cpu_seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 5))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Read a request from stdin, write the refusal or null to stdout, both JSON."""
    request = _Request.model_validate_json(sys.stdin.read())
    _limit(request.memory_bytes, request.cpu_seconds)
    print(json.dumps({"refused": refusal(request)}))


if __name__ == "__main__":
    main()
