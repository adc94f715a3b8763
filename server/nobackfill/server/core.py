"""The parts of a running gateway, and the one place that brings plans, views and models in line."""

import sqlite3
import threading
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import structlog

from nobackfill.errors import NobackfillError, PreconditionError
from nobackfill.gallery import staging
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.release.manifest import Manifest
from nobackfill.server.catalog import Catalog
from nobackfill.server.embedding.embedding import Embedding
from nobackfill.server.embedding.models import Models
from nobackfill.server.galleries.galleries import Galleries
from nobackfill.server.galleries.hosted import NOTE, Hosted
from nobackfill.server.galleries.plan import Plan
from nobackfill.server.galleries.searching import Searching
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.state import StateFile
from nobackfill.server.upgrades.jobs import Upgrading

log = structlog.get_logger("server.core")

# How long calls that began before a change may keep what they use.
_DRAIN_S = 120.0


@dataclass
class Core:
    """What services and activations work on."""

    data: Path
    catalog: Catalog
    state: StateFile
    galleries: Galleries
    models: Models
    embedding: Embedding
    searching: Searching
    upgrading: Upgrading
    metrics: Metrics
    # Set when the gateway drains: streams that only watch end then.
    stopping: threading.Event

    def active(self) -> Manifest:
        """The active release. Raises PreconditionError before the first."""
        number = self.state.now.active
        if number is None:
            raise PreconditionError(
                "no release is active yet; publish one with training/export.py and wait for it"
            )
        return self.catalog.manifest(number)

    def replan(self) -> list[Plan]:
        """Make every gallery's plan anew; returns those they replace, for `settle`."""
        manifests = self.catalog.manifests
        old = [hosted.replan(self.state.now, manifests) for hosted in self.galleries.all()]
        self.metrics.active_release.set(self.state.now.active or 0)
        self.catalog.changed.notify()
        return old

    def settle(self, old: list[Plan]) -> None:
        """Once nobody uses `old` plans: let go of views and models that no plan needs, and of the
        spaces of retired releases that the last gallery has left."""
        for plan in old:
            if not plan.users.wait_until_none(_DRAIN_S):
                log.warning("a call still uses an old plan; keeping its models")
                return
        for hosted in self.galleries.all():
            hosted.forget_views(hosted.plan)
        needed = self.needed()
        for release in self.catalog.manifests:
            if release not in needed:
                self.models.unload(release)
        self.drop_unused(self.state.now.retired)

    def drop_unused(self, releases: Collection[int] | None = None) -> None:
        """Remove from the files the spaces that no plan uses; only of `releases`, if given. What
        one gallery does not let go of is tried again at the next start, or by another `retire`."""
        for hosted in self.galleries.all():
            try:
                _drop_unused(hosted, releases)
            except (NobackfillError, OSError, sqlite3.Error) as error:
                log.error("spaces not dropped", gallery=hosted.name, error=str(error))

    def needed(self) -> set[int]:
        """Releases whose models must be loaded: the galleries', the active one, and those that a
        rollback may return to, for which a gallery that is made now embeds, too."""
        now = self.state.now
        used = {m.release for hosted in self.galleries.all() for m in _models_of(hosted.plan)}
        return used.union(now.previous, [] if now.active is None else [now.active])

    def create_gallery(self, name: str) -> Hosted:
        """An empty gallery in the active space, and in those that a rollback may return to."""
        now = self.state.now
        specs = [SpaceSpec.of(self.catalog.manifest(release)) for release in now.previous]
        specs.append(SpaceSpec.of(self.active()))
        return self.galleries.create(name, specs, now, self.catalog.manifests)

    def delete_gallery(self, name: str) -> None:
        """Delete a gallery, and what is remembered of its upgrades. Raises like
        `Galleries.delete`."""
        self.galleries.delete(name)
        self.upgrading.forget({name})

    def forget_missing(self) -> None:
        """At the start: forget pauses of galleries whose deletion a kill broke off."""
        self.upgrading.forget(set(self.state.now.paused) - self.galleries.names())

    def behind(self) -> dict[str, str]:
        """Galleries whose active space is not the active release's, with the reason."""
        active = self.state.now.active
        return {
            hosted.name: str(hosted.state(NOTE) or "its upgrade is under way")
            for hosted in self.galleries.all()
            if hosted.spec().release != active
        }

    def gallery_items(self) -> dict[tuple[int, str], int]:
        """Vectors of all galleries, by release and state of their space."""
        sizes: dict[tuple[int, str], int] = {}
        for hosted in self.galleries.all():
            if hosted.leaving:
                continue
            counts = hosted.sizes()
            for info in hosted.spaces():
                key = (info.spec.release, info.state)
                sizes[key] = sizes.get(key, 0) + counts.get(info.spec.space, 0)
        return sizes


def _drop_unused(hosted: Hosted, releases: Collection[int] | None) -> None:
    used = hosted.plan.searched() | {manifest.space for manifest in hosted.plan.writes}
    for info in hosted.spaces():
        chosen = releases is None or info.spec.release in releases
        if chosen and info.state != "active" and info.spec.space not in used:
            staging.drop(hosted.store, info.spec.space)
            hosted.index_path(info.spec.space).unlink(missing_ok=True)


def _models_of(plan: Plan) -> list[Manifest]:
    """Releases whose models a plan uses, the one that answers first."""
    return [*(part.query for part in plan.parts), *plan.writes]
