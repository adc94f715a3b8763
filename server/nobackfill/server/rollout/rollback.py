"""Roll back to the previous release, and retire old releases for good."""

import time
from dataclasses import dataclass

import structlog

from nobackfill.errors import PreconditionError
from nobackfill.gallery.spec import SpaceInfo
from nobackfill.server.galleries.hosted import GalleryRegistry, HostedGallery
from nobackfill.server.rollout.activation import Activations, lock_writes, roll_back_galleries
from nobackfill.server.serving import PlanManager
from nobackfill.server.state import GatewayState, State

log = structlog.get_logger("server.rollback")

LARGEST_LISTING = 1000
# A rollback that names no release, repeated within this time (seconds), counts as a client's retry.
RETRY_S = 300.0


@dataclass(frozen=True)
class RollbackReport:
    """Describe the result of a rollback, or its cost beforehand.

    Attributes:
        release: the release that answers afterwards.
        lost_count: number of items without a vector in that release's space, which its searches
            cannot find.
        first_lost_items: gallery and id of the first lost items, at most LARGEST_LISTING.
    """

    release: int
    lost_count: int
    first_lost_items: list[tuple[str, str]]


@dataclass(eq=False)
class Rollbacks:
    """Plan and run rollbacks, one at a time, and retire old releases."""

    _state: GatewayState
    _galleries: GalleryRegistry
    _serving: PlanManager
    _activations: Activations
    # Whether a client planned a rollback since the last one, or since the start.
    _was_planned: bool = False

    def preview(self) -> RollbackReport:
        """Count and list the items that searches would not find after a rollback.

        Nothing is changed; but the next rollback without a target is no repetition of an earlier
        one.

        Returns:
            The release that would answer, the number of lost items, and the first of them by
            gallery and label.

        Raises:
            PreconditionError: there is no release to return to.
            UnavailableError: the database does not answer.
            BusyError: a store is busy.
            VerificationError: a gallery is damaged.
            CannotWriteError: a gallery's file cannot be opened, or the disk fails.
            NotFoundError: a gallery was deleted meanwhile.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        self._was_planned = True
        return self._report_losses()

    def roll_back(self, to_release: int | None) -> RollbackReport:
        """Cancel the activation under way, and let an earlier release answer again in all
        galleries.

        A repeated call changes nothing: with `to_release`, once that release answers; without it,
        for five minutes, unless a rollback was planned or an activation has begun. A model server
        that is away loads the release's models when it returns.

        Puts wait during the switch. Returns once no call uses the old plans, or after 120 s for
        each. An activation that was cancelled does not continue, also if the rollback then fails.

        Args:
            to_release: the release to return to; None means the previous one.

        Returns:
            The result, with the items that were lost.

        Raises:
            BusyError: another rollback, activation or retirement takes more than five seconds.
            PreconditionError: a rollback does not lead to `to_release`, or there is no release to
                return to.
            UnavailableError: the models cannot be loaded, or the database does not answer. After an
                error that follows the switch, the earlier release answers.
            CannotWriteError: the state cannot be written.
            NotFoundError: the release is not published any more.
            VerificationError: a model's file does not match its signed digest, or a gallery or the
                state is damaged.
            ConfigurationError: the release embeds texts, and the extra `text` is not installed; or
                the database refuses a statement.
            LockOrderError: the thread holds a lock that comes later.
            DeadlineError: the call's time is over while the models are loaded.
        """
        with self._activations.block_activations():
            return self._return_to(
                self._state.active_release()
                if self._is_repeated(to_release)
                else self._prepare_target(to_release)
            )

    def stop_canary(self, release: int) -> RollbackReport:
        """End the canary of a release, so that the active one answers all callers again.

        The state decides in one step whether the canary stops or is promoted. Puts wait during the
        switch. Vectors of the canary's release stay. The canary has ended also if a later step
        fails.

        Args:
            release: the release of the canary.

        Returns:
            The result, with the items that were lost.

        Raises:
            PreconditionError: the canary was promoted or does not run, or no release is active.
            BusyError: another rollback, activation or retirement takes too long.
            UnavailableError: the active release's models cannot be loaded, or the database does not
                answer.
            NotFoundError: the active release is not published any more.
            VerificationError: a model's file does not match its signed digest, or a gallery or the
                state is damaged.
            CannotWriteError: the state cannot be written.
            ConfigurationError: the release embeds texts, and the extra `text` is not installed; or
                the database refuses a statement.
            LockOrderError: the thread holds a lock that comes later.
            DeadlineError: the call's time is over while the models are loaded.
        """
        with self._activations.block_activations():
            target = self._state.active_release()
            self._serving.load_release_models(target)
            self._activations.forget_canary(release)
            self._activations.cancel()
            return self._return_to(target)

    def retire_old_releases(self) -> list[int]:
        """Delete the spaces and models of every release older than the active one, for good.

        A gallery that stayed with an older release keeps that space. It waits until no call uses
        the old plans, at most 120 s for each. If one still does then, spaces are deleted all the
        same, but no model is unloaded. A second call returns only releases whose spaces could not
        be deleted.

        Releases that a gallery's searches use stay. Unused spaces of newer releases are deleted,
        too, and are not in the result. A space that cannot be deleted is logged, and tried again by
        the next start or a second call. The published files stay, so a retired release can be
        activated again.

        Returns:
            The retired releases, in rising order.

        Raises:
            BusyError: an activation or a rollback is under way.
            PreconditionError: no release was ever activated.
            CannotWriteError: the state cannot be written.
            UnavailableError: the database does not answer.
            NotFoundError: a gallery was deleted meanwhile.
            VerificationError: a gallery is damaged.
            LockOrderError: the thread holds a lock that comes later.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        with self._activations.block_activations():
            self._activations.check_none_running("retire the old releases")
            state, active = self._state.current, self._state.active_release()
            galleries = self._galleries
            used = {
                part.query_manifest.release
                for hosted in galleries.all()
                for part in hosted.plan.parts
            } | {active}
            present = {
                info.spec.release for hosted in galleries.all() for info in hosted.store.spaces()
            }
            unused = sorted((present | set(state.previous)) - used)
            self._state.change(
                previous=tuple(n for n in state.previous if n in used),
                retired=tuple(sorted({*state.retired, *(n for n in unused if n < active)})),
            )
            self._serving.retire_plans(self._serving.replan_all())
            self._serving.drop_unused_spaces()
        return [release for release in unused if release < active]

    def _is_repeated(self, to: int | None) -> bool:
        """Tell whether this rollback has been done already."""
        state = self._state.current
        if state.active is None or state.activation is not None:
            return False
        if to is not None:
            return state.active == to
        recent = state.rolled_back is not None and 0 <= time.time() - state.rolled_back < RETRY_S
        return recent and not self._was_planned

    def _prepare_target(self, to: int | None) -> int:
        """Load the models of the target release, and cancel the activation under way.

        Returns:
            The release that will answer.
        """
        target = _rollback_target(self._state.current)
        if to not in (None, target):
            raise PreconditionError(
                f"to_release: expected {target}, the release that a rollback leads to now, got "
                f"{to}; run `gateway rollback` to see what a rollback would do"
            )
        self._serving.load_release_models(target)
        self._activations.cancel()
        return target

    def _return_to(self, target: int) -> RollbackReport:
        with lock_writes(self._galleries):
            result = self._state.transact(lambda: self._switch_to(target))
            old = self._serving.replan_all()
        self._serving.retire_plans(old)
        log.info("rolled back", release=target, lost=result.lost_count)
        return result

    def _switch_to(self, target: int) -> RollbackReport:
        # The activation may have ended in the meantime, or was cancelled before its switch.
        result = RollbackReport(target, 0, [])
        if self._state.current.active != target:
            result = self._report_losses()
            self._serving.record_rollback(target)
            self._was_planned = False
        roll_back_galleries(self._galleries, target)
        return result

    def _report_losses(self) -> RollbackReport:
        target, lost, listed = _rollback_target(self._state.current), 0, list[tuple[str, str]]()
        for hosted in self._galleries.all():
            space = _answering_space(hosted, target)
            if space is None:
                continue
            lost += hosted.store.count_items_without_vector(space.spec.space)
            items = hosted.store.items_without_vector(
                space.spec.space, limit=LARGEST_LISTING - len(listed) or 1
            )
            listed += [(hosted.name, item.id) for item in items]
        return RollbackReport(target, lost, listed[:LARGEST_LISTING])


def _rollback_target(state: State) -> int:
    """Return the release that a rollback leads to."""
    record = state.activation
    if record is not None and state.active is not None and record.release != state.active:
        # The activation has not switched: the old release still answers.
        return state.active
    if not state.previous:
        raise PreconditionError(
            "there is no release to return to: no other release was active before this one, or "
            "`gateway retire` has deleted it; to move on, run `gateway activate N`"
        )
    return state.previous[-1]


def _answering_space(hosted: HostedGallery, target: int) -> SpaceInfo | None:
    """Return the space that would answer in a gallery; None if the gallery does not change."""
    infos = hosted.store.spaces()
    active = next(info for info in infos if info.state == "active")
    if active.spec.release <= target:
        return active if len(hosted.plan.parts) > 1 else None
    previous = [info for info in infos if info.state == "previous"]
    return max(previous, key=lambda info: info.activation_rank, default=None)
