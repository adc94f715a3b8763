"""Models that embed items, by what `--with` says; a function of the user's own Python is one.

ONNX files (onnx_model.py) and HTTP endpoints (endpoint.py) are imported when they are opened.
"""

import importlib
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Protocol

import numpy as np

from nobackfill.adopt.sources.source import QUERIES, even
from nobackfill.digests import sha256_bytes, sha256_file
from nobackfill.errors import (
    InvalidInputError,
    NotFoundError,
    UnusableItemsError,
    UnusableRowsError,
)
from nobackfill.vectors import Kind, Vectors, check_vectors


class Embedder(Protocol):
    """`fingerprint` names the model that makes the vectors: equal dimensions are not equal spaces.

    `kind`: what it reads; None where it takes either. `reads`: DOCUMENTS or QUERIES, by what is
    declared or by an encoder that is named behind it; empty where it reads both alike.
    """

    fingerprint: str
    kind: Kind | None
    reads: str

    def embed(self, items: list[str] | list[Path] | list[bytes]) -> Vectors:
        """Vectors [n, dim]. Raises UnusableItemsError where one of the items may be at fault, or
        their number; InvalidInputError, UnavailableError, BusyError for what no item can help."""


def open_embedder(
    model: str, *, name: str | None = None, patience: float = 120.0, queries: bool = False,
    pixels: Mapping[str, object] | None = None,
) -> Embedder:  # fmt: skip
    """An ONNX file, `module:function`, or the URL of an endpoint with the model's `name` there.
    `queries`: texts that ask are embedded, which some models read otherwise. `pixels`: what an ONNX
    file reads of images, as in Declaration, in place of what is said beside it.

    Raises NotFoundError, InvalidInputError, ConfigurationError.
    """
    if pixels and Path(model).suffix != ".onnx":
        raise InvalidInputError(f"{model}: {', '.join(pixels)} is of ONNX files that read images")
    if model.startswith(("http://", "https://")):
        from nobackfill.adopt.embedding.endpoint import Endpoint

        if name is None:
            raise InvalidInputError(
                "--with: name the model at the endpoint as well, with --model-name"
            )
        return Endpoint(model, name, patience=patience)
    if Path(model).suffix == ".onnx":
        from nobackfill.adopt.embedding.onnx_model import OnnxModel

        return OnnxModel(Path(model), queries=queries, pixels=pixels)
    if ":" in model:
        return PythonFunction(model)
    raise InvalidInputError(
        f"{model}: expected an ONNX file, module:function, or an endpoint's https:// address"
    )


def reading_of(embedder: Embedder) -> str:
    """Sentences for a person on how the model reads its items, which decides what the vectors are
    worth; empty where that is declared, or nobody here decides it."""
    return str(getattr(embedder, "told", ""))


class QueryEmbedder:
    """Queries of a space whose model reads its items alone: `encoder` has weights of its own. The
    queries are texts, the items texts or images. Vectors carry the fingerprint of `model`."""

    def __init__(self, model: Embedder, encoder: Embedder) -> None:
        self._encoder = encoder
        self.kind: Kind | None = encoder.kind
        self.fingerprint = model.fingerprint
        self.reads = f"{QUERIES} by {encoder.fingerprint}"

    def embed(self, items: list[str] | list[Path] | list[bytes]) -> Vectors:
        return self._encoder.embed(items)


_DIGEST = re.compile("[0-9a-f]{64}")


class PythonFunction:
    """`module:function`, the module found from the working folder as well. What names its model is
    the module's FINGERPRINT, or else the digest of the module's source, whose weights nobody knows.
    """

    kind: Kind | None = None
    reads = ""

    def __init__(self, name: str) -> None:
        module, _, function = name.partition(":")
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        try:
            found = importlib.import_module(module)
            self._function = getattr(found, function)
        except (ImportError, AttributeError) as error:
            raise NotFoundError(f"{name}: cannot be imported ({error})") from error
        if not callable(self._function):
            raise InvalidInputError(f"{name}: is no function")
        self._name = name
        self.fingerprint = _fingerprint(found, name)

    def embed(self, items: list[str] | list[Path] | list[bytes]) -> Vectors:
        try:
            made = self._function(items)
        except Exception as error:
            # Anything may come of the user's own code, and of one item of many.
            line = traceback.extract_tb(error.__traceback__)[-1]
            raise UnusableItemsError(
                f"{self._name}: {type(error).__name__} in line {line.lineno} of "
                f"{Path(line.filename).name} ({error})"
            ) from error
        try:
            rows = list(made)
            vectors = even(rows, [str(item) for item in items], self._name)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(
                f"{self._name}: expected numbers [n, dim], a vector for each item ({error})"
            ) from error
        if len(rows) != len(items):
            raise InvalidInputError(f"{self._name}: expected {len(items)} vectors, got {len(rows)}")
        try:
            return check_vectors(np.asarray(vectors), vectors.shape[1], what=self._name)
        except UnusableRowsError as error:
            raise UnusableItemsError(str(error)) from error


def _fingerprint(module: ModuleType, name: str) -> str:
    """64 hex digits, as FINGERPRINT has them or digested from it. Raises InvalidInputError."""
    declared = getattr(module, "FINGERPRINT", None)
    if declared is None:
        code = sha256_file(Path(module.__file__)) if module.__file__ else ""
        return sha256_bytes(f"{name}\n{code}".encode())
    if not isinstance(declared, str) or not declared:
        raise InvalidInputError(
            f"{name}: expected FINGERPRINT to be a text that changes with the model, its name and "
            f"version say, got {declared!r}"
        )
    return declared if _DIGEST.fullmatch(declared) else sha256_bytes(declared.encode())
