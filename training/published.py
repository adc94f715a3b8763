"""Models of a published release as frozen encoders: verified first, run by onnxruntime."""

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from release.errors import ConfigurationError, InvalidInputError
from release.manifest import Manifest
from release.models import Files, open_embedder, open_side_encoder
from release.trust import TrustedFolder
from release.vectors import Vectors
from training.config import PublishedSource
from training.frozen import FrozenEncoder

_CHUNK = 256


def read_publication(model_repo: Path) -> dict[int, Manifest]:
    """Verified manifests of every release that is not withdrawn; empty where nothing is published.

    Every file of them is checked in place. Raises VerificationError.
    """
    if not (model_repo / "timestamp.json").is_file():
        return {}
    with tempfile.TemporaryDirectory() as state:
        folder = TrustedFolder(model_repo, Path(state))
        folder.refresh()
        manifests = folder.manifests()
        for release in manifests:
            folder.verified(release)
        return manifests


def require_release(number: int, published: Mapping[int, Manifest]) -> Manifest:
    """A published release by number. Raises ConfigurationError naming those there are."""
    if number not in published:
        raise ConfigurationError(
            f"release {number} is not published, or withdrawn; published: "
            f"{', '.join(map(str, sorted(published))) or 'none'}"
        )
    return published[number]


def of_release(source: PublishedSource) -> tuple[FrozenEncoder, FrozenEncoder | None]:
    """The embedder and, where it has one, the side encoder of a release."""
    manifest = require_release(source.release, read_publication(source.model_repo))
    return of_manifest(source.model_repo, manifest)


def of_manifest(files: Files, manifest: Manifest) -> tuple[FrozenEncoder, FrozenEncoder | None]:
    """The encoders of a manifest whose files are published, or drafted, at `files`."""
    spec, side = manifest.embedder, manifest.side_encoder
    if spec.height != spec.width:
        raise InvalidInputError(
            f"release {manifest.release} takes {spec.height} x {spec.width} images; training reads "
            "square ones only"
        )
    threads = os.cpu_count() or 1
    embedder = open_embedder(files, manifest, threads)
    name = f"release {manifest.release}"
    first = FrozenEncoder(
        name, _chunked(embedder.run), spec.dim, spec.height, spec.unit, spec.file.sha256
    )
    if side is None:
        return first, None
    encoder = open_side_encoder(files, manifest, threads)
    return first, FrozenEncoder(
        f"{name}, side-information",
        _chunked(encoder.run),
        side.dim,
        spec.height,
        False,
        side.file.sha256,
    )


def _chunked(
    run: Callable[[NDArray[np.uint8]], Vectors],
) -> Callable[[NDArray[np.uint8]], Vectors]:
    def whole(images: NDArray[np.uint8]) -> Vectors:
        return np.concatenate(
            [run(images[start : start + _CHUNK]) for start in range(0, len(images), _CHUNK)]
        )

    return whole
