"""Tiny ONNX graphs, made without torch.

Every release embeds with the same projection into its own orthogonal block of the vector, so that
an upgrade is exactly a move from block to block, and a vector that meets a query of another release
has cosine 0: any mixing of spaces shows.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import ArrayLike, NDArray
from onnx import TensorProto, helper, numpy_helper

SIZE = 8
BLOCK = 8
BLOCKS = 8
DIM = BLOCK * BLOCKS
SIDE_BLOCK = 4
SIDE_DIM = SIDE_BLOCK * BLOCKS
OPSET = 18
IR_VERSION = 10

Matrix = NDArray[np.float32]


def into_block(projection: Matrix, release: int, blocks: int = BLOCKS) -> Matrix:
    """[m, block] to [m, block * blocks], zero but for the release's own block."""
    width = projection.shape[1]
    start = (release - 1) % blocks * width
    wide = np.zeros((projection.shape[0], width * blocks), np.float32)
    wide[:, start : start + width] = projection
    return wide


def projection(width: int, seed: int) -> Matrix:
    """What turns the pixels of an image into `width` numbers; the same in every release."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((SIZE * SIZE * 3, width), np.float32) / np.float32(16)


def move(source: int, target: int, width: int) -> Matrix:
    """The map from one release's block to another's."""
    return into_block(np.eye(width, dtype=np.float32), source).T @ into_block(
        np.eye(width, dtype=np.float32), target
    )


# Off the middle, so that no grey image embeds to nothing.
MIDDLE = 0.4987


def encoder(output: str, weights: Matrix, *, unit: bool, middle: float = MIDDLE) -> onnx.ModelProto:
    """image uint8 [n,8,8,3] -> `output` float32 [n,d]: scaled pixels times weights.

    An image whose scaled pixels are all `middle` embeds to nothing.
    """
    nodes = [
        helper.make_node("Cast", ["image"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["pixels", "scale"], ["scaled"]),
        helper.make_node("Sub", ["scaled", "middle"], ["centred"]),
        helper.make_node("Flatten", ["centred"], ["flat"], axis=1),
        helper.make_node("MatMul", ["flat", "weights"], ["product" if unit else output]),
    ]
    if unit:
        nodes.append(helper.make_node("LpNormalization", ["product"], [output], axis=1, p=2))
    constants: dict[str, ArrayLike] = {
        "scale": np.float32(1 / 255),
        "middle": np.float32(middle),
        "weights": weights,
    }
    image = helper.make_tensor_value_info("image", TensorProto.UINT8, ["n", SIZE, SIZE, 3])
    return model(nodes, [image], [vector(output, weights.shape[1])], constants)


def upgrade(source: int, target: int, *, reads_side: bool, maps_side: bool) -> onnx.ModelProto:
    """The upgrade between two releases; with side-information it also tells an uncertainty."""
    nodes = [
        helper.make_node("MatMul", ["embedding", "move"], ["moved"]),
        helper.make_node("LpNormalization", ["moved"], ["upgraded"], axis=1, p=2),
    ]
    constants: dict[str, ArrayLike] = {"move": move(source, target, BLOCK)}
    inputs, outputs = [vector("embedding", DIM)], [vector("upgraded", DIM)]
    if reads_side:
        inputs.append(vector("side", SIDE_DIM))
        nodes.append(helper.make_node("ReduceL1", ["side", "axis"], ["uncertainty"], keepdims=0))
        constants["axis"] = np.array([1], np.int64)
        outputs.append(helper.make_tensor_value_info("uncertainty", TensorProto.FLOAT, ["n"]))
    if maps_side:
        # Without side-information to read, it is made from the embedding.
        read = "side" if reads_side else "embedding"
        nodes.append(helper.make_node("MatMul", [read, "move_side"], ["upgraded_side"]))
        constants["move_side"] = (
            move(source, target, SIDE_BLOCK) if reads_side else np.eye(DIM, SIDE_DIM, dtype="f4")
        )
        outputs.append(vector("upgraded_side", SIDE_DIM))
    return model(nodes, inputs, outputs, constants)


def adapter(source: int, target: int) -> onnx.ModelProto:
    """The query adapter from one release's block to another's."""
    nodes = [
        helper.make_node("MatMul", ["embedding", "move"], ["moved"]),
        helper.make_node("LpNormalization", ["moved"], ["adapted"], axis=1, p=2),
    ]
    constants = {"move": move(source, target, BLOCK)}
    return model(nodes, [vector("embedding", DIM)], [vector("adapted", DIM)], constants)


def vector(name: str, dim: int) -> onnx.ValueInfoProto:
    """A float32 value of shape [n, dim]."""
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", dim])


def model(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    constants: Mapping[str, ArrayLike],
) -> onnx.ModelProto:
    """A model of the default operator set."""
    tensors = [numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items()]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, tensors)
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION
    )


def save(proto: onnx.ModelProto, path: Path) -> Path:
    """Write a model, its folder made if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(proto.SerializeToString(deterministic=True))
    return path


def quantise(source: Path, target: Path) -> Path:
    """An int8 twin, by onnxruntime's dynamic quantisation."""
    import nobackfill.onnx_runtime  # noqa: F401  # Before anything of onnxruntime's.

    # isort: split
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(source, target, weight_type=QuantType.QInt8)
    return target
