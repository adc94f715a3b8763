"""The inputs and outputs of a release's models: what the ONNX rules and Triton expect."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nobackfill.release.manifest import Manifest, SideEncoder, TextEncoder, Upgrade

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


def side_encoder_ends(manifest: "Manifest", encoder: "SideEncoder") -> Ends:
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
