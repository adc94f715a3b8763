"""Bring your own: a text model that exists as ONNX, with its tokenizer, becomes a release's."""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from google.protobuf.message import DecodeError

from nobackfill.digests import sha256_file
from nobackfill.errors import InvalidInputError, NotFoundError, VerificationError
from nobackfill.release.encoders import LARGEST_LENGTH
from nobackfill.release.manifest import Embedder, TextEncoder
from nobackfill.release.paths import query_encoder_path, text_encoder_path, tokenizer_path
from nobackfill.release.publishing.declaration import (
    Declaration,
    digest,
    fingerprint,
    guess,
    read_declaration,
    tokenizer_file,
    weight_files,
)
from nobackfill.terminal import visible
from nobackfill.tokenizing import Tokenizing
from nobackfill.training.export.drafting import Release
from nobackfill.training.export.onnx_export import run_onnx, strip
from nobackfill.training.export.onnx_upgrade import TEXT_MODEL
from nobackfill.training.export.probe_texts import PROBE_TEXTS
from nobackfill.training.export.text_graph import declare_output, text_graph
from nobackfill.vectors import Vectors

_MODEL = "model.onnx"


def add_text_encoder(release: Release, source: Path, queries: Path | None = None) -> None:
    """Put a text model into the release: an ONNX file, or a folder with one, with `tokenizer.json`
    and what is declared about it (`NAME.json`, or the files that sentence-transformers exports).
    `queries`: another such model, for the texts that ask; its tokenizer is the same.

    Beside an embedder of images it shares that one's space; else it makes the release's. Raises
    NotFoundError, InvalidInputError for another form; what a graph may compute is checked when it
    is published.
    """
    made = _put(release, source, "--text-encoder", text_encoder_path(release.number))
    _share(release, made.vectors, made.file)
    declared = made.declared
    said: dict[str, object] = {
        "file": release.file(text_encoder_path(release.number)),
        "inputs": made.inputs,
        "length": declared.max_length,
        "query_prefix": declared.asks_with,
        "document_prefix": declared.prefix,
        "pooling": declared.pooling,
    }
    if queries is not None:
        asking = _put(release, queries, "--query-encoder", query_encoder_path(release.number))
        _check_asking(asking, made)
        said["query_file"] = release.file(query_encoder_path(release.number))
        said["query_prefix"] = asking.declared.asks_with
        release.recipe["query_encoder_sha256"] = digest(asking.weights)
    release.local(tokenizer_path(release.number)).write_bytes(made.tokenizer.read_bytes())
    said["tokenizer"] = release.file(tokenizer_path(release.number))
    release.text_encoder = TextEncoder.model_validate(said)
    release.recipe["text_encoder_sha256"] = digest(made.weights)
    release.recipe[TEXT_MODEL] = fingerprint(made.weights, declared, made.tokenizer)


class _Made(NamedTuple):
    """A model of others as the graph that a release has, and what it gives for the probes."""

    file: Path
    weights: list[Path]
    declared: Declaration
    tokenizer: Path
    inputs: tuple[str, ...]
    vectors: Vectors


def _put(release: Release, source: Path, option: str, published: str) -> _Made:
    file = _found(source, option)
    path, weights = release.local(published), weight_files(file)
    try:
        model = onnx.load(file)
        declared = read_declaration(file, [output.name for output in model.graph.output])
        if declared.max_length > LARGEST_LENGTH:
            raise InvalidInputError(
                f"expected texts of at most {LARGEST_LENGTH} tokens, got {declared.max_length}; "
                f"write a smaller max_length into {file.with_suffix('.json').name}"
            )
        tokenizer = tokenizer_file(file, declared)
        inputs = text_graph(model, declared)
        strip(model)
        vectors = _run(model, path, tokenizer, declared, inputs)
    except (OSError, DecodeError, onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        raise InvalidInputError(f"{option} {file}: cannot be read as ONNX ({error})") from error
    except (InvalidInputError, VerificationError) as error:
        raise InvalidInputError(f"{option} {file}: {error}") from error
    if told := guess(file, declared):
        print(visible(told), file=sys.stderr)
    return _Made(file, weights, declared, tokenizer, inputs, vectors)


def _check_asking(asking: _Made, made: _Made) -> None:
    """Raises InvalidInputError where one release cannot have both."""
    for what, one, other in (
        ("inputs", asking.inputs, made.inputs),
        ("max_length", asking.declared.max_length, made.declared.max_length),
        ("tokenizer", sha256_file(asking.tokenizer), sha256_file(made.tokenizer)),
        ("dimension and norm", _kind(asking.vectors), _kind(made.vectors)),
    ):
        if one != other:
            raise InvalidInputError(
                f"--query-encoder {asking.file}: expected the {what} of --text-encoder, {other}; "
                f"got {one}"
            )


def _kind(vectors: Vectors) -> tuple[int, bool]:
    """Dimension, and whether all have norm 1."""
    return vectors.shape[1], bool((np.abs(np.linalg.norm(vectors, axis=1) - 1) < 1e-3).all())


def _found(source: Path, option: str) -> Path:
    """An ONNX file: named, or in a folder as exports have it."""
    places = [source, source / _MODEL, source / "onnx" / _MODEL]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise NotFoundError(
            f"{option} {source}: expected an ONNX file, or a folder with {_MODEL} or "
            f"onnx/{_MODEL} in it; found none"
        )
    return file


def _run(
    model: onnx.ModelProto, path: Path, tokenizer: Path, declared: Declaration,
    inputs: tuple[str, ...],
) -> Vectors:  # fmt: skip
    """Write the graph with its output's dimension, and the probes' vectors."""
    tokens = Tokenizing(tokenizer.read_bytes(), declared.max_length, str(tokenizer)).tokens(
        [declared.prefix + text for text in PROBE_TEXTS]
    )
    feed = {name: tokens[name] for name in inputs}
    # What it gives is only known by running it, and what is run has to have an output.
    declare_output(model, None)
    onnx.save(model, path)
    (embedding,) = run_onnx(path, feed, ("embedding",))
    if embedding.dtype != np.float32 or embedding.ndim != 2:
        raise InvalidInputError(
            f"expected outputs float32 [n, dim], got {embedding.dtype} {list(embedding.shape)}"
        )
    declare_output(model, embedding.shape[1])
    onnx.save(model, path)
    return embedding


def _share(release: Release, vectors: Vectors, file: Path) -> None:
    """See that both encoders embed into one space."""
    dim, unit = _kind(vectors)
    made = release.embedder
    if made is None:
        release.embedder = Embedder(dim=dim, metric="cosine" if unit else "squared_l2", unit=unit)
        release.method = "brought"
    elif (made.dim, made.unit) != (dim, unit):
        raise InvalidInputError(
            f"--text-encoder {file}: expected vectors of the embedder's space, of dimension "
            f"{made.dim}{' and norm 1' if made.unit else ''}; got dimension {dim}"
            f"{' and norm 1' if unit else ', of any norm'}"
        )


def add_vectors(release: Release, name: str, dim: int) -> None:
    """Make the release the space of vectors that `name` made, of which no model is published: an
    endpoint that was switched off, say. Vectors are compared by their directions."""
    release.embedder = Embedder(dim=dim, metric="cosine", unit=False, vectors_of=name)
    release.method = "vectors"
