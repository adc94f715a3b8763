"""Resources that a process must not share with one that it forks: connections, and locks that
another thread held at that moment. Servers that open things before they fork their workers meet
this."""

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """An object that is open while its process forks."""

    def before_fork(self) -> None:
        """Wait until no other thread is at work in it, and keep it so."""

    def after_fork(self, child: bool) -> None:
        """Go on; in the child without what is its parent's."""


_OPEN: "weakref.WeakSet[Forked]" = weakref.WeakSet()
# Of the fork that is under way.
_forking: list[Forked] = []


def watch(one: Forked) -> None:
    """Tell `one` of every fork, as long as somebody uses it."""
    _OPEN.add(one)


def _before() -> None:
    for one in list(_OPEN):
        one.before_fork()
        _forking.append(one)


def _after(child: bool) -> None:
    while _forking:
        _forking.pop().after_fork(child)


os.register_at_fork(
    before=_before,
    after_in_parent=lambda: _after(child=False),
    after_in_child=lambda: _after(child=True),
)
