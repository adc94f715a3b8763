"""Run a program and end all of it: `python launch.py PROGRAM ARGUMENT...`, in a session of its own.

Standard input is a leash: when whoever holds the other end is gone, however it ended, or when the
program has, everything in our process group is killed. Triton needs it: the processes that run its
models may wait for it for ever, when it is killed while it loads them. SIGTERM is passed on.
A separate program, because running Python between fork and exec is unsafe in a threaded process.
"""

import ctypes
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1


def main() -> None:
    launcher = os.getpid()
    program = os.fork()
    if not program:
        _become(sys.argv[1:], launcher)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(program, signal.SIGTERM))
    threading.Thread(target=_hold, daemon=True).start()
    os.waitpid(program, 0)
    _end_all()


def _become(command: list[str], launcher: int) -> None:
    """Exec; should the launcher be killed, the kernel kills the program."""
    if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) == 0 == os.getppid() - launcher:
        os.execv(command[0], command)  # noqa: S606 - the program is ours to choose
    os._exit(1)


def _hold() -> None:
    os.read(0, 1)
    _end_all()


def _end_all() -> None:
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
