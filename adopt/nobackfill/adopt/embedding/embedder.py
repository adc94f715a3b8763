"""Open a model that embeds items: an ONNX file, a folder, an HTTP endpoint, a Python function."""

import importlib
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Protocol

import numpy as np

from nobackfill.adopt.sources.source import QUERIES, stack_vectors
from nobackfill.digests import sha256_bytes, sha256_file
from nobackfill.errors import (
    InvalidInputError,
    NotFoundError,
    UnusableItemsError,
    UnusableRowsError,
)
from nobackfill.release.manifest import TextRole
from nobackfill.vectors import InputKind, Vectors, check_vectors


class Embedder(Protocol):
    """A model that embeds items.

    Attributes:
        fingerprint: The digest that identifies the model; models of one dimension differ in it.
        input_kind: The kind of item that it reads, "image" or "text"; None for any.
        text_role: For a model that encodes documents and queries in two ways, the role in which
            this object reads texts: "documents", "queries", or "queries by " and the fingerprint
            of a query encoder. Empty for a model that encodes all texts in one way.
    """

    fingerprint: str
    input_kind: InputKind | None
    text_role: str

    def embed(self, items: list[str] | list[Path] | list[bytes]) -> Vectors:
        """Embed items in one call of the model.

        It may block for `patience` seconds and more. Do not call it from two threads at once.

        Args:
            items: n texts, or n images as paths or encoded bytes; at least one.

        Returns:
            Their vectors, float32 [n, dim], finite, in the order of `items`.

        Raises:
            UnusableItemsError: An item cannot be embedded, or there are too many; fewer items at a
                time show which one.
            InvalidInputError: The model's output cannot be used, whatever the items are.
            UnavailableError: An endpoint does not answer.
            BusyError: An endpoint is still busy after `patience` seconds.
            NotPermittedError: An endpoint refuses the key.
        """


def open_embedder(
    model: str, *, name: str | None = None, patience: float = 120.0, queries: bool = False,
    pixels: Mapping[str, object] | None = None,
) -> Embedder:  # fmt: skip
    """Open a model that embeds items. An endpoint gets no request yet.

    Args:
        model: The path of an ONNX file, of a folder that sentence-transformers or model2vec saved,
            `module:function`, or the URL of an endpoint. The module's code is run, and any error of
            it but ImportError and AttributeError passes through; the working folder is added to
            Python's path. A folder without an ONNX file is exported at the first call, which takes
            seconds to minutes.
        name: The model's name at an endpoint; other models ignore it.
        patience: Seconds for which one request to an endpoint is repeated. At least 0; 0 tries
            once.
        queries: Whether the texts are queries, which some ONNX models encode in another way.
        pixels: Fields of `Declaration` by name, such as {"size": 224}: how an ONNX file reads
            images, in place of the files in its folder. None: as these files declare.

    Raises:
        NotFoundError: There is no such file, module or function.
        InvalidInputError: The file is no usable model, an endpoint has no `name`, `pixels` are
            given for another kind of model, or the text is none of these forms. The export of a
            folder fails, or gives other vectors than its library.
        ConfigurationError: The URL is not https:// (or http:// on this machine), or holds a
            password; or an extra is not installed.
        BusyError: Another process exports the folder for longer than an hour.
        CannotWriteError: The exported file cannot be written.
        OSError: A file of the model cannot be read, or a path is too long.
        ValueError, TypeError: A module's name is empty, or begins with a dot.
        Exception: Any other error of the code of a module.
    """
    if pixels and Path(model).suffix != ".onnx":
        raise InvalidInputError(
            f"{model}: expected no {', '.join(f'--{one}' for one in pixels)}, because only an ONNX "
            "file that reads images has such settings; leave them out"
        )
    if model.startswith(("http://", "https://")):
        from nobackfill.adopt.embedding.endpoint import Endpoint

        if name is None:
            raise InvalidInputError(
                f"{model.partition('?')[0]}: an endpoint serves several models; name one with "
                "--model-name (`migrate`: --new-name, --old-name)"
            )
        return Endpoint(model, name, patience=patience)
    if Path(model).suffix == ".onnx":
        from nobackfill.adopt.embedding.onnx_model import OnnxModel

        return OnnxModel(Path(model), queries=queries, pixels=pixels)
    if Path(model).is_dir():
        return _open_folder(Path(model), queries=queries)
    if ":" in model:
        return PythonFunction(model)
    raise InvalidInputError(
        f"{model}: expected a model as FILE.onnx, the folder of a model, module:function, or the "
        "https:// address of an endpoint; correct the name"
    )


def _open_folder(folder: Path, *, queries: bool) -> Embedder:
    """Open a folder of sentence-transformers or model2vec.

    A Transformer with `onnx/model.onnx` or `model.onnx` is opened like that file; without one, it
    is exported once.
    """
    from nobackfill.adopt.embedding.onnx_model import OnnxModel
    from nobackfill.adopt.embedding.static_model import StaticModel, open_model2vec
    from nobackfill.release.publishing.text_folder import TextFolder, is_model2vec

    if is_model2vec(folder):
        return open_model2vec(folder, queries=queries)
    model = TextFolder(folder)
    if (graph := model.shipped_onnx_file) is not None:
        return OnnxModel(graph, queries=queries)
    files = model.files_by_role
    role: TextRole = "query" if queries else "document"
    if model.is_static(role):
        return StaticModel(files, queries=queries)

    def open_graph(graph: Path, role: TextRole) -> OnnxModel:
        return OnnxModel(graph, queries=role == "query", files=files)

    return open_graph(model.onnx_file(role, lambda *graph: open_graph(*graph).embed), role)


def describe_preparation(embedder: Embedder) -> str:
    """Return sentences on how a model prepares its items, for the user to check.

    Vectors are useless if the preparation is wrong.

    The model is not run.

    Returns:
        Size, crop and normalisation of images, or assumptions about texts without a declaration.
        Empty for texts with a declaration, for endpoints and for Python functions.
    """
    return str(getattr(embedder, "description", ""))


class QueryEmbedder:
    """The Embedder of queries for a model that has a second encoder for them.

    Its errors are those of the encoder.

    Args:
        model: The model that embeds the items. It is not called; its fingerprint marks the vectors.
        encoder: The encoder of the queries.
    """

    def __init__(self, model: Embedder, encoder: Embedder) -> None:
        self._encoder = encoder
        self.input_kind: InputKind | None = encoder.input_kind
        self.fingerprint = model.fingerprint
        self.text_role = f"{QUERIES} by {encoder.fingerprint}"

    def embed(self, items: list[str] | list[Path] | list[bytes]) -> Vectors:
        """Embed queries by the query encoder.

        Args:
            items: As for `Embedder.embed`.

        Returns:
            float32 [n, dim] of the encoder.

        Raises:
            UnusableItemsError: A query cannot be embedded.
            InvalidInputError: The encoder's output cannot be used.
            UnavailableError: An endpoint does not answer.
            BusyError: An endpoint is still busy after `patience` seconds.
            NotPermittedError: An endpoint refuses the key.
        """
        return self._encoder.embed(items)


_DIGEST = re.compile("[0-9a-f]{64}")


class PythonFunction:
    """The Embedder of a user's own Python function, `module:function`.

    The function gets a list of texts or of paths, and returns numbers [n, dim]. Opening imports the
    module; the working folder is put first on Python's path. The fingerprint is the module's
    FINGERPRINT, or else a digest of its source code, which does not change with the weights.

    Other errors of the module's own code pass through.

    Args:
        name: `module:function`.

    Raises:
        NotFoundError: The function cannot be imported.
        InvalidInputError: The name leads to no function, or FINGERPRINT is no text or empty.
        ValueError, TypeError: The module's name is empty, or begins with a dot.
        Exception: Any other error of the module's own code.
    """

    input_kind: InputKind | None = None
    text_role = ""

    def __init__(self, name: str) -> None:
        module, _, function = name.partition(":")
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        try:
            found = importlib.import_module(module)
            self._function = getattr(found, function)
        except (ImportError, AttributeError) as error:
            raise NotFoundError(
                f"{name}: cannot be imported as module:function ({error}); run the command in the "
                "module's folder"
            ) from error
        if not callable(self._function):
            kind = type(self._function).__name__
            raise InvalidInputError(
                f"{name}: expected a function, got an object of the type {kind}; name a function, "
                "as module:function"
            )
        self._name = name
        self.fingerprint = _fingerprint(found, name)

    def embed(self, items: list[str] | list[Path] | list[bytes]) -> Vectors:
        """Call the function; an exception of it becomes an error that names its line.

        Nothing is normalised, and a zero vector passes.

        Args:
            items: n texts or paths, at least one. The function gets this very list.

        Returns:
            float32 [n, dim], a copy.

        Raises:
            UnusableItemsError: The function raises, or a vector holds NaN or infinity.
            InvalidInputError: It returns no numbers [n, dim], or not one vector for each item.
        """
        try:
            made = self._function(items)
        except Exception as error:
            # The user's code may raise any error, also because of one item of many.
            line = traceback.extract_tb(error.__traceback__)[-1]
            raise UnusableItemsError(
                f"{self._name}: the function raised {type(error).__name__} in line {line.lineno} "
                f"of {Path(line.filename).name} ({error}); correct the function, or leave the item "
                "out"
            ) from error
        try:
            rows = list(made)
            if len(rows) != len(items):
                raise InvalidInputError(
                    f"{self._name}: expected the function to return {len(items)} vectors, one for "
                    f"each item, got {len(rows)}; correct the function"
                )
            vectors = stack_vectors(rows, [str(item) for item in items], self._name)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(
                f"{self._name}: expected the function to return numbers [n, dim], one vector for "
                f"each item ({error}); correct the function"
            ) from error
        try:
            return check_vectors(np.asarray(vectors), vectors.shape[1], error_name=self._name)
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
            f"{name}: expected FINGERPRINT in the function's module to be a text that changes with "
            f'the model, for example "name, version 2"; got {declared!r}'
        )
    return declared if _DIGEST.fullmatch(declared) else sha256_bytes(declared.encode())
