"""Golden probes through the running models: what Triton answers must be what was published."""

from pathlib import Path

from nobackfill.release.manifest import Manifest
from nobackfill.release.models import Images
from nobackfill.release.probes import check_encoders
from nobackfill.server.embedding.models import Models
from nobackfill.vectors import Vectors


def check_models(folder: Path, manifest: Manifest, models: Models) -> None:
    """Raises VerificationError when an output differs, UnavailableError."""

    def embed(images: Images) -> Vectors:
        return models.embed(manifest, images)

    def side(images: Images) -> Vectors:
        vectors = models.side(manifest, images)
        assert vectors is not None, "asked for releases with a side encoder only"
        return vectors

    check_encoders(folder, manifest, embed, side if manifest.side_encoder else None)
