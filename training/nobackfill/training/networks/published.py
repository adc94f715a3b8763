"""Models of a published release as frozen encoders: verified first, run by onnxruntime."""

import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nobackfill.errors import InvalidInputError
from nobackfill.framing import Frame
from nobackfill.release.manifest import Manifest
from nobackfill.release.models import Files, open_embedder, open_side_encoder
from nobackfill.release.trust.publication import read_publication, require_release
from nobackfill.training.config import PublishedSource
from nobackfill.training.networks.frozen import FrozenEncoder
from nobackfill.vectors import Vectors

_CHUNK = 256


def of_release(source: PublishedSource) -> tuple[FrozenEncoder, FrozenEncoder | None]:
    """The embedder and, where it has one, the side encoder of a release."""
    manifest = require_release(source.release, read_publication(source.model_repo).manifests)
    return of_manifest(source.model_repo, manifest)


def of_manifest(files: Files, manifest: Manifest) -> tuple[FrozenEncoder, FrozenEncoder | None]:
    """The encoders of a manifest whose files are published, or drafted, at `files`."""
    spec, side = manifest.embedder, manifest.side_encoder
    size, sha256 = _square(manifest)
    threads = os.cpu_count() or 1
    embedder = open_embedder(files, manifest, threads)
    name = f"release {manifest.release}"
    first = FrozenEncoder(name, _chunked(embedder.run), spec.dim, size, spec.unit, sha256)
    if side is None:
        return first, None
    encoder = open_side_encoder(files, manifest, threads)
    return first, FrozenEncoder(
        f"{name}, side-information",
        _chunked(encoder.run),
        side.dim,
        size,
        False,
        side.file.sha256,
    )


def _square(manifest: Manifest) -> tuple[int, str]:
    """Height and width, and the digest of the model of images."""
    frame, file = manifest.frame, manifest.embedder.file
    assert file is not None, "what reads images has a model"
    if frame != Frame(frame.height, frame.height):
        raise InvalidInputError(
            f"release {manifest.release} takes {frame.height} x {frame.width} images by "
            f"{frame.fit}, {frame.interpolation}; training reads square ones only, by stretch, "
            "bilinear. Train from its stored vectors"
        )
    return frame.height, file.sha256


def _chunked(
    run: Callable[[NDArray[np.uint8]], Vectors],
) -> Callable[[NDArray[np.uint8]], Vectors]:
    def whole(images: NDArray[np.uint8]) -> Vectors:
        return np.concatenate(
            [run(images[start : start + _CHUNK]) for start in range(0, len(images), _CHUNK)]
        )

    return whole
