"""A map as an ONNX graph, for who has no numpy at hand, and back."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from nobackfill.adopt.maps import Map
from nobackfill.errors import UnfitError
from nobackfill.vectors import check_vectors

_OPSET = 17
# Of `normalised`: a row of zeros stays as it is.
_LEAST_NORM = 1e-12


def graph_of(mapping: Map) -> bytes:
    """`embedding` float32 [n, a] -> `upgraded` float32 [n, b], of norm 1 with `unit`."""
    a, b = mapping.dims
    constants = {"weight": mapping.weight, "bias": mapping.bias}
    mapped = "mapped" if mapping.unit else "upgraded"
    straight = "straight" if mapping.layers else mapped
    nodes = [helper.make_node("Gemm", ["embedding", "weight", "bias"], [straight], transB=1)]
    hidden = "embedding"
    for number, (weight, bias) in enumerate(mapping.layers):
        names = [f"weight_{number}", f"bias_{number}"]
        constants |= dict(zip(names, (weight, bias), strict=True))
        if number:
            nodes.append(helper.make_node("Relu", [hidden], [f"hidden_{number}"]))
            hidden = f"hidden_{number}"
        nodes.append(helper.make_node("Gemm", [hidden, *names], [f"layer_{number}"], transB=1))
        hidden = f"layer_{number}"
    if mapping.layers:
        nodes.append(helper.make_node("Add", [straight, hidden], [mapped]))
    if mapping.unit:
        constants["least"] = np.array(_LEAST_NORM, np.float32)
        nodes += [
            helper.make_node("ReduceL2", ["mapped"], ["length"], axes=[1], keepdims=1),
            helper.make_node("Max", ["length", "least"], ["norm"]),
            helper.make_node("Div", ["mapped", "norm"], ["upgraded"]),
        ]
    graph = helper.make_graph(
        nodes,
        "converter",
        [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["n", a])],
        [helper.make_tensor_value_info("upgraded", TensorProto.FLOAT, ["n", b])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opset = [helper.make_opsetid("", _OPSET)]
    data: bytes = helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString()
    return data


def upgrade_of(mapping: Map) -> bytes:
    """The same with the map's kind and facts beside the graph: for `export.py --upgrade`."""
    model = onnx.load_from_string(graph_of(mapping))
    helper.set_model_props(model, {"kind": mapping.kind, **mapping.facts})
    data: bytes = model.SerializeToString()
    return data


def map_of(data: bytes, kind: str, facts: dict[str, str]) -> Map:
    """The map of such a graph. Raises UnfitError for any other, also one that computes another
    thing than its constants say."""
    try:
        graph = onnx.load_from_string(data).graph
        constants = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
        weight, bias = constants["weight"], constants["bias"]
        checked = check_vectors(weight, weight.shape[1], what="weight")
        shift = check_vectors(bias[None], len(weight), what="bias")[0]
    except Exception as error:
        # What protobuf, onnx and numpy raise at hostile bytes has no common base.
        raise UnfitError(f"expected a linear map as `fit --publish` writes it ({error})") from error
    found = Map(kind, checked, shift, "least" in constants, facts)
    # Compared and not run: a stranger's graph may never end.
    if onnx.load_from_string(graph_of(found)).graph != graph:
        raise UnfitError("expected a graph that gives what its weight and bias say; it does not")
    return found
