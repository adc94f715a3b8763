"""Triton's configuration of each model of a release: config.pbtxt, with exact dimensions."""

from nobackfill.release.manifest import Manifest
from nobackfill.release.paths import (
    config_path,
    embedder_model,
    query_encoder_model,
    side_encoder_model,
    text_encoder_model,
    upgrade_model,
)
from nobackfill.release.tensors import (
    Ends,
    embedder_ends,
    side_encoder_ends,
    text_encoder_ends,
    upgrade_ends,
)

LARGEST_BATCH = 256

_TYPES = {"uint8": "TYPE_UINT8", "int64": "TYPE_INT64", "float32": "TYPE_FP32"}


def configs(manifest: Manifest) -> dict[str, str]:
    """Published path -> text, for each model that the release itself publishes."""
    models: dict[str, Ends] = {}
    if manifest.embedder.file is not None:
        models[embedder_model(manifest.release)] = embedder_ends(manifest)
    if (text := manifest.text_encoder) is not None:
        models[text_encoder_model(manifest.release)] = text_encoder_ends(manifest, text)
        if text.query_file is not None:
            models[query_encoder_model(manifest.release)] = text_encoder_ends(manifest, text)
    encoder = manifest.side_encoder
    if encoder is not None and encoder.origin_release == manifest.release:
        models[side_encoder_model(manifest.release)] = side_encoder_ends(manifest, encoder)
    for upgrade in manifest.upgrades:
        name = upgrade_model(upgrade.from_release, manifest.release)
        models[name] = upgrade_ends(manifest, upgrade)
    return {config_path(name): _config(name, ends) for name, ends in models.items()}


def _config(name: str, ends: Ends) -> str:
    lines = [f'name: "{name}"', 'backend: "onnxruntime"', f"max_batch_size: {LARGEST_BATCH}"]
    for direction, tensors in zip(("input", "output"), ends, strict=True):
        for tensor, dtype, shape in tensors:
            # Triton knows no tensor without dimensions; one number an item is said by a reshape.
            dims = ", ".join(str(-1 if size is None else size) for size in shape or (1,))
            reshape = "" if shape else " reshape { shape: [ ] }"
            kind = _TYPES[dtype]
            lines.append(
                f'{direction} {{ name: "{tensor}" data_type: {kind} dims: [ {dims} ]{reshape} }}'
            )
    # No queue delay: it would be half of a single client's latency (measured 500 us of 1 ms).
    lines.append("dynamic_batching { }")
    # Triton's default on a CPU is two instances: twice the memory, and twice the time to come back.
    lines.append("instance_group [ { count: 1 } ]")
    return "\n".join(lines) + "\n"
