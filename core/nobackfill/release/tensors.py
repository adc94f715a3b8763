"""The inputs and outputs of a release's models, and Triton's configuration of them."""

from typing import TYPE_CHECKING

from nobackfill.release.paths import (
    config_path,
    embedder_model,
    query_encoder_model,
    side_encoder_model,
    text_encoder_model,
    upgrade_model,
)

if TYPE_CHECKING:
    from nobackfill.release.manifest import (
        Manifest,
        PublishedSideEncoder,
        TextEncoder,
        Upgrade,
    )


# name, dtype ("uint8", "int64" or "float32"), shape of one item (None: as long as a text); the
# number of items stands before it.
Tensor = tuple[str, str, tuple[int | None, ...]]
# inputs, outputs
Ends = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


def embedder_ends(manifest: "Manifest") -> Ends:
    """Of phi_N: uint8 [n,H,W,3] to float32 [n,dim]."""
    return (_image(manifest),), (_vector("embedding", manifest.embedder.dim),)


def text_encoder_ends(manifest: "Manifest", encoder: "TextEncoder") -> Ends:
    """Of the text encoder: tokens int64 [n,t] to float32 [n,dim]."""
    tokens = tuple((name, "int64", (None,)) for name in encoder.inputs)
    return tokens, (_vector("embedding", manifest.embedder.dim),)


def side_encoder_ends(manifest: "Manifest", encoder: "PublishedSideEncoder") -> Ends:
    """Of psi_N: uint8 [n,H,W,3] to float32 [n,side_dim]."""
    return (_image(manifest),), (_vector("side", encoder.dim),)


def upgrade_ends(manifest: "Manifest", upgrade: "Upgrade") -> Ends:
    """Of the upgrade M->N: embeddings, with side-information where it is read and written."""
    inputs = [_vector("embedding", upgrade.from_dim)]
    outputs = [_vector("upgraded", manifest.embedder.dim)]
    if upgrade.reads_side:
        inputs.append(_vector("side", upgrade.from_side_dim))
    if upgrade.side == "maps" and manifest.side_encoder is not None:
        outputs.append(_vector("upgraded_side", manifest.side_encoder.dim))
    if upgrade.predicts_uncertainty:
        outputs.append(("uncertainty", "float32", ()))
    return tuple(inputs), tuple(outputs)


def _image(manifest: "Manifest") -> Tensor:
    return "image", "uint8", (manifest.frame.height, manifest.frame.width, 3)


def _vector(name: str, dim: int) -> Tensor:
    return name, "float32", (dim,)


# Triton's configuration of each model of a release: config.pbtxt, with exact dimensions.

LARGEST_BATCH = 256

_TYPES = {"uint8": "TYPE_UINT8", "int64": "TYPE_INT64", "float32": "TYPE_FP32"}


def configs(manifest: "Manifest") -> dict[str, str]:
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
