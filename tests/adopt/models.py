"""Small ONNX embedders of texts and of images, with what lies beside such files."""

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(40)), "query:"]


def text_model(
    folder: Path, seed: int, dim: int = 8, *, table: np.ndarray | None = None, **declared: object
) -> Path:
    """`model.onnx`: each token's row of a table (random, if none is given), [n, tokens, dim]; its
    tokenizer beside."""
    folder.mkdir(parents=True, exist_ok=True)
    if table is None:
        table = np.random.default_rng(seed).normal(size=(len(WORDS), dim)).astype(np.float32)
    dim = table.shape[1]
    node = helper.make_node("Gather", ["table", "input_ids"], ["last_hidden_state"])
    ids, mask = (
        helper.make_tensor_value_info(name, TensorProto.INT64, ["n", "t"])
        for name in ("input_ids", "attention_mask")
    )
    used = helper.make_node("Identity", ["attention_mask"], ["mask"])
    outputs = [
        helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["n", "t", dim]),
        helper.make_tensor_value_info("mask", TensorProto.INT64, ["n", "t"]),
    ]
    graph = helper.make_graph(
        [node, used], "text", [ids, mask], outputs, [numpy_helper.from_array(table, "table")]
    )
    _save(graph, folder / "model.onnx")
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    if declared:
        (folder / "model.json").write_text(json.dumps(declared))
    np.save(folder.with_name(f"{folder.name}.table.npy"), table)
    return folder / "model.onnx"


def topical(folder: Path, topics: int, dim: int, *, strength: float, turned: int) -> Path:
    """A model that hears the words w0 to w(topics - 1) as loudly as `strength` says, each in a
    direction of its own, beside all others; in a space that is turned by its seed. Two of them are
    one linear map apart."""
    table = np.random.default_rng(5).normal(size=(len(WORDS), dim)).astype(np.float32)
    first = WORDS.index("w0")
    table[:, :topics] = 0
    table[first : first + topics] = strength * np.eye(topics, dim)
    turn, _ = np.linalg.qr(np.random.default_rng(turned).normal(size=(dim, dim)))
    return text_model(folder, 0, table=(table @ turn).astype(np.float32))


def fix_inputs(
    path: Path,
    *,
    batch: int | None = None,
    tokens: int | None = None,
    type: int = TensorProto.INT64,
) -> None:
    """Fix the sizes and the type of a text model's inputs."""
    model = onnx.load(path)
    for value in model.graph.input:
        value.type.tensor_type.elem_type = type
        for size, axis in zip((batch, tokens), value.type.tensor_type.shape.dim, strict=True):
            if size is not None:
                axis.dim_value = size
    if type != TensorProto.INT64:
        model.graph.output[1].type.tensor_type.elem_type = type
    onnx.save(model, path)


def expected(folder: Path, text: str, pooling: str = "mean", *, unit: bool = True) -> np.ndarray:
    """What the model gives for one text, by hand."""
    table = np.load(folder.with_name(f"{folder.name}.table.npy"))
    known = [WORDS.index(word) if word in WORDS else 1 for word in text.split()]
    rows = table[known]
    vector = rows[0] if pooling == "cls" else rows.mean(0)
    return np.asarray(vector / np.linalg.norm(vector) if unit else vector)


def image_model(path: Path, size: int | str = 4, weight: np.ndarray | None = None) -> Path:
    """float [n, 3, size, size] -> the mean of each channel: [n, 3]; with `weight` [3, 3] that times
    it, of norm 1."""
    mean = "vector" if weight is None else "mean"
    nodes = [helper.make_node("ReduceMean", ["pixels"], [mean], axes=[2, 3], keepdims=0)]
    constants = []
    if weight is not None:
        nodes.append(helper.make_node("MatMul", ["mean", "weight"], ["mapped"]))
        nodes.append(helper.make_node("LpNormalization", ["mapped"], ["vector"], axis=1, p=2))
        constants.append(numpy_helper.from_array(weight.T.astype(np.float32), "weight"))
    pixels = helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["n", 3, size, size])
    vector = helper.make_tensor_value_info("vector", TensorProto.FLOAT, ["n", 3])
    _save(helper.make_graph(nodes, "image", [pixels], [vector], constants), path)
    return path


def _save(graph: onnx.GraphProto, path: Path) -> None:
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)


def texts(count: int, seed: int = 0) -> list[str]:
    """Of a few words each, no two alike."""
    rng = np.random.default_rng(seed)
    made = [" ".join(f"w{n}" for n in rng.choice(40, 6, replace=False)) for _ in range(count)]
    assert len(set(made)) == count
    return made
