"""Names in the publication folder: every file of release N, and Triton's names of its models; and
the newest format of its manifest.

A model folder is called like its Triton model and holds version 1 only: a release is immutable, so
a new model is a new name.
"""

import re

# The newest of manifests.
NEWEST_FORMAT = 4

# No more digits than a manifest may declare.
_MANIFEST = re.compile(r"release-(0|[1-9][0-9]{0,6})\.json")
_PLAIN = re.compile(r"[a-z0-9][a-z0-9_.-]*(/[a-z0-9][a-z0-9_.-]*)*")


def is_plain(path: str) -> bool:
    """Whether a name can be a file of a publication: relative, nothing hidden, no way up."""
    return _PLAIN.fullmatch(path) is not None and ".." not in path


def embedder_model(release: int) -> str:
    """Triton's name of phi_N."""
    return f"embedder_{release}"


def side_encoder_model(release: int) -> str:
    """Triton's name of psi_N."""
    return f"side_encoder_{release}"


def text_encoder_model(release: int) -> str:
    """Triton's name of the text encoder of release N."""
    return f"text_encoder_{release}"


def query_encoder_model(release: int) -> str:
    """Triton's name of what reads queries, where release N has a model of its own for them."""
    return f"query_encoder_{release}"


def upgrade_model(from_release: int, to_release: int) -> str:
    """Triton's name of the upgrade M->N."""
    return f"upgrade_{from_release}_to_{to_release}"


def embedder_path(release: int) -> str:
    """phi_N's ONNX file."""
    return f"{embedder_model(release)}/1/model.onnx"


def side_encoder_path(release: int) -> str:
    """psi_N's ONNX file."""
    return f"{side_encoder_model(release)}/1/model.onnx"


def text_encoder_path(release: int) -> str:
    """The text encoder's ONNX file."""
    return f"{text_encoder_model(release)}/1/model.onnx"


def query_encoder_path(release: int) -> str:
    """The ONNX file of what reads queries."""
    return f"{query_encoder_model(release)}/1/model.onnx"


def tokenizer_path(release: int) -> str:
    """The text encoder's tokenizer, beside its ONNX file."""
    return f"{text_encoder_model(release)}/1/tokenizer.json"


def upgrade_path(from_release: int, to_release: int) -> str:
    """The fp32 ONNX file of the upgrade M->N."""
    return f"{upgrade_model(from_release, to_release)}/1/model.onnx"


def upgrade_int8_path(from_release: int, to_release: int) -> str:
    """The quantised twin of the upgrade M->N."""
    return f"{upgrade_model(from_release, to_release)}/1/model.int8.onnx"


def config_path(model: str) -> str:
    """Triton's configuration of a model."""
    return f"{model}/config.pbtxt"


def manifest_path(release: int) -> str:
    """The manifest of release N."""
    return f"release-{release}.json"


def probes_path(release: int) -> str:
    """The golden probes of release N."""
    return f"probes-{release}.npz"


def release_of_manifest(path: str) -> int | None:
    """N of `release-N.json`, None for every other path."""
    named = _MANIFEST.fullmatch(path)
    return int(named[1]) if named is not None else None
