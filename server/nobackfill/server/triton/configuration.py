"""What Triton gets of a model: its signed configuration, if that can run nothing but ONNX.

Triton runs any code that a configuration names: another backend, an environment to unpack, a
runtime. A publisher's signature makes a release believable, not its files code.
"""

from pathlib import Path

from google.protobuf import json_format, text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from nobackfill.errors import VerificationError, few
from nobackfill.release.paths import config_path

_BACKEND = "onnxruntime"
# What release/triton_config.py writes.
_FIELDS = {
    "name", "backend", "max_batch_size", "input", "output", "dynamic_batching", "instance_group",
}  # fmt: skip


def model_config(repo: Path, name: str) -> str:
    """The configuration of a published model, checked, as JSON: Triton takes it before its file.

    Raises VerificationError for one that cannot be read or asks for more than running ONNX.
    """
    path = config_path(name)
    config = ModelConfig()
    try:
        text_format.Parse((repo / path).read_text("utf-8"), config)
    except (OSError, ValueError, text_format.ParseError) as error:
        raise VerificationError(f"{path}: expected a model's configuration ({error})") from error
    unknown = sorted({field.name for field, _ in config.ListFields()} - _FIELDS)
    if config.name != name or config.backend != _BACKEND or unknown:
        raise VerificationError(
            f"{path}: expected {name!r} for the backend {_BACKEND!r} and nothing else, got "
            f"{config.name!r} for {config.backend!r}, with {few(unknown) or 'no more'}; "
            "publish the release anew"
        )
    return json_format.MessageToJson(config, preserving_proto_field_name=True, indent=None)
