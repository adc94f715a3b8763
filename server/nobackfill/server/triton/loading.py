"""Loading of a release's models into Triton."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from nobackfill.errors import NobackfillError, UnavailableError, VerificationError
from nobackfill.release.manifest import Manifest
from nobackfill.release.paths import embedder_model, side_encoder_model, text_encoder_model
from nobackfill.release.text_models import TextReader
from nobackfill.server.triton.client import LIVE_TIMEOUT_S, Inputs, TritonClient
from nobackfill.server.triton.configuration import model_config

_LOAD_S = 120.0
_LOADS_AT_ONCE = 4


def model_names(manifest: Manifest) -> list[str]:
    """What Triton calls the models of a release."""
    names = [embedder_model(manifest.release)] if manifest.embedder.file else []
    if manifest.text_encoder is not None:
        names.append(text_encoder_model(manifest.release))
    if manifest.side_encoder is not None:
        # A release may keep the encoder of an older one.
        names.append(side_encoder_model(manifest.side_encoder.origin_release))
    return names


def probes(manifest: Manifest, reader: TextReader | None) -> dict[str, Inputs]:
    """By the name of each model that embeds, the least that can be asked of it."""
    asked: dict[str, Inputs] = {}
    if manifest.embedder.file is not None:
        shape = (1, manifest.frame.height, manifest.frame.width, 3)
        asked[embedder_model(manifest.release)] = {"image": np.zeros(shape, np.uint8)}
    if reader is not None:
        asked[text_encoder_model(manifest.release)] = reader.outermost
    return asked


def load_models(
    client: TritonClient, model_repo: Path, names: Sequence[str]
) -> dict[str, NobackfillError]:
    """Load models side by side, as each starts an interpreter; those that fail, and why."""

    def load(name: str) -> NobackfillError | None:
        try:
            if not client.model_ready(name, LIVE_TIMEOUT_S):
                client.load(name, model_config(model_repo, name), _LOAD_S)
        except (UnavailableError, VerificationError) as error:
            return error
        return None

    with ThreadPoolExecutor(_LOADS_AT_ONCE) as pool:
        errors = zip(names, pool.map(load, names), strict=True)
        return {name: error for name, error in errors if error is not None}
