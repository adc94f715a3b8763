"""Running a release's embedder and side encoder for queries and puts, wherever they run."""

import threading
from pathlib import Path
from typing import Protocol

import structlog

from nobackfill.errors import UnavailableError
from nobackfill.release.manifest import Manifest
from nobackfill.release.models import (
    Embedder,
    Images,
    SideEncoder,
    open_embedder,
    open_side_encoder,
)
from nobackfill.vectors import Vectors

log = structlog.get_logger("server.models")


class Models(Protocol):
    """Embedders and side encoders of the loaded releases. Every call names its release.

    Methods raise UnavailableError while nothing can be embedded, DeadlineError when the call's time
    is over, VerificationError for outputs that are no vectors of the release's space,
    UnusableOutputError where only some are none.
    """

    def load(self, manifest: Manifest) -> None:
        """Make a release ready; returns when it is. Loading it again does nothing."""
        ...

    def want(self, manifest: Manifest) -> None:
        """Make a release ready now, or as soon as the model server is there; never waits for it."""
        ...

    def unload(self, release: int) -> None:
        """Let go of a release; nobody may use it any more."""
        ...

    def embed(self, manifest: Manifest, images: Images) -> Vectors:
        """uint8 [n,H,W,3] to float32 [n,dim]."""
        ...

    def side(self, manifest: Manifest, images: Images) -> Vectors | None:
        """uint8 [n,H,W,3] to float32 [n,side_dim]; None for a release without side encoder."""
        ...

    def ready(self) -> bool:
        """Whether images can be embedded now."""
        ...

    def close(self) -> None:
        """End what was started for it."""
        ...


class InProcessModels:
    """onnxruntime inside the gateway: for platforms without Triton's wheel, and for tests."""

    def __init__(self, files: Path) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._loaded: dict[int, tuple[Embedder, SideEncoder | None]] = {}

    def load(self, manifest: Manifest) -> None:
        with self._lock:
            if manifest.release in self._loaded:
                return
            encoder = open_side_encoder(self._files, manifest) if manifest.side_encoder else None
            self._loaded[manifest.release] = (open_embedder(self._files, manifest), encoder)
        log.info("loaded in process", release=manifest.release)

    def want(self, manifest: Manifest) -> None:
        self.load(manifest)

    def unload(self, release: int) -> None:
        with self._lock:
            self._loaded.pop(release, None)

    def embed(self, manifest: Manifest, images: Images) -> Vectors:
        return self._models(manifest)[0].run(images)

    def side(self, manifest: Manifest, images: Images) -> Vectors | None:
        encoder = self._models(manifest)[1]
        return encoder.run(images) if encoder is not None else None

    def ready(self) -> bool:
        return True

    def close(self) -> None:
        self._loaded.clear()

    def _models(self, manifest: Manifest) -> tuple[Embedder, SideEncoder | None]:
        try:
            return self._loaded[manifest.release]
        except KeyError:
            raise UnavailableError(
                f"the models of release {manifest.release} are not loaded"
            ) from None
