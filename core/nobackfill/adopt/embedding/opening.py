"""Embedders by what `--with` says."""

from pathlib import Path

from nobackfill.adopt.embedding.embedder import Embedder
from nobackfill.errors import InvalidInputError


def open_embedder(
    model: str, *, name: str | None = None, patience: float = 120.0, queries: bool = False
) -> Embedder:
    """An ONNX file, `module:function`, or the URL of an endpoint with the model's `name` there.
    `queries`: texts that ask are embedded, which some models read otherwise.

    Raises NotFoundError, InvalidInputError, ConfigurationError.
    """
    if model.startswith(("http://", "https://")):
        from nobackfill.adopt.embedding.endpoint import Endpoint

        if name is None:
            raise InvalidInputError(
                "--with: name the model at the endpoint as well, with --model-name"
            )
        return Endpoint(model, name, patience=patience)
    if Path(model).suffix == ".onnx":
        from nobackfill.adopt.embedding.onnx_model import OnnxModel

        return OnnxModel(Path(model), queries=queries)
    if ":" in model:
        from nobackfill.adopt.embedding.python_function import PythonFunction

        return PythonFunction(model)
    raise InvalidInputError(
        f"{model}: expected an ONNX file, module:function, or an endpoint's https:// address"
    )
