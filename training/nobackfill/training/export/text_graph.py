"""A text model as others export it, made into the graph that a release publishes.

Its weights stay as they are. What makes one vector of the tokens' vectors is put behind it, inside
the graph, so that gateway, device and Triton run the same file and get vectors of the space.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, compose, helper, numpy_helper, shape_inference, version_converter

from nobackfill.errors import InvalidInputError
from nobackfill.release.publishing.declaration import Declaration

TOKENS = ("input_ids", "attention_mask", "token_type_ids")
# The operators behind the model are those of this set and later ones.
_OPSET = 17
_IR = 8
_THEIRS = "model/"
# The mean of the tokens that the mask lets pass.
_ONE = np.ones(1, np.float32)
_MEAN: tuple[tuple[str, list[str], str, dict[str, Any]], ...] = (
    ("Cast", ["attention_mask"], "mask_float", {"to": TensorProto.FLOAT}),
    ("Unsqueeze", ["mask_float", "last_axis"], "mask_weights", {}),
    ("Mul", ["tokens_float", "mask_weights"], "tokens_weighed", {}),
    ("ReduceSum", ["tokens_weighed", "token_axis"], "tokens_sum", {"keepdims": 0}),
    ("ReduceSum", ["mask_weights", "token_axis"], "tokens_count", {"keepdims": 0}),
    ("Max", ["tokens_count", "one_token"], "tokens_at_least_one", {}),
    ("Div", ["tokens_sum", "tokens_at_least_one"], "pooled", {}),
)


def text_graph(model: onnx.ModelProto, declared: Declaration) -> tuple[str, ...]:
    """Change `model` to inputs of TOKENS, int64 [n,t], and one output `embedding`; its inputs.

    Raises InvalidInputError for a model of another form.
    """
    _renew(model)
    graph = model.graph
    held = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in held]
    names = [value.name for value in inputs]
    if "input_ids" not in names or set(names) - set(TOKENS):
        raise InvalidInputError(f"expected inputs of {', '.join(TOKENS)}, got {names}")
    del graph.input[:]
    for value in inputs:
        _free(value)
    if declared.pooling == "mean" and "attention_mask" not in names:
        inputs.append(_tokens("attention_mask"))
    graph.input.extend(inputs)
    # None of its names can be one of ours.
    compose.add_prefix_graph(graph, _THEIRS, rename_inputs=False, inplace=True)
    pooled = _pooled(model, declared)
    if declared.normalise:
        graph.node.append(helper.make_node("LpNormalization", [pooled], ["embedding"], axis=1, p=2))
    else:
        graph.node.append(helper.make_node("Identity", [pooled], ["embedding"]))
    del graph.output[:]
    return tuple(value.name for value in inputs)


def declare_output(model: onnx.ModelProto, dim: int | None) -> None:
    """Say what `embedding` is, its dimension as far as that is known."""
    del model.graph.output[:]
    value = helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["n", dim])
    model.graph.output.append(value)


def _renew(model: onnx.ModelProto) -> None:
    versions = {opset.domain or "ai.onnx": opset.version for opset in model.opset_import}
    if set(versions) != {"ai.onnx"}:
        raise InvalidInputError(
            f"expected operators of ONNX alone, got sets {sorted(versions)}; export the model "
            "without a vendor's optimisations, in float32"
        )
    if versions["ai.onnx"] < _OPSET:
        model.CopyFrom(version_converter.convert_version(model, _OPSET))
    model.ir_version = max(model.ir_version, _IR)


def _free(value: onnx.ValueInfoProto) -> None:
    """Texts of any number and length."""
    kind = value.type.tensor_type
    fixed = [size.dim_value for size in kind.shape.dim if size.dim_value]
    if kind.elem_type != TensorProto.INT64 or len(kind.shape.dim) != 2 or fixed:
        raise InvalidInputError(
            f"input {value.name}: expected int64 [n, t] with a free n and t, got "
            f"{TensorProto.DataType.Name(kind.elem_type).lower()} with fixed sizes {fixed}"
        )
    value.CopyFrom(_tokens(value.name))


def _tokens(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.INT64, ["n", "t"])


def _pooled(model: onnx.ModelProto, declared: Declaration) -> str:
    """The name of a value float32 [n,dim]."""
    graph = model.graph
    outputs = [value.name.removeprefix(_THEIRS) for value in graph.output]
    wanted = declared.output or outputs[0]
    if wanted not in outputs:
        raise InvalidInputError(f"expected the output {wanted!r}, the model has {outputs}")
    axes = _axes(model, _THEIRS + wanted)
    graph.node.append(
        helper.make_node("Cast", [_THEIRS + wanted], ["tokens_float"], to=TensorProto.FLOAT)
    )
    if axes == 2:
        return "tokens_float"
    if axes != 3 or declared.pooling == "none":
        raise InvalidInputError(
            f"output {wanted!r}: expected [n, dim], or [n, tokens, dim] with pooling mean or cls, "
            f'got {axes} axes with pooling {declared.pooling}; declare another one as "output"'
        )
    if declared.pooling == "cls":
        _add(graph, "first_token", 0)
        graph.node.append(
            helper.make_node("Gather", ["tokens_float", "first_token"], ["pooled"], axis=1)
        )
        return "pooled"
    _add(graph, "last_axis", [2])
    _add(graph, "token_axis", [1])
    graph.initializer.append(numpy_helper.from_array(_ONE, "one_token"))
    for operator, given, made, options in _MEAN:
        graph.node.append(helper.make_node(operator, given, [made], **options))
    return "pooled"


def _axes(model: onnx.ModelProto, wanted: str) -> int:
    """How many an output has: as declared, else as it follows from the graph."""
    for graph in (model.graph, shape_inference.infer_shapes(model).graph):
        value = next(value for value in graph.output if value.name == wanted)
        if axes := len(value.type.tensor_type.shape.dim):
            return axes
    raise InvalidInputError(f"output {wanted!r}: its shape is not known; export it with shapes")


def _add(graph: onnx.GraphProto, name: str, value: int | Sequence[int]) -> None:
    graph.initializer.append(numpy_helper.from_array(np.array(value, np.int64), name))
