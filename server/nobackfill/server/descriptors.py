"""How many files the gateway may have open, and what shares them."""

import resource

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
