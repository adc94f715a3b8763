"""Galleries that are ahead of the active release: what a kill or a failure in a swap has left."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import structlog

from nobackfill.server.galleries.galleries import UNUSABLE, Galleries
from nobackfill.server.galleries.hosted import NOTE, ROLLOUT, Hosted

log = structlog.get_logger("server.recovery")


def return_galleries(galleries: Galleries, active: int) -> dict[str, Exception]:
    """Bring every gallery back to the active release, where one is ahead of it. Plans are to be
    made anew afterwards.

    Returns what keeps a gallery from it, by name: it stays where it is, the others do not wait.
    """
    kept: dict[str, Exception] = {}
    for hosted in galleries.all():
        try:
            _return(hosted, active)
        except UNUSABLE as error:
            log.error("gallery not brought back", gallery=hosted.name, error=str(error))
            kept[hosted.name] = error
    return kept


def _return(hosted: Hosted, active: int) -> None:
    state = {ROLLOUT: None, NOTE: None}
    if hosted.spec().release > active:
        hosted.store.rollback(leave_behind=True, state=state)
    elif hosted.spec().release == active and any(map(hosted.state, state)):
        hosted.remember(state)


@contextmanager
def writes_locked(galleries: Galleries) -> Iterator[None]:
    """No gallery is put to meanwhile. Locked by rising name, as a flip locks them."""
    with galleries.holding() as held, ExitStack() as locks:
        for hosted in held:
            locks.enter_context(hosted.write_lock.exclusive())
        yield
