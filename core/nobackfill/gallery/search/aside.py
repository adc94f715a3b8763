"""Threads that let searches go first."""

import os
import threading

_NICE = 10


def give_way() -> None:
    """Let searches go before this thread, and before the processes that it starts from now on."""
    # Who is nicer already may not take it back.
    nice = max(_NICE, os.getpriority(os.PRIO_PROCESS, 0))
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
