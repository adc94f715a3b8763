"""Serve a release: plan every gallery for it, and load and unload models and spaces as
plans need.
"""

import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import structlog

from nobackfill.errors import NobackfillError, UnavailableError
from nobackfill.release.manifest import Manifest
from nobackfill.server.catalog import Catalog
from nobackfill.server.embedding.embedding import Models
from nobackfill.server.galleries.hosted import (
    UNUSABLE_GALLERY_ERRORS,
    GalleryRegistry,
    HostedGallery,
    LockLevel,
    check_lock_order,
)
from nobackfill.server.galleries.plan import Plan
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.state import GatewayState, State

log = structlog.get_logger("server.serving")

# Longest time (seconds) that calls may use an old plan before its models and spaces are freed.
_DRAIN_S = 120.0


class PlanManager:
    """Make every plan, and free what no plan needs.

    `record_activation` and `record_rollback` change which release answers. `replan_all` makes the
    galleries follow, and `retire_plans` frees what the old plans used.
    """

    def __init__(
        self, catalog: Catalog, state: GatewayState, galleries: GalleryRegistry, models: Models,
        metrics: Metrics,
    ) -> None:  # fmt: skip
        self._catalog = catalog
        self._state = state
        self._galleries = galleries
        self._models = models
        self._metrics = metrics
        # Held while a plan is made: a plan of an older state must not replace one of a newer state.
        self._planning = threading.RLock()
        # Releases whose models were loaded at the start.
        self._loaded: set[int] = set()
        # Releases whose models were loaded to follow another gateway.
        self._followed: set[int] = set()

    def start_models(self) -> None:
        """Start the model server, and load the models of the releases that the state needs: active,
        previous and being activated.

        A model server that does not answer yet is logged; it loads the models later.

        Raises:
            NotFoundError: a needed release is not published.
            VerificationError: a file of a needed release does not match its signed digest, or
                cannot be loaded.
            UnavailableError: the publication folder cannot be read.
            ConfigurationError: a release embeds texts, and the extra `text` is not installed.
            CannotWriteError: the publication's verified metadata cannot be stored.
            OSError: the folder of the verified metadata cannot be read.
        """
        self._models.start()
        self._load_models()

    def plan_at_start(self) -> None:
        """Plan all galleries at the start, load their models, and delete the spaces of retired
        releases.

        A gallery that cannot be planned is set aside. In a shared database it keeps its plan, and
        no space is deleted here.

        Raises:
            NotFoundError: a needed release is not published.
            VerificationError: a model's file does not match its signed digest, or cannot be loaded.
            UnavailableError: the database does not answer, or the publication folder cannot be
                read.
            ConfigurationError: a release embeds texts, and the extra `text` is not installed.
            CannotWriteError: the publication's verified metadata cannot be stored.
            OSError: the folder of the verified metadata cannot be read.
        """
        self.replan_all()
        self._load_models()
        if not self._state.shared:
            self.drop_unused_spaces(self._state.current.retired)

    def _load_models(self) -> None:
        for release in sorted(self._needed_releases() - self._loaded):
            self._catalog.verify_files(release)
            self._models.load_when_ready(self._catalog.manifest(release))
            self._loaded.add(release)

    def load_release_models(self, release: int) -> None:
        """Load the models of a release that is about to answer, without checking them.

        A model server that is away loads them when it returns.

        Raises:
            UnavailableError: the models cannot be loaded.
            NotFoundError: the release is not published any more.
            VerificationError: a model's file does not match its signed digest, or cannot be loaded.
            DeadlineError: the call's time is over.
            ConfigurationError: the release embeds texts, and the extra `text` is not installed.
        """
        load = self._models.load if self._models.is_ready() else self._models.load_when_ready
        load(self._catalog.manifest(release))

    def record_activation(self, manifest: Manifest, old_space_seconds: int) -> None:
        """Record that a release answers, and when queries of the old space end; plans follow by
        `replan_all`.

        The old space is that of the release that answered before; the first release has none. If
        the release answers already, nothing changes, not even the end of a space. An earlier
        failure of the release is forgotten. No model is loaded; call `load_release_models` before.

        Args:
            manifest: the release.
            old_space_seconds: how long queries of the old space are answered from now on; 0 means
                without an end, also if one was announced.

        Raises:
            NotFoundError: the release that answered before is not published any more.
            CannotWriteError: the state cannot be written.
            BusyError: the database is busy.
            UnavailableError: the database does not answer.
            VerificationError: a release's manifest cannot be used, or the state in the database is
                damaged.
            ConfigurationError: the database refuses the statement, as without rights.
        """

        def answering(state: State) -> dict[str, object]:
            if state.active == manifest.release:
                return {}
            previous = state.previous if state.active is None else (*state.previous, state.active)
            failed = {n: why for n, why in state.failed.items() if n != manifest.release}
            ends = dict(state.ends)
            if state.active is not None:
                # An end that an earlier swap announced no longer holds.
                space = self._catalog.manifest(state.active).space
                ends.pop(space, None)
                if old_space_seconds:
                    ends[space] = time.time() + old_space_seconds
            return {
                "active": manifest.release, "previous": previous, "failed": failed, "ends": ends,
            }  # fmt: skip

        self._state.revise(answering)

    def record_rollback(self, release: int) -> None:
        """Record that an earlier release answers again, and the time of this rollback; plans follow
        by `replan_all`.

        Queries of its space have no end from now on.

        Args:
            release: the latest of the previous releases; this is not checked.

        Raises:
            NotFoundError: the release is not published any more.
            CannotWriteError: the state cannot be written.
            BusyError: the database is busy.
            UnavailableError: the database does not answer.
            VerificationError: a release's manifest cannot be used, or the state in the database is
                damaged.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        # Queries of the active release have no end.
        space = self._catalog.manifest(release).space
        self._state.revise(
            lambda state: {
                "active": release,
                "previous": state.previous[:-1],
                "ends": {other: end for other, end in state.ends.items() if other != space},
                "rolled_back": time.time(),
            }
        )

    def replan_all(self) -> list[Plan]:
        """Make every gallery's plan again, and announce the served release.

        A gallery that cannot be read is set aside; in a shared database it keeps its plan instead,
        which is logged. Galleries that are set aside already are left out.

        Returns:
            The replaced plans, for `retire_plans`, in any order; also those of galleries that were
            set aside now.

        Raises:
            UnavailableError: the database does not answer; this is not the gallery's fault.
                Galleries before it have new plans, but the served release is not announced.
        """
        old = []
        for hosted in self._galleries.all():
            try:
                old.append(self.replan_gallery(hosted))
            except UnavailableError:
                # An unreachable database is not the gallery's fault.
                raise
            except UNUSABLE_GALLERY_ERRORS as error:
                if self._state.shared:
                    # Other gateways serve it. This gateway lacks a release, and keeps its plan
                    # until it has it.
                    log.error(
                        "a gallery keeps its present release here, because this gateway lacks a "
                        "release that the gallery needs",
                        gallery=hosted.name,
                        error=str(error),
                    )
                else:
                    self._galleries.quarantine(hosted.name, error)
                    old.append(hosted.plan)
        self.announce_release()
        return old

    def announce_release(self) -> None:
        """Wake the watchers of releases, and set the metric of the active release, 0 without one.

        Call it when the served release may have changed. It never waits, and its repetition is
        harmless. Any thread may call it.
        """
        active = self._state.current.active or 0
        self._metrics.active_release.set(active)
        if active:
            self._metrics.devices.set_expected_release(active)
        self._catalog.change_counter.notify()

    def replan_gallery(
        self, hosted: HostedGallery, check: Callable[[Plan], None] = lambda plan: None
    ) -> Plan:
        """Make one gallery's plan again; another plan that is being made is waited for.

        Views that the new plan needs are made, if any exists. The replaced plan may still have
        users.

        Args:
            hosted: the gallery.
            check: called with the new plan before it is used; it may raise to refuse the plan. By
                default none is refused.

        Returns:
            The replaced plan; the new one if it is the first.

        Raises:
            ConfigurationError: the gallery has a space of a release that is not published here, or
                the database refuses the statement.
            NotFoundError: the gallery was deleted.
            VerificationError: the gallery, or an index in the database, is damaged.
            OSError: an index file cannot be deleted.
            UnavailableError: the database does not answer.
            NobackfillError: whatever `check` raises; the old plan stays.
            BusyError: the store is busy.
            CannotWriteError: the gallery's file cannot be opened, or the disk fails.
        """
        with self._planning:
            return self._galleries.replan(hosted, check)

    def retire_plans(self, old_plans: list[Plan]) -> None:
        """Wait until no call uses old plans, at most 120 s each, then free what no plan needs.

        Frees views and models, and deletes the spaces of retired releases. If a call still uses an
        old plan, nothing is freed, which is logged.

        Args:
            old_plans: replaced plans; empty waits for none.

        Raises:
            UnavailableError: the database does not answer.
            BusyError: the database is busy.
            VerificationError: the shared state or a new gallery is damaged, or a model fails its
                check.
            LockOrderError: the thread holds a lock that comes later.
            CannotWriteError: the publication's verified metadata cannot be stored.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        if self.free_views_and_models(old_plans):
            self._state.catch_up()
            self.drop_unused_spaces(self._state.current.retired)

    def free_views_and_models(self, old_plans: list[Plan]) -> bool:
        """Wait until no call uses old plans, at most 120 s each, then free views and models of this
        process.

        The caller must not use a plan itself.

        Args:
            old_plans: replaced plans; empty waits for none.

        Returns:
            False if a call still uses one of the plans after the time limit; then nothing is freed,
            and the log says so.

        Raises:
            LockOrderError: the thread holds a lock that comes later.
        """
        check_lock_order(LockLevel.PLAN)
        for plan in old_plans:
            if not plan.use_counter.wait_until_none(_DRAIN_S):
                log.warning(
                    "a call still uses the models of an earlier release, so these models stay "
                    "loaded for now"
                )
                return False
        for hosted in self._galleries.all():
            hosted.free_unused_views(hosted.plan)
        with self._planning:
            needed = self._needed_releases()
            for release in self._catalog.manifests:
                if release not in needed:
                    self._models.unload(release)
            self._followed &= needed
        return True

    def load_models(
        self, manifests: Iterable[Manifest], check: Callable[[Path, Manifest, Models], None]
    ) -> None:
        """Load models that plans will use, and check them.

        Releases that were checked before are skipped. If the model server is away, the models wait
        for it and are not checked; a later call checks them. Searches by embedding do not need
        them. Releases before an error stay loaded.

        Args:
            manifests: the releases.
            check: raises if the models of a release, just loaded here, do not answer as published.

        Raises:
            NotFoundError: a release is not published.
            VerificationError: a file does not match its digest, or a model fails its check.
            UnavailableError: the model server stops answering meanwhile.
            ConfigurationError: a release embeds texts, and the extra `text` is not installed.
            DeadlineError: the call's time is over.
            CannotWriteError: the publication's verified metadata cannot be stored.
            OSError: the folder of the verified metadata cannot be read.
        """
        for manifest in manifests:
            if manifest.release in self._followed:
                continue
            folder = self._catalog.verify_files(manifest.release)
            if not self._models.is_ready():
                # Calls with images wait for it; searches by embedding do not.
                self._models.load_when_ready(manifest)
                continue
            self._models.load(manifest)
            check(folder, manifest, self._models)
            self._followed.add(manifest.release)

    def drop_unused_spaces(self, releases: Collection[int] | None = None) -> None:
        """Delete stored spaces that no plan uses, with their vectors; active spaces stay. Raises
        nothing.

        A space that cannot be deleted is logged, and the rest of its gallery is skipped; the next
        start, or `gateway retire`, tries again.

        Args:
            releases: delete only spaces of these releases; None means all, empty none.
        """
        for hosted in self._galleries.all():
            try:
                _drop_unused(hosted, releases)
            except (NobackfillError, OSError, sqlite3.Error) as error:
                log.error(
                    "the vectors of an earlier release could not be deleted; the next start or "
                    "`gateway retire` tries again",
                    gallery=hosted.name,
                    error=str(error),
                )

    def _needed_releases(self) -> set[int]:
        """Return the releases whose models must be loaded.

        They are the releases of the galleries' plans, the active one, one that is being activated,
        and those that a rollback can return to: a new gallery embeds for them, too.
        """
        state = self._state.current
        used = {
            manifest.release
            for hosted in self._galleries.all()
            for manifest in hosted.plan.model_manifests()
        }
        next_release = [] if state.activation is None else [state.activation.release]
        return used.union(
            state.previous, next_release, [] if state.active is None else [state.active]
        )


def _drop_unused(hosted: HostedGallery, releases: Collection[int] | None) -> None:
    needed_spaces = hosted.plan.searched_spaces() | {
        manifest.space for manifest in hosted.plan.written_releases
    }
    for info in hosted.spaces():
        matches = releases is None or info.spec.release in releases
        if matches and info.state != "active" and info.spec.space not in needed_spaces:
            hosted.drop_space(info.spec.space)
