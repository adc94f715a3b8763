"""Going back to the release before, and letting go of old ones for good."""

import time
from dataclasses import dataclass

import structlog

from nobackfill.errors import PreconditionError
from nobackfill.gallery.spec import SpaceInfo
from nobackfill.server.galleries.galleries import GalleryRegistry
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.rollout.activation import Activations, return_galleries, writes_locked
from nobackfill.server.serving import Serving
from nobackfill.server.state import GatewayState, State

log = structlog.get_logger("server.rollback")

LARGEST_LISTING = 1000
# A rollback without a release, repeated within this time, is taken for a client's retry.
RETRY_S = 300.0


@dataclass(frozen=True)
class Rollback:
    """What a rollback did, or would do: `lost` items have no vector in the space that answers then;
    `listed` are the first of them, as (gallery, id)."""

    release: int
    lost: int
    listed: list[tuple[str, str]]


class Rollbacks:
    """Rollbacks of one gateway: looked at first, then done, one at a time; and retirement, after
    which there is no way back."""

    def __init__(
        self,
        state: GatewayState,
        galleries: GalleryRegistry,
        serving: Serving,
        activations: Activations,
    ) -> None:
        self._state = state
        self._galleries = galleries
        self._serving = serving
        self._activations = activations
        # Whether somebody looked since the last one, or since the start.
        self._looked = False

    def plan(self) -> Rollback:
        """Count and list what would not be found. Raises PreconditionError if there is no way
        back."""
        self._looked = True
        return self._plan()

    def do(self, to: int | None) -> Rollback:
        """Call off what is under way, and let release `to` answer again, everywhere at once; None:
        the one before.

        Repeated, it changes nothing: with `to` once that answers; without it for some minutes, as
        long as nobody looked what a rollback would cost and no activation began. Raises BusyError
        while another is done, PreconditionError if a rollback does not lead to `to`,
        UnavailableError if its models cannot be loaded; then nothing has changed. A model server
        that is away loads them when it comes.
        """
        with self._activations.held():
            return self._return(self._state.active() if self._again(to) else self._prepare(to))

    def stop_canary(self, release: int) -> Rollback:
        """End the canary of a release, so that the active one answers all callers again.

        The state decides in one step whether the canary stops or is promoted. Raises
        PreconditionError where it was promoted or is not under way, and as `do`.
        """
        with self._activations.held():
            target = self._state.active()
            self._serving.prepare(target)
            self._activations.drop_canary(release)
            self._activations.call_off()
            return self._return(target)

    def retire(self) -> list[int]:
        """Drop the spaces and models of every release older than the active one, for good.

        A gallery that stays behind keeps its active space. Returns the releases that are gone now.
        Raises BusyError during an activation or a rollback.
        """
        with self._activations.held():
            self._activations.refuse_second("retire the old releases")
            now, active = self._state.now, self._state.active()
            galleries = self._galleries
            kept = {part.query.release for h in galleries.all() for part in h.plan.parts} | {active}
            present = {info.spec.release for h in galleries.all() for info in h.store.spaces()}
            gone = sorted((present | set(now.previous)) - kept)
            self._state.change(
                previous=tuple(n for n in now.previous if n in kept),
                retired=tuple(sorted({*now.retired, *(n for n in gone if n < active)})),
            )
            self._serving.settle(self._serving.replan())
            self._serving.drop_unused()
        return [release for release in gone if release < active]

    def _again(self, to: int | None) -> bool:
        """Whether this was done already."""
        now = self._state.now
        if now.active is None or now.activation is not None:
            return False
        if to is not None:
            return now.active == to
        recent = now.rolled_back is not None and 0 <= time.time() - now.rolled_back < RETRY_S
        return recent and not self._looked

    def _prepare(self, to: int | None) -> int:
        """The release that will answer: its models loaded, and no activation under way."""
        target = _target(self._state.now)
        if to not in (None, target):
            raise PreconditionError(
                f"a rollback leads to release {target}, not to {to}; look again what it would cost"
            )
        self._serving.prepare(target)
        self._activations.call_off()
        return target

    def _return(self, target: int) -> Rollback:
        with writes_locked(self._galleries):
            result = self._state.together(lambda: self._switch(target))
            old = self._serving.replan()
        self._serving.settle(old)
        log.info("rolled back", release=target, lost=result.lost)
        return result

    def _switch(self, target: int) -> Rollback:
        # The activation may have ended in the meantime, or been called off before its switch.
        result = Rollback(target, 0, [])
        if self._state.now.active != target:
            result = self._plan()
            self._serving.return_to(target)
            self._looked = False
        return_galleries(self._galleries, target)
        return result

    def _plan(self) -> Rollback:
        target, lost, listed = _target(self._state.now), 0, list[tuple[str, str]]()
        for hosted in self._galleries.all():
            space = _space_of(hosted, target)
            if space is None:
                continue
            lost += hosted.store.left_behind(space.spec.space)
            items = hosted.store.left_behind_items(
                space.spec.space, limit=LARGEST_LISTING - len(listed) or 1
            )
            listed += [(hosted.name, item.id) for item in items]
        return Rollback(target, lost, listed[:LARGEST_LISTING])


def _target(now: State) -> int:
    """The release a rollback leads to."""
    record = now.activation
    if record is not None and now.active is not None and record.release != now.active:
        # Not switched yet: the old release still answers.
        return now.active
    if not now.previous:
        raise PreconditionError(
            "there is no release to return to: none was active before, or it was retired"
        )
    return now.previous[-1]


def _space_of(hosted: Hosted, target: int) -> SpaceInfo | None:
    """The space that would answer in a gallery, None where the gallery stays as it is."""
    infos = hosted.store.spaces()
    active = next(info for info in infos if info.state == "active")
    if active.spec.release <= target:
        return active if len(hosted.plan.parts) > 1 else None
    previous = [info for info in infos if info.state == "previous"]
    return max(previous, key=lambda info: info.activated, default=None)
