"""What a release passes before it may serve: gate, digests, a trial, golden probes in Triton."""

from collections.abc import Sequence
from pathlib import Path

from nobackfill.errors import GateFailedError, PreconditionError
from nobackfill.release.encoders import TextRole
from nobackfill.release.manifest import Manifest
from nobackfill.release.models import Images
from nobackfill.release.probes import check_encoders
from nobackfill.server.catalog import Catalog
from nobackfill.server.embedding.models import Models
from nobackfill.server.galleries.galleries import Galleries
from nobackfill.server.rollout.run import Phase, Run
from nobackfill.server.upgrades.trials import Trials
from nobackfill.vectors import Vectors


class Admission:
    """Admits releases."""

    def __init__(
        self, catalog: Catalog, galleries: Galleries, models: Models, trials: Trials
    ) -> None:
        self._catalog = catalog
        self._galleries = galleries
        self._models = models
        self._trials = trials

    def admit(self, run: Run) -> Manifest:
        """Load the release of an activation; returns once its models answer as was published.

        Raises NotFoundError, PreconditionError for one that was withdrawn, GateFailedError,
        VerificationError, CancelledError.
        """
        number = run.record.release
        run.report(Phase.VERIFYING)
        self._catalog.refresh()
        manifest = self._catalog.manifest(number)
        reason = self._catalog.releases[number]
        if reason is not None:
            raise PreconditionError(f"release {number} was withdrawn: {reason}")
        gate = manifest.gate
        if gate.verdict not in ("first", "passed") and not gate.forced:
            raise GateFailedError(f"release {number} did not pass its gate: {gate.detail}")
        folder = self._catalog.verified(number)
        sources = {hosted.spec().release for hosted in self._galleries.all()}
        self._trials.release(manifest, sources, run.stop_if_cancelled)
        self._wait_for_models(run)
        self._models.load(manifest)
        run.report(Phase.PROBING)
        check_models(folder, manifest, self._models)
        run.stop_if_cancelled()
        return manifest

    def _wait_for_models(self, run: Run) -> None:
        """A model server that is away says nothing about the release: it is waited for."""
        run.report(Phase.LOADING)
        if not self._models.ready():
            run.report(Phase.LOADING, message="waiting for the model server")
        while not self._models.ready():
            run.cancelled.wait(0.2)
            run.stop_if_cancelled()


def check_models(folder: Path, manifest: Manifest, models: Models) -> None:
    """Golden probes through the running models: what Triton answers must be what was published.

    Raises VerificationError when an output differs, UnavailableError.
    """

    def embed(images: Images) -> Vectors:
        return models.embed(manifest, images)

    def read(texts: Sequence[str], role: TextRole) -> Vectors:
        return models.texts(manifest, texts, role)

    def side(images: Images) -> Vectors:
        vectors = models.side(manifest, images)
        assert vectors is not None, "asked for releases with a side encoder only"
        return vectors

    check_encoders(
        folder,
        manifest,
        embed if manifest.embedder.file else None,
        side if manifest.side_encoder else None,
        read if manifest.text_encoder else None,
    )
