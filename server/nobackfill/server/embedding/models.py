"""Running a release's encoders for queries and puts, wherever they run."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from nobackfill.errors import UnavailableError
from nobackfill.release.encoders import TextRole
from nobackfill.release.manifest import Manifest
from nobackfill.release.models import (
    Embedder,
    Images,
    SideEncoder,
    open_embedder,
    open_side_encoder,
)
from nobackfill.release.text_models import TextModel, open_text_encoder
from nobackfill.vectors import Vectors

log = structlog.get_logger("server.models")


class Models(Protocol):
    """Encoders of the loaded releases. Every call names its release.

    Methods raise NoEncoderError for what the release has no model of, UnavailableError while
    nothing can be embedded, DeadlineError when the call's time is over, VerificationError for
    outputs that are no vectors of the release's space, UnusableOutputError where only some are
    none.
    """

    def start(self) -> None:
        """Start what runs them, before anything is asked of it. Returns once it answers, or is
        known not to at first."""
        ...

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

    def texts(self, manifest: Manifest, texts: Sequence[str], role: TextRole) -> Vectors:
        """Texts, at least one, to float32 [n,dim]; InvalidInputError where one cannot be read."""
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


@dataclass(frozen=True)
class _Loaded:
    """A release's models, as far as it has them."""

    images: Embedder | None
    texts: TextModel | None
    side: SideEncoder | None


class InProcessModels:
    """onnxruntime inside the gateway: for platforms without Triton's wheel, and for tests."""

    def __init__(self, files: Path) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._loaded: dict[int, _Loaded] = {}

    def start(self) -> None:
        pass

    def load(self, manifest: Manifest) -> None:
        with self._lock:
            if manifest.release in self._loaded:
                return
            self._loaded[manifest.release] = _Loaded(
                open_embedder(self._files, manifest) if manifest.embedder.file else None,
                open_text_encoder(self._files, manifest) if manifest.text_encoder else None,
                open_side_encoder(self._files, manifest) if manifest.side_encoder else None,
            )
        log.info("loaded in process", release=manifest.release)

    def want(self, manifest: Manifest) -> None:
        self.load(manifest)

    def unload(self, release: int) -> None:
        with self._lock:
            self._loaded.pop(release, None)

    def embed(self, manifest: Manifest, images: Images) -> Vectors:
        model = self._models(manifest).images
        if model is None:
            raise manifest.no_images()
        return model.run(images)

    def texts(self, manifest: Manifest, texts: Sequence[str], role: TextRole) -> Vectors:
        model = self._models(manifest).texts
        if model is None:
            raise manifest.no_texts()
        return model.run(texts, role)

    def side(self, manifest: Manifest, images: Images) -> Vectors | None:
        encoder = self._models(manifest).side
        return encoder.run(images) if encoder is not None else None

    def ready(self) -> bool:
        return True

    def close(self) -> None:
        self._loaded.clear()

    def _models(self, manifest: Manifest) -> _Loaded:
        try:
            return self._loaded[manifest.release]
        except KeyError:
            raise UnavailableError(
                f"the models of release {manifest.release} are not loaded"
            ) from None
