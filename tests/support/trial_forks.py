"""A process that has imported what a trial of a release needs, and forks one for each who asks.

`python -m tests.support.trial_forks NAME` listens at the abstract socket NAME until stdin ends.
Who connects is told the trial's process, sends the folder that it works in, a line, and the
request, and reads the trial's answer and, in a line of its own, its exit status (-9: killed).
"""

import contextlib
import importlib
import os
import select
import socket
import sys

from nobackfill.release import trial

# What a trial imports once it has its request. No session is open, and no thread runs.
IMPORTED = ("nobackfill.onnx_runtime", "nobackfill.release.probes", "nobackfill.release.probes")


def main(name: str) -> None:
    for module in IMPORTED:
        importlib.import_module(module)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen(64)
        print("listening", flush=True)
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection = listener.accept()[0]
            with connection:
                if os.fork() == 0:
                    listener.close()
                    _attend(connection)
            _reap()


def _reap() -> None:
    """Let go of those who attended to trials that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _attend(connection: socket.socket) -> None:
    """Fork the trial, tell how it ended, and end."""
    child = os.fork()
    if child == 0:
        _try(connection)
    # Who asked may have gone.
    with contextlib.suppress(OSError):
        connection.sendall(f"{child}\n".encode())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.sendall(f"{status}\n".encode())
    os._exit(0)


def _try(connection: socket.socket) -> None:
    """What `python -m nobackfill.release.trial` does."""
    status = 1
    try:
        for descriptor in (0, 1):
            os.dup2(connection.fileno(), descriptor)
        connection.close()
        os.chdir(sys.stdin.readline().removesuffix("\n"))
        trial.main()
        sys.stdout.flush()
        status = 0
    finally:
        os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1])
