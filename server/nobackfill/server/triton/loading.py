"""Loading of a release's models into Triton."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nobackfill.errors import NobackfillError, UnavailableError, VerificationError
from nobackfill.release.manifest import Manifest
from nobackfill.release.paths import embedder_model, side_encoder_model
from nobackfill.server.triton.client import LIVE_TIMEOUT_S, TritonClient
from nobackfill.server.triton.configuration import model_config

_LOAD_S = 120.0
_LOADS_AT_ONCE = 4


def model_names(manifest: Manifest) -> list[str]:
    """What Triton calls the models of a release."""
    names = [embedder_model(manifest.release)]
    if manifest.side_encoder is not None:
        # A release may keep the encoder of an older one.
        names.append(side_encoder_model(manifest.side_encoder.origin_release))
    return names


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
