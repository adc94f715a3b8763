"""ONNX files that somebody might craft; used by test_onnx_check.py. Each must be refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from tests.support import graphs

Craft = Callable[[onnx.ModelProto], None]


def good() -> onnx.ModelProto:
    """embedding float32 [n,4] -> upgraded float32 [n,3]: passes."""
    nodes = [
        helper.make_node("MatMul", ["embedding", "weights"], ["product"]),
        helper.make_node("Relu", ["product"], ["upgraded"]),
    ]
    weights = np.ones((4, 3), np.float32)
    return graphs.model(
        nodes, [graphs.vector("embedding", 4)], [graphs.vector("upgraded", 3)], {"weights": weights}
    )


def external_data(model: onnx.ModelProto, location: str = "weights.bin") -> None:
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)


def external_data_elsewhere(model: onnx.ModelProto) -> None:
    external_data(model, "../../../etc/passwd")


def external_data_in_an_attribute(model: onnx.ModelProto) -> None:
    tensor = numpy_helper.from_array(np.ones((4, 3), np.float32), "hidden")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights.bin")
    model.graph.node.insert(0, helper.make_node("Constant", [], ["unused"], value=tensor))


def custom_domain(model: onnx.ModelProto) -> None:
    model.graph.node[1].domain = "com.example"
    model.opset_import.append(helper.make_opsetid("com.example", 1))


def microsoft_domain(model: onnx.ModelProto) -> None:
    model.graph.node[1].op_type = "Gelu"
    model.graph.node[1].domain = "com.microsoft"
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def unused_domain(model: onnx.ModelProto) -> None:
    model.opset_import.append(helper.make_opsetid("com.example", 1))


def function(model: onnx.ModelProto) -> None:
    body = [helper.make_node("Identity", ["x"], ["y"])]
    opsets = [helper.make_opsetid("", graphs.OPSET)]
    model.functions.append(helper.make_function("", "Relu", ["x"], ["y"], body, opsets))


def control_flow(model: onnx.ModelProto) -> None:
    out = helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)
    branch = helper.make_graph(
        [helper.make_node("Identity", ["product"], ["inner"])], "branch", [], [out]
    )
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    model.graph.node[1].CopyFrom(
        helper.make_node("If", ["yes"], ["upgraded"], then_branch=branch, else_branch=branch)
    )


def subgraph_on_a_harmless_operator(model: onnx.ModelProto) -> None:
    attribute = AttributeProto(name="body", type=AttributeProto.GRAPH)
    attribute.g.CopyFrom(model.graph)
    model.graph.node[1].attribute.append(attribute)


def hidden_subgraph(model: onnx.ModelProto) -> None:
    attribute = AttributeProto(name="alpha", type=AttributeProto.FLOAT, f=1.0)
    attribute.g.name = "hidden"
    model.graph.node[1].attribute.append(attribute)


def randomness(model: onnx.ModelProto) -> None:
    model.graph.node[1].CopyFrom(helper.make_node("RandomNormalLike", ["product"], ["upgraded"]))


def strings(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(
        numpy_helper.from_array(np.array(["some text"], dtype=object), "text")
    )


def other_input(model: onnx.ModelProto) -> None:
    model.graph.input[0].name = "vector"
    model.graph.node[0].input[0] = "vector"


def further_output(model: onnx.ModelProto) -> None:
    model.graph.output.append(graphs.vector("product", 3))


def other_type(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.DOUBLE
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.DOUBLE
    weights = numpy_helper.from_array(np.ones((4, 3)), "weights")
    model.graph.initializer[0].CopyFrom(weights)


def other_dimension(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 4
    model.graph.initializer[0].CopyFrom(
        numpy_helper.from_array(np.ones((4, 4), np.float32), "weights")
    )


def fixed_batch(model: onnx.ModelProto) -> None:
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value = 1


def input_with_a_default(model: onnx.ModelProto) -> None:
    default = numpy_helper.from_array(np.ones((1, 4), np.float32), "embedding")
    model.graph.initializer.append(default)


def old_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 7


def future_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 999


def future_format(model: onnx.ModelProto) -> None:
    model.ir_version = 99


def huge_tensor(model: onnx.ModelProto) -> None:
    tensor = model.graph.initializer.add(name="huge", data_type=TensorProto.FLOAT)
    tensor.dims.extend([2**40, 2**20])


def many_large_tensors(model: onnx.ModelProto) -> None:
    for number in range(200):
        tensor = model.graph.initializer.add(name=f"t{number}", data_type=TensorProto.FLOAT)
        tensor.dims.extend([2**20])


def negative_dimension(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].dims[0] = -4


def too_few_bytes(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].raw_data = b"\0" * 4


def sparse_tensor(model: onnx.ModelProto) -> None:
    sparse = model.graph.sparse_initializer.add()
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(1, np.float32), "sparse"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.zeros(1, np.int64)))
    sparse.dims.append(2**40)


def training(model: onnx.ModelProto) -> None:
    model.training_info.add().algorithm.name = "algorithm"


def huge_value(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(
        numpy_helper.from_array(np.array([2**20, 2**20], np.int64), "shape")
    )
    model.graph.node.append(helper.make_node("ConstantOfShape", ["shape"], ["unused"]))


def folded_bomb(model: onnx.ModelProto) -> None:
    """Many constants, each of a size that is allowed."""
    shape = numpy_helper.from_array(np.array([2**13, 2**12], np.int64), "shape")
    model.graph.initializer.append(shape)
    for number in range(4):
        node = helper.make_node("ConstantOfShape", ["shape"], [f"unused{number}"])
        model.graph.node.append(node)


def smallest_by_minus_one(model: onnx.ModelProto) -> None:
    """What a runtime folds when it loads the graph: SIGFPE."""
    for name, value in (("smallest", -(2**31)), ("minus_one", -1)):
        model.graph.initializer.append(numpy_helper.from_array(np.array([value], np.int32), name))
    model.graph.node.append(helper.make_node("Div", ["smallest", "minus_one"], ["unused"]))


def division_by_what_comes(model: onnx.ModelProto) -> None:
    seven = numpy_helper.from_array(np.array([7], np.int32), "seven")
    model.graph.initializer.append(seven)
    model.graph.node.append(helper.make_node("Cast", ["product"], ["whole"], to=TensorProto.INT32))
    model.graph.node.append(helper.make_node("Mod", ["seven", "whole"], ["unused"]))


def dropout_in_training(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.array(0.5, np.float32), "ratio"))
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "training"))
    model.graph.node.append(
        helper.make_node("Dropout", ["product", "ratio", "training"], ["unused"])
    )


def batch_norm_in_training(model: onnx.ModelProto) -> None:
    for name in ("scale", "bias", "mean", "variance"):
        model.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), name))
    ins, outs = ["product", "scale", "bias", "mean", "variance"], ["unused", "means", "variances"]
    model.graph.node.append(helper.make_node("BatchNormalization", ins, outs, training_mode=1))


def missing_input(model: onnx.ModelProto) -> None:
    """Of a Mean of several: the runtime reads where it stands, and dies."""
    model.graph.node.append(helper.make_node("Mean", ["product", ""], ["unused"]))


def missing_bias(model: onnx.ModelProto) -> None:
    node = helper.make_node("LayerNormalization", ["product", "product", ""], ["unused"])
    model.graph.node.append(node)


def axis_nowhere(model: onnx.ModelProto) -> None:
    node = helper.make_node("LayerNormalization", ["product", "product"], ["unused"], axis=2**62)
    model.graph.node.append(node)


def split_into_more(model: onnx.ModelProto) -> None:
    node = helper.make_node("Split", ["product"], ["first", "second"], num_outputs=1, axis=1)
    model.graph.node.append(node)


def cycle(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "upgraded"


def missing_value(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "nowhere"


CRAFTED: list[Craft] = [
    external_data, external_data_elsewhere, external_data_in_an_attribute, custom_domain,
    microsoft_domain, unused_domain, function, control_flow, subgraph_on_a_harmless_operator,
    hidden_subgraph, randomness, strings, other_input, further_output, other_type,
    other_dimension, fixed_batch, input_with_a_default, old_opset, future_opset, future_format,
    huge_tensor, many_large_tensors, negative_dimension, too_few_bytes, sparse_tensor, training,
    huge_value, folded_bomb, smallest_by_minus_one, division_by_what_comes, dropout_in_training,
    batch_norm_in_training, missing_input, missing_bias,
    axis_nowhere, split_into_more, cycle, missing_value,
]  # fmt: skip


def write_all(folder: Path) -> dict[str, Path]:
    """Each crafted file by the name of what is wrong with it."""
    paths = {}
    for craft in CRAFTED:
        model = good()
        craft(model)
        paths[craft.__name__] = graphs.save(model, folder / craft.__name__ / "model.onnx")
    return paths
