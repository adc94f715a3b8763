"""Run a command that ends when its parent does: `python demo/leash.py PARENT_PID COMMAND ...`.

Linux sends SIGTERM to this process, and to what it becomes, when the parent dies by whatever cause.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # The parent may have died before the request was made.
    if os.getppid() == int(sys.argv[1]):
        os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - the command is the demo's own
