"""Galleries that are ahead of the active release: what a kill or a failure in a swap has left."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from gallery import staging
from server.core import Core
from server.galleries.hosted import NOTE, ROLLOUT
from server.galleries.plan import Plan


def return_galleries(core: Core) -> None:
    """Bring every gallery back to the active release, where one is ahead of it; does nothing while
    an activation is recorded, which goes on from there. Plans are to be made anew afterwards."""
    now = core.state.now
    for hosted in core.galleries.all():
        if now.activation is not None or now.active is None:
            return
        state = {ROLLOUT: None, NOTE: None}
        if hosted.spec().release > now.active:
            staging.rollback(hosted.store, leave_behind=True, state=state)
        elif hosted.spec().release == now.active and any(map(hosted.store.state_get, state)):
            hosted.store.state_set(state)


def recover(core: Core) -> list[Plan]:
    """The same beside puts and searches, and plans to it; returns those they replace."""
    with all_alone(core):
        return_galleries(core)
        return core.replan()


@contextmanager
def all_alone(core: Core) -> Iterator[None]:
    """No gallery is put to meanwhile. Passed by name, as a flip passes them."""
    with core.galleries.holding() as galleries, ExitStack() as alone:
        for hosted in galleries:
            alone.enter_context(hosted.writes.alone())
        yield
