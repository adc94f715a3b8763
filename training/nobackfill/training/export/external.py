"""Bring your own: an embedder that exists as ONNX becomes a release.

Its weights stay as they are. Where it takes float32 pixels, the steps from uint8 are put in front
of it, inside the graph: scaling to 0..1, mean and standard deviation a channel, channels first.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, compose, helper, numpy_helper

from nobackfill.errors import InvalidInputError, VerificationError
from nobackfill.framing import Fit, Interpolation
from nobackfill.release.manifest import Embedder
from nobackfill.release.paths import embedder_path
from nobackfill.release.publishing.declaration import digest, weight_files
from nobackfill.training.export.drafting import Release
from nobackfill.training.export.onnx_export import run_onnx, strip
from nobackfill.training.export.probe_images import probe_images

Channels = tuple[float, float, float]

# What is put around a model, and what its own names become where one of them is taken.
_OURS = {
    "image", "image_float", "image_scale", "image_scaled", "image_shift", "image_shifted",
    "embedding",
}  # fmt: skip
_THEIRS = "model/"


@dataclass(frozen=True)
class Pixels:
    """How a float32 embedder wants its pixels: (value / 255 - mean) / std, a channel each."""

    mean: Channels = (0.0, 0.0, 0.0)
    std: Channels = (1.0, 1.0, 1.0)
    # As in nobackfill.framing.Frame.
    fit: Fit = "stretch"
    shortest: int | None = None
    interpolation: Interpolation = "bilinear"


def add_onnx_embedder(release: Release, source: Path, pixels: Pixels) -> None:
    """Put a foreign embedder into the release.

    It has one input, uint8 [n,H,W,3] or float32 [n,3,H,W] or [n,H,W,3] with a free n, and one
    output float32 [n,dim]. Unit norm is found out by running it. Raises InvalidInputError for
    another form; what a graph may compute is checked when it is published.
    """
    model = _load(source)
    held = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in held]
    if len(inputs) != 1 or len(model.graph.output) != 1:
        raise InvalidInputError(
            f"--onnx {source}: expected one input and one output, got {len(inputs)} and "
            f"{len(model.graph.output)}"
        )
    if _OURS & _names(model.graph):
        compose.add_prefix_graph(model.graph, _THEIRS, inplace=True)
    size = _connect_input(model, inputs[0], pixels, source)
    _rename_output(model)
    strip(model)
    path = release.local(embedder_path(release.number))
    onnx.save(model, path)
    embedding = _run(path, size, source)
    unit = bool((np.abs(np.linalg.norm(embedding, axis=1) - 1) < 1e-3).all())
    release.embedder = Embedder(
        file=release.file(embedder_path(release.number)),
        height=size[0],
        width=size[1],
        dim=embedding.shape[1],
        metric="cosine" if unit else "squared_l2",
        unit=unit,
        fit=pixels.fit,
        shortest=pixels.shortest,
        interpolation=pixels.interpolation,
    )
    release.method = "brought"
    release.recipe["onnx_sha256"] = digest(weight_files(source))


def _load(source: Path) -> onnx.ModelProto:
    try:
        return onnx.load(source)
    except (OSError, DecodeError) as error:
        raise InvalidInputError(f"--onnx {source}: cannot be read as ONNX ({error})") from error


def _names(graph: onnx.GraphProto) -> set[str]:
    """Of a graph's values."""
    names = {value.name for value in (*graph.input, *graph.output)}
    names |= {tensor.name for tensor in graph.initializer}
    return names.union(*(node.output for node in graph.node))


def _connect_input(
    model: onnx.ModelProto, value: onnx.ValueInfoProto, pixels: Pixels, source: Path
) -> tuple[int, int]:
    """Make `image` uint8 [n,H,W,3] the only input; its height and width."""
    kind = value.type.tensor_type.elem_type
    shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
    first = kind == TensorProto.FLOAT and len(shape) == 4 and shape[1] == 3
    if kind not in (TensorProto.UINT8, TensorProto.FLOAT) or len(shape) != 4 or shape[0] != 0:
        raise InvalidInputError(
            f"--onnx {source}: expected an input uint8 [n,H,W,3] or float32 [n,3,H,W] with a free "
            f"n, got {TensorProto.DataType.Name(kind).lower()} {shape}; export it with a dynamic "
            "batch"
        )
    height, width = (shape[2], shape[3]) if first else (shape[1], shape[2])
    if not (first or shape[3] == 3) or not height or not width:
        raise InvalidInputError(
            f"--onnx {source}: expected 3 colour channels and a fixed height and width, got {shape}"
        )
    target = value.name
    model.graph.input.remove(value)
    image = helper.make_tensor_value_info("image", TensorProto.UINT8, ["n", height, width, 3])
    model.graph.input.insert(0, image)
    if kind == TensorProto.UINT8:
        steps = [helper.make_node("Identity", ["image"], [target])]
    else:
        scale = 1 / (255 * np.array(pixels.std, np.float32))
        shift = -np.array(pixels.mean, np.float32) / np.array(pixels.std, np.float32)
        model.graph.initializer.extend(
            [
                numpy_helper.from_array(scale.astype(np.float32), "image_scale"),
                numpy_helper.from_array(shift.astype(np.float32), "image_shift"),
            ]
        )
        steps = [
            helper.make_node("Cast", ["image"], ["image_float"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["image_float", "image_scale"], ["image_scaled"]),
            helper.make_node("Add", ["image_scaled", "image_shift"], ["image_shifted"]),
            helper.make_node("Transpose", ["image_shifted"], [target], perm=[0, 3, 1, 2])
            if first
            else helper.make_node("Identity", ["image_shifted"], [target]),
        ]
    for step in reversed(steps):
        model.graph.node.insert(0, step)
    return height, width


def _rename_output(model: onnx.ModelProto) -> None:
    output = model.graph.output[0]
    model.graph.node.append(helper.make_node("Identity", [output.name], ["embedding"]))
    output.name = "embedding"


def _run(path: Path, size: tuple[int, int], source: Path) -> np.ndarray:
    try:
        embedding = run_onnx(path, {"image": probe_images(*size)}, ("embedding",))[0]
    except VerificationError as error:
        raise InvalidInputError(f"--onnx {source}: {error}") from error
    if embedding.dtype != np.float32 or embedding.ndim != 2:
        raise InvalidInputError(
            f"--onnx {source}: expected outputs float32 [n, dim], got {embedding.dtype} "
            f"{list(embedding.shape)}"
        )
    return embedding
