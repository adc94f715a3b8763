"""What is served: the release that answers, a plan for each gallery, the models and spaces that
these need."""

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
from nobackfill.server.galleries.galleries import UNUSABLE, GalleryRegistry
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.galleries.plan import Plan
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.state import GatewayState, State

log = structlog.get_logger("server.serving")

# How long calls that began before a change may keep what they use.
_DRAIN_S = 120.0


class Serving:
    """The one place that makes plans, and lets go of what no plan needs.

    `activate` and `return_to` change which release answers; `replan` makes the galleries follow,
    and `settle` ends what was before.
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
        # Held to make a plan: one of an older state never replaces one of a newer.
        self._planning = threading.RLock()
        # Releases whose models were loaded at the start.
        self._loaded: set[int] = set()
        # Releases whose models were loaded to follow another gateway.
        self._followed: set[int] = set()

    def start_models(self) -> None:
        """Start what runs models, and load those that are needed whatever the galleries are. Raises
        VerificationError, UnavailableError."""
        self._models.start()
        self._load_models()

    def load(self) -> None:
        """At the start: plan all galleries, load the models that they need, and drop the spaces
        that none needs. Raises VerificationError, UnavailableError."""
        self.replan()
        self._load_models()
        if not self._state.shared:
            self.drop_unused(self._state.now.retired)

    def _load_models(self) -> None:
        for release in sorted(self._needed() - self._loaded):
            self._catalog.verified(release)
            self._models.want(self._catalog.manifest(release))
            self._loaded.add(release)

    def prepare(self, release: int) -> None:
        """Load the models of a release that will answer. A model server that is away loads them
        when it comes. Raises UnavailableError."""
        load = self._models.load if self._models.ready() else self._models.want
        load(self._catalog.manifest(release))

    def activate(self, manifest: Manifest, old_space_seconds: int) -> None:
        """Record that a release answers, and for how long the one before is still asked (0: no end
        is announced). Raises CannotWriteError."""

        def answering(now: State) -> dict[str, object]:
            if now.active == manifest.release:
                return {}
            previous = now.previous if now.active is None else (*now.previous, now.active)
            failed = {n: why for n, why in now.failed.items() if n != manifest.release}
            ends = dict(now.ends)
            if now.active is not None:
                # What an earlier swap announced counts no longer.
                space = self._catalog.manifest(now.active).space
                ends.pop(space, None)
                if old_space_seconds:
                    ends[space] = time.time() + old_space_seconds
            return {
                "active": manifest.release, "previous": previous, "failed": failed, "ends": ends,
            }  # fmt: skip

        self._state.revise(answering)

    def return_to(self, release: int) -> None:
        """Record that the release before answers again. Raises CannotWriteError."""
        # What answers by default has no end.
        space = self._catalog.manifest(release).space
        self._state.revise(
            lambda now: {
                "active": release,
                "previous": now.previous[:-1],
                "ends": {other: end for other, end in now.ends.items() if other != space},
                "rolled_back": time.time(),
            }
        )

    def replan(self) -> list[Plan]:
        """Make every gallery's plan anew; returns those they replace, for `settle`. A gallery that
        cannot be read is set aside. Raises UnavailableError."""
        old = []
        for hosted in self._galleries.all():
            try:
                old.append(self.replan_one(hosted))
            except UnavailableError:
                # A database that is away says nothing about the gallery.
                raise
            except UNUSABLE as error:
                if self._state.shared:
                    # Others serve it: this gateway lacks a release, and keeps its plan until then.
                    log.error("not planned anew", gallery=hosted.name, error=str(error))
                else:
                    self._galleries.set_aside(hosted.name, error)
                    old.append(hosted.plan)
        self.tell()
        return old

    def tell(self) -> None:
        """Let those who watch know that what is served has changed."""
        active = self._state.now.active or 0
        self._metrics.active_release.set(active)
        if active:
            self._metrics.devices.expect(active)
        self._catalog.changed.notify()

    def replan_one(
        self, hosted: Hosted, before: Callable[[Plan], None] = lambda plan: None
    ) -> Plan:
        """The same for one gallery. Raises as `Hosted.replan`."""
        with self._planning:
            return self._galleries.replan(hosted, before)

    def settle(self, old: list[Plan]) -> None:
        """Once nobody uses `old` plans: let go of views and models that no plan needs, and of the
        spaces of retired releases that the last gallery has left."""
        if self.let_go(old):
            self._state.catch_up()
            self.drop_unused(self._state.now.retired)

    def let_go(self, old: list[Plan]) -> bool:
        """The same, but of what this process keeps alone; False where a call still uses it."""
        for plan in old:
            if not plan.users.wait_until_none(_DRAIN_S):
                log.warning("a call still uses an old plan; keeping its models")
                return False
        for hosted in self._galleries.all():
            hosted.forget_views(hosted.plan)
        with self._planning:
            needed = self._needed()
            for release in self._catalog.manifests:
                if release not in needed:
                    self._models.unload(release)
            self._followed &= needed
        return True

    def follow(self, hosted: Hosted, check: Callable[[Path, Manifest, Models], None]) -> Plan:
        """As `replan_one`, after another gateway has changed something: with models that this one
        may not have loaded yet, and that pass `check`. Raises as both."""
        return self.replan_one(hosted, lambda plan: self.load_for(plan.models(), check))

    def load_for(
        self, manifests: Iterable[Manifest], check: Callable[[Path, Manifest, Models], None]
    ) -> None:
        """Load models that plans will use. Raises VerificationError, UnavailableError."""
        for manifest in manifests:
            if manifest.release in self._followed:
                continue
            folder = self._catalog.verified(manifest.release)
            if not self._models.ready():
                # Calls with images wait for it; searches by embedding do not.
                self._models.want(manifest)
                continue
            self._models.load(manifest)
            check(folder, manifest, self._models)
            self._followed.add(manifest.release)

    def drop_unused(self, releases: Collection[int] | None = None) -> None:
        """Remove from the files the spaces that no plan uses; only of `releases`, if given. What
        one gallery does not let go of is tried again at the next start, or by another `retire`."""
        for hosted in self._galleries.all():
            try:
                _drop_unused(hosted, releases)
            except (NobackfillError, OSError, sqlite3.Error) as error:
                log.error("spaces not dropped", gallery=hosted.name, error=str(error))

    def _needed(self) -> set[int]:
        """Releases whose models must be loaded: the galleries', the active one, one that is being
        activated, and those that a rollback may return to, for which a gallery that is made now
        embeds, too."""
        now = self._state.now
        used = {m.release for hosted in self._galleries.all() for m in hosted.plan.models()}
        coming = [] if now.activation is None else [now.activation.release]
        return used.union(now.previous, coming, [] if now.active is None else [now.active])


def _drop_unused(hosted: Hosted, releases: Collection[int] | None) -> None:
    used = hosted.plan.searched() | {manifest.space for manifest in hosted.plan.writes}
    for info in hosted.spaces():
        chosen = releases is None or info.spec.release in releases
        if chosen and info.state != "active" and info.spec.space not in used:
            hosted.drop(info.spec.space)
