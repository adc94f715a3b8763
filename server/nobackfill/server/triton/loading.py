"""Loading of a release's models into Triton."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from nobackfill.errors import NobackfillError, UnavailableError, VerificationError
from nobackfill.release.encoders import TEXT_ROLES, TextRole
from nobackfill.release.manifest import Manifest
from nobackfill.release.paths import (
    embedder_model,
    query_encoder_model,
    side_encoder_model,
    text_encoder_model,
)
from nobackfill.release.text_models import TextReader
from nobackfill.server.triton.client import LIVE_TIMEOUT_S, Inputs, TritonClient
from nobackfill.server.triton.configuration import model_config

_LOAD_S = 120.0
_LOADS_AT_ONCE = 4


def model_names(manifest: Manifest) -> list[str]:
    """What Triton calls the models of a release."""
    names = [embedder_model(manifest.release)] if manifest.embedder.file else []
    if manifest.text_encoder is not None:
        names += text_models(manifest)
    if manifest.side_encoder is not None:
        # A release may keep the encoder of an older one.
        names.append(side_encoder_model(manifest.side_encoder.origin_release))
    return names


def text_models(manifest: Manifest) -> list[str]:
    """Of those that read texts."""
    return sorted({text_model(manifest, role) for role in TEXT_ROLES})


def text_model(manifest: Manifest, role: TextRole) -> str:
    """What reads texts of a role. Raises NoEncoderError."""
    own = role == "query" and manifest.reads_text.query_file is not None
    return (query_encoder_model if own else text_encoder_model)(manifest.release)


def probes(manifest: Manifest, reader: TextReader | None) -> dict[str, Inputs]:
    """By the name of each model that embeds, the least that can be asked of it."""
    asked: dict[str, Inputs] = {}
    if manifest.embedder.file is not None:
        shape = (1, manifest.frame.height, manifest.frame.width, 3)
        asked[embedder_model(manifest.release)] = {"image": np.zeros(shape, np.uint8)}
    if reader is not None:
        asked |= dict.fromkeys(text_models(manifest), reader.outermost)
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
