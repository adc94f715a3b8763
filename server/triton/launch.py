"""Run a program that dies with its parent: `python launch.py PARENT_PID PROGRAM ARGUMENT...`.

The kernel sends SIGKILL when the thread that started us ends (PR_SET_PDEATHSIG survives exec).
A separate program, because running Python between fork and exec is unsafe in a threaded process.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    # The parent may have died before the line above.
    if os.getppid() != parent:
        sys.exit("the parent is gone")
    os.execv(program[0], program)  # noqa: S606 - the program is ours to choose


if __name__ == "__main__":
    main()
