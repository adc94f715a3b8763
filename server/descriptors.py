"""How many files the gateway may have open."""

import resource

# What everything but galleries may need: connections of clients, files sent, Triton's pipes.
_OTHERS = 1024
# What an open gallery takes at most in the mean, with readers of several threads.
_A_GALLERY = 16
# More open ones than this make nothing faster: opening one takes less than a millisecond.
_LARGEST = 512
_SMALLEST = 8


def raise_limit() -> None:
    """Let this process open as many files as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def open_galleries() -> int:
    """How many galleries may be open at once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _LARGEST
    return max(_SMALLEST, min(_LARGEST, (soft - _OTHERS) // _A_GALLERY))
