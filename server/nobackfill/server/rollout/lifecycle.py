"""A gallery's life: made, carried over to the active release, deleted. The first and the last are
refused while a release is being activated, which carries all that it finds, but for the time of
its canary."""

from collections.abc import Mapping
from dataclasses import replace

from nobackfill.errors import PreconditionError
from nobackfill.release.routes import Route
from nobackfill.server.catalog import Catalog
from nobackfill.server.embedding.embedding import Embedding
from nobackfill.server.galleries.galleries import GalleryRegistry
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.galleries.plan import BOTH, SOURCE
from nobackfill.server.healing.healer import HealingProgress
from nobackfill.server.healing.healing import Healing
from nobackfill.server.healing.registration import HealingSource
from nobackfill.server.rollout.activation import Activations
from nobackfill.server.serving import Serving
from nobackfill.server.state import GatewayState
from nobackfill.server.upgrades.backfill import backfill
from nobackfill.server.upgrades.upgrading import (
    DEFAULT_SPARE_CORES,
    Job,
    JobState,
    UpgradeCost,
    Upgrading,
)

# Seconds that registering a source waits until it is open: a large file of texts is looked through.
_OPENED_S = 20.0


class Lifecycle:
    """What is asked of one gallery by name. Each method raises NotFoundError for one that is not
    there, VerificationError for one that is set aside."""

    def __init__(
        self,
        catalog: Catalog,
        state: GatewayState,
        galleries: GalleryRegistry,
        embedding: Embedding,
        upgrading: Upgrading,
        activations: Activations,
        serving: Serving,
        healing: Healing,
    ) -> None:
        self._catalog = catalog
        self._state = state
        self._galleries = galleries
        self._embedding = embedding
        self._upgrading = upgrading
        self._activations = activations
        self._serving = serving
        self._healing = healing

    def create(self, name: str) -> None:
        """Raises as `Galleries.create`, BusyError during an activation or a rollback."""
        with self._activations.held():
            self._activations.refuse_second("make a gallery", beside_canary=True)
            self._galleries.create(name)

    def delete(self, name: str) -> None:
        """Delete a gallery, and what is remembered of its upgrades. Raises as `Galleries.delete`,
        BusyError during an activation."""
        self._activations.refuse_second("delete a gallery", beside_canary=True)
        self._galleries.delete(name)
        self._upgrading.forget({name})

    def estimate(self, name: str, release: int, spare_cores: float) -> tuple[UpgradeCost, Route]:
        """What an upgrade to `release` will cost. Raises as `Upgrading.estimate`."""
        target = self._catalog.find(release)
        with self._galleries.using(name) as hosted:
            self._catalog.verified(release)
            return self._upgrading.estimate(hosted, target, spare_cores or DEFAULT_SPARE_CORES)

    def upgrade(
        self,
        name: str,
        release: int,
        spare_cores: float,
        images: Mapping[str, bytes],
        budget: int,
    ) -> Job:
        """Let a paused upgrade go on, and begin that of a gallery which stayed behind; where it did
        not, embed items again from `images` by id, at most `budget` of them (0: all).

        `release`: the active one, or 0. Raises PreconditionError for another; BusyError,
        CannotWriteError and what `backfill` raises.
        """
        active = self._catalog.manifest(self._state.active())
        if release not in (0, active.release):
            raise PreconditionError(
                f"expected the active release {active.release}, got {release}; "
                "ActivateRelease carries galleries to another"
            )
        with self._galleries.using(name) as hosted:
            self._upgrading.resume(name)
            behind = hosted.spec().space != active.space and self._activations.under_way() is None
            if not behind and images:
                backfill(
                    hosted, self._embedding, images, budget,
                    lambda count: self._upgrading.count_re_embedded(hosted, count),
                )  # fmt: skip
        if behind:
            # Begun by somebody who holds no gallery: whoever flips it waits for its users.
            self._activations.start_gallery(name, spare_cores)
        return self.job(name)

    def register(self, hosted: Hosted, source: HealingSource | None) -> None:
        """From now on the gallery heals from `source`, or no longer. Raises ConfigurationError for
        one that the settings do not allow, NotFoundError, CannotWriteError, UnavailableError."""
        if source is not None:
            self._healing.open(source, _OPENED_S)
        with hosted.write_lock.exclusive():
            hosted.remember({SOURCE: None if source is None else source.to_state()})
            self._serving.replan_one(hosted)

    def ask_both(self, hosted: Hosted, wished: bool) -> None:
        """From now on carried items are ranked by the model before, too, or no longer, where its
        space is kept and the release has weights. Raises CannotWriteError, UnavailableError."""
        with hosted.write_lock.exclusive():
            hosted.remember({BOTH: wished or None})
            self._serving.replan_one(hosted)

    def healing(self, name: str) -> HealingProgress | None:
        """How far a gallery with a source has healed."""
        with self._galleries.using(name) as hosted:
            return self._healing.progress(hosted)

    def pause(self, name: str) -> Job:
        """Hold back the upgrade of a gallery, and those to come. Raises CannotWriteError."""
        with self._galleries.using(name) as hosted:
            self._upgrading.pause(name)
            return self._job(hosted)

    def job(self, name: str) -> Job:
        """The last upgrade of a gallery, as it is now."""
        with self._galleries.using(name) as hosted:
            return self._job(hosted)

    def _job(self, hosted: Hosted) -> Job:
        # Looked at first: a job ends before its activation does.
        running = self._activations.under_way() is not None
        job = self._upgrading.job(hosted.name)
        if job is None:
            # None since the start: it is where it is.
            release = hosted.spec().release
            job = Job(hosted.name, release, release, JobState.DONE)
        if not job.ended and not running:
            job = replace(job, state=JobState.FAILED, message="its activation has ended")
        held_back = job.ended or (self._state.shared and job.state is JobState.RUNNING)
        if held_back and self._upgrading.paused(hosted.name):
            # Those to come, or one that another gateway leads, which stops after its chunk.
            job = replace(job, state=JobState.PAUSED)
        return job
