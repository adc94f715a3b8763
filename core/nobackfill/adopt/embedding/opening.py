"""Embedders by what `--with` says."""

from collections.abc import Mapping
from pathlib import Path

from nobackfill.adopt.embedding.embedder import Embedder
from nobackfill.errors import InvalidInputError


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
        from nobackfill.adopt.embedding.python_function import PythonFunction

        return PythonFunction(model)
    raise InvalidInputError(
        f"{model}: expected an ONNX file, module:function, or an endpoint's https:// address"
    )


def reading(embedder: Embedder) -> str:
    """Sentences for a person on how the model reads its items, which decides what the vectors are
    worth; empty where that is declared, or nobody here decides it."""
    from nobackfill.adopt.embedding.onnx_model import OnnxModel

    return embedder.told if isinstance(embedder, OnnxModel) else ""
