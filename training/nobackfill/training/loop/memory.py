"""Memory of a training on processors."""

import ctypes
import sys

# Of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = 1 << 30


def keep_freed_memory() -> None:
    """What a step frees is kept for the next one. glibc gives blocks of some megabytes back to the
    system, which clears every page of them anew: a seventh of a small network's time.

    For the whole process; where the C library is another one, nothing is done.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
