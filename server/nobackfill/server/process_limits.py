"""The C library's malloc: how many arenas there may be, and what large arrays leave there."""

import contextlib
import ctypes
import resource

from nobackfill.server.settings import cores

# mallopt's, of glibc.
_M_ARENA_MAX, _M_MMAP_THRESHOLD = -8, -3
# Larger pieces are the system's and go back to it. glibc's own bound rises with what is freed, to
# 32 MiB.
_LARGE = 1 << 20
_LEAST = 2
# Python's lock lets one thread allocate at a time, and threads that build graphs seldom do.
_CORES_EACH = 4


def most_arenas() -> int:
    """How many this process may have on these cores."""
    return max(_LEAST, cores() // _CORES_EACH)


def bound_arenas() -> None:
    """Bound the arenas of this process and what they hold; to be called before it has many
    threads, numpy's included.

    glibc takes eight a core. An activation has a thread of its own, so each in turn leaves its
    graph's room in another arena, between small objects that live on: 20 MiB in 20 swaps of 2,900
    items on 2 cores, nothing with this bound, where searches and builds take as long. Reading a
    gallery of 40,000 x 512 leaves pieces of arrays so, .19 of its vectors' bytes.
    """
    # Another C library has neither mallopt nor these arenas.
    with contextlib.suppress(AttributeError):
        malloc = ctypes.CDLL(None)
        malloc.mallopt(_M_ARENA_MAX, most_arenas())
        malloc.mallopt(_M_MMAP_THRESHOLD, _LARGE)


# How many files the gateway may have open, and what shares them.

# Wanted: connections and galleries take a few each.
_WANTED = 65_536
# What everything but galleries may need: connections of clients, files sent, Triton's pipes.
_OTHERS = 1024
# What an open gallery takes at most in the mean, with readers of several threads.
_A_GALLERY = 16
# More open ones than this make nothing faster: opening one takes less than a millisecond.
_MOST_GALLERIES = 512
_LEAST_GALLERIES = 8
_MOST_CONNECTIONS = 4096


def raise_limit() -> None:
    """Raise this process's soft limit of open files towards its hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_galleries() -> int:
    """How many galleries may be open at once."""
    return max(_LEAST_GALLERIES, min(_MOST_GALLERIES, (_limit() - _OTHERS) // _A_GALLERY))


def open_connections() -> int:
    """How many connections may be taken: half of the open files at most."""
    return min(_MOST_CONNECTIONS, _limit() // 2)


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _WANTED if soft == resource.RLIM_INFINITY else soft
