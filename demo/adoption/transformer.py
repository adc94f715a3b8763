"""BERT and MPNet as ONNX graphs, from a folder of safetensors and config.json.

For packages that ship weights alone: no framework of models is needed to run them.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file

Floats = NDArray[np.float32]

_OPSET = 17
# What hides a token that pads.
_HIDDEN = -1e4
# MPNet: distances between tokens that have a bias, and the farthest that is told apart.
_BUCKETS, _FARTHEST = 32, 128
# Names of a layer's parts: queries, keys, values, output, norm of the attention.
_PARTS = {
    "bert": (
        "attention.self.query", "attention.self.key", "attention.self.value",
        "attention.output.dense", "attention.output.LayerNorm",
    ),
    "mpnet": (
        "attention.attn.q", "attention.attn.k", "attention.attn.v", "attention.attn.o",
        "attention.LayerNorm",
    ),
}  # fmt: skip


def export_transformer(folder: Path, longest: int) -> Path:
    """`folder`/model.onnx: `input_ids`, `attention_mask` [n, t] -> `last_hidden_state` [n, t, h];
    t is at most `longest`."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    weights = load_file(folder / "model.safetensors")
    graph = _Graph(config, {name: np.asarray(value) for name, value in weights.items()})
    graph.build(longest)
    path = folder / "model.onnx"
    # Whole or not there, for a run that is killed.
    part = path.with_name(f"part-{path.name}")
    onnx.save(graph.model(), part)
    part.replace(path)
    return path


class _Graph:
    """Nodes and constants, by the names of their outputs."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Floats]) -> None:
        self.kind: str = config["model_type"]
        if self.kind not in _PARTS:
            raise ValueError(f"expected one of {sorted(_PARTS)}, got {self.kind!r}")
        self._config, self._weights = config, weights
        self._heads, self._size = config["num_attention_heads"], config["hidden_size"]
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, NDArray[Any]] = {}

    def build(self, longest: int) -> None:
        x = self._embedded(longest)
        hidden = self._node("Cast", "attention_mask", to=TensorProto.FLOAT)
        hidden = self._node("Sub", self._float("one", 1.0), hidden)
        hidden = self._node("Mul", hidden, self._float("hide", _HIDDEN))
        bias = self._node("Unsqueeze", hidden, self._ints("middle", [1, 2]))
        if self.kind == "mpnet":
            bias = self._node("Add", bias, self._sliced(self._distances(longest), 1, 2))
        for number in range(self._config["num_hidden_layers"]):
            x = self._layer(f"encoder.layer.{number}", x, bias)
        self._nodes.append(helper.make_node("Identity", [x], ["last_hidden_state"]))

    def model(self) -> onnx.ModelProto:
        inputs = [
            helper.make_tensor_value_info(name, TensorProto.INT64, ["n", "t"])
            for name in ("input_ids", "attention_mask")
        ]
        output = helper.make_tensor_value_info(
            "last_hidden_state", TensorProto.FLOAT, ["n", "t", self._size]
        )
        constants = [
            numpy_helper.from_array(value, name) for name, value in self._constants.items()
        ]
        graph = helper.make_graph(self._nodes, self.kind, inputs, [output], constants)
        opset = [helper.make_opsetid("", _OPSET)]
        return helper.make_model(graph, opset_imports=opset, ir_version=8)

    def _embedded(self, longest: int) -> str:
        words = self._node("Gather", self._weight("embeddings.word_embeddings.weight"), "input_ids")
        # MPNet counts positions from behind its padding token.
        first = self._config["pad_token_id"] + 1 if self.kind == "mpnet" else 0
        places = self._weights["embeddings.position_embeddings.weight"][first : first + longest]
        if self.kind == "bert":
            places = places + self._weights["embeddings.token_type_embeddings.weight"][0]
        self._constants["places"] = np.ascontiguousarray(places)
        x = self._node("Add", words, self._sliced("places", 0))
        return self._normed("embeddings.LayerNorm", x)

    def _layer(self, name: str, x: str, bias: str) -> str:
        queries, keys, values, output, norm = (f"{name}.{part}" for part in _PARTS[self.kind])
        query, key, value = (self._dense(part, x) for part in (queries, keys, values))
        scores = self._node("MatMul", self._split(query, 0, 2, 1, 3), self._split(key, 0, 2, 3, 1))
        scale = self._float("scale", 1 / math.sqrt(self._size // self._heads))
        scores = self._node("Add", self._node("Mul", scores, scale), bias)
        shares = self._node("Softmax", scores, axis=-1)
        mixed = self._node("MatMul", shares, self._split(value, 0, 2, 1, 3))
        mixed = self._node("Transpose", mixed, perm=[0, 2, 1, 3])
        mixed = self._node("Reshape", mixed, self._ints("joined", [0, 0, self._size]))
        x = self._normed(norm, self._node("Add", self._dense(output, mixed), x))
        wide = self._gelu(self._dense(f"{name}.intermediate.dense", x))
        wide = self._dense(f"{name}.output.dense", wide)
        return self._normed(f"{name}.output.LayerNorm", self._node("Add", wide, x))

    def _split(self, x: str, *order: int) -> str:
        heads = self._ints("heads", [0, 0, self._heads, self._size // self._heads])
        return self._node("Transpose", self._node("Reshape", x, heads), perm=list(order))

    def _gelu(self, x: str) -> str:
        part = self._node("Erf", self._node("Mul", x, self._float("root", 1 / math.sqrt(2))))
        part = self._node("Add", part, self._float("one", 1.0))
        return self._node("Mul", self._node("Mul", x, part), self._float("half", 0.5))

    def _dense(self, name: str, x: str) -> str:
        turned = f"{name}.turned"
        self._constants[turned] = np.ascontiguousarray(self._weights[f"{name}.weight"].T)
        return self._node("Add", self._node("MatMul", x, turned), self._weight(f"{name}.bias"))

    def _normed(self, name: str, x: str) -> str:
        scale, shift = self._weight(f"{name}.weight"), self._weight(f"{name}.bias")
        epsilon = self._config["layer_norm_eps"]
        return self._node("LayerNormalization", x, scale, shift, axis=-1, epsilon=epsilon)

    def _distances(self, longest: int) -> str:
        """MPNet's bias of each pair of places by their distance: [heads, longest, longest]."""
        table = self._weights["encoder.relative_attention_bias.weight"]
        place = np.arange(longest)
        back = place[:, None] - place[None, :]
        near = _BUCKETS // 4
        apart = np.maximum(np.abs(back), 1)
        far = near + np.log(apart / near) / math.log(_FARTHEST / near) * near
        bucket = np.where(np.abs(back) < near, np.abs(back), np.minimum(far, _BUCKETS // 2 - 1))
        bucket = bucket.astype(np.int64) + np.where(back < 0, _BUCKETS // 2, 0)
        self._constants["distances"] = np.ascontiguousarray(table[bucket].transpose(2, 0, 1))
        return "distances"

    def _sliced(self, name: str, *axes: int) -> str:
        """As many of a constant's rows, along each axis, as there are tokens."""
        shape = self._node("Shape", "input_ids", start=1, end=2)
        ends = self._node("Concat", *([shape] * len(axes)), axis=0)
        zeros = self._ints(f"from{len(axes)}", [0] * len(axes))
        return self._node("Slice", name, zeros, ends, self._ints(f"axes{axes}", list(axes)))

    def _weight(self, name: str) -> str:
        self._constants[name] = self._weights[name]
        return name

    def _float(self, name: str, value: float) -> str:
        self._constants[name] = np.array(value, np.float32)
        return name

    def _ints(self, name: str, values: list[int]) -> str:
        self._constants[name] = np.array(values, np.int64)
        return name

    def _node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"{kind}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name
