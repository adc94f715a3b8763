"""Add a text model of others, as ONNX or as sentence-transformers saved it, to a release.

Its weights stay unchanged. Pooling of token vectors and normalisation are appended inside the
graph, so that gateway, device and Triton run the same file and get vectors of the space.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, compose, helper, numpy_helper, shape_inference, version_converter

from nobackfill.digests import sha256_bytes
from nobackfill.errors import InvalidInputError, NotFoundError, VerificationError, join_few
from nobackfill.release.manifest import (
    LARGEST_LENGTH,
    TEXT_ROLES,
    PublishedEmbedder,
    TextEncoder,
    TextRole,
    query_encoder_path,
    text_encoder_path,
    tokenizer_path,
)
from nobackfill.release.onnx_rules import LARGEST_FILE
from nobackfill.release.publishing.declaration import (
    Declaration,
    describe_assumptions,
    find_tokenizer_file,
    fingerprint_model,
    hash_model_files,
    list_weight_files,
    read_text_declaration,
    read_tokenizer,
)
from nobackfill.release.publishing.sentence_head import LAYER_NORM_EPSILON, Layer, PoolingMode
from nobackfill.release.publishing.sentence_modules import MODULES
from nobackfill.release.publishing.text_folder import (
    RoleFiles,
    TextFolder,
    is_model2vec,
    read_embedding_table,
)
from nobackfill.terminal import escape_control
from nobackfill.text import BatchTokenizer
from nobackfill.training.export.drafting import ReleaseDraft
from nobackfill.training.export.external import TEXT_MODEL
from nobackfill.training.export.onnx_export import run_onnx, strip_model
from nobackfill.training.export.probes import PROBE_TEXTS
from nobackfill.vectors import Vectors

TOKENS = ("input_ids", "attention_mask", "token_type_ids")
# The appended operators need at least this operator set.
_OPSET = 17
_IR = 8
_THEIRS = "model/"
# The operator set since which ReduceMax takes its axes as an input.
_AXES_AS_INPUT = 18
# The operator of each activation of a Dense module; SiLU takes two.
_ACTIVATIONS = {"Identity": "Identity", "Tanh": "Tanh", "ReLU": "Relu", "Sigmoid": "Sigmoid"}


def text_graph(model: onnx.ModelProto, declared: Declaration) -> tuple[str, ...]:
    """Give a text model inputs of TOKENS, int64 [n,t], and append pooling and normalisation.

    Modules that are declared behind the pooling are appended as well. An older operator set is
    raised to 17. With pooling other than cls an `attention_mask` is added as input if the model has
    none. After an error the model may be changed in part.

    Args:
        model: the ONNX model; it is changed. Its last value is named `embedding`, and it has no
            declared output afterwards (see `declare_output`).
        declared: how its token vectors are pooled and normalised, and which output to use.

    Returns:
        The names of its inputs, of TOKENS.

    Raises:
        InvalidInputError: it uses other operators than ONNX's, inputs other than TOKENS, or no
            input_ids; or fixed numbers of texts or tokens; or it has no output, or not the declared
            one, or one that cannot be pooled; or the weights of a declared module cannot be read.
        RuntimeError, ConvertError: onnx cannot convert the operator set.
    """
    _renew(model)
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in weights]
    names = [value.name for value in inputs]
    if "input_ids" not in names or set(names) - set(TOKENS):
        raise InvalidInputError(
            f"expected a text model with input_ids and no inputs other than {', '.join(TOKENS)}, "
            f"got {join_few(names) or 'none'}; export it again with these inputs"
        )
    del graph.input[:]
    for value in inputs:
        _free(value)
    if set(declared.pooling_modes) - {"cls"} and "attention_mask" not in names:
        inputs.append(_tokens("attention_mask"))
    graph.input.extend(inputs)
    # The prefix avoids names that this module adds.
    compose.add_prefix_graph(graph, _THEIRS, rename_inputs=False, inplace=True)
    pooled = _pooled(model, declared)
    for number, layer in enumerate(declared.layers):
        pooled = _append_layer(graph, layer, pooled, f"layer_{number}")
    if declared.normalise:
        graph.node.append(helper.make_node("LpNormalization", [pooled], ["embedding"], axis=1, p=2))
    else:
        graph.node.append(helper.make_node("Identity", [pooled], ["embedding"]))
    del graph.output[:]
    return tuple(value.name for value in inputs)


def declare_output(model: onnx.ModelProto, dim: int | None) -> None:
    """Replace the outputs of a graph by one, `embedding` float32 [n, dim].

    The value `embedding` itself is not added.

    Args:
        model: the ONNX model; it is changed.
        dim: the dimension; None if it is unknown.
    """
    del model.graph.output[:]
    value = helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["n", dim])
    model.graph.output.append(value)


def _renew(model: onnx.ModelProto) -> None:
    versions = {opset.domain or "ai.onnx": opset.version for opset in model.opset_import}
    if set(versions) != {"ai.onnx"}:
        raise InvalidInputError(
            "expected a model with only ONNX's own operators, got the operator sets "
            f"{join_few(sorted(versions)) or 'none'}; export it again in float32, without a "
            "vendor's optimisations"
        )
    if versions["ai.onnx"] < _OPSET:
        model.CopyFrom(version_converter.convert_version(model, _OPSET))
    model.ir_version = max(model.ir_version, _IR)


def _free(value: onnx.ValueInfoProto) -> None:
    """Make the number and length of texts free."""
    kind = value.type.tensor_type
    sizes = [size.dim_value for size in kind.shape.dim]
    if kind.elem_type != TensorProto.INT64 or sizes != [0, 0]:
        raise InvalidInputError(
            f"input {value.name}: expected int64 [n, t] with a free number of texts n and of "
            f"tokens t, got {TensorProto.DataType.Name(kind.elem_type).lower()} {sizes} (0 is a "
            "free size); export the model again with dynamic axes"
        )
    value.CopyFrom(_tokens(value.name))


def _tokens(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.INT64, ["n", "t"])


def _pooled(model: onnx.ModelProto, declared: Declaration) -> str:
    """Append pooling; return the name of a value float32 [n,dim]."""
    graph = model.graph
    outputs = [value.name.removeprefix(_THEIRS) for value in graph.output]
    if not outputs:
        raise InvalidInputError(
            "expected a text model with an output, got none; export it again with its embedding "
            "as output"
        )
    output_name = declared.output or outputs[0]
    if output_name not in outputs:
        raise InvalidInputError(
            f"the model's declaration names the output {output_name!r}, but the model has only the "
            f'outputs {join_few(outputs)}; correct "output" in the JSON file next to the model'
        )
    axes = _axes(model, _THEIRS + output_name)
    graph.node.append(
        helper.make_node("Cast", [_THEIRS + output_name], ["tokens_float"], to=TensorProto.FLOAT)
    )
    if axes == 2:
        return "tokens_float"
    modes = declared.pooling_modes
    if axes != 3 or not modes:
        raise InvalidInputError(
            f"output {output_name!r}: expected [n, dim], or [n, tokens, dim] with a pooling such "
            f"as mean or cls, got {axes} axes with pooling {declared.pooling}; name another "
            "output as "
            '"output" in the JSON file next to the model'
        )
    if len(modes) == 1:
        _append_pooling(model, modes[0], "", "pooled")
        return "pooled"
    parts = [f"pooled_{mode}" for mode in modes]
    for mode, part in zip(modes, parts, strict=True):
        _append_pooling(model, mode, f"{mode}_", part)
    graph.node.append(helper.make_node("Concat", parts, ["pooled"], axis=1))
    return "pooled"


def _append_pooling(model: onnx.ModelProto, mode: PoolingMode, prefix: str, target: str) -> None:
    """Append a mode of pooling of `tokens_float` float32 [n, t, dim], as value `target` [n, dim].

    The padding comes last. New names begin with `prefix`.
    """
    graph = model.graph

    def step(operator: str, sources: Sequence[str], name: str, **options: Any) -> str:
        graph.node.append(helper.make_node(operator, list(sources), [name], **options))
        return name

    if mode == "cls":
        _add(graph, f"{prefix}first_token", 0)
        step("Gather", ["tokens_float", f"{prefix}first_token"], target, axis=1)
        return
    last_axis, token_axis = f"{prefix}last_axis", f"{prefix}token_axis"
    _add(graph, last_axis, [2])
    _add(graph, token_axis, [1])
    if mode == "max":
        step("Cast", ["attention_mask"], f"{prefix}mask_flags", to=TensorProto.BOOL)
        step("Unsqueeze", [f"{prefix}mask_flags", last_axis], f"{prefix}mask")
        least = numpy_helper.from_array(np.array([np.finfo(np.float32).min]), f"{prefix}least")
        graph.initializer.append(least)
        masked = step("Where", [f"{prefix}mask", "tokens_float", least.name], f"{prefix}masked")
        if next(one.version for one in model.opset_import) < _AXES_AS_INPUT:
            step("ReduceMax", [masked], target, axes=[1], keepdims=0)
        else:
            step("ReduceMax", [masked, token_axis], target, keepdims=0)
        return
    graph.initializer.append(numpy_helper.from_array(np.ones(1, np.float32), f"{prefix}one_token"))
    shares = step("Cast", ["attention_mask"], f"{prefix}mask_float", to=TensorProto.FLOAT)
    if mode in ("weightedmean", "lasttoken"):
        place = step("CumSum", [shares, token_axis], f"{prefix}place")
        if mode == "lasttoken":
            count = step("ReduceSum", [shares, token_axis], f"{prefix}count", keepdims=1)
            is_last = step("Equal", [place, count], f"{prefix}is_last")
            place = step("Cast", [is_last], f"{prefix}last", to=TensorProto.FLOAT)
        shares = step("Mul", [shares, place], f"{prefix}shares")
    weights = step("Unsqueeze", [shares, last_axis], f"{prefix}mask_weights")
    step("Mul", ["tokens_float", weights], f"{prefix}tokens_weighed")
    total = step(
        "ReduceSum", [f"{prefix}tokens_weighed", token_axis], f"{prefix}tokens_sum", keepdims=0
    )
    count = step("ReduceSum", [weights, token_axis], f"{prefix}tokens_count", keepdims=0)
    count = step("Max", [count, f"{prefix}one_token"], f"{prefix}tokens_at_least_one")
    if mode == "mean_sqrt_len_tokens":
        count = step("Sqrt", [count], f"{prefix}root")
    step("Div", [total, count], target)


def _append_layer(graph: onnx.GraphProto, layer: Layer, value: str, name: str) -> str:
    """Append a module behind the pooling; return the name of its output float32 [n, dim].

    It computes what `Layer.open` computes. New names begin with `name`.
    """
    weights = layer.weights()

    def constant(tensor: str, array: Vectors) -> str:
        own = f"{name}/{tensor}"
        graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array), own))
        return own

    def step(operator: str, *sources: str, **options: Any) -> str:
        target = f"{name}/{operator}_{len(graph.node)}"
        graph.node.append(helper.make_node(operator, list(sources), [target], **options))
        return target

    if layer.kind == "Normalize":
        return step("LpNormalization", value, axis=1, p=2)
    if layer.kind == "LayerNorm":
        scaled = constant("scale", weights["norm.weight"]), constant("bias", weights["norm.bias"])
        return step("LayerNormalization", value, *scaled, axis=-1, epsilon=LAYER_NORM_EPSILON)
    result = step("MatMul", value, constant("weight", weights["linear.weight"].T))
    if "linear.bias" in weights:
        result = step("Add", result, constant("bias", weights["linear.bias"]))
    if layer.activation == "SiLU":
        result = step("Mul", result, step("Sigmoid", result))
    else:
        result = step(_ACTIVATIONS[layer.activation], result)
    if layer.residual:
        if (straight := weights.get("residual.weight")) is not None:
            value = step("MatMul", value, constant("residual", straight.T))
        result = step("Add", result, value)
    return result


def _axes(model: onnx.ModelProto, output_name: str) -> int:
    """Return the number of axes of an output, as declared or as inferred from the graph."""
    for graph in (model.graph, shape_inference.infer_shapes(model).graph):
        value = next(value for value in graph.output if value.name == output_name)
        if axes := len(value.type.tensor_type.shape.dim):
            return axes
    raise InvalidInputError(
        f"the number of axes of the output {output_name!r} is unknown; export the model again with "
        "shapes of its outputs"
    )


def _add(graph: onnx.GraphProto, name: str, value: int | Sequence[int]) -> None:
    graph.initializer.append(numpy_helper.from_array(np.array(value, np.int64), name))


_MODEL = "model.onnx"


def add_text_encoder(release: ReleaseDraft, source: Path, query_source: Path | None = None) -> None:
    """Add a text model of others to the release, with its tokenizer.

    A folder without an ONNX file is exported at first, by torch, which takes seconds to minutes.

    With an embedder of images it must share that embedder's space; alone it makes the release's
    space. It is run once on probe texts. A line on stderr says what was guessed if the model has no
    declaration. Publishing checks which operators the graph uses. The recipe gets the digests of
    the weights and the model's fingerprint. Files are written to the release's folder. After an
    error files may stay there.

    Args:
        release: the release in preparation.
        source: an ONNX file, or a folder with one, with `tokenizer.json` and its declaration
            (`NAME.json`, or the files that sentence-transformers exports); or a folder that
            sentence-transformers saved.
        query_source: another such model for queries, with the same tokenizer; None: none. It takes
            the route of queries if it has a Router.

    Raises:
        NotFoundError: there is no ONNX file and no folder of sentence-transformers.
        InvalidInputError: a model cannot be read, exported or run, has another form, or takes
            longer texts than a release may; it lacks its tokenizer; or it does not fit the embedder
            or the other text model.
        ConfigurationError: the extra `text` is not installed, or a package for the export.
        BusyError: another process exports the folder for longer than an hour.
        CannotWriteError: the exported ONNX file cannot be written.
        ValidationError: a prefix has more than 1,024 characters, or the vectors have more than
            65,536 dimensions; it is pydantic's.
        ConvertError: onnx cannot convert an old operator set to this one; it is onnx's.
        OSError: a file cannot be written.
    """
    model = _put(release, source, "--text-encoder", text_encoder_path(release.number), "document")
    if model.reading.routed and query_source is None:
        raise InvalidInputError(
            f"--text-encoder {source}: the model's Router takes queries another way than "
            "documents, and a release has one graph for each; for the graph of queries, also give "
            f"--query-encoder {source}"
        )
    _share(release, model.vectors, model.reading.source)
    declared = model.reading.declared
    pooling = declared.pooling if declared.pooling in ("mean", "cls") else "none"
    entry: dict[str, object] = {
        "file": release.published_file(text_encoder_path(release.number)),
        "inputs": model.inputs,
        "length": declared.max_length,
        "query_prefix": declared.prefix_of_queries,
        "document_prefix": declared.prefix,
        "pooling": pooling,
    }
    if query_source is not None:
        place = query_encoder_path(release.number)
        query_model = _put(release, query_source, "--query-encoder", place, "query")
        _check_query_model(query_model, model)
        entry["query_file"] = release.published_file(query_encoder_path(release.number))
        entry["query_prefix"] = query_model.reading.declared.prefix_of_queries
        release.recipe["query_encoder_sha256"] = hash_model_files(query_model.reading.weights)
    release.add_file(tokenizer_path(release.number)).write_bytes(model.reading.tokenizer)
    entry["tokenizer"] = release.published_file(tokenizer_path(release.number))
    release.text_encoder = TextEncoder.model_validate(entry)
    release.recipe["text_encoder_sha256"] = hash_model_files(model.reading.weights)
    release.recipe[TEXT_MODEL] = model.reading.fingerprint


class _Reading(NamedTuple):
    """A model of others, and how texts of a role become its vectors.

    Attributes:
        source: the ONNX file or the folder that names it in messages.
        graph: its graph, up to the vectors of tokens or of texts.
        weights: the files whose digest the recipe records.
        declared: what the graph does not contain.
        tokenizer: the tokenizer.json of the release.
        fingerprint: the name of the model, as `nobackfill embed` records it.
        routed: whether queries take another route than documents.
    """

    source: Path
    graph: onnx.ModelProto
    weights: list[Path]
    declared: Declaration
    tokenizer: bytes
    fingerprint: str
    routed: bool


class _ForeignModel(NamedTuple):
    """A foreign model as the release's graph, and its vectors of the probes."""

    reading: _Reading
    inputs: tuple[str, ...]
    vectors: Vectors


def _put(
    release: ReleaseDraft, source: Path, option: str, published: str, role: TextRole
) -> _ForeignModel:
    path = release.add_file(published)
    file = _onnx_file(source, option)
    name = f"{option} {file or source}"
    try:
        reading = _read_file(file, role) if file else _read_folder(source, path, role)
        inputs = _write(reading.graph, reading.declared, path)
        tokenizer = BatchTokenizer(reading.tokenizer, reading.declared.max_length, str(source))
        texts = [reading.declared.prefix + text for text in PROBE_TEXTS]
        vectors = _embed(path, inputs, tokenizer, texts)
        declare_output(reading.graph, vectors.shape[1])
        onnx.save(reading.graph, path)
    except (OSError, DecodeError, onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        raise InvalidInputError(
            f"{name}: cannot be read as an ONNX model ({error}); export the model again"
        ) from error
    except (InvalidInputError, VerificationError) as error:
        raise InvalidInputError(f"{name}: {error}") from error
    if file and (assumption := describe_assumptions(file, reading.declared)):
        print(escape_control(assumption), file=sys.stderr)
    return _ForeignModel(reading, inputs, vectors)


def _onnx_file(source: Path, option: str) -> Path | None:
    """Return the ONNX file: given itself, or in a folder as exporters lay it out.

    None for a folder of sentence-transformers that is read without one."""
    if source.is_dir() and (source / MODULES).is_file() and not is_model2vec(source):
        return TextFolder(source).shipped_onnx_file
    places = [source, source / _MODEL, source / "onnx" / _MODEL]
    file = next((place for place in places if place.is_file()), None)
    if file is not None:
        return file
    if source.is_dir() and is_model2vec(source):
        raise InvalidInputError(
            f"{option} {source}: expected a model that a release can hold, found one of model2vec, "
            "which leaves out unknown tokens and cuts long texts by a rule of its own; save it as "
            f"one of sentence-transformers (SentenceTransformer({str(source)!r})"
            ".save_pretrained(FOLDER)), and embed the texts of your pairs with that folder, too"
        )
    raise NotFoundError(
        f"{option} {source}: expected an ONNX file, or a folder with {_MODEL} or onnx/{_MODEL} in "
        "it, or one that sentence-transformers saved, but there is none; save the model there with "
        "SentenceTransformer(NAME).save_pretrained(FOLDER)"
    )


def _read_file(file: Path, role: TextRole) -> _Reading:
    weights, graph = list_weight_files(file), onnx.load(file)
    outputs = [output.name for output in graph.graph.output]
    declared = read_text_declaration(file, outputs, role)
    _check_length(declared, f"max_length in {file.with_suffix('.json').name}")
    routed = any(read_text_declaration(file, outputs, one) != declared for one in TEXT_ROLES)
    tokenizer = find_tokenizer_file(file, declared)
    fingerprint = fingerprint_model(weights, declared, tokenizer)
    data = read_tokenizer(tokenizer, declared)
    return _Reading(file, graph, weights, declared, data, fingerprint, routed)


def _read_folder(source: Path, path: Path, role: TextRole) -> _Reading:
    """Read a folder of sentence-transformers without an ONNX file; `path` is overwritten."""
    folder = TextFolder(source)
    files, own = folder.files_by_role, folder.files_by_role[role]
    declared, tokenizer = own.declaration, own.tokenizer
    size = sum(one.stat().st_size for one in own.weights)
    if size > LARGEST_FILE:
        raise InvalidInputError(
            f"has weights of {size >> 20} MiB, and a release holds an ONNX file of at most "
            f"{LARGEST_FILE >> 20} MiB; publish a smaller model, or move a store of your own to "
            "this one with `nobackfill migrate`"
        )
    if folder.is_static(role):
        graph = _static_graph(read_embedding_table(own.weights[0]))
        data, length = _static_tokenizer(tokenizer, source)
        declared = declared.model_copy(update={"pooling": "mean", "max_length": length})
    else:
        _check_length(declared, "max_seq_length in sentence_bert_config.json")
        graph = onnx.load(folder.onnx_file(role, lambda *graph: _open_export(files, path, *graph)))
        data = read_tokenizer(tokenizer, declared)
    fingerprint = fingerprint_model(own.weights, own.declaration, tokenizer)
    routed = files["query"] != files["document"]
    return _Reading(source, graph, list(own.weights), declared, data, fingerprint, routed)


def _check_length(declared: Declaration, setting: str) -> None:
    if declared.max_length > LARGEST_LENGTH:
        raise InvalidInputError(
            f"expected a model of texts of at most {LARGEST_LENGTH} tokens, but the model is "
            f"declared for {declared.max_length} tokens; set a smaller {setting}"
        )


def _open_export(
    files: RoleFiles, path: Path, graph: Path, role: TextRole
) -> Callable[[list[str]], Vectors]:
    """Write the release's graph of an exported ONNX file to `path`; return what embeds by it."""
    declared, file = files[role].declaration, files[role].tokenizer
    prefix = declared.prefix_of_queries if role == "query" else declared.prefix
    inputs = _write(onnx.load(graph), declared, path)
    tokenizer = BatchTokenizer(read_tokenizer(file, declared), declared.max_length, str(file))
    return lambda texts: _embed(path, inputs, tokenizer, [prefix + text for text in texts])


def _static_graph(table: Vectors) -> onnx.ModelProto:
    """Return a graph from tokens to their rows of a table, which stands for a Transformer."""
    ids, mask = (_tokens(name) for name in TOKENS[:2])
    output = helper.make_tensor_value_info(
        "token_embeddings", TensorProto.FLOAT, ["n", "t", table.shape[1]]
    )
    node = helper.make_node("Gather", ["table", "input_ids"], ["token_embeddings"])
    weights = [numpy_helper.from_array(table, "table")]
    graph = helper.make_graph([node], "graph", [ids, mask], [output], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR)


def _static_tokenizer(file: Path, source: Path) -> tuple[bytes, int]:
    """Return a tokenizer.json without special tokens, and its largest number of tokens.

    A line on stderr says that texts are truncated where the library reads them whole.
    """
    tokenizer = json.loads(file.read_bytes())
    truncation = tokenizer.get("truncation") or {}
    if truncation.get("direction", "Right") != "Right":
        raise InvalidInputError(
            f"{file}: expected a tokenizer that cuts the end of long texts, found the direction "
            f"{truncation['direction']}; save the model with truncation at the right"
        )
    if not truncation:
        print(
            escape_control(
                f"{source}: the release reads the first {LARGEST_LENGTH} tokens of a text, where "
                "sentence-transformers reads all"
            ),
            file=sys.stderr,
        )
    data = json.dumps(tokenizer | {"post_processor": None, "padding": None}, ensure_ascii=False)
    return data.encode(), int(truncation.get("max_length", LARGEST_LENGTH))


def _write(model: onnx.ModelProto, declared: Declaration, path: Path) -> tuple[str, ...]:
    """Write the release's graph, without the dimension of its output; return its inputs."""
    inputs = text_graph(model, declared)
    strip_model(model)
    # The dimension is known only after a run, and a run needs a declared output.
    declare_output(model, None)
    onnx.save(model, path)
    return inputs


def _embed(
    path: Path, inputs: Sequence[str], tokenizer: BatchTokenizer, texts: list[str]
) -> Vectors:
    tokens = tokenizer.tokenize(texts)
    (embedding,) = run_onnx(path, {name: tokens[name] for name in inputs}, ("embedding",))
    if embedding.dtype != np.float32 or embedding.ndim != 2:
        raise InvalidInputError(
            f"expected a model whose output is float32 [n, dim], got {embedding.dtype} "
            f"{list(embedding.shape)}; export it again with one vector per text"
        )
    return embedding


def _check_query_model(query_model: _ForeignModel, text_model: _ForeignModel) -> None:
    """Raise InvalidInputError if query model and text model do not fit each other."""
    new, text = query_model.reading, text_model.reading
    for what, one, other in (
        ("inputs", ", ".join(query_model.inputs), ", ".join(text_model.inputs)),
        ("max_length", new.declared.max_length, text.declared.max_length),
        (
            "tokenizer",
            f"that of SHA-256 {sha256_bytes(new.tokenizer)[:12]}…",
            f"that of SHA-256 {sha256_bytes(text.tokenizer)[:12]}…",
        ),
        ("vectors", _describe(query_model.vectors), _describe(text_model.vectors)),
    ):
        if one != other:
            raise InvalidInputError(
                f"--query-encoder {new.source}: expected the same {what} as --text-encoder "
                f"has ({other}), got {one}. Give two models that were trained together"
            )


def _kind(vectors: Vectors) -> tuple[int, bool]:
    """Return the dimension, and whether all vectors have norm 1."""
    return vectors.shape[1], bool((np.abs(np.linalg.norm(vectors, axis=1) - 1) < 1e-3).all())


def _describe(vectors: Vectors) -> str:
    dim, unit = _kind(vectors)
    return f"dimension {dim} and {'norm 1' if unit else 'any norm'}"


def _share(release: ReleaseDraft, vectors: Vectors, file: Path) -> None:
    """Check that image and text encoder embed into one space."""
    dim, unit = _kind(vectors)
    embedder = release.embedder
    if embedder is None:
        release.embedder = PublishedEmbedder(
            dim=dim, metric="cosine" if unit else "squared_l2", unit=unit
        )
        release.method = "brought"
    elif (embedder.dim, embedder.unit) != (dim, unit):
        raise InvalidInputError(
            f"--text-encoder {file}: expected vectors of the image embedder's space, of dimension "
            f"{embedder.dim}{' and norm 1' if embedder.unit else ''}; got dimension {dim}"
            f"{' and norm 1' if unit else ' and any norm'}; use two models of one space, or "
            "publish them as two publications"
        )


def add_vectors(release: ReleaseDraft, name: str, dim: int) -> None:
    """Make the release a space of stored vectors whose model is not published.

    An example is an endpoint that was switched off. Vectors are compared by cosine.

    Args:
        release: the release, whose embedder and method "vectors" are set.
        name: the name of the model that computed the vectors, not empty.
        dim: their dimension, 1 to 65,536.

    Raises:
        ValidationError: the name or the dimension is not allowed; it is pydantic's.
    """
    release.embedder = PublishedEmbedder(dim=dim, metric="cosine", unit=False, vectors_of=name)
    release.method = "vectors"
