"""Check one ONNX file against the rules for models. trial.py runs this in a child with limits.

A graph may only compute: listed operators of the default domain, no control flow, no randomness, no
functions, no data outside of the file, and exactly the declared inputs and outputs.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TypeProto,
    ValueInfoProto,
    numpy_helper,
)

from nobackfill.release.manifest import Tensor

LARGEST_FILE = 512 * 2**20
# Largest number of elements of an intermediate value for one item: 256 MiB in float32.
LARGEST_VALUE = 2**26
# Largest number of axes of a tensor.
_MOST_AXES = 16
OPSETS = range(13, 25)
IR_VERSIONS = range(7, 14)

_OPERATORS = """
Abs Add And Ceil Clip Cos Div Equal Erf Exp Floor Greater GreaterOrEqual IsNaN Less LessOrEqual Log
Max Mean Min Mod Mul Neg Not Or Pow Reciprocal Round Sign Sin Sqrt Sub Sum Where Xor
Conv ConvTranspose Einsum Gemm MatMul
Celu Elu Gelu HardSigmoid HardSwish LeakyRelu LogSoftmax Mish PRelu Relu Selu Sigmoid Softmax
Softplus Softsign Tanh ThresholdedRelu
AveragePool BatchNormalization GlobalAveragePool GlobalMaxPool GroupNormalization
InstanceNormalization LRN LayerNormalization LpNormalization MaxPool RMSNormalization
ArgMax ArgMin CumSum ReduceL1 ReduceL2 ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd
ReduceSum ReduceSumSquare TopK
Cast CastLike Concat Constant ConstantOfShape DepthToSpace Dropout Expand Flatten Gather
GatherElements GatherND Identity Pad Range Reshape Resize ScatterElements ScatterND Shape Size Slice
SpaceToDepth Split Squeeze Tile Transpose Trilu Unsqueeze
ConvInteger DequantizeLinear DynamicQuantizeLinear MatMulInteger QLinearConv QLinearMatMul
QuantizeLinear
"""
ALLOWED_OPERATORS = frozenset(_OPERATORS.split())

_BYTES: dict[int, int] = {
    TensorProto.FLOAT: 4, TensorProto.DOUBLE: 8, TensorProto.FLOAT16: 2, TensorProto.INT8: 1,
    TensorProto.UINT8: 1, TensorProto.INT32: 4, TensorProto.INT64: 8, TensorProto.BOOL: 1,
}  # fmt: skip
_TYPES = {"uint8": TensorProto.UINT8, "int64": TensorProto.INT64, "float32": TensorProto.FLOAT}


class OnnxRuleError(Exception):
    """The file breaks a rule; the message names the rule."""


def check_onnx_file(
    path: Path,
    inputs: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    longest_text_tokens: int = 1,
) -> None:
    """Check a file against all rules.

    Reads the whole file into memory. Nothing is run or written.

    Args:
        path: The ONNX file.
        inputs: The inputs that it must have.
        outputs: The outputs that it must have.
        longest_text_tokens: Length of the longest text in tokens, at least 1; it bounds the values
            of an open axis.

    Raises:
        OnnxRuleError: The first broken rule. Examples are a folder, a file above 512 MiB, an
            operator that is not listed, data outside of the file, and other inputs or outputs.
        OSError: The file is missing or cannot be read.
        MemoryError, RecursionError: The file is too large or too deep for this process. A crafted
            file may even end it: call this in a child (trial.py).
    """
    size = path.stat().st_size
    if not path.is_file() or size > LARGEST_FILE:
        raise OnnxRuleError(f"it has {size} bytes, expected at most {LARGEST_FILE}")
    try:
        # onnx.load would choose another format by the file's name.
        model = ModelProto.FromString(path.read_bytes())
    except (DecodeError, ValueError) as error:
        raise OnnxRuleError(f"it is no ONNX file ({error})") from error
    _check_frame(model)
    graph = model.graph
    _check_tensors([*graph.initializer, *_constants(graph)])
    for node in graph.node:
        _check_mode(node)
        if node.domain not in ("", "ai.onnx") or node.op_type not in ALLOWED_OPERATORS:
            name = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
            raise OnnxRuleError(
                f"it uses the operator {name}, which is not on the list of allowed operators"
            )
        _check_node(node, model.opset_import[0].version)
    _check_ends("input", graph.input, inputs)
    _check_ends("output", graph.output, outputs)
    if {i.name for i in graph.input} & {t.name for t in graph.initializer}:
        raise OnnxRuleError("it has an initializer for an input; remove it from the graph's inputs")
    try:
        onnx.checker.check_model(model, full_check=True)
        inferred = _check_values(model, longest_text_tokens)
        _check_arithmetic(inferred)
    # ValueError: the checker fails with a UnicodeDecodeError on names that are no text.
    except (
        onnx.checker.ValidationError,
        onnx.shape_inference.InferenceError,
        ValueError,
        RuntimeError,
    ) as error:
        raise OnnxRuleError(f"it does not pass onnx's checker ({error})") from error


def _check_frame(model: ModelProto) -> None:
    if model.ir_version not in IR_VERSIONS:
        raise OnnxRuleError(f"it has IR version {model.ir_version}, expected {_span(IR_VERSIONS)}")
    domains = [opset.domain for opset in model.opset_import]
    if len(domains) != 1 or domains[0] not in ("", "ai.onnx"):
        raise OnnxRuleError(f"it imports operator sets {domains}, expected the default one only")
    version = model.opset_import[0].version
    if version not in OPSETS:
        raise OnnxRuleError(f"it has opset {version}, expected {_span(OPSETS)}")
    if model.functions:
        raise OnnxRuleError("it defines functions; inline them")
    if model.training_info:
        raise OnnxRuleError("it contains training information; export the model for inference")
    if model.graph.sparse_initializer:
        raise OnnxRuleError("it has sparse initializers; export dense ones")


def _constants(graph: GraphProto) -> Iterator[TensorProto]:
    """Yield the tensors in attributes; refuse deeper nesting."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.ref_attr_name or attribute.type in (
                AttributeProto.GRAPH, AttributeProto.GRAPHS, AttributeProto.SPARSE_TENSOR,
                AttributeProto.SPARSE_TENSORS, AttributeProto.TYPE_PROTO,
                AttributeProto.TYPE_PROTOS,
            ):  # fmt: skip
                raise OnnxRuleError(
                    f"its {node.op_type} has a subgraph, a sparse tensor or a reference; export "
                    "the model without control flow and functions"
                )
            if attribute.HasField("g") or attribute.graphs or attribute.HasField("sparse_tensor"):
                raise OnnxRuleError(
                    f"its {node.op_type} has an attribute with a subgraph or a sparse tensor, "
                    "and declares another type for it; export the model again by a current exporter"
                )
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors


def _check_tensors(tensors: list[TensorProto]) -> None:
    total = 0
    for tensor in tensors:
        if tensor.data_location == TensorProto.EXTERNAL or tensor.external_data:
            raise OnnxRuleError(
                f"its tensor {tensor.name!r} lies in another file; export the model as one file"
            )
        if tensor.data_type not in _BYTES:
            raise OnnxRuleError(
                f"its tensor {tensor.name!r} has the type {_type_name(tensor.data_type)}, expected "
                f"one of {', '.join(map(_type_name, _BYTES))}"
            )
        if tensor.HasField("segment") or any(size < 0 for size in tensor.dims):
            raise OnnxRuleError(
                f"its tensor {tensor.name!r} has a negative size, or is a segment of another tensor"
            )
        size = math.prod(tensor.dims) * _BYTES[tensor.data_type]
        total += size
        if total > LARGEST_FILE:
            raise OnnxRuleError(f"its tensors declare more than {LARGEST_FILE} bytes")
        if tensor.HasField("raw_data") and len(tensor.raw_data) != size:
            raise OnnxRuleError(
                f"its tensor {tensor.name!r} declares {size} bytes, but has {len(tensor.raw_data)}"
            )


def _type_name(number: int) -> str:
    """Name a tensor's type as onnx does, in lower case; FLOAT is float32 everywhere else."""
    if number == TensorProto.FLOAT:
        return "float32"
    known = number in TensorProto.DataType.values()
    return TensorProto.DataType.Name(number).lower() if known else f"unknown ({number})"


def _check_ends(what: str, values: Iterable[ValueInfoProto], declared: tuple[Tensor, ...]) -> None:
    names = [value.name for value in values]
    declared_names = [name for name, _, _ in declared]
    if sorted(names) != sorted(declared_names):
        raise OnnxRuleError(f"it has {what}s {names}, but the manifest declares {declared_names}")
    for name, dtype, declared_shape in declared:
        value = next(value for value in values if value.name == name)
        kind = value.type.tensor_type
        if not value.type.HasField("tensor_type") or kind.elem_type != _TYPES[dtype]:
            is_tensor = value.type.HasField("tensor_type")
            found = _type_name(kind.elem_type) if is_tensor else "no tensor"
            raise OnnxRuleError(f"its {what} {name!r} is {found}, expected {dtype}")
        shape = [d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim]
        if shape != [None, *declared_shape]:
            raise OnnxRuleError(
                f"its {what} {name!r} has the shape {shape}, expected "
                f"{[None, *declared_shape]} (None: any number of items)"
            )


def _check_values(model: ModelProto, longest_text_tokens: int) -> GraphProto:
    """Check that no value of one item is large enough to fill a device, as far as shapes are
    known."""
    single = ModelProto()
    single.CopyFrom(model)
    for value in single.graph.input:
        first, *others = value.type.tensor_type.shape.dim
        first.dim_value = 1
        for size in others:
            size.dim_value = size.dim_value or longest_text_tokens
    inferred = onnx.shape_inference.infer_shapes(single, data_prop=True)
    for value in inferred.graph.value_info:
        sizes = [d.dim_value for d in value.type.tensor_type.shape.dim if d.HasField("dim_value")]
        if math.prod(sizes) > LARGEST_VALUE:
            raise OnnxRuleError(
                f"its intermediate tensor {value.name!r} has {math.prod(sizes)} elements for one "
                f"item, expected at most {LARGEST_VALUE}"
            )
    return inferred.graph


def _check_node(node: NodeProto, opset: int) -> None:
    """Refuse what onnx's checker accepts, but makes onnxruntime access memory out of bounds."""
    if not onnx.defs.has(node.op_type, opset, ""):
        return  # the checker says so
    formal = onnx.defs.get_schema(node.op_type, opset, "").inputs
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    for place, name in enumerate(node.input):
        optional_input = place < len(formal) and formal[place].option == optional
        # onnxruntime reads a bias that is omitted by an empty name.
        if not name and (not optional_input or node.op_type == "LayerNormalization"):
            raise OnnxRuleError(
                f"it omits input {place} of an operator {node.op_type}, and the operator requires "
                "that input"
            )
    for attribute in node.attribute:
        if attribute.name == "axis" and abs(attribute.i) > _MOST_AXES:
            raise OnnxRuleError(
                f"it has a {node.op_type} along axis {attribute.i}, expected an axis from "
                f"-{_MOST_AXES} to {_MOST_AXES}"
            )
        if attribute.name == "num_outputs" and attribute.i != len(node.output):
            raise OnnxRuleError(
                f"it has a {node.op_type} with num_outputs {attribute.i}, but {len(node.output)} "
                "outputs"
            )


def _check_mode(node: NodeProto) -> None:
    """Refuse training modes: Dropout would be random, BatchNormalization would return
    statistics."""
    if node.op_type == "Dropout" and len([name for name in node.input if name]) > 2:
        raise OnnxRuleError(
            "its Dropout has the input training_mode; export the model for inference"
        )
    training = (a.i for a in node.attribute if a.name == "training_mode")
    if any(training) or (node.op_type == "BatchNormalization" and len(node.output) > 1):
        raise OnnxRuleError(f"it has a {node.op_type} in training mode; export it for inference")


def _check_arithmetic(graph: GraphProto) -> None:
    """Bound what a runtime computes while it loads the graph, and refuse divisions that kill it."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if (
            node.op_type == "Constant"
            and len(node.attribute) == 1
            and node.attribute[0].HasField("t")
        ):
            tensors[node.output[0]] = node.attribute[0].t
    values = {v.name: v.type.tensor_type for v in (*graph.value_info, *graph.input, *graph.output)}
    constant = set(tensors)
    folded = 0
    for node in graph.node:
        if node.op_type in ("Div", "Mod"):
            _check_division(node, tensors, values)
        if not node.input or set(filter(None, node.input)) <= constant:
            constant |= set(node.output)
            folded += sum(_elements(values.get(name)) for name in node.output if name)
    if folded > LARGEST_VALUE:
        raise OnnxRuleError(
            f"it computes {folded} elements from constants, expected at most {LARGEST_VALUE}; "
            "fold the constants at export"
        )


def _elements(kind: TypeProto.Tensor | None) -> int:
    """Return the number of elements of a constant value; an unknown size counts as too many."""
    if kind is None or not kind.HasField("shape"):
        return LARGEST_VALUE + 1
    if not all(d.HasField("dim_value") for d in kind.shape.dim):
        return LARGEST_VALUE + 1
    return math.prod(d.dim_value for d in kind.shape.dim)


def _check_division(
    node: NodeProto, tensors: dict[str, TensorProto], values: dict[str, TypeProto.Tensor]
) -> None:
    """Refuse integer divisions that may end the process (SIGFPE): by 0, or the smallest integer by
    -1."""
    divisor = node.input[1]
    kind = values[divisor].elem_type if divisor in values else None
    if divisor in tensors:
        kind = tensors[divisor].data_type
    if kind in (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16):
        return
    if divisor not in tensors or not (numpy_helper.to_array(tensors[divisor]) > 0).all():
        raise OnnxRuleError(
            f"it has a {node.op_type} of integers by {divisor!r}, which is not known to be above 0"
        )


def _span(numbers: range) -> str:
    return f"{numbers.start} to {numbers.stop - 1}"
