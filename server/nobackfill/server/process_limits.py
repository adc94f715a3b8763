"""Set limits of this process: malloc's arenas, and open files."""

import contextlib
import ctypes
import resource

from nobackfill.server.settings import usable_cores

# Parameters of glibc's mallopt.
_M_ARENA_MAX, _M_MMAP_THRESHOLD = -8, -3
# Larger blocks come from the system and return to it. glibc's own threshold rises with freed
# blocks, up to 32 MiB.
_MMAP_BYTES = 1 << 20
_MIN_ARENAS = 2
# Cores for each arena: Python's lock lets one thread allocate at a time, and threads that build
# graphs seldom allocate.
_CORES_PER_ARENA = 4


def max_malloc_arenas() -> int:
    """Return the most arenas of malloc for this process: one for each four cores that it may use,
    at least 2.
    """
    return max(_MIN_ARENAS, usable_cores() // _CORES_PER_ARENA)


def limit_malloc_arenas() -> None:
    """Limit malloc's arenas and what they retain; call it before the process has many threads.

    glibc allows eight arenas for each core. Each activation has a thread of its own, and leaves
    freed memory of its graph in another arena, between small live objects: 20 MiB in 20 swaps of
    2,900 items on 2 cores. With this limit nothing is left, and searches and builds take as long.
    Reading a gallery of 40,000 x 512 vectors left 19 % of their bytes in the same way. Without
    glibc this does nothing. It holds until the process ends; a second call changes nothing.
    """
    # Other C libraries have neither mallopt nor these arenas.
    with contextlib.suppress(AttributeError):
        malloc = ctypes.CDLL(None)
        malloc.mallopt(_M_ARENA_MAX, max_malloc_arenas())
        malloc.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)


# Target for the limit of open files: each connection and gallery needs some.
_TARGET_FILES = 65_536
# Files for everything else: connections of clients, files being sent, Triton's pipes.
_OTHER_FILES = 1024
# Mean number of files of an open gallery, with readers of several threads.
_FILES_PER_GALLERY = 16
# More open galleries bring no speed: opening one takes less than a millisecond.
_MAX_GALLERIES = 512
_MIN_GALLERIES = 8
_MAX_CONNECTIONS = 4096


def raise_open_file_limit() -> None:
    """Raise this process's soft limit of open files to 65,536, or to the hard limit if that is
    lower.

    A higher limit stays. It raises nothing for a process that may not go further. Processes that
    are started later inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _TARGET_FILES if hard == resource.RLIM_INFINITY else min(_TARGET_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def max_open_galleries() -> int:
    """Return how many galleries may be open at once, 8 to 512, by the present soft limit of open
    files.

    A gallery counts as 16 files, after 1024 files for everything else.
    """
    return max(_MIN_GALLERIES, min(_MAX_GALLERIES, (_limit() - _OTHER_FILES) // _FILES_PER_GALLERY))


def max_open_connections() -> int:
    """Return how many connections may be open: at most half of the present soft limit of open
    files, and at most 4096.
    """
    return min(_MAX_CONNECTIONS, _limit() // 2)


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _TARGET_FILES if soft == resource.RLIM_INFINITY else soft
