"""Create, upgrade, configure and delete galleries.

Creating and deleting are refused during an activation, because it upgrades all galleries; they are
allowed while its canary waits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nobackfill.errors import PreconditionError
from nobackfill.release.routes import Route
from nobackfill.server.catalog import Catalog
from nobackfill.server.embedding.embedding import EmbeddingService
from nobackfill.server.galleries.hosted import GalleryRegistry, HostedGallery
from nobackfill.server.galleries.plan import RANK_FUSION_KEY, SOURCE_KEY
from nobackfill.server.healing.healer import HealingProgress
from nobackfill.server.healing.healing import Healing
from nobackfill.server.healing.registration import HealingSource
from nobackfill.server.rollout.activation import Activations
from nobackfill.server.serving import PlanManager
from nobackfill.server.state import GatewayState
from nobackfill.server.upgrades.backfill import backfill
from nobackfill.server.upgrades.upgrading import (
    DEFAULT_SPARE_CORES,
    GalleryUpgrades,
    Job,
    JobState,
    UpgradeCost,
)

# Longest wait (seconds) until a new source is open: a large file of texts is indexed first.
_OPEN_SECONDS = 20.0


@dataclass(eq=False)
class GalleryOperations:
    """Run the operations on one gallery that clients name.

    Every method raises NotFoundError for an unknown gallery, and VerificationError for one that is
    set aside.
    """

    _catalog: Catalog
    _state: GatewayState
    _galleries: GalleryRegistry
    _embedding: EmbeddingService
    _upgrading: GalleryUpgrades
    _activations: Activations
    _serving: PlanManager
    _healing: Healing

    def create(self, name: str) -> None:
        """Create an empty gallery in the active release's space.

        It is refused while an activation runs, except while its canary waits. A gallery that
        cannot be opened after it was created is served after the next start.

        Args:
            name: 1 to 64 characters of a-z, 0-9, '-' and '_'.

        Raises:
            InvalidInputError: the name is not valid, or a space has too many dimensions for the
                database.
            AlreadyExistsError: a gallery has this name.
            PreconditionError: no release is active.
            BusyError: an activation or a rollback is under way, or the database is busy.
            CannotWriteError: the gallery cannot be written.
            NotFoundError: a release is not published any more.
            UnavailableError: the database does not answer.
            VerificationError: a release's manifest cannot be used; or the shared state or a gallery
                is damaged.
            LockOrderError: the thread holds a lock that comes later.
            ConfigurationError: the database refuses the statement.
        """
        with self._activations.block_activations():
            self._activations.check_none_running("create a gallery", during_canary=True)
            self._galleries.create(name)

    def delete(self, name: str) -> None:
        """Delete a gallery, and the record of its upgrades.

        It waits up to 60 s for calls that use the gallery, and refuses new ones. A gallery that is
        set aside can be deleted, too. After an error of the last step, the gallery is gone, and a
        second call raises NotFoundError.

        Args:
            name: the gallery.

        Raises:
            NotFoundError: no gallery has this name.
            BusyError: an activation is under way, except while its canary waits; or calls still use
                the gallery.
            CannotWriteError: the gallery cannot be deleted and stays. Or it is gone, but its
                storage cannot be freed before the next start, or the record of its upgrades stays.
            UnavailableError: the database does not answer.
            VerificationError: the shared state or a new gallery is damaged.
            ConfigurationError: the database refuses the statement.
            LockOrderError: the thread holds a lock that comes later.
        """
        self._activations.check_none_running("delete a gallery", during_canary=True)
        self._galleries.delete(name)
        self._upgrading.forget({name})

    def estimate_upgrade(
        self, name: str, release: int, spare_cores: float
    ) -> tuple[UpgradeCost, Route]:
        """Estimate the cost of a gallery's upgrade from a small sample; nothing is changed.

        It takes seconds, and runs the models in a thread of low priority. A gallery that has the
        release's space already costs nothing.

        Args:
            name: the gallery.
            release: the target.
            spare_cores: share of cores that an upgrade leaves to searches, 0 to 1; 0 means the
                default.

        Returns:
            The cost, and the route of upgrades.

        Raises:
            NotFoundError: the release is not published, or no gallery has this name.
            PreconditionError: no upgrade leads to the release.
            VerificationError: a file does not match its signed digest, a model fails its trial, or
                the gallery is set aside.
            InvalidInputError: a model's output is invalid.
            CannotWriteError: the sample, or the publication's verified metadata, cannot be written.
            BusyError, UnavailableError: a store or the publication is busy, or cannot be read.
            OSError: the child process of a trial cannot be started, or the folder of the verified
                metadata cannot be read.
            IncompatibleSpaceError: the active space was deleted meanwhile.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        target = self._catalog.find_manifest(release)
        with self._galleries.use_gallery(name) as hosted:
            self._catalog.verify_files(release)
            return self._upgrading.estimate_upgrade(
                hosted, target, spare_cores or DEFAULT_SPARE_CORES
            )

    def upgrade(
        self, name: str, release: int, spare_cores: float, images: Mapping[str, bytes], budget: int
    ) -> Job:
        """Resume a gallery's paused upgrade, start it, or re-embed items from images.

        A gallery that stayed with an older release is upgraded to the active one. Otherwise items
        are re-embedded from `images`.

        It returns at once after starting an upgrade, and after all images are re-embedded
        otherwise. Images are ignored when an upgrade starts, and so are those of unknown ids, and
        of items that were re-embedded already. Without images and with nothing to
        upgrade, it only ends a pause.

        Args:
            name: the gallery.
            release: the active release, or 0 for it.
            spare_cores: share of cores that the upgrade leaves to searches, 0 to 1; 0 means the
                default.
            images: encoded images by item id.
            budget: at most so many items are re-embedded, at least 0; 0 means all.

        Returns:
            The present state of the gallery's upgrade.

        Raises:
            PreconditionError: another release than the active one, none is active, or the gallery
                is being upgraded and its images cannot be used.
            BusyError: an activation begins, or a store is busy; OverloadedError if too many images
                are being decoded.
            CannotWriteError: the gallery or the state cannot be written.
            InvalidInputError: an image cannot be decoded or embedded; the others are re-embedded.
            TooLargeError: the images together are too large.
            UnavailableError: the model server or the database does not answer.
            NotFoundError: no gallery has this name, or the active release is not published any
                more.
            VerificationError: the gallery is set aside or damaged, a model's output has another
                shape, or the active release's manifest, the shared state or the saved job cannot be
                used, as from a newer version.
            NoEncoderError: the release embeds no images.
            DeadlineError, CancelledError: the call's time is over, or its caller has gone; earlier
                images stay re-embedded.
            ConfigurationError: the database refuses the statement, as without rights.
            LockOrderError: the thread holds a lock that comes later.
        """
        active = self._catalog.manifest(self._state.active_release())
        if release not in (0, active.release):
            raise PreconditionError(
                f"release: expected {active.release}, the active release, or 0 for it, got "
                f"{release}; run `gateway activate {release}` to move all galleries to release "
                f"{release}"
            )
        with self._galleries.use_gallery(name) as hosted:
            self._upgrading.resume(name)
            is_old = hosted.active_spec().space != active.space
            behind = is_old and self._activations.activating_release() is None
            if not behind and images:
                backfill(
                    hosted, self._embedding, images, budget,
                    lambda count: self._upgrading.count_re_embedded(hosted, count),
                )  # fmt: skip
        if behind:
            # Start it outside the block: a flip waits until no call uses the gallery.
            self._activations.start_gallery(name, spare_cores)
        return self.upgrade_job(name)

    def set_source(self, hosted: HostedGallery, source: HealingSource | None) -> None:
        """Set or remove the source from which a gallery's items are re-embedded.

        A source is opened first, so that a wrong one changes nothing. Puts wait while the plan is
        made. The caller is a user of the gallery. If the plan cannot be made, the old one stays,
        but the setting is stored.

        Args:
            hosted: the gallery.
            source: the source; None removes it.

        Raises:
            ConfigurationError: the gateway's settings do not allow the source, or the gallery has a
                space of a release that is not published here.
            NotFoundError: the source does not exist, or the gallery was deleted.
            CannotWriteError: the gallery's state cannot be written.
            UnavailableError: the source does not open within 20 seconds, the system has no thread
                left to open it, or the database does not answer.
            InvalidInputError: the file of texts has an invalid line.
            BusyError: the store is busy.
            VerificationError: the gallery is damaged.
            LockOrderError: the thread holds a lock that comes later.
            OSError: this user may not look into the source's folder.
        """
        if source is not None:
            self._healing.open(source, _OPEN_SECONDS)
        with hosted.write_lock.exclusive():
            hosted.store_state({SOURCE_KEY: None if source is None else source.to_state()})
            self._serving.replan_gallery(hosted)

    def set_rank_fusion(self, hosted: HostedGallery, enabled: bool) -> None:
        """Set whether the previous model helps to rank migrated items.

        It does so only while its space exists and the release has weights for it.

        The setting is durable, also over upgrades. Puts wait while the plan is made. The caller is
        a user of the gallery. If the plan cannot be made, the old one stays, but the setting is
        stored.

        Args:
            hosted: the gallery.
            enabled: True to use both models.

        Raises:
            CannotWriteError: the gallery's state cannot be written.
            UnavailableError: the database does not answer.
            BusyError: the store is busy.
            NotFoundError: the gallery was deleted.
            VerificationError: the gallery is damaged.
            ConfigurationError: the gallery has a space of a release that is not published here.
            LockOrderError: the thread holds a lock that comes later.
        """
        with hosted.write_lock.exclusive():
            hosted.store_state({RANK_FUSION_KEY: enabled or None})
            self._serving.replan_gallery(hosted)

    def reembedding_progress(self, name: str) -> HealingProgress | None:
        """Return the progress of re-embedding in a gallery.

        It may open the source, and wait up to two seconds for it.

        Returns:
            The progress; None if it has no source, its source cannot be opened now, or an upgrade
            fills another space.

        Raises:
            NotFoundError: no gallery has this name.
            VerificationError: the gallery is set aside, or it or the record is damaged.
            BusyError, UnavailableError: a store or the record of re-embedding is busy, or does not
                answer.
            CannotWriteError: a file cannot be opened, or the record cannot be written.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        with self._galleries.use_gallery(name) as hosted:
            return self._healing.progress(hosted)

    def pause_upgrade(self, name: str) -> Job:
        """Pause a gallery's upgrade after its present chunk, and later ones until it is resumed.

        The pause is durable. A gallery without an upgrade is paused, too.

        Returns:
            The present state of the upgrade, as `upgrade_job`.

        Raises:
            NotFoundError: no gallery has this name, or it is being deleted.
            VerificationError: the gallery is set aside, or the state in the database is damaged; or
                the saved job is not valid, or a newer version wrote it.
            BusyError, UnavailableError: the state or the database is busy, or does not answer.
            CannotWriteError: the state cannot be written.
            ConfigurationError: the database refuses the statement.
        """
        with self._galleries.use_gallery(name) as hosted:
            self._upgrading.pause(name)
            return self._current_job(hosted)

    def upgrade_job(self, name: str) -> Job:
        """Return the present state of a gallery's last upgrade.

        If no upgrade is known, the job is done and leads from the gallery's release to itself.

        A job that has not ended counts as failed once its activation has ended. A pause shows as
        PAUSED.

        Raises:
            NotFoundError: no gallery has this name, or it is being deleted.
            VerificationError: the gallery is set aside; or the saved job is not valid, or a newer
                version wrote it.
            UnavailableError: the database does not answer.
            BusyError: the database is busy.
            CannotWriteError: the gallery's file cannot be opened, or the disk fails.
            ConfigurationError: the database refuses the statement.
        """
        with self._galleries.use_gallery(name) as hosted:
            return self._current_job(hosted)

    def _current_job(self, hosted: HostedGallery) -> Job:
        # Read this first: a job ends before its activation does.
        running = self._activations.activating_release() is not None
        job = self._upgrading.job(hosted.name)
        if job is None:
            # No upgrade has run since the start.
            release = hosted.active_spec().release
            job = Job(hosted.name, release, release, JobState.DONE)
        if not job.is_over and not running:
            job = replace(job, state=JobState.FAILED, message="its activation has ended")
        can_be_paused = job.is_over or (self._state.shared and job.state is JobState.RUNNING)
        if can_be_paused and self._upgrading.is_paused(hosted.name):
            # The pause holds for later upgrades, or for one that another gateway leads and stops
            # after its chunk.
            job = replace(job, state=JobState.PAUSED)
        return job
