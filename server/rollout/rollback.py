"""Going back to the release before, and letting go of old ones for good."""

from contextlib import ExitStack
from dataclasses import dataclass

import structlog

from gallery import staging
from gallery.spec import SpaceInfo
from release.errors import BusyError, PreconditionError
from server.core import Core
from server.galleries.hosted import NOTE, ROLLOUT, Hosted
from server.rollout.activation import Activations

log = structlog.get_logger("server.rollback")

LARGEST_LISTING = 1000


@dataclass(frozen=True)
class Rollback:
    """What a rollback did, or would do: `lost` items have no vector in the space that answers then;
    `listed` are the first of them, as (gallery, id)."""

    release: int
    lost: int
    listed: list[tuple[str, str]]


def plan_rollback(core: Core) -> Rollback:
    """Count and list what would not be found. Raises PreconditionError if there is no way back."""
    target, lost, listed = _target(core), 0, list[tuple[str, str]]()
    for hosted in core.galleries.all():
        space = _space_of(hosted, core, target)
        if space is None:
            continue
        lost += staging.left_behind(hosted.store, space.spec.space)
        items = staging.left_behind_items(
            hosted.store, space.spec.space, limit=LARGEST_LISTING - len(listed) or 1
        )
        listed += [(hosted.name, item.id) for item in items]
    return Rollback(target, lost, listed[:LARGEST_LISTING])


def roll_back(core: Core, activations: Activations) -> Rollback:
    """Call off what is under way, and let the release before answer again, everywhere at once.

    Raises PreconditionError if there is no way back, UnavailableError if its models cannot be
    loaded; then nothing has changed.
    """
    target = _target(core)
    core.models.load(core.catalog.manifest(target))
    activations.call_off()
    # The activation may have ended in the meantime, or been called off before its switch.
    now = core.state.now
    with ExitStack() as alone:
        for hosted in core.galleries.all():
            alone.enter_context(hosted.writes.alone())
        result = plan_rollback(core) if now.active != target else Rollback(target, 0, [])
        if now.active != target:
            core.state.change(active=target, previous=now.previous[:-1])
        return_galleries(core)
        old = core.replan()
    core.settle(old)
    log.info("rolled back", release=target, lost=result.lost)
    return result


def return_galleries(core: Core) -> None:
    """Bring every gallery back to the active release, where one is ahead of it: also what a kill in
    the middle of a rollback has left, which nobody else leaves without an activation under way."""
    now = core.state.now
    for hosted in core.galleries.all():
        if now.activation is not None or now.active is None:
            return
        state = {ROLLOUT: None, NOTE: None}
        if hosted.spec().release > now.active:
            staging.rollback(hosted.store, leave_behind=True, state=state)
        elif hosted.spec().release == now.active and any(map(hosted.store.state_get, state)):
            hosted.store.state_set(state)


def retire(core: Core, activations: Activations) -> list[int]:
    """Drop the spaces and models of every release older than the active one, for good.

    A gallery that stays behind keeps its active space. Returns the releases that are gone now.
    Raises BusyError during an activation.
    """
    if activations.running() is not None:
        raise BusyError("an activation is running; retire the old releases when it has ended")
    now, active = core.state.now, core.active().release
    kept = {part.query.release for h in core.galleries.all() for part in h.plan.parts} | {active}
    present = {info.spec.release for h in core.galleries.all() for info in h.store.spaces()}
    gone = sorted((present | set(now.previous)) - kept)
    core.state.change(
        previous=tuple(n for n in now.previous if n in kept),
        retired=tuple(sorted({*now.retired, *(n for n in gone if n < active)})),
    )
    core.settle(core.replan())
    core.drop_unused()
    return [release for release in gone if release < active]


def _target(core: Core) -> int:
    """The release a rollback leads to."""
    now = core.state.now
    record = now.activation
    if record is not None and now.active is not None and record.release != now.active:
        # Not switched yet: the old release still answers.
        return now.active
    if not now.previous:
        raise PreconditionError(
            "there is no release to return to: none was active before, or it was retired"
        )
    return now.previous[-1]


def _space_of(hosted: Hosted, core: Core, target: int) -> SpaceInfo | None:
    """The space that would answer in a gallery, None where the gallery stays as it is."""
    infos = hosted.store.spaces()
    active = next(info for info in infos if info.state == "active")
    if active.spec.release <= target:
        return active if len(hosted.plan.parts) > 1 else None
    previous = [info for info in infos if info.state == "previous"]
    return max(previous, key=lambda info: info.activated, default=None)
