"""Open a model that embeds items: an ONNX file, an HTTP endpoint, or a Python function."""

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
    """A model that embeds items.

    Attributes:
        fingerprint: The digest that identifies the model; models of one dimension differ in it.
        kind: The kind of item that it reads, image or text; None for both.
        reads: DOCUMENTS or QUERIES for a model that encodes them in two ways, followed by the
            query encoder if there is one; empty for a model that encodes both alike.
    """

    fingerprint: str
    kind: Kind | None
    reads: str

    def embed(self, items: list[str] | list[Path] | list[bytes]) -> Vectors:
        """Embed items.

        Returns:
            Their vectors, float32 [n, dim].

        Raises:
            UnusableItemsError: The items, or their number, may be the cause.
            InvalidInputError: The model's output cannot be used, whatever the items are.
            UnavailableError: An endpoint does not answer.
            BusyError: An endpoint still asks to wait after the patience.
        """


def open_embedder(
    model: str, *, name: str | None = None, patience: float = 120.0, queries: bool = False,
    pixels: Mapping[str, object] | None = None,
) -> Embedder:  # fmt: skip
    """Open a model that embeds items.

    Args:
        model: An ONNX file, `module:function`, or the URL of an endpoint.
        name: The model's name at the endpoint; None elsewhere.
        patience: The most seconds to retry a batch at an endpoint.
        queries: Whether the texts are queries, which some models encode in another way.
        pixels: How an ONNX file reads images, as in `Declaration`, in place of the settings in
            its folder.

    Raises:
        NotFoundError: There is no such file, module or function.
        InvalidInputError: The model cannot be used, or an argument does not fit it.
        ConfigurationError: The URL is not https://, or holds a password.
    """
    if pixels and Path(model).suffix != ".onnx":
        raise InvalidInputError(
            f"{model}: {', '.join(pixels)} only applies to an ONNX file that reads images"
        )
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
    """Return sentences that tell the user how the model reads its items.

    Vectors are useless if it is wrong. Empty if the user declared it, or an endpoint decides it.
    """
    return str(getattr(embedder, "description", ""))


class QueryEmbedder:
    """Embeds the queries of a model that has a second encoder for them.

    Args:
        model: The model that embeds the items; the vectors get its fingerprint.
        encoder: The encoder of the queries, which are texts.
    """

    def __init__(self, model: Embedder, encoder: Embedder) -> None:
        self._encoder = encoder
        self.kind: Kind | None = encoder.kind
        self.fingerprint = model.fingerprint
        self.reads = f"{QUERIES} by {encoder.fingerprint}"

    def embed(self, items: list[str] | list[Path] | list[bytes]) -> Vectors:
        return self._encoder.embed(items)


_DIGEST = re.compile("[0-9a-f]{64}")


class PythonFunction:
    """A function of the user's own, `module:function`, that embeds items.

    The working folder is searched for the module, too. The fingerprint is the module's FINGERPRINT,
    or else a digest of its source, which does not change with the weights.

    Raises:
        NotFoundError: The function cannot be imported.
        InvalidInputError: It is no function, or FINGERPRINT is no text.
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
            raise InvalidInputError(f"{name}: expected a function, got another object")
        self._name = name
        self.fingerprint = _fingerprint(found, name)

    def embed(self, items: list[str] | list[Path] | list[bytes]) -> Vectors:
        try:
            made = self._function(items)
        except Exception as error:
            # The user's code may raise any error, also because of one item of many.
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
    """Return 64 hex digits: FINGERPRINT, its digest, or a digest of the module's source.

    Raises:
        InvalidInputError: FINGERPRINT is no text, or empty.
    """
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
