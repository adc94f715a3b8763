"""ONNX graphs by chance: allowed operators with any inputs, attributes, constants and shapes.

A third or so pass the rules; what they then do to whoever loads and runs them is the question.
"""

import random
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import AttributeProto, TensorProto, defs, helper, numpy_helper
from onnx.defs import OpSchema

from nobackfill.release.onnx_rules import ALLOWED_OPERATORS
from tests.support import graphs

DIM = 16
_NAMES = sorted(ALLOWED_OPERATORS)
_OPSETS = (17, 18, 20, 21)
_TYPES = {
    TensorProto.FLOAT: "tensor(float)", TensorProto.DOUBLE: "tensor(double)",
    TensorProto.FLOAT16: "tensor(float16)", TensorProto.INT8: "tensor(int8)",
    TensorProto.UINT8: "tensor(uint8)", TensorProto.INT32: "tensor(int32)",
    TensorProto.INT64: "tensor(int64)", TensorProto.BOOL: "tensor(bool)",
}  # fmt: skip
_NUMBERS = {name: number for number, name in _TYPES.items()}
_SHAPES = (
    (), (1,), (2,), (DIM,), (0,), (1, DIM), (DIM, DIM), (DIM, 3), (1, 1, 4, 4), (2, 2, 3, 3),
    (3,), (4,), (1, 2, 8), (1, 0), (5, 1, 1),
)  # fmt: skip
_WHOLE = (0, 1, -1, 2, 3, 4, -2, 7, 16, 31, -(2**31), 2**31 - 1, -(2**63), 2**63 - 1, 2**20, 2**16)
_REAL = (0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"))
_WORDS = (
    "constant", "edge", "reflect", "wrap", "linear", "nearest", "cubic", "add", "mul", "max",
    "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER", "DCR", "CRD", "none", "tanh", "half_pixel",
    "align_corners", "asymmetric", "tf_crop_and_resize", "ij,jk->ik", "i...->...", "ii->i", "",
)  # fmt: skip

# Name and element type of a value.
Value = tuple[str, int]


def fuzzed(seed: int) -> onnx.ModelProto:
    """embedding float32 [n,16] -> upgraded float32 [n,16], by way of one to six nodes of chance."""
    return _Graph(random.Random(seed)).made()


class _Graph:
    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._opset = chance.choice(_OPSETS)
        self._nodes: list[onnx.NodeProto] = []
        self._tensors: list[TensorProto] = []
        self._values: list[Value] = [("embedding", TensorProto.FLOAT)]

    def made(self) -> onnx.ModelProto:
        for _ in range(self._chance.choice((1, 1, 1, 2, 3, 6))):
            self._grow()
        last = self._nodes[-1].output[0] if self._nodes else "embedding"
        self._nodes += [
            helper.make_node("Cast", [last], ["number"], to=TensorProto.FLOAT),
            helper.make_node("ReduceSum", ["number"], ["sum"], keepdims=0),
            helper.make_node("Add", ["embedding", "sum"], ["upgraded"]),
        ]
        ends = [graphs.vector("embedding", DIM)], [graphs.vector("upgraded", DIM)]
        graph = helper.make_graph(self._nodes, "fuzzed", *ends, self._tensors)
        opset = helper.make_opsetid("", self._opset)
        return helper.make_model(graph, opset_imports=[opset], ir_version=graphs.IR_VERSION)

    def _grow(self) -> None:
        name = self._chance.choice(_NAMES)
        if not defs.has(name, self._opset, ""):
            return
        schema = defs.get_schema(name, self._opset, "")
        bound: dict[str, int] = {}
        inputs = [self._input(schema, place, bound) for place in range(self._arity(schema))]
        outputs = []
        for number in range(self._chance.randint(schema.min_output, min(3, schema.max_output))):
            made = f"v{len(self._values)}_{number}"
            declared = schema.outputs[min(number, len(schema.outputs) - 1)].type_str
            outputs.append((made, bound.get(declared, _NUMBERS.get(declared, TensorProto.FLOAT))))
        if not outputs:
            return
        node = helper.make_node(name, inputs, [made for made, _ in outputs])
        for attribute in schema.attributes.values():
            if attribute.required or self._chance.random() < 0.3:
                value = self._attribute(attribute)
                if value is not None:
                    node.attribute.append(value)
        self._nodes.append(node)
        self._values += outputs

    def _arity(self, schema: OpSchema) -> int:
        return self._chance.randint(schema.min_input, min(schema.max_input, schema.min_input + 3))

    def _input(self, schema: OpSchema, place: int, bound: dict[str, int]) -> str:
        if place >= schema.min_input and self._chance.random() < 0.2:
            return ""
        declared = schema.inputs[min(place, len(schema.inputs) - 1)].type_str
        allowed = next(
            (c.allowed_type_strs for c in schema.type_constraints if c.type_param_str == declared),
            [declared],
        )
        fitting = [_NUMBERS[kind] for kind in allowed if kind in _NUMBERS] or [TensorProto.FLOAT]
        wanted = bound.get(declared, self._chance.choice(fitting))
        held = [v for v in self._values if v[1] == wanted]
        if not held and declared not in bound:
            held = [v for v in self._values if v[1] in fitting]
        if held and self._chance.random() < 0.6:
            name, kind = self._chance.choice(held[-3:])
        else:
            name, kind = self._constant(wanted), wanted
        bound.setdefault(declared, kind)
        return name

    def _constant(self, kind: int) -> str:
        name = f"c{len(self._tensors)}"
        tensor = numpy_helper.from_array(self._array(kind), name)
        self._tensors.append(tensor)
        return name

    def _array(self, kind: int) -> NDArray[Any]:
        dtype = helper.tensor_dtype_to_np_dtype(kind)
        shape = self._chance.choice(_SHAPES)
        count = int(np.prod(shape))
        if dtype.kind == "f":
            pool = _REAL if self._chance.random() < 0.3 else (0.5, 1.0, -1.0, 2.0)
            values = [self._chance.choice(pool) for _ in range(count)]
            with np.errstate(over="ignore"):
                return np.array(values, np.float64).astype(dtype).reshape(shape)
        small = (0, 1, 2, 3, -1) if dtype.kind == "i" else (0, 1, 2, 3)
        whole = _WHOLE if self._chance.random() < 0.4 else small
        numbers = [self._chance.choice(whole) for _ in range(count)]
        # Wraps around: the smallest and the largest number of a type are what is wanted.
        return np.array(numbers, np.int64).astype(dtype).reshape(shape)

    def _attribute(self, attribute: OpSchema.Attribute) -> AttributeProto | None:
        chance = self._chance
        whole = _WHOLE if chance.random() < 0.4 else (0, 1, 2, 3, -1)
        kinds = OpSchema.AttrType
        match attribute.type:
            case kinds.INT if attribute.name in ("to", "dtype"):
                value: Any = chance.choice(list(_TYPES))
            case kinds.INT:
                value = chance.choice(whole)
            case kinds.INTS:
                value = [chance.choice(whole) for _ in range(chance.choice((1, 2, 2, 4)))]
            case kinds.FLOAT:
                value = chance.choice(_REAL)
            case kinds.FLOATS:
                value = [chance.choice(_REAL) for _ in range(chance.choice((1, 2)))]
            case kinds.STRING:
                value = chance.choice(_WORDS)
            case kinds.TENSOR:
                value = numpy_helper.from_array(self._array(chance.choice(list(_TYPES))))
            case _:
                return None
        return helper.make_attribute(attribute.name, value)
