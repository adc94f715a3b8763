"""Add a text model that exists as ONNX, with its tokenizer, to a release.

Its weights stay unchanged. Pooling of token vectors and normalisation are appended inside the
graph, so that gateway, device and Triton run the same file and get vectors of the space.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, compose, helper, numpy_helper, shape_inference, version_converter

from nobackfill.digests import sha256_bytes
from nobackfill.errors import InvalidInputError, NotFoundError, VerificationError
from nobackfill.release.manifest import (
    LARGEST_LENGTH,
    PublishedEmbedder,
    TextEncoder,
    query_encoder_path,
    text_encoder_path,
    tokenizer_path,
)
from nobackfill.release.publishing.declaration import (
    Declaration,
    describe_assumptions,
    fingerprint_model,
    hash_model_files,
    read_declaration,
    tokenizer_bytes,
    tokenizer_file,
    weight_files,
)
from nobackfill.terminal import escape_hidden
from nobackfill.text import BatchTokenizer
from nobackfill.training.export.drafting import Release
from nobackfill.training.export.external import TEXT_MODEL
from nobackfill.training.export.onnx_export import run_onnx, strip
from nobackfill.training.export.probes import PROBE_TEXTS
from nobackfill.vectors import Vectors

TOKENS = ("input_ids", "attention_mask", "token_type_ids")
# The appended operators need at least this operator set.
_OPSET = 17
_IR = 8
_THEIRS = "model/"
# The mean over the tokens of the mask.
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
    """Give a text model inputs of TOKENS, int64 [n,t], and append pooling and normalisation.

    An older operator set is raised to 17. With mean pooling an `attention_mask` is added as input
    if the model has none. After an error the model may be changed in part.

    Args:
        model: the ONNX model; it is changed. Its last value is named `embedding`, and it has no
            declared output afterwards (see `declare_output`).
        declared: how its token vectors are pooled and normalised, and which output to use.

    Returns:
        The names of its inputs, of TOKENS.

    Raises:
        InvalidInputError: it uses other operators than ONNX's, inputs other than TOKENS, or no
            input_ids; or fixed numbers of texts or tokens; or its output is missing or cannot be
            pooled.
        RuntimeError, ConvertError: onnx cannot convert the operator set.
        IndexError: the model has no output at all.
    """
    _renew(model)
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in weights]
    names = [value.name for value in inputs]
    if "input_ids" not in names or set(names) - set(TOKENS):
        raise InvalidInputError(
            f"expected a text model with input_ids and no inputs other than {', '.join(TOKENS)}, "
            f"got {names}; export it again with these inputs"
        )
    del graph.input[:]
    for value in inputs:
        _free(value)
    if declared.pooling == "mean" and "attention_mask" not in names:
        inputs.append(_tokens("attention_mask"))
    graph.input.extend(inputs)
    # The prefix avoids names that this module adds.
    compose.add_prefix_graph(graph, _THEIRS, rename_inputs=False, inplace=True)
    pooled = _pooled(model, declared)
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
            f"expected a model with only ONNX's own operators, got the operator sets "
            f"{sorted(versions)}; export it again in float32, without a vendor's optimisations"
        )
    if versions["ai.onnx"] < _OPSET:
        model.CopyFrom(version_converter.convert_version(model, _OPSET))
    model.ir_version = max(model.ir_version, _IR)


def _free(value: onnx.ValueInfoProto) -> None:
    """Make the number and length of texts free."""
    kind = value.type.tensor_type
    fixed = [size.dim_value for size in kind.shape.dim if size.dim_value]
    if kind.elem_type != TensorProto.INT64 or len(kind.shape.dim) != 2 or fixed:
        raise InvalidInputError(
            f"input {value.name}: expected int64 [n, t] with a free number of texts n and of "
            f"tokens t, got {TensorProto.DataType.Name(kind.elem_type).lower()} with fixed sizes "
            f"{fixed}; export the model again with dynamic axes"
        )
    value.CopyFrom(_tokens(value.name))


def _tokens(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.INT64, ["n", "t"])


def _pooled(model: onnx.ModelProto, declared: Declaration) -> str:
    """Append pooling; return the name of a value float32 [n,dim]."""
    graph = model.graph
    outputs = [value.name.removeprefix(_THEIRS) for value in graph.output]
    output_name = declared.output or outputs[0]
    if output_name not in outputs:
        raise InvalidInputError(
            f"the declaration names the output {output_name!r}, but the model has only {outputs}; "
            "correct the declaration"
        )
    axes = _axes(model, _THEIRS + output_name)
    graph.node.append(
        helper.make_node("Cast", [_THEIRS + output_name], ["tokens_float"], to=TensorProto.FLOAT)
    )
    if axes == 2:
        return "tokens_float"
    if axes != 3 or declared.pooling == "none":
        raise InvalidInputError(
            f"output {output_name!r}: expected [n, dim], or [n, tokens, dim] with pooling mean or "
            f'cls, got {axes} axes with pooling {declared.pooling}; declare another one as "output"'
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
    for operator, sources, target, options in _MEAN:
        graph.node.append(helper.make_node(operator, sources, [target], **options))
    return "pooled"


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


def add_text_encoder(release: Release, source: Path, queries: Path | None = None) -> None:
    """Add a text model that exists as ONNX to the release, with its tokenizer.

    With an embedder of images it must share that embedder's space; alone it makes the release's
    space. It is run once on probe texts. A line on stderr says what was guessed if the model has no
    declaration. Publishing checks which operators the graph uses. The recipe gets the digests of
    the weights and the model's fingerprint. Files are written to the release's folder. After an
    error files may stay there.

    Args:
        release: the release in preparation.
        source: an ONNX file, or a folder with one, with `tokenizer.json` and its declaration
            (`NAME.json`, or the files that sentence-transformers exports).
        queries: another such model for queries, with the same tokenizer; None: none.

    Raises:
        NotFoundError: there is no ONNX file.
        InvalidInputError: a model cannot be read or run, has another form, or takes longer texts
            than a release may; it lacks its tokenizer; or it does not fit the embedder or the other
            text model.
        ConfigurationError: the extra `text` is not installed.
        ValidationError: a prefix has more than 1,024 characters, or the vectors have more than
            65,536 dimensions; it is pydantic's.
        ConvertError: onnx cannot convert an old operator set to this one; it is onnx's.
        OSError: a file cannot be written.
    """
    model = _put(release, source, "--text-encoder", text_encoder_path(release.number))
    _share(release, model.vectors, model.file)
    declared = model.declared
    entry: dict[str, object] = {
        "file": release.file(text_encoder_path(release.number)),
        "inputs": model.inputs,
        "length": declared.max_length,
        "query_prefix": declared.prefix_of_queries,
        "document_prefix": declared.prefix,
        "pooling": declared.pooling,
    }
    if queries is not None:
        query_model = _put(release, queries, "--query-encoder", query_encoder_path(release.number))
        _check_query_model(query_model, model)
        entry["query_file"] = release.file(query_encoder_path(release.number))
        entry["query_prefix"] = query_model.declared.prefix_of_queries
        release.recipe["query_encoder_sha256"] = hash_model_files(query_model.weights)
    release.local(tokenizer_path(release.number)).write_bytes(
        tokenizer_bytes(model.tokenizer, declared)
    )
    entry["tokenizer"] = release.file(tokenizer_path(release.number))
    release.text_encoder = TextEncoder.model_validate(entry)
    release.recipe["text_encoder_sha256"] = hash_model_files(model.weights)
    release.recipe[TEXT_MODEL] = fingerprint_model(model.weights, declared, model.tokenizer)


class _ForeignModel(NamedTuple):
    """A foreign model as the release's graph, and its vectors of the probes."""

    file: Path
    weights: list[Path]
    declared: Declaration
    tokenizer: Path
    inputs: tuple[str, ...]
    vectors: Vectors


def _put(release: Release, source: Path, option: str, published: str) -> _ForeignModel:
    file = _onnx_file(source, option)
    path, weights = release.local(published), weight_files(file)
    try:
        model = onnx.load(file)
        outputs = [output.name for output in model.graph.output]
        declared = read_declaration(file, outputs)
        if read_declaration(file, outputs, "query") != declared:
            raise InvalidInputError(
                "the model's Router takes queries another way than documents, and a release has "
                "one graph for each; export each route as a whole model, and name that of queries "
                "with --query-encoder"
            )
        outside = [f"module {layer.folder.name or layer.kind}" for layer in declared.layers]
        if set(declared.pooling_modes) - {"mean", "cls"} or len(declared.pooling_modes) > 1:
            outside.insert(0, f"pooling of {' with '.join(declared.pooling_modes)}")
        if outside:
            raise InvalidInputError(
                f"a release cannot apply {', '.join(outside)}; export the whole model, so "
                "that its graph has an output 'sentence_embedding'"
            )
        if declared.max_length > LARGEST_LENGTH:
            raise InvalidInputError(
                f"expected a model of texts of at most {LARGEST_LENGTH} tokens, but it is declared "
                f"for {declared.max_length}; set a smaller max_length in "
                f"{file.with_suffix('.json').name}"
            )
        tokenizer = tokenizer_file(file, declared)
        inputs = text_graph(model, declared)
        strip(model)
        vectors = _run(model, path, tokenizer, declared, inputs)
    except (OSError, DecodeError, onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        raise InvalidInputError(
            f"{option} {file}: cannot be read as an ONNX model ({error}); export the model again"
        ) from error
    except (InvalidInputError, VerificationError) as error:
        raise InvalidInputError(f"{option} {file}: {error}") from error
    if assumption := describe_assumptions(file, declared):
        print(escape_hidden(assumption), file=sys.stderr)
    return _ForeignModel(file, weights, declared, tokenizer, inputs, vectors)


def _check_query_model(query_model: _ForeignModel, text_model: _ForeignModel) -> None:
    """Raise InvalidInputError if query model and text model do not fit each other."""
    for what, one, other in (
        ("inputs", query_model.inputs, text_model.inputs),
        ("max_length", query_model.declared.max_length, text_model.declared.max_length),
        ("tokenizer", _tokenizer_digest(query_model), _tokenizer_digest(text_model)),
        ("dimension and norm", _kind(query_model.vectors), _kind(text_model.vectors)),
    ):
        if one != other:
            raise InvalidInputError(
                f"--query-encoder {query_model.file}: expected the same {what} as --text-encoder "
                f"has, {other}; got {one}; both models must belong together"
            )


def _tokenizer_digest(model: _ForeignModel) -> str:
    return sha256_bytes(tokenizer_bytes(model.tokenizer, model.declared))


def _kind(vectors: Vectors) -> tuple[int, bool]:
    """Return the dimension, and whether all vectors have norm 1."""
    return vectors.shape[1], bool((np.abs(np.linalg.norm(vectors, axis=1) - 1) < 1e-3).all())


def _onnx_file(source: Path, option: str) -> Path:
    """Return the ONNX file: given itself, or in a folder as exporters lay it out."""
    places = [source, source / _MODEL, source / "onnx" / _MODEL]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise NotFoundError(
            f"{option} {source}: expected an ONNX file, or a folder with {_MODEL} or "
            f"onnx/{_MODEL} in it, but there is none; export the text model there first"
        )
    return file


def _run(
    model: onnx.ModelProto, path: Path, tokenizer: Path, declared: Declaration,
    inputs: tuple[str, ...],
) -> Vectors:  # fmt: skip
    """Write the graph with its output's dimension; return the vectors of the probes."""
    data = tokenizer_bytes(tokenizer, declared)
    tokens = BatchTokenizer(data, declared.max_length, str(tokenizer)).tokens(
        [declared.prefix + text for text in PROBE_TEXTS]
    )
    feed = {name: tokens[name] for name in inputs}
    # The dimension is known only after a run, and a run needs a declared output.
    declare_output(model, None)
    onnx.save(model, path)
    (embedding,) = run_onnx(path, feed, ("embedding",))
    if embedding.dtype != np.float32 or embedding.ndim != 2:
        raise InvalidInputError(
            f"expected a model whose output is float32 [n, dim], got {embedding.dtype} "
            f"{list(embedding.shape)}; export it again with one vector per text"
        )
    declare_output(model, embedding.shape[1])
    onnx.save(model, path)
    return embedding


def _share(release: Release, vectors: Vectors, file: Path) -> None:
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


def add_vectors(release: Release, name: str, dim: int) -> None:
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
