"""Triton's configuration of each model of a release: config.pbtxt, with exact dimensions."""

from release.manifest import Manifest, Upgrade
from release.paths import (
    config_path,
    embedder_model,
    side_encoder_model,
    upgrade_model,
)

LARGEST_BATCH = 256


def configs(manifest: Manifest) -> dict[str, str]:
    """Published path -> text, for each model that the release itself publishes."""
    spec, encoder = manifest.embedder, manifest.side_encoder
    image = ("image", "TYPE_UINT8", (spec.height, spec.width, 3))
    name = embedder_model(manifest.release)
    texts = {config_path(name): _config(name, [image], [_vector("embedding", spec.dim)])}
    if encoder is not None and encoder.origin_release == manifest.release:
        name = side_encoder_model(manifest.release)
        texts[config_path(name)] = _config(name, [image], [_vector("side", encoder.dim)])
    for upgrade in manifest.upgrades:
        name = upgrade_model(upgrade.from_release, manifest.release)
        texts[config_path(name)] = _upgrade_config(name, manifest, upgrade)
    return texts


_Tensor = tuple[str, str, tuple[int, ...]]


def _upgrade_config(name: str, manifest: Manifest, upgrade: Upgrade) -> str:
    inputs = [_vector("embedding", upgrade.from_dim)]
    outputs = [_vector("upgraded", manifest.embedder.dim)]
    if upgrade.from_side_space is not None:
        inputs.append(_vector("side", upgrade.from_side_dim))
    if upgrade.side == "maps" and manifest.side_encoder is not None:
        outputs.append(_vector("upgraded_side", manifest.side_encoder.dim))
    if upgrade.predicts_uncertainty:
        outputs.append(("uncertainty", "TYPE_FP32", ()))
    return _config(name, inputs, outputs)


def _vector(name: str, dim: int) -> _Tensor:
    return name, "TYPE_FP32", (dim,)


def _config(name: str, inputs: list[_Tensor], outputs: list[_Tensor]) -> str:
    lines = [f'name: "{name}"', 'backend: "onnxruntime"', f"max_batch_size: {LARGEST_BATCH}"]
    for direction, tensors in (("input", inputs), ("output", outputs)):
        for tensor, kind, shape in tensors:
            # Triton knows no tensor without dimensions; one number an item is said by a reshape.
            dims = ", ".join(str(size) for size in shape or (1,))
            reshape = "" if shape else " reshape { shape: [ ] }"
            lines.append(
                f'{direction} {{ name: "{tensor}" data_type: {kind} dims: [ {dims} ]{reshape} }}'
            )
    # No queue delay: it would be half of a single client's latency (measured 500 us of 1 ms).
    lines.append("dynamic_batching { }")
    # Triton's default on a CPU is two instances: twice the memory, and twice the time to come back.
    lines.append("instance_group [ { count: 1 } ]")
    return "\n".join(lines) + "\n"
